"""Builds an engine from a model, a drafter and settings.

Model ────────────────────────────────┐
drafter/ ── load_stored_drafter ──────┼── build_backend ──▶ our engine or vLLM, with policy, tuner, drafter
EngineSettings ───────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tlt.base.config.drafter import DrafterSection
from tlt.base.config.vllm import VllmSection
from tlt.base.spans import Span
from tlt.base.speculation import Off, Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.drafter.drafting.hybrid import drafter_kinds, make_drafter
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings, OnVerdicts
from tlt.drafter.drafting.reference_drafter import ReferenceDrafter, reference_kinds
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.formats.folder import StoredDrafter, load_drafter
from tlt.drafter.forms import pack_drafter
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary, check_wanted
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.model import Model, ModelFolder
from tlt.engine.memory import automatic_bytes
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.sequence import Decode
from tlt.engine.vllm.inside.law import DEFAULT_TAU
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.verify import Verify
from tlt.speculation.law.verify import verify as verify_by_the_law
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import make_tuner


@dataclass(frozen=True)
class EngineSettings:
    """tuner: of adaptive speculation, "cost-model" or "beg-mab".
    borrows: share the policy's tensors where the layout allows.
    kv_gib: of all caches; None: `automatic_bytes`, for `num_ranks` that share the machine.
    window: tokens of the longest sequence; None: the model's.
    own_process: of vLLM's worker, as several vLLMs in one process need; features are then computed again for
        the drafter's training instead of captured.
    """

    speculation: Speculation = field(default_factory=Off)
    tuner: str = "cost-model"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    max_batch_size: int = 64
    drafting: DrafterSection = field(default_factory=DrafterSection)
    borrows: bool = False
    kv_gib: float | None = None
    num_ranks: int = 1
    engine: Literal["tlt", "vllm"] = "tlt"
    vllm: VllmSection = field(default_factory=VllmSection)
    window: int | None = None
    own_process: bool = False

    def cache_bytes(self) -> int:
        device = torch.device(self.device)
        return automatic_bytes(device, self.num_ranks) if self.kv_gib is None else int(self.kv_gib * 2**30)


def build_engine(
    config: ModelConfig,
    policy: Mapping[str, Tensor] | PackedTransformer,
    settings: EngineSettings,
    drafter: StoredDrafter | None = None,
    *,
    tuner: StrategyTuner | None = None,
    verify: Verify = verify_by_the_law,
    on_span: Callable[[Span], None] | None = None,
    decode: Decode | None = None,
) -> RolloutEngine:
    """Builds our engine, which drafts by retrieval and by `drafter` unless speculation is off. Raises
    UserError where the needed drafter is absent.

    policy: tensors by Hugging Face names, or the packed copy of another engine with the same settings, which
        neither may then load anew.
    tuner: overrides the settings.
    verify: an audit passes a faulty one.
    decode: token ids → text, for stop texts.
    """
    tuner = tuner or _make_tuner(settings, drafter, drafter_kinds(drafter is not None))
    engine = RolloutEngine(
        policy if isinstance(policy, PackedTransformer) else _pack(config, policy, settings),
        max_batch_size=settings.max_batch_size,
        tuner=tuner,
        on_span=on_span,
        verify=verify,
        decode=decode,
        cache_bytes=settings.cache_bytes,
    )
    if tuner is not None:
        learned = None if drafter is None else build_learned(engine, drafter, settings)
        engine.load_drafter(make_drafter(learned, settings.max_batch_size))
    return engine


def _make_tuner(
    settings: EngineSettings, drafter: StoredDrafter | None, kinds: Sequence[str]
) -> StrategyTuner | None:
    return make_tuner(
        settings.speculation,
        kinds,
        settings.tuner,
        learned_depth=Strategy.MAX_DEPTH if drafter is None else drafter.config.max_depth,
    )


def _pack(config: ModelConfig, policy: Mapping[str, Tensor], settings: EngineSettings) -> PackedTransformer:
    packed = PackedTransformer(config, settings.dtype, settings.device, settings.borrows)
    packed.load(policy, version=0)
    return packed


def build_backend(
    model: ModelFolder,
    settings: EngineSettings,
    drafter: StoredDrafter | None = None,
    *,
    on_span: Callable[[Span], None] | None = None,
    verify: Verify = verify_by_the_law,
    references: References | None = None,
) -> RolloutBackend:
    """Raises UserError where the settings are impossible.

    references: earlier responses to draft from, unless speculation is off; engine "tlt" only.
    """
    if settings.engine == "tlt":
        assert isinstance(model, Model), "load_model_for refuses others"
        config, tuner = model.config, None
        if references is not None:
            kinds = reference_kinds(drafter_kinds(drafter is not None))
            tuner = _make_tuner(settings, drafter, kinds)
        engine = build_engine(
            config,
            model.tensors,
            settings,
            drafter,
            tuner=tuner,
            on_span=on_span,
            verify=verify,
            decode=model.decode,
        )
        if references is not None and engine.drafter.kinds:
            engine.load_drafter(ReferenceDrafter(engine.drafter, references, settings.max_batch_size))
        return engine
    assert verify is verify_by_the_law, "vLLM verifies for itself"
    return _build_vllm(model, settings, drafter, on_span)


def _build_vllm(
    model: ModelFolder,
    settings: EngineSettings,
    drafter: StoredDrafter | None,
    on_span: Callable[[Span], None] | None,
) -> RolloutBackend:
    from tlt.engine.build.vllm import Learned, VllmPlan, build_vllm
    from tlt.engine.vllm.link import needs_own_process
    from tlt.engine.vllm.settings import VllmSettings

    drafting, window = settings.drafting, model.config.max_positions
    vllm = VllmSettings(
        model.path,
        settings.dtype,
        settings.max_batch_size,
        window if settings.window is None else min(settings.window, window),
        settings.kv_gib,
        device_index=torch.device(settings.device).index or 0,
        tau=DEFAULT_TAU,
        captures=drafting.train,
        section=settings.vllm,
        own_process=settings.own_process or needs_own_process(),
    )
    plan = VllmPlan(vllm, settings.speculation, settings.tuner, trains=drafter is not None)
    if not isinstance(model, Model):
        return build_vllm(plan, model.config.vocab_size, {}, on_span=on_span, decode=model.decode)
    learned = None if drafter is None else Learned(drafter, model.config)
    return build_vllm(
        plan, model.config.vocab_size, model.tensors, learned, on_span=on_span, decode=model.decode
    )


def load_engine(
    model: ModelFolder,
    settings: EngineSettings,
    drafter: Path | None = None,
    verify: Verify = verify_by_the_law,
    references: References | None = None,
) -> RolloutBackend:
    stored = load_stored_drafter(None if isinstance(settings.speculation, Off) else drafter, model)
    return build_backend(model, settings, stored, verify=verify, references=references)


def load_stored_drafter(drafter: Path | None, model: ModelFolder) -> StoredDrafter | None:
    """Raises UserError if it does not fit the model, or our decoder does not compute the model."""
    if drafter is None:
        return None
    if not isinstance(model, Model):
        remedy = "leave it out, and draft by retrieval (ngram:4x1x4) or not at all"
        raise UserError(
            f"drafter: {drafter} cannot draft for {model.path}, which TLT's own decoder does not compute; "
            f"{remedy}"
        )
    return load_drafter(drafter, model.config, model.tensors)


def build_learned(
    engine: RolloutEngine,
    drafter: StoredDrafter,
    settings: EngineSettings,
    on_verdicts: OnVerdicts | None = None,
) -> LearnedDrafter:
    drafting = settings.drafting
    packed = pack_drafter(drafter.config, drafter.tensors, engine.model.dtype, engine.device)
    check_wanted(drafting.vocabulary, drafter.config)
    vocabulary = None
    if drafter.config.can_choose:
        costs = DraftCosts.of(engine.model.config, drafter.config)
        vocabulary = DraftVocabulary(costs, drafting.vocabulary, drafter.counts_V)
    learned = LearnedSettings(keep_targets=drafting.train)
    return LearnedDrafter(packed, engine.model, settings.max_batch_size, learned, on_verdicts, vocabulary)
