"""Tuners against simulated machines: what they find, how soon, and that they change their minds."""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from tests.unit.speculation.tuner import cold_machines
from tlt.base.speculation import Adaptive, parse_speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.engine.stats import EngineStats
from tlt.speculation.tuner import step_costs
from tlt.speculation.tuner.acceptance import AcceptanceModel, Curve
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.protocol import (
    BatchState,
    PrefillTime,
    ReferenceDraft,
    RunningSequence,
    ShadowDraft,
    StepOutcome,
    StrategyTuner,
)
from tlt.speculation.tuner.step_costs import CostPrior, StepCosts, StepWork
from tlt.speculation.tuner.tuner import Abilities, Fixed, default_arms, make_tuner

ALL = ("learned", "ngram", "hybrid")
ARMS = default_arms(ALL)


class Machine:
    """Seconds and acceptance of every arm, with noise. `half_rows`: tokens in a forward at which it costs
    twice one token's."""

    def __init__(self, hazard: dict[str, float], half_rows: float, seed: int = 0, noise: float = 0.1) -> None:
        self.hazard, self.half_rows, self.noise, self.random = hazard, half_rows, noise, random.Random(seed)

    def tokens(self, arm: Strategy) -> float:
        hazard = self._hazard(arm)
        return sum(hazard**d for d in range(arm.depth + 1))

    def _hazard(self, arm: Strategy) -> float:
        return 0.0 if arm.is_off else 1 - (1 - self.hazard[arm.drafter]) ** math.sqrt(arm.width)

    def seconds(self, arm: Strategy, batch: int) -> float:
        drafting = 0.0 if arm.drafter in ("none", "ngram") else 0.05 * arm.depth * (1 + (arm.width - 1) / 2)
        return 0.01 * (self.half_rows + batch * (1 + arm.budget)) / (self.half_rows + 1) + 0.01 * drafting

    def speed(self, arm: Strategy, batch: int) -> float:
        return batch * self.tokens(arm) / self.seconds(arm, batch)

    def best(self, arms: Sequence[Strategy], batch: int) -> float:
        return max(self.speed(arm, batch) for arm in arms)

    def shadow_drafts(self, arm: Strategy) -> tuple[ShadowDraft, ...]:
        """What retrieval would have drafted for one sequence, as the engine says it while another drafter
        drafts."""
        drawn = () if arm.drafter in ("ngram", "hybrid") else self.run(ShadowDraft.STRATEGY, 1).accepted
        return tuple(ShadowDraft(15, accepted) for accepted in drawn)

    def run(self, arm: Strategy, batch: int) -> StepOutcome:
        hazard, accepted = self._hazard(arm), []
        for _ in range(batch if not arm.is_off else 0):
            count = 0
            while count < arm.depth and self.random.random() < hazard:
                count += 1
            accepted.append(count)
        seconds = self.seconds(arm, batch) * math.exp(self.random.gauss(0, self.noise))
        return StepOutcome(batch + sum(accepted), tuple(accepted), (arm.budget,) * len(accepted), seconds)


def play(
    tuner: StrategyTuner,
    machine: Machine,
    sizes: Sequence[int],
    versions: Callable[[int], tuple[int, int]] = lambda _: (0, 0),
) -> list[Strategy]:
    chosen: list[Strategy] = []
    shadow_drafts: tuple[ShadowDraft, ...] = ()
    for step, size in enumerate(sizes):
        batch = BatchState(size, 200.0, *versions(step), shadow_drafts=shadow_drafts)
        arm = tuner.choose(batch)
        tuner.observe(arm, batch, machine.run(arm, size))
        shadow_drafts = machine.shadow_drafts(arm)
        chosen.append(arm)
    return chosen


def share_of_best(
    machine: Machine, chosen: Sequence[Strategy], sizes: Sequence[int], arms: Sequence[Strategy]
) -> float:
    """Speed relative to the best arm at every batch size, without luck: by the machine's own means."""
    tokens = sum(machine.tokens(arm) * size for arm, size in zip(chosen, sizes, strict=True))
    seconds = sum(machine.seconds(arm, size) for arm, size in zip(chosen, sizes, strict=True))
    ideal = sum(machine.tokens(a) * s / machine.best(arms, s) for a, s in zip(chosen, sizes, strict=True))
    assert tokens > 0
    return ideal / seconds


