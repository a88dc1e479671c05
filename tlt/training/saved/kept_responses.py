"""Writes a run's responses with their rewards as JSON lines, for people and for `tlt report`.

    responses/rollout-00000012.jsonl      of step 12, counted from 1 as on the screen
    responses/evaluation-00000020.jsonl   of the evaluation after 20 updates

A line has the fields of `tlt generate` without logprobs, and: purpose and policy_step of the noise's key,
policy_version, reward (null: not scored), is_solved; if there are any, reward_parts, reward_error,
in_thought, drafts (DraftOutcome's fields) and turns (`turns_of`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from tlt.base.io.files import Record, matches, write_jsonl
from tlt.base.types import Purpose, Reward, Rollout, Turns
from tlt.training.rollout.result import PhaseResult

FOLDER = "responses"
_PURPOSES: tuple[Purpose, ...] = "rollout", "evaluation"


def path_of(run: Path, purpose: Purpose, number: int) -> Path:
    """number: the step, or the updates before the evaluation."""
    return run / FOLDER / f"{purpose}-{number:08d}.jsonl"


def kept_by(run: Path, purpose: Purpose) -> list[Path]:
    """Pipes and folders with such names do not count."""
    folder, pattern = run / FOLDER, f"{purpose}-{'[0-9]' * 8}.jsonl"
    entries = os.scandir(folder) if folder.is_dir() else ()
    files = (entry.name for entry in entries if matches(entry.name, [pattern]) and entry.is_file())
    return sorted(folder / name for name in files)


def forget_responses(run: Path, step: int, evaluated: Container[int]) -> None:
    remains_of: dict[Purpose, Container[int]] = {"rollout": range(1, step + 1), "evaluation": evaluated}
    for purpose, remains in remains_of.items():
        for path in kept_by(run, purpose):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) not in remains:
                path.unlink()


def turns_of(rollout: Rollout, turns: Turns, decode: Callable[[Sequence[int]], str]) -> Record:
    """Turns without its state; last_turn: the scored text."""
    told = {name: value for name, value in asdict(turns).items() if name != "state"}
    return {**told, "last_turn": decode(rollout.last_turn)}


class KeptResponses:
    """gib: bound of all files; the latest stays in any case.
    say: gets one line when files are first removed.
    in_thought: whether a prompt has opened a thought.
    """

    def __init__(
        self,
        run: Path,
        decode: Callable[[Sequence[int]], str],
        gib: float,
        say: Callable[[str], None] = lambda line: None,
        in_thought: Callable[[Sequence[int]], bool] = lambda prompt_ids: False,
    ) -> None:
        self.run, self.decode, self.gib, self.say = run, decode, gib, say
        self.in_thought = in_thought
        self._has_said = False
        self._num_bytes = 0

    @cached_property
    def _sizes(self) -> dict[Purpose, dict[Path, int]]:
        sizes = {
            purpose: {path: path.stat().st_size for path in kept_by(self.run, purpose)}
            for purpose in _PURPOSES
        }
        self._num_bytes = sum(sum(some.values()) for some in sizes.values())
        return sizes

    def write(self, purpose: Purpose, policy_step: int, number: int, phase: PhaseResult) -> None:
        """policy_step: of the noise key, 0 in evaluations. number: see `path_of`."""
        path = path_of(self.run, purpose, number)
        path.parent.mkdir(exist_ok=True)
        sizes = self._sizes[purpose]
        pairs = zip(phase.rollouts, phase.rewards, strict=True)
        write_jsonl(path, (self.record(purpose, policy_step, *pair) for pair in pairs))
        size = path.stat().st_size
        self._num_bytes += size - sizes.pop(path, 0)
        sizes[path] = size
        self._make_room(path)

    def _make_room(self, latest: Path) -> None:
        while self._num_bytes > self.gib * 2**30:
            older = (sizes for sizes in self._sizes.values() if next(iter(sizes), latest) != latest)
            if (sizes := next(older, None)) is None:
                return
            path = next(iter(sizes))
            path.unlink(missing_ok=True)
            self._num_bytes -= sizes.pop(path)
            if not self._has_said:
                self._has_said = True
                self.say(
                    f"{path.parent}: has more than {self.gib:g} GiB; the oldest steps' responses go, "
                    "now and later (run.keep_responses)"
                )

    def record(self, purpose: Purpose, policy_step: int, rollout: Rollout, reward: Reward) -> Record:
        line: Record = {
            "problem_id": rollout.problem_id,
            "sample_index": rollout.sample_index,
            "prompt_ids": rollout.prompt_ids,
            "token_ids": rollout.token_ids,
            "text": self.decode(rollout.token_ids),
            "finish_reason": rollout.finish_reason,
            "purpose": purpose,
            "policy_step": policy_step,
            "policy_version": rollout.policy_version,
            "reward": reward.value if reward.is_scored else None,
            "is_solved": reward.is_solved,
        }
        if self.in_thought(rollout.prompt_ids):
            line["in_thought"] = True
        if rollout.drafts is not None:
            line["drafts"] = rollout.drafts
        if rollout.turns is not None:
            line["turns"] = turns_of(rollout, rollout.turns, self.decode)
        if reward.parts:
            line["reward_parts"] = dict(reward.parts)
        if reward.error:
            line["reward_error"] = reward.error
        return line
