"""The policy update against transformers and torch's own parts, and its promise: a pure function of (tokens,
rewards, weights), whatever the order of arrival, the micro-batches and the ranks.
Float64, two layers, vocabulary 61."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import cases
from tests.forked import fork_ranks, run_ranks
from tlt.base.config.algorithm import ALGORITHMS
from tlt.base.config.schema import AlgorithmSection, OptimizerSection, SamplingSection
from tlt.base.types import Reward, Rollout, UserError
from tlt.models.decoder import ModelConfig, Transformer
from tlt.training.update import logprobs as logprobs_module
from tlt.training.update import update as policy
from tlt.training.update.finite import NonFiniteUpdate
from tlt.training.update.gradients import gradients_of
from tlt.training.update.update import PolicyTrainer, UpdateMetrics

CONFIG = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
TEMPERATURE = 0.8
SAMPLING = SamplingSection(temperature=TEMPERATURE, max_tokens=40)
#: A large eps keeps AdamW's first steps smooth, so that weights agree as far as gradients do.
OPTIMIZER = OptimizerSection(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, clip_grad_norm=0.5)


def make_model(seed: int = 0) -> Transformer:
    return Transformer(CONFIG).double().initialize(seed, std=0.15)


def make_batch(
    seed: int = 0, num_problems: int = 5, num_samples: int = 4
) -> tuple[list[Rollout], list[Reward]]:
    """Ragged responses; problem 1's rewards are all equal."""
    rng = random.Random(seed)
    rollouts, rewards = [], []
    for p in range(num_problems):
        prompt = tuple(rng.randrange(61) for _ in range(rng.randint(1, 9)))
        for s in range(num_samples):
            tokens = tuple(rng.randrange(61) for _ in range(rng.choice([1, 2, 7, 19, 40])))
            logprobs = tuple(-rng.random() * 4 for _ in tokens)
            rollouts.append(Rollout(f"p{p}", s, prompt, tokens, logprobs, "stop", 0))
            value = 1.0 if p == 1 else float((s + p) % 3 == 0)
            rewards.append(Reward(value, value > 0))
    return rollouts, rewards


def make_trainer(
    model: Transformer,
    optimizer: OptimizerSection = OPTIMIZER,
    group: Any = None,
    reference: Any = None,
    **algorithm: Any,
) -> PolicyTrainer:
    settings_ = {"tokens_per_micro_batch": 100, **algorithm}
    section, gradients = AlgorithmSection(**settings_), gradients_of(model, group)
    return PolicyTrainer(model, section, optimizer, SAMPLING, 10, gradients, reference)


def run(
    batches: Sequence[tuple[list[Rollout], list[Reward]]],
    reference: Transformer | None = None,
    **algorithm: Any,
) -> tuple[Tensor, list[UpdateMetrics]]:
    """All weights after one update per batch, flat."""
    model = make_model()
    trainer = make_trainer(model, reference=reference, **algorithm)
    metrics = [trainer.update(*batch, step) for step, batch in enumerate(batches)]
    return flat(model), metrics


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# ── the naive update: transformers' model, one sequence at a time, formulas written out once more ───────────


