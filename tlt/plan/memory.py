"""What a run's tensors take on one device, part by part: arithmetic over shapes, before anything is loaded.

    always    weights · optimizer · engine's copy · drafter                          the largest sum of a column
    rollout   + caches · activations of a forward · logits          ────▶    is what the device must hold
    idle      + caches · the drafter's training
    update    + gradients · activations · logits · gathered layers
    save      + a layer on its way to the engine · a checkpoint's copy

Every formula names the code that it describes; benchmarks/scale/memory.py holds them to what processes take. Knows no machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tlt.build.drafter import preset_changes
from tlt.config.schema import Config
from tlt.drafter.drafting.hybrid import drafter_kinds
from tlt.drafter.drafting.pair_cache import PairCache
from tlt.drafter.model import DrafterShape, PackedDrafter, training_capture
from tlt.drafter.training.losses import DEFAULT_PRESET, PRESETS
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary
from tlt.engine.memory import CPU_SHARE, GPU_SHARE
from tlt.models.decoder import ModelConfig
from tlt.models.kv_cache import GROUP_BYTES, PREFILL_TOKENS, Cache
from tlt.models.packed import PackedTransformer
from tlt.plan.subject import META, Place, Subject
from tlt.rl.logprobs import LOGITS_PER_CHUNK
from tlt.rl.plan import MIN_PROMPT
from tlt.speculative.sampling import VALUES_PER_PART
from tlt.tuning.tuner import default_arms
from tlt.types import Strategy
from tlt.vllm.settings import CPU_KV_GIB

Phase = Literal["rollout", "idle", "update", "save"]
PHASES: tuple[Phase, ...] = ("rollout", "idle", "update", "save")


@dataclass(frozen=True)
class Part:
    """One kind of tensors on a device. phases: when they lie there; none: always.  how: the arithmetic, for people."""

    name: str
    num_bytes: int
    phases: tuple[Phase, ...]
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """least: what the caches need at least: one response of full length where their budget is automatic and takes what is left,
    else what rollout.kv_gib gives them."""

    parts: tuple[Part, ...]
    least: int

    def total(self, phase: Phase) -> int:
        return sum(part.num_bytes for part in self.parts if not part.phases or phase in part.phases)

    @property
    def peak(self) -> tuple[Phase, int]:
        """The phase that takes most, and its bytes."""
        phase = max(PHASES, key=self.total)
        return phase, self.total(phase)

    @property
    def needed(self) -> int:
        """The peak with the least caches: with less, the run cannot go on."""
        caches = next(part for part in self.parts if part.name == CACHES)
        smallest = replace(caches, num_bytes=min(caches.num_bytes, self.least))
        return MemoryPlan(tuple(smallest if part is caches else part for part in self.parts), self.least).peak[1]


CACHES, COPY = "caches", "copy of the policy"

PROCESS_BYTES = {"cpu": 400 * 2**20, "cuda": 1200 * 2**20}
"""Memory of a process that has loaded PyTorch and transformers, or of its context on a GPU with the workspaces of its libraries
(NCCL, cuBLAS); the former was measured, the latter is a rule of thumb."""

VLLM_PROCESS_BYTES = 600 * 2**20
"""What an imported and started vLLM adds to a process, its weights and caches aside; estimated from one on a CPU."""


def plan_memory(config: Config, model: ModelConfig, drafter: DrafterShape | None, place: Place) -> MemoryPlan:
    """Returns what one rank's device holds. drafter: the shape of the learned one; None: there is none."""
    subject = Subject(config, model, drafter, place)
    standing = list(_standing(subject))
    caches, least = _caches(subject, sum(part.num_bytes for part in standing))
    parts = [*standing, caches, *_rollout(subject, caches.num_bytes), *_idle(subject), *_update(subject), *_save(subject)]
    return MemoryPlan(tuple(part for part in parts if part.num_bytes or part is caches), least)


