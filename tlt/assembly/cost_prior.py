"""The tuner's cost prior, before anything is measured: sizes of a drafter relative to its target."""

from __future__ import annotations

from tlt.drafter.model import DrafterShape
from tlt.drafter.vocabulary import DraftCosts, sizes_of
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
    weights = target.num_layers * _layer(target) + head
    cached = 2 * target.num_layers * target.num_kv_heads * target.head_dim / weights
    if drafter is None:
        return CostPrior(head=head / weights, cached=cached)
    layer, width = drafter.layer, drafter.layer.hidden_size
    second_input = 0 if drafter.method == "eagle" else width * layer.num_qkv * layer.head_dim
    read = _layer(layer) + second_input + drafter.fc_size * width
    level = read + _num_ranked(target, drafter, vocabulary) * width
    return CostPrior(level / weights, read / weights, head / weights, cached)


def _num_ranked(target: ModelConfig, drafter: DrafterShape, vocabulary: DraftVocab) -> int:
    """Returns the size of the drafter's first draft vocabulary."""
    sizes = sizes_of(DraftCosts.of(target, drafter), vocabulary) if drafter.can_choose else []
    return sizes[-1] if sizes else drafter.draft_vocab_size


def _layer(config: ModelConfig) -> int:
    """Returns the number of matrix elements of one decoder layer."""
    attention = config.hidden_size * config.head_dim * (config.num_qkv + config.num_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size
