"""The feature history against a dictionary that forgets nothing; and its promise to cost plain steps
nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lossless.helpers import make_engine, make_policy
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.drafter.drafting.learned.feature_history import FeatureHistory
from tlt.speculation.tuner.protocol import Choice, StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_read_is_what_was_written_last_whatever_happened_between(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([8, 40, 1000]))
    num_slots = 3
    history = FeatureHistory(2, window, num_slots, torch.float64, torch.device("cpu"))
    known: list[dict[int, float]] = [{} for _ in range(num_slots)]
    ends = [0] * num_slots
    value = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["decode", "decode", "decode", "draft", "admit", "move", "read"]))
        if action in ("decode", "draft"):
            slots = range(data.draw(st.integers(1, num_slots)))
            width = 1 if action == "decode" else data.draw(st.integers(2, 6))
            kept = 1 if action == "decode" else data.draw(st.integers(1, width))
            block = (
                torch.arange(len(slots) * width * 2, dtype=torch.float64).view(len(slots), width, 2) + value
            )
            value += block.numel()
            history.write(slots, [ends[slot] for slot in slots], block)
            for row, slot in enumerate(slots):
                for t in range(width):
                    known[slot][ends[slot] + t] = float(block[row, t, 0])
                ends[slot] += kept  # the rest were rejected drafts
        elif action == "admit":
            slot, length = data.draw(st.integers(0, num_slots - 1)), data.draw(st.integers(1, 60))
            block = torch.arange(length * 2, dtype=torch.float64).view(1, length, 2) + value
            value += block.numel()
            history.write([slot], [0], block)
            known[slot], ends[slot] = {t: float(block[0, t, 0]) for t in range(length)}, length
        elif action == "move":
            source, target = data.draw(st.permutations(range(num_slots)))[:2]
            history.move(source, target)
            known[target], ends[target] = dict(known[source]), ends[source]
        else:
            for slot in range(num_slots):
                first = history.first_known(ends[slot])
                if ends[slot] > first:
                    found = history.read([slot], [first], ends[slot] - first)[0, :, 0].tolist()
                    assert found == [known[slot][t] for t in range(first, ends[slot])]


def test_memory_is_bounded_by_the_window() -> None:
    history = FeatureHistory(4, 100, 2, torch.float32, torch.device("cpu"))
    for position in range(5000):
        history.write(range(2), [position, position], torch.zeros(2, 1, 4))
    history.flush()
    assert history.num_bytes <= 2 * (100 + Strategy.MAX_DEPTH + 1) * 4 * 4


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafter", ["learned", "ngram"])
def test_a_step_with_off_chosen_runs_exactly_the_operations_of_an_engine_without_speculation(
    drafter: str,
) -> None:
    policy = make_policy()
    requests = [Request(f"p{i}", 0, tuple(range(1, 3 + i)), SamplingParams(max_tokens=50)) for i in range(3)]
    counted = []
    for tuner in (None, FixedTuner(Strategy.OFF)):
        engine = make_engine(policy, tuner, drafter=drafter)
        engine.add(requests)
        engine.step()  # the prefill hands over the prompts' features
        per_step = []
        for _ in range(40):
            with CountOperations() as operations:
                engine.step()
            per_step.append(operations.names)
        counted.append(per_step)
    assert counted[0] == counted[1]
    assert all(len(names) > 20 for names in counted[0])


def test_switching_on_costs_one_catch_up_of_the_drafter_and_no_forward_of_the_target() -> None:
    policy = make_policy()

    class OnFrom(StrategyTuner):
        def __init__(self, step: int) -> None:
            self.step, self.count = step, 0

        def choose(self, batch: object) -> Choice:
            self.count += 1
            return Choice(Strategy.OFF if self.count <= self.step else Strategy("learned", 2, 1, 2))

    engine = make_engine(policy, OnFrom(30))
    target_rows: list[int] = []
    drafter_rows: list[int] = []
    target, learned = engine.target, engine.drafter.learned

    def spy(model: object, name: str, rows: list[int]) -> None:
        original = getattr(model, name)

        def forward(first: Tensor, *rest: object) -> Tensor:
            rows.append(len(first))
            return original(first, *rest)

        setattr(model, name, forward)

    spy(target, "forward_capturing", target_rows)
    spy(learned.model, "forward", drafter_rows)
    engine.add([Request("p", 0, (1, 2, 3), SamplingParams(max_tokens=60))])
    for _ in range(30):
        engine.step()
    assert drafter_rows == []
    target_rows.clear()
    engine.step()
    assert target_rows == [3], "the root and two drafts"
    assert drafter_rows[0] == 3 + 30 - 2, "all pairs but the last"
    assert drafter_rows[1:] == [1, 1], "the last pair, and one drafted pair"
