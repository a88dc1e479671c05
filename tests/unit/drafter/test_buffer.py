"""The buffer of responses: which windows are drawn, how tokens meet features, what has to make room (FIELD
§2, 2 and 7)."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafter.parts import SIZE, make_rollout, randn, random_tokens
from tlt.drafter.pairs import align
from tlt.drafter.training.buffer import TOKEN_ID_BYTES, Trajectory, TrajectoryBuffer


def coded_buffer(shapes: Sequence[tuple[int, int]], seed: int) -> TrajectoryBuffer:
    """Trajectories of (tokens, prompt tokens); token t of trajectory s is 1000 s + t, and so is its
    feature."""
    buffer = TrajectoryBuffer(10**9, seed)
    for sequence, (length, num_prompt) in enumerate(shapes):
        codes = [1000 * sequence + t for t in range(length)]
        features = torch.tensor(codes[:-1], dtype=torch.float64)[:, None].expand(-1, 4)
        buffer.add(make_rollout(codes, num_prompt, index=sequence), features)
    return buffer


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_sampled_windows_are_aligned_at_any_offset(data: st.DataObject) -> None:
    shapes = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(3, 60))
        shapes.append((length, data.draw(st.integers(1, length - 1))))
    buffer = coded_buffer(shapes, data.draw(st.integers(0, 999)))
    budget = data.draw(st.integers(3, 80))
    for _ in range(4):
        batch = buffer.sample(budget, 0)
        assert batch is not None
        assert sum(batch.lengths) == len(batch.token_ids_N) == len(batch.captured_NF)
        assert sum(batch.lengths) <= budget + 2
        pairs = align(batch.lengths)
        tokens, features = batch.token_ids_N, batch.captured_NF[:, 0].long()
        assert torch.equal(tokens[pairs.token_index_M], features[pairs.feature_index_M] + 1)
        assert torch.equal(features[pairs.token_index_M], tokens[pairs.token_index_M])
        sequence, t = features[pairs.feature_index_M] // 1000, features[pairs.feature_index_M] % 1000
        num_prompt = torch.tensor([prompt for _, prompt in shapes])[sequence]
        assert torch.equal(batch.weight_M, (t + 2 >= num_prompt).float()), (
            "a pair counts if it predicts a response token"
        )
        assert batch.weight_M.any()
        for window in features.split(batch.lengths):
            assert torch.equal(window, window[0] + torch.arange(len(window)))


def test_short_and_long_responses_are_trained_on_by_their_tokens() -> None:
    """Tokens 0 to 19 are the short response's, then the long one's; a long one is not drawn more often and
    taken whole."""
    buffer = TrajectoryBuffer(10**7, seed=3)
    for first, length in ((0, 20), (20, 61)):
        rollout = make_rollout(range(first, first + length), 1, name=str(first))
        buffer.add(rollout, randn(length - 1, SIZE))
    counts = torch.zeros(81)
    for _ in range(600):
        batch = buffer.sample(64, 0)
        assert batch is not None
        counts += torch.bincount(batch.token_ids_N, minlength=81)
    assert counts[:19].mean() / counts[25:75].mean() == pytest.approx(1.0, abs=0.35)


def test_a_response_of_which_no_pair_predicts_a_token_is_not_kept() -> None:
    assert [len(coded_buffer([(length, 1)], 0)) for length in (2, 3)] == [0, 1]


def test_of_a_prompt_much_longer_than_its_response_every_window_holds_some_of_the_response() -> None:
    buffer, num_prompt, length = coded_buffer([(505, 500)], 1), 500, 505
    predicted = torch.zeros(length)
    for _ in range(300):
        batch = buffer.sample(48, 0)
        assert batch is not None
        pairs = align(batch.lengths)
        aims = batch.captured_NF[pairs.feature_index_M, 0].long() + 2
        assert torch.equal(batch.weight_M, (aims >= num_prompt).float())
        assert batch.weight_M.any()
        assert batch.lengths == (48,)
        predicted[aims[batch.weight_M > 0]] = 1
    assert predicted.nonzero()[:, 0].tolist() == [*range(num_prompt, length)], "each token is predicted"


def test_the_buffer_stays_within_its_bytes_the_oldest_features_leave_first_then_the_oldest_tokens() -> None:
    tokens_bytes, features = TOKEN_ID_BYTES * 30, torch.zeros(29, 3 * SIZE)  # of any width
    rollouts = [make_rollout(random_tokens(30, index), 3, index=index) for index in range(7)]
    for max_bytes, num_kept, num_ready in (
        (7 * tokens_bytes + 7 * features.nbytes, 7, 7),
        (7 * tokens_bytes + 3 * features.nbytes - 1, 7, 2),
        (5 * tokens_bytes, 5, 0),
    ):
        buffer = TrajectoryBuffer(max_bytes)
        for rollout in rollouts:
            buffer.add(rollout, features.clone())
            assert buffer.num_bytes <= max_bytes
        kept = [rollout.prompt_ids + rollout.token_ids for rollout in rollouts]
        assert [t.token_ids for t in buffer.trajectories] == kept[-num_kept:]
        assert [t.token_ids for t in buffer.ready(0)] == kept[7 - num_ready :]
    buffer.add(make_rollout([1, 2], 1))
    assert len(buffer) == 5, "too short to hold a pair"


class Plain:
    """The buffer's rule for what leaves, summed anew for every response."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.kept = max_bytes, list[tuple[int, int, bool]]()  # (name, tokens, has features)

    def num_bytes(self) -> int:
        return sum(TOKEN_ID_BYTES * num + has * 4 * SIZE * (num - 1) for _, num, has in self.kept)

    def add(self, name: int, num: int, has: bool) -> None:
        self.kept = [*(one for one in self.kept if one[0] != name), (name, num, has)]
        for index, (one, size, _) in enumerate(self.kept):
            if self.num_bytes() > self.max_bytes:
                self.kept[index] = (one, size, False)
        while self.num_bytes() > self.max_bytes and len(self.kept) > 1:
            self.kept.pop(0)


