"""Scores responses in worker processes, beside the generation.

    submit      a response: its task's own score ───┐
    complete    a group: its reward functions ──────┴▶ jobs ─▶ one thread per worker ─▶ done ─▶ drain
                                                                    │ ▲
                                                                    ▼ │
                                                              worker process
                                     killed at the time-out; another worker then tries the call again

A response that cannot be scored has the reason in `Reward.error`; the update leaves it out.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty
from typing import Any, NamedTuple

from tlt.base.records import RewardSummary
from tlt.base.types import ResponseId, Reward, Turns, UserError
from tlt.tasks.rewards.scoring import MAX_METRICS, OWN_SCORE, Call, Completion, RewardSpec, Scorer
from tlt.tasks.rewards.worker import start_worker
from tlt.tasks.workers import CannotStart, Crew, WorkerLost, WorkerSlot

MAX_LOST_WITH = 2
"""After as many workers lost over a call its responses have no score."""
MAX_LOST_BEFORE = 3
"""The same for workers lost before they take the call up."""


def summarize(rewards: Sequence[Reward]) -> RewardSummary:
    """Means are over the scored responses."""
    scored = [reward for reward in rewards if reward.is_scored]
    errors = [reward.error for reward in rewards if not reward.is_scored]
    of_tasks = [reward for reward in scored if reward.task]
    mean = sum(reward.value for reward in scored) / len(scored) if scored else math.nan
    squares = sum((reward.value - mean) * (reward.value - mean) for reward in scored)
    return RewardSummary(
        mean,
        sum(reward.is_solved for reward in scored) / len(scored) if scored else math.nan,
        len(errors),
        errors[0] if errors else "",
        parts=_means(reward.parts for reward in scored),
        metrics=_bounded(_means(reward.metrics for reward in scored)),
        reward_by_task=_means({reward.task: reward.value} for reward in of_tasks),
        solve_rate_by_task=_means({reward.task: float(reward.is_solved)} for reward in of_tasks),
        std=math.sqrt(squares / len(scored)) if scored else math.nan,
    )


def _bounded(metrics: dict[str, float]) -> dict[str, float]:
    if (num_more := len(metrics) - MAX_METRICS) <= 0:
        return metrics
    return {**dict(islice(metrics.items(), MAX_METRICS)), "names left out": float(num_more)}


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            values[name].append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


def check_scorable(rewards: Sequence[Reward], task: str, where: str) -> None:
    """Raises UserError where no response could be scored."""
    summary = summarize(rewards)
    if rewards and summary.num_errors == len(rewards):
        what = f"none of the {len(rewards)} responses of {where} could be scored"
        remedy = f"the first says {summary.first_error!r}; correct the task's score, or rewards.functions"
        raise UserError(f"task {task}: {what}; {remedy}")


def describe_constant(rewards: Sequence[Reward], where: str) -> list[str]:
    """Names reward functions that give all responses the same, which is no error at a hard task's
    beginning."""
    scored = [reward.parts for reward in rewards if reward.is_scored]
    if len(scored) < 2:
        return []
    return [
        f"rewards.functions: {name} gives {value:g} to all {len(scored)} responses of {where}, so nothing is "
        "learned from it"
        for name, value in scored[0].items()
        if name != OWN_SCORE and all(parts.get(name) == value for parts in scored)
    ]


class Job(NamedTuple):
    response_ids: tuple[ResponseId, ...]
    call: Call


@dataclass
class Pending:
    """None: not given yet, or never."""

    response: Completion
    own: Reward | None = None
    of_functions: Reward | None = None


class RewardPool:
    """Used from one thread; `submit` and `complete` never wait.

    num_workers: 0 scores inside `submit` and `complete`, without time-out, to debug a task.
    timeout_seconds: of a response, once a worker takes it up; a group of n has n times as long.
    """

    def __init__(self, spec: RewardSpec, num_workers: int, timeout_seconds: float) -> None:
        self._scorer = Scorer(spec)  # a misspelt task is an error here, not one of every response
        self.spec, self.timeout_seconds = spec, timeout_seconds
        self.by_group, self.reads_environments = self._scorer.by_group, self._scorer.reads_environments
        self._pending: dict[ResponseId, Pending] = {}
        self._is_inline = not num_workers
        self._crew = Crew[Job, list[Reward]](num_workers, partial(start_worker, spec), self._answer)

    def submit(
        self,
        response_id: ResponseId,
        problem: Mapping[str, Any],
        text: str,
        token_ids: Sequence[int] = (),
        step: int = 0,
        turns: Turns | None = None,
    ) -> None:
        """Queues a response for its task's own score.

        text, token_ids: of the policy's last turn, behind `turns`.
        step: updates behind the policy that wrote it.
        """
        assert not self._crew.is_closed, "the pool is closed"
        assert response_id not in self._pending, f"{response_id} was submitted twice"
        response = Completion(dict(problem), text, tuple(token_ids), step, turns)
        self._pending[response_id] = Pending(response)
        if self._scorer.scores_alone:
            self._queue(Job((response_id,), Call((response,), False)))
        elif not self.by_group:  # its environment has scored it, and `combine` reads that alone
            self._crew.put_result(Job((response_id,), Call((response,), False)), [Reward(0.0, False)])

    def complete(self, group: Sequence[ResponseId]) -> None:
        if self.by_group:
            responses = tuple(self._pending[response_id].response for response_id in group)
            self._queue(Job(tuple(group), Call(responses, True)))

    def withdraw(self, response_ids: Iterable[ResponseId]) -> None:
        for response_id in response_ids:
            del self._pending[response_id]

    def _queue(self, job: Job) -> None:
        if self._is_inline:
            self._crew.put_result(job, self._scorer.answer(job.call))
        else:
            self._crew.put(job)

    def collect(self) -> dict[ResponseId, Reward]:
        rewards: dict[ResponseId, Reward] = {}
        with contextlib.suppress(Empty):
            while True:
                rewards.update(self._next(0.0))
        return rewards

    def drain(self, patience: float = math.inf) -> dict[ResponseId, Reward]:
        """A call takes at most two time-outs, and the start of a worker where one has died.

        patience: seconds until UserError.
        """
        deadline = time.monotonic() + min(patience, threading.TIMEOUT_MAX / 2)  # a queue refuses more
        rewards: dict[ResponseId, Reward] = {}
        while self._pending:
            try:
                rewards.update(self._next(max(deadline - time.monotonic(), 0.0)))
            except Empty:
                raise self._too_slow(patience) from None
        return rewards

    def _too_slow(self, patience: float) -> Exception:
        first = ", ".join(f"{problem} sample {sample}" for problem, sample in islice(self._pending, 3))
        return UserError(
            f"task {self.spec.task}: {len(self._pending)} responses were not scored within {patience:g} s, "
            f"and the other ranks wait no longer; the first are {first}; resume with more "
            "rewards.num_workers, a lower rewards.timeout_seconds, or a higher run.timeout_seconds"
        )

    def abandon(self) -> None:
        """A call under way goes on, to its second time-out at most."""
        self._pending.clear()
        self._crew.drop_jobs()

    def close(self) -> None:
        self.abandon()
        self._crew.close()
        self._scorer.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, timeout: float) -> dict[ResponseId, Reward]:
        """Raises Empty."""
        job, result = self._crew.get(timeout)
        rewards: dict[ResponseId, Reward] = {}
        for number, (response_id, response) in enumerate(
            zip(job.response_ids, job.call.responses, strict=True)
        ):
            pending = self._pending.get(response_id)
            if pending is None or pending.response is not response:
                continue
            if isinstance(result, Exception):
                raise result
            if job.call.is_group:
                pending.of_functions = result[number]
            else:
                pending.own = result[number]
            num_known = sum(part is not None for part in (pending.own, pending.of_functions))
            if num_known >= self.by_group + self._scorer.scores_alone:  # each that is expected has come
                del self._pending[response_id]
                own = pending.own if self._scorer.scores_alone else None
                rewards[response_id] = self._scorer.combine(own, pending.of_functions, response)
        return rewards

    def _answer(self, job: Job, slot: WorkerSlot) -> list[Reward]:
        call, lost_with, lost_before = job.call, 0, 0
        while True:
            try:
                rewards: list[Reward] = slot.answer(call, self.timeout_seconds * len(call.responses))
                return rewards
            except CannotStart as error:
                return call.refused(str(error))
            except OSError as error:  # the system has no room for a process; the next call tries again
                return call.refused(f"no worker could be started: {error}")
            except WorkerLost as loss:
                lost_with += loss.had_call
                lost_before += not loss.had_call
                if lost_with == MAX_LOST_WITH:
                    return call.refused(f"{loss}; tried twice")
                if lost_before == MAX_LOST_BEFORE:
                    told = f"the last of {lost_before} workers lost before they took it up"
                    return call.refused(f"{loss}; {told}")
