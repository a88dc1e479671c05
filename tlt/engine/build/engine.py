"""Builds an engine.

Model ────────────────────────────────┐
drafter/ ── load_stored_drafter ──────┼── build_backend ──▶ our engine or vLLM, with policy, tuner, drafter
EngineSettings ───────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tlt.base.spans import Span
from tlt.base.speculation import Off, Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.drafter.drafting.hybrid import drafter_kinds, make_drafter
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.drafting.reference_drafter import ReferenceDrafter, reference_kinds
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.formats.folder import StoredDrafter, load_drafter
from tlt.drafter.forms import pack_drafter
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary, check_wanted
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.model import Model, ModelFolder
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.sequence import Decode
from tlt.engine.settings import EngineSettings
from tlt.models.decoder import ModelConfig
from tlt.models.hf.limits import Limits
from tlt.models.new import OF_HYBRIDS, new_target
from tlt.models.target import Target
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import make_tuner


def build_engine(
    config: ModelConfig,
    policy: Mapping[str, Tensor] | Target,
    settings: EngineSettings,
    drafter: StoredDrafter | None = None,
    *,
    tuner: StrategyTuner | None = None,
    on_span: Callable[[Span], None] | None = None,
    decode: Decode | None = None,
) -> RolloutEngine:
    """Our engine, which drafts by retrieval and by `drafter` unless speculation is off. Raises UserError
    where the needed drafter is absent.

    policy: tensors by Hugging Face names, or the packed copy of another engine with the same settings, which
        neither may then load anew.
    tuner: overrides the settings.
    """
    tuner = tuner or _make_tuner(settings, drafter, drafter_kinds(drafter is not None))
    engine = RolloutEngine(
        policy if isinstance(policy, Target) else _pack(config, policy, settings),
        max_batch_size=settings.max_batch_size,
        tuner=tuner,
        on_span=on_span,
        decode=decode,
        cache_bytes=settings.cache_bytes,
        routes=settings.routes,
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


def _pack(config: ModelConfig, policy: Mapping[str, Tensor], settings: EngineSettings) -> Target:
    packed = new_target(config, settings.dtype, settings.device, settings.borrows, settings.equal_rows)
    packed.load(policy, version=0)
    return packed


def build_backend(
    model: ModelFolder,
    settings: EngineSettings,
    drafter: StoredDrafter | None = None,
    *,
    on_span: Callable[[Span], None] | None = None,
    references: References | None = None,
) -> RolloutBackend:
    """Raises UserError where the settings are impossible.

    references: earlier responses to draft from, unless speculation is off; engine "tlt" only.
    """
    check_hybrid(model.config, settings.engine, settings.speculation)
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
            decode=model.decode,
        )
        if references is not None and engine.drafter.kinds:
            engine.load_drafter(ReferenceDrafter(engine.drafter, references, settings.max_batch_size))
        return engine
    from tlt.engine.build.vllm import build_vllm

    return build_vllm(model, settings, drafter, on_span=on_span)


def check_hybrid(model: Limits, engine: str, speculation: Speculation) -> None:
    """Raises UserError for a hybrid, unless vLLM generates without drafts."""
    if not isinstance(model, ModelConfig) or not model.is_hybrid:
        return
    if engine != "vllm":
        raise UserError(f"engine: {engine} cannot generate with this model: {OF_HYBRIDS}; give vllm")
    if not isinstance(speculation, Off):
        raise UserError(
            f"speculation: is {speculation}, but this model cannot be drafted for: {OF_HYBRIDS}; give off"
        )


def load_engine(
    model: ModelFolder,
    settings: EngineSettings,
    drafter: Path | None = None,
    references: References | None = None,
) -> RolloutBackend:
    stored = load_stored_drafter(None if isinstance(settings.speculation, Off) else drafter, model)
    return build_backend(model, settings, stored, references=references)


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


def build_learned(engine: RolloutEngine, drafter: StoredDrafter, settings: EngineSettings) -> LearnedDrafter:
    drafting = settings.drafting
    packed = pack_drafter(drafter.config, drafter.tensors, engine.target.dtype, engine.device)
    check_wanted(drafting.vocabulary, drafter.config)
    vocabulary = None
    if drafter.config.can_choose:
        costs = DraftCosts.of(engine.target.config, drafter.config)
        vocabulary = DraftVocabulary(costs, drafting.vocabulary, drafter.counts_V)
    learned = LearnedSettings(keep_targets=drafting.train)
    return LearnedDrafter(packed, engine.target, settings.max_batch_size, learned, vocabulary)
