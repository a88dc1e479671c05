"""The policy update: a pure function of (tokens, rewards, weights). Knows no engine, no files and no loop around it.

    all rollouts ─ sort by (problem id, sample index) ─ advantages ─▶ minibatch 0 ─ plan ─▶ rank 0: [micro-batch] [micro-batch]
    (every rank has them all)                                         minibatch 1           rank 1: [micro-batch]
                                                                                              │ forward, backward
                                      AdamW ◀─ clip ◀─ all-reduce (sum) of one flat bucket ◀──┘

Logprobs are recomputed here, log-softmax(logits / temperature); the engine's serve the reported gap and an optional
importance correction alone. Who computes what follows from the lengths (and from which responses need a gradient), so
neither the order in which rollouts arrive nor the rank that generated them can change a weight. The loss is divided by the
number of response tokens of all ranks, known before the first forward: partial gradients only have to be added up.

Axes: R responses · N tokens of a flat batch · T response tokens of it · E hidden size · V vocabulary
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.config.schema import AlgorithmSection, OptimizerSection
from tlt.models.attention import PackedCausal
from tlt.models.decoder import Transformer
from tlt.rl.algorithms import clipped_policy_loss, entropy, group_advantages, importance_weights, kl_estimate, token_mean
from tlt.rl.plan import MicroBatch, Response, plan_share, sample_flat
from tlt.rl.schedule import learning_rate
from tlt.types import Reward, Rollout, UserError

LOGITS_PER_CHUNK = 2**24
"""Elements of logits alive at a time: with a large vocabulary the head runs in chunks, and once more in the backward pass."""

SAMPLED_TOKENS = 4096
"""Responses without advantage have a gradient of exactly 0. About so many of their tokens, in whole responses drawn at random,
stand for all of them in the means."""


class NonFiniteUpdate(ArithmeticError):
    """The loss or a gradient was not finite. Raised on every rank, before the optimizer could spread it to the weights."""


@dataclass(frozen=True)
class UpdateMetrics:
    """One update in numbers. Means are over all response tokens of all ranks; `loss`, `grad_norm` (before clipping),
    `clip_fraction` and `kl` also over the optimizer steps. `entropy` and the gaps are those of the policy before the update,
    estimated without bias where more than `SAMPLED_TOKENS` tokens have no advantage.

    kl: None when there is no reference policy (its coefficient is 0).
    engine_trainer_logprob_gap: mean of |engine's logprob - trainer's|; `_max` the largest computed.
    """

    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    kl: float | None
    lr: float
    engine_trainer_logprob_gap: float
    engine_trainer_logprob_gap_max: float
    num_tokens: int
    zero_variance_groups: int
    seconds: float


def response_logprobs(model: Transformer, batch: Sequence[Response], temperature: float) -> tuple[Tensor, Tensor]:
    """Returns (logprobs_T, entropy_T) of the response tokens, sequence after sequence. Gradients flow through the logprobs; the
    entropy is a metric. bf16 logits are widened to float32 first."""
    device = model.head_weight.device
    attend = PackedCausal(model.config, [r.length for r in batch])
    tokens: list[int] = []
    targets: list[int] = []
    readers: list[int] = []
    start = 0
    for r in batch:
        tokens += [*r.rollout.prompt_ids, *r.rollout.token_ids[:-1]]
        targets += r.rollout.token_ids
        readers += range(start + r.length - r.num_tokens, start + r.length)
        start += r.length
    features_NE = model(torch.tensor(tokens, device=device), attend.positions(device), attend)
    features_TE = features_NE[torch.tensor(readers, device=device)]
    targets_T = torch.tensor(targets, device=device)

    def head(features_E: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        logits_V = model.logits(features_E)
        logits_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)) / temperature
        logprobs_V = logits_V.log_softmax(-1)
        return logprobs_V.gather(-1, chosen[:, None])[:, 0], entropy(logprobs_V.detach())

    rows = max(LOGITS_PER_CHUNK // model.config.vocab_size, 1)
    if len(targets) <= rows:
        return head(features_TE, targets_T)
    chunks = [
        checkpoint(head, features, chosen, use_reentrant=False, preserve_rng_state=False)
        for features, chosen in zip(features_TE.split(rows), targets_T.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@dataclass
class Totals:
    """Sums over response tokens, added up over micro-batches and then over ranks."""

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


def check_batch(rollouts: Sequence[Rollout], rewards: Sequence[Reward], num_minibatches: int, where: str) -> None:
    """Raises ValueError, beginning with `where`, unless the batch can be trained on."""
    if not rollouts:
        raise ValueError(f"{where}: the batch is empty; every step needs at least one response")
    if len(rewards) != len(rollouts):
        raise ValueError(f"{where}: {len(rollouts)} rollouts but {len(rewards)} rewards; give one reward per rollout")
    if len(rollouts) < num_minibatches:
        raise ValueError(f"{where}: {len(rollouts)} responses cannot fill algorithm.minibatches = {num_minibatches}; lower it")
    twice = next((key for key, times in Counter(map(_key, rollouts)).items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"{where}: response {twice} occurs twice; each (problem id, sample index) must be there once")
    for rollout, reward in zip(rollouts, rewards, strict=True):
        place = f"{where}: response {_key(rollout)}"
        if not rollout.prompt_ids or not rollout.token_ids:
            raise ValueError(f"{place} is empty; prompt and response need at least one token each")
        if len(rollout.logprobs) != len(rollout.token_ids):
            raise ValueError(f"{place} has {len(rollout.token_ids)} tokens but {len(rollout.logprobs)} logprobs")
        if not math.isfinite(reward.value):
            raise ValueError(f"{place} has reward {reward.value}; rewards must be finite")


def _key(rollout: Rollout) -> tuple[str, int]:
    return rollout.problem_id, rollout.sample_index


Frozen = tuple[Tensor, Tensor]
"""(logprobs_T, entropy_T) of a micro-batch under a policy that does not move."""


class PolicyTrainer:
    """Owns the optimizer of `model`; every rank of `process_group` holds one and calls `update` with the same rollouts.

    temperature: that of sampling; the policy trained is softmax(logits / temperature).
    num_steps: policy steps of the whole run, for the schedule.
    process_group: None when this process is alone.
    reference: the frozen initial policy, exactly when `algorithm.kl_coefficient` is positive.
    """

    def __init__(
        self,
        model: Transformer,
        algorithm: AlgorithmSection,
        optimizer: OptimizerSection,
        temperature: float,
        num_steps: int,
        process_group: dist.ProcessGroup | None = None,
        reference: Transformer | None = None,
    ) -> None:
        if temperature <= 0:
            raise UserError(f"sampling: temperature is {temperature}; a policy gradient needs samples: set it above 0")
        assert (reference is not None) == (algorithm.kl_coefficient > 0), "a reference policy is for a KL coefficient above 0"
        self.model, self.reference = model, reference
        self.algorithm, self.schedule = algorithm, optimizer
        self.temperature, self.num_steps = temperature, num_steps
        self.group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.num_ranks = 1 if process_group is None else dist.get_world_size(process_group)
        self.next_step = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]  # norms and biases are not decayed
        groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps
        )

    def update(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward], step: int) -> UpdateMetrics:
        """Takes one policy step on all ranks' rollouts, `rewards[i]` of `rollouts[i]`. Then all ranks hold the same weights.

        Raises NonFiniteUpdate before the optimizer step that would have been spoilt, ValueError for an empty batch.
        """
        start = time.perf_counter()
        a = self.algorithm
        responses, num_flat_groups = self._responses(rollouts, rewards, step)
        lr = self._set_learning_rate(step)
        responses = sample_flat(responses, SAMPLED_TOKENS)
        minibatches = [responses[i :: a.minibatches] for i in range(a.minibatches)]
        shares = [
            plan_share(minibatch, self.model.config, a.tokens_per_micro_batch, self.num_ranks, self.rank)
            for minibatch in minibatches
        ]
        is_on_policy = a.epochs * a.minibatches == 1  # then the old logprobs are this pass's own
        old = {} if is_on_policy else self._frozen(self.model, shares)
        reference = {} if self.reference is None else self._frozen(self.reference, shares)

        sums = Totals()
        grad_norms = []
        for _ in range(a.epochs):
            for minibatch, share in zip(minibatches, shares, strict=True):
                num_tokens = sum(r.num_tokens for r in minibatch)
                with self._flat_gradient() as flat_gradient:
                    totals = Totals()
                    for batch in share:
                        totals.add(self._accumulate(batch, num_tokens, old.get(batch), reference.get(batch)))
                    totals = self._reduce(totals, flat_gradient)
                    grad_norms.append(self._optimizer_step(totals.loss, flat_gradient, step))
                sums.add(totals)
        self.next_step = step + 1

        num_tokens = sum(r.num_tokens for r in responses)
        num_passes = num_tokens * a.epochs
        return UpdateMetrics(
            loss=sums.loss / len(grad_norms),
            grad_norm=sum(grad_norms) / len(grad_norms),
            entropy=sums.entropy / num_passes,
            clip_fraction=sums.clipped / num_passes,
            kl=None if self.reference is None else sums.kl / num_passes,
            lr=lr,
            engine_trainer_logprob_gap=sums.gap / num_passes,
            engine_trainer_logprob_gap_max=sums.gap_max,
            num_tokens=num_tokens,
            zero_variance_groups=num_flat_groups,
            seconds=time.perf_counter() - start,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state and the next step; the weights are saved with the model."""
        return {"optimizer": self.optimizer.state_dict(), "next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.next_step = state["next_step"]

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(self.schedule, step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _responses(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward], step: int) -> tuple[list[Response], int]:
        """Returns the responses in canonical order, with their advantages, and how many groups give none."""
        check_batch(rollouts, rewards, self.algorithm.minibatches, f"policy update of step {step + 1}")
        pairs = sorted(zip(rollouts, rewards, strict=True), key=lambda pair: _key(pair[0]))
        group_of = {problem_id: i for i, problem_id in enumerate(dict.fromkeys(rollout.problem_id for rollout, _ in pairs))}
        advantages = group_advantages(
            torch.tensor([reward.value for _, reward in pairs], dtype=torch.float64),
            torch.tensor([group_of[rollout.problem_id] for rollout, _ in pairs]),
            normalize_by_std=self.algorithm.normalize_advantages_by_std,
            is_scored_R=torch.tensor([reward.is_scored for _, reward in pairs]),
        )
        has_kl = self.reference is not None
        responses = [
            Response(rollout, advantage, needs_grad=has_kl or advantage != 0)
            for (rollout, _), advantage in zip(pairs, advantages.advantages_R.tolist(), strict=True)
        ]
        return responses, advantages.num_zero_variance

    @torch.no_grad()
    def _frozen(self, model: Transformer, shares: Sequence[Sequence[MicroBatch]]) -> dict[MicroBatch, Frozen]:
        """Returns what a policy that does not move says of every micro-batch. They are those of the update itself: with equal
        weights the logprobs are equal to the last bit (ratio 1)."""
        return {batch: response_logprobs(model, batch.responses, self.temperature) for share in shares for batch in share}

    def _accumulate(self, batch: MicroBatch, num_tokens: int, old: Frozen | None, reference: Frozen | None) -> Totals:
        """Runs forward and backward of one micro-batch; `num_tokens` counts the minibatch's on all ranks.

        old: None when the policy that sampled is the current one.   reference: None without KL.
        """
        a = self.algorithm
        with torch.set_grad_enabled(batch.needs_grad):
            logprobs_T, entropy_T = response_logprobs(self.model, batch.responses, self.temperature)
            engine_T = logprobs_T.new_tensor([logprob for r in batch.responses for logprob in r.rollout.logprobs])
            advantages_T = logprobs_T.new_tensor([r.advantage for r in batch.responses for _ in range(r.num_tokens)])
            old_T, entropy_T = old or (logprobs_T.detach(), entropy_T)
            loss_T, is_clipped_T = clipped_policy_loss(
                logprobs_T, old_T, advantages_T, clip_low=a.clip_low, clip_high=a.clip_high
            )
            if a.importance_correction_cap is not None:
                loss_T = loss_T * importance_weights(old_T, engine_T, cap=a.importance_correction_cap)
            kl_T = torch.zeros_like(loss_T) if reference is None else kl_estimate(logprobs_T, reference[0])
            loss = token_mean(loss_T + a.kl_coefficient * kl_T, num_tokens)
        if batch.needs_grad:
            loss.backward()
        gap_T = (engine_T - old_T).abs()
        weight = batch.responses[0].weight  # one for all: of responses with a gradient 1
        means = [entropy_T.sum() * weight, is_clipped_T.sum(), kl_T.detach().sum(), gap_T.sum() * weight]
        sums = torch.stack([loss.detach(), *means, gap_T.max()])
        return Totals(*sums.tolist())

    @contextmanager
    def _flat_gradient(self) -> Iterator[Tensor]:
        """Yields one zeroed bucket that all gradients are views of, in the order of parameters; they are gone at the end."""
        sizes = [p.numel() for p in self.parameters]
        bucket = torch.zeros(sum(sizes), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        try:
            for parameter, part in zip(self.parameters, bucket.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            yield bucket
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def _reduce(self, totals: Totals, flat_gradient: Tensor) -> Totals:
        """Sums over the ranks, the same on all of them to the last bit."""
        if self.group is None:
            return totals
        dist.all_reduce(flat_gradient, op=dist.ReduceOp.SUM, group=self.group)
        mine = torch.tensor(list(vars(totals).values()), dtype=torch.float64, device=flat_gradient.device)
        all_totals = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(all_totals, mine, group=self.group)
        reduced = Totals()
        for values in all_totals:
            reduced.add(Totals(*values.tolist()))
        return reduced

    def _optimizer_step(self, loss: float, flat_gradient: Tensor, step: int) -> float:
        """Clips the gradient and takes the optimizer's step; returns the norm before clipping."""
        grad_norm = float(torch.linalg.vector_norm(flat_gradient))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteUpdate(
                f"policy update of step {step + 1}: loss {loss}, gradient norm {grad_norm}; the weights did not take "
                "this step; resume from the last checkpoint with a lower optimizer.learning_rate"
            )
        if grad_norm > self.schedule.clip_grad_norm:
            flat_gradient.mul_(self.schedule.clip_grad_norm / grad_norm)
        self.optimizer.step()
        return grad_norm
