"""Tuners against simulated machines: what they find, how soon, and that they change their minds."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.cases import cases
from tlt.base.speculation import Adaptive, parse_speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner import cost_model, step_costs
from tlt.speculation.tuner.acceptance import AcceptanceModel
from tlt.speculation.tuner.cost_model import CostModel, Decision
from tlt.speculation.tuner.protocol import BatchState, ReferenceDraft, StepOutcome, StrategyTuner
from tlt.speculation.tuner.step_costs import StepCosts
from tlt.speculation.tuner.tuner import FixedTuner, default_arms, make_tuner

ALL = ("learned", "ngram", "hybrid")
ARMS = default_arms(ALL)
CHAINS = default_arms(ALL, trees=False)


class Machine:
    """Seconds and acceptance of every arm, with noise.

    half_rows: tokens in a forward at which it costs twice one token's.
    cold: seconds that an arm's first step takes besides.

    Where retrieval is better, the hybrid does not ask the learned drafter.
    """

    def __init__(
        self, hazard: dict[str, float], half_rows: float, seed: int = 0, noise: float = 0.1, cold: float = 0.0
    ) -> None:
        self.hazard, self.half_rows, self.noise, self.random = hazard, half_rows, noise, random.Random(seed)
        self.cold, self.ran = cold, set[Strategy]()

    def tokens(self, arm: Strategy) -> float:
        hazard = self._hazard(arm)
        return sum(hazard**d for d in range(arm.depth + 1))

    def _hazard(self, arm: Strategy) -> float:
        return 0.0 if arm.is_off else 1 - (1 - self.hazard[arm.drafter]) ** math.sqrt(arm.width)

    def seconds(self, arm: Strategy, batch: int) -> float:
        is_retrieved = arm.drafter == "hybrid" and self.hazard["ngram"] > self.hazard["learned"]
        is_learned = arm.drafter in ("learned", "hybrid") and not is_retrieved
        drafting = 0.05 * arm.depth * (1 + (arm.width - 1) / 2) if is_learned else 0.0
        return 0.01 * (self.half_rows + batch * (1 + arm.budget)) / (self.half_rows + 1) + 0.01 * drafting

    def speed(self, arm: Strategy, batch: int) -> float:
        return batch * self.tokens(arm) / self.seconds(arm, batch)

    def best(self, arms: Sequence[Strategy], batch: int) -> float:
        return max(self.speed(arm, batch) for arm in arms)

    def run(self, arm: Strategy, batch: int) -> StepOutcome:
        hazard, accepted = self._hazard(arm), []
        for _ in range(batch if not arm.is_off else 0):
            count = 0
            while count < arm.depth and self.random.random() < hazard:
                count += 1
            accepted.append(count)
        seconds = self.seconds(arm, batch) * math.exp(self.random.gauss(0, self.noise))
        seconds += 0.0 if arm in self.ran else self.cold
        self.ran.add(arm)
        return StepOutcome(batch + sum(accepted), tuple(accepted), (arm.budget,) * len(accepted), seconds)


def play(
    tuner: StrategyTuner,
    machine: Machine,
    sizes: Sequence[int],
    versions: Callable[[int], tuple[int, int]] = lambda _: (0, 0),
) -> list[Strategy]:
    chosen: list[Strategy] = []
    for step, size in enumerate(sizes):
        batch = BatchState(size, *versions(step))
        arm = tuner.choose(batch).strategy
        tuner.observe(arm, batch, machine.run(arm, size))
        chosen.append(arm)
    return chosen


def share_of_best(
    machine: Machine, chosen: Sequence[Strategy], sizes: Sequence[int], arms: Sequence[Strategy] = CHAINS
) -> float:
    """Speed relative to the best arm at every batch size, without luck: by the machine's own means."""
    seconds = sum(machine.seconds(arm, size) for arm, size in zip(chosen, sizes, strict=True))
    ideal = sum(machine.tokens(a) * s / machine.best(arms, s) for a, s in zip(chosen, sizes, strict=True))
    return ideal / seconds


# ── what it finds ───────────────────────────────────────────────────────────────────────────────────────────

ROLLOUT = [*[64] * 60, *[48] * 40, *[32] * 40, *[16] * 60, *[8] * 80, *[4] * 80, *[2] * 120, *[1] * 200]


