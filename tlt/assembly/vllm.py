"""A checkpoint folder and its settings → a rollout engine that is vLLM, seen to follow the law."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt.config.schema import may_use_references
from tlt.drafter.drafting.reference_drafter import reference_kinds
from tlt.drafter.drafting.references import References
from tlt.drafter.formats.export import Target
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import PackedDrafter
from tlt.engine.sequence import Decode
from tlt.models.decoder import ModelConfig
from tlt.models.packed import EMBEDDING, HEAD, PackedTransformer
from tlt.spans import Span
from tlt.tuning.step_costs import UNKNOWN, CostPrior
from tlt.tuning.tuner import make_tuner
from tlt.types import UserError
from tlt.vllm.check import check_law
from tlt.vllm.drafter import VllmDrafter, export_for_vllm
from tlt.vllm.engine import Speculation, VllmEngine
from tlt.vllm.link import Link
from tlt.vllm.references import RunningReferences
from tlt.vllm.settings import VllmSettings
from tlt.vllm.strategies import NO_REFERENCES, depths_of, kinds_of

NGRAM: Mapping[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""vLLM's own retrieval: from the sequence's own text alone."""
NOTHING: Mapping[str, Any] = {"method": "custom_class", "model": "tlt.vllm.inside.given.NoDrafts"}
"""A proposer that vLLM needs so as to verify what only references say."""


@dataclass(frozen=True)
class VllmPlan:
    """What an engine is asked to be.

    settings: what vLLM is started with, but for its drafter.  speculation, tuner: as EngineSettings has them.
    trains: whether the drafter is trained or measured here, which needs a copy of the policy in our layout.
    prior: sizes of the drafter beside the target.
    references: what may be drafted from, where the speculation follows references; None: nothing.
    """

    settings: VllmSettings
    speculation: str
    tuner: str
    trains: bool = False
    prior: CostPrior = UNKNOWN
    references: References | None = None

    @property
    def used_references(self) -> References | None:
        """The references that are drafted from."""
        return self.references if may_use_references(self.speculation, self.tuner) else None


@dataclass(frozen=True)
class Learned:
    """A learned drafter, and the shape of the model that it drafts for."""

    stored: StoredDrafter
    target: ModelConfig

    @property
    def head(self) -> str:
        """Name of the target's head, or of the embedding where the two are one."""
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
    """Returns the engine, with the policy in it. UserError where vLLM cannot do what is asked, or does not
    follow the law.

    policy: tensors by Hugging Face names; none: vLLM keeps what it reads from the folder.
    learned: there is such a drafter.
    """
    kinds, references = kinds_of(plan.speculation, learned is not None), plan.used_references
    depths = depths_of(plan.speculation, kinds, plan.settings.section.max_draft_tokens)
    settings, dtype = plan.settings, plan.settings.dtype
    with tempfile.TemporaryDirectory(prefix="tlt-drafter-") as folder:
        drafting: Mapping[str, Any] | None = None
        if kinds == ("learned",):
            assert learned is not None
            target = Target(
                settings.model.name, learned.target.architecture, policy[learned.head].detach().cpu()
            )
            drafting = export_for_vllm(learned.stored, target, Path(folder))
        elif kinds or references is not None:
            drafting = NGRAM if kinds else NOTHING
        link = Link(dataclasses.replace(settings, drafter=drafting, depths=depths))
    if references is not None and link.is_v2:
        link.close()
        raise UserError(NO_REFERENCES)
    copy, drafter = None, None
    if learned is not None and kinds == ("learned",):
        packed = PackedDrafter.from_tensors(learned.stored.config, learned.stored.tensors, dtype, link.device)
        drafter = VllmDrafter(packed, learned.stored, link.weights.load_drafter, learned.head)
        copy = PackedTransformer(learned.target, dtype, link.device) if plan.trains else None
    kinds = kinds if references is None else reference_kinds(kinds)
    tuner = make_tuner(
        plan.speculation,
        kinds or ("ngram",),
        plan.tuner,
        max_depth=depths[-1],
        trees=False,
        prior=plan.prior,
        has_hindsight=False,
        acceptance=None if learned is None else learned.stored.acceptance,
    )
    running = None if references is None else RunningReferences(references, vocab_size)
    speculation = Speculation(tuner, drafter, copy, running)
    slots, window = settings.max_batch_size, settings.window
    engine = VllmEngine(
        link, max_batch_size=slots, window=window, speculation=speculation, on_span=on_span, decode=decode
    )
    if policy:
        engine.load_policy(policy)
    check_law(engine, vocab_size)
    return engine
