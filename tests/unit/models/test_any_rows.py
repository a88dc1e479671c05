"""Rows of transformers' modules are equal to the bit: a token's in every way of test_equal_rows.py, and responses
with drafts, in batches, in rings, and in the update."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import ArtificialDrafter, Switching, by_id
from tests.unit.models.compared import TREES, config_of
from tests.unit.models.families import families, reference
from tests.unit.models.rows import WAYS, by_a_thread, in_steps_of
from tests.unit.models.test_any import COMPUTED, TEXT_PARTS
from tlt.base.types import Request, ResponseId, Rollout, SamplingParams
from tlt.engine.equal_rows import EqualRows
from tlt.engine.own import prefill
from tlt.engine.own.engine import RolloutEngine
from tlt.models import kv_cache
from tlt.models.any import AnyTarget
from tlt.models.any_equal import Matrix
from tlt.training.update.logprobs import logprobs_of_rows
from tlt.training.update.micro_batches import Experience

attention = pytest.importorskip("tlt.models.loops.attention", reason="Numba is not installed")
products = pytest.importorskip("tlt.models.loops.products", reason="Numba is not installed")

EXPERTS = ["Qwen3-30B-A3B", "OLMoE-1B-7B", "Mixtral-8x7B"]


def make_target(name: str, dtype: torch.dtype) -> AnyTarget:
    target = AnyTarget(config_of(name), dtype, equal_rows=True)
    stored = reference(name, torch.float32).state_dict()
    target.load({path: stored[path] for path in (*target.model.state_dict(), *target.matrices)}, 0)
    return target


@cache
def one_token_at_a_time(name: str, dtype: torch.dtype) -> tuple[AnyTarget, tuple[Tensor, Tensor]]:
    target = make_target(name, dtype)
    return target, by_a_thread(in_steps_of(1), target)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", cases([torch.float32, torch.bfloat16], usual=[torch.bfloat16]))
@pytest.mark.parametrize("name", families(EXPERTS, usual=EXPERTS[:1]))
@torch.inference_mode()
def test_a_token_of_experts_has_its_own_numbers(name: str, dtype: torch.dtype, way: str) -> None:
    target, alone = one_token_at_a_time(name, dtype)
    found = WAYS[way](target)
    for expected, ours in zip(alone, found, strict=True):
        assert torch.equal(ours, expected), f"{(ours != expected).sum()} of {ours.numel()} numbers differ"
    assert torch.equal(target.logits(found[0]), target.logits(alone[0]))


@torch.inference_mode()
def test_a_product_that_splits_its_sums_by_the_number_of_rows_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_target(EXPERTS[0], torch.float32)
    matrix = target.matrices["model.layers.1.self_attn.o_proj.weight"]
    whole, is_first_I = matrix.multiply, torch.arange(matrix.shape[1]) < matrix.shape[1] // 2

    def split(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return whole(x) if x.shape[-2] == 1 else whole(x * is_first_I) + whole(x * ~is_first_I)

    monkeypatch.setattr(matrix, "multiply", split)
    (alone, _), (found, _) = in_steps_of(1)(target), WAYS["a prompt"](target)
    torch.testing.assert_close(found, alone)
    assert not torch.equal(found, alone)


# ── engine and update ───────────────────────────────────────────────────────────────────────────────────────


KINDS = ["Qwen3-30B-A3B", "gpt-oss-20b", "gemma-4-26B-A4B"]
"""Experts transposed and not, with and without biases; gelu; windows, sinks; heads of two sizes."""
PARAMS = SamplingParams(max_tokens=32)


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 columns; prompts are read in parts of 32 tokens."""
    monkeypatch.setattr(kv_cache, "MOST_WRITTEN", 32)
    monkeypatch.setattr(prefill, "_PART_TOKENS", 32)


def make_engine(name: str, dtype: torch.dtype) -> RolloutEngine:
    target = make_target(name, dtype)
    return RolloutEngine(target, max_batch_size=4, tuner=Switching(TREES, seed=1), routes="all")


def make_requests() -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(4, 320, (length,), generator=draw).tolist()) for length in (3, 110)]
    return [Request(f"p{p}", s, prompt, PARAMS) for p, prompt in enumerate(prompts) for s in range(2)]


def one_at_a_time(engine: RolloutEngine) -> dict[ResponseId, Rollout]:
    return by_id(rollout for request in make_requests() for rollout in engine.generate([request]))


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        product((*COMPUTED, *TEXT_PARTS), (torch.float32, torch.bfloat16)),
        usual=[(name, torch.bfloat16) for name in KINDS[:2]],
    ),
)
def test_drafts_batches_and_the_update_have_the_bits_of_one_response_alone(
    name: str, dtype: torch.dtype
) -> None:
    alone = one_at_a_time(make_engine(name, dtype))
    engine = make_engine(name, dtype)
    engine.load_drafter(ArtificialDrafter("oracle", answers={k: r.token_ids for k, r in alone.items()}))
    drafted = by_id(engine.generate(make_requests()))
    assert engine.stats.accept_length is not None
    assert engine.stats.accept_length > 1.5
    for key, expected in alone.items():
        found = drafted[key]
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert found.routes == expected.routes
    batch = [Experience(rollout, (), needs_grad=True) for rollout in alone.values()]
    found_T, _ = logprobs_of_rows(EqualRows(engine.target, PARAMS, lambda: None), batch)
    assert found_T.tolist() == [logprob for r in alone.values() for logprob in r.logprobs]


def test_a_weight_is_multiplied_as_pytorch_does() -> None:
    draw = torch.Generator().manual_seed(0)
    x_NI, weight_XOI = (torch.randn(*shape, generator=draw) for shape in ((6, 20), (3, 24, 20)))
    bias_O = torch.randn(24, generator=draw)
    one, experts, transposed = Matrix(weight_XOI[0]), Matrix(weight_XOI), Matrix(weight_XOI.mT, True)
    one.copy_(weight_XOI[0])
    experts.copy_(weight_XOI)
    transposed.copy_(weight_XOI.mT)
    linear, ends = torch.nn.functional.linear, torch.tensor([2, 2, 6], dtype=torch.int32)
    torch.testing.assert_close(linear(x_NI, one, bias_O), linear(x_NI, weight_XOI[0], bias_O))  # type: ignore[arg-type]
    wanted = torch.cat([x_NI[:2] @ weight_XOI[0].mT, x_NI[2:] @ weight_XOI[2].mT])
    for weight in (experts.transpose(-2, -1), transposed):
        found = torch.nn.functional.grouped_mm(x_NI, weight, offs=ends)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted)
    x_XNI = x_NI.view(3, 2, 20)
    torch.testing.assert_close(torch.bmm(x_XNI, transposed), torch.bmm(x_XNI, weight_XOI.mT))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="has no equal rows"):
        torch.add(x_NI, one)  # type: ignore[arg-type]
