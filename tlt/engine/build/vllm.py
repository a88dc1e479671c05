"""A checkpoint folder and its settings → a vLLM rollout engine, checked to sample by the law."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.base.spans import Span
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.drafter.formats.folder import ARCHITECTURE, StoredDrafter, load_drafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.drafter.forms import pack_drafter
from tlt.engine.build.model import Model, ModelFolder, open_model
from tlt.engine.settings import EngineSettings
from tlt.engine.vllm.check import check_law
from tlt.engine.vllm.drafter import VllmDrafter, export_for_vllm
from tlt.engine.vllm.engine import DraftingParts, VllmEngine
from tlt.engine.vllm.link import Link, needs_own_process
from tlt.engine.vllm.settings import VllmSettings
from tlt.engine.vllm.strategies import draft_depths, vllm_kinds
from tlt.models.any_config import AnyConfig
from tlt.models.decoder import ModelConfig
from tlt.models.hf.conversion import conversion_of
from tlt.models.hf.files import read_json
from tlt.models.hf.limits import Limits
from tlt.models.new import new_target
from tlt.models.packed import EMBEDDING, HEAD
from tlt.speculation.tuner.tuner import make_tuner

NGRAM: Mapping[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def build_vllm(
    model: ModelFolder,
    asked: EngineSettings,
    stored: StoredDrafter | None = None,
    *,
    on_span: Callable[[Span], None] | None = None,
) -> VllmEngine:
    """Raises UserError where vLLM cannot do what is asked, or does not sample by the law.

    model: without tensors vLLM keeps the folder's weights.
    """
    refuse_on_cpu(model.config)
    kinds = vllm_kinds(asked.speculation, stored is not None)
    learned = stored if kinds == ("learned",) else None
    block = Strategy.MAX_DEPTH if learned is None else learned.config.max_depth
    window = model.config.max_positions
    with tempfile.TemporaryDirectory(prefix="tlt-drafter-") as folder:
        drafter: Mapping[str, Any] | None = NGRAM if kinds else None
        if learned is not None:
            assert isinstance(model, Model), "load_stored_drafter refuses others"
            target = DescribedTarget(
                model.path.name, model.config.architecture, _head_of(model).detach().cpu()
            )
            drafter = export_for_vllm(learned, target, Path(folder))
        settings = VllmSettings(
            model.path,
            asked,
            window if asked.window is None else min(asked.window, window),
            drafter,
            draft_depths(asked.speculation, kinds, asked.vllm.max_draft_tokens, block),
            own_process=asked.own_process or needs_own_process(),
        )
        if learned is not None and learned.config.method == "dflash" and settings.way == "ipc":
            raise UserError("vllm.transfer: ipc does not bring weights to a dflash drafter; give host")
        link = Link(settings)
    tuner = make_tuner(
        asked.speculation,
        kinds or ("ngram",),
        asked.tuner,
        max_depth=settings.max_depth,
        trees=False,
    )
    drafting = DraftingParts(tuner)
    if learned is not None and isinstance(model, Model):
        packed = pack_drafter(learned.config, learned.tensors, asked.dtype, link.device)
        served = VllmDrafter(packed, learned, link.weights.load_drafter, _head_name(model.config))
        # trained or measured, which needs a copy of the policy in our layout
        drafting = DraftingParts(tuner, served, new_target(model.config, asked.dtype, link.device))
    engine = VllmEngine(
        link,
        max_batch_size=asked.max_batch_size,
        window=settings.window,
        drafting=drafting,
        to_checkpoint=conversion_of(model.config).to_checkpoint if isinstance(model, Model) else dict,
        on_span=on_span,
        decode=model.decode,
    )
    if isinstance(model, Model):
        engine.load_policy(model.tensors)
    check_law(engine, model.config.vocab_size)
    return engine


def refuse_on_cpu(config: Limits) -> None:
    """vLLM 0.32's kernel for CPUs takes LFM2's queries, which are [N, H, D], for one head of N · H tokens.
    Its Qwen3-Next differs from transformers' by up to 6 nats, for a reason not found (docs/models.md)."""
    if torch.cuda.is_available() or not isinstance(config, AnyConfig):
        return
    if config.family == "lfm2" and config.num_heads > 1:
        raise UserError("engine: vllm rotates the queries of LFM2's heads wrongly on a CPU; run it on a GPU")
    if config.family == "qwen3_next":
        raise UserError("engine: vllm computes Qwen3-Next wrongly on a CPU; run it on a GPU")


def _head_name(target: ModelConfig) -> str:
    return EMBEDDING if target.tie_embeddings else HEAD


def _head_of(model: Model) -> Tensor:
    return model.tensors[_head_name(model.config)]


def for_server(model: Path, drafter: Path, out: Path) -> Mapping[str, Any]:
    """The drafter's part of vLLM's speculative_config; converted into `out` if vLLM needs another form.
    Raises UserError where it does not fit the model."""
    target = open_model(model)
    stored = load_drafter(drafter, target.config, target.tensors)
    method = stored.config.method
    if method == "eagle" and read_json(drafter / "config.json")["architectures"] == [ARCHITECTURE[method]]:
        return {"method": method, "model": str(drafter)}
    described = DescribedTarget(str(model), target.config.architecture, _head_of(target))
    return export_for_vllm(stored, described, out)
