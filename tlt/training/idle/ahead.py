"""Generating ahead: in idle time a replica generates the next steps' responses, with today's policy and their
own noise.

    idle ─▶ take requests of step s + 1, then s + 2 ─▶ generate ─▶ real work, or all done ─▶ responses so far
                                                                                               │ to all ranks
    step s + 1: its policy draws each token, from drafts that are nearly always right ◀─ references ◀─┘

A reference changes the speed alone: nothing is biased.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.distributed import Store

from tlt.base.records import AheadReport
from tlt.base.types import NoiseKey, Request, ResponseId, Rollout, id_of
from tlt.drafter.drafting.retrieval.references import References
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.training.idle.ahead_queue import AheadQueue
from tlt.training.idle.protocol import Ahead, Found


class AheadOfPolicy(Ahead):
    """One per phase and rank.

    past: requests of the current step; their references are dropped at its end.
    lengths: by problem, in tokens: the longest begin first.
    """

    def __init__(
        self,
        engine: RolloutBackend,
        references: References,
        num_replicas: int,
        requests: Sequence[Request],
        past: Sequence[Request],
        lengths: Mapping[str, float],
    ) -> None:
        self.engine, self.references = engine, references
        self.past = [request.noise_key for request in past]
        self.num_offered = sum(len(known.token_ids) for known in map(references.get, self.past) if known)
        by_step = sorted(requests, key=lambda request: request.policy_step)
        nearest: dict[ResponseId, Request] = {}  # the next step's request of a problem comes first
        for request in by_step:
            nearest.setdefault(id_of(request), request)
        self.requests = sorted(
            nearest.values(), key=lambda r: (self._is_known(r), r.policy_step, -self._expected(r, lengths))
        )
        self._number_of = {id_of(request): number for number, request in enumerate(self.requests)}
        self.found: dict[NoiseKey, Found] = {}
        self._begun: set[int] = set()
        self._done: list[int] = []
        self._own: deque[Request] = deque()  # stopped, to be continued
        num_next = sum(request.policy_step == by_step[0].policy_step for request in requests)
        self._lot = -(-num_next // (2 * num_replicas))
        self._max_running = num_next  # a larger batch brings more tokens, but slows each long response
        self._queue: AheadQueue | None = None
        self._has_more = self._has_left = bool(self.requests)

    def begin(self, store: Store) -> None:
        self._queue = AheadQueue(store)
        self._has_more = self._has_left = bool(self.requests)

    def run(self, should_stop: Callable[[], bool]) -> AheadReport:
        stats = self.engine.stats
        self.engine.stats = EngineStats()  # the phase counts its own work only
        try:
            while not should_stop():
                if self.requests and (room := self._room()) > 0:
                    self.engine.add(self._next(room))
                if self.engine.is_idle:
                    break
                for finished in self.engine.step():
                    self._keep(finished.rollout)
        finally:
            self._stop()
            done, self.engine.stats = self.engine.stats, stats
        return AheadReport(done.num_steps, done.num_tokens)

    def take_found(self) -> dict[NoiseKey, Found]:
        found, self.found = self.found, {}
        return found

    def keep(self, found: Iterable[Mapping[NoiseKey, Found]]) -> None:
        for key, (token_ids, is_whole) in (pair for of_replica in found for pair in of_replica.items()):
            before = self.references.get(key)
            rest: Sequence[int] = ()
            if before is not None and not is_whole:  # an earlier policy may have come further
                rest = before.token_ids[len(token_ids) :]
                is_whole = len(rest) > 0 and before.is_whole
            self.references.keep(key, [*token_ids, *rest], self.engine.policy_version, is_whole)

    def end(self) -> None:
        for key in self.past:
            self.references.drop(key)

    def _is_known(self, request: Request) -> bool:
        """An earlier policy's finished reference is nearly as good as a new one."""
        known = self.references.get(request.noise_key)
        return known is not None and known.is_whole

    def _room(self) -> int:
        return min(self.engine.room, self._max_running - len(self.engine.running) - self.engine.num_waiting)

    def _expected(self, request: Request, lengths: Mapping[str, float]) -> float:
        known = self.references.get(request.noise_key)
        return max(lengths.get(request.problem_id, 0.0), 0.0 if known is None else len(known.token_ids))

    def _next(self, room: int) -> list[Request]:
        taken = [self._own.popleft() for _ in range(min(room, len(self._own)))]
        room -= len(taken)
        assert self._queue is not None, "begin comes first"
        if room and self._has_more:
            numbers = self._queue.take(min(room, self._lot))
            self._has_more = numbers.stop < len(self.requests)
            taken += self._begin(numbers)
        elif room and self.engine.is_idle and not taken and self._has_left:
            left = set(range(len(self.requests))) - self._begun - self._queue.done()
            self._has_left = bool(left)
            taken += self._begin(sorted(left)[: min(room, self._lot)])
        return taken

    def _begin(self, numbers: Iterable[int]) -> list[Request]:
        new = [number for number in numbers if number < len(self.requests) and number not in self._begun]
        self._begun.update(new)
        return [self.requests[number] for number in new]

    def _keep(self, rollout: Rollout) -> None:
        number = self._number_of[id_of(rollout)]
        self.found[self.requests[number].noise_key] = rollout.token_ids, True
        self._done.append(number)

    def _stop(self) -> None:
        unfinished = self.engine.withdraw(range(len(self.engine.running)))
        self._own.extend(unfinished)
        self._own.extend(self.engine.withdraw_waiting(self.engine.num_waiting))
        if self._queue is not None and self._done:
            self._queue.note_done(self._done)
        for request in unfinished:
            if request.token_ids:
                self.found[request.noise_key] = request.token_ids, False