class Rotary(torch.nn.Module):
    """transformers computes its angles in float32 whatever the model's dtype; these are the same in
    float64."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = CONFIG.rope_theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Naive:
    def __init__(self, model: Transformer) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        config = LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=CONFIG.rms_norm_eps,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).double().eval()
        self.model.model.rotary_emb = Rotary()
        for module in list(self.model.modules()):
            for name, child in module.named_children():
                if isinstance(child, LlamaRMSNorm):  # in float32 whatever the dtype; torch's own is not
                    setattr(module, name, torch.nn.RMSNorm(32, CONFIG.rms_norm_eps, dtype=torch.float64))
        state = model.state_dict()
        missing = self.model.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        decayed = [p for p in self.model.parameters() if p.dim() == 2]
        free = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)

    def logprobs(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        logits = self.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / TEMPERATURE
        distribution = torch.distributions.Categorical(logits=logits)
        return distribution.log_prob(torch.tensor(rollout.token_ids)), distribution.entropy()

    def update(
        self,
        rollouts: list[Rollout],
        rewards: list[Reward],
        minibatches: int = 1,
        kl: float = 0.0,
        initial: Naive | None = None,
    ) -> dict[str, float]:
        advantages = []
        for rollout in rollouts:
            pairs = zip(rollouts, rewards, strict=True)
            group = torch.tensor([w.value for r, w in pairs if r.problem_id == rollout.problem_id]).double()
            mine = rewards[rollouts.index(rollout)].value
            advantages.append(float((mine - group.mean()) / (group.std() + 1e-6)))
        with torch.no_grad():
            old = [self.logprobs(r)[0] for r in rollouts]
            frozen = [initial.logprobs(r)[0] for r in rollouts] if initial else old
            entropies = [self.logprobs(r)[1] for r in rollouts]
        sums = {"loss": 0.0, "grad_norm": 0.0, "clip": 0.0, "kl": 0.0}
        for m in range(minibatches):
            chosen = range(m, len(rollouts), minibatches)
            count = sum(len(rollouts[i].token_ids) for i in chosen)
            total = torch.zeros((), dtype=torch.float64)
            for i in chosen:
                new = self.logprobs(rollouts[i])[0]
                ratio = torch.exp(new - old[i])
                low, high = ratio.clamp(min=0.8), ratio.clamp(max=1.28)
                a = advantages[i]
                objective = a * (high if a > 0 else low)  # the clip binds on one side, by the sign
                sums["clip"] += float((ratio > 1.28).sum() if a > 0 else (ratio < 0.8).sum() if a < 0 else 0)
                k3 = torch.exp(frozen[i] - new) - (frozen[i] - new) - 1
                sums["kl"] += float(k3.detach().sum()) if initial else 0.0
                total = total + (-objective + (kl * k3 if initial else 0.0)).sum()
            loss = total / count
            self.optimizer.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in self.model.parameters()))
            for p in self.model.parameters():
                p.grad *= min(1.0, 0.5 / norm)
            sums["grad_norm"] += norm / minibatches
            sums["loss"] += float(loss.detach()) / minibatches
            self.optimizer.step()
        tokens = sum(len(r.token_ids) for r in rollouts)
        engine = torch.tensor([logprob for r in rollouts for logprob in r.logprobs], dtype=torch.float64)
        gaps = (torch.cat(old) - engine).abs()
        return {
            "loss": sums["loss"],
            "grad_norm": sums["grad_norm"],
            "clip_fraction": sums["clip"] / tokens,
            "kl": sums["kl"] / tokens,
            "entropy": float(torch.cat(entropies).mean()),
            "engine_trainer_logprob_gap": float(gaps.mean()),
            "engine_trainer_logprob_gap_max": float(gaps.max()),
        }

    def flat_like(self, model: Transformer) -> Tensor:
        mine = dict(self.model.named_parameters())
        return torch.cat([mine[name].detach().flatten() for name, _ in model.named_parameters()])


@pytest.mark.parametrize(
    ("minibatches", "kl"), cases(product((1, 3), (0.0, 0.3)), usual=[(1, 0.0), (3, 0.3)])
)
def test_updates_agree_with_transformers_one_sequence_at_a_time(minibatches: int, kl: float) -> None:
    model, initial = make_model(), make_model(7)
    naive, naive_initial = Naive(model), Naive(initial)
    reference = initial if kl else None
    trainer = make_trainer(model, reference=reference, minibatches=minibatches, kl_coefficient=kl)
    for step in range(2):
        rollouts, rewards = make_batch(step)
        metrics = trainer.update(rollouts, rewards, step)
        expected = naive.update(rollouts, rewards, minibatches, kl, naive_initial if kl else None)
        if not kl:
            assert math.isnan(metrics.kl)
            expected.pop("kl")
        for name, value in expected.items():
            assert getattr(metrics, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert metrics.num_tokens == sum(len(r.token_ids) for r in rollouts)
        assert metrics.zero_variance_groups == 1
        assert (metrics.clip_fraction > 0) == (minibatches > 1)
        assert metrics.grad_norm > 0.5  # the clip is at work
    assert difference(flat(model), naive.flat_like(model)) < 1e-10


def test_importance_correction_weighs_tokens_by_the_capped_ratio_to_the_engine() -> None:
    """Engine logprobs off by log 3 and by -log 2: under a cap of 2, weights of 2 and 1/2 on every token."""
    rollouts, rewards = make_batch()
    model = make_model()
    exact = {}
    for rollout in rollouts:
        response = policy.Experience(rollout, (), needs_grad=False)
        with torch.no_grad():
            exact[rollout] = policy.response_logprobs(model, [response], TEMPERATURE)[0]
    for shift, weight in ((math.log(3), 2.0), (-math.log(2), 0.5)):
        shifted = [replace(r, logprobs=tuple((exact[r] - shift).tolist())) for r in rollouts]
        _, plain = run([(rollouts, rewards)])
        _, corrected = run([(shifted, rewards)], importance_correction_cap=2.0)
        assert corrected[0].grad_norm == pytest.approx(plain[0].grad_norm * weight, rel=1e-9)
        assert corrected[0].engine_trainer_logprob_gap_max == pytest.approx(abs(shift))


# ── purity ──────────────────────────────────────────────────────────────────────────────────────────────────


def shuffled(batch: tuple[list[Rollout], list[Reward]], seed: int) -> tuple[list[Rollout], list[Reward]]:
    pairs = list(zip(*batch, strict=True))
    random.Random(seed).shuffle(pairs)
    rollouts, rewards = zip(*pairs, strict=True)
    return list(rollouts), list(rewards)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_same_inputs_in_any_order_with_any_engine_logprobs_give_the_same_bits(minibatches: int) -> None:
    batches = [make_batch(0), make_batch(1)]
    others = [
        ([replace(r, logprobs=(-9.0,) * len(r.token_ids), policy_version=5) for r in rollouts], rewards)
        for rollouts, rewards in (shuffled(batch, 3) for batch in batches)
    ]
    first, _ = run(batches, minibatches=minibatches, epochs=2)
    second, _ = run(others, minibatches=minibatches, epochs=2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_budget_of_a_micro_batch_changes_no_gradient(kl: float) -> None:
    reference = make_model(7) if kl else None
    results = [
        run([make_batch(0), make_batch(1)], reference, tokens_per_micro_batch=budget, kl_coefficient=kl)
        for budget in (1, 64, 10_000)
    ]
    for weights, metrics in results[1:]:
        assert difference(weights, results[0][0]) < 1e-12
        assert metrics[0].loss == pytest.approx(results[0][1][0].loss, abs=1e-12)
        assert metrics[0].entropy == pytest.approx(results[0][1][0].entropy, abs=1e-12)


def test_a_large_vocabulary_in_chunks_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, metrics = run([make_batch()])
    monkeypatch.setattr(logprobs_module, "LOGITS_PER_CHUNK", 61 * 5)
    chunked, chunked_metrics = run([make_batch()])
    assert difference(whole, chunked) < 1e-12
    assert chunked_metrics[0].entropy == pytest.approx(metrics[0].entropy, abs=1e-12)


def test_no_gradient_is_held_between_updates() -> None:
    model = make_model()
    gradients, parameters = gradients_of(model, None, reduces_each=False), [*model.parameters()]
    with gradients.collect():
        (bucket,) = {p.grad._base for p in parameters if p.grad is not None and p.grad._base is not None}
        held = weakref.ref(bucket)
        del bucket
    assert held() is None
    assert all(p.grad is None for p in parameters)


def test_some_responses_without_advantage_stand_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same gradient and token count; entropy and gap are those of the others, and of the sampled ones
    weighted by tokens."""
    rollouts, rewards = make_batch()
    pairs = zip(rollouts, rewards, strict=True)
    rewards = [Reward(0.5, False) if r.problem_id in ("p1", "p3") else w for r, w in pairs]
    whole, metrics = run([(rollouts, rewards)])
    seen: list[policy.Experience] = []
    measure = policy.response_logprobs
    exact: dict[Rollout, tuple[Tensor, Tensor]] = {}

    def spy(
        model: Transformer, batch: Sequence[policy.Experience], temperature: float, routes: None, rows: None
    ) -> tuple[Tensor, Tensor]:
        seen.extend(batch)
        result = measure(model, batch, temperature, routes, rows)
        sizes = [r.num_tokens for r in batch]
        for r, *values in zip(batch, *(part.detach().split(sizes) for part in result), strict=True):
            exact[r.rollout] = (values[0], values[1])
        return result

    monkeypatch.setattr(policy, "response_logprobs", spy)
    monkeypatch.setattr(policy, "SAMPLED_TOKENS", 30)
    sampled, estimates = run([(rollouts, rewards)])
    assert difference(sampled, whole) < 1e-12
    assert estimates[0].loss == pytest.approx(metrics[0].loss, abs=1e-12)
    assert estimates[0].num_tokens == metrics[0].num_tokens
    zero_advantage = [r for r in rollouts if r.problem_id in ("p1", "p3")]
    kept = [r.rollout for r in seen if not r.needs_grad]
    assert len(kept) < len(zero_advantage)
    mean_length = sum(len(r.token_ids) for r in zero_advantage) / len(zero_advantage)
    assert len(kept) == math.ceil(30 / mean_length)

    def mean(value: Callable[[Rollout], float]) -> float:
        total = sum(value(r.rollout) for r in seen if r.needs_grad)
        return (total + sum(map(value, kept)) * len(zero_advantage) / len(kept)) / metrics[0].num_tokens

    assert estimates[0].entropy == pytest.approx(mean(lambda r: float(exact[r][1].sum())))
    gap = mean(lambda r: float((exact[r][0] - torch.tensor(r.logprobs, dtype=torch.float64)).abs().sum()))
    assert estimates[0].engine_trainer_logprob_gap == pytest.approx(gap)
    assert estimates[0].entropy != metrics[0].entropy


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_with_responses_that_could_not_be_scored_is_the_one_without_them(
    name: str, kl: float
) -> None:
    rollouts, rewards = make_batch()
    lost = {1, 4, 5, 6, 7, 14}  # a whole group among them
    unscored = [replace(w, value=9.0, error="time-out") if i in lost else w for i, w in enumerate(rewards)]
    scored = [[item for i, item in enumerate(items) if i not in lost] for items in (rollouts, rewards)]
    given = {"name": name, "kl_coefficient": kl, "minibatches": 2, "reference": make_model(5) if kl else None}
    (found, (metrics,)), (expected, (without,)) = (
        run([batch], **given) for batch in ((rollouts, unscored), tuple(scored))
    )
    assert torch.equal(found, expected)
    assert metrics.zero_variance_groups == without.zero_variance_groups + 1
    for field in ("loss", "entropy", "num_tokens"):
        assert getattr(metrics, field) == getattr(without, field)


