"""The promise of a rollout engine to those who use it. Knows no engine: ours (engine.py) is one, others may stand beside it.

    load_policy ─▶ add ─▶ step, step, ... until is_idle ─▶ release ─▶ (policy update) ─▶ load_policy ─▶ ...

Every engine samples by the law (speculative/sampling.py) or says in its own place that it does not. What it can do beyond
generating is declared in `Capabilities`, so that a caller asks a record and not the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tlt.engine.stats import EngineStats
from tlt.models.packed import PackedTransformer
from tlt.speculative.protocol import Drafting
from tlt.types import Finished, Request, Rollout, StrategyTuner


@dataclass(frozen=True)
class Capabilities:
    """Declares what an engine can do beyond generating.

    drafter_kinds: names that `Strategy.drafter` may have; () without a drafter.
    trees:         whether a draft may branch; else it is a chain.
    max_depth:     drafted tokens per step at most; 0 without speculation.
    captures:      whether a step can return what the target captured, for drafter training.
    hands_over:    whether running responses can be withdrawn and go on in another engine.
    sleeps:        whether `release` gives the caches' memory back.
    """

    drafter_kinds: tuple[str, ...]
    trees: bool
    max_depth: int
    captures: bool
    hands_over: bool
    sleeps: bool


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


class RolloutBackend(Protocol):
    """What every engine promises.

    tuner: chooses how to draft; None: nothing drafts.
    """

    stats: EngineStats
    tuner: StrategyTuner | None

    @property
    def device(self) -> torch.device: ...

    @property
    def drafter(self) -> Drafting | None:
        """What drafts here; None: nothing does."""
        ...

    @property
    def target(self) -> PackedTransformer | None:
        """The policy in our own layout, for those who train and measure the drafter; None where the engine has no such copy."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def policy_version(self) -> int:
        """Updates behind the policy that it has."""
        ...

    @property
    def room(self) -> int:
        """The number of requests that could start at once."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def running(self) -> Sequence[Unfinished]:
        """The responses in the making, by slot; `withdraw` takes the slots."""
        ...

    @property
    def is_idle(self) -> bool: ...

    def load_policy(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """Publishes a policy by Hugging Face names; only when idle."""

    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Does so part by part, each with the tensors of whole layers, for policies that are nowhere whole. A part is gathered
        when it is asked for, by all ranks together: an engine asks for every part, and drops it before it asks for the next.
        The tensors are whole; an engine that is itself in slices takes what it needs of each."""

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises UserError where a prompt cannot be answered."""

    def step(self, captures: bool = False) -> list[Finished]:
        """Advances every running response by at least one token; returns those that ended."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Yields each response as it finishes, in no particular order."""
        ...

    def withdraw(self, slots: Iterable[int]) -> list[Request]:
        """Takes running responses out; each goes on in whatever engine it is added to."""
        ...

    def withdraw_waiting(self, num: int) -> list[Request]:
        """Takes the last `num` out that have not started."""
        ...

    def abort(self) -> None:
        """Forgets everything that runs or waits."""

    def release(self) -> None:
        """Gives the caches' memory back; only when idle."""

    def close(self) -> None:
        """Ends the processes that it has started, if any; nothing can be asked of it afterwards."""