@pytest.mark.parametrize(
    ("hazard", "half_rows"),
    [
        ({"learned": 0.85, "ngram": 0.5, "hybrid": 0.85}, 25.0),  # this CPU: off at no batch size
        ({"learned": 0.7, "ngram": 0.4, "hybrid": 0.72}, 200.0),  # a GPU
        ({"learned": 0.5, "ngram": 0.8, "hybrid": 0.8}, 60.0),  # retrieval wins
        ({"learned": 0.05, "ngram": 0.02, "hybrid": 0.05}, 25.0),  # nothing helps
    ],
)
def test_in_its_first_rollout_the_cost_model_comes_close_to_the_best_arm_at_every_batch_size(
    hazard: dict[str, float], half_rows: float
) -> None:
    shares = []
    for seed in range(3):
        machine = Machine(hazard, half_rows, seed)
        shares.append(share_of_best(machine, play(CostModel(CHAINS), machine, ROLLOUT), ROLLOUT))
    assert np.mean(shares) > 0.93
    assert min(shares) > 0.9


@pytest.mark.parametrize(("size", "share"), [(1, 0.6), (8, 0.95), (64, 0.95)])
def test_with_a_useless_drafter_the_cost_model_is_soon_at_off(size: int, share: float) -> None:
    """At batch 1 a draft of one token costs but a few percent of a step."""
    for seed in range(3):
        machine = Machine({"learned": 0.0, "ngram": 0.0, "hybrid": 0.0}, 25.0, seed)
        chosen = play(CostModel(CHAINS), machine, [size] * 600)
        assert Counter(chosen[40:])[Strategy.OFF] > share * 560
        assert share_of_best(machine, chosen, [size] * 600) > 0.95, "finding it out has cost less than 5 %"


@pytest.mark.parametrize("size", [1, 16])
def test_cold_steps_price_no_arm(size: int) -> None:
    """The first step of each arm takes 50 times as long: kernels are compiled, memory is allocated."""
    machine = Machine({"learned": 0.9, "ngram": 0.0, "hybrid": 0.9}, 25.0, cold=0.5)
    chosen = play(CostModel(CHAINS), machine, [size] * 200)
    assert share_of_best(machine, chosen[60:], [size] * 140) > 0.9


def test_trials_cost_no_more_than_their_share_of_all_seconds() -> None:
    """Of the seconds that were observed, with machines that are disturbed in one of twenty steps."""
    for seed in range(20):
        machine, tuner = Machine({"learned": 0.3, "ngram": 0.2, "hybrid": 0.3}, 25.0, seed), CostModel(CHAINS)
        for _ in range(300):
            batch = BatchState(8, 0, 0)
            arm, before = tuner.choose(batch).strategy, tuner.lost_seconds
            outcome = machine.run(arm, 8)
            factor = machine.random.uniform(2, 6) if machine.random.random() < 0.05 else 1.0
            tuner.observe(arm, batch, replace(outcome, seconds=factor * outcome.seconds))
            if tuner.lost_seconds > before:
                assert before <= cost_model.EXPLORE * tuner.seconds
        assert 0 < tuner.lost_seconds < 2 * cost_model.EXPLORE * tuner.seconds


def test_when_the_drafter_goes_bad_the_mind_is_changed_and_changed_back() -> None:
    tuner = CostModel(CHAINS)
    good, bad = {"learned": 0.9, "ngram": 0.1, "hybrid": 0.1}, {"learned": 0.0, "ngram": 0.1, "hybrid": 0.1}
    for period, hazard in enumerate((good, bad, good)):
        machine = Machine(hazard, 25.0, period)
        chosen = play(tuner, machine, [8] * 1500, lambda _, period=period: (period, period))
        assert share_of_best(machine, chosen[-200:], [8] * 200) > 0.95


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_short_rollout_loses_little_to_a_drafter_that_is_of_no_use(batch_size: int) -> None:
    """32 steps of a tuner that knows nothing, where each row costs; on the mean of eight."""
    useless, off, seconds = {"learned": 0.02, "ngram": 0.02, "hybrid": 0.02}, 0.0, 0.0
    for seed in range(8):
        machine, tuner = Machine(useless, 8.0, seed), CostModel(CHAINS)
        for _ in range(32):
            batch = BatchState(batch_size, 0, 0)
            arm = tuner.choose(batch).strategy
            tuner.observe(arm, batch, machine.run(arm, batch_size))
            off += machine.seconds(Strategy.OFF, batch_size)
            seconds += machine.seconds(arm, batch_size)
    assert off / seconds > 0.9


