"""The frailty model against what it is defined by: survival curves on average, evidence by Bayes' rule, and the
time of a batch that shrinks, counted step by step."""

from __future__ import annotations

import numpy as np

from tlt.base.strategy import Strategy
from tlt.speculation.tuner.cost_model import CostModel
from tlt.speculation.tuner.frailty import NUM, Frailties, hazards_of, seconds_to_finish, tokens_of
from tlt.speculation.tuner.protocol import BatchState, RunningSequence, StepOutcome

CURVE = np.array([0.8, 0.66, 0.55, 0.47, 0.4])


def test_all_sequences_together_survive_as_the_curve_says() -> None:
    tokens_GD = tokens_of(CURVE)
    assert tokens_GD.shape == (NUM, 6)
    assert (tokens_GD[:, 0] == 1).all()
    np.testing.assert_allclose(np.diff(tokens_GD).mean(0), CURVE, atol=1e-4)
    assert (np.diff(hazards_of(CURVE)) > 0).all(), "fewer survive with every depth"
    assert (np.diff(tokens_GD[:, -1]) < 0).all(), "the frailer, the fewer tokens"


def test_a_drafter_that_is_never_right_or_always_is_no_special_case() -> None:
    for curve in (np.zeros(5), np.ones(5)):
        frailties = Frailties()
        frailties.keep(["a"])
        for accepted in (0, 5):
            frailties.observe(["a"], curve, [accepted], 5)
        assert frailties.draw(["a"]).shape == (NUM, 1)
        assert np.isfinite(tokens_of(curve)).all()


def test_evidence_is_weighed_by_bayes_rule() -> None:
    """The frailty of a sequence after its first verification, against a posterior that is written out."""
    hazards = np.concatenate([[0.0], hazards_of(CURVE)])
    factors = -np.log1p(-(np.arange(NUM) + 0.5) / NUM)
    for accepted in range(6):
        survived = np.exp(-factors * hazards[accepted])
        rejected = (
            1.0 if accepted == 5 else 1 - np.exp(-factors * (hazards[accepted + 1] - hazards[accepted]))
        )
        posterior = survived * rejected / (survived * rejected).sum()
        frailties, counts = Frailties(), np.zeros(NUM)
        frailties.keep(range(64))
        frailties.observe(range(64), CURVE, [accepted] * 64, 5)
        for drawn in frailties.draw(range(64)).ravel():
            counts[drawn] += 1
        np.testing.assert_allclose(counts / counts.sum(), posterior, atol=0.02)


def test_evidence_about_a_sequence_that_left_is_forgotten_and_others_keep_theirs() -> None:
    frailties = Frailties()
    frailties.keep(["easy", "hard", "gone"])
    for _ in range(10):
        frailties.observe(["hard", "easy", "gone"], CURVE, [0, 5, 5], 5)
    frailties.keep(["hard", "gone", "easy"])
    before = frailties.draw(["easy", "hard"])
    assert before[:, 0].max() < before[:, 1].min()
    frailties.keep(["easy", "hard"])
    frailties.keep(["easy", "hard", "gone"])
    frailties.observe(["nobody"], CURVE, [3], 5)
    after = frailties.draw(["easy", "hard", "gone"])
    np.testing.assert_array_equal(after[:, :2], before)
    assert sorted(after[:, 2]) == [*range(NUM)], "it starts anew"


def test_verifications_that_are_learned_together_count_as_one_after_the_other() -> None:
    accepted = [3, 0, 5, 2, 1, 0]
    names = ["a", "b", "a", "nobody", "a", "b"]
    found = []
    for sizes in ([6], [1] * 6, [2, 4]):
        frailties, done = Frailties(), 0
        frailties.keep(["a", "b", "c"])
        for size in sizes:
            part = slice(done, done + size)
            frailties.observe(names[part], CURVE, accepted[part], 5)
            done += size
        found.append(frailties._log_likelihood_RG)
    np.testing.assert_allclose(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0])
    assert found[0][:2].any(axis=1).all()


def test_a_batch_takes_the_seconds_of_its_steps_while_it_shrinks() -> None:
    rng = np.random.default_rng(0)
    steps_MB = rng.integers(1, 30, size=(3, 9)).astype(float)
    seconds_of = {size: 0.5 + 0.1 * size for size in range(1, 10)}
    counted = [sum(seconds_of[int((row > i).sum())] for i in range(int(row.max()))) for row in steps_MB]
    both = np.array([[seconds_of[9]] * 2, [seconds_of[1]] * 2])
    found = seconds_to_finish(np.stack([steps_MB, 2 * steps_MB]), *both)
    np.testing.assert_allclose(found, [np.mean(counted), 2 * np.mean(counted)])
    alone = seconds_to_finish(steps_MB[None, :, :1], np.array([0.6]), np.array([0.6]))
    np.testing.assert_allclose(alone, 0.6 * steps_MB[:, 0].mean())


def test_long_drafts_that_leave_half_of_a_batch_behind_are_not_chosen() -> None:
    """Half of the sequences accept everything and half nothing. Eight drafted tokens for all make twice as many
    tokens per second as none, and yet the batch takes longer: the hard half decides."""
    arms = tuple(Strategy("learned", depth, 1, depth) if depth else Strategy.OFF for depth in (0, 8))
    seconds, left = {0: 0.01, 8: 0.02}, 400
    chosen = {}
    for knows in (False, True):
        tuner = CostModel(arms, has_shadow_drafts=False)
        sequences = tuple(RunningSequence(name, left) for name in range(16)) if knows else ()
        names = tuple(range(16)) if knows else ()
        batch = BatchState(16, 100.0, 0, 0, num_left=float(left), sequences=sequences)
        for step in range(40):
            arm = tuner.choose(batch)
            arm = arms[step % 2] if step < 30 else arm
            accepted = (arm.depth, 0) * 8 if arm.depth else ()
            outcome = StepOutcome(
                16 + sum(accepted), accepted, (arm.depth,) * len(accepted), seconds[arm.depth]
            )
            tuner.observe(arm, batch, StepOutcome(**{**vars(outcome), "names": names if accepted else ()}))
        chosen[knows] = tuner.choose(batch)
    assert chosen == {False: arms[1], True: Strategy.OFF}
