"""The tuner's cost prior, before anything is measured: sizes of a drafter relative to its target."""

from __future__ import annotations

from tlt.base.kinds import DraftVocab
from tlt.drafter.shape import DrafterShape, layer_weights
from tlt.drafter.vocabulary import DraftCosts, sizes_of
from tlt.models.decoder import ModelConfig
from tlt.speculation.tuner.step_costs import CostPrior


def cost_prior(
    target: ModelConfig, drafter: DrafterShape | None, vocabulary: DraftVocab = "full"
) -> CostPrior:
    """drafter: None: there is no learned drafter.
    vocabulary: of several sizes the largest serves first.
    """
    head = target.vocab_size * target.hidden_size
    weights = target.num_layers * layer_weights(target) + head
    cached = 2 * target.num_layers * target.num_kv_heads * target.head_dim / weights
    if drafter is None:
        return CostPrior(head=head / weights, cached=cached)
    costs, width = DraftCosts.of(target, drafter), drafter.layer.hidden_size
    sizes = sizes_of(costs, vocabulary) if drafter.can_choose else []
    rows = (sizes[-1] if sizes else drafter.draft_vocab_size) * width
    draft = drafter.weights_per_draft
    # of a block, layers and head are read once for all of its slots; each slot passes both
    level = drafter.weights_per_level + (rows // drafter.max_depth if draft else rows)
    level_row = (draft + drafter.weights_per_level + rows) / weights if draft else None
    read = drafter.weights_per_read / weights
    return CostPrior(level / weights, read, head / weights, cached, draft / weights or None, level_row)
