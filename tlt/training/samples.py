"""A few responses of a step to read: on the screen, and in the trackers' tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlt.training.rollout.result import PhaseResult

if TYPE_CHECKING:
    from tlt.training.run import Run

COLUMNS = ("step", "problem", "prompt", "response", "reward", "solved")


def show_samples(run: Run, phase: PhaseResult) -> None:
    """Evenly spread over the step's problems."""
    num_all = len(phase.rollouts)
    num = min(run.config.run.show_samples, num_all)
    if not (num and run.world.is_leader):
        return
    rows = []
    for index in (i * num_all // num for i in range(num)):
        rollout, reward = phase.rollouts[index], phase.rewards[index]
        prompt, text = run.data.decode(rollout.prompt_ids), run.data.decode(rollout.token_ids)
        value = reward.value if reward.is_scored else None
        run.console.sample(prompt, text, value)
        rows.append((run.step + 1, rollout.problem_id, prompt, text, value, reward.is_solved))
    run.tracking.log_table(run.step + 1, "samples", COLUMNS, rows)
