"""Replay: the responses of another run with the same seed become references. So a sweep, or a run repeated
after a change of code, drafts from earlier responses. The law fixes each token; replay changes time alone.

    RUN/responses/rollout-00000012.jsonl ─▶ rank 0 ─▶ all ranks: references of step 12 ─▶ its phase ─▶ dropped

A response that idle ranks have generated ahead goes first, because it is of this run's own policy, one update
ago; the other run's response continues where it ends. In an evaluation the other run's response replaces this
run's last one, because it is of as many updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.schema import Config
from tlt.drafter.drafting.references import REPLAY, References
from tlt.models.decoder import ModelConfig
from tlt.ranks.world import World, broadcast_json
from tlt.saved.response_reader import read_answers
from tlt.saved.responses import counts_from_zero, kept_by, path_of
from tlt.types import Problem, Purpose, Request, SamplingParams, UserError

Prompts = Mapping[str, tuple[int, ...]]
_SAME = {
    "run": ("seed",),
    "task": ("name", "options", "num_problems", "subset", "split", "columns", "chat", "system_prompt"),
    "model": ("chat_template_kwargs",),
    "rollout": ("problems_per_step",),
}
"""Keys, by section, that must agree for two runs to have the same problems, prompts and noise."""


class Replay:
    """Lends a run the responses of another run. This base lends none."""

    def lend(self, purpose: Purpose, policy_step: int, number: int) -> AbstractContextManager[None]:
        """Makes the responses of a phase references within the context. A collective.

        policy_step: policy step of the requests.
        number: number of the step, or of updates before an evaluation.
        """
        return nullcontext()


@dataclass
class ReplayOf(Replay):
    """Lends a run the responses of the run in `folder`.

    prompts: this run's prompts, by purpose.
    say: called with a line when the responses end, and for each file that cannot be read.
    """

    folder: Path
    references: References
    world: World
    prompts: Mapping[Purpose, Prompts]
    params: SamplingParams
    model: ModelConfig
    say: Callable[[str], None]
    is_over: bool = False

    @contextmanager
    def lend(self, purpose: Purpose, policy_step: int, number: int) -> Iterator[None]:
        keys = []
        found = broadcast_json(self.world, self._read(purpose, number) if self.world.is_leader else None)
        for problem_id, sample_index, token_ids in found:
            key = Request(problem_id, sample_index, (), self.params, purpose, policy_step).noise_key
            keys.append(key)
            if purpose == "rollout" and (own := self.references.get(key)) is not None:
                self.references.keep(key, [*own.token_ids, *token_ids[len(own.token_ids) :]], own.version)
            else:
                self.references.keep(key, token_ids, REPLAY)
        try:
            yield
        finally:
            for key in keys:
                self.references.drop(key)

    def _read(self, purpose: Purpose, number: int) -> Sequence[tuple[str, int, Sequence[int]]]:
        """Returns (problem, sample, token ids) of the responses to this run's prompts. A file that cannot be
        read is reported and left out, for it changes time alone."""
        is_before = purpose == "rollout" and counts_from_zero(self.folder)
        path = path_of(self.folder, purpose, number - int(is_before))
        if not path.exists():
            if purpose == "rollout" and not self.is_over:
                self.is_over = True
                later = [kept for kept in kept_by(self.folder, purpose) if kept > path]
                until = (
                    f" until {later[0].stem} (older ones exceeded its run.keep_responses)" if later else ""
                )
                self.say(
                    f"rollout.replay: {self.folder} has kept nothing of step {number}; "
                    f"it goes on without{until}"
                )
            return []
        self.is_over = False
        try:
            return read_answers(path, self.prompts[purpose], self.model)
        except UserError as error:
            self.say(f"rollout.replay: {error}; this file is left out")
            return []


def prompts_of(problems: Sequence[Problem]) -> Prompts:
    """Returns the prompts by problem."""
    return {problem.problem_id: problem.prompt_ids for problem in problems}


def check_replay(config: Config, problems: Sequence[Problem], model: ModelConfig) -> None:
    """Raises UserError if the run to replay does not exist, has kept nothing, or has other prompts or
    noise."""
    folder = config.rollout.replay
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(f"rollout.replay: {folder} does not exist; give the folder of a run")
    other = _read_config(folder)
    own = config.model_dump(mode="json")
    for section, keys in _SAME.items():
        for key in keys:
            theirs, ours = other.get(section, {}).get(key), own[section][key]
            if theirs != ours:
                raise UserError(
                    f"rollout.replay: {folder} has {section}.{key} {theirs!r}, this run {ours!r}, and so "
                    "other problems or other noise; give a run with the same, or leave it out"
                )
    kept = [*kept_by(folder, "rollout"), *kept_by(folder, "evaluation")]
    if not kept:
        raise UserError(
            f"rollout.replay: {folder} has kept no responses; repeat it with --run.keep_responses 1"
        )
    answers = read_answers(kept[0], prompts_of(problems), model)
    if kept[0].name.startswith("rollout") and not answers:
        theirs, ours = (values["task"].get("data") for values in (other, own))
        raise UserError(
            f"rollout.replay: {kept[0]} answers none of this run's prompts (task.data is {theirs} there, and "
            f"{ours} here); give a run with the same prompts, or leave it out"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns the run's configuration as it was written; another version of TLT may have other keys."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise UserError(
            f"rollout.replay: {folder} holds no run (no config.json that can be read); "
            "give the folder of a run"
        )
    return values