# ── always ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _standing(s: Subject) -> Iterator[Part]:
    size, cut = s.engine_dtype.itemsize, f" / {s.num_slices} ranks" if s.num_slices > 1 else ""
    trained = s.num_trained * s.master // s.num_slices
    how = f"{billions(s.num_trained)} × {s.master} bytes{cut}"
    yield Part("process", PROCESS_BYTES["cuda" if s.place.is_gpu else "cpu"], (), "Python and libraries")
    if s.config.lora.rank:
        frozen = s.num_parameters * s.frozen // s.num_slices
        yield Part("frozen weights", frozen, (), f"{billions(s.num_parameters)} × {s.frozen} bytes{cut}")
    yield Part("adapters" if s.config.lora.rank else "weights", trained, (), how)
    yield Part("optimizer", 2 * trained, (), f"AdamW's two moments, {how}")
    if s.config.algorithm.kl_coefficient > 0 and not s.config.lora.rank:
        yield Part("reference policy", trained, (), how)
    copies = s.model.num_layers * s.copied_numbers(s.layer_matrices)
    if s.has_cpu_layout:
        copies += s.model.vocab_size * s.model.hidden_size  # the head in oneDNN's layout, beside its rows
    own = Part("engine", (s.num_parameters + copies) * size, (), f"{billions(s.num_parameters + copies)} × {size} bytes, whole")
    if uses_vllm(s):
        yield from _vllm(s)
    if not uses_vllm(s) or _drafts_by_learned(s):
        yield replace(own, name=COPY, how=f"{own.how}: the drafter's training reads it") if uses_vllm(s) else own
    yield Part("rotary positions", s.rope * (size + s.computed), (), f"tables of {s.model.max_positions} positions, twice")
    if s.drafter is None:
        return
    num_rows = s.drafter.draft_vocab_size
    if s.drafter.can_choose:
        vocabulary = DraftVocabulary(DraftCosts.of(s.model, s.drafter), s.config.drafter.vocabulary)
        num_rows = 0 if uses_vllm(s) else max(vocabulary.sizes, default=0)
    rows = num_rows * s.model.hidden_size
    if uses_vllm(s):
        yield Part("vLLM's drafter", s.drafter_parameters * size, (), f"{billions(s.drafter_parameters)} parameters")
    packed = (s.drafter_parameters + rows + s.copied_numbers(s.layer_matrices)) * size + s.rope * size
    yield Part("drafter", packed, (), f"{billions(s.drafter_parameters)} parameters, the engine's copy")
    if s.trains_drafter:
        yield Part("drafter's optimizer", 12 * s.drafter_parameters, (), "weights and two moments, 12 bytes a parameter")
        trajectories = -(-s.num_responses // s.place.num_ranks) + s.config.drafter.carry_longest
        features = trajectories * s.longest * (captured_size(s) * size + 8)
        yield Part("drafter's buffer", min(s.config.drafter.buffer_mib * 2**20, features), (), "drafter.buffer_mib, at most")


def uses_vllm(s: Subject) -> bool:
    return s.config.rollout.engine == "vllm"


def _drafts_by_learned(s: Subject) -> bool:
    return s.drafter is not None and s.config.rollout.speculation != "off"


def _vllm(s: Subject) -> Iterator[Part]:
    """What vLLM holds, but for its caches."""
    size, num = s.engine_dtype.itemsize, s.config.vllm.tensor_parallel if s.place.is_gpu else 1
    cut = f" / {num} GPUs" if num > 1 else ""
    yield Part("engine", s.num_parameters * size // num, (), f"{billions(s.num_parameters)} × {size} bytes{cut}, vLLM's")
    how = "its libraries; what its graphs and workspaces take besides is not known here"
    yield Part("vLLM", VLLM_PROCESS_BYTES, (), how)


# ── rollout ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def slot_bytes(s: Subject, length: int) -> int:
    """Returns the bytes of a running sequence with room for `length` tokens, as the engine's budget counts them."""
    cache = Cache(s.model, s.model.num_layers, s.engine_dtype, META, s.num_slots)
    if s.drafter is None or s.config.rollout.speculation == "off" or uses_vllm(s):
        return cache.slot_bytes(length)
    shape = replace(s.model, max_positions=1)  # whose tables nobody reads
    target = PackedTransformer(replace(shape, num_layers=1), s.engine_dtype, META)
    packed = PackedDrafter(replace(s.drafter, layer=replace(s.drafter.layer, max_positions=1)), s.engine_dtype, META)
    pairs = PairCache(packed, target, captured_size(s), s.config.drafter.feature_window, s.num_slots)
    return cache.slot_bytes(length) + pairs.slot_bytes(length)


def captured_size(s: Subject) -> int:
    """Numbers that are captured of the target at a position (drafter/model.py)."""
    if s.drafter is None or s.config.rollout.speculation == "off":
        return 0
    keeps_targets = s.trains_drafter and s.config.drafter.features == "captured"
    capture = training_capture(s.drafter, s.model.num_layers) if keeps_targets else s.drafter.capture
    return len(capture) * s.model.hidden_size


def _caches(s: Subject, standing: int) -> tuple[Part, int]:
    """Returns the caches, and what they need at least. standing: bytes of what lies there always."""
    least, each = slot_bytes(s, s.longest), slot_bytes(s, s.longest)
    wanted, limit, why = s.num_slots * each, None, "as much as all want"
    if (given := s.config.rollout.kv_gib) is not None:
        limit, why = int(given * 2**30), f"rollout.kv_gib = {given:g}"
    elif uses_vllm(s) and not s.place.is_gpu:
        limit, why = int(CPU_KV_GIB * 2**30), "vLLM's share"
    elif s.place.device_bytes is not None and s.place.is_gpu:
        limit, why = int(GPU_SHARE * max(s.place.device_bytes - standing, 0)), "four fifths of what is free"
    elif s.place.device_bytes is not None:
        limit, why = int(CPU_SHARE * s.place.device_bytes / s.place.num_local), "half of the machine's memory, by its ranks"
    how = f"{s.num_slots} sequences × {s.longest} tokens × {kib(each / max(s.longest, 1))}"
    if limit is not None and limit < wanted:
        held = max(limit // each, 1)
        how = f"{why}: {held} of {s.num_slots} sequences of {s.longest} tokens × {kib(each / s.longest)} at once"
    phases: tuple[Phase, ...] = ("rollout", "idle")
    if uses_vllm(s) and limit is not None:  # it takes all of it when it starts, and on a CPU never gives it back
        taken, phases = max(limit, least), phases if s.place.is_gpu else ()
    else:
        taken = wanted if limit is None else max(min(wanted, limit), least)
    return Part(CACHES, taken, phases, how), least if given is None else taken


def _rollout(s: Subject, caches: int) -> Iterator[Part]:
    """What is kept beside the caches, and the most that is taken for a moment: one of these at a time."""
    c, size = s.model, s.engine_dtype.itemsize
    tokens = min(PREFILL_TOKENS, max(s.longest, s.num_slots * s.place.longest_prompt))
    width = 4 * c.intermediate_size + 3 * c.hidden_size + (c.num_qkv + c.num_heads) * c.head_dim + captured_size(s)
    rows = s.num_slots + max((min(s.num_slots, 8) * arm.budget for arm in _arms(s)), default=0)
    values, bytes_each = rows * c.vocab_size, 60 if _truncates(s.config) else 12
    sampling = values * (size + 4) + min(values, VALUES_PER_PART) * bytes_each
    growing = min(GROUP_BYTES, caches // 2)
    how = f"{tokens} tokens read, or {rows} rows of logits sampled, or a group of layers grown"
    yield Part("a step", max(tokens * width * size, sampling, growing), ("rollout",), how)


def _arms(s: Subject) -> tuple[Strategy, ...]:
    """The strategies that may be chosen."""
    speculation = s.config.rollout.speculation
    if speculation == "adaptive":
        return default_arms(drafter_kinds(s.drafter is not None))
    return (Strategy.parse(speculation),)


def _truncates(config: Config) -> bool:
    return config.sampling.top_k > 0 or config.sampling.top_p < 1 or config.sampling.min_p > 0


# ── idle ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _idle(s: Subject) -> Iterator[Part]:
    """The drafter's training (drafter/training/trainer.py): float32, all unrolled steps in one backward pass."""
    if s.drafter is None or not s.trains_drafter or s.place.num_ranks == 1:  # a rank alone is never idle
        return
    settings, c = s.config.drafter, s.drafter.layer
    preset = PRESETS[settings.preset or DEFAULT_PRESET[s.drafter.method]]
    steps = preset_changes(settings)["unrolled_steps"] or preset.unrolled_steps
    tokens, vocabulary = min(settings.tokens_per_micro_step, s.num_responses * s.longest), s.drafter.draft_vocab_size
    layer = activations_per_token(c) + 2 * c.hidden_size
    logits = (1 + 3 * steps) * vocabulary  # the target's; per step log-softmax, the target's shifted, a gradient
    rows = vocabulary * c.hidden_size if s.engine_dtype != torch.float32 else 0  # the head, in float32
    training = 4 * (tokens * (steps * layer + logits) + s.drafter_parameters + rows)
    how = f"{tokens} tokens × {steps} unrolled steps, {vocabulary} logits each"
    yield Part("drafter's training", training, ("idle",), how)
    recomputed = Cache(s.model, s.model.num_layers, s.engine_dtype, META, 1).slot_bytes(s.longest)
    yield Part("features recomputed", recomputed, ("idle",), f"keys and values of one response of {s.longest} tokens")


# ── update ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def activations_per_token(c: ModelConfig) -> int:
    """Returns the numbers that autograd keeps of a layer at a token: inputs of norms and matrices, queries, keys and values
    before and behind the rotation, the attention's output, and four of the MLP's width."""
    return 6 * c.hidden_size + (c.num_qkv + 2 * c.num_heads) * c.head_dim + 4 * c.intermediate_size


def _update(s: Subject) -> Iterator[Part]:
    c, parallel, size = s.model, s.config.parallel, s.computed
    slices = 1 if s.place.is_sharded and not parallel.reduce_each_micro_batch else s.num_slices
    how = f"{billions(s.num_trained)} × {s.master} bytes" + (f" / {slices} ranks" if slices > 1 else "")
    yield Part("gradients", s.num_trained * s.master // slices, ("update",), how)
    per_rank = -(-s.num_responses // s.place.num_ranks)
    own = s.longest - s.place.longest_prompt
    prompts = per_rank  # that are computed: one for each response, or for each problem (rl/plan.py)
    if s.place.longest_prompt >= MIN_PROMPT * own:
        prompts = -(-per_rank // s.config.rollout.samples_per_problem)
    num_computed = per_rank * own + prompts * s.place.longest_prompt
    tokens = min(max(s.config.algorithm.tokens_per_micro_batch, s.longest), num_computed)
    lora = s.config.lora
    layer = activations_per_token(c) + lora.rank * len(lora.targets)
    kept = c.num_layers * c.hidden_size + layer if parallel.checkpoint_activations else c.num_layers * layer
    backward = 3 * c.intermediate_size + 2 * c.hidden_size
    activations = tokens * (kept + backward + 4 * c.hidden_size) * size
    how = f"{tokens} tokens × {kib(size * kept)}"
    how += ": inputs of layers, and one layer" if parallel.checkpoint_activations else f": {c.num_layers} whole layers"
    logits = min(tokens, max(LOGITS_PER_CHUNK // c.vocab_size, 1)) * c.vocab_size * (8 + size)
    head = logits + (0 if lora.rank else s.largest_matrix * size)
    stepped = s.num_trained if s.place.is_gpu else 0  # AdamW's own copies, once the others are gone; fused on a CPU: none
    yield Part("activations", max(activations, stepped * s.master // s.num_slices - head), ("update",), how)
    how = "one chunk of rows with their gradients" + ("" if lora.rank else ", and the head's gradient")
    yield Part("logits", head, ("update",), how)
    if s.place.is_sharded:
        heads = (1 if c.tie_embeddings else 2) * c.vocab_size * c.hidden_size
        gathered = (2 * sum(s.layer_matrices) + heads) * (size if lora.rank else 2 * size)
        how = "two layers, embedding and head, whole" + ("" if lora.rank else ", with their gradients")
        yield Part("gathered layers", gathered, ("update",), how)


# ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _save(s: Subject) -> Iterator[Part]:
    """PackedTransformer.load joins and scales a layer's matrices in float64. A checkpoint is copied to the CPU before it is
    written, beside the steps that follow."""
    head = s.model.vocab_size * s.model.hidden_size * s.engine_dtype.itemsize if s.place.is_sharded else 0
    merged = sum(s.layer_matrices) * s.master if s.config.lora.rank else 0
    layer = merged + max(max(s.layer_matrices) * (16 + s.master), head)
    how = "joined and scaled in float64" + (", merged with its adapters" if merged else "")
    yield Part("a layer for the engine", layer, ("save",), how)
    if not s.place.is_gpu:
        phases: tuple[Phase, ...] = () if s.config.run.checkpoint_every else ("save",)
        copied = 3 * s.num_trained * s.master // s.num_slices + 12 * s.drafter_parameters * s.trains_drafter
        yield Part("checkpoint's copy", copied, phases, "weights and two moments, until they are written")


def billions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 5e7 else f"{number / 1e6:.2f} M"


def kib(num_bytes: float) -> str:
    return f"{num_bytes / 1024:.1f} KiB"