UNSCORED = {"error": "time-out"}


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("name", ["grpo", "reinforce++", "rloo", "gspo"])
def test_where_no_response_counts_the_momentum_of_earlier_steps_moves_nothing(name: str, kl: float) -> None:
    given = {"name": name, "kl_coefficient": kl, "reference": make_model(5) if kl else None}
    rollouts, rewards = make_batch(1)
    before, _ = run([make_batch()], **given)
    unscored = [replace(reward, **UNSCORED) for reward in rewards]
    after, (_, metrics) = run([make_batch(), (rollouts, unscored)], **given)
    assert torch.equal(before, after)
    assert (metrics.num_skipped, metrics.num_tokens, metrics.zero_variance_groups) == (1, 0, 5)
    assert math.isnan(metrics.loss)
    cut = [replace(rollout, finish_reason="length") for rollout in rollouts]
    after, (_, metrics) = run([make_batch(), (cut, rewards)], **given, mask_truncated=True)
    assert torch.equal(before, after), "all of them are masked"
    assert metrics.entropy > 0


def test_an_optimizer_step_whose_minibatch_has_no_score_is_left_out_alone() -> None:
    rollouts, rewards = make_batch(1)
    one = [reward if i == 2 else replace(reward, **UNSCORED) for i, reward in enumerate(rewards)]
    weights, (metrics,) = run([(rollouts, one)], minibatches=2, epochs=2)
    assert metrics.num_skipped == 2
    assert torch.isfinite(weights).all()


