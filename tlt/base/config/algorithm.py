"""The section [algorithm]: published algorithms as sets of choices, with a key for each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import model_validator

from tlt.base.config.mistakes import mistake
from tlt.base.config.section import Section
from tlt.base.value_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare

Name = Literal["grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo"]
Advantage = Literal["group-std", "group-mean", "leave-one-out", "batch-whitened"]
RatioScope = Literal["token", "sequence", "trajectory"]
Loss = Literal["clipped", "cispo"]
Aggregation = Literal["token", "sequence", "constant"]
KLPlace = Literal["loss", "reward"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with every choice made. `AlgorithmSection` explains the choices."""

    name: Name
    advantage: Advantage = "group-std"
    ratio: RatioScope = "token"
    loss: Loss = "clipped"
    """Of a token. clipped: PPO's, without a gradient where the ratio has left its range.
    cispo: the log-probability, weighted by the clipped ratio as a constant."""
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    dynamic_sampling: bool = False
    overlong_buffer_tokens: int = 0
    """0: no penalty."""
    max_tokens: int = 1
    """Longest response that overlong_buffer_tokens is meant for."""


_PUBLISHED = (
    # GRPO, arXiv 2402.03300, section 4.1, with the clip and the mean over tokens of DAPO, equation 8.
    Algorithm("grpo", clip_high=0.28),
    # Dr. GRPO, arXiv 2503.20783, section 3.2: neither the group's std nor the response's length divides.
    Algorithm("dr-grpo", advantage="group-mean", aggregation="constant"),
    # DAPO, arXiv 2503.14476, equations 8 to 13; its penalty begins 4,096 tokens before the limit of 20,480
    # (section 4.1).
    Algorithm("dapo", clip_high=0.28, dynamic_sampling=True, overlong_buffer_tokens=4096, max_tokens=20480),
    # RLOO, arXiv 2402.14740: a response is one action, its reward minus the KL. The clip is TRL's; on policy
    # it does nothing.
    Algorithm(
        "rloo", "leave-one-out", "trajectory", aggregation="sequence", kl_in="reward", kl_estimator="k1"
    ),
    # REINFORCE++, arXiv 2501.03262: PPO's loss, advantages normalized over the batch, KL per token in the
    # reward.
    Algorithm("reinforce++", advantage="batch-whitened", kl_in="reward", kl_estimator="k1"),
    # GSPO, arXiv 2507.18071, equations 5 and 7, section 5.1.
    Algorithm("gspo", ratio="sequence", aggregation="sequence", clip_low=3e-4, clip_high=4e-4),
    # CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5: no lower bound; weights up to 5 as in ScaleRL,
    # arXiv 2510.13786.
    Algorithm("cispo", loss="cispo", clip_low=1.0, clip_high=4.0),
)
ALGORITHMS: Mapping[str, Algorithm] = {algorithm.name: algorithm for algorithm in _PUBLISHED}


class AlgorithmSection(Section):
    """The policy update: a published algorithm by name. Each of its choices but the loss has a key
    that changes it."""

    name: Name = "grpo"
    """The algorithm, which makes every choice that the keys below leave out (table in docs/algorithms.md).
    Two choices of grpo are DAPO's here: the mean over tokens, and clip_high = 0.28."""
    advantage: Advantage | None = None
    """Baseline that is subtracted from a response's reward, and scale that divides the difference; None: the
    algorithm's choice. group-mean: the mean of its problem's responses. group-std: the same, divided by their
    standard deviation. leave-one-out: the mean of the problem's other responses. batch-whitened: the mean
    over all tokens of the step, divided by their standard deviation."""
    ratio: RatioScope | None = None
    """Ratio of the policy's probability to that of the policy which sampled; None: the algorithm's choice.
    token: of each token. sequence: the geometric mean over a response. trajectory: the product over a
    response."""
    aggregation: Aggregation | None = None
    """Mean of the tokens' losses; None: the algorithm's choice.
    token: over all tokens of an optimizer step. sequence: over responses, of the mean of each.
    constant: the sum, divided by responses x sampling.max_tokens."""
    clip_low: PositiveShare | None = None
    """The ratio is clipped below at 1 - clip_low; None: the algorithm's choice."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped above at 1 + clip_high; None: the algorithm's choice."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the initial policy; at 0 that policy is not loaded."""
    kl_in: KLPlace | None = None
    """Whether the KL is added to the loss or subtracted from the reward; None: the algorithm's choice."""
    kl_estimator: KLEstimator | None = None
    """Estimate of the KL from one token; None: the algorithm's choice.
    With r = reference / policy, k1 = -log r, k2 = (log r)^2 / 2, k3 = r - log r - 1."""
    kl_bias_correction: bool = False
    """Whether a KL in the loss is multiplied by the token's ratio: its gradient is then unbiased
    (DeepSeek-V3.2, arXiv 2512.02556)."""
    mask_truncated: bool = False
    """Whether responses that reached sampling.max_tokens are left out of the loss; their rewards still
    count in their groups."""
    overlong_buffer_tokens: NonNegativeInt | None = None
    """Length of the buffer before sampling.max_tokens: a response that ends in it loses reward, the more the
    longer it is. 0: no buffer. None: the algorithm's choice, for dapo a fifth of sampling.max_tokens."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward that a response of sampling.max_tokens loses; one that ends in the buffer loses a part of it, in
    proportion to its tokens there."""
    dynamic_sampling: bool | None = None
    """Whether problems whose responses all have the same reward are replaced by others, in at most four
    further rounds; None: the algorithm's choice."""
    epochs: PositiveInt = 1
    """Passes of the policy update over a step's responses."""
    minibatches: PositiveInt = 1
    """Optimizer updates in each pass over a step's responses."""
    tokens_per_micro_batch: PositiveInt = 8192
    """Most tokens of one forward and backward pass of the policy update, a shared prompt counted once;
    bounds its memory."""
    importance_correction_cap: PositiveFloat | None = None
    """Cap of the weight exp(trainer logprob - engine logprob) per token; None: no correction."""

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> AlgorithmSection:
        chosen = self.resolve(max_tokens=1)
        about_it = ("kl_in", "kl_estimator", "kl_bias_correction")
        if self.kl_coefficient == 0 and (given := [key for key in about_it if getattr(self, key)]):
            told = f"{given[0]} is set, but kl_coefficient is 0, so there is no KL"
            raise mistake(f"{told}: give the coefficient, or remove it")
        if chosen.kl_in == "reward" and self.kl_bias_correction:
            told = "kl_bias_correction is for a KL in the loss, and it is in the reward"
            raise mistake(f"{told}: remove it, or set kl_in = loss")
        is_corrected = self.kl_coefficient == 0 or chosen.kl_in == "reward" or self.kl_bias_correction
        if chosen.kl_estimator == "k1" and not is_corrected:
            told = "kl_estimator k1 in the loss has a gradient of mean 0"
            raise mistake(f"{told}: give k2, k3 or kl_bias_correction = true")
        return self

    def resolve(self, max_tokens: int) -> Algorithm:
        published = ALGORITHMS[self.name]
        buffer = published.overlong_buffer_tokens * max_tokens // published.max_tokens
        given: dict[str, Any] = {field.name: getattr(self, field.name, None) for field in fields(Algorithm)}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(published, **{"overlong_buffer_tokens": buffer, "max_tokens": max_tokens, **changes})
