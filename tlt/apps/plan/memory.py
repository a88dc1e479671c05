"""Plans a run's memory on one device as a table of terms over shapes.

always    weights · optimizer · engine's copy · drafter     the device must hold
rollout   + caches · a step's tensors                  ───▶  the largest sum of a row
idle      + caches · the drafter's training
update    + gradients · activations · logits · gathered layers
save      + a layer on its way to the engine · a checkpoint's copy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tlt.apps.plan.activations import count_kept
from tlt.apps.plan.sizes import GIB, META, PlannedRun
from tlt.base.config.lora import LoraSection
from tlt.base.speculation import Adaptive, Fixed, Off
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.drafter.drafting.learned.drafter import LearnedSettings, make_cache
from tlt.drafter.forms import new_packed
from tlt.drafter.shape import training_capture
from tlt.drafter.training.buffer import BUFFER_BYTES
from tlt.drafter.training.losses import DEFAULT_PRESET, PRESETS
from tlt.drafter.training.spot import CARRY_LONGEST, MICRO_STEP_TOKENS
from tlt.drafter.vocabulary import LARGEST_SHARE
from tlt.engine.memory import CPU_SHARE, GPU_SHARE
from tlt.engine.vllm.settings import CPU_KV_GIB
from tlt.models.any_config import AnyConfig
from tlt.models.kv_cache import GROUP_BYTES, PREFILL_TOKENS, Cache
from tlt.models.loops import available
from tlt.models.new import new_target
from tlt.speculation.law.sampling import VALUES_PER_PART
from tlt.speculation.tuner.tuner import default_arms
from tlt.training.build.ranks import CPU_PROCESS_BYTES
from tlt.training.update.logprobs import LOGITS_PER_CHUNK
from tlt.training.update.micro_batches import MIN_PROMPT

Phase = Literal["rollout", "idle", "update", "save"]
ALWAYS: tuple[Phase, ...] = ("rollout", "idle", "update", "save")

CACHES, COPY = "caches", "copy of the policy"

PROCESS_BYTES = {"cpu": CPU_PROCESS_BYTES, "cuda": 1200 * 2**20}
"""PyTorch, transformers, compiled loops; "cuda": its context, a rule of thumb."""

RESERVED = 1 / 12
"""Of what a GPU allocates, PyTorch reserves more by 1.07, 1.07 and 1.13 (benchmarks/results/gpu/gpu.md)."""

VLLM_PROCESS_BYTES = 600 * 2**20
"""vLLM without weights and caches, estimated from a CPU process."""


@dataclass(frozen=True)
class Term:
    """how: the formula, in words."""

    name: str
    phases: tuple[Phase, ...]
    num_bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """least: bytes of caches for one response of full length, or rollout.kv_gib."""

    terms: tuple[Term, ...]
    least: int

    def total(self, phase: Phase) -> int:
        return sum(term.num_bytes for term in self.terms if phase in term.phases)

    @property
    def peak(self) -> tuple[Phase, int]:
        phase = max(ALWAYS, key=self.total)
        return phase, self.total(phase)

    @property
    def needed(self) -> int:
        least = {CACHES: self.least}
        terms = (replace(t, num_bytes=min(t.num_bytes, least.get(t.name, t.num_bytes))) for t in self.terms)
        return replace(self, terms=tuple(terms)).peak[1]


def plan_memory(run: PlannedRun) -> MemoryPlan:
    terms = [*_standing(run), *_rollout(run), *_idle(run), *_update(run)]
    standing = sum(term.num_bytes for term in terms if term.phases == ALWAYS)
    plan = _with_caches(terms, *_caches(run, standing))
    if not run.is_gpu:
        return plan
    reserved = int((plan.needed - PROCESS_BYTES["cuda"]) * RESERVED)
    how = "PyTorch reserves more than it allocates: a twelfth of the largest phase"
    terms.append(Term("reserved", ALWAYS, reserved, how))
    return _with_caches(terms, *_caches(run, standing + reserved))


def _with_caches(terms: Sequence[Term], caches: Term, least: int) -> MemoryPlan:
    return MemoryPlan(tuple(term for term in (*terms, caches) if term.num_bytes), least)


def _standing(r: PlannedRun) -> Iterator[Term]:
    config, size, cut = r.config, r.engine_dtype.itemsize, r.num_slices
    trained, weights, has_lora = r.trained_bytes // cut, r.num_parameters * size, config.lora.is_used
    on_cpu = not r.is_gpu
    is_packed = r.updates_by_rows or not isinstance(r.model, AnyConfig)
    # the head as panels, beside its rows
    has_panels = on_cpu and is_packed and available.has_panels(r.engine_dtype, torch.device("cpu"))
    copy = weights + has_panels * r.model.vocab_size * r.model.hidden_size * size
    yield Term("process", ALWAYS, PROCESS_BYTES["cpu" if on_cpu else "cuda"], "Python and libraries")
    yield Term("frozen weights", ALWAYS, has_lora * r.num_parameters * r.frozen // cut, "base model / slices")
    yield Term("adapters" if has_lora else "weights", ALWAYS, trained, "trained parameters / slices")
    yield Term("optimizer", ALWAYS, 2 * trained, "AdamW's two moments / slices")
    reference, like = 0 if has_lora else trained, "as the weights"
    if r.updates_by_rows:
        reference, like = copy, "as the engine"
    reference = reference if config.algorithm.kl_coefficient > 0 else 0
    yield Term("reference policy", ALWAYS, reference, like)
    if r.uses_vllm:
        on_gpus = config.vllm.tensor_parallel if r.is_gpu else 1
        yield Term("engine", ALWAYS, weights // on_gpus, "parameters / vllm.tensor_parallel")
        yield Term("vLLM", ALWAYS, VLLM_PROCESS_BYTES, "its libraries; graphs and workspaces are not counted")
        if r.drafts_by_learned:
            yield Term(COPY, ALWAYS, copy, "parameters, which the drafter's training reads")
    else:
        yield Term("engine", ALWAYS, copy, "parameters, whole on each rank")
    if r.drafter is not None:
        num_rows = r.model.vocab_size // LARGEST_SHARE if r.drafter.can_choose else r.drafter.draft_vocab_size
        packed = (r.drafter_parameters * (2 if r.uses_vllm else 1) + num_rows * r.model.hidden_size) * size
        yield Term("drafter", ALWAYS, packed, "the engine's copy, and its head's rows")
        if config.drafter.train:
            yield Term("drafter's optimizer", ALWAYS, 12 * r.drafter_parameters, "weights and two moments")
            trajectories = -(-r.num_responses // r.num_ranks) + CARRY_LONGEST
            features = trajectories * r.longest * (captured_size(r) * size + 8)
            buffer = min(BUFFER_BYTES, features)
            yield Term("drafter's buffer", ALWAYS, buffer, "responses and features to train on, at most")
    copied = 3 * r.trained_bytes // cut + 12 * r.drafter_parameters * config.drafter.train if on_cpu else 0
    when = ALWAYS if config.run.checkpoint_every else ("save",)
    yield Term("checkpoint's copy", when, copied, "weights and two moments, until they are written")


def _rollout(r: PlannedRun) -> Iterator[Term]:
    c, size, sampling = r.model, r.engine_dtype.itemsize, r.config.sampling
    match r.config.rollout.speculation:
        case Off():
            budget = 0
        case Adaptive():
            budget = max(arm.budget for arm in default_arms(drafter_kinds(r.drafter is not None)))
        case Fixed(strategy):
            budget = strategy.budget
    tokens = min(PREFILL_TOKENS, max(r.longest, r.num_slots * r.longest_prompt))
    attention = (c.num_qkv + c.num_heads) * c.head_dim
    routed = 4 * c.experts_per_token * c.hidden_size  # a row for each expert of a token, and its result
    width = 4 * c.intermediate_size + 3 * c.hidden_size + routed + attention + captured_size(r)
    logits = (r.num_slots + min(r.num_slots, 8) * budget) * c.vocab_size
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    sampled = logits * (size + 4) + min(logits, VALUES_PER_PART) * (60 if truncates else 12)
    grown = min(GROUP_BYTES, r.num_slots * slot_bytes(r, r.longest) // 2)
    how = "the most of: a prompt read, rows of logits sampled, a group of layers' caches grown"
    yield Term("a step", ("rollout",), max(tokens * width * size, sampled, grown), how)


def captured_size(r: PlannedRun) -> int:
    if r.drafter is None or not r.drafts_by_learned:
        return 0
    trains = r.config.drafter.train
    capture = training_capture(r.drafter, r.model.num_layers) if trains else r.drafter.capture
    return len(capture) * r.model.hidden_size


def slot_bytes(r: PlannedRun, length: int) -> int:
    # a hybrid's states are left out: a few tokens' bytes
    num_layers = len(count_kept(r.model, LoraSection()).forms) if r.model.is_hybrid else r.model.num_layers
    num_bytes = Cache(r.model, num_layers, r.engine_dtype, META, r.num_slots).slot_bytes(length)
    if r.drafter is None or not r.drafts_by_learned or r.uses_vllm:
        return num_bytes
    target = new_target(replace(r.model, num_layers=1, max_positions=1), r.engine_dtype, META)
    shape = replace(r.drafter, layer=replace(r.drafter.layer, max_positions=1))
    packed = new_packed(shape, r.engine_dtype, META)
    cache = make_cache(packed, target, captured_size(r), LearnedSettings.window, r.num_slots)
    return num_bytes + cache.slot_bytes(length)


def _caches(r: PlannedRun, standing: int) -> tuple[Term, int]:
    """standing: bytes of all permanent terms."""
    least, rank_bytes, is_gpu = slot_bytes(r, r.longest), r.rank_bytes, r.is_gpu
    wanted, limit, why = (r.num_slots + r.num_parked) * least, None, "as much as all sequences want"
    if (given := r.config.rollout.kv_gib) is not None:
        limit, why = int(given * GIB), "rollout.kv_gib"
    elif r.uses_vllm and not is_gpu:
        limit, why = int(CPU_KV_GIB * GIB), "vLLM's share"
    elif rank_bytes is not None and is_gpu:
        limit, why = int(GPU_SHARE * max(rank_bytes - standing, 0)), "four fifths of what is free"
    elif rank_bytes is not None:
        limit, why = int(CPU_SHARE * rank_bytes), "half of a rank's memory"
    phases: tuple[Phase, ...] = ("rollout", "idle")
    if r.uses_vllm and limit is not None:  # taken at the start; on a CPU never given back
        taken, phases = max(limit, least), phases if is_gpu else ALWAYS
    else:
        taken = wanted if limit is None else max(min(wanted, limit), least)
    running = min(taken // least, r.num_slots)
    how = f"{why}: {running} of {r.num_slots} sequences × {r.longest} tokens"
    if r.num_parked:
        parked = min(taken // least - running, r.num_parked)
        how += f", {parked} of {r.num_parked} that wait for their environment"
    return Term(CACHES, phases, taken, how), least if given is None else taken


def _idle(r: PlannedRun) -> Iterator[Term]:
    """A single rank is never idle."""
    if r.drafter is None or not r.config.drafter.train or r.num_ranks == 1:
        return
    c, vocabulary = r.drafter.layer, r.drafter.draft_vocab_size
    preset = PRESETS[DEFAULT_PRESET[r.drafter.method]]
    rows_each = preset.rows_per_token(r.drafter)
    logits = int((1 + 3 * rows_each) * vocabulary)  # per row log-softmax, the target's, a gradient
    each = int(rows_each * (count_kept(c, LoraSection()).values + 2 * c.num_layers * c.hidden_size)) + logits
    rows = vocabulary * c.hidden_size if r.engine_dtype != torch.float32 else 0  # the head, in float32
    tokens = min(MICRO_STEP_TOKENS, r.num_responses * r.longest)
    features = Cache(r.model, r.model.num_layers, r.engine_dtype, META, 1).slot_bytes(r.longest)  # recomputed
    how = "tokens of a micro-step × (activations and logits of their rows), and a response's features"
    training = 4 * (tokens * each + r.drafter_parameters + rows)
    yield Term("drafter's training", ("idle",), training + features, how)


def _update(r: PlannedRun) -> Iterator[Term]:
    c, parallel, lora, size = r.model, r.config.parallel, r.config.lora, r.computed
    slices = 1 if r.is_sharded and not parallel.reduce_each_micro_batch else r.num_slices
    yield Term("gradients", ("update",), r.trained_bytes // slices, "trained parameters / slices")
    per_rank = -(-r.num_responses // r.num_ranks)
    own, prompts = r.longest - r.longest_prompt, per_rank
    if (
        r.longest_prompt >= MIN_PROMPT * own
    ):  # computed once for a problem's responses (training/update/micro_batches.py)
        prompts = -(-per_rank // r.config.rollout.samples_per_problem)
    computed = per_rank * own + prompts * r.longest_prompt
    budget = r.longest if c.is_hybrid else max(r.config.algorithm.tokens_per_micro_batch, r.longest)
    tokens = min(budget, computed)
    kept, is_checkpointed = count_kept(c, lora), parallel.checkpoint_activations
    scores = kept.scores(r.longest, c.num_heads, size, has_kernel=r.is_gpu and size == 2)
    if is_checkpointed:
        layers = c.num_layers * c.hidden_size * size + kept.per_token(size) / c.num_layers + max(scores)
    else:
        layers = kept.per_token(size) + sum(scores)
    passing = 3 * c.intermediate_size + (6 + 4 * c.experts_per_token) * c.hidden_size
    activations = int(tokens * (layers + passing * size))
    stepped = r.trained_bytes // r.num_slices if r.is_gpu else 0  # AdamW's copies, once the others are gone
    how = f"{tokens} tokens × {'layers, checkpointed' if is_checkpointed else 'all layers'}"
    yield Term("activations", ("update",), max(activations, stepped), how)
    if r.updates_by_rows:
        taken = tokens * (c.num_layers + 1) * c.hidden_size * r.engine_dtype.itemsize
        yield Term("engine's numbers", ("update",), taken, f"{tokens} tokens × inputs of layers, features")
    if lora.is_used and c.num_experts:  # with a gradient of one layer's
        sums = kept.fixed * size * (2 if is_checkpointed else c.num_layers + 1) // c.num_layers
        how = "frozen and adapter, summed, of each layer that is kept"
        yield Term("adapted weights", ("update",), sums, how)
    largest = max(c.hidden_size * max(c.vocab_size, 2 * c.intermediate_size), r.largest_tensor)
    head = 0 if lora.is_used else largest * size
    rows = min(tokens, max(LOGITS_PER_CHUNK // c.vocab_size, 1))
    logits = rows * c.vocab_size * (8 + size + 8 * r.updates_by_rows) + head
    yield Term(
        "logits", ("update",), logits, f"{rows} rows with gradients, and the largest matrix's gradient"
    )
    ends = (1 if c.tie_embeddings else 2) * c.vocab_size * c.hidden_size
    each = (r.num_parameters - ends) // c.num_layers
    whole = (2 * each + ends) * size
    gathered = r.is_sharded * whole * (1 if lora.is_used else 2)  # with their gradients
    yield Term("gathered layers", ("update",), gathered, "two layers, embedding and head, whole")
    merged = each * r.frozen if lora.is_used else 0
    joined = 2 * c.intermediate_size * c.hidden_size * (16 + r.frozen)
    packed = max(0 if isinstance(c, AnyConfig) else joined, r.is_sharded * max(ends, each) * size)
    yield Term(
        "a layer for the engine", ("save",), merged + packed, "gathered, or joined and scaled in float64"
    )