def test_a_resumed_trainer_goes_on_to_the_same_bits() -> None:
    straight, _ = run([make_batch(step) for step in range(3)])
    model = make_model()
    trainer = make_trainer(model)
    for step in range(2):
        trainer.update(*make_batch(step), step)
    resumed_model = make_model(9)
    resumed = make_trainer(resumed_model)
    with torch.no_grad():
        for name, tensor in resumed.tensors().items():
            tensor.copy_(trainer.tensors()[name])
    resumed.restore(trainer.counters())
    assert resumed.next_step == 2
    resumed.update(*make_batch(2), resumed.next_step)
    assert torch.equal(flat(resumed_model), straight)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────


def test_bad_batches_are_errors_that_name_step_and_place() -> None:
    trainer = make_trainer(make_model(), minibatches=2)
    rollouts, rewards = make_batch()
    r = rollouts[0]
    cases = [
        ([], [], "step 4: the batch is empty"),
        (rollouts, rewards[1:], "20 rollouts but 19 rewards"),
        (rollouts[:1], rewards[:1], r"1 responses cannot fill algorithm.minibatches = 2"),
        ([r, *rollouts], [rewards[0], *rewards], r"\('p0', 0\) occurs twice"),
        ([replace(r, token_ids=(), logprobs=()), rollouts[1]], rewards[:2], r"\('p0', 0\) is empty"),
        ([replace(r, logprobs=()), rollouts[1]], rewards[:2], "but 0 logprobs"),
        (rollouts[:2], [Reward(math.nan, False), rewards[1]], "has reward nan"),
    ]
    for bad_rollouts, bad_rewards, message in cases:
        with pytest.raises(ValueError, match=message):
            trainer.update(bad_rollouts, bad_rewards, 3)