@pytest.mark.parametrize(
    ("kinds", "half_rows"),
    cases(product([("ngram",), ALL], [25.0, 200.0]), usual=[(("ngram",), 25.0), (ALL, 200.0)]),
)
def test_a_text_that_begins_to_repeat_itself_is_noticed(kinds: Sequence[str], half_rows: float) -> None:
    """A long response, alone: for 400 steps nothing repeats, for 400 everything does, and so on. Four
    times."""
    arms, ideal, seconds = default_arms(kinds, trees=False), 0.0, 0.0
    for seed, step in product(range(4), range(2400)):
        if step == 0:
            machine, tuner = Machine({}, half_rows, seed), CostModel(arms)
        repeats = step // 400 % 2
        machine.hazard = (
            {"learned": 0.55, "ngram": 0.93, "hybrid": 0.93}
            if repeats
            else {"learned": 0.3, "ngram": 0.1, "hybrid": 0.3}
        )
        batch = BatchState(1, 0, 0)
        arm = tuner.choose(batch).strategy
        tuner.observe(arm, batch, machine.run(arm, 1))
        ideal += machine.tokens(arm) / machine.best(arms, 1)
        seconds += machine.seconds(arm, 1)
    assert ideal / seconds > 0.7


class Reader(Machine):
    """Reads keys and values slowly: behind 1,000 tokens a row costs little beside them."""

    num_cached = 0

    def seconds(self, arm: Strategy, batch: int) -> float:
        read = 1.2e-5 + 1.4e-6 * (1 + arm.budget)
        return super().seconds(arm, batch) + read * self.num_cached


def test_what_a_draft_is_worth_goes_by_the_tokens_that_a_step_reads() -> None:
    """Three rollouts of 16 responses, most short and a few of 2,000 tokens; the best arm goes by what is cached."""
    hazard, shares = {"learned": 0.85, "ngram": 0.6, "hybrid": 0.87}, []
    for seed in range(4):
        machine, tuner = Reader(hazard, 7.0, seed), CostModel(CHAINS)
        ideal = seconds = 0.0
        for rollout in range(3):
            lengths = np.exp(np.random.default_rng(seed * 3 + rollout).normal(5.4, 1.1, 16)).clip(20, 2000)
            place = np.zeros(16)
            while (running := place < lengths).any():
                size, machine.num_cached = int(running.sum()), int(place[running].sum())
                batch = BatchState(size, rollout, 0, num_cached=machine.num_cached)
                arm = tuner.choose(batch).strategy
                outcome = machine.run(arm, size)
                tuner.observe(arm, batch, outcome)
                place[running] += 1 + np.array(outcome.accepted or [0] * size)
                if rollout:
                    ideal += size * machine.tokens(arm) / machine.best(CHAINS, size)
                    seconds += machine.seconds(arm, size)
        shares.append(ideal / seconds)
    assert np.mean(shares) > 0.96


# ── references ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cost_model_predicts_how_fast_it_would_be_without_references() -> None:
    """Four sequences, each with a reference that is right; without, the best arm is what this machine
    says."""
    arms = default_arms(("learned", "ahead", "ahead+learned"), trees=False)
    machine = Machine({"learned": 0.7}, 25.0)
    tuner, stats, truth = CostModel(arms), EngineStats(), 0.0
    best = machine.best([arm for arm in arms if not arm.uses_references], 4)
    for step in range(600):
        reference_drafts = (ReferenceDraft(0.999, 200),) * 4 if step % 2 and step > 200 else ()
        batch = BatchState(4, 0, 0, 0, reference_drafts)
        choice = tuner.choose(batch)
        arm = choice.strategy
        assert (choice.otherwise is not None) == arm.uses_references
        if arm.uses_references:
            kept, noise = min(arm.depth, 200), math.exp(machine.random.gauss(0, 0.1))
            seconds = 0.01 * (25.0 + 4 * (1 + kept)) / 26.0 * noise
            outcome = StepOutcome(4 * (1 + kept), (kept,) * 4, (kept,) * 4, seconds, (True,) * 4)
            truth += outcome.num_tokens / best - seconds
        else:
            outcome = machine.run(arm, 4)
        stats.record_step(choice, outcome, 4)
        tuner.observe(arm, batch, outcome)
    assert truth > 10.0
    assert stats.won_seconds == pytest.approx(truth, rel=0.15)


