"""A checkpoint folder and its settings → a vLLM rollout engine, checked to sample by the law."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt.base.spans import Span
from tlt.base.speculation import Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.drafter.formats.folder import ARCHITECTURE, StoredDrafter, load_drafter
from tlt.drafter.formats.layouts import Target
from tlt.drafter.forms import pack_drafter
from tlt.engine.build.model import open_model
from tlt.engine.sequence import Decode
from tlt.engine.vllm.check import check_law
from tlt.engine.vllm.drafter import VllmDrafter, export_for_vllm
from tlt.engine.vllm.engine import Drafting, VllmEngine
from tlt.engine.vllm.link import Link
from tlt.engine.vllm.settings import VllmSettings
from tlt.engine.vllm.strategies import draft_depths, vllm_kinds
from tlt.models.decoder import ModelConfig
from tlt.models.hf.files import read_json
from tlt.models.packed import EMBEDDING, HEAD, PackedTransformer
from tlt.speculation.tuner.tuner import make_tuner

NGRAM: Mapping[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class VllmPlan:
    settings: VllmSettings
    """Without a drafter."""
    speculation: Speculation
    tuner: str
    trains: bool = False
    """The drafter is trained or measured here, which needs a copy of the policy in our layout."""


@dataclass(frozen=True)
class Learned:
    stored: StoredDrafter
    target: ModelConfig

    @property
    def head(self) -> str:
        """Name of the target's head, or of the tied embedding."""
        return EMBEDDING if self.target.tie_embeddings else HEAD


def build_vllm(
    plan: VllmPlan,
    vocab_size: int,
    policy: Mapping[str, Tensor],
    learned: Learned | None = None,
    *,
    on_span: Callable[[Span], None] | None = None,
    decode: Decode | None = None,
) -> VllmEngine:
    """Raises UserError where vLLM cannot do what the plan asks, or does not sample by the law.

    policy: tensors by Hugging Face names; empty: vLLM keeps the folder's weights.
    """
    kinds = vllm_kinds(plan.speculation, learned is not None)
    settings, dtype = plan.settings, plan.settings.dtype
    drafts_by = learned if kinds == ("learned",) else None
    block = Strategy.MAX_DEPTH if drafts_by is None else drafts_by.stored.config.max_depth
    depths = draft_depths(plan.speculation, kinds, settings.section.max_draft_tokens, block)
    is_dflash = drafts_by is not None and drafts_by.stored.config.method == "dflash"
    if is_dflash and plan.trains and settings.way == "ipc":
        raise UserError("vllm.transfer: ipc does not bring weights to a dflash drafter; give host")
    with tempfile.TemporaryDirectory(prefix="tlt-drafter-") as folder:
        drafting: Mapping[str, Any] | None = None
        if drafts_by is not None:
            head_VE = policy[drafts_by.head].detach().cpu()
            target = Target(settings.model.name, drafts_by.target.architecture, head_VE)
            drafting = export_for_vllm(drafts_by.stored, target, Path(folder))
        elif kinds:
            drafting = NGRAM
        link = Link(dataclasses.replace(settings, drafter=drafting, depths=depths))
    copy, drafter = None, None
    if drafts_by is not None:
        stored = drafts_by.stored
        packed = pack_drafter(stored.config, stored.tensors, dtype, link.device)
        drafter = VllmDrafter(packed, stored, link.weights.load_drafter, drafts_by.head)
        copy = PackedTransformer(drafts_by.target, dtype, link.device) if plan.trains else None
    tuner = make_tuner(
        plan.speculation,
        kinds or ("ngram",),
        plan.tuner,
        max_depth=depths[-1],
        trees=False,
    )
    engine = VllmEngine(
        link,
        max_batch_size=settings.max_batch_size,
        window=settings.window,
        drafting=Drafting(tuner, drafter, copy),
        on_span=on_span,
        decode=decode,
    )
    if policy:
        engine.load_policy(policy)
    check_law(engine, vocab_size)
    return engine


def for_server(model: Path, drafter: Path, out: Path) -> Mapping[str, Any]:
    """Returns the drafter's part of vLLM's speculative_config. Converts the drafter into `out` if vLLM needs
    another form. Raises UserError where it does not fit the model."""
    target = open_model(model)
    stored = load_drafter(drafter, target.config, target.tensors)
    method = stored.config.method
    if method == "eagle" and read_json(drafter / "config.json")["architectures"] == [ARCHITECTURE[method]]:
        return {"method": method, "model": str(drafter)}
    head_VE = target.tensors[Learned(stored, target.config).head]
    described = Target(str(model), target.config.architecture, head_VE)
    return export_for_vllm(stored, described, out)
