"""Training in idle time: preemption, the responses of the step before, and the limit on passes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import make_policy, pack
from tests.unit.drafter.parts import (
    POLICY,
    SIZE,
    TARGET,
    features_of,
    make_requests,
    make_rollout,
    make_spot,
    random_tokens,
    ready_buffer,
    run_engine,
    unpack,
)
from tlt.base.records import DrafterReport
from tlt.base.spans import Span
from tlt.base.strategy import Strategy
from tlt.drafter.training.buffer import TOKEN_ID_BYTES, PackedBatch, TrajectoryBuffer
from tlt.drafter.training.spot import (
    MICRO_STEP_SHARE,
    MIN_TOKENS,
    FeatureRecompute,
    MicroStepSize,
    SpotTrainer,
)
from tlt.models.hf.weights import content_hash
from tlt.speculation.tuner.tuner import FixedTuner


def run_idle(spot: SpotTrainer, max_micro_steps: int = 200) -> DrafterReport:
    """Runs a session that is preempted after so many micro-steps."""
    left = iter(range(max_micro_steps))
    return spot.run(lambda: next(left, None) is None)


def batches_of(spot: SpotTrainer) -> list[PackedBatch]:
    """Returns the list that every batch trained on is added to from here on."""
    batches: list[PackedBatch] = []
    train = spot.trainer.step
    spot.trainer.step = lambda batch: (batches.append(batch), train(batch))[1]
    return batches


def num_predicted(batches: Iterable[PackedBatch]) -> int:
    return sum(int(batch.weight_M.sum()) for batch in batches)


def filled_buffer(num: int, length: int, num_prompt: int) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(10**7)
    for index in range(num):
        tokens = random_tokens(length, index)
        buffer.add(make_rollout(tokens, num_prompt, index=index), features_of(POLICY, tokens[:-1]))
    return buffer


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_recomputed_features_equal_captured_ones(chunk: int) -> None:
    captured = TrajectoryBuffer(10**6)
    engine, ended = run_engine(FixedTuner(Strategy("learned", 3, 2, 6)), make_requests())
    for finished in ended:
        captured.add(finished.rollout, finished.captured_TF)
    for trajectory in captured.trajectories:
        expected = trajectory.features_TF
        trajectory.features_TF = None
        recompute = FeatureRecompute(engine.target, (engine.config.num_layers,), trajectory)
        while not recompute.advance(chunk):
            assert trajectory.features_TF is None
        torch.testing.assert_close(trajectory.features_TF, expected, rtol=0, atol=1e-9)
        assert trajectory.policy_version == engine.target.version


@pytest.mark.parametrize("with_features", [True, False], ids=["training", "recomputing"])
@pytest.mark.parametrize("preempted_in", [0, 1, 5])
def test_the_trainer_returns_within_the_micro_step_in_which_it_is_preempted(
    with_features: bool, preempted_in: int
) -> None:
    """should_stop becomes true in the middle of micro-step `preempted_in`: not one more begins. No
    micro-step exceeds its bound of tokens, whatever lies in the buffer."""
    begun: list[int] = []
    spot = make_spot(ready_buffer(3, 150, with_features))
    batches = batches_of(spot)
    micro_step = spot.micro_step

    def counted() -> DrafterReport | None:
        begun.append(len(begun) + 1)
        return micro_step()

    spot.micro_step = counted
    with patch.object(TARGET, "forward_capturing", wraps=TARGET.forward_capturing) as forward:
        report = spot.run(lambda: len(begun) >= preempted_in)
        sizes = [len(call.args[0]) for call in forward.call_args_list]
    sizes += [len(batch.token_ids_N) for batch in batches]
    assert len(begun) == preempted_in == report.num_micro_steps == len(sizes)
    assert all(size <= 48 + 2 for size in sizes)
    # without features, four chunks complete the first trajectory, and the fifth micro-step trains on it
    assert (report.num_tokens > 0) == (preempted_in > 0 if with_features else preempted_in == 5)


def test_sessions_go_on_where_the_last_one_was_preempted() -> None:
    def train(sessions: Iterable[int]) -> list[Tensor]:
        spot = make_spot(ready_buffer(3, 150, with_features=False))
        for num_steps in sessions:
            run_idle(spot, num_steps)
        return [p.detach().clone() for p in spot.trainer.model.parameters()]

    for one, many in zip(train([9]), train([1] * 9), strict=True):
        assert torch.equal(one, many)


def test_a_micro_step_has_the_tokens_that_fit_its_share_of_a_step() -> None:
    """On a machine where a micro-step costs 3 ms and 50 µs per token, the size settles where it takes just
    its share."""
    size = MicroStepSize(4096)
    assert size.num_tokens(10.0) == size.num_tokens(None) == MIN_TOKENS, "nothing is known yet"
    for step_seconds in (10.0, 100.0, 20.0):
        for _ in range(60):
            num_tokens = size.num_tokens(step_seconds)
            size.observe(num_tokens, 3e-3 + 5e-5 * num_tokens)
        wanted = min((MICRO_STEP_SHARE * step_seconds - 3e-3) / 5e-5, 4096)
        assert size.num_tokens(step_seconds) == pytest.approx(wanted, rel=0.01)
    assert size.num_tokens(0.01) == MIN_TOKENS
    assert MicroStepSize(48).num_tokens(1e9) == 48, "the user's bound holds"


def test_the_report_says_when_the_trainer_was_preempted_and_covers_all_of_its_time() -> None:
    spans: list[Span] = []
    spot = make_spot(ready_buffer(2, 60))
    spot.on_span = spans.append
    report = run_idle(spot, 3)
    assert report.preempted_at == spans[-1].end
    assert report.seconds == pytest.approx(sum(span.end - span.start for span in spans), abs=1e-12)
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert report.max_micro_step_seconds <= report.seconds
    spot.buffer.trajectories.clear()
    assert spot.run(lambda: False).preempted_at is None, "it had nothing to do"


def test_the_longest_of_the_previous_step_are_trained_on_with_features_of_the_new_policy() -> None:
    target = pack(POLICY)
    spot = make_spot(ready_buffer(6, 20), target, carry_longest=2)
    rollouts = [
        make_rollout(random_tokens(10 + 7 * i, 100 + i), 4, f"q{i}") for i in (3, 0, 5, 1, 4, 2)
    ]  # of all ranks
    next_policy = make_policy(seed=9)
    spot.end_step(rollouts, 10.0)
    target.load(dict(next_policy.named_parameters()), 1)
    longest = {rollouts[2].prompt_ids + rollouts[2].token_ids, rollouts[4].prompt_ids + rollouts[4].token_ids}
    assert {t.token_ids for t in spot.buffer.trajectories} == longest

    batches = batches_of(spot)
    run_idle(spot, 20)
    assert len(batches) > 5
    found = set()
    for batch in batches:
        for window in unpack(batch):
            tokens = tuple(window.token_ids_N.tolist())
            (source, start) = next(
                (s, i)
                for s in longest
                for i in range(len(s) - len(tokens) + 1)
                if s[i : i + len(tokens)] == tokens
            )
            expected = features_of(next_policy, source[:-1])[start : start + len(tokens)]
            torch.testing.assert_close(window.captured_NF, expected, rtol=0, atol=1e-9)
            found.add(source)
    assert found == longest


def test_features_of_a_policy_that_was_replaced_are_never_trained_on() -> None:
    """Captured under version 0; version 1 is published without a carry over, and version 2 amid the
    recomputing for it."""
    target = pack(POLICY)
    spot = make_spot(ready_buffer(2, 140), target)
    # Three chunks per trajectory; nothing trains before one is whole, then recomputing and training
    # alternate. Version 1 ends in the middle of the second trajectory.
    for version, policy, trains in (
        (1, make_policy(seed=9), "...T."),
        (2, make_policy(seed=10), "...T.T.T.TT"),
    ):
        target.load(dict(policy.named_parameters()), version)
        done = ["T" if (report := spot.micro_step()) and report.num_tokens else "." for _ in trains]
        assert "".join(done) == trains
    for trajectory in spot.buffer.trajectories:
        assert trajectory.policy_version == 2
        torch.testing.assert_close(
            trajectory.features_TF, features_of(policy, trajectory.token_ids[:-1]), rtol=0, atol=1e-9
        )


def test_recomputed_features_make_room_for_themselves_and_are_not_recomputed_again() -> None:
    """Otherwise two trajectories that do not fit together would be recomputed in turns for ever."""
    length, num = 40, 4
    features_bytes = (length - 1) * SIZE * 8
    spot = make_spot(TrajectoryBuffer(num * TOKEN_ID_BYTES * length + 2 * features_bytes), carry_longest=num)
    for index in range(num):
        spot.add(make_rollout(random_tokens(length, index), 5, index=index), None)
    report = run_idle(spot, 20)
    assert report.recomputed_tokens == num * (length - 1), "each once"
    assert len(spot.buffer.ready(TARGET.version)) == 2
    assert spot.buffer.num_bytes <= spot.buffer.max_bytes


@pytest.mark.parametrize("max_passes", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(("num", "length", "num_prompt"), [(4, 60, 5), (3, 150, 130), (2, 12, 4)])
def test_responses_are_gone_through_as_often_as_allowed_and_no_more(
    max_passes: float, num: int, length: int, num_prompt: int
) -> None:
    spot = make_spot(filled_buffer(num, length, num_prompt), max_passes=max_passes)
    batches, allowed = batches_of(spot), max_passes * num * (length - num_prompt)
    report = run_idle(spot)
    assert allowed - 48 < num_predicted(batches) <= allowed, "what remains is less than a micro-step"
    assert batches
    assert report.is_limited
    assert report.preempted_at is None


def test_long_prompts_use_up_no_passes() -> None:
    """A micro-step may read as many tokens as may be learned in all, and learns a quarter of them."""
    spot = make_spot(filled_buffer(4, 150, 110), max_passes=4.0)
    spot.train_size = MicroStepSize(1024)
    spot.train_size.seconds_per_token, spot.step_seconds = 1e-9, 1.0
    batches = batches_of(spot)
    run_idle(spot)
    assert 640 - MIN_TOKENS < num_predicted(batches) <= 640


def test_at_the_limit_of_passes_features_are_recomputed_and_what_they_add_is_trained_on() -> None:
    spot = make_spot(ready_buffer(2, 60), max_passes=1.0)
    batches = batches_of(spot)
    run_idle(spot)
    assert 110 - 48 < num_predicted(batches) <= 110
    again = run_idle(spot)
    assert (again.num_micro_steps, again.is_limited) == (0, True)
    spot.add(make_rollout(random_tokens(150, 9), 5, index=9), None)
    assert run_idle(spot).recomputed_tokens == 149
    assert 255 - 48 < num_predicted(batches) <= 255, "of 110 + 145"


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_every_step_may_go_through_its_responses_anew(is_interrupted: bool) -> None:
    spot = make_spot(TrajectoryBuffer(10**6), max_passes=1.0)
    rollouts = [make_rollout(random_tokens(80, index), 5, f"q{index}") for index in range(2)]
    batches = batches_of(spot)
    for _ in range(3):
        if is_interrupted and batches:
            spot.abandon()
        else:
            spot.end_step(rollouts, 1.0)
        batches.clear()
        assert run_idle(spot).is_limited
        assert 150 - 48 < num_predicted(batches) <= 150


def test_only_a_session_that_could_have_gone_on_says_that_it_was_limited() -> None:
    report = run_idle(make_spot(TrajectoryBuffer(100), max_passes=1.0))
    assert (report.num_micro_steps, report.is_limited) == (0, False), "there was nothing to train on"
    assert not run_idle(make_spot(ready_buffer(), max_passes=4.0), 3).is_limited, "it was preempted"
    reports = [DrafterReport(1, is_limited=is_limited) for is_limited in (True, False)]
    assert reports[0].plus(reports[1]).is_limited
    assert reports[1].plus(reports[0]).is_limited


def test_a_restored_spot_trainer_starts_its_next_step_with_the_same_tokens_and_pace() -> None:
    spot = make_spot(ready_buffer(6, 150))
    run_idle(spot, 5)
    spot.end_step([make_rollout(random_tokens(20 + 9 * i, i), 4, f"q{i}") for i in range(5)], seconds=12.0)
    restored = make_spot(TrajectoryBuffer(10**6))
    with torch.no_grad():
        for name, tensor in restored.trainer.tensors().items():
            tensor.copy_(spot.trainer.tensors()[name])
    restored.restore(json.loads(json.dumps(spot.counters())))
    assert restored.trainer.num_tokens == spot.trainer.num_tokens > 0
    assert [t.token_ids for t in restored.buffer.trajectories] == [
        t.token_ids for t in spot.buffer.trajectories
    ]
    assert len(restored.buffer) == spot.carry_longest
    assert restored.train_size.num_tokens(12.0) == spot.train_size.num_tokens(spot.step_seconds)
    for one in (spot, restored):
        one.train_size = MicroStepSize(48)
        one.buffer.random.seed(3)
        run_idle(one, 9)
    assert content_hash(restored.trainer.model.state_dict()) == content_hash(spot.trainer.model.state_dict())
