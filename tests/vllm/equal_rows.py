"""What test_equal_rows.py runs in a process whose Triton interprets.

The interpreter multiplies by NumPy, whose bits follow the shape, and cannot multiply bfloat16. Here a product's rows
are independent, and its sum over a block of K is apart from what was summed before: an instruction may sum so.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.vllm.compiled import disassembled

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 64)
Kernel = Callable[[Tensor], Tensor]


@cache
def prepare() -> None:
    """Numba stands aside: on a CPU its loops would take the place of attention.py."""
    from triton.runtime.interpreter import InterpreterBuilder

    sys.modules["numba"] = None  # type: ignore[assignment]
    InterpreterBuilder.create_dot = dot


def dot(builder: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    block_MN = (values(a)[:, :, None] * values(b)).sum(axis=1)  # one k after the other: not the last axis
    return type(sums)(sums.data + block_MN, sums.dtype.scalar)


def values(handle: Any) -> Any:
    """float32, of bfloat16's bits."""
    if handle.data.dtype != np.uint16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def num_differing(found: Tensor, wanted: Tensor) -> int:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return int((found.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).sum())


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────


def kernels(dtype: torch.dtype) -> dict[str, tuple[Tensor, Kernel, Kernel]]:
    """By name: 64 rows, the kernel, and a reference in float64."""
    from tlt.models.triton.products import multiply
    from tlt.models.triton.rows import rms_norm, swiglu
    from tlt.speculation.law.fused_logprobs import chosen_logprobs

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, bias, gain, gains = random(40, 300), random(40), random(1, 300), random(5, 24)
    chosen, inverse = torch.randint(5000, (64,), generator=generator), torch.linspace(0.5, 2, 64).double()

    def logprobs(x_RI: Tensor) -> Tensor:  # the first column says which row it is
        return chosen_logprobs(x_RI[:, 1:], chosen[of(x_RI)], inverse[of(x_RI)])

    def logprobs_reference(x_RI: Tensor) -> Tensor:
        scaled = x_RI[:, 1:] * inverse[of(x_RI)][:, None]
        return scaled.log_softmax(-1).gather(1, chosen[of(x_RI)][:, None])[:, 0]

    def of(x_RI: Tensor) -> Tensor:
        return x_RI[:, 0].long()

    numbered = torch.cat([torch.arange(64)[:, None].to(dtype), 3 * random(64, 5000)], dim=1)
    eps = 1e-6
    return {
        "product": (random(64, 300), lambda x: multiply(x, weight), lambda x: x @ weight.double().T),
        "with bias": (
            random(64, 300), lambda x: multiply(x, weight, bias),
            lambda x: x @ weight.double().T + bias.double(),
        ),
        "with residual": (
            random(64, 300), lambda x: multiply(x, weight, x[:, 7:47]),
            lambda x: x @ weight.double().T + x[:, 7:47],
        ),
        "norm": (
            random(64, 300), lambda x: rms_norm(x[:, None], gain, eps)[:, 0],
            lambda x: F.rms_norm(x, (300,), gain[0].double(), eps),
        ),
        "norm of heads": (
            random(64, 5 * 24), lambda x: rms_norm(x.view(-1, 5, 24), gains, eps),
            lambda x: F.rms_norm(x.view(-1, 5, 24), (24,), None, eps) * gains.double(),
        ),
        "swiglu": (
            random(64, 600), swiglu, lambda x: F.silu(x[:, :300]) * x[:, 300:],
        ),
        "logprobs": (numbered, logprobs, logprobs_reference),
    }  # fmt: skip


def rows_of_kernels(dtype: torch.dtype, fault: str = "") -> dict[str, tuple[int, float]]:
    """By kernel: bytes that differ where fewer rows are computed, at the beginning and at the end of 64; and the
    largest error, beside the reference's largest value."""
    prepare()
    found = {}
    with planted(fault):
        for name, (x_RI, kernel, reference) in kernels(dtype).items():
            whole, wanted = kernel(x_RI), reference(x_RI.double())
            differing = 0
            for num_rows in ROWS:
                differing += num_differing(kernel(x_RI[:num_rows]), whole[:num_rows])
                differing += num_differing(kernel(x_RI[-num_rows:]), whole[-num_rows:])
            found[name] = differing, float((whole.double() - wanted).abs().max() / wanted.abs().max())
    return found


