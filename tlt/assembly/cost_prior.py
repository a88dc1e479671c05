"""Sizes of a drafter beside its target, from their shapes: what a tuner assumes of costs before anything
is measured."""

from __future__ import annotations

from tlt.drafter.model import DrafterShape
from tlt.drafter.vocabulary import DraftCosts, sizes_of
from tlt.kinds import DraftVocab
from tlt.models.decoder import ModelConfig
from tlt.tuning.step_costs import CostPrior


def cost_prior(
    target: ModelConfig, drafter: DrafterShape | None, vocabulary: DraftVocab = "full"
) -> CostPrior:
    """Returns the prior for this target.

    drafter: the shape of the learned one; None: there is none.
    vocabulary: that it may choose, of which the largest size serves first.
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
    """Returns how many tokens the drafter ranks at first."""
    sizes = sizes_of(DraftCosts.of(target, drafter), vocabulary) if drafter.can_choose else []
    return sizes[-1] if sizes else drafter.draft_vocab_size


def _layer(config: ModelConfig) -> int:
    """Returns the numbers in the matrices of one decoder layer."""
    attention = config.hidden_size * config.head_dim * (config.num_qkv + config.num_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size
