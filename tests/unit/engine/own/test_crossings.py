"""What passes between host and device in an engine step, counted on a pretended GPU: one synchronization,
and uploads for which nobody waits and whose number does not grow with the batch."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cases import cases
from tests.lossless.helpers import CONFIG, make_policy
from tests.unit.engine.own.pretend_device import DEVICE, Crossings, plain, pretended
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.base.uploads import upload
from tlt.drafter.drafting.hybrid import make_drafter
from tlt.drafter.drafting.learned.calibration import Calibration
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.drafting.reference_drafter import REFERENCE, ReferenceDrafter
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.shape import Method, drafter_shape
from tlt.engine.own.engine import RolloutEngine
from tlt.models.kv_cache import Cache
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()


def make_engine(strategy: Strategy, batch_size: int, method: Method = "eagle") -> RolloutEngine:
    """Returns an engine on the pretended GPU whose batch stays full."""
    engine = RolloutEngine(
        PackedTransformer(CONFIG, torch.float32, DEVICE),
        max_batch_size=batch_size,
        tuner=FixedTuner(strategy),
    )
    engine.load_policy(dict(POLICY.float().named_parameters()))
    model = new_model(drafter_shape(CONFIG, method)).initialize(2)
    packed = pack_drafter(model.config, model.state_dict(), torch.float32, DEVICE)
    learned = LearnedDrafter(packed, engine.target, batch_size)
    drafter = make_drafter(learned, batch_size)
    rng, references = random.Random(0), References()
    engine.load_drafter(
        ReferenceDrafter(drafter, references, batch_size) if strategy.uses_references else drafter
    )
    params = SamplingParams(max_tokens=100)
    prompts = [tuple(rng.randrange(CONFIG.vocab_size) for _ in range(3 + i % 4)) for i in range(batch_size)]
    requests = [Request(f"p{i}", 0, prompt, params) for i, prompt in enumerate(prompts)]
    for request in requests[:: 1 if strategy.drafter == REFERENCE else 2]:
        references.keep(request.noise_key, [rng.randrange(CONFIG.vocab_size) for _ in range(100)])
    engine.add(requests)
    return engine


def crossings_of_a_step(
    monkeypatch: pytest.MonkeyPatch, strategy: str, batch_size: int, method: Method = "eagle"
) -> Crossings:
    """Returns the most that any of five steps had, once the batch runs."""
    with pretended(monkeypatch) as crossings:
        engine = make_engine(Strategy.parse(strategy), batch_size, method)
        for _ in range(3):
            engine.step()
        most = Crossings()
        for _ in range(5):
            crossings.clear()
            engine.step()
            if crossings.down.total() >= most.down.total():
                most.down = crossings.down.copy()
            if crossings.up.total() >= most.up.total():
                most.up = crossings.up.copy()
            most.stalls |= crossings.stalls
    return most


STRATEGIES = [
    "off", "learned:4x1x4", "learned:4x3x12", "hybrid:4x1x4", "ngram:4x1x4", "ngram:4x3x12",
    "ahead:8x1x8", "ahead+learned:8x1x8",
]  # fmt: skip
MOST_UPLOADS = 18
"""More than any step has, a refill of noise included, and fewer than there are sequences below."""


CASES = [
    *((strategy, "eagle") for strategy in STRATEGIES),
    *(
        (strategy, block)
        for block in ("dflash", "dspark")
        for strategy in ("learned:4x1x4", "learned:4x3x12")
    ),
]


@pytest.mark.parametrize(
    ("strategy", "method"),
    cases(
        CASES,
        usual=[
            *((strategy, "eagle") for strategy in (*STRATEGIES[::3], STRATEGIES[-1])),
            ("learned:4x3x12", "dspark"),
        ],
    ),
)
def test_a_step_synchronizes_once_and_its_uploads_are_no_more_for_more_sequences(
    strategy: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one wait brings the verdicts: a block drafter's chains are verified whole, so nobody waits to hear
    how much of them."""
    found = crossings_of_a_step(monkeypatch, strategy, 24, method)
    assert found.down.total() == 1, found.down
    assert 0 < found.up.total() <= MOST_UPLOADS, found.up
    assert not found.stalls


def test_accepted_branches_close_up_with_one_upload_and_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)
    starts = [rng.randrange(9) for _ in range(20)]
    paths = [[0, *sorted(rng.sample(range(1, 8), rng.randint(0, 4)))] for _ in starts]
    cache = Cache(CONFIG, 3, torch.float32, torch.device("cpu"), 24)
    cache.reserve(24, 16)
    entries = [torch.randn(group.shape) for group in cache.groups]
    wanted = [entry.clone() for entry in entries]
    for group in wanted:
        for slot, (start, path) in enumerate(zip(starts, paths, strict=True)):
            group[:, slot, :, start : start + len(path)] = group[:, slot][
                :, :, [start + column for column in path]
            ]
    with pretended(monkeypatch) as crossings:
        on_device = Cache(CONFIG, 3, torch.float32, DEVICE, 24)
        on_device.reserve(24, 16)
        for group, entry in zip(on_device.groups, entries, strict=True):
            group.copy_(entry.to(DEVICE))
        crossings.clear()
        on_device.commit(starts, paths)
        assert (crossings.up.total(), crossings.down.total()) == (1, 0)
        found = [plain(group) for group in on_device.groups]
    assert any(path != [*range(len(path))] for path in paths)
    for group, entry in zip(found, wanted, strict=True):
        torch.testing.assert_close(group, entry, rtol=0, atol=0)


def test_what_was_learned_of_confidences_goes_to_the_device_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretended(monkeypatch) as crossings:
        calibration = Calibration(DEVICE)
        crossings.clear()
        calibration.age()
        assert (crossings.up.total(), crossings.stalls.total()) == (1, 0)


def test_on_a_gpu_the_engine_keeps_to_kernels_that_plan_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pretended(monkeypatch):
            make_engine(Strategy.OFF, 2)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_policy_of_the_host_is_joined_and_scaled_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as crossings:
        on_device = PackedTransformer(CONFIG, torch.bfloat16, DEVICE)
        on_device.load(dict(POLICY.float().named_parameters()), version=1)
        assert crossings.down.total() == 0
    joined = [
        POLICY.float().state_dict()[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")
    ]
    found = on_device.layers[0].gate_up_linear.weight
    assert found is not None
    assert torch.equal(plain(found), torch.cat(joined).bfloat16())


def test_the_pretended_device_sees_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch) as crossings:
        values = torch.tensor([1, 2], device=DEVICE)
        assert crossings.up.total() == crossings.stalls.total() == 1
        assert upload([1, 2], DEVICE).tolist() == [1, 2]
        assert (crossings.up.total(), crossings.stalls.total()) == (2, 1)
        crossings.down.clear()
        assert bool((values > 0).any())
        assert values.tolist() == values.cpu().tolist() == [1, 2]
        assert crossings.down.total() == 3
        assert values.to("cpu", non_blocking=True).tolist() == [1, 2]
        assert crossings.down.total() == 3
        with pytest.raises(RuntimeError, match="mixes tensors"):
            values + torch.ones(2, dtype=torch.int64)