def planted(fault: str) -> Any:
    """A fault that the tests must see, as a context."""
    from tlt.models.triton import attention, products

    right = products.multiply

    def follows_rows(x_NI: Tensor, *others: Any) -> Tensor:
        size = 32 if len(x_NI) <= 4 else 128
        with patch.object(products, "block_k", lambda dtype: size):
            return right(x_NI, *others)

    def splits_k(x_NI: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        if len(x_NI) > 4:
            return right(x_NI, weight, added)
        half = x_NI.shape[1] // 2
        first = right(x_NI[:, :half], weight[:, :half].contiguous(), added)
        return right(x_NI[:, half:], weight[:, half:].contiguous(), first)

    def keys_follow_queries(q_NHD: Tensor, k: Tensor, v: Tensor, items: Any, scale: float | None) -> Tensor:
        size = 16 if len(q_NHD) <= 4 else 32
        with patch.object(attention, "keys_at_once", lambda dtype: size):
            return attends(q_NHD, k, v, items, scale)

    attends = attention.attend
    faults: dict[str, Any] = {
        "": (products, "multiply", right),
        "block_k follows rows": (products, "multiply", follows_rows),
        "split k": (products, "multiply", splits_k),
        "keys follow queries": (attention, "attend", keys_follow_queries),
    }
    return patch.object(*faults[fault])


# ── a model ─────────────────────────────────────────────────────────────────────────────────────────────────


def model(dtype: torch.dtype, architecture: str, num_kv_heads: int = 2) -> Any:
    from tests.lossless.helpers import make_policy
    from tlt.models.decoder import ModelConfig
    from tlt.models.equal import EqualTransformer

    heads = (6, num_kv_heads, 8)
    config = ModelConfig(architecture, 61, 48, 96, 2, *heads, tie_embeddings=True, max_positions=160)  # type: ignore[arg-type]
    found = EqualTransformer(config, dtype)
    found.load(dict(make_policy(config=config).named_parameters()), 0)
    return found


def ways_to_read(dtype: torch.dtype, architecture: str, only: str = "", fault: str = "") -> dict[str, int]:
    prepare()
    with planted(fault), torch.inference_mode():
        return Ways(model(dtype, architecture)).found(only)


class Ways:
    """The last `num_new` tokens of a text, read in several ways; others share its first `shared`.

    Columns behind the read ones hold noise: what no token sees must not matter.
    """

    def __init__(self, target: Any, length: int = 70, num_new: int = 6, shared: int = 20) -> None:
        self.target, self.config, self.device = target, target.config, target.device
        self.num_new, self.shared, self.start = num_new, shared, length - num_new
        generator = torch.Generator().manual_seed(5)
        size = (2, length)
        tokens = torch.randint(self.config.vocab_size, size, generator=generator).to(self.device)
        self.tokens_T, self.other_T = tokens.unbind()
        self.caches: dict[int, tuple[list[Tensor], Tensor]] = {}

    def found(self, only: str = "", company: int = 3) -> dict[str, int]:
        """Returns how many bytes of features differ from those of the text alone as a prompt, by way. company:
        sequences in a batch."""
        wanted_TE, half = self.read(1)[1], self.num_new // 2
        ways = {
            "prompt, in company": lambda: self.read(company)[1],
            "one by one": lambda: self.chains(1, 1),
            "one by one, in company": lambda: self.chains(1, company),
            "chains of half, in company": lambda: self.chains(half, company),
            "one chain": lambda: self.chains(self.num_new, 1),
            "chains of other lengths": lambda: self.padded_chains(company),
            "trees": lambda: self.trees(company),
            "packed": lambda: self.packed(company),
        }
        return {name: num_differing(way(), wanted_TE) for name, way in ways.items() if only in ("", name)}

    def texts(self, num: int) -> list[Tensor]:
        """The text is the last."""
        others = [
            torch.cat([self.tokens_T[: self.shared], self.other_T[: 10 + 7 * i % 40]]) for i in range(num - 1)
        ]
        return [*others, self.tokens_T]

    def flat(self, num: int) -> tuple[Tensor, list[tuple[int, list[int]]]]:
        """Tokens and families."""
        first, *others = self.texts(num)
        shared = self.shared if others else 0
        tokens_N = torch.cat([first, *(text[shared:] for text in others)])
        return tokens_N, [(shared, [len(text) - shared for text in (first, *others)])]

    def read(self, num: int) -> tuple[list[Tensor], Tensor]:
        """Reads texts as prompts. Returns the cache's layers, the text's slot the last, and features of its last
        tokens."""
        from tlt.models.attention import StoringPrefill
        from tlt.models.kv_cache import Cache

        if num not in self.caches:
            cache = Cache(self.config, self.config.num_layers, self.target.dtype, self.device, num)
            cache.reserve(num, len(self.tokens_T) + self.num_new + 1)
            tokens_N, families = self.flat(num)
            attend = StoringPrefill(self.config, families, cache.layers, range(num))
            features_NE = self.target.forward(tokens_N, attend.positions(self.device), attend)
            self.caches[num] = cache.layers, features_NE[-self.num_new :]
        return self.caches[num]

    def prefixes(self, num: int) -> tuple[list[Tensor], Tensor]:
        """Returns the layers of a cache that has the texts but for the new tokens, and the texts' lengths there."""
        layers = [layer.clone() for layer in self.read(num)[0]]
        lengths = [*(len(text) for text in self.texts(num)[:-1]), self.start]
        for layer in layers:
            for slot, length in enumerate(lengths):
                layer[slot, :, length:].normal_()
        return layers, torch.tensor(lengths, device=self.device)

    def step(
        self, layers: list[Tensor], tokens_BT: Tensor, first_B: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Features of chains behind `first_B` tokens, [N, E]."""
        from tlt.models.attention import Cached
        from tlt.speculation.law.tree import chain_mask

        columns_BT = first_B[:, None] + torch.arange(tokens_BT.shape[1], device=self.device)
        length = int(columns_BT.max()) + 1
        mask = chain_mask(columns_BT, length, self.target.dtype)
        attend = Cached(self.config, layers, columns_BT, length, mask, counts)
        real = slice(None) if attend.real_N is None else attend.real_N
        found: Tensor = self.target.forward(tokens_BT.flatten()[real], columns_BT.flatten()[real], attend)
        return found

    def chains(self, depth: int, num: int) -> Tensor:
        layers, first_B = self.prefixes(num)
        steps = self.tokens_T[self.start :].split(depth)
        found = [
            self.step(layers, new_T.repeat(num, 1), first_B + done * depth)[-len(new_T) :]
            for done, new_T in enumerate(steps)
        ]
        return torch.cat(found)

    def padded_chains(self, num: int) -> Tensor:
        layers, first_B = self.prefixes(num)
        tokens_BT = self.tokens_T[self.start :].repeat(num, 1)
        counts = [1 + i % self.num_new for i in range(num - 1)]
        return self.step(layers, tokens_BT, first_B, [*counts, self.num_new])[-self.num_new :]

    def trees(self, num: int) -> Tensor:
        """The text's tokens are a path through a tree: columns 0, 2, 4, …; the others branch off."""
        from tlt.models.attention import Cached
        from tlt.speculation.law.tree import ancestors, tree_mask

        layers, prefix_B = self.prefixes(num)
        num_nodes = 2 * self.num_new - 1
        tokens_BN = self.other_T[:num_nodes].repeat(num, 1)
        tokens_BN[-1, ::2] = self.tokens_T[self.start :]
        parents = [-1 if i == 0 else (i - 1) // 2 * 2 for i in range(num_nodes)]
        seen_BNN = ancestors(torch.tensor(parents, device=self.device).repeat(num, 1))
        columns_BN = prefix_B[:, None] + torch.arange(num_nodes, device=self.device)
        length = int(columns_BN.max()) + 1
        mask = tree_mask(seen_BNN, prefix_B, length, self.target.dtype)
        positions_BN = prefix_B[:, None] + seen_BNN.sum(-1) - 1
        attend = Cached(self.config, layers, columns_BN, length, mask, None, positions_BN)
        found_NE = self.target.forward(tokens_BN.flatten(), positions_BN.flatten(), attend)
        return found_NE.view(num, num_nodes, -1)[-1, ::2]

    def packed(self, num: int) -> Tensor:
        from tlt.models.attention import SharedPrompts

        tokens_N, families = self.flat(num)
        attend = SharedPrompts(self.config, families)
        found: Tensor = self.target.forward(tokens_N, attend.positions(self.device), attend)
        return found[-self.num_new :]


def error_of_model(dtype: torch.dtype, architecture: str) -> float:
    """‖features - those of PackedTransformer in float64‖ / ‖theirs‖."""
    from tests.lossless.helpers import make_policy
    from tlt.models.attention import PackedCausal
    from tlt.models.packed import PackedTransformer

    prepare()
    ours = model(dtype, architecture)
    theirs = PackedTransformer(ours.config, torch.float64)
    theirs.load(dict(make_policy(config=ours.config).named_parameters()), 0)
    tokens_T = Ways(ours).tokens_T
    with torch.inference_mode():
        found, wanted = (
            one.forward(
                tokens_T, torch.arange(len(tokens_T)), PackedCausal(ours.config, [len(tokens_T)])
            ).double()
            for one in (ours, theirs)
        )
    return float((found - wanted).norm() / wanted.norm())


@cache
def responses(dtype: torch.dtype, strategy: str, is_recorded: bool = False) -> dict[Any, tuple[Any, ...]]:
    """Tokens and log-probabilities of an engine, off, or drafting random trees. is_recorded: as by CUDA graphs."""
    from tests.lossless.helpers import ArtificialDrafter, by_id, make_requests
    from tests.replays import replay_here
    from tlt.base.strategy import Strategy
    from tlt.engine.own.engine import RolloutEngine
    from tlt.speculation.tuner.tuner import FixedTuner

    prepare()
    requests = make_requests(2, 2, 3, longest=14)
    with pytest.MonkeyPatch.context() as patch:
        if is_recorded:
            replay_here(patch)
        tuner = None if strategy == "off" else FixedTuner(Strategy.parse(strategy))
        engine = RolloutEngine(model(dtype, "qwen2"), max_batch_size=4, tuner=tuner)
        if tuner is not None:
            off = responses(dtype, "off")
            answers = {name: tokens for name, (tokens, _) in off.items()}
            engine.load_drafter(ArtificialDrafter("oracle", answers=answers))
        found = by_id(engine.generate(requests))
    return {name: (one.token_ids, one.logprobs) for name, one in found.items()}


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Compiled:
    """A kernel for a call with so many rows. instructions: of matrices, and atomic ones. code: its digest.
    local_bytes: spilled registers, and arrays on the stack."""

    name: str
    dtype: torch.dtype
    num_rows: int
    instructions: frozenset[str]
    fused: int
    code: str
    local_bytes: int


def compile_kernels(arch: int) -> list[Compiled]:
    """At the sizes of Qwen2.5 1.5B, for a GPU of this compute capability."""
    from tests.vllm.interpreted import compiling
    from tlt.models.triton.attention import EVERYTHING, Items, attend
    from tlt.models.triton.products import multiply
    from tlt.models.triton.rows import rms_norm, swiglu
    from tlt.speculation.law.fused_logprobs import chosen_logprobs

    found = []
    for dtype, num_rows in product((torch.float32, torch.bfloat16), (1, 5, 20, 33)):

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        table = torch.tensor([[0, num_rows, 5, 0, EVERYTHING, 0]])
        kv = zeros(1, 4, 256, 128)
        with compiling(arch) as made:
            multiply(zeros(num_rows, 1536), zeros(2048, 1536), zeros(2048))
            multiply(zeros(num_rows, 8960), zeros(1536, 8960), zeros(num_rows, 1536))
            multiply(zeros(num_rows, 1536), zeros(18000, 1536))
            attend(zeros(num_rows, 12, 128), kv[:, :2], kv[:, 2:], Items(table, table, num_rows))
            rms_norm(zeros(num_rows, 1, 1536), zeros(1, 1536), 1e-6)
            swiglu(zeros(num_rows, 2 * 8960))
            chosen = torch.zeros(num_rows, dtype=torch.int64)
            chosen_logprobs(zeros(num_rows, 151_936), chosen, chosen.double())
        found += [described(kernel, dtype, num_rows) for kernel in made]
    return found


def described(kernel: Any, dtype: torch.dtype, num_rows: int) -> Compiled:
    import triton

    usage, _ = disassembled(Path(triton.__file__).parent / "backends/nvidia/bin", kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    instructions = re.findall(r"\b(?:wgmma\.mma|mma|tcgen05|atom|red)\.[\w.:]+", ptx)
    fused, code = len(re.findall(r"fma\.rn\.f32", ptx)), hashlib.sha256(kernel.asm["cubin"]).hexdigest()
    local = usage["stack_bytes"] + usage["spilled_bytes"]
    return Compiled(kernel.metadata.name, dtype, num_rows, frozenset(instructions), fused, code, local)
