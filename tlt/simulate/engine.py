"""An engine whose steps cost virtual seconds: a response is a number of tokens, a draft is kept as often as was measured.

    step:  admit ─▶ choose as the real tuner does ─▶ advance every response by what it would keep ─▶ sleep for what that costs

It keeps the promise of engine/backend.py, so the real phase runs on it. Tokens have no value, only their number.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tlt.accounts import TimedStep
from tlt.drafter.drafting.references import References
from tlt.engine.backend import RolloutBackend
from tlt.simulate.assumptions import Agreement
from tlt.simulate.measured import Ints, Measured
from tlt.simulate.virtual import VirtualTime
from tlt.types import BatchState, Finished, Lead, Request, Rollout, StepOutcome, Strategy

_MAX_STEPS, _MAX_GROWTH = 40, 1 / 20
"""Steps that are simulated together: so many, or as many as this share of the mean length, which costs and choices follow."""


@dataclass
class Response:
    """A response in the making. length: where it ends.  ends: where its agreement with a reference ends and begins (Agreement);
    empty: it has none.  num_known: tokens of the reference."""

    request: Request
    length: int
    num_tokens: int
    ends: Sequence[int] = ()
    num_known: int = 0
    age: int = 0

    @property
    def num_cached(self) -> int:
        return len(self.request.prompt_ids) + self.num_tokens - 1

    @property
    def num_left(self) -> int:
        return self.request.params.max_tokens - self.num_tokens

    def to_request(self) -> Request:
        return replace(self.request, token_ids=(0,) * self.num_tokens)

    def to_rollout(self, version: int) -> Rollout:
        request, reason = self.request, "length" if self.num_left == 0 else "stop"
        tokens = cast("tuple[int, ...]", range(self.num_tokens))  # as long, and takes no memory
        known = (request.problem_id, request.sample_index, request.prompt_ids)
        return Rollout(*known, tokens, (), cast(Any, reason), version)

    def agreement(self) -> tuple[int, bool]:
        """Returns (tokens from here on that agree with the reference, whether one before has differed)."""
        place = bisect_right(self.ends, self.num_tokens)
        if place == len(self.ends) or place % 2 or self.num_tokens >= self.num_known:
            return 0, True
        return self.ends[place] - self.num_tokens, place > 0

    def until_change(self) -> int:
        """Returns the tokens until it ends, or until its reference begins to agree or to differ."""
        num = self.length - self.num_tokens
        if self.ends and self.num_tokens < self.num_known:
            num = min(num, self.ends[bisect_right(self.ends, self.num_tokens)] - self.num_tokens)
        return num


class SimulatedEngine(RolloutBackend):
    """measured: what steps cost and bring.  length_of: a request's response.  speculates: else all steps are plain.
    references: None: nothing is followed.  agreement: how far those lead.  slowdown: how much longer a step takes just now.
    sleep_steps: sleeps through up to so many steps of so many seconds each, and returns how many.
    Steps that follow no reference are simulated together, to the first response that changes, `max_steps` at most; after an
    admission one alone, for whoever gave the requests may have more.
    """

    def __init__(
        self,
        time: VirtualTime,
        measured: Measured,
        length_of: Callable[[Request], int],
        max_batch_size: int,
        read_seconds: float,
        speculates: bool,
        seed: int,
    ) -> None:
        self.time, self.measured, self.length_of = time, measured, length_of
        super().__init__(max_batch_size, sys.maxsize)
        self.read_seconds, self.speculates = read_seconds, speculates
        self.rng = np.random.default_rng(seed)
        self.references: References | None = None
        self.agreement: Agreement | None = None
        self.slowdown: Callable[[], float] = lambda: 1.0
        self.sleep_steps: Callable[[float, int], int] = self._sleep_steps
        self.max_steps: int | None = None
        self._running: list[Response] = []

    policy_version = 0
    device = torch.device("cpu")

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> list[Response]:
        return self._running

    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        self.policy_version = version

    def check(self, request: Request) -> None:
        """Answers every request."""

    def _drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._vacate(slot)

    def release(self) -> None:
        """Has no memory to give back."""

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, captures: bool = False) -> list[Finished]:
        num_admitted, seconds = self._admit()
        if not self.running:
            return []
        mean_length = sum(one.num_cached + 1 for one in self.running) / len(self.running)
        leads = [self._lead(one) for one in self.running]
        known = tuple(lead for lead in leads if lead is not None and lead.length > 0)
        batch = BatchState(len(self.running), mean_length, self.policy_version, 0, num_admitted, known)
        strategy, otherwise = self.measured.choose(batch) if self.speculates else (Strategy.OFF, None)
        slowdown = self.slowdown()
        self.time.sleep(seconds * slowdown)
        start = self.time.now
        if strategy.follows:
            kept_BS, nodes = self._follow(strategy, leads)
        else:
            limit = self.max_steps or max(_MAX_STEPS, int(_MAX_GROWTH * mean_length))
            kept_BS, nodes = self._draw(strategy, 1 if num_admitted else limit), float(strategy.budget)
        cost = self.measured.seconds(strategy, nodes, batch.num_running, mean_length) * slowdown
        num_steps = self.sleep_steps(cost, kept_BS.shape[1])
        kept_B = kept_BS[:, num_steps - 1]
        for response, kept in zip(self.running, kept_B.tolist(), strict=True):
            response.num_tokens += kept
        outcome = StepOutcome(int(kept_B.sum()), (), (), self.time.now - start + seconds * slowdown)
        self.stats.record_step(str(strategy), outcome, outcome.num_tokens / outcome.seconds, otherwise)
        self.stats.num_steps += num_steps - 1  # it has counted one
        self.stats.latest = None if num_admitted else TimedStep(str(strategy), batch.num_running, start, start + cost)
        return self._release_finished()

    def _sleep_steps(self, seconds: float, num: int) -> int:
        self.time.sleep(seconds * num)
        return num

    def _admit(self) -> tuple[int, float]:
        """Starts what fits; returns (how many, the seconds of reading them: a prompt once for all its samples)."""
        texts = set()
        num = min(len(self.waiting), self.max_batch_size - len(self.running))
        for _ in range(num):
            request = self.waiting.popleft()
            self.running.append(self._start(request))
            texts.add((request.problem_id, len(request.token_ids), request.sample_index if request.token_ids else 0))
        prompt = len(self.running[-1].request.prompt_ids) if num else 0
        return num, self.read_seconds * sum(prompt + num_tokens for _, num_tokens, _ in texts)

    def _start(self, request: Request) -> Response:
        response = Response(request, self.length_of(request), len(request.token_ids))
        if self.references is not None and (found := self.references.get(request.key)) is not None:
            assert self.agreement is not None, "references are followed as far as they agree"
            assert isinstance(found.version, int), "no other run is replayed here"
            response.age = self.policy_version - found.version
            response.ends = self.agreement.ends(request.key, response.age, response.length)
            response.num_known = len(found.token_ids)
        return response

    def _lead(self, response: Response) -> Lead | None:
        """Returns how far its reference leads, as the drafter sees it; None: it does not."""
        num_agreed, has_differed = response.agreement()
        if not num_agreed or self.agreement is None:
            return None
        return self.agreement.lead(response.age, has_differed, response.num_known - response.num_tokens)

    def _draw(self, strategy: Strategy, num: int) -> Ints:
        """Returns the tokens of each response after 1, 2, … steps, up to `num` of them and none behind the one that changes a
        response."""
        left_B = np.array([one.length - one.num_tokens for one in self.running])
        changes_B = np.array([one.until_change() for one in self.running])
        num = min(num, int(changes_B.min()))
        drawn_BS: Ints = np.ones((len(left_B), num), np.int64)
        if not strategy.is_off:
            drawn_BS += self.measured.draw(strategy, len(left_B), self.rng.random(drawn_BS.shape))
        grown_BS = np.cumsum(drawn_BS, axis=1)
        num = int(min((grown_BS < changes_B[:, None]).sum(1).min() + 1, num))
        kept_BS: Ints = np.minimum(grown_BS[:, :num], left_B[:, None])
        return kept_BS

    def _follow(self, strategy: Strategy, leads: Sequence[Lead | None]) -> tuple[Ints, float]:
        """Returns (tokens of each response after one step along references, nodes drafted for one on average)."""
        other, batch_size = strategy.elsewhere, len(self.running)
        drawn = [0] * batch_size
        if not other.is_off:
            drawn = self.measured.draw(other, batch_size, self.rng.random(batch_size)).tolist()
        kept, num_nodes = [], 0
        for response, lead, by_chance in zip(self.running, leads, drawn, strict=True):
            num_drafted, num_accepted = other.depth, by_chance
            if lead is not None and lead.length:
                num_drafted = max(min(strategy.depth, lead.length, response.num_left - 1), 0)
                num_accepted = min(num_drafted, response.agreement()[0])
                self.stats.followed_by_age[str(response.age)] += num_accepted
            num_nodes += num_drafted
            kept.append(min(num_accepted + 1, response.length - response.num_tokens))
        return np.array(kept)[:, None], num_nodes / batch_size

    def _release_finished(self) -> list[Finished]:
        finished = []
        for slot in reversed(range(len(self.running))):
            if self.running[slot].num_tokens >= self.running[slot].length:
                finished.append(Finished(self.running[slot].to_rollout(self.policy_version)))
                self._vacate(slot)
        return finished

    def _vacate(self, slot: int) -> None:
        last = self.running.pop()
        if slot < len(self.running):
            self.running[slot] = last