def test_greedy_sampling_is_refused_for_training() -> None:
    model, greedy = make_model(), SamplingSection(temperature=0.0)
    with pytest.raises(UserError, match="temperature is 0"):
        PolicyTrainer(model, AlgorithmSection(), OPTIMIZER, greedy, 10, gradients_of(model, None))


def test_a_non_finite_update_names_the_step_and_leaves_the_weights_alone() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    trainer = make_trainer(model)
    before = flat(model)
    refusal = r"^policy update of step 5: loss nan, gradient norm nan; .* --resume"
    with pytest.raises(NonFiniteUpdate, match=refusal) as caught:
        trainer.update(*make_batch(), 4)
    assert isinstance(caught.value, UserError), "one line, and no restart: it would come again"
    assert torch.equal(before, flat(model))
    assert not trainer.optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_an_update_would_leave_not_finite_are_named_before_anybody_takes_them() -> None:
    trainer = make_trainer(make_model().float(), OPTIMIZER.model_copy(update={"weight_decay": 1e300}))
    refusal = r"step 5: .* not finite, first model\..*; they are written nowhere"
    with pytest.raises(NonFiniteUpdate, match=refusal) as caught:
        trainer.update(*make_batch(), 4)
    assert "optimizer.weight_decay 1e+300" in str(caught.value)
    assert trainer.next_step == 0


