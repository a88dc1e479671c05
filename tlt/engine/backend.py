"""The base of rollout engines: the queue of requests, the running responses and the statistics.

    load_policy ─▶ add ─▶ step, step, ... until is_idle ─▶ release ─▶ (policy update) ─▶ load_policy ─▶ ...

Every engine samples by the law (speculation/law/sampling.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from tlt.base.records import TimedStep
from tlt.base.spans import Span, SpanName
from tlt.base.types import Finished, Request, ResponseId, Rollout, id_of
from tlt.drafter.protocol import Drafting
from tlt.engine.sequence import Decode, check_request
from tlt.engine.stats import EngineStats
from tlt.models.target import Target
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner


class Unfinished(Protocol):
    @property
    def request(self) -> Request: ...

    @property
    def num_tokens(self) -> int:
        """Response tokens, without the prompt."""
        ...

    @property
    def num_cached(self) -> int:
        """Tokens to prefill if the response changed engines."""
        ...

    @property
    def num_left(self) -> int:
        """Most tokens that can still follow."""
        ...

    def to_request(self) -> Request:
        """With the tokens so far, for another engine."""
        ...


class RolloutBackend(ABC):
    """max_batch_size: most running sequences.
    window: most tokens of prompt and response together.
    tuner: None: no step drafts.
    decode: token ids → text; None: requests with stop texts are refused.
    """

    device: torch.device
    target: Target | None = None
    """The policy in our own layout, to train and measure the drafter; None: no copy is kept."""
    generates_without_side_effects = False
    parks = False
    """Whether responses that end at a stop may have further turns. Our engine then keeps their caches until
    they go on or `forget` is called; vLLM has its prefix cache."""

    def __init__(
        self,
        max_batch_size: int,
        window: int,
        *,
        tuner: StrategyTuner | None = None,
        on_span: Callable[[Span], None] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.max_batch_size, self.window = max_batch_size, window
        self.tuner, self.on_span, self.decode = tuner, on_span, decode
        self.stats = EngineStats()
        self.waiting = deque[Request]()

    @property
    def drafter(self) -> Drafting | None:
        return None

    # ── the policy ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Number of updates of the loaded policy."""

    def load_policy(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """tensors: by Hugging Face names. The engine must be idle."""
        self.load_policy_parts([tensors], version)

    @abstractmethod
    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Loads a policy that is never whole on one rank.

        parts: tensors of whole layers. All ranks gather a part together, so an engine iterates to the end,
            and drops each part before the next.
        """

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def running(self) -> Sequence[Unfinished]:
        """The unfinished responses, by slot."""

    @property
    def room(self) -> int:
        """Further requests that could start now."""
        return max(self.max_batch_size - len(self.running) - len(self.waiting), 0)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests, new or withdrawn from an engine with the same policy. Raises as `check`."""
        requests = list(requests)
        for request in requests:
            self.check(request)
        self.waiting.extend(requests)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot be answered."""
        check_request(request, self.window, self.decode is not None)

    def withdraw(self, slots: Iterable[int]) -> list[Request]:
        """Removes responses, which any engine with the same policy can continue."""
        slots = sorted(slots, reverse=True)
        requests = [self.running[slot].to_request() for slot in slots]
        self._drop(slots)
        return requests

    def withdraw_waiting(self, num: int) -> list[Request]:
        """Takes from the end of the queue."""
        requests = [self.waiting.pop() for _ in range(num)]
        for request in requests:
            self.forget(id_of(request))
        return requests

    def forget(self, response_id: ResponseId) -> None:  # noqa: B027  # not every engine parks
        """The response does not go on here."""

    def abort(self) -> None:
        self.waiting.clear()
        self._drop([*reversed(range(len(self.running)))])

    @abstractmethod
    def _drop(self, slots: Sequence[int]) -> None:
        """slots: in falling order."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Yields each response as it finishes."""
        self.add(requests)
        while not self.is_idle:
            yield from (finished.rollout for finished in self.step())

    def without_side_effects(self, drafts: bool) -> AbstractContextManager[EngineStats]:
        """Tuner and drafter learn nothing, no span is reported, and the yielded statistics are of this
        context alone.

        drafts: False: as with speculation off.
        """
        raise NotImplementedError

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def step(self, captures: bool = False) -> list[Finished]:
        """Admits what fits, and advances every prefilled response by at least one token.

        captures: finished responses carry the target's features, to train the drafter.
        """

    def _count_step(self, choice: Choice, batch: BatchState, outcome: StepOutcome, start: float) -> None:
        name, end = str(choice.strategy), start + outcome.seconds
        self.stats.record_step(choice, outcome, batch.num_running)
        is_steady = outcome.num_tokens > 0 and not batch.num_admitted
        self.stats.latest = TimedStep(name, batch.num_running, start, end) if is_steady else None
        if self.on_span is not None:
            kind = SpanName.DECODE if outcome.num_tokens else SpanName.PREFILL
            kind = SpanName.SPECULATE if outcome.accepted else kind
            self.on_span(Span(kind, start, end, name, batch.num_running, outcome.num_tokens))

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def release(self) -> None:
        """Frees the caches where it can. The engine must be idle."""

    def close(self) -> None:  # noqa: B027  # not every engine has processes
        """Ends the engine's processes."""
