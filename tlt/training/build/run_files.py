"""What a run writes on one rank: checkpoints, journal, evaluations, step records, responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tlt.base.config.schema import Config
from tlt.training.build.run_data import RunData
from tlt.training.ranks.world import World, broadcast_json
from tlt.training.report.step_record import MetricsWriter
from tlt.training.report.timeline import Timeline
from tlt.training.saved.checkpoint import CheckpointWriter, Saved
from tlt.training.saved.evaluations import Evaluations, is_judged_by_reward
from tlt.training.saved.inputs import Inputs
from tlt.training.saved.journal import FileJournal
from tlt.training.saved.kept_responses import KeptResponses, forget_responses


@dataclass(frozen=True)
class AttemptStart:
    """Where an attempt at a run begins.

    saved: the restored checkpoint.
    follows: digest of the one before.
    """

    run: str
    inputs: Inputs
    saved: Saved = field(default_factory=Saved)
    follows: str = ""


@dataclass(frozen=True)
class RunFiles:
    """metrics: None: not the leader. responses: None: none are kept."""

    attempt: AttemptStart
    checkpoints: CheckpointWriter
    journal: FileJournal
    evaluations: Evaluations
    metrics: MetricsWriter | None
    responses: KeptResponses | None


def open_files(
    config: Config,
    world: World,
    data: RunData,
    attempt: AttemptStart,
    checkpoints: CheckpointWriter,
    timeline: Timeline,
    say: Callable[[str], None],
) -> RunFiles:
    folder, step = config.run.out_dir, attempt.saved.step
    by_reward = is_judged_by_reward(config.rewards.functions)
    broadcast, path = partial(broadcast_json, world), folder / "evaluations.jsonl"
    evaluations = Evaluations(path, step, world.is_leader, broadcast, by_reward)
    metrics = MetricsWriter(folder / "metrics.jsonl", step) if world.is_leader else None
    if world.is_leader:
        forget_responses(folder, step, {one.step for one in evaluations.all})
    journal = FileJournal(
        folder / "journal",
        world,
        run=attempt.run,
        saved=lambda: checkpoints.saved,
        follows=attempt.follows,
        timeline=timeline,
        say=say,
        inputs=attempt.inputs,
    )
    gib, in_thought = config.run.keep_responses, data.tokenizer.is_in_thought
    responses = KeptResponses(folder, data.decode, gib, say, in_thought) if gib else None
    return RunFiles(attempt, checkpoints, journal, evaluations, metrics, responses)
