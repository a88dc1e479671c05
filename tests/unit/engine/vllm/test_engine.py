"""An engine that is vLLM, over a pretend one: what it counts, chooses and hands over, without vLLM.

The pretend vLLM has vLLM's pipeline: a prompt is read in one step, which brings a token; what is drafted
at the end of a step is verified in the next one. Its model is a table of logits, and its tokens are the
law's.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import VOCAB, Switching, make_requests
from tests.refused import refused
from tests.unit.engine.own.test_sequence import assert_account_for_all
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout, SamplingParams
from tlt.engine.vllm.check import check_law, probes
from tlt.engine.vllm.engine import DraftingParts, VllmEngine
from tlt.engine.vllm.inside.law import LawTable, RowLaw
from tlt.engine.vllm.inside.verified import Verified
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner

WINDOW = 80
SLOTS = 6
LOGITS_VV = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
REQUESTS = make_requests(num_problems=9, num_samples=3, seed=8)


class Pretended:
    """A request inside the pretend vLLM. tokens: prompt and response.
    drafts: what the next step verifies."""

    def __init__(
        self, name: str, slot: int, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
    ) -> None:
        self.name, self.slot, self.tokens, self.stop_ids = name, slot, list(token_ids), stop_ids
        self.end = len(token_ids) + max_tokens
        self.has_read, self.drafts = False, [0] * 0


class PretendLink:
    """vLLM as its engine sees it (link.py). finds: for how many of three requests a draft is found; wrong:
    the share of drafted tokens that are."""

    device, dtype, is_v2, captures = torch.device("cpu"), torch.float32, False, True

    def __init__(self, max_depth: int = 4, finds: int = 3) -> None:
        self.max_depth, self.finds, self.random = max_depth, finds, random.Random(0)
        self.table = LawTable(SLOTS, VOCAB, self.device, tau=0.7)
        self.logits_VV = LOGITS_VV
        self.requests: dict[str, Pretended] = {}
        self.depth, self.num_preempted, self.log = max_depth, 0, list[str]()
        self.drafted: dict[str, Verified] = {}
        self.draft_depths: list[int] = []
        self.off_by = 0  # a fault: the position whose noise is used

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        extra_args: dict[str, Any],
    ) -> None:
        slot, law = min(set(range(SLOTS)) - {r.slot for r in self.requests.values()}), extra_args["tlt"]
        self.table.put(slot, RowLaw(tuple(law["key"]), SamplingParams(**law["params"])))
        self.requests[name] = Pretended(name, slot, token_ids, max_tokens, stop_ids)

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def draft(self, depth: int) -> None:
        self.depth = depth

    def verified(self, name: str) -> Verified:
        return self.drafted.get(name, Verified())

    def take_preemptions(self) -> int:
        found, self.num_preempted = self.num_preempted, 0
        return found

    def step(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        found = {}
        self.table.flush()
        self.drafted = {}
        self.draft_depths.append(self.depth)
        for name, request in list(self.requests.items()):
            tokens, logprobs = self.verify(request)
            agrees = [token == drafted for token, drafted in zip(tokens, request.drafts, strict=False)]
            self.drafted[name] = Verified(tuple(request.drafts), [*agrees, False].index(False))
            request.tokens += tokens
            request.has_read = True
            found[name] = tuple(tokens), tuple(logprobs)
            is_over = len(request.tokens) >= request.end or tokens[-1] in request.stop_ids
            request.drafts = [] if is_over else self.guess(request)
            if is_over:
                del self.requests[name]
        return found

    def verify(self, request: Pretended) -> tuple[list[int], list[float]]:
        tokens, logprobs, last = list[int](), list[float](), request.tokens[-1]
        for draft in [*request.drafts, None]:
            position = len(request.tokens) + len(tokens)
            token, logprob = self.draw(request, last, position + self.off_by)
            tokens.append(token)
            logprobs.append(logprob)
            last = token
            if token != draft or position + 1 >= request.end or token in request.stop_ids:
                break
        return tokens, logprobs

    def draw(self, request: Pretended, last: int, position: int) -> tuple[int, float]:
        drawn = self.table.draw(
            self.logits_VV[last][None], torch.tensor([request.slot]), torch.tensor([position])
        )
        return int(drawn[0]), float(drawn[1])

    def guess(self, request: Pretended) -> list[int]:
        """Drafts what will be drawn, each token wrong one time in four."""
        recorded, self.table.recorded = self.table.recorded, None
        drafts, last = list[int](), request.tokens[-1]
        for j in range(self.depth if self.random.randrange(3) < self.finds else 0):
            last, _ = self.draw(request, last, len(request.tokens) + j + self.off_by)
            drafts.append(last if self.random.random() < 0.75 else (last + 1) % VOCAB)
        self.table.recorded = recorded
        return drafts

    def captured(self, name: str, num_positions: int) -> Tensor | None:
        return torch.full((num_positions, 1), float(name.removeprefix("tlt-")))

    @property
    def weights(self) -> PretendLink:
        """What weights come in by (weights.py)."""
        return self

    @contextmanager
    def loading_policy(self) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        def load(part: Mapping[str, Tensor]) -> None:
            self.logits_VV = part["logits"]
            self.log.append("part")

        yield load
        self.log.append("reset")

    def release(self) -> None:
        self.log.append("release")

    def record(self, records: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
        kept, self.table.recorded = self.table.recorded, [] if records else None
        return kept or []


class Told(StrategyTuner):
    """A strategy at random at every choice; keeps what it is told."""

    def __init__(self, kinds: Sequence[Strategy], seed: int = 0) -> None:
        self.inner, self.told = Switching(kinds, seed), list[tuple[Strategy, StepOutcome]]()
        self.batches = list[BatchState]()

    def choose(self, batch: BatchState) -> Choice:
        return self.inner.choose(batch)

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        self.told.append((strategy, outcome))
        self.batches.append(batch)


CHAINS = [Strategy.OFF, *(Strategy("ngram", depth, 1, depth) for depth in (1, 2, 4))]


def engine_over(link: Any, tuner: Any = None, **options: Any) -> VllmEngine:
    drafting = DraftingParts(tuner)
    return VllmEngine(link, max_batch_size=SLOTS, window=WINDOW, drafting=drafting, **options)


def by_the_law(request: Request, logits_VV: Tensor = LOGITS_VV) -> tuple[int, ...]:
    tokens, params = list(request.prompt_ids), BatchParams.of([request.params])
    for _ in range(min(request.params.max_tokens, WINDOW - len(request.prompt_ids))):
        noise_11V = gumbel_noise(keys_tensor([request.noise_key]), torch.tensor([[len(tokens)]]), VOCAB)
        tokens.append(int(sample(logits_VV[tokens[-1]][None, None], noise_11V, params)[0]))
        if tokens[-1] in request.params.stop_ids:
            break
    return tuple(tokens[len(request.prompt_ids) :])


def texts(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(rollout.problem_id, rollout.sample_index): rollout.token_ids for rollout in rollouts}


@cache
def expected() -> dict[tuple[str, int], tuple[int, ...]]:
    return {(request.problem_id, request.sample_index): by_the_law(request) for request in REQUESTS}


@pytest.mark.parametrize("finds", [1, 3])
@pytest.mark.parametrize(
    "tuner", [None, FixedTuner(CHAINS[3]), Told(CHAINS)], ids=["off", "fixed", "switching"]
)
def test_responses_are_the_law_s_however_they_are_drafted(tuner: Any, finds: int) -> None:
    engine = engine_over(PretendLink(finds=finds), tuner)
    assert texts(list(engine.generate(REQUESTS))) == expected()
    assert engine.is_idle


def test_the_tuner_hears_what_a_step_verified_and_by_what_it_drafted_for_the_next_one() -> None:
    link, tuner = PretendLink(finds=1), Told(CHAINS)
    engine = engine_over(link, tuner)
    list(engine.generate(REQUESTS))
    assert len(tuner.told) > 15
    for strategy, outcome in tuner.told:
        assert len(outcome.accepted) == len(outcome.drafted)
        assert set(outcome.drafted) <= {0, strategy.depth}
        assert all(a <= d for a, d in zip(outcome.accepted, outcome.drafted, strict=True))
        assert outcome.num_tokens >= len(outcome.accepted)
        assert strategy.is_off == (not outcome.accepted) or outcome.num_tokens <= SLOTS
    depths = {strategy.depth for strategy, _ in tuner.told}
    assert depths == {0, 1, 2, 4}
    assert any(set(outcome.drafted) == {0} for _, outcome in tuner.told), "steps that found nothing count"
    others = [(strategy, outcome.drafted_next) for strategy, outcome in tuner.told if outcome.drafted_next]
    assert all(strategy != drafted for strategy, drafted in others)
    assert {Strategy.OFF, CHAINS[3]} <= {drafted for _, drafted in others}


def test_the_tuner_hears_of_no_step_that_read_prompts() -> None:
    tuner, link = Told(CHAINS[:1]), PretendLink()
    step, reads = link.step, list[bool]()

    def noted() -> Any:
        reads.append(any(not request.has_read for request in link.requests.values()))
        return step()

    link.step = noted  # type: ignore[method-assign]  # looks before every step
    list(engine_over(link, tuner).generate(REQUESTS))
    assert 0 < len(tuner.told) == reads.count(False) < len(reads)


def test_a_choice_is_kept_until_a_step_has_verified_what_it_drafts_itself() -> None:
    link = PretendLink()
    list(engine_over(link, Told(CHAINS)).generate(REQUESTS))
    runs = [1]
    for before, now in zip(link.draft_depths, link.draft_depths[1:], strict=False):
        runs = [*runs[:-1], runs[-1] + 1] if before == now else [*runs, 1]
    assert min(runs[1:-1]) >= 2
    assert len(runs) > 10


def test_verifications_are_counted_under_the_strategy_that_drafted() -> None:
    link, tuner = PretendLink(), Told(CHAINS)
    engine = engine_over(link, tuner)
    verified: dict[str, int] = {}
    step, strategies = link.step, [Strategy.OFF]

    def counted() -> Any:
        found = step()
        if any(one.draft for one in link.drafted.values()):
            name = str(strategies[-1])
            verified[name] = verified.get(name, 0) + sum(len(tokens) for tokens, _ in found.values())
        strategies.append(engine._next.strategy)
        return found

    link.step = counted  # type: ignore[method-assign]  # counts on the way
    endless = [dataclasses.replace(one.params, stop_ids=()) for one in REQUESTS]
    pairs = zip(REQUESTS, endless, strict=True)
    list(engine.generate([dataclasses.replace(one, params=params) for one, params in pairs]))
    counts = {name: stats.num_tokens for name, stats in engine.stats.by_strategy.items() if name != "off"}
    assert counts == verified
    assert engine.stats.num_drafted_tokens >= sum(engine.stats.survivors_by_depth.values()) > 0
    assert engine.stats.num_tokens == sum(stats.num_tokens for stats in engine.stats.by_strategy.values())


@pytest.mark.parametrize("tuner", [None, FixedTuner(CHAINS[2])], ids=["off", "fixed"])
def test_responses_go_on_in_another_engine(tuner: Any) -> None:
    first, second = engine_over(PretendLink(), tuner), engine_over(PretendLink(), Told(CHAINS))
    first.add(REQUESTS)
    found = []
    for _ in range(4):
        found += first.step()
    moved = first.withdraw([3, 0, 2])
    assert all(request.token_ids and len(request.logprobs) == len(request.token_ids) for request in moved)
    assert len(first.link.requests) == len(first.running)  # type: ignore[attr-defined]  # the pretend one has it
    moved += first.withdraw_waiting(5)
    second.add(moved)
    for engine in (first, second):
        while not engine.is_idle:
            found += engine.step()
    assert texts([finished.rollout for finished in found]) == expected()
    assert all(len(f.rollout.logprobs) == len(f.rollout.token_ids) for f in found)


def test_a_response_records_its_drafts() -> None:
    engine = engine_over(PretendLink(), FixedTuner(CHAINS[3]))
    rollouts = list(engine.generate(REQUESTS[:6]))
    assert_account_for_all(rollouts, [engine])
    assert {one.drafter for rollout in rollouts for one in rollout.drafts or ()} == {"ngram"}


def test_nothing_is_left_after_an_abort_and_asking_again_gives_the_same() -> None:
    link = PretendLink()
    engine = engine_over(link, FixedTuner(CHAINS[2]))
    engine.add(REQUESTS)
    for _ in range(3):
        engine.step()
    engine.abort()
    assert engine.is_idle
    assert (engine.room, engine.num_waiting, link.requests) == (SLOTS, 0, {})
    assert engine.step() == []
    assert texts(list(engine.generate(REQUESTS))) == expected()


def test_room_and_waiting_follow_the_queue() -> None:
    engine = engine_over(PretendLink())
    engine.add(REQUESTS[:4])
    assert (engine.room, engine.num_waiting, len(engine.running)) == (SLOTS - 4, 4, 0)
    engine.step()
    assert engine.num_waiting == 0
    engine.add(REQUESTS[4:20])
    assert engine.room == 0
    with pytest.raises(AssertionError, match="under running responses"):
        engine.load_policy({"logits": LOGITS_VV})


def test_a_response_ends_at_a_stop_text_and_vllm_is_told() -> None:
    link = PretendLink()
    engine = engine_over(
        link, FixedTuner(CHAINS[3]), decode=lambda ids: "".join(chr(97 + token % 26) for token in ids)
    )
    plain = dataclasses.replace(REQUESTS[0], params=SamplingParams(seed=1, max_tokens=50))
    (whole,) = engine.generate([plain])
    text = "".join(chr(97 + token % 26) for token in whole.token_ids)
    stop = text[20:22]
    params = dataclasses.replace(plain.params, stop=(stop,))
    (found,) = engine.generate([dataclasses.replace(plain, params=params)])
    assert found.token_ids == whole.token_ids[: text.index(stop) + 2]
    assert found.finish_reason == "stop"
    assert link.requests == {}


def test_logits_that_are_not_finite_are_refused_in_one_line() -> None:
    link = PretendLink()
    link.logits_VV = torch.full((VOCAB, VOCAB), math.nan)
    engine = engine_over(link)
    engine.load_policy({"logits": link.logits_VV}, 3)
    with refused(r"^policy 3 gives logits that are not finite \(problem 'p0', sample 0, position"):
        list(engine.generate(REQUESTS))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "is empty"), (tuple(range(50)) * 2, "has 100 tokens; the model's window is 80")],
)
def test_a_prompt_that_no_response_can_be_made_to_is_refused(prompt: tuple[int, ...], message: str) -> None:
    with refused(message):
        engine_over(PretendLink()).add([dataclasses.replace(REQUESTS[0], prompt_ids=prompt)])


def test_what_was_captured_comes_with_the_response_where_it_is_asked_for() -> None:
    engine = engine_over(PretendLink())
    for captures in (True, False):
        engine.add(REQUESTS[:3])
        finished = []
        while not engine.is_idle:
            finished += engine.step(captures)
        for one in finished:
            rollout = one.rollout
            if captures:
                assert one.captured_TF is not None
                assert one.captured_TF.shape[0] == len(rollout.prompt_ids) + len(rollout.token_ids) - 1
            else:
                assert one.captured_TF is None


def test_a_new_policy_is_used_from_its_first_token_on() -> None:
    link = PretendLink()
    engine = engine_over(link, FixedTuner(CHAINS[3]))
    list(engine.generate(REQUESTS[:5]))
    other_VV = LOGITS_VV.flip(0)
    engine.load_policy({"logits": other_VV}, 7)
    found = list(engine.generate(REQUESTS))
    assert texts(found) == {(r.problem_id, r.sample_index): by_the_law(r, other_VV) for r in REQUESTS}
    assert {rollout.policy_version for rollout in found} == {7}
    engine.release()
    assert link.log == ["part", "reset", "release"]


def test_preemptions_are_counted_once() -> None:
    link = PretendLink()
    engine = engine_over(link)
    engine.add(REQUESTS[:2])
    link.num_preempted = 3
    engine.step()
    engine.step()
    assert engine.stats.num_preemptions == 3


def test_the_self_check_leaves_nothing_behind_and_lets_the_law_pass() -> None:
    link, tuner = PretendLink(), FixedTuner(CHAINS[3])
    engine = engine_over(link, tuner)
    check_law(engine, VOCAB)
    assert (engine.tuner, engine.is_idle, engine.stats.num_steps, link.depth) == (tuner, True, 0, 0)
    assert link.table.recorded is None
    assert texts(list(engine.generate(REQUESTS))) == expected()


def another_position(link: PretendLink) -> None:
    link.off_by = 1


def another_token(link: PretendLink) -> None:
    draw = link.draw
    link.draw = lambda *args: ((draw(*args)[0] + (args[2] == 9)) % VOCAB, draw(*args)[1])  # type: ignore[method-assign]  # the fault


def another_temperature(link: PretendLink) -> None:
    add = link.add

    def hotter(name: str, ids: Sequence[int], num: int, stop: Sequence[int], extra: dict[str, Any]) -> None:
        params = extra["tlt"]["params"] | {"temperature": 1.3}
        add(name, ids, num, stop, {"tlt": extra["tlt"] | {"params": params}})

    link.add = hotter  # type: ignore[method-assign]  # the fault


def another_score(link: PretendLink) -> None:
    draw = link.draw
    link.draw = lambda *args: (draw(*args)[0], draw(*args)[1] + 0.01)  # type: ignore[method-assign]


def drafts_are_believed(link: PretendLink) -> None:
    verify = link.verify
    link.verify = lambda one: (one.drafts[:2], [-1.0] * 2) if len(one.drafts) > 1 else verify(one)  # type: ignore[method-assign]


FAULTS = [another_position, another_token, another_temperature, another_score, drafts_are_believed]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_check_refuses_an_engine_that_drifted(fault: Callable[[PretendLink], None]) -> None:
    link = PretendLink()
    fault(link)
    with refused("engine: vllm does not sample by the law here"):
        check_law(engine_over(link, FixedTuner(CHAINS[3])), VOCAB)


@pytest.mark.parametrize("window", [2, 3, 5, 17])
def test_the_self_check_fits_into_the_smallest_window(window: int) -> None:
    for request in probes(VOCAB, 2, window):
        assert 1 <= len(request.prompt_ids) < len(request.prompt_ids) + request.params.max_tokens <= window


def test_a_response_that_was_over_when_it_came_ends_there_and_vllm_never_sees_it() -> None:
    link = PretendLink()
    engine = VllmEngine(link, max_batch_size=SLOTS, window=WINDOW)  # type: ignore[arg-type]  # the pretend one
    params = dataclasses.replace(REQUESTS[0].params, max_tokens=5)
    over = Request("over", 0, (1, 2), params, token_ids=(3,) * 10, logprobs=(-1.0,) * 10)
    (found,) = engine.generate([over])
    assert (found.token_ids, found.finish_reason) == ((3,) * 5, "length")
    assert not link.requests
    assert texts(list(engine.generate([over, *REQUESTS[:2]]))).keys() >= {("over", 0)}