def test_a_batch_of_which_some_or_all_have_references_is_decided_for() -> None:
    tuner = CostModel(default_arms(("learned", "ahead+learned"), trees=False))
    for size, num_references in ((6, 6), (6, 3), (2, 2), (1, 1)):
        batch = BatchState(size, 0, 0, 0, (ReferenceDraft(0.9, 40),) * num_references)
        for _ in range(12):
            arm = tuner.choose(batch).strategy
            accepted = (min(arm.depth, 3),) * size if arm.depth else ()
            followed = tuple(i < num_references for i in range(size)) if arm.uses_references else ()
            seconds = 0.01 + 0.0001 * arm.depth
            tuner.observe(
                arm, batch, StepOutcome(size + sum(accepted), accepted, accepted, seconds, followed)
            )
        choice = tuner.choose(batch)
        assert choice.strategy.uses_references
        assert choice.speed is not None


# ── seconds ─────────────────────────────────────────────────────────────────────────────────────────────────


def seconds_of(costs: StepCosts, arms: Sequence[Strategy], batch_size: int) -> list[float]:
    rows_A = np.array([batch_size * (1 + arm.budget) for arm in arms], float)
    found: list[float] = costs.forecast(rows_A, batch_size).seconds_A.tolist()
    return found


def test_one_measured_arm_informs_its_neighbours() -> None:
    arms = [Strategy.OFF, *(Strategy("learned", depth, 1, depth) for depth in (4, 6, 15))]
    costs, rows_A = StepCosts(arms), np.array([8.0, 40.0, 56.0, 128.0])
    unknown_A = costs.variance(costs.forecast(rows_A, 8).shares_AP, 0)
    for _ in range(20):
        costs.observe(1, 8, 40.0, 0.02, step_costs.NOISE, 1)
        costs.observe(0, 8, 8.0, 0.01, step_costs.NOISE, 1)
    seconds_A, shares_AP = costs.forecast(rows_A, 8)
    assert seconds_A[:2] == pytest.approx([0.01, 0.02], rel=0.05)
    assert 0.021 < seconds_A[2] < 0.03, "its neighbour"
    variance_A = costs.variance(shares_AP, 0)
    assert variance_A[1] < variance_A[2] < variance_A[3] < unknown_A[3]
    assert costs.forecast(rows_A * 10 / 8, 10).seconds_A[1] == pytest.approx(0.022, rel=0.2), (
        "a neighbouring batch size"
    )


def test_what_is_learned_of_forwards_is_the_posterior_of_the_textbook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing is drafted, logarithms are linear in what is sought: against one inversion of all
    measurements at once."""
    monkeypatch.setattr(step_costs, "_FORGET", 0.0)
    costs, rng = StepCosts([Strategy.OFF]), random.Random(1)
    mean, covariance = costs.mean_P.copy(), costs.covariance_PP.copy()
    rows, noise = [1, 2, 3, 8, 48, 300, 8000, 3], step_costs.NOISE
    seconds = [0.01 * (1 + n / 40) * math.exp(rng.gauss(0, 0.1)) for n in rows]
    weights_NP = np.zeros((len(rows), len(mean)))
    places = range(step_costs.KNOTS)
    for row, n in enumerate(rows):
        weights_NP[row, : step_costs.KNOTS] = [
            np.interp(math.log2(n), places, one) for one in np.eye(step_costs.KNOTS)
        ]
    for n, took in zip(rows, seconds, strict=True):
        costs.observe(0, 1, n, took, noise, 1)
    gain = (
        covariance
        @ weights_NP.T
        @ np.linalg.inv(weights_NP @ covariance @ weights_NP.T + noise**2 * np.eye(len(rows)))
    )
    assert costs.mean_P == pytest.approx(mean + gain @ (np.log(seconds) - weights_NP @ mean), abs=1e-8)
    assert costs.covariance_PP == pytest.approx(covariance - gain @ weights_NP @ covariance, abs=1e-8)


def test_where_a_step_verifies_what_the_one_before_drafted_each_arm_has_its_own_seconds() -> None:
    """vLLM drafts at the end of a step for the next one. The arms take turns, so that hardly a step drafts
    and verifies by one of them."""
    arms = [Strategy.OFF, *(Strategy("learned", n, 1, n) for n in (1, 4, 8))]
    machine, tuner, rng = Machine({"learned": 0.6}, 25.0, noise=0.02), CostModel(arms), random.Random(3)
    verified, batch = Strategy.OFF, BatchState(4, 0, 0)
    for _ in range(200):
        drafted, outcome = rng.choice(arms), machine.run(verified, 4)
        # the machine's seconds of the verification, and of the drafts that are made in this step
        seconds = outcome.seconds - 0.0005 * verified.depth + 0.0005 * drafted.depth
        late = None if drafted == verified else drafted
        tuner.observe(verified, batch, replace(outcome, seconds=seconds, drafted_next=late))
        verified = drafted
    tuner.learn()
    assert seconds_of(tuner.costs, arms, 4) == pytest.approx([machine.seconds(a, 4) for a in arms], rel=0.06)


def test_a_step_in_which_the_drafter_reads_what_it_missed_hardly_counts_as_the_arms_cost() -> None:
    tuner, arm, batch = CostModel(CHAINS), Strategy("learned", 4, 1, 4), BatchState(4, 0, 0)
    for _ in range(5):
        tuner.observe(Strategy.OFF, batch, StepOutcome(4, (), (), 0.01))
    tuner.observe(arm, batch, StepOutcome(8, (1,) * 4, (4,) * 4, 5.0))  # its first
    for _ in range(3):
        tuner.observe(arm, batch, StepOutcome(8, (1,) * 4, (4,) * 4, 0.02))
    read = replace(batch, num_admitted=1)
    tuner.observe(arm, read, StepOutcome(8, (1,) * 4, (4,) * 4, 0.06))
    tuner.learn()
    assert seconds_of(tuner.costs, CHAINS, 4)[CHAINS.index(arm)] == pytest.approx(0.02, rel=0.25)
    assert tuner.acceptance.counts_KCD[0, 0, 0] > 4 * 4, "its acceptance does, though it fades"


# ── acceptance ──────────────────────────────────────────────────────────────────────────────────────────────


def expected(acceptance: AcceptanceModel, arm: Strategy) -> tuple[float, float]:
    """Tokens per verification and the standard deviation of its logarithm. The model's arms are CHAINS."""
    found, place = acceptance.expected(4), CHAINS.index(arm)
    return float(found.tokens_A[place]), float(np.linalg.norm(found.spread_AD[place]))


