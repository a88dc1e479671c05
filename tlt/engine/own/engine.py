"""The rollout engine: continuous batching with lossless speculation, one step at a time.

    add ─▶ admit ─▶ prefill (a prompt once for all its samples) ─▶ fork
             ▼
    preempt  where memory is spent: the cheapest goes back to the queue, and is read again later
             ▼
    step:  batch ─▶ choose a strategy ─▶ propose trees ─▶ verify: one target forward ─▶ commit ─▶ record
             ▼
    release  what ended; one that may go on is parked

Without speculation the tree is only its root. Time is measured here and nowhere below.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor

from tlt.base.spans import Span, SpanName
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Finished, Request, ResponseId, UserError, Verdict, id_of
from tlt.base.uploads import upload
from tlt.drafter.protocol import DraftContext, Drafter, LentDrafter, NoDrafter, Proposal
from tlt.engine.backend import RolloutBackend
from tlt.engine.memory import CacheMemory
from tlt.engine.own.noise import BatchLaw, StepNoise
from tlt.engine.own.prefill import prefill
from tlt.engine.own.scheduler import Admission, Scheduler
from tlt.engine.own.tree_forward import PIECE, along_paths, forward_trees, recorded_length
from tlt.engine.parking import Parked
from tlt.engine.sequence import Decode, Routes, Sequence, broken_policy
from tlt.engine.stats import EngineStats
from tlt.models.attention import prepare_kernels
from tlt.models.graphs import Graphs
from tlt.models.kv_cache import Cache
from tlt.models.target import Target
from tlt.speculation.law.draw import compiled_loops
from tlt.speculation.law.tree import chain, layout
from tlt.speculation.tuner.protocol import BatchState, Choice, StepOutcome, StrategyTuner


class RolloutEngine(RolloutBackend):
    """Generates with PyTorch. All state lives in this object; nothing in it is random.

    cache_bytes: see `CacheMemory`.
    routes: see `Routes`; a dense model has none.
    """

    target: Target
    generates_without_side_effects = True

    def __init__(
        self,
        target: Target,
        *,
        max_batch_size: int = 64,
        tuner: StrategyTuner | None = None,
        on_span: Callable[[Span], None] | None = None,
        decode: Decode | None = None,
        cache_bytes: Callable[[], int | None] = lambda: None,
        routes: Routes = "none",
    ) -> None:
        window = target.config.max_positions
        super().__init__(max_batch_size, window, tuner=tuner, on_span=on_span, decode=decode)
        self.target = target
        self.config, self.device = target.config, target.device
        self.scheduler = Scheduler(self.waiting, max_batch_size, window, decode)
        self.cache = Cache(self.config, self.config.num_layers, target.dtype, self.device, max_batch_size)
        self.memory = CacheMemory(self.cache, window, cache_bytes)
        self.routes = routes if target.num_routes else "none"
        self.graphs = Graphs(self.device)
        self._law: BatchLaw | None = None
        prepare_kernels(self.device, target.dtype)
        if self.device.type == "cpu":
            compiled_loops()

    @property
    def drafter(self) -> Drafter[Any]:
        """The memory holds the drafter, for its caches."""
        return self.memory.drafter

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def policy_version(self) -> int:
        return self.target.version

    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        assert self.is_idle, "a policy cannot change under running responses"
        self.graphs.clear()
        self.target.load_parts(parts, version)

    def load_drafter(self, drafter: Drafter[Any]) -> None:
        """Raises UserError without a tuner: no step would use the drafter."""
        assert self.is_idle, "a drafter is attached between responses"
        if self.tuner is None:
            raise UserError(
                "speculation is off, so a drafter has no use; set speculation to adaptive or "
                "DEPTHxWIDTHxBUDGET"
            )
        self.memory.drafter = drafter

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        taken = len(self.running) + len(self.waiting)
        return max(min(super().room, self.memory.max_slots(self.scheduler.longest) - taken), 0)

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    def check(self, request: Request) -> None:
        super().check(request)
        self.memory.check(request)

    def abort(self) -> None:
        super().abort()
        self.memory.parking.clear()

    def forget(self, response_id: ResponseId) -> None:
        self.memory.parking.forget(response_id)

    @torch.inference_mode()
    def _drop(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.drafter.withdraw(slot)
            self._vacate(slot)

    def release(self) -> None:
        assert self.is_idle
        self.memory.release()

    @contextmanager
    def without_side_effects(self, drafts: bool) -> Iterator[EngineStats]:
        assert self.is_idle, "responses are generated aside between phases"
        self.memory.parking.clear()  # another drafter could not read it
        kept = self.tuner, self.drafter, self.stats, self.on_span, self.parks
        self.parks = False
        self.tuner = deepcopy(self.tuner) if drafts else None
        self.memory.drafter = LentDrafter(self.drafter) if drafts else NoDrafter()
        self.stats, self.on_span = EngineStats(), None
        try:
            yield self.stats
        finally:
            self.abort()
            self.release()
            self.tuner, self.memory.drafter, self.stats, self.on_span, self.parks = kept

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(self, captures: bool = False) -> list[Finished]:
        self._preempt()
        admissions = self.scheduler.admit(self.memory.fits_longer)
        if admissions:
            self._prefill(admissions)
        # a response that another engine began may already have its last token
        ended = self._release_finished(captures) if admissions else []
        if not self.running:
            return ended
        start = time.perf_counter()
        batch = self._batch_state(sum(len(admission.slots) for admission in admissions))
        choice = self._choose(batch)
        strategy = choice.strategy
        proposal = self._propose(strategy)
        verdicts = self._verify(proposal.tree)
        kept = self._commit(strategy, proposal, verdicts)
        self._record(start, batch, choice, proposal, verdicts, kept)
        return ended + self._release_finished(captures)

    def _prefill(self, admissions: list[Admission]) -> None:
        start = time.perf_counter()
        self._law = None
        if sum(len(a.slots) for a in admissions) == len(self.running):
            # the cache is empty: it starts anew, without the room that an earlier long sequence needed
            self.cache.release()
        self.memory.reserve(len(self.running), self.scheduler.longest + 1)
        admissions = [self._enter(admission) for admission in admissions]
        with self.target.recording(self.routes == "all"):
            prefill(self.target, self.cache, admissions, self.drafter.capture, self._on_read)
        if self.on_span is not None:
            self.on_span(Span(SpanName.PREFILL, start, time.perf_counter()))

    def _enter(self, admission: Admission) -> Admission:
        """Unparks what was parked of the sequences. They share a text, which is read from the start unless
        all of them were parked."""
        entering = [self.running[slot] for slot in admission.slots]
        found = [self.memory.parking.take(id_of(one.request), one.tokens) for one in entering]
        kept = [parked for parked in found if parked is not None]
        num_read = min(len(parked.tokens) for parked in kept) if len(kept) == len(found) else 0
        for slot, one, parked in zip(admission.slots, entering, found, strict=True):
            if parked is None:
                self.drafter.admit(slot, one.request)
            else:
                self.drafter.unpark(slot, one.request, parked.draft)
                self.cache.copy_in(slot, parked.entries)
            self.stats.num_kept_tokens += num_read
            if one.begins_later_turn and not num_read:
                self.stats.num_reread_tokens += one.num_cached
        return replace(admission, num_read=num_read)

    def _park(self, slot: int) -> None:
        sequence = self.running[slot]
        length = sequence.num_cached
        if self.memory.can_park(length):
            entries, draft = self.cache.copy_out(slot, length), self.drafter.park(slot, length)
            kept = Parked(tuple(sequence.tokens[:length]), entries, draft, self.memory.slot_bytes(length))
            self.memory.parking.park(id_of(sequence.request), kept)

    def _on_read(self, slots: tuple[int, ...], first: int, captured_TF: Tensor) -> None:
        captured_TF, routes_TR = self._split(captured_TF)
        if routes_TR is not None:
            for slot in slots:
                self.running[slot].note_read(first, routes_TR)
        self.drafter.remember(slots, [first] * len(slots), captured_TF.expand(len(slots), -1, -1))

    def _preempt(self) -> None:
        running = self.running
        while len(running) > 1 and not self.memory.has_room(len(running), self.scheduler.longest):
            (request,) = self.withdraw([self.scheduler.cheapest()])
            self.waiting.appendleft(request)
            self.stats.num_preemptions += 1
            self.stats.num_reread_tokens += len(request.prompt_ids) + len(request.token_ids) - 1

    def _batch_state(self, num_admitted: int) -> BatchState:
        tokens = [sequence.tokens for sequence in self.running]
        return BatchState(
            len(tokens),
            self.target.version,
            self.drafter.version,
            num_admitted,
            self.drafter.reference_drafts(tokens),
            num_cached=sum(map(len, tokens)),
        )

    def _choose(self, batch: BatchState) -> Choice:
        if self.tuner is None or not self.drafter.kinds:
            return Choice(Strategy.OFF)
        if any(len(sequence.tokens) < 2 for sequence in self.running):
            return Choice(Strategy.OFF)  # no feature to draft from exists yet
        choice = self.tuner.choose(batch)
        if not self.memory.has_room(batch.num_running, self.scheduler.longest + choice.strategy.budget):
            return Choice(Strategy.OFF)  # a draft is not worth a preemption
        return choice

    def _batch_law(self) -> BatchLaw:
        if self._law is None:
            self._law = BatchLaw.of([s.request for s in self.running], self.device)
        return self._law

    def _propose(self, strategy: Strategy) -> Proposal:
        running = self.running
        if strategy.is_off:
            return Proposal(chain(upload([[s.tokens[-1]] for s in running], self.device)))
        law, tokens = self._batch_law(), [s.tokens for s in running]
        context = DraftContext(tokens, law.requests, law.params, self.device)
        noise = StepNoise(law, [*map(len, tokens)], self.config.vocab_size)
        proposal: Proposal = self.drafter.propose(context, strategy, noise)
        return proposal

    def _verify(self, tree: DraftTree) -> list[Verdict]:
        law, prefixes = self._batch_law(), [sequence.num_cached for sequence in self.running]
        needs_first = self.routes == "first" and any(one.needs_first_routes for one in self.running)
        length = max(prefixes) + tree.num_nodes
        self.memory.reserve(len(prefixes), length)
        recorded = recorded_length(self.graphs, self.target, self.cache, tree, length)
        nodes = layout(tree, prefixes, self.target.dtype, recorded)
        graphs = None if recorded is None else self.graphs
        with self.target.recording(needs_first or self.routes == "all"):
            captured_BNF, forward = forward_trees(
                self.target, self.cache, tree, nodes, self.drafter.capture, graphs
            )
            captured_BNF, routes_BNR = self._split(captured_BNF)
        verdicts = forward.verdicts(law)
        if routes_BNR is not None:
            for sequence, routes_NR, verdict in zip(self.running, routes_BNR, verdicts, strict=True):
                path = slice(len(verdict.path)) if tree.is_chain else list(verdict.path)
                sequence.note_routes(routes_NR[path], self.routes == "all")
        for sequence, verdict in zip(self.running, verdicts, strict=True):
            if not math.isfinite(sum(verdict.logprobs)):
                raise broken_policy(self.target.version, self.target.dtype, sequence)
        if not tree.is_chain:
            self.cache.commit(prefixes, [verdict.path for verdict in verdicts])
        self._remember(tree, captured_BNF, prefixes, verdicts)
        return verdicts

    def _split(self, captured: Tensor) -> tuple[Tensor, Tensor | None]:
        """(features, routes) of what `forward_capturing` returns."""
        if not self.target.records_routes:
            return captured, None
        num_features = captured.shape[-1] - self.target.num_routes
        return captured[..., :num_features], captured[..., num_features:].to(torch.uint8)

    def _remember(
        self, tree: DraftTree, captured_BNF: Tensor, prefixes: list[int], verdicts: list[Verdict]
    ) -> None:
        """Hands the features of committed positions to the drafter, of a chain's first piece rejected nodes'
        too: its history has room for them."""
        if not tree.is_chain:
            captured_BNF = along_paths(captured_BNF, verdicts)
        self.drafter.remember(range(len(verdicts)), prefixes, captured_BNF[:, :PIECE])
        for slot, verdict in enumerate(verdicts):
            if (end := len(verdict.path)) > PIECE:
                self.drafter.remember([slot], [prefixes[slot] + PIECE], captured_BNF[slot, PIECE:end][None])

    def _commit(self, strategy: Strategy, proposal: Proposal, verdicts: list[Verdict]) -> list[int]:
        kept = []
        for slot, (sequence, verdict) in enumerate(zip(self.running, verdicts, strict=True)):
            drafter = "" if strategy.is_off else proposal.drafter_of(slot, strategy)
            kept.append(sequence.commit(verdict, self.decode, drafter))
        return kept

    def _record(
        self,
        start: float,
        batch: BatchState,
        choice: Choice,
        proposal: Proposal,
        verdicts: list[Verdict],
        kept: list[int],
    ) -> None:
        drafts = () if choice.strategy.is_off else verdicts
        accepted = tuple(verdict.num_accepted for verdict in drafts)
        drafted = tuple(verdict.num_drafted for verdict in drafts)
        if drafts:
            self.drafter.observe(proposal, drafts)
            deepest = max(verdict.num_levels for verdict in drafts)
            self.stats.record_verifications(drafted, accepted, kept, deepest)
        for version, num_accepted in zip(proposal.references, accepted, strict=False):
            if version is not None:
                self.stats.record_reference(version, self.target.version, num_accepted)
        followed = tuple(version is not None for version in proposal.references)
        seconds = time.perf_counter() - start
        outcome = StepOutcome(sum(kept), accepted, drafted, seconds, followed)
        self._count_step(choice, batch, outcome, start)
        if self.tuner is not None:
            self.tuner.observe(choice.strategy, batch, outcome)

    def _release_finished(self, captures: bool) -> list[Finished]:
        finished = []
        has_ended = [sequence.finish_reason is not None for sequence in self.running]
        for slot in reversed([*compress(count(), has_ended)]):
            sequence = self.running[slot]
            rollout = sequence.to_rollout(self.target.version)
            captured_TF = self.drafter.recall(slot, sequence.num_cached) if captures else None
            if self.parks and sequence.finish_reason == "stop":
                self._park(slot)
            self.drafter.finish(slot, rollout)
            finished.append(Finished(rollout, captured_TF))
            self._vacate(slot)
        return finished

    def _vacate(self, slot: int) -> None:
        moved_from = self.scheduler.remove(slot)
        self._law = None
        if moved_from is not None:
            self.cache.move(moved_from, slot, self.running[slot].num_cached)
            self.drafter.move(moved_from, slot)
