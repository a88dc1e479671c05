"""Grows the tensors of a small model into a large geometry that computes the same function (as Net2Net, arXiv
1511.05641).

    hidden size e → E    The small model's dimensions come first, the others are empty. The mean of RMSNorm is
                         e/E of the small one: its weights are scaled by √(e/E), and eps by e/E (grow_config).
    head size d → D      The rotary pair (i, i + d/2) moves to the same frequency, (i·D/d, D/2 + i·D/d).
                         Scores are divided by √D, so queries are scaled by √(D/d).
    heads h → H          A query moves to a head with copies of its keys and values (geometry.py).
    MLP f → F            Further units write nothing.
    layers l → L         Further layers write nothing.
    vocabulary v → V     The last hidden dimension, the constant, is the same small number for every token.
                         The head of the unused ids reads it with a large negative weight: they are never
                         sampled.

"Empty" and "nothing" are not zeros but tiny noise, because zeros could be faster. The error is of second
order: noise returns to the small model's dimensions only through two matrices of noise. Every tensor is made
on access.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.geometry import kv_sources, query_places
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import expected_shapes

NOISE = 1e-4
"""Share of a matrix's root mean square. Its square, times some hundred paths, is below float32's rounding."""

CONSTANT = 1e-5
"""Share of the size of an embedding or a feature. Its square enters the mean of a norm: 1e-12 of it at hidden
size 100."""

UNUSED_LOGIT = -100.0
"""Upper bound of the logits of unused ids. With 150,000 of them, one is sampled once in 1e30 tokens."""

NUM_PROBES = 64
"""Tokens on which the size of the residual stream is measured."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor.

    size: of the grown tensor.
    places: indices of the small tensor's entries in the grown one.
    sources: the small tensor's entries that go there; None: all, in order.
    """

    size: int
    places: Tensor
    sources: Tensor | None = None

    @staticmethod
    def first(num: int, size: int) -> Axis:
        """Returns the axis whose entries keep their indices."""
        return Axis(size, torch.arange(num))

    @staticmethod
    def side_by_side(*parts: Axis) -> Axis:
        """Returns the axis of vectors that are concatenated. None of them has `sources`."""
        size, places = 0, []
        for part in parts:
            places.append(size + part.places)
            size += part.size
        return Axis(size, torch.cat(places))


@dataclass(frozen=True)
class Form:
    """How one kind of tensor grows: its dimensions, and a factor on its values.

    is_norm: new entries are as large as the rest, because their inputs are noise already.
    """

    axes: tuple[Axis, ...]
    factor: float = 1.0
    is_norm: bool = False

    def grow(self, values: Tensor, noise: Tensor) -> Tensor:
        """Writes the values over the noise, which has the grown tensor's shape, and returns it."""
        for dim, axis in enumerate(self.axes):
            values = values if axis.sources is None else values.index_select(dim, axis.sources)
        places = torch.meshgrid(*(axis.places.to(noise.device) for axis in self.axes), indexing="ij")
        noise[places] = (values.double() * self.factor).to(noise.device, noise.dtype)
        return noise

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True)
class Widening:
    """How the tensors of decoder layers grow from the small config to the grown one.

    num_read: hidden states that attention reads side by side.
    """

    small: ModelConfig
    grown: ModelConfig
    num_read: int = 1

    @property
    def constant(self) -> int:
        """The hidden dimension that holds the constant."""
        return self.grown.hidden_size - 1

    @property
    def norm_factor(self) -> float:
        return math.sqrt(self.small.hidden_size / self.grown.hidden_size)

    @property
    def hidden(self) -> Axis:
        return Axis.first(self.small.hidden_size, self.grown.hidden_size)

    @property
    def norm(self) -> Form:
        return Form((self.hidden,), self.norm_factor, is_norm=True)

    def constant_gain(self, small: Mapping[str, Tensor], residual: float) -> float:
        """Returns the constant's weight in the norm before the head. It scales the constant to a feature, so
        that the logits of unused ids are UNUSED_LOGIT where the residual stream is as large as `residual`.

        small: the small model's tensors.
        """
        feature, embedding = rms(small["model.norm.weight"]), rms(small["model.embed_tokens.weight"])
        return feature * residual / embedding * self.norm_factor

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The form of every tensor of a layer, by its name there."""
        small, grown, hidden = self.small, self.grown, self.hidden
        read = Axis.side_by_side(*[hidden] * self.num_read)
        mlp = Axis.first(small.intermediate_size, grown.intermediate_size)
        head, size = Axis.first(small.head_dim, grown.head_dim), grown.head_dim / small.head_dim
        rotary = Axis(grown.head_dim, _rotary_places(small.head_dim, grown.head_dim))
        query, key, value = self._queries(rotary), self._keys(rotary), self._keys(head)
        # Qwen3 norms queries and keys over D with the eps of the hidden size. `matched` keeps the eps's
        # relative size, and else cancels out. The mean is d/D of the small one: so queries have their √(D/d),
        # and keys are divided by it.
        matched = math.sqrt(size) * self.norm_factor if grown.qk_norm else 1.0
        of_query = matched if grown.qk_norm else math.sqrt(size)
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        forms = {f"{name}.weight": self.norm for name in norms}
        for name, axis, factor in (("q", query, of_query), ("k", key, matched), ("v", value, 1.0)):
            forms[f"self_attn.{name}_proj.weight"] = Form((axis, read), factor)
            forms[f"self_attn.{name}_proj.bias"] = Form((axis,), factor)
        forms["self_attn.q_norm.weight"] = Form((rotary,), 1.0, is_norm=True)
        forms["self_attn.k_norm.weight"] = Form((rotary,), 1 / math.sqrt(size), is_norm=True)
        forms["self_attn.o_proj.weight"] = Form((hidden, self._queries(head)))
        forms["mlp.gate_proj.weight"] = forms["mlp.up_proj.weight"] = Form((mlp, hidden))
        forms["mlp.down_proj.weight"] = Form((hidden, mlp))
        return forms

    def _queries(self, within: Axis) -> Axis:
        """Returns the axis of all query heads, concatenated. within: the dimensions of a head."""
        heads = torch.tensor(query_places(self.small, self.grown))
        return Axis(self.grown.num_heads * within.size, _inside(heads, within.size, within.places))

    def _keys(self, within: Axis) -> Axis:
        """Returns the axis of all kv heads, concatenated. within: the dimensions of a head."""
        heads, num = torch.tensor(kv_sources(self.small, self.grown)), self.small.head_dim
        places = _inside(torch.arange(len(heads)), within.size, within.places)
        return Axis(self.grown.num_kv_heads * within.size, places, _inside(heads, num, torch.arange(num)))

    def grow(
        self, name: str, layer: Mapping[str, Tensor], noise: FillNoise, seed: str, is_idle: bool = False
    ) -> Tensor:
        """Returns a layer's tensor.

        layer: the small layer's tensors, by their names within it.
        seed: decides the noise.
        is_idle: the layer is a further one: noise of the sizes of `layer`, and norms.
        """
        form, like = self.forms[name], layer.get(name)
        if like is None:  # a bias that the small model lacks: zero for its heads
            weight = layer[name.removesuffix("bias") + "weight"]
            like, size = torch.zeros(len(weight), dtype=weight.dtype), rms(weight)
        else:
            size = rms(like) * form.factor
        grown = noise.fill(form, size, seed)
        if name == "self_attn.o_proj.weight":  # further heads may read real values: no other noise damps them
            grown[: self.small.hidden_size] *= noise.scale
        if not is_idle:
            form.grow(like, grown)
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            grown[self.constant] = 0  # nothing is ever added to the constant
        return grown


@dataclass(frozen=True)
class FillNoise:
    """Uniform noise for new entries.

    scale: share of the size of the tensor's own values; 0: zeros.
    device: a GPU draws the noise of 7B in a second, a CPU in a minute.
    """

    scale: float
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def fill(self, form: Form, size: float, seed: str) -> Tensor:
        """Returns a tensor of the form's shape. For a norm it is `size` throughout; else noise whose root
        mean square is size · scale, the same for the same seed and kind of device."""
        filled = torch.empty(form.shape, dtype=self.dtype, device=self.device)
        if form.is_norm:
            return filled.fill_(size)
        bound = math.sqrt(3) * self.scale * size
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(seed.encode()))
        return filled.uniform_(-bound, bound, generator=generator)

    def grow(self, form: Form, values: Tensor, seed: str) -> Tensor:
        """Returns the grown tensor: its values among filled entries of their size."""
        return form.grow(values, self.fill(form, rms(values) * form.factor, seed))


class GrownTensors(Mapping[str, Tensor]):
    """The tensors of the grown model by their Hugging Face names, each made on the device on access."""

    def __init__(
        self,
        small: ModelConfig,
        tensors: Mapping[str, Tensor],
        grown: ModelConfig,
        dtype: torch.dtype,
        noise: float = NOISE,
        device: torch.device | str = "cpu",
    ) -> None:
        self._small, self._tensors, self._grown = small, tensors, grown
        self._noise, self._widening = FillNoise(noise, dtype, device), Widening(small, grown)
        self._names = list(expected_shapes(grown))
        self._embedding_size = rms(tensors["model.embed_tokens.weight"])
        self._feature_size = rms(tensors["model.norm.weight"])

    def __getitem__(self, name: str) -> Tensor:
        if name.startswith("model.layers."):
            number, inner = name.removeprefix("model.layers.").split(".", 1)
            is_idle = int(number) >= self._small.num_layers
            source = f"model.layers.{0 if is_idle else number}."
            keys = [key for key in self._tensors if key.startswith(source)]
            layer = {key.removeprefix(source): self._tensors[key] for key in keys}
            return self._widening.grow(inner, layer, self._noise, name, is_idle)
        return self._final_norm() if name == "model.norm.weight" else self._rows(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without making it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _rows(self, name: str) -> Tensor:
        """Returns the embedding or the head, or the tensor of both."""
        is_head = name == "lm_head.weight"
        source = name if name in self._tensors else "model.embed_tokens.weight"
        values, constant = self._tensors[source], self._widening.constant
        form = Form((Axis.first(self._small.vocab_size, self._grown.vocab_size), self._widening.hidden))
        grown = self._noise.grow(form, values, name)
        grown[:, constant] = 0 if is_head else CONSTANT * self._embedding_size
        if is_head or self._grown.tie_embeddings:
            grown[self._small.vocab_size :, constant] = UNUSED_LOGIT / (CONSTANT * self._feature_size)
        return grown

    def _final_norm(self) -> Tensor:
        name, widening = "model.norm.weight", self._widening
        grown = self._noise.grow(widening.norm, self._tensors[name], name)
        residual = residual_size(self._small, self._tensors)
        grown[widening.constant] = widening.constant_gain(self._tensors, residual)
        return grown


@torch.no_grad()
def residual_size(config: ModelConfig, tensors: Mapping[str, Tensor]) -> float:
    """Returns the largest root mean square of the residual stream before the final norm, over probes from
    all of the vocabulary."""
    model = Transformer(config)
    model.load_state_dict(dict(tensors))
    model.model.add_module("norm", nn.Identity())
    probes = probe_tokens(config)
    attend = PackedCausal(config, [len(probes)])
    residual_NE: Tensor = model(probes, attend.positions(), attend)
    return float(residual_NE.square().mean(-1).sqrt().max())


def probe_tokens(config: ModelConfig) -> Tensor:
    """Returns token ids from all of the vocabulary, evenly spread."""
    num = min(NUM_PROBES, config.vocab_size, config.max_positions)
    return torch.linspace(0, config.vocab_size - 1, num).long()


def rms(tensor: Tensor) -> float:
    """Returns the root of the mean square of all entries."""
    return float(tensor.detach().double().square().mean().sqrt())


def _rotary_places(small: int, grown: int) -> Tensor:
    """Returns the dimensions of a grown head with the frequencies of a small one's."""
    first = torch.arange(small // 2) * (grown // small)
    return torch.cat([first, grown // 2 + first])


def _inside(blocks: Tensor, size: int, places: Tensor) -> Tensor:
    """Returns the indices of `places` within each of these blocks of `size` entries."""
    return (blocks[:, None] * size + places).flatten()
