"""vLLM as a rollout engine: a RolloutBackend over an unmodified vLLM with our law inside.

add ─▶ waiting ─▶ vLLM: prefill, decode, draft, verify by the law ─▶ new tokens ─▶ Sequence ─▶ Finished
                    ▲ draft lengths from the tuner
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from tlt.base.spans import Span
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Verdict
from tlt.engine.backend import RolloutBackend
from tlt.engine.sequence import Decode, Sequence, broken_policy
from tlt.engine.vllm.drafter import VllmDrafter
from tlt.engine.vllm.inside.law import RowLaw
from tlt.engine.vllm.inside.verified import Verified
from tlt.engine.vllm.link import Link
from tlt.models.packed import layer_by_layer
from tlt.models.target import Target
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner


@dataclass(frozen=True)
class DraftingParts:
    """Without a tuner a VllmEngine drafts nothing."""

    tuner: StrategyTuner | None = None
    drafter: VllmDrafter | None = None
    target: Target | None = None
    """A copy of the policy in our layout, to train and measure the drafter."""


Names = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A part of the policy by our names → by its checkpoint's."""


class VllmEngine(RolloutBackend):
    policy_version = 0
    drafter: VllmDrafter | None = None

    def __init__(
        self,
        link: Link,
        *,
        max_batch_size: int,
        window: int,
        drafting: DraftingParts = DraftingParts(),
        to_checkpoint: Names = dict,
        on_span: Callable[[Span], None] | None = None,
        decode: Decode | None = None,
    ) -> None:
        super().__init__(max_batch_size, window, tuner=drafting.tuner, on_span=on_span, decode=decode)
        self.link, self.device = link, link.device
        self.drafter = drafting.drafter
        self.target, self.to_checkpoint = drafting.target, to_checkpoint
        self._running: dict[str, Sequence] = {}
        self._has_spoilt_caches = False
        """A broken policy may have left NaN in vLLM's caches."""
        self._reading: set[str] = set()
        """Sequences whose prompt vLLM is still reading."""
        self._numbers = itertools.count()
        self._now, self._next = Strategy.OFF, Choice(Strategy.OFF)
        """Of a step: the strategy of the drafts that it verifies, made by the step before, and the choice by
        which it drafts for the next step."""

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────

    def load_policy(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        self.load_policy_parts(layer_by_layer(tensors), version)

    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """No response may be running."""
        assert self.is_idle, "a policy cannot change under running responses"
        with self.link.weights.loading_policy() as load:
            passing = self._hand_on(parts, load)
            if self.target is None:
                deque(passing, maxlen=0)
            else:
                self.target.load_parts(passing, version)
        if self._has_spoilt_caches:
            self.link.call("tlt_clear_caches")
            self._has_spoilt_caches = False
        if self.drafter is not None:
            self.drafter.follow()
        self.policy_version = version

    def _hand_on(
        self, parts: Iterable[Mapping[str, Tensor]], load: Callable[[Mapping[str, Tensor]], None]
    ) -> Iterator[Mapping[str, Tensor]]:
        for part in parts:
            load(self.to_checkpoint(part))
            if self.drafter is not None:
                self.drafter.note(part)
            yield part

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> list[Sequence]:
        return list(self._running.values())

    def _drop(self, slots: Iterable[int]) -> None:
        names = list(self._running)
        self._leave([names[slot] for slot in slots])

    def abort(self) -> None:
        super().abort()
        self._now, self._next = Strategy.OFF, Choice(Strategy.OFF)

    def release(self) -> None:
        assert self.is_idle
        self.link.release()

    def close(self) -> None:
        self.link.close()

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, captures: bool = False) -> list[Finished]:
        ended = self._admit()
        if not self._running:
            return ended
        start, read_prompts = time.perf_counter(), bool(self._reading)
        batch = self._batch_state()
        self._choose(batch)
        outputs = self.link.step()
        num_tokens = 0
        rows: list[tuple[int, int, int]] = []  # drafted, accepted, kept
        for name, (token_ids, logprobs) in outputs.items():
            verified = self.link.verified(name)
            num_drafted, num_accepted = len(verified.draft), verified.num_accepted
            num_kept = self._commit(name, token_ids, logprobs, verified)
            num_tokens += num_kept
            # finding no draft is an outcome of the strategy, too
            if num_drafted or not (self._now.is_off or name in self._reading):
                rows.append((num_drafted, num_accepted, num_kept))
        self._reading -= outputs.keys()
        drafted, accepted, kept = zip(*rows, strict=True) if rows else ((),) * 3
        if rows:
            self.stats.record_verifications(drafted, accepted, kept, max(drafted))
        seconds = time.perf_counter() - start
        outcome = StepOutcome(num_tokens, accepted, drafted, seconds)
        self._account(self._now if accepted else Strategy.OFF, batch, outcome, start, read_prompts)
        return ended + self._finish(captures)

    def _admit(self) -> list[Finished]:
        ended = []
        while self.waiting and len(self._running) < self.max_batch_size:
            request, name = self.waiting.popleft(), f"tlt-{next(self._numbers)}"
            if self.link.is_v2:  # it keeps drafts on the device
                request = replace(request, drafts=None)
            sequence = Sequence.start(request, self.window, self.decode)
            if sequence.finish_reason is not None:
                ended.append(Finished(sequence.to_rollout(self.policy_version)))
                continue
            stop_ids, law = list(request.params.stop_ids), RowLaw.extra_args(request)
            self.link.add(name, sequence.tokens, sequence.num_left, stop_ids, law)
            self._running[name] = sequence
            self._reading.add(name)
        return ended

    def _batch_state(self) -> BatchState:
        version = 0 if self.drafter is None else self.drafter.version
        num_cached = sum(len(sequence.tokens) for sequence in self._running.values())
        return BatchState(len(self._running), self.policy_version, version, num_cached=num_cached)

    def _choose(self, batch: BatchState) -> None:
        """A choice holds for at least two steps: the second both drafts and verifies by it."""
        if self.tuner is None:
            return
        is_proven = self._now == self._next.strategy
        self._now = self._next.strategy
        if is_proven:
            self._next = self.tuner.choose(batch)
        self.link.draft(min(self._next.strategy.depth, self.link.max_depth))

    def _commit(
        self, name: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...], verified: Verified
    ) -> int:
        sequence, (draft, num_accepted) = self._running[name], verified
        if not math.isfinite(sum(logprobs)):
            self._has_spoilt_caches = True
            raise broken_policy(self.policy_version, self.link.dtype, sequence)
        rejected = draft[num_accepted] if num_accepted < len(draft) else None
        verdict = Verdict(token_ids, num_accepted, (), logprobs, len(draft), rejected)
        return sequence.commit(verdict, self.decode, self._now.drafter)

    def _account(
        self, strategy: Strategy, batch: BatchState, outcome: StepOutcome, start: float, read_prompts: bool
    ) -> None:
        """The tuner learns only from steps that read no prompts."""
        is_typical = outcome.num_tokens > 0 and not read_prompts
        is_steady = is_typical and strategy == self._next.strategy
        self._count_step(self._next if is_steady else Choice(strategy), batch, outcome, start)
        self.stats.num_preemptions += self.link.take_preemptions()
        if self.tuner is not None and is_typical:
            drafted_next = None if is_steady else self._next.strategy
            self.tuner.observe(strategy, batch, dataclasses.replace(outcome, drafted_next=drafted_next))

    def _finish(self, captures: bool) -> list[Finished]:
        ended = [name for name, sequence in self._running.items() if sequence.finish_reason is not None]
        finished = []
        for name in ended:
            sequence = self._running[name]
            captured_TF = self.link.captured(name, sequence.num_cached) if captures else None
            finished.append(Finished(sequence.to_rollout(self.policy_version), captured_TF))
        self._leave(ended)
        return finished

    def _leave(self, names: list[str]) -> None:
        if names:
            self.link.abort(names)
        self._reading -= set(names)
        for name in names:
            del self._running[name]
