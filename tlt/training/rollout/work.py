"""One replica's work in a phase: its units, and its finished responses. A unit is a group, or responses that
another replica hands over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property

from tlt.base.types import (
    Finished,
    Problem,
    Request,
    ResponseId,
    Reward,
    Rollout,
    Turns,
    id_of,
    read_drafts,
    read_routes,
    write_routes,
)
from tlt.engine.backend import RolloutBackend
from tlt.training.idle.protocol import DrafterTraining
from tlt.training.rollout.protocol import Recalled, Sinks
from tlt.training.rollout.work_queue import WorkQueue


class ReplicaWork:
    """num_received: responses that other replicas handed over.
    gap_seconds, gap_training: see `ReplicaReport`.
    """

    def __init__(self, queue: WorkQueue, requests: Sequence[Sequence[Request]]) -> None:
        self.queue, self.requests = queue, requests
        self.unit_of: dict[ResponseId, int] = {}
        self.num_open: Counter[int] = Counter()
        self.num_received = 0
        self.gap_seconds = self.gap_training = 0.0
        self.unit_size = max(map(len, requests), default=1)

    @cached_property
    def _request_of(self) -> dict[ResponseId, Request]:
        return {id_of(request): request for group in self.requests for request in group}

    def take(self, room: int) -> list[Request]:
        taken: list[Request] = []
        for unit in self.queue.take(room):
            if unit < len(self.requests):
                taken += self._hold(unit, self.requests[unit])
            else:
                received = [self._unpack(part) for part in self.queue.receive(unit)]
                taken += self._hold(unit, received)
                self.num_received += len(received)
        return taken

    def finish(self, response_id: ResponseId) -> None:
        unit = self.unit_of.pop(response_id)
        self.num_open[unit] -= 1
        if self.num_open[unit] == 0:
            self.queue.finish(unit)

    def share(self, engine: RolloutBackend, num_offers: int) -> None:
        """Hands responses to a helper, if worth the prefill."""
        num_waiting = min(engine.num_waiting, (engine.num_waiting + len(engine.running)) // (1 + num_offers))
        slots = worth_migrating(
            [(sequence.num_cached, sequence.num_left) for sequence in engine.running], num_offers
        )
        if not (num_waiting or slots) or (unit := self.queue.accept_help()) is None:
            return
        requests = engine.withdraw_waiting(num_waiting) if num_waiting else engine.withdraw(slots)
        self.queue.hand_over(unit, [self._pack(request) for request in requests])
        for request in requests:
            self.finish(id_of(request))

    def _hold(self, unit: int, requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            self.unit_of[id_of(request)] = unit
        self.num_open[unit] = len(requests)
        return requests

    def _pack(self, request: Request) -> bytes:
        """Every replica knows the phase's requests. JSON keeps floats exactly."""
        so_far = request.token_ids, request.logprobs, request.drafts, write_routes(request.routes)
        turns = None if request.turns is None else asdict(request.turns)
        return json.dumps([*id_of(request), *so_far, turns]).encode()

    def _unpack(self, part: bytes) -> Request:
        problem_id, sample_index, token_ids, logprobs, drafts, routes, turns = json.loads(part)
        request = self._request_of[problem_id, sample_index]
        return replace(
            request,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            drafts=read_drafts(drafts),
            routes=read_routes(routes),
            turns=Turns.read(turns),
        )


class FinishedResponses:
    """divided: responses whose group may finish on other ranks."""

    def __init__(
        self,
        problems: Iterable[Problem],
        requests: Iterable[Sequence[Request]],
        sinks: Sinks,
        training: DrafterTraining,
    ) -> None:
        self.scorers, self.decode, self.journal = sinks.scorers, sinks.decode, sinks.journal
        self.training = training
        self.rollouts: list[Rollout] = []
        self.rewards: dict[ResponseId, Reward] = {}
        self.divided: dict[ResponseId, Rollout] = {}
        self._data_of = {problem.problem_id: problem.data for problem in problems}
        self._groups = [[id_of(request) for request in group] for group in requests]
        self._group_of = {response_id: group for group in self._groups for response_id in group}

    def add(self, finished: Finished) -> None:
        self.rollouts.append(finished.rollout)
        self._submit(finished.rollout)
        self.training.observe(finished)

    def recall(self, recalled: Recalled, rank: int, num_ranks: int) -> None:
        """Takes whole groups. Where scorers score by group, a group's rewards count only if complete."""
        rollout_of = {id_of(rollout): rollout for rollout in recalled.rollouts}
        begun = [group for group in self._groups if any(one in rollout_of for one in group)]
        for group in begun[rank::num_ranks]:
            is_scored = all(one in recalled.rewards for one in group) or not self.scorers.by_group
            for response_id in filter(rollout_of.__contains__, group):
                rollout, reward = rollout_of[response_id], recalled.rewards.get(response_id)
                if reward is None or not is_scored:
                    self.add(Finished(rollout))
                else:
                    self.rollouts.append(rollout)
                    self.rewards[response_id] = reward
                    self.training.observe(Finished(rollout))

    def settle(self, divided: Sequence[Mapping[ResponseId, Rollout]], rank: int) -> None:
        """Scores each divided group on the rank with most of its responses, which submits the others' here,
        too.

        divided: by rank.
        """
        holder_of = {response_id: holder for holder, held in enumerate(divided) for response_id in held}
        for group in self._groups:
            holders = Counter(holder_of[one] for one in group if one in holder_of)
            if holders.total() == len(group) and holders.most_common(1)[0][0] == rank:
                for response_id in [one for one in group if one not in self.divided]:
                    self._submit(divided[holder_of[response_id]][response_id])
        self.scorers.withdraw(self.divided)
        self.divided.clear()

    def _submit(self, rollout: Rollout) -> None:
        self.journal.note_finished(rollout)
        response_id, token_ids = id_of(rollout), rollout.last_turn
        data, text = self._data_of[rollout.problem_id], self.decode(token_ids)
        self.scorers.submit(response_id, data, text, token_ids, rollout.policy_version, rollout.turns)
        if self.scorers.by_group:
            group = self._group_of[response_id]
            self.divided[response_id] = rollout
            if all(one in self.divided for one in group):
                self.scorers.complete(group)
                for one in group:
                    del self.divided[one]

    def collect(self) -> None:
        self._keep(self.scorers.collect())

    def drain(self, patience: float) -> None:
        self._keep(self.scorers.drain(patience))

    def _keep(self, rewards: Mapping[ResponseId, Reward]) -> None:
        self.journal.note_rewards(rewards)
        self.rewards.update(rewards)


def worth_migrating(responses: Sequence[tuple[int, int]], num_offers: int) -> list[int]:
    """The slots to hand to one of `num_offers` idle replicas: an equal share of long and short responses,
    none whose prefill would be longer than its rest.

    responses: by slot, (tokens in the cache, tokens still to generate).
    """
    if len(responses) < 2:
        return []
    worth = sorted(
        (num_cached, slot) for slot, (num_cached, num_left) in enumerate(responses) if num_cached <= num_left
    )
    num = min(max(len(responses) // (1 + num_offers), 1), len(worth))
    return [worth[i * len(worth) // num][1] for i in range(num)]
