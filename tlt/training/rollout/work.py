"""One replica's work in a phase: takes units from the shared queue, hands running responses over to idle
replicas, and passes finished ones to scorers, drafter and journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from tlt.base.types import Finished, Problem, Request, ResponseId, Reward, Rollout, id_of, read_drafts
from tlt.engine.backend import RolloutBackend
from tlt.training.rollout.protocol import DrafterTraining, Recalled, Receivers
from tlt.training.rollout.work_queue import WorkQueue


class ReplicaWork:
    """A replica's units of a phase. A unit is a group of requests, or unfinished responses of another
    replica.

    num_received: responses that other replicas handed over.
    unit_size: requests of the largest group.
    gap_seconds: time without work before the last token.
    gap_training: seconds of drafter training up to the end of the latest gap.
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
        """Takes up to `room` units and returns their requests; none when the queue is empty."""
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
        """Notes that a response has left this replica, finished or handed over."""
        unit = self.unit_of.pop(response_id)
        self.num_open[unit] -= 1
        if self.num_open[unit] == 0:
            self.queue.finish(unit)

    def share(self, engine: RolloutBackend, num_offers: int) -> None:
        """Hands a helper its share of the waiting or running responses, if that is worth it."""
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
        """Encodes what another replica does not know yet; all know the phase's requests. JSON keeps floats
        exactly."""
        so_far = request.token_ids, request.logprobs, request.drafts
        return json.dumps([*id_of(request), *so_far]).encode()

    def _unpack(self, part: bytes) -> Request:
        problem_id, sample_index, token_ids, logprobs, drafts = json.loads(part)
        request = self._request_of[problem_id, sample_index]
        tokens, numbers = tuple(token_ids), tuple(logprobs)
        return replace(request, token_ids=tokens, logprobs=numbers, drafts=read_drafts(drafts))


class FinishedResponses:
    """The finished responses of this replica in a round, and their rewards.

    Where scorers score by group, a group whose responses all finish here is scored at once, and one that is
    divided among the ranks after the round, by `settle`.

    requests: the round's groups.
    divided: finished responses whose groups are not complete here.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        requests: Iterable[Sequence[Request]],
        to: Receivers,
        training: DrafterTraining,
    ) -> None:
        self.scorers, self.decode, self.journal, self.training = to.scorers, to.decode, to.journal, training
        self.rollouts: list[Rollout] = []
        self.rewards: dict[ResponseId, Reward] = {}
        self.divided: dict[ResponseId, Rollout] = {}
        self._data_of = {problem.problem_id: problem.data for problem in problems}
        self._groups = [[id_of(request) for request in group] for group in requests]
        self._group_of = {response_id: group for group in self._groups for response_id in group}

    def add(self, finished: Finished) -> None:
        """Takes a response that has just finished, or that has no reward yet."""
        self.rollouts.append(finished.rollout)
        self._submit(finished.rollout)
        self.training.observe(finished)

    def recall(self, recalled: Recalled, rank: int, num_ranks: int) -> None:
        """Takes this rank's part of the responses that an earlier attempt finished: whole groups. Where
        scorers score by group, the rewards of a group count if all of it was scored."""
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
        """Scores the groups that are divided among the ranks, each on the rank with most of its responses.

        divided: by rank; every rank passes the same.
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
        """Hands a response to the scorers, and its group if that is complete now."""
        self.journal.note_finished(rollout)
        response_id, text = id_of(rollout), self.decode(rollout.token_ids)
        data = self._data_of[rollout.problem_id]
        self.scorers.submit(response_id, data, text, rollout.token_ids, rollout.policy_version)
        if self.scorers.by_group:
            group = self._group_of[response_id]
            self.divided[response_id] = rollout
            if all(one in self.divided for one in group):
                self.scorers.complete(group)
                for one in group:
                    del self.divided[one]

    def collect(self) -> None:
        """Takes the rewards that have arrived."""
        self._keep(self.scorers.collect())

    def drain(self, patience: float) -> None:
        """Waits for the missing rewards."""
        self._keep(self.scorers.drain(patience))

    def _keep(self, rewards: Mapping[ResponseId, Reward]) -> None:
        self.journal.note_rewards(rewards)
        self.rewards.update(rewards)


def worth_migrating(responses: Sequence[tuple[int, int]], num_offers: int) -> list[int]:
    """Returns the slots of the responses to hand to one of `num_offers` idle replicas: an equal share of long
    and short ones. A response stays if the helper would have to prefill more tokens than can still be
    generated.

    responses: by slot, (tokens in the cache, tokens that can still be generated).
    """
    if len(responses) < 2:
        return []
    worth = sorted(
        (num_cached, slot) for slot, (num_cached, num_left) in enumerate(responses) if num_cached <= num_left
    )
    num = min(max(len(responses) // (1 + num_offers), 1), len(worth))
    return [worth[i * len(worth) // num][1] for i in range(num)]
