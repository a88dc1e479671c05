"""The tuner's cost prior, before anything is measured: sizes of a drafter relative to its target."""

from __future__ import annotations

from tlt.drafter.model import DrafterShape
from tlt.drafter.vocabulary import DraftCosts, layer_numbers, sizes_of
from tlt.kinds import DraftVocab
from tlt.models.decoder import ModelConfig
from tlt.tuning.step_costs import CostPrior


def cost_prior(
    target: ModelConfig, drafter: DrafterShape | None, vocabulary: DraftVocab = "full"
) -> CostPrior:
    """Returns the cost prior for this target.

    drafter: the shape of the learned drafter; None: there is none.
    vocabulary: the draft vocabulary; of several sizes the largest serves first.
    """
    head = target.vocab_size * target.hidden_size
    weights = target.num_layers * layer_numbers(target) + head
    cached = 2 * target.num_layers * target.num_kv_heads * target.head_dim / weights
    if drafter is None:
        return CostPrior(head=head / weights, cached=cached)
    costs, width = DraftCosts.of(target, drafter), drafter.layer.hidden_size
    read = costs.layer if drafter.method == "eagle" else costs.layer + drafter.fc_size * width
    sizes = sizes_of(costs, vocabulary) if drafter.can_choose else []
    level = read + (sizes[-1] if sizes else drafter.draft_vocab_size) * width
    return CostPrior(level / weights, read / weights, head / weights, cached)
