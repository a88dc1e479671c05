"""What a drafter has not read, with a pretended drafter: it reads every position once, in order, with the
hidden state that the target had there last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tlt.engine.vllm.inside import unread
from tlt.engine.vllm.inside.unread import Rows, Unread, UnreadPositions, why_awake

NUM_SLOTS, WIDTH = 4, 2


@dataclass
class Sequence:
    """A request in a slot. states: the hidden state of each position that is the sequence's own."""

    slot: int
    prompt: int
    states: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    """What the drafter has read."""
    num_drafted: int = 0


class Pretend:
    """Steps of a target, and the drafter that follows it."""

    def __init__(self, rng: random.Random, longest_pass: int = 1000) -> None:
        self.rng, self.unread = rng, UnreadPositions(NUM_SLOTS, 1000, longest_pass)
        self.passes = list[int]()
        self.num_own = 0
        """Passes that vLLM itself runs."""

    def step(self, batch: list[Sequence], drafts: bool) -> None:
        counts = [1 + one.num_drafted if one.states else one.prompt for one in batch]
        starts = [len(one.states) for one in batch]
        rows = Rows(
            np.array([one.slot for one in batch]),
            np.array(starts),
            np.array(counts),
            np.array([not one.states for one in batch]),
        )
        computed = [[self.rng.random() for _ in range(count)] for count in counts]
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])

        def read(asked: Unread) -> None:
            self.passes.append(len(asked.behind_N))
            at_N = torch.from_numpy(asked.each(asked.ends_B) + asked.behind_N)
            found_N = self.unread.take(torch.from_numpy(asked.each(asked.slots_B)), at_N)[:, 0].tolist()
            for row, position, state in zip(asked.each(asked.rows_B), at_N.tolist(), found_N, strict=True):
                assert position == len(batch[row].read), "in order"
                batch[row].read.append(state)

        if drafts:
            self.unread.read(rows, np.arange(len(batch)), read)
            runs = True
        else:
            hidden = torch.tensor([value for one in computed for value in one], dtype=torch.float64)
            padded = torch.cat([hidden, hidden.new_zeros(3)])[:, None].expand(-1, WIDTH)
            slots = torch.from_numpy(rows.slots_B)
            runs = self.unread.must_run(rows, padded)
            self.unread.store(rows, padded, positions, slots, read, runs)
        self.num_own += runs
        for one, values in zip(batch, computed, strict=True):
            kept = len(values) - (self.rng.randint(0, one.num_drafted) if one.states else 0)
            if runs and len(one.read) == len(one.states):  # else it reads with a gap, and later again
                one.read += values[:kept]
            one.states += values[:kept]
            one.num_drafted = 2 * drafts


@pytest.mark.parametrize("longest_pass", [1000, 9])
@pytest.mark.parametrize("room", [1, 3, 50])
def test_the_drafter_reads_every_position_once_before_it_drafts(
    monkeypatch: pytest.MonkeyPatch, room: int, longest_pass: int
) -> None:
    monkeypatch.setattr(unread, "KEPT_BYTES", room * NUM_SLOTS * WIDTH * 8)
    for seed in range(20):
        rng = random.Random(seed)
        pretend, batch = Pretend(rng, longest_pass), list[Sequence]()
        for _ in range(120):
            batch = [one for one in batch if rng.random() < 0.95]
            for slot in {*range(NUM_SLOTS)} - {one.slot for one in batch}:
                if rng.random() < 0.2:
                    pretend.unread.forget(slot)
                    batch.append(Sequence(slot, rng.randint(1, 7)))
            rng.shuffle(batch)
            if batch:
                pretend.step(batch, drafts := rng.random() < 0.3)
                assert not drafts or all(one.read == one.states for one in batch)
        assert max(pretend.passes) <= longest_pass


def test_while_nothing_is_drafted_only_prompts_are_read() -> None:
    pretend, batch = Pretend(random.Random(1)), [Sequence(0, 5), Sequence(2, 3)]
    for _ in range(20):
        pretend.step(batch, drafts=False)
    assert (pretend.passes, pretend.num_own) == ([], 1)
    pretend.step([*batch, Sequence(1, 4)], drafts=False)
    assert (pretend.passes, pretend.num_own) == ([], 2)
    pretend.step(batch, drafts=True)
    assert pretend.passes == [20 * 2]


def test_a_drafter_that_others_wait_for_misses_no_step() -> None:
    class Config:
        class parallel_config:
            data_parallel_size = 2

        kv_transfer_config = None

    assert why_awake(Config, {}) == "data-parallel ranks wait for its passes"
    Config.parallel_config.data_parallel_size = 1
    assert why_awake(Config, {"it reads images, too": False}) is None
    assert why_awake(Config, {"it reads images, too": True}) == "it reads images, too"
