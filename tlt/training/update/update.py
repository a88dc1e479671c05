"""The policy update: a pure function of (tokens, rewards, weights).

    scored rollouts ─ sort by (problem, sample) ─ advantages ─▶ minibatch 0 ─ plan ─▶ rank 0: [micro-batch] …
    (all of them on every rank)                                 minibatch 1           rank 1: [micro-batch]
                                                                                        │ forward, backward
                                AdamW ◀─ clip ◀─ sum over the ranks (gradients.py) ◀────┘

Log-probabilities are recomputed; the engine's serve only the reported gap and an optional importance
correction.

The loss divisor is known before the first forward, so partial gradients add up. A minibatch without a token
in the loss takes no optimizer step: old moments would move the weights.

Axes: T response tokens, of one response after the other
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.sampling import SamplingSection
from tlt.base.config.schema import OptimizerSection
from tlt.base.records import UpdateMetrics
from tlt.base.types import Reward, Rollout, UserError, id_of, in_order
from tlt.engine.equal_rows import EqualRows
from tlt.models.adam import trained_tensors
from tlt.models.decoder import Policy
from tlt.models.lora import BaseOf
from tlt.training.update.advantages import check_batch, count_problems, make_experiences, scored_ones
from tlt.training.update.algorithms import (
    importance_ratio,
    importance_weights,
    kl_estimate,
    loss_divisor,
    loss_weight,
    policy_loss,
)
from tlt.training.update.finite import check_loss, check_rewards, check_weights
from tlt.training.update.gradients import Gradients
from tlt.training.update.logprobs import logprobs_of_rows, response_logprobs
from tlt.training.update.micro_batches import Experience, MicroBatch, plan_share, sample_zero_advantage
from tlt.training.update.routes import Routes
from tlt.training.update.schedule import learning_rate

SAMPLED_TOKENS = 4096
"""Most responses with zero advantage skip the forward: their gradient is exactly 0. A sample of about so many
tokens stands for them in the means of entropy and gap."""


@dataclass
class Totals:
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0

    def add(self, other: Totals) -> None:
        self.loss += other.loss
        self.entropy += other.entropy
        self.clipped += other.clipped
        self.kl += other.kl
        self.gap += other.gap
        self.gap_max = max(self.gap_max, other.gap_max)


Frozen = tuple[Tensor, Tensor]
"""(logprobs_T, entropy_T) of a micro-batch under a policy that does not move."""

COLDEST = 1e-6
"""Logits are divided by the temperature in float32."""


class PolicyTrainer:
    """Owns the optimizer of `model`. Every rank calls `update` with the same rollouts.

    reference: the frozen initial policy, exactly when the KL coefficient is positive; sharded where the model
        is. `BaseOf(model)` where adapters alone are trained.
    rows: the engine's copy of `model`, whose numbers stand for the model's own; `reference` is such a copy,
        too. None: the model's own numbers count.
    """

    def __init__(
        self,
        model: Policy,
        algorithm_section: AlgorithmSection,
        optimizer_section: OptimizerSection,
        sampling: SamplingSection,
        num_steps: int,
        gradients: Gradients,
        reference: Policy | BaseOf | EqualRows | None = None,
        rows: EqualRows | None = None,
    ) -> None:
        if sampling.temperature < COLDEST:
            needs = f"a policy gradient needs samples: set it to {COLDEST} or more"
            raise UserError(f"sampling: temperature is {sampling.temperature}; {needs}")
        assert (reference is not None) == (algorithm_section.kl_coefficient > 0), (
            "a reference policy is for a KL coefficient above 0"
        )
        self.algorithm_section, self.optimizer_section = algorithm_section, optimizer_section
        self.algorithm = algorithm_section.resolve(sampling.max_tokens)
        self.model, self.reference, self.rows = model, reference, rows
        self.has_kl_loss = reference is not None and self.algorithm.kl_in == "loss"
        self.temperature, self.num_steps = sampling.temperature, num_steps
        self.gradients, self.group = gradients, gradients.group
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        self.next_step = 0
        self.initial_digest = self._digest_weights()
        parameters = [*self.trained().values()]
        self.device = parameters[0].device
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]  # norms and biases are not decayed
        groups = [
            {"params": matrices, "weight_decay": optimizer_section.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # Fused, a CPU goes through memory once rather than a dozen times; GPUs keep torch's own choice.
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer_section.learning_rate,
            betas=(optimizer_section.beta1, optimizer_section.beta2),
            eps=optimizer_section.eps,
            fused=True if self.device.type == "cpu" else None,
        )

    def update(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward], step: int) -> UpdateMetrics:
        """All ranks hold the same weights afterwards. Raises NonFiniteUpdate, if possible before the
        optimizer's step, and ValueError for an unfit batch."""
        start = time.perf_counter()
        section = self.algorithm_section
        check_batch(rollouts, rewards, section.minibatches, f"policy update of step {step + 1}")
        num_groups = count_problems(rollouts)
        rollouts, rewards = scored_ones(*in_order(rollouts, rewards))
        num_unscored_groups = num_groups - count_problems(rollouts)
        largest = check_rewards(rewards, step)
        kl, reference = None, {}
        if self.reference is not None and not self.has_kl_loss:
            kl = self._estimate_kl(rollouts, self.reference)
        responses, num_zero_advantage = make_experiences(rollouts, rewards, section, self.algorithm, kl)
        lr = self._set_learning_rate(step)
        responses = sample_zero_advantage(responses, SAMPLED_TOKENS)
        minibatches = [responses[i :: section.minibatches] for i in range(section.minibatches)]
        shares = [self._plan(minibatch) for minibatch in minibatches]
        is_on_policy = self._is_on_policy  # then the old logprobs are this pass's own
        measured = self._routes()  # counts the experts of the policy that sampled, for the metrics
        old = {} if is_on_policy else self._frozen(self.model, shares, measured)
        if self.reference is not None and self.has_kl_loss:
            reference = self._frozen(self.reference, shares, None)

        sums = Totals()
        grad_norms = []
        routes = measured if is_on_policy else self._routes()
        for _ in range(section.epochs):
            for minibatch, share in zip(minibatches, shares, strict=True):
                lengths = [r.num_in_loss for r in minibatch]
                with self.gradients.collect():
                    totals = self._gradient(share, lengths, old, reference, routes)
                    if any(lengths):
                        grad_norms.append(self._optimizer_step(totals.loss, step, largest))
                sums.add(totals)
        self.next_step = step + 1

        num_tokens = sum(r.num_tokens for r in responses)
        num_passes = num_tokens * section.epochs or math.nan
        num_steps = len(grad_norms) or math.nan
        if kl is not None:
            sums.kl = section.epochs * float(sum(kl_T.sum() for kl_T in kl))
        return UpdateMetrics(
            loss=sums.loss / num_steps,
            grad_norm=sum(grad_norms) / num_steps,
            entropy=sums.entropy / num_passes,
            clip_fraction=sums.clipped / num_passes,
            kl=math.nan if self.reference is None else sums.kl / num_passes,
            lr=lr,
            engine_trainer_logprob_gap=sums.gap / num_passes,
            engine_trainer_logprob_gap_max=sums.gap_max,
            num_tokens=num_tokens,
            zero_variance_groups=num_unscored_groups + num_zero_advantage,
            num_skipped=section.epochs * section.minibatches - len(grad_norms),
            seconds=time.perf_counter() - start,
            **({} if measured is None else measured.metrics(self.group)),
        )

    @property
    def _is_on_policy(self) -> bool:
        return self.algorithm_section.epochs * self.algorithm_section.minibatches == 1

    def _routes(self) -> Routes | None:
        return Routes(self.model, self.device) if self.model.config.num_experts else None

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        return trained_tensors("policy", self.optimizer, self.trained())

    def counters(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.next_step = counters["next_step"]

    def _digest_weights(self) -> str:
        """The same for whole weights and for slices."""
        sums = torch.stack([_bit_sum(parameter) for parameter in self.model.parameters()])
        if self.gradients.needs_equal_shares:
            dist.all_reduce(sums, group=self.group)
        return hashlib.sha256(str(sums.tolist()).encode()).hexdigest()

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(self.optimizer_section, step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _plan(self, responses: Sequence[Experience]) -> list[MicroBatch]:
        budget, fills_up = self.algorithm_section.tokens_per_micro_batch, self.gradients.needs_equal_shares
        return plan_share(responses, self.model.config, budget, self.num_ranks, self.rank, fills_up)

    @torch.no_grad()
    def _estimate_kl(
        self, rollouts: Sequence[Rollout], reference: Policy | BaseOf | EqualRows
    ) -> list[Tensor]:
        """By rollout and token, float64."""
        responses = [Experience(rollout, (), needs_grad=False) for rollout in rollouts]
        lengths = [r.num_tokens for r in responses]
        all_kl_T = torch.zeros(sum(lengths), dtype=torch.float64, device=self.device)
        places = dict(zip(map(id_of, rollouts), all_kl_T.split(lengths), strict=True))
        for batch in self._plan(responses):
            logprobs_T, _ = self._logprobs(self.model, batch, self._routes())
            reference_T, _ = self._logprobs(reference, batch, None)
            kl_T = kl_estimate(logprobs_T, reference_T, self.algorithm.kl_estimator)
            parts = kl_T.split([r.num_tokens for r in batch.responses])
            for r, part in zip(batch.responses, parts, strict=True):
                if not batch.is_dummy:
                    places[id_of(r.rollout)].copy_(part)
        if self.group is not None and lengths:
            dist.all_reduce(all_kl_T, op=dist.ReduceOp.SUM, group=self.group)
        return list(all_kl_T.cpu().split(lengths))

    @torch.no_grad()
    def _frozen(
        self,
        model: Policy | BaseOf | EqualRows,
        shares: Sequence[Sequence[MicroBatch]],
        routes: Routes | None,
    ) -> dict[MicroBatch, Frozen]:
        """In the update's micro-batches: with equal weights the logprobs are equal to the last bit."""
        return {batch: self._logprobs(model, batch, routes) for share in shares for batch in share}

    def _logprobs(
        self, model: Policy | BaseOf | EqualRows, batch: MicroBatch, routes: Routes | None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(model, EqualRows):
            return logprobs_of_rows(model, batch.responses)
        rows = self.rows if model is self.model else None
        return response_logprobs(model, batch.responses, self.temperature, routes, rows)

    def _gradient(
        self,
        share: Sequence[MicroBatch],
        lengths: Sequence[int],
        old: Mapping[MicroBatch, Frozen],
        reference: Mapping[MicroBatch, Frozen],
        routes: Routes | None,
    ) -> Totals:
        divisor = loss_divisor(lengths, self.algorithm.aggregation, self.algorithm.max_tokens)
        last = next((batch for batch in reversed(share) if batch.needs_grad), None)
        totals = Totals()
        for batch in share:
            frozen = old.get(batch), reference.get(batch)
            totals.add(self._accumulate(batch, divisor, *frozen, batch is last, routes))
        return self._reduce(totals)

    def _accumulate(
        self,
        batch: MicroBatch,
        divisor: int,
        old: Frozen | None,
        reference: Frozen | None,
        is_last: bool,
        routes: Routes | None,
    ) -> Totals:
        """old: None: the current policy sampled. reference: None: no KL in the loss."""
        section, responses = self.algorithm_section, batch.responses
        lengths = [r.num_tokens for r in responses]
        with torch.set_grad_enabled(batch.needs_grad):
            logprobs_T, entropy_T = self._logprobs(self.model, batch, routes)
            engine_T = logprobs_T.new_tensor(
                [r.rollout.logprobs[n] for r in responses for n in r.rollout.drawn]
            )
            advantages_T = logprobs_T.new_tensor([advantage for r in responses for advantage in r.advantages])
            old_T, entropy_T = old or (logprobs_T.detach(), entropy_T)
            ratio_T = importance_ratio(logprobs_T, old_T, lengths, self.algorithm.ratio)
            loss_T, is_clipped_T = policy_loss(ratio_T, logprobs_T, advantages_T, self.algorithm)
            if section.importance_correction_cap is not None:
                loss_T = loss_T * importance_weights(old_T, engine_T, cap=section.importance_correction_cap)
            kl_T = torch.zeros_like(loss_T)
            if reference is not None:
                kl_T = kl_estimate(logprobs_T, reference[0], self.algorithm.kl_estimator)
                if section.kl_bias_correction:
                    kl_T = kl_T * importance_ratio(logprobs_T, old_T, lengths, "token")
            aggregation = self.algorithm.aggregation
            weights = [0.0 if r.is_masked else loss_weight(r.num_tokens, aggregation) for r in responses]
            parts = [logprobs_T.new_full((n,), w) for n, w in zip(lengths, weights, strict=True)]
            weight_T = torch.cat(parts)
            loss = ((loss_T + section.kl_coefficient * kl_T) * weight_T).sum() / divisor
        if batch.needs_grad:
            self.gradients.backward(loss, is_last)
        if batch.is_dummy:
            return Totals()
        gap_T = (engine_T - old_T).abs()
        weight = responses[0].metric_weight  # equal for all of them; 1 with a gradient
        entropy, kl, gap = (values_T.detach().sum() * weight for values_T in (entropy_T, kl_T, gap_T))
        sums = torch.stack([loss.detach(), entropy, is_clipped_T.sum(), kl, gap, gap_T.max()])
        return Totals(*sums.tolist())

    def _reduce(self, totals: Totals) -> Totals:
        self.gradients.reduce()
        if self.group is None:
            return totals
        mine = torch.tensor(astuple(totals), dtype=torch.float64, device=self.device)
        all_totals = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(all_totals, mine, group=self.group)
        reduced = Totals()
        for values in all_totals:
            reduced.add(Totals(*values.tolist()))
        return reduced

    def _optimizer_step(self, loss: float, step: int, largest_reward: float) -> float:
        grad_norm = self.gradients.norm()
        check_loss(loss, grad_norm, step, largest_reward)
        if grad_norm > self.optimizer_section.clip_grad_norm:
            self.gradients.scale(self.optimizer_section.clip_grad_norm / grad_norm)
        self.optimizer.step()
        sharded_over = self.group if self.gradients.needs_equal_shares else None
        check_weights(self.trained(), step, self.optimizer_section, sharded_over)
        if self.rows is not None and not self._is_on_policy:
            self.rows.load()
        return grad_norm


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum (int64, modulo 2⁶⁴) of the numbers' bits as integers; the sums of shards add up."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.view(integers).sum(dtype=torch.int64)
