"""The rollout engine: continuous batching with lossless speculation, one step at a time.

    add ─▶ admit ─▶ prefill (a prompt once for all its samples) ─▶ fork
             ▼
    preempt  where memory is spent: the cheapest goes back to the queue, and is read again later
             ▼
    step:  choose a strategy ─▶ propose a tree ─▶ one target forward ─▶ verify ─▶ commit ─▶ release what ended

A step without speculation is the same step with a tree that is only its root. The engine knows neither rewards nor
ranks nor training; time is measured here and nowhere below.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt.accounts import TimedStep
from tlt.engine.backend import Capabilities
from tlt.engine.memory import CacheMemory
from tlt.engine.noise import BatchLaw, StepNoise
from tlt.engine.prefill import prefill
from tlt.engine.reading import PIECE, along_paths, read
from tlt.engine.scheduler import Admission, Scheduler
from tlt.engine.sequence import Decode, Sequence, broken_policy, check_request
from tlt.engine.stats import EngineStats
from tlt.models.attention import prepare_kernels
from tlt.models.kv_cache import Cache
from tlt.models.packed import PackedTransformer
from tlt.spans import Span, SpanName
from tlt.speculative.protocol import DraftContext, Drafter, Proposal
from tlt.speculative.rows import compiled_loops
from tlt.speculative.tree import chain, layout
from tlt.speculative.verify import Verify, verify
from tlt.types import (
    BatchState,
    DraftTree,
    Finished,
    Reading,
    Request,
    Rollout,
    StepOutcome,
    Strategy,
    StrategyTuner,
    UserError,
    Verdict,
)
from tlt.uploads import upload


class RolloutEngine:
    """Generates responses for requests. All state lives in this object; nothing in it is random.

    on_span: receives what time was spent on.  verify: an argument, so that an audit can put a faulty one in its place.
    decode: gives the text in which stop texts are sought; None: a request with any is refused.
    cache_bytes: returns the memory that all caches may take from now on; it is asked when they start anew.
    """

    def __init__(
        self,
        model: PackedTransformer,
        *,
        max_batch_size: int = 64,
        tuner: StrategyTuner | None = None,
        on_span: Callable[[Span], None] | None = None,
        verify: Verify = verify,
        decode: Decode | None = None,
        cache_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model = self.target = model
        self.config, self.device = model.config, model.device
        self.tuner, self.stats = tuner, EngineStats()
        self.drafter: Drafter[Any] | None = None
        self.scheduler = Scheduler(max_batch_size, self.config.max_positions, decode)
        self.cache = Cache(self.config, self.config.num_layers, model.dtype, self.device, max_batch_size)
        self.memory = CacheMemory(self.cache, self.config.max_positions, cache_bytes)
        self.max_depth = Strategy.MAX_DEPTH if tuner is not None else 0
        self.on_span, self.verify, self.decode = on_span, verify, decode
        self._law: BatchLaw | None = None
        prepare_kernels(self.device, model.dtype)
        if self.device.type == "cpu":
            compiled_loops()
        self._predicted_speed: float | None = None
        self._speed_otherwise: float | None = None

    @property
    def capabilities(self) -> Capabilities:
        kinds, captures = (self.drafter.kinds if self.drafter is not None else ()), bool(self._capture)
        return Capabilities(kinds, trees=True, max_depth=self.max_depth, captures=captures, hands_over=True, sleeps=True)

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def load_policy(self, tensors: Mapping[str, Tensor], version: int = 0) -> None:
        """Publishes a policy into the engine, by Hugging Face names. Never in the middle of a response."""
        self.load_policy_parts([tensors], version)

    def load_policy_parts(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Publishes it part by part (backend.py)."""
        assert self.scheduler.is_idle, "a policy cannot change under running responses"
        self.model.load_parts(parts, version)

    def load_drafter(self, drafter: Drafter[Any]) -> None:
        """Attaches a drafter. Without a tuner nothing would ever use it."""
        assert self.scheduler.is_idle, "a drafter is attached between responses"
        if self.tuner is None:
            raise UserError("speculation is off, so a drafter has no use; set speculation to adaptive or DEPTHxWIDTHxBUDGET")
        self.drafter = self.memory.drafter = drafter

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> int:
        taken = len(self.scheduler.running) + len(self.scheduler.waiting)
        return max(min(self.scheduler.room, self.memory.max_slots(self.scheduler.longest) - taken), 0)

    @property
    def policy_version(self) -> int:
        return self.model.version

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests, also those that `withdraw` took out of another engine with the same policy."""
        requests = list(requests)
        for request in requests:
            check_request(request, self.config.max_positions, self.decode is not None)
            self.memory.check(request)
        self.scheduler.add(requests)

    @torch.inference_mode()
    def withdraw(self, slots: Iterable[int]) -> list[Request]:
        """Takes these running sequences out in the middle of their responses, between two steps."""
        requests = []
        for slot in sorted(slots, reverse=True):
            requests.append(self.scheduler.running[slot].to_request())
            if self.drafter is not None:
                self.drafter.withdraw(slot)
            self._vacate(slot)
        return requests

    def withdraw_waiting(self, num: int) -> list[Request]:
        """Takes the last `num` out that have not been admitted yet."""
        return [self.scheduler.waiting.pop() for _ in range(num)]

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Yields each response as it finishes, in no particular order."""
        self.add(requests)
        while not self.is_idle:
            yield from (finished.rollout for finished in self.step())

    def abort(self) -> None:
        """Forgets everything that runs or waits. Because of the law, asking again gives the same tokens."""
        if self.drafter is not None:
            for slot in range(len(self.scheduler.running)):
                self.drafter.withdraw(slot)
        self.scheduler.clear()
        self._law = None

    def release(self) -> None:
        """Gives the caches' memory back; only when idle."""
        assert self.is_idle
        self.memory.release()

    def close(self) -> None:
        """Does nothing: it has started no processes."""

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(self, captures: bool = False) -> list[Finished]:
        """Preempts what no longer fits, admits what does, advances every running sequence by at least one token; returns those
        that ended.

        captures: whether what the target captured at their tokens is wanted, for drafter training.
        """
        self._preempt()
        admissions = self.scheduler.admit(self.memory.fits_longer)
        reading = self._prefill(admissions) if admissions else None
        ended = self._release_finished(captures)  # those that were over when they came
        if not self.scheduler.running:
            return ended
        start = time.perf_counter()
        batch = self._batch_state(sum(len(admission.slots) for admission in admissions), reading)
        strategy = self._choose(batch)
        proposal, law = self._propose(strategy), self._batch_law()
        tree = proposal.tree
        prefixes = [sequence.num_cached for sequence in self.scheduler.running]
        nodes = layout(tree, prefixes, self.model.dtype)
        self.memory.reserve(batch.num_running, nodes.length)
        captured_BNF, target = read(self.model, self.cache, tree, nodes, self._capture)
        verdicts = target.verdicts(self.verify, partial(law.of_nodes, nodes), law.params)
        if not tree.is_chain:
            self.cache.commit(prefixes, [verdict.path for verdict in verdicts])
        num_tokens, drafted = 0, [length - 1 for length in tree.row_lengths]
        for slot, (sequence, verdict) in enumerate(zip(self.scheduler.running, verdicts, strict=True)):
            if not math.isfinite(sum(verdict.logprobs)):
                raise broken_policy(self.model.version, self.model.dtype, sequence)
            num_kept = sequence.commit(verdict, self.decode)
            num_tokens += num_kept
            if proposal.references and (version := proposal.references[slot]) is not None:
                self.stats.record_followed(version, self.model.version, verdict.num_accepted)
            if not strategy.is_off:
                self.stats.record_verification(strategy.depth, drafted[slot], verdict.num_accepted, num_kept)
        if self.drafter is not None:
            self._remember(self.drafter, tree, captured_BNF, prefixes, verdicts)
            if not strategy.is_off:
                self.drafter.observe(proposal, verdicts)
        end = time.perf_counter()
        accepted = () if strategy.is_off else tuple(verdict.num_accepted for verdict in verdicts)
        followed = tuple(version is not None for version in proposal.references)
        outcome = StepOutcome(num_tokens, accepted, tuple(drafted) if accepted else (), end - start, followed)
        self._account(strategy, batch, outcome, start)
        return ended + self._release_finished(captures)

    def _prefill(self, admissions: list[Admission]) -> Reading | None:
        """Reads what has been admitted, every distinct text once. Returns what that took; None where nothing was read, or the
        device is not waited for."""
        start = time.perf_counter()
        for admission in admissions:
            for slot in admission.slots:
                if self.drafter is not None:
                    self.drafter.admit(slot, self.scheduler.running[slot].request)
        self._law = None
        if sum(len(a.slots) for a in admissions) == len(self.scheduler.running):
            self.cache.release()  # nothing lives in it: many new sequences need not each have room for the last long one
        self.memory.reserve(len(self.scheduler.running), self.scheduler.longest + 1)
        num_tokens, num_forwards = prefill(self.model, self.cache, admissions, self._capture, self._on_read)
        end = time.perf_counter()
        if self.on_span is not None:
            self.on_span(Span(SpanName.PREFILL, start, end))
        return Reading(num_tokens, num_forwards, end - start) if num_tokens and self.device.type == "cpu" else None

    def _on_read(self, slots: tuple[int, ...], first: int, captured_TF: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.remember(slots, [first] * len(slots), captured_TF.expand(len(slots), -1, -1))

    def _preempt(self) -> None:
        """Sends the sequences that are cheapest to read again back to the queue, until the others have room for a token more.
        By the law they go on later as they would have now."""
        running = self.scheduler.running
        while len(running) > 1 and not self.memory.has_room(len(running), self.scheduler.longest):
            (request,) = self.withdraw([self.scheduler.cheapest()])
            self.scheduler.waiting.appendleft(request)
            self.stats.num_preemptions += 1
            self.stats.num_reread_tokens += len(request.prompt_ids) + len(request.token_ids) - 1

    def _batch_state(self, num_admitted: int, reading: Reading | None) -> BatchState:
        running, drafter = self.scheduler.running, self.drafter
        mean_length = sum(len(s.tokens) for s in running) / len(running)
        batch = BatchState(len(running), mean_length, self.model.version, 0, num_admitted, reading=reading)
        if drafter is None:
            return batch
        tokens, num_left = [s.tokens for s in running], self.scheduler.lengths.left(running, self.scheduler.waiting)
        leads, hindsight = drafter.leads(tokens), drafter.hindsight(tokens)
        return replace(batch, drafter_version=drafter.version, leads=leads, hindsight=hindsight, num_left=num_left)

    def _choose(self, batch: BatchState) -> Strategy:
        self._predicted_speed = self._speed_otherwise = None
        if self.tuner is None or self.drafter is None:
            return Strategy.OFF
        if any(len(sequence.tokens) < 2 for sequence in self.scheduler.running):
            return Strategy.OFF  # no feature exists yet to draft from
        strategy = self.tuner.choose(batch)
        if not self.memory.has_room(batch.num_running, self.scheduler.longest + strategy.budget):
            return Strategy.OFF  # a draft is not worth a preemption
        self._predicted_speed, self._speed_otherwise = self.tuner.predicted_speed, self.tuner.speed_otherwise
        return strategy

    @property
    def _capture(self) -> tuple[int, ...]:
        return self.drafter.capture if self.drafter is not None else ()

    def _batch_law(self) -> BatchLaw:
        if self._law is None:
            self._law = BatchLaw.of([s.request for s in self.scheduler.running], self.device)
        return self._law

    def _propose(self, strategy: Strategy) -> Proposal:
        running = self.scheduler.running
        if strategy.is_off:
            return Proposal(chain(upload([[s.tokens[-1]] for s in running], self.device)))
        assert self.drafter is not None
        law, vocab_size, tokens = self._batch_law(), self.config.vocab_size, [s.tokens for s in running]
        context = DraftContext(tokens, law.requests, law.params, vocab_size, self.device)
        proposal: Proposal = self.drafter.propose(context, strategy, StepNoise(law, [*map(len, tokens)], vocab_size))
        return proposal

    def _remember(
        self, drafter: Drafter[Any], tree: DraftTree, captured_BNF: Tensor, prefixes: list[int], verdicts: list[Verdict]
    ) -> None:
        """Hands the drafter what was captured at the visited nodes, at the positions their tokens now have: the root stays at
        its prefix, the path follows it. What lies beyond a piece of a chain is handed over for those that kept it alone."""
        if not tree.is_chain:
            captured_BNF = along_paths(captured_BNF, verdicts)
        drafter.remember(range(len(verdicts)), prefixes, captured_BNF if tree.num_nodes <= PIECE else captured_BNF[:, :PIECE])
        for slot, verdict in enumerate(verdicts):
            if len(verdict.path) > PIECE:
                drafter.remember([slot], [prefixes[slot] + PIECE], captured_BNF[slot : slot + 1, PIECE : len(verdict.path)])

    def _account(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome, start: float) -> None:
        self.stats.record_step(str(strategy), outcome, self._predicted_speed, self._speed_otherwise)
        timed = TimedStep(str(strategy), batch.num_running, start, start + outcome.seconds)
        self.stats.latest = None if batch.num_admitted else timed
        if self.tuner is not None:
            self.tuner.observe(strategy, batch, outcome)
        if self.on_span is not None:
            name = SpanName.DECODE if strategy.is_off else SpanName.SPECULATE
            self.on_span(Span(name, start, start + outcome.seconds))

    def _release_finished(self, captures: bool) -> list[Finished]:
        finished = []
        for slot in reversed(range(len(self.scheduler.running))):
            sequence = self.scheduler.running[slot]
            if sequence.finish_reason is None:
                continue
            self.scheduler.lengths.note_ended(sequence)
            rollout, captured_TF = sequence.to_rollout(self.model.version), None
            if self.drafter is not None:
                captured_TF = self.drafter.recall(slot, sequence.num_cached) if captures else None
                self.drafter.finish(slot, rollout)
            finished.append(Finished(rollout, captured_TF))
            self._vacate(slot)
        return finished

    def _vacate(self, slot: int) -> None:
        """The sequence in this slot is gone; the last one takes its place."""
        moved_from = self.scheduler.remove(slot)
        self._law = None
        if moved_from is not None:
            self.cache.move(moved_from, slot, self.scheduler.running[slot].num_cached)
            if self.drafter is not None:
                self.drafter.move(moved_from, slot)