@pytest.mark.parametrize(
    ("largest", "advantage"), [(1e308, "group-std"), (1e200, "group-std"), (1e40, "group-mean")]
)
def test_rewards_too_large_for_an_advantage_are_named_and_no_learning_rate(
    largest: float, advantage: str
) -> None:
    rollouts, rewards = make_batch()
    rewards = [replace(reward, value=largest * (number % 2)) for number, reward in enumerate(rewards)]
    trainer = make_trainer(make_model().float(), advantage=advantage)
    before = flat(trainer.model)
    refusal = r"^policy update of step 1: .*scale the rewards down, which reach 1e\+"
    with pytest.raises(NonFiniteUpdate, match=refusal) as caught:
        trainer.update(rollouts, rewards, 0)
    assert "learning_rate" not in str(caught.value)
    assert torch.equal(before, flat(trainer.model))


def test_a_gradient_that_is_not_finite_is_named_although_the_loss_is() -> None:
    model = make_model()
    trainer = make_trainer(model)
    model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
    before = flat(model)
    with pytest.raises(NonFiniteUpdate, match="step 1: gradient norm nan;"):
        trainer.update(*make_batch(), 0)
    assert torch.equal(before, flat(model))


# ── two ranks ───────────────────────────────────────────────────────────────────────────────────────────────

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "minibatches": {"minibatches": 3, "epochs": 2},
    "kl": {"kl_coefficient": 0.3},
    "ratios and means of whole responses": {
        "name": "gspo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "minibatches": 2,
    },
    "kl in the reward of a response": {"name": "rloo", "kl_coefficient": 0.3, "epochs": 2},
    "kl in the rewards of tokens, whitened over the batch": {"name": "reinforce++", "kl_coefficient": 0.3},
    "fewer responses than ranks": {},
    "nobody could score the second step": {"name": "rloo", "kl_coefficient": 0.3},
}


def scenario_batches(name: str) -> list[tuple[list[Rollout], list[Reward]]]:
    if name == "fewer responses than ranks":
        rollouts, rewards = make_batch(2, num_problems=1, num_samples=1)
        return [(rollouts, rewards), make_batch(1)]
    if name == "nobody could score the second step":
        rollouts, rewards = make_batch(1)
        return [make_batch(0), (rollouts, [replace(reward, **UNSCORED) for reward in rewards])]
    return [make_batch(0), make_batch(1)]


def rank_main(rank: int, num_ranks: int, folder: Path) -> None:
    """Each rank is handed the rollouts in another order, as if it had generated other ones first."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
    )
    results: dict[str, Any] = {}
    for name, algorithm in SCENARIOS.items():
        model = make_model()
        reference = make_model(7) if "kl_coefficient" in algorithm else None
        trainer = make_trainer(model, group=dist.group.WORLD, reference=reference, **algorithm)
        metrics = [
            trainer.update(*shuffled(b, 10 + rank), step) for step, b in enumerate(scenario_batches(name))
        ]
        results[name] = (flat(model), [{**vars(m), "seconds": 0.0} for m in metrics])
    # One rank's share overflows: all of them must say so, and none may hang.
    model = make_model()
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    try:
        make_trainer(model, group=dist.group.WORLD).update(*make_batch(), 4)
    except NonFiniteUpdate as error:
        results["error"] = str(error)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_give_the_weights_of_one(tmp_path: Path) -> None:
    run_ranks(__file__, tmp_path, 2)
    zero, one = (torch.load(tmp_path / "2" / f"rank{rank}.pt") for rank in range(2))
    assert "step 5" in zero["error"]
    assert zero["error"] == one["error"].replace("inf", "nan") or "step 5" in one["error"]
    for name, algorithm in SCENARIOS.items():
        reference = make_model(7) if "kl_coefficient" in algorithm else None
        alone, metrics = run(scenario_batches(name), reference, **algorithm)
        assert torch.equal(zero[name][0], one[name][0]), name
        assert str(zero[name][1]) == str(one[name][1]), name
        assert difference(zero[name][0], alone) < 1e-12, name
        for of_two, of_one in zip(zero[name][1], metrics, strict=True):
            for field, value in {**vars(of_one), "seconds": 0.0}.items():
                expected = value if value is None else pytest.approx(value, rel=1e-10, abs=1e-12, nan_ok=True)
                assert of_two[field] == expected, (name, field)


if __name__ == "__main__":
    fork_ranks(rank_main)
