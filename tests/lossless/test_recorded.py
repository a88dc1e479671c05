"""Recorded forwards and drafts (CUDA graphs) change no token. Replayed here by running them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import (
    Switching,
    make_engine,
    make_policy,
    make_requests,
    random_drafter,
    step_of,
    tokens_of,
)
from tests.replays import replay_here
from tlt.base.strategy import Strategy
from tlt.base.types import ResponseId, id_of
from tlt.models import graphs
from tlt.models.graphs import EAGER_RUNS, Graphs, Outputs
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()
REQUESTS = make_requests(num_problems=7, num_samples=4, seed=11)
ASKED = {1: REQUESTS[::5], 5: REQUESTS[::2], 28: REQUESTS}
"""By batch size. One response of each sampling setting, one at a time, is enough for shapes to return."""


@cache
def off() -> dict[ResponseId, tuple[int, ...]]:
    """The tokens of all responses without speculation."""
    return tokens_of(make_engine(POLICY), REQUESTS)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts eager and replayed runs."""
    off()  # without recordings
    replay_here(monkeypatch)
    found, plain = Counter[str](), Graphs.run

    def run(
        self: Graphs,
        key: Hashable,
        function: Callable[..., Outputs],
        inputs: Mapping[str, Tensor],
        most_rows: int | None = None,
    ) -> Outputs:
        outputs = plain(self, key, function, inputs, most_rows)
        name = key[0] if isinstance(key, tuple) and isinstance(key[0], str) else "target"
        found[name] += 1
        found[f"{name} recorded"] = max(found[f"{name} recorded"], len(self._graphs))
        return outputs

    monkeypatch.setattr(Graphs, "run", run)
    return found


STRATEGIES = ("off", "learned:4x1x4", "learned:3x2x6", "ngram:6x1x6", "hybrid:7x1x7")
USUAL = [("off", 28), ("learned:4x1x4", 28), ("learned:4x1x4", 1), ("learned:3x2x6", 5), ("ngram:6x1x6", 28)]


@pytest.mark.parametrize(("strategy", "batch_size"), cases(product(STRATEGIES, ASKED), USUAL))
def test_recordings_change_no_token(strategy: str, batch_size: int, replays: Counter[str]) -> None:
    parsed = Strategy.parse(strategy)
    engine = make_engine(POLICY, None if parsed.is_off else FixedTuner(parsed), max_batch_size=batch_size)
    asked = ASKED[batch_size]
    for _ in range(2):  # the caches start anew, and what was recorded of them is void
        assert tokens_of(engine, asked) == {id_of(request): off()[id_of(request)] for request in asked}
    assert replays["target recorded"] > 0
    if strategy == "learned:4x1x4":
        assert replays["draft recorded"] > 0
        assert replays["draft"] > 2 * replays["draft recorded"]


def test_strategies_and_drafters_that_change_while_responses_run_change_no_token(
    replays: Counter[str],
) -> None:
    kinds = [Strategy.OFF, *map(Strategy.parse, ("learned:4x1x4", "learned:2x1x2", "ngram:4x1x4"))]
    engine = make_engine(POLICY, Switching(kinds, seed=1), max_batch_size=7)
    learned = engine.drafter.learned
    engine.add(REQUESTS)
    model, found, steps = random_drafter(POLICY.config, "learned"), dict[ResponseId, tuple[int, ...]](), 0
    while not engine.is_idle:
        found |= step_of(engine)
        steps += 1
        if steps % 20 == 0:
            weights = {name: value + 0.01 * steps for name, value in model.state_dict().items()}
            learned.load(weights, steps)
    assert found == off()
    assert replays["target recorded"] > 0


def test_an_updated_policy_is_what_a_recording_computes_with(replays: Counter[str]) -> None:
    engine = make_engine(POLICY, FixedTuner(Strategy.parse("learned:4x1x4")), max_batch_size=5)
    assert tokens_of(engine, REQUESTS) == off()
    other = make_policy(seed=2)
    engine.load_policy(dict(other.named_parameters()), 1)
    assert tokens_of(engine, REQUESTS) == tokens_of(make_engine(other), REQUESTS)


def test_shapes_are_recorded_when_they_return_and_forgotten_when_memory_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_here(monkeypatch)
    made = Graphs(torch.device("cpu"))
    calls = []

    def double(x_BN: Tensor) -> Outputs:
        calls.append(x_BN)
        return (2 * x_BN,)

    for number in range(EAGER_RUNS + 3):
        x_BN = torch.full((3 + number % 2, 2), float(number))
        (found,) = made.run("double", double, {"x_BN": x_BN}, most_rows=None)
        assert torch.equal(found, 2 * x_BN)
    assert len(made._graphs) == 1  # batches of 3; those of 4 have come too rarely
    x_BN = torch.ones(5, 2)
    for _ in range(EAGER_RUNS + 1):
        (found,) = made.run("double", double, {"x_BN": x_BN}, most_rows=64)
    assert calls[-1].shape == (8, 2)
    (seven,) = made.run("double", double, {"x_BN": torch.full((7, 2), 3.0)}, most_rows=64)
    assert torch.equal(seven, torch.full((7, 2), 6.0))
    assert torch.equal(found, torch.full((5, 2), 2.0)), "a replay leaves earlier outputs alone"
    made.keep_to("here")
    assert not made._graphs


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 1000, 5000, 100_000])
def test_padding_is_little_and_gives_few_lengths(length: int) -> None:
    padded = graphs.padded_length(length)
    assert length <= padded < length + max(64, length // 7 + 1)
    assert graphs.padded_length(padded) == padded
    assert len({graphs.padded_length(n) for n in range(length, 2 * length)}) <= max(length // 64, 0) + 17