def test_the_cost_model_predicts_how_fast_it_would_be_without_references() -> None:
    """Four sequences, each with a reference that is right; without, the best arm is what this machine
    says."""
    kinds = ("learned", "ahead", "ahead+learned")
    arms = default_arms(kinds)
    machine = Machine({"learned": 0.7}, 25.0)
    tuner, stats, truth = CostModel(arms), EngineStats(), 0.0
    best = machine.best([arm for arm in arms if not arm.uses_references], 4)
    for step in range(600):
        reference_drafts = (ReferenceDraft(0.999, 200),) * 4 if step % 2 and step > 200 else ()
        batch = BatchState(4, 200.0, 0, 0, 0, reference_drafts)
        arm = tuner.choose(batch)
        assert (tuner.expected.otherwise is not None) == arm.uses_references
        if arm.uses_references:
            kept, noise = min(arm.depth, 200), math.exp(machine.random.gauss(0, 0.1))
            seconds = 0.01 * (25.0 + 4 * (1 + kept)) / 26.0 * noise
            outcome = StepOutcome(4 * (1 + kept), (kept,) * 4, (kept,) * 4, seconds, (True,) * 4)
            truth += outcome.num_tokens / best - seconds
        else:
            outcome = machine.run(arm, 4)
        stats.record_step(str(arm), outcome, 4, tuner.expected)
        tuner.observe(arm, batch, outcome)
    assert truth > 10.0
    assert stats.won_seconds == pytest.approx(truth, rel=0.15)


ROLLOUT = [*[64] * 60, *[48] * 40, *[32] * 40, *[16] * 60, *[8] * 80, *[4] * 80, *[2] * 120, *[1] * 200]


@pytest.mark.parametrize(
    ("hazard", "half_rows"),
    [
        ({"learned": 0.85, "ngram": 0.5, "hybrid": 0.85}, 25.0),  # this CPU: off at no batch size
        (
            {"learned": 0.7, "ngram": 0.4, "hybrid": 0.72},
            200.0,
        ),  # a GPU: deep trees at batch 1, short chains at 64
        ({"learned": 0.5, "ngram": 0.8, "hybrid": 0.8}, 60.0),  # retrieval wins
        ({"learned": 0.05, "ngram": 0.02, "hybrid": 0.05}, 25.0),  # nothing helps
    ],
)
def test_in_its_first_rollout_the_cost_model_comes_close_to_the_best_arm_at_every_batch_size(
    hazard: dict[str, float], half_rows: float
) -> None:
    shares = []
    for seed in range(2):
        machine = Machine(hazard, half_rows, seed)
        chosen = play(CostModel(ARMS), machine, ROLLOUT)
        shares.append(share_of_best(machine, chosen, ROLLOUT, ARMS))
    assert np.mean(shares) > 0.9
    assert min(shares) > 0.85


@pytest.mark.parametrize(("size", "num_steps"), [(1, 250), (8, 60), (64, 60)])
def test_with_a_useless_drafter_the_cost_model_is_soon_at_off(size: int, num_steps: int) -> None:
    """docs/rollout.md states these numbers of engine steps."""
    for seed in range(2):
        machine = Machine({"learned": 0.0, "ngram": 0.0, "hybrid": 0.0}, 25.0, seed)
        chosen = play(CostModel(ARMS), machine, [size] * 600)
        late = chosen[num_steps:]
        cheap = Counter(late)[Strategy.OFF] + (Counter(late)[Strategy("ngram", 1, 1, 1)] if size == 1 else 0)
        assert cheap > 0.9 * len(late), "at batch 1 one retrieved token costs but 4 % more than none"
        assert Counter(late).most_common(1)[0][0] == Strategy.OFF
        assert share_of_best(machine, chosen, [size] * 600, ARMS) > 0.95, (
            "finding it out has cost less than 5 %"
        )


