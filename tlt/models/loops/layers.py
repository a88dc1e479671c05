"""A decoder's layers in one call of compiled loops: for few tokens, PyTorch's operations take longer than the
arithmetic.

    x ─▶ [ norm ─▶ qkv ─▶ rotate, store, attend ─▶ add
           norm ─▶ gate, up, silu ─▶ down, add ]  × layers ─▶ norm

Between products numbers are float32; with weights in bfloat16 a product reads its inputs rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from tlt.base import loops
from tlt.models.loops.attention import CompiledAttention, Heads
from tlt.models.loops.blocks import LANES
from tlt.models.loops.items import compiled_item
from tlt.models.loops.products import PRODUCTS_PER_THREAD, Panels
from tlt.models.loops.stages import CACHE, CALL, CAPTURED, LAYER, STAGES, compiled, compiled_layers


class Sizes(Heads, Protocol):
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_qkv(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Norm(Protocol):
    weight: Tensor


class LinearWeights(Protocol):
    panels: Panels | None
    bias: Tensor | None


class LayerWeights(Protocol):
    """input_norms: of what attention reads, a norm a vector."""

    qk_norm_weight: Tensor | None

    @property
    def input_norms(self) -> Mapping[str, Norm]: ...
    @property
    def qkv_linear(self) -> LinearWeights: ...
    @property
    def output_linear(self) -> LinearWeights: ...
    @property
    def mlp_norm(self) -> Norm: ...
    @property
    def gate_up_linear(self) -> LinearWeights: ...
    @property
    def down_linear(self) -> LinearWeights: ...


def fills_panels(config: Sizes) -> bool:
    """Whether no panel of the layers is padded."""
    sizes = (config.hidden_size, config.intermediate_size, config.num_qkv * config.head_dim)
    return all(size % LANES == 0 for size in sizes)


class CompiledLayers:
    """final_norm: after the last layer; None: there is none."""

    def __init__(self, config: Sizes, layers: Sequence[LayerWeights], final_norm: Norm | None) -> None:
        self.config, self.layers, self.final_norm = config, layers, final_norm
        self.num_read = _panels(layers[0].qkv_linear).num_in
        self.dtype = _panels(layers[0].down_linear).weights.dtype
        self.gains: list[Tensor] = []  # that the table points to
        self.table_LC: Any = None

    def serves(self, attend: Any) -> TypeGuard[CompiledAttention]:
        return isinstance(attend, CompiledAttention)

    def loaded(self) -> None:
        self.table_LC = None

    def _fill_table(self) -> None:
        self.gains = []

        def keep(*gains: Tensor | None) -> int:
            known = [gain.float().flatten() for gain in gains if gain is not None]
            self.gains.append(torch.cat([torch.empty(0), *known]))
            return self.gains[-1].data_ptr() if known else 0

        rows = [
            {
                "input_gains": keep(*(norm.weight for norm in layer.input_norms.values())),
                "num_norms": len(layer.input_norms),
                "qkv": _panels(layer.qkv_linear).address,
                "qkv_bias": keep(layer.qkv_linear.bias),
                "qk_gains": keep(layer.qk_norm_weight),
                "attended": _panels(layer.output_linear).address,
                "mlp_gains": keep(layer.mlp_norm.weight),
                "gate_up": _panels(layer.gate_up_linear).address,
                "down": _panels(layer.down_linear).address,
            }
            for layer in self.layers
        ]
        self.table_LC = np.array([[row.get(name, 0) for name in LAYER] for row in rows], np.int64)
        self.final_gains = keep(None if self.final_norm is None else self.final_norm.weight)

    def run(
        self,
        x_NE: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: CompiledAttention,
        capture: Sequence[int] = (),
        read_NI: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(outputs, captured_NF), as `Target.forward_capturing`. read_NI: see `run_layer`."""
        N, E, num_layers = len(x_NE), self.config.hidden_size, len(self.layers)
        x_NE = x_NE.float().clone()
        read_NI = None if read_NI is None else read_NI.float().contiguous()
        cos_ND, sin_ND = (part.reshape(N, -1).float() for part in rope)
        captured_NF = torch.empty(N, len(capture) * E)
        features_NE = torch.empty(N, E)
        counters = np.zeros((self.num_counted, 2), np.int64)
        addresses = {
            "x": x_NE.data_ptr(),
            "read": 0 if read_NI is None else read_NI.data_ptr(),
            "cos": cos_ND.data_ptr(),
            "sin": sin_ND.data_ptr(),
            "features": features_NE.data_ptr(),
            "counters": loops.address_of(counters),
            "captured_width": len(capture) * E,
        }
        num_threads = self.num_threads(N, self.num_weights)
        call, room = self.prepare(N, addresses, attend, num_threads)
        assert self.table_LC is not None
        for place, index in enumerate(capture):
            if index < num_layers:
                self.table_LC[index, CAPTURED] = captured_NF.data_ptr() + 4 * place * E
        loops.Loop(compiled(), call, num_threads).run()
        del room  # which the call has pointed to
        dtype = self.dtype
        outputs_NE = (features_NE if self.final_gains else x_NE).to(dtype)
        if set(capture) <= {num_layers}:
            return outputs_NE, outputs_NE
        for place, index in enumerate(capture):
            if index == num_layers:
                captured_NF[:, place * E : (place + 1) * E] = outputs_NE
        return outputs_NE, captured_NF.to(dtype)

    def prepare(
        self, num_tokens: int, given: Mapping[str, int], attend: CompiledAttention, num_threads: int
    ) -> tuple[Any, Tensor]:
        """Returns the record of a run that captures nothing, and memory for it."""
        if self.table_LC is None:
            self._fill_table()
        c, table_LC = self.config, self.table_LC
        assert table_LC is not None
        table_LC[:, CAPTURED] = 0
        table_LC[:, CACHE] = [layer.data_ptr() for layer in attend.layers]
        sizes = {
            "normed": max(self.num_read, c.hidden_size),
            "qkv": c.num_qkv * c.head_dim,
            "mixed": c.num_heads * c.head_dim,
            "gate_up": 2 * c.intermediate_size,
        }
        room, addresses = loops.room_for({name: num_tokens * size for name, size in sizes.items()})
        numbers = {
            "num_items": num_threads,
            "multiply": _panels(self.layers[0].down_linear).multiply_at,
            "attend": compiled_item(self.dtype),
            "run_layers": compiled_layers(self.dtype),
            "attention": loops.address_of(attend.call),
            "layers": loops.address_of(table_LC),
            "final_gains": self.final_gains,
            "num_layers": len(self.layers),
            "num_tokens": num_tokens,
            "hidden": c.hidden_size,
            "num_read": self.num_read,
            "intermediate": c.intermediate_size,
            "parts": 1 if num_threads == 1 else 2 * num_threads,
            "eps": c.rms_norm_eps,
        }
        return loops.record(CALL, {**numbers, **addresses, **given}), room

    @property
    def num_counted(self) -> int:
        return STAGES * len(self.layers) + 1

    @property
    def num_weights(self) -> int:
        c = self.config
        return c.hidden_size * (2 * c.num_heads * c.head_dim + 3 * c.intermediate_size)

    def num_threads(self, num_tokens: int, num_weights: int) -> int:
        """num_weights: of one pass through the stages of a layer."""
        wanted = 1 + num_tokens * num_weights // (STAGES * PRODUCTS_PER_THREAD)
        return min(torch.get_num_threads(), wanted)


def _panels(linear: LinearWeights) -> Panels:
    assert linear.panels is not None
    return linear.panels