@pytest.mark.parametrize("seed", range(6))
def test_running_sums_keep_what_sums_over_all_would_keep(seed: int) -> None:
    """Responses with features and without, features that were recomputed, dropped, or of what has left."""
    rng = random.Random(seed)
    plain = Plain(rng.choice((400, 3000, 30_000)))
    buffer = TrajectoryBuffer(plain.max_bytes)
    seen = list[Trajectory]()
    for name in range(150):
        move = rng.random()
        if move < 0.7 or not seen:
            num, has = rng.randint(3, 30), rng.random() < 0.6
            rollout = make_rollout([name, *range(num - 1)], 1, index=name)
            buffer.add(rollout, torch.zeros(num - 1, SIZE) if has else None)
            plain.add(name, num, has)
            seen.append(buffer.trajectories[-1])
        elif move < 0.95:
            again = rng.choice(seen)
            again.features_TF = torch.zeros(again.num_usable, SIZE)
            buffer.renew(again)
            plain.add(again.token_ids[0], len(again.token_ids), True)
        else:
            none = rng.choice(buffer.trajectories)
            buffer.drop_features(none)
            plain.kept = [(one, n, has and one != none.token_ids[0]) for one, n, has in plain.kept]
        kept = [(t.token_ids[0], len(t.token_ids), t.features_TF is not None) for t in buffer.trajectories]
        assert kept == plain.kept
        assert buffer.num_bytes == plain.num_bytes()


@pytest.mark.parametrize("max_bytes", [10**9, 40_000, 1000], ids=["roomy", "features leave", "tokens leave"])
def test_adding_a_response_costs_the_same_however_many_are_held(max_bytes: int) -> None:
    """Counted in calls of Python: nothing may look at every response. The decode path waits for it."""
    buffer, features = TrajectoryBuffer(max_bytes), torch.zeros(9, SIZE)
    calls = []
    for index in range(1000):
        rollout = make_rollout(range(10), 3, index=index)
        num_calls = 0

        def count(*event: Any) -> None:
            nonlocal num_calls
            num_calls += 1

        sys.setprofile(count)
        try:
            buffer.add(rollout, features)
        finally:
            sys.setprofile(None)
        calls.append(num_calls)
    assert max(calls[500:]) <= max(calls[:20]) + 30