def test_when_the_drafter_goes_bad_the_mind_is_changed_and_changed_back() -> None:
    tuner = CostModel(ARMS)
    good, bad = {"learned": 0.9, "ngram": 0.1, "hybrid": 0.1}, {"learned": 0.0, "ngram": 0.1, "hybrid": 0.1}
    for period, hazard in enumerate((good, bad, good)):
        machine = Machine(hazard, 25.0, period)
        chosen = play(tuner, machine, [8] * 1500, lambda _, period=period: (period, period))
        late = chosen[-200:]
        assert share_of_best(machine, late, [8] * 200, ARMS) > 0.95


def work(arm: Strategy, batch_size: int, **beside: Any) -> StepWork:
    return StepWork(arm, batch_size, 200.0, batch_size * (1 + arm.budget), arm.depth, **beside)


def test_one_measured_arm_informs_its_neighbours() -> None:
    costs, middle = StepCosts(), Strategy("learned", 4, 1, 4)
    arms = [Strategy.OFF, middle, Strategy("learned", 6, 1, 6), Strategy("learned", 15, 1, 15)]
    unknown = costs.variance(costs.forecast([work(arm, 8) for arm in arms]).shares_AP, 0)
    for _ in range(20):
        costs.observe([work(middle, 8)], [0.02])
        costs.observe([work(Strategy.OFF, 8)], [0.01])
    forecast = costs.forecast([work(arm, 8) for arm in arms])
    assert forecast.seconds_A[:2] == pytest.approx([0.01, 0.02], rel=0.05)
    assert 0.021 < forecast.seconds_A[2] < 0.03, "its neighbour"
    variance = costs.variance(forecast.shares_AP, 0)
    assert variance[1] < variance[2] < variance[3] < unknown[3]
    assert costs.forecast([work(middle, 10)]).seconds_A[0] == pytest.approx(0.022, rel=0.2), (
        "a neighbouring batch size"
    )


