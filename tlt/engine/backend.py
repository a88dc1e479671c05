"""The base of rollout engines: what waits, what runs, what has been counted.

    load_policy ─▶ add ─▶ step, step, ... until is_idle ─▶ release ─▶ (policy update) ─▶ load_policy ─▶ ...

Every engine samples by the law (speculative/sampling.py) or says in its own place that it does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tlt.accounts import TimedStep
from tlt.engine.lengths import Lengths
from tlt.engine.sequence import Decode, check_request
from tlt.engine.stats import EngineStats
from tlt.models.packed import PackedTransformer
from tlt.spans import Span, SpanName
from tlt.speculative.protocol import Drafting
from tlt.speculative.strategy import BatchState, StepOutcome, Strategy, StrategyTuner
from tlt.types import Finished, Request, Rollout


class Unfinished(Protocol):
    """A response in the making, as those see it who may hand it over or keep it."""

    @property
    def request(self) -> Request: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that it has so far, without the prompt."""
        ...

    @property
    def num_cached(self) -> int:
        """Tokens that another engine would have to read again."""
        ...

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        ...

    def to_request(self) -> Request:
        """Returns the request with the tokens that it has so far: another engine goes on from there."""
        ...


class RolloutBackend(ABC):
    """Generates responses for requests.

    max_batch_size: sequences that run at a time.  window: positions of the longest one.
    tuner: chooses how to draft; None: nothing drafts.  on_span: receives what time was spent on.
    decode: gives the text in which stop texts are sought; None: a request with any is refused.
    """

    device: torch.device
    drafter: Drafting | None = None
    """What drafts here; None: nothing does."""
    target: PackedTransformer | None = None
    """The policy in our own layout, for those who train and measure the drafter; None: there is none."""

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
        self.stats, self.lengths = EngineStats(), Lengths()
        self.waiting: deque[Request] = deque()

    # ── the policy ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Updates behind the policy that it has."""

    def load_policy(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """Publishes a policy by Hugging Face names. Never in the middle of a response."""
        self.load_policy_parts([tensors], version)

    @abstractmethod
    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Publishes a policy part by part, for policies that are nowhere whole.

        parts: each has the tensors of whole layers. All ranks gather a part together when it is asked for, so
        an engine asks for every part, and drops it before it asks for the next.
        """

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def running(self) -> Sequence[Unfinished]:
        """The responses in the making, by slot; `withdraw` takes the slots."""

    @property
    def room(self) -> int:
        """The number of requests that could start at once."""
        return max(self.max_batch_size - len(self.running) - len(self.waiting), 0)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests, also those that `withdraw` took out of another engine with the same policy. Raises
        UserError where a prompt cannot be answered."""
        requests = list(requests)
        for request in requests:
            self.check(request)
        self.waiting.extend(requests)

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot be answered."""
        check_request(request, self.window, self.decode is not None)

    def withdraw(self, slots: Iterable[int]) -> list[Request]:
        """Takes running responses out between two steps; each goes on in whatever engine it is added to."""
        slots = sorted(slots, reverse=True)
        requests = [self.running[slot].to_request() for slot in slots]
        self._drop(slots)
        return requests

    def withdraw_waiting(self, num: int) -> list[Request]:
        """Takes the last `num` out that have not started."""
        return [self.waiting.pop() for _ in range(num)]

    def abort(self) -> None:
        """Forgets everything that runs or waits. Because of the law, asking again gives the same tokens."""
        self.waiting.clear()
        self._drop([*reversed(range(len(self.running)))])

    @abstractmethod
    def _drop(self, slots: Sequence[int]) -> None:
        """Forgets the running responses of these slots, the highest first."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Yields each response as it finishes, in no particular order."""
        self.add(requests)
        while not self.is_idle:
            yield from (finished.rollout for finished in self.step())

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def step(self, captures: bool = False) -> list[Finished]:
        """Admits what fits, and advances every running response whose prompt has been read by a token
        at least. Returns those that ended.

        captures: whether what the target captured at their tokens is wanted, for drafter training.
        """

    def _count_step(
        self,
        strategy: Strategy,
        batch: BatchState,
        outcome: StepOutcome,
        start: float,
        *,
        predicted: float | None,
        otherwise: float | None,
    ) -> None:
        """Counts a step, and tells what its time was spent on. predicted, otherwise: see `record_step`."""
        self.stats.record_step(str(strategy), outcome, predicted, otherwise)
        end = start + outcome.seconds
        is_steady = outcome.num_tokens > 0 and not batch.num_admitted
        self.stats.latest = TimedStep(str(strategy), batch.num_running, start, end) if is_steady else None
        if self.on_span is not None:
            name = SpanName.DECODE if outcome.num_tokens else SpanName.PREFILL
            self.on_span(Span(SpanName.SPECULATE if outcome.accepted else name, start, end))

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def release(self) -> None:
        """Gives the caches' memory back where the engine can; only when idle."""

    def close(self) -> None:  # noqa: B027  # not every engine has started any
        """Ends the processes that it has started, if any; nothing can be asked of it afterwards."""