def test_acceptance_is_shared_between_depths_and_agrees_with_counting() -> None:
    acceptance, rng = AcceptanceModel(CHAINS), random.Random(0)
    deep, shallow = Strategy("learned", 8, 1, 8), Strategy("learned", 2, 1, 2)
    walks = [min(int(rng.expovariate(0.4)), 8) for _ in range(3000)]
    acceptance.observe(deep, walks, [8] * len(walks))
    tokens, deviation = expected(acceptance, deep)
    assert tokens == pytest.approx(1 + np.mean(walks), rel=0.02)
    assert deviation < 0.03
    assert expected(acceptance, shallow)[0] == pytest.approx(1 + np.mean(np.minimum(walks, 2)), rel=0.02)
    acceptance.age()
    after, more_uncertain = expected(acceptance, deep)
    assert more_uncertain > 3 * deviation
    assert after == pytest.approx(tokens, rel=0.3)


def test_a_depth_that_was_never_tried_is_expected_to_hold_as_the_one_before() -> None:
    acceptance = AcceptanceModel(CHAINS)
    acceptance.observe(Strategy("learned", 4, 1, 4), [4] * 60 + [0] * 5, [4] * 65)
    assert expected(acceptance, Strategy("learned", 15, 1, 15))[0] > 10


def test_retrieval_is_expected_to_draft_as_much_as_it_found() -> None:
    acceptance = AcceptanceModel(CHAINS)
    acceptance.observe(Strategy("ngram", 15, 1, 15), [0] * 300, [0, 0, 4] * 100)
    nodes_A = acceptance.expected(4).nodes_A
    assert nodes_A[CHAINS.index(Strategy("ngram", 15, 1, 15))] == pytest.approx(4 / 3, rel=0.05)
    assert nodes_A[CHAINS.index(Strategy("learned", 15, 1, 15))] == 15


def test_texts_that_change_are_noticed_within_some_hundred_verifications() -> None:
    acceptance, arm = AcceptanceModel(CHAINS), Strategy("learned", 4, 1, 4)
    for _ in range(100):
        acceptance.observe(arm, [4] * 64, [4] * 64)
    for _ in range(10):
        acceptance.observe(arm, [0] * 64, [4] * 64)
    assert expected(acceptance, arm)[0] < 2.0


def test_a_new_version_of_policy_or_drafter_makes_acceptance_less_certain() -> None:
    for changed in ((1, 0), (0, 1)):
        tuner = CostModel(CHAINS)
        play(tuner, Machine({"learned": 0.8, "ngram": 0.4, "hybrid": 0.8}, 25.0), [4] * 100)
        arm = Strategy("learned", 6, 1, 6)
        before = expected(tuner.acceptance, arm)[1]
        tuner.choose(BatchState(4, *changed))
        assert expected(tuner.acceptance, arm)[1] > 1.2 * before


# ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_decision_changes_nothing_that_was_learned() -> None:
    tuner = CostModel(CHAINS)
    play(tuner, Machine({"learned": 0.8, "ngram": 0.4, "hybrid": 0.8}, 25.0), [4] * 50)
    kept = copy.deepcopy(tuner.counters())
    decisions = [tuner.decide(BatchState(size, 0, 0)) for size in (4, 1, 64, 4)]
    assert decisions[0] == decisions[3]
    assert tuner.counters() == kept


class Deciding(CostModel):
    """Notes the batch sizes that it decides for."""

    def __init__(self) -> None:
        super().__init__(CHAINS)
        self.sizes: list[int] = []

    def decide(self, batch: BatchState) -> Decision:
        self.sizes.append(batch.num_running)
        return super().decide(batch)


def test_a_tuner_decides_in_a_third_of_its_steps_at_most() -> None:
    """A decision takes 0.2 ms, and a step of a small model not much more than ten times that."""
    for size in (4, 16, 64):
        tuner = Deciding()
        play(tuner, Machine({"learned": 0.02, "ngram": 0.02, "hybrid": 0.02}, 8.0), [size] * 300)
        assert 10 < len(tuner.sizes) <= 100, size


def test_a_batch_that_shrinks_by_single_sequences_is_decided_for_at_every_eighth() -> None:
    tuner = Deciding()
    play(tuner, Machine({"learned": 0.02, "ngram": 0.02, "hybrid": 0.02}, 8.0), [64] * 20)
    tuner.sizes.clear()
    for size in range(63, 7, -1):  # no step is observed, so no choice has stood long enough
        tuner.choose(BatchState(size, 0, 0))
    assert tuner.sizes[-11:] == [48, 41, 35, 30, 26, 22, 19, 16, 13, 11, 9]
    assert len(tuner.sizes) <= 13


# ── arms ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_of_two_block_lengths_tell_the_seconds_of_a_third() -> None:
    """A block fills as many slots as it drafts tokens, and a slot of a batch of 64 costs 5 ms here."""

    def seconds(depth: int) -> float:
        return 0.3 + 0.001 * 64 * (1 + depth) + 0.015 + 0.005 * depth

    arms = [Strategy("learned", depth, 1, depth) for depth in (2, 4, 7)]
    costs = StepCosts(arms)
    for _ in range(20):
        for arm in (0, 2):
            depth = arms[arm].depth
            costs.observe(arm, 64, 64.0 * (1 + depth), seconds(depth), step_costs.NOISE, 1)
    assert seconds_of(costs, arms, 64)[1] == pytest.approx(seconds(4), rel=0.05)


def test_a_drafter_is_not_asked_for_more_than_its_block_holds() -> None:
    arms = default_arms(ALL, learned_depth=7)
    learned = [arm for arm in arms if arm.drafter == "learned"]
    assert max(arm.depth for arm in learned) == 7
    assert Strategy("learned", 7, 1, 7) in learned
    assert [arm for arm in arms if arm.drafter != "learned"] == [
        arm for arm in ARMS if arm.drafter != "learned"
    ], "retrieval and the hybrid draft as deep as before"
    assert any(arm.width > 1 for arm in learned)
    with pytest.raises(UserError, match="drafts 8 tokens, and the drafter's block has 7"):
        make_tuner(parse_speculation("8x1x8"), ALL, learned_depth=7)
    assert isinstance(make_tuner(parse_speculation("hybrid:8x1x8"), ALL, learned_depth=7), FixedTuner)


def test_the_users_word_becomes_a_tuner_or_one_line() -> None:
    assert make_tuner(parse_speculation("off"), ALL) is None
    assert isinstance(make_tuner(Adaptive(), ALL), CostModel)
    fixed = make_tuner(parse_speculation("hybrid:4x1x4"), ALL)
    assert isinstance(fixed, FixedTuner)
    assert fixed.strategy == Strategy("hybrid", 4, 1, 4)
    assert make_tuner(parse_speculation("4x1x4"), ("ngram",)).strategy.drafter == "ngram"
    with pytest.raises(UserError, match="needs a drafter of kind learned"):
        make_tuner(parse_speculation("learned:4x1x4"), ("ngram",))