def test_what_is_learned_of_forwards_is_the_posterior_of_the_textbook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing is drafted, logarithms are linear in what is sought: against one inversion of all
    measurements at once."""
    monkeypatch.setattr(step_costs, "_FORGET", 0.0)
    costs, rng = StepCosts(), random.Random(1)
    mean, covariance = costs.mean_P.copy(), costs.covariance_PP.copy()
    rows, noise = [1, 2, 3, 8, 48, 300, 8000, 3], step_costs._NOISE
    seconds = [0.01 * (1 + n / 40) * math.exp(rng.gauss(0, 0.1)) for n in rows]
    weights_NP = np.zeros((len(rows), len(mean)))
    places = range(step_costs.KNOTS)
    for row, n in enumerate(rows):
        weights_NP[row, : step_costs.KNOTS] = [
            np.interp(math.log2(n), places, one) for one in np.eye(step_costs.KNOTS)
        ]
    for n, took in zip(rows, seconds, strict=True):
        costs.observe([StepWork(Strategy.OFF, 0, 0.0, n, 0.0)], [took])
    gain = (
        covariance
        @ weights_NP.T
        @ np.linalg.inv(weights_NP @ covariance @ weights_NP.T + noise**2 * np.eye(len(rows)))
    )
    assert costs.mean_P == pytest.approx(mean + gain @ (np.log(seconds) - weights_NP @ mean), abs=1e-8)
    assert costs.covariance_PP == pytest.approx(covariance - gain @ weights_NP @ covariance, abs=1e-8)


def expected(acceptance: AcceptanceModel, arm: Strategy, batch_size: int = 4) -> tuple[float, float]:
    """Tokens per verification and the standard deviation of its logarithm."""
    found = acceptance.expected([arm], batch_size)
    return float(found.tokens_A[0]), float(np.linalg.norm(found.spread_AR[0]))


def test_acceptance_is_shared_between_depths_and_agrees_with_counting() -> None:
    acceptance, rng = AcceptanceModel(), random.Random(0)
    deep, shallow = Strategy("learned", 8, 1, 8), Strategy("learned", 2, 1, 2)
    walks = [min(int(rng.expovariate(0.4)), 8) for _ in range(3000)]
    acceptance.observe(deep, walks)
    tokens, deviation = expected(acceptance, deep, len(walks))
    assert tokens == pytest.approx(1 + np.mean(walks), rel=0.02)
    assert deviation < 0.03
    tokens, _ = expected(acceptance, shallow, len(walks))
    assert tokens == pytest.approx(1 + np.mean([min(w, 2) for w in walks]), rel=0.02)
    before, uncertain = expected(acceptance, deep, len(walks))
    acceptance.age()
    after, more_uncertain = expected(acceptance, deep, len(walks))
    assert more_uncertain > 3 * uncertain
    assert after == pytest.approx(before, rel=0.3)


def test_the_tail_has_an_acceptance_of_its_own_and_starts_from_that_of_the_beginning() -> None:
    acceptance, arm = AcceptanceModel(), Strategy("ngram", 4, 1, 4)
    for _ in range(20):
        acceptance.observe(arm, [0] * 64)
    begun, sure = expected(acceptance, arm, 64)
    tail, unsure = expected(acceptance, arm, 2)
    assert tail == pytest.approx(begun, rel=0.02)
    assert unsure > 3 * sure, "another look is worth its price there"
    for _ in range(60):
        acceptance.observe(arm, [4, 4])
    assert expected(acceptance, arm, 2)[0] > 3
    assert expected(acceptance, arm, 64)[0] == pytest.approx(begun, rel=0.15)


def test_the_hybrid_is_expected_to_accept_retrieved_drafts_and_learned_ones_where_there_are_none() -> None:
    """Learned chains: all have one token, half of them two, a quarter four. Retrieval: nothing for every
    second, else all."""
    acceptance = AcceptanceModel()
    for _ in range(100):
        acceptance.observe(Strategy("learned", 4, 1, 4), [1, 2, 1, 4])
        acceptance.observe_shadow_drafts([ShadowDraft(0, 0), ShadowDraft(15, 15)], 4)
    survivals = list(accumulate(acceptance.rates(Curve("hybrid", 1, None, 2)).accepted, operator.mul))
    assert survivals[:4] == pytest.approx([1.0, 0.75, 0.625, 0.625], abs=0.06)
    assert survivals[14] == pytest.approx(0.625, abs=0.06)


@pytest.mark.parametrize("half_rows", [25.0, 200.0])
def test_a_text_that_begins_to_repeat_itself_is_noticed_while_another_drafter_drafts(
    half_rows: float,
) -> None:
    """A long response, alone: for 400 steps nothing repeats, for 400 everything does, and so on."""
    machine, tuner = Machine({}, half_rows, seed=0), CostModel(ARMS)
    ideal = seconds = 0.0
    shadow_drafts: tuple[ShadowDraft, ...] = ()
    for step in range(2400):
        repeats = step // 400 % 2
        machine.hazard = (
            {"learned": 0.55, "ngram": 0.93, "hybrid": 0.93}
            if repeats
            else {"learned": 0.3, "ngram": 0.1, "hybrid": 0.3}
        )
        batch = BatchState(1, 200.0, 0, 0, shadow_drafts=shadow_drafts)
        arm = tuner.choose(batch)
        tuner.observe(arm, batch, machine.run(arm, 1))
        shadow_drafts = machine.shadow_drafts(arm)
        ideal += machine.tokens(arm) / machine.best(ARMS, 1)
        seconds += machine.seconds(arm, 1)
    assert ideal / seconds > 0.8


def test_a_tree_is_not_expected_to_end_where_chains_do() -> None:
    """Chains of eight that had two tokens, both accepted: as a chain worth three tokens, as a
    tree more."""
    acceptance, chain = AcceptanceModel(), Strategy("learned", 8, 1, 8)
    for _ in range(50):
        acceptance.observe(chain, [2, 2, 2, 2], drafted=[2, 2, 2, 2])
        acceptance.observe_shadow_drafts([ShadowDraft(0, 0)], 4)
    assert expected(acceptance, chain)[0] == pytest.approx(3.0, rel=0.1)
    assert expected(acceptance, Strategy("hybrid", 8, 1, 8))[0] == pytest.approx(3.0, rel=0.1)
    assert expected(acceptance, Strategy("learned", 5, 2, 10))[0] > 4.5


@pytest.mark.parametrize("size", [1, 64])
def test_restored_counts_predict_what_the_saved_ones_did(size: int) -> None:
    acceptance, arm = AcceptanceModel(), Strategy("learned", 4, 1, 4)
    for _ in range(20):
        acceptance.observe(arm, [2] * size)
    restored = AcceptanceModel()
    restored.restore(acceptance.counters())
    assert expected(restored, arm, size) == expected(acceptance, arm, size)


def test_a_large_batch_whose_texts_change_is_noticed_within_a_few_steps() -> None:
    acceptance, arm = AcceptanceModel(), Strategy("learned", 4, 1, 4)
    for _ in range(100):
        acceptance.observe(arm, [4] * 64)
    for _ in range(10):
        acceptance.observe(arm, [0] * 64)
    assert expected(acceptance, arm, 64)[0] < 2.0


def test_one_sequence_that_is_judged_in_hindsight_does_not_outweigh_what_64_have_shown() -> None:
    acceptance = AcceptanceModel()
    for _ in range(100):
        acceptance.observe(ShadowDraft.STRATEGY, [2] * 64)
    before = expected(acceptance, ShadowDraft.STRATEGY, 64)[0]
    for _ in range(300):
        acceptance.observe_shadow_drafts([ShadowDraft(0, 0)], 64)
    assert expected(acceptance, ShadowDraft.STRATEGY, 64)[0] == pytest.approx(before, rel=0.05)


def test_a_batch_of_which_all_have_references_is_decided_for() -> None:
    """A forecast is also made for its last sequence alone, which none of the references may be counted for."""
    kinds = ("learned", "ahead+learned")
    tuner = make_tuner(Adaptive(), kinds, abilities=Abilities(trees=False, shadow_drafts=False))
    assert tuner is not None
    for size, num_references in ((6, 6), (6, 3), (2, 2), (1, 1)):
        references = (ReferenceDraft(0.9, 5),) * num_references
        sequences = tuple(RunningSequence(name, 50.0) for name in range(size))
        batch = BatchState(size, 200.0, 0, 0, 0, references, num_left=50.0, sequences=sequences)
        for _ in range(12):
            arm = tuner.choose(batch)
            accepted = (min(arm.depth, 3),) * size if arm.depth else ()
            followed = tuple(i < num_references for i in range(size)) if arm.uses_references else ()
            outcome = StepOutcome(
                size + sum(accepted), accepted, accepted, 0.01 + 0.001 * arm.depth, followed
            )
            tuner.observe(arm, batch, outcome)
        assert tuner.expected.chosen is not None


def test_a_new_version_of_policy_or_drafter_makes_acceptance_less_certain() -> None:
    for changed in ((1, 0), (0, 1)):
        tuner = CostModel(ARMS)
        machine = Machine({"learned": 0.8, "ngram": 0.4, "hybrid": 0.8}, 25.0)
        arm = play(tuner, machine, [4] * 100)[-1]
        before = expected(tuner.acceptance, arm)[1]
        tuner.choose(BatchState(4, 200.0, *changed))
        assert expected(tuner.acceptance, arm)[1] > 1.2 * before


def test_where_a_step_verifies_what_the_one_before_drafted_each_arm_has_its_own_seconds() -> None:
    """vLLM drafts at the end of a step for the next one. The arms take turns, so that hardly a step drafts
    and verifies by one of them."""
    machine = Machine({"learned": 0.6}, 25.0, noise=0.02)
    tuner, rng = CostModel(ARMS), random.Random(3)
    arms, batch = (
        [Strategy.OFF, *(Strategy("learned", n, 1, n) for n in (1, 4, 8))],
        BatchState(4, 200.0, 0, 0),
    )
    verified = Strategy.OFF
    for _ in range(200):
        drafted, outcome = rng.choice(arms), machine.run(verified, 4)
        # the machine's seconds of the verification, and of the drafts that are made in this step
        seconds = outcome.seconds - 0.0005 * verified.depth + 0.0005 * drafted.depth
        late = None if drafted == verified else drafted
        tuner.observe(verified, batch, replace(outcome, seconds=seconds, drafted_next=late))
        verified = drafted
    tuner.learn()
    for arm in arms:
        found = tuner.costs.forecast([work(arm, 4)]).seconds_A[0]
        assert found == pytest.approx(machine.seconds(arm, 4), rel=0.06)


def test_the_step_that_switches_on_does_not_count_as_the_arms_cost() -> None:
    tuner = CostModel(ARMS)
    arm, batch = Strategy("learned", 4, 1, 4), BatchState(4, 200.0, 0, 0)
    for _ in range(5):
        tuner.observe(Strategy.OFF, batch, StepOutcome(4, (), (), 0.01))
    tuner.observe(arm, batch, StepOutcome(8, (1,) * 4, (4,) * 4, 5.0))  # caught up with a long response
    for _ in range(3):
        tuner.observe(arm, batch, StepOutcome(8, (1,) * 4, (4,) * 4, 0.02))
    tuner.observe(
        arm, replace(batch, num_admitted=1), StepOutcome(8, (1,) * 4, (4,) * 4, 0.06)
    )  # read a prompt as well
    tuner.learn()
    assert tuner.costs.forecast([work(arm, 4)]).seconds_A[0] == pytest.approx(0.025, rel=0.25)
    counts = tuner.acceptance.counts[Curve("learned", 1, None, octave=2)]
    fading = math.exp(
        -1 / 25
    )  # a curve spans 100 verifications, here of four a step; alike steps fade as one
    assert counts.tried[0] == pytest.approx(4 * (4 * fading + 1)), "its acceptance does"


def test_a_depth_that_is_hardly_reached_is_not_trusted_for_what_it_once_was() -> None:
    """Everything repeats for 200 steps, then nothing: the depths beyond the first, which few come to now,
    are doubted, too."""
    acceptance = AcceptanceModel()
    for step in range(500):
        acceptance.observe(ShadowDraft.STRATEGY, [15 if step < 200 else step % 10 == 0])
    assert expected(acceptance, ShadowDraft.STRATEGY, 1)[0] < 2.6, (
        "2.9 where 16 earlier verifications count at every depth"
    )


def test_after_three_steps_off_an_arm_is_tried_if_what_is_left_pays_for_what_its_drafter_must_read() -> None:
    tuner, machine = CostModel(ARMS), Machine({"learned": 0.9, "ngram": 0.1, "hybrid": 0.9}, 25.0)
    assert play(tuner, machine, [4] * 3) == [Strategy.OFF] * 3
    tuner.learn()
    for num_left, is_off in ((2.0, True), (500.0, False)):
        batch = BatchState(4, 5000.0, 0, 0, num_admitted=4, num_left=num_left)
        assert tuner.decide(batch)[1].strategy.is_off is is_off


@pytest.mark.parametrize("drafter", ["good", "useless"])
def test_where_speculation_can_only_just_win_a_cold_batch_is_hardly_slower_than_off(drafter: str) -> None:
    """At 0.5B and batch 16 the best arm is as fast as off, and to find that out a drafter reads 960 tokens
    first."""
    profile, kind = cold_machines.PROFILES["0.5B"], cold_machines.DRAFTERS[drafter]
    off = cold_machines.run_batch(cold_machines.Machine(profile, kind), Fixed(Strategy.OFF), 16, 100)
    times = []
    for seed in range(400, 412):
        tuner = make_tuner(Adaptive(), kind.kinds, prior=profile.prior)
        assert tuner is not None
        times.append(
            off / cold_machines.run_batch(cold_machines.Machine(profile, kind, seed), tuner, 16, 100)
        )
    assert np.mean(times) > 0.98


class Deciding(CostModel):
    """Notes the batch sizes that it decides for."""

    def __init__(self) -> None:
        super().__init__(ARMS)
        self.sizes: list[int] = []

    def decide(self, batch: BatchState) -> Any:
        self.sizes.append(batch.num_running)
        return super().decide(batch)


def test_a_tuner_that_has_just_begun_decides_in_a_third_of_its_steps_at_most() -> None:
    """A decision may take 2 ms, and a step of a small model not many more."""
    for size in (4, 16, 64):
        tuner = Deciding()
        play(tuner, Machine({"learned": 0.02, "ngram": 0.02, "hybrid": 0.02}, 1000.0), [size] * 90)
        assert 10 < len(tuner.sizes) <= 30, size


def test_a_batch_that_shrinks_by_single_sequences_is_decided_for_at_every_eighth() -> None:
    tuner = Deciding()
    play(tuner, Machine({"learned": 0.02, "ngram": 0.02, "hybrid": 0.02}, 8.0), [64] * 20)
    tuner.sizes.clear()
    for size in range(63, 7, -1):  # no step is observed, so no time passes
        tuner.choose(BatchState(size, 200.0, 0, 0))
    assert tuner.sizes[-11:] == [48, 41, 35, 30, 26, 22, 19, 16, 13, 11, 9]
    assert len(tuner.sizes) <= 13


def test_the_prefill_of_prompts_tells_how_fast_the_machine_is() -> None:
    forwards = []
    for seconds in (0.05, 5.0):
        tuner = CostModel(ARMS)
        tuner.choose(BatchState(4, 200.0, 0, 0, 4, prefill_time=PrefillTime(800, 1, seconds)))
        forwards.append(tuner.costs.forecast([work(Strategy.OFF, 4)]).seconds_A[0])
    assert forwards[1] > 20 * forwards[0]


def test_the_size_of_the_drafter_is_the_prior_of_what_it_costs() -> None:
    small, large = (StepCosts(CostPrior(level=level)) for level in (0.02, 0.6))
    works = [work(Strategy.OFF, 4), work(Strategy("learned", 4, 1, 4), 4)]
    relative = [float(np.divide(*costs.forecast(works).seconds_A[::-1])) for costs in (small, large)]
    assert relative[0] < 1.8 < relative[1]


def test_a_block_drafter_pays_for_its_pass_and_hardly_for_its_levels() -> None:
    block = StepCosts(CostPrior(level=0.01, draft=0.2))
    works = [work(Strategy("learned", depth, 1, depth), 1) for depth in (1, 7)]
    short, long = block.forecast(works).seconds_A - block.forecast([work(Strategy.OFF, 1)]).seconds_A
    assert short > 0
    assert long < 3 * short, "seven times as many levels"


def test_in_a_large_batch_a_longer_draft_of_a_block_is_expected_to_cost_its_rows() -> None:
    """Before anything is measured: every slot passes the layers and the head, which levels alone do not show."""
    prior = CostPrior(level=0.01, draft=0.1)
    works = [work(Strategy("learned", depth, 1, depth), 64) for depth in (1, 7)]
    more = []
    for one in (prior, replace(prior, level_row=0.2)):
        once_A = np.array([StepCosts(one).forecast([w._replace(rows=64.0)]).seconds_A[0] for w in works])
        more.append(once_A[1] - once_A[0])
    assert more[1] > 5 * more[0]


def test_steps_of_two_block_lengths_tell_the_seconds_of_a_third() -> None:
    """A block fills as many slots as it drafts tokens, and a slot of a batch of 64 costs 5 ms here."""

    def seconds(depth: int) -> float:
        return 0.3 + 0.001 * 64 * (1 + depth) + 0.015 + 0.005 * depth

    costs = StepCosts(CostPrior(level=0.01, draft=0.1, level_row=0.2))
    works = {depth: work(Strategy("learned", depth, 1, depth), 64) for depth in (2, 4, 7)}
    for _ in range(20):
        for depth in (2, 7):
            costs.observe([works[depth]], [seconds(depth)])
    found = costs.forecast([works[4]]).seconds_A[0]
    assert found == pytest.approx(seconds(4), rel=0.05)


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
    assert isinstance(make_tuner(parse_speculation("hybrid:8x1x8"), ALL, learned_depth=7), Fixed)


def test_the_users_word_becomes_a_tuner_or_one_line() -> None:
    assert make_tuner(parse_speculation("off"), ALL) is None
    assert isinstance(make_tuner(Adaptive(), ALL), CostModel)
    fixed = make_tuner(parse_speculation("hybrid:4x1x4"), ALL)
    assert isinstance(fixed, Fixed)
    assert fixed.strategy == Strategy("hybrid", 4, 1, 4)
    assert make_tuner(parse_speculation("4x1x4"), ("ngram",)).strategy.drafter == "ngram"
    with pytest.raises(UserError, match="needs a drafter of kind learned"):
        make_tuner(parse_speculation("learned:4x1x4"), ("ngram",))
