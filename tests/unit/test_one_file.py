"""examples/one_file.py stands alone, and is the same method: the package's law, tokens and gradient."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import STOP, VOCAB, make_policy
from tlt.base.config.schema import AlgorithmSection, OptimizerSection, SamplingSection
from tlt.base.types import Request, Reward, Rollout, SamplingParams
from tlt.engine.build.model import load_model
from tlt.engine.own.engine import RolloutEngine
from tlt.models.decoder import Transformer
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.sampling import BatchParams, gumbel_noise, keys_tensor, sample
from tlt.tasks.countdown import TASK
from tlt.training.update.algorithms import clipped_loss, group_advantages
from tlt.training.update.gradients import gradients_of
from tlt.training.update.update import PolicyTrainer

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "one_file.py"
BASE = ROOT / "recipes" / "countdown" / "base"
SEED, STEP = 5, 3


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


one_file = load()


# ── it stands alone ───────────────────────────────────────────────────────────────────────────────────────


def test_it_imports_torch_safetensors_and_the_standard_library_alone() -> None:
    imported = set()
    for node in ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "safetensors"}


# ── the law ───────────────────────────────────────────────────────────────────────────────────────────────


def make_keys(num: int) -> list[tuple[int, int, int, int]]:
    rng = random.Random(num)
    keys = [tuple(rng.randrange(2**32) for _ in range(4)) for _ in range(num - 2)]
    return [(0, 0, 0, 0), (2**32 - 1,) * 4, *keys]


@pytest.mark.parametrize("vocab_size", [1, 24, 61, 1023])
def test_its_noise_is_that_of_the_law_bit_for_bit(vocab_size: int) -> None:
    keys_B4 = keys_tensor(make_keys(6))
    positions_BN = torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 1]) - torch.zeros(6, 1, dtype=torch.long)
    ours = one_file.gumbel_noise(keys_B4, positions_BN, vocab_size)
    law = gumbel_noise(keys_B4, positions_BN, vocab_size)
    assert ours.dtype == law.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), law.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.3, 0.7, 1.0, 1.7, 30.0])
def test_it_draws_the_laws_tokens(temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(int(temperature * 10))
    logits_BNV = 4 * torch.randn(40, 9, 61, generator=generator, dtype=dtype)
    logits_BNV[:2] = logits_BNV[:2].round()  # with ties, where nothing is added
    noise_BNV = gumbel_noise(keys_tensor(make_keys(40)), torch.arange(9).expand(40, -1), 61)
    law_BN, _ = sample(logits_BNV, noise_BNV, BatchParams.of([SamplingParams(temperature=temperature)] * 40))
    assert torch.equal(one_file.draw(logits_BNV, noise_BNV, temperature), law_BN)


# ── the rollout ───────────────────────────────────────────────────────────────────────────────────────────


class Given:
    """Stands for the tuner: the same depth at every step, or any."""

    def __init__(self, depth: int | None) -> None:
        self.depth, self.rng = depth, random.Random(0)

    def choose(self, batch_size: int) -> int:
        return self.rng.choice(one_file.Tuner.DEPTHS) if self.depth is None else self.depth

    def observe(self, step: object) -> None: ...


TUNERS = [Given(1), Given(4), Given(12), Given(None), one_file.Tuner(random.Random(0))]
TUNER_NAMES = ["1", "4", "12", "any", "adaptive"]


def ours(policy: Transformer) -> one_file.Decoder:
    """Returns the same model as a Decoder of the file."""
    c = policy.config
    config = {
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {"rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_positions,
    }
    weights = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    return one_file.Decoder(config, weights)


def ask(prompts: list[list[int]], num_samples: int) -> list[one_file.Rollout]:
    """Requests of the file; each prompt is a problem."""
    requests = []
    for number, prompt in enumerate(prompts):
        for index in range(num_samples):
            key = one_file.noise_key(SEED, "rollout", STEP, f"p{number}", index)
            problem = one_file.Problem(f"p{number}", [], 0)
            requests.append(one_file.Rollout(problem, index, key, len(prompt), [*prompt]))
    return requests


Tokens = dict[tuple[str, int], list[int]]


def roll_out(
    model: one_file.Decoder, requests: list[one_file.Rollout], stop_id: int, max_tokens: int, tuner: object
) -> tuple[Tokens, list[one_file.StepRecord]]:
    records: list[one_file.StepRecord] = []
    finished = one_file.Engine(model, stop_id, max_tokens, tuner).generate(iter(requests), records)
    return {(r.problem.problem_id, r.sample_index): r.token_ids for r in finished}, records


def by_the_package(engine: RolloutEngine, stop_id: int, max_tokens: int, *what: Any) -> Tokens:
    """Returns what the package's engine says to the same requests. what: as of `ask`."""
    params = SamplingParams(one_file.TEMPERATURE, max_tokens=max_tokens, stop_ids=(stop_id,), seed=SEED)
    asked = [(r.problem.problem_id, r.sample_index, tuple(r.tokens)) for r in ask(*what)]
    requests = [Request(*response, params, "rollout", STEP) for response in asked]
    return {(r.problem_id, r.sample_index): [*r.token_ids] for r in engine.generate(requests)}


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(8, VOCAB) for _ in range(length)] for length in (1, 9, 4, 4, 7, 2)]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def base_prompts() -> list[list[int]]:
    texts = ["[9,13,15:47]", "[3,4:12]"]
    vocabulary = {character: id for id, character in enumerate("0123456789+-*/=,:[]x!", start=3)}
    return [[1, *(vocabulary[character] for character in text)] for text in texts]


@pytest.fixture(scope="module")
def said_by_the_package(base_prompts: list[list[int]]) -> Tokens:
    model = load_model(BASE, torch.float64)
    engine = RolloutEngine(PackedTransformer(model.config, torch.float64))
    engine.load_policy(model.tensors)
    return by_the_package(engine, 2, 150, base_prompts, 3)


@pytest.mark.parametrize(
    "tuner",
    [
        pytest.param(None, id="off", marks=pytest.mark.slow),
        pytest.param(TUNERS[1], id=TUNER_NAMES[1], marks=pytest.mark.slow),
        pytest.param(TUNERS[3], id=TUNER_NAMES[3]),
    ],
)
def test_the_recipes_model_says_what_it_says_in_the_packages_engine(
    tuner: object, base_prompts: list[list[int]], said_by_the_package: Tokens
) -> None:
    """On 4 rows the later responses to a short puzzle are drafted from finished ones, to their ends."""
    model = one_file.load_model(BASE, torch.float64)
    with patch.object(one_file, "MAX_BATCH_SIZE", 4):
        tokens, records = roll_out(model, ask(base_prompts, 3), 2, 150, tuner)
    assert tokens == said_by_the_package
    num_verifications = sum(record.batch_size for record in records)
    assert sum(map(len, tokens.values())) > (1.2 if tuner else 0.99) * num_verifications


# ── the puzzle ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "response",
    [
        "16-9=7[2,7:5]7-2=5!16-9=7,7-2=5",
        "!16-9=7,7-2=5",
        "16-9=7,7-2=5",  # no mark
        "!16-9=7,7-2=5!",  # nothing behind the last mark
        "!16-9=7,7-2=6",
        "!16-9=7",
        "!16-9=7,7-2=5,5-2=3",
        "!9-16=7,7-2=5",
        "!16-9=7,7+2=9",
        "!16-9=07,7-2=5",
        "!7-2=5",
        "!16*9=144,144/2=72",
        "",
    ],
)
def test_it_scores_as_the_package_does(response: str) -> None:
    expected = TASK.score({"numbers": [2, 9, 16], "target": 5}, response)["reward"]
    assert one_file.score([2, 9, 16], 5, response) == expected


# ── the policy update ─────────────────────────────────────────────────────────────────────────────────────


def test_its_advantages_and_clipped_loss_are_those_of_the_package() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_PG = torch.randint(0, 2, (5, 8), generator=generator).double()
    rewards_PG[0] = 1.0
    expected = group_advantages(rewards_PG.flatten(), torch.arange(5).repeat_interleave(8))
    torch.testing.assert_close(one_file.group_advantages(rewards_PG).flatten(), expected)
    ratio_T = torch.linspace(0.3, 2.0, 40, dtype=torch.float64)
    grpo = AlgorithmSection().resolve(max_tokens=70)
    loss_T, is_clipped_T = clipped_loss(ratio_T, expected, 1 - grpo.clip_low, 1 + grpo.clip_high)
    assert is_clipped_T.any()
    torch.testing.assert_close(one_file.clipped_loss(ratio_T, expected), loss_T)


def package_gradient(policy: Transformer, rollouts: list[Any], rewards: list[float]) -> dict[str, Tensor]:
    settings, sampling = AlgorithmSection(), SamplingSection(temperature=one_file.TEMPERATURE, max_tokens=70)
    gradients = gradients_of(policy, None)
    trainer = PolicyTrainer(policy, settings, OptimizerSection(), sampling, 9, gradients)
    records = [
        Rollout(
            r.problem.problem_id,
            r.sample_index,
            tuple(r.tokens[: r.num_prompt]),
            tuple(r.token_ids),
            (-1.0,) * len(r.token_ids),
            "stop",
            0,
        )
        for r in rollouts
    ]
    gradients: dict[str, Tensor] = {}

    def take_down(loss: float, step: int, largest_reward: float) -> float:
        gradients.update({name: parameter.grad.clone() for name, parameter in policy.named_parameters()})
        return 0.0

    with patch.object(trainer, "_optimizer_step", take_down):
        trainer.update(records, [Reward(value, value > 0) for value in rewards], 0)
    return gradients


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_gradient_of_its_update_is_the_packages(num_ranks: int) -> None:
    """24 responses, those to one problem all with the same reward; the ranks' shares add up."""
    policy = make_policy()
    model, rewards = ours(policy), [float(i % 3 == 0 or 4 <= i < 8) for i in range(24)]
    rollouts = one_file.Engine(model, STOP, 70, None).generate(iter(ask(PROMPTS, 4)), [])
    rollouts.sort(key=lambda r: (r.problem.problem_id, r.sample_index))
    advantages_R = one_file.group_advantages(torch.tensor(rewards, dtype=torch.float64).view(-1, 4)).flatten()
    assert (advantages_R == 0).sum() == 4
    _, is_response_BN = one_file.response_logprobs(model, rollouts)
    assert is_response_BN.sum(1).tolist() == [len(r.token_ids) for r in rollouts]
    with patch.object(one_file.micro_batches, "__defaults__", (300,)):
        for rank in range(num_ranks):
            one_file.policy_gradient(model, rollouts, advantages_R, slice(rank, None, num_ranks))
    for name, expected in package_gradient(policy, rollouts, rewards).items():
        torch.testing.assert_close(model.weights[name].grad, expected, rtol=1e-9, atol=1e-12)


# ── the tuner ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tuner_drafts_where_that_is_faster_and_is_off_where_it_is_not() -> None:
    """Accepted: 0.7 of what is drafted. A forward of many rows costs more than one of few."""
    tuner, chosen = one_file.Tuner(random.Random(0)), {1: [], 16: []}
    for batch_size, depths in chosen.items():
        for _ in range(100):
            depth = tuner.choose(batch_size)
            depths.append(depth)
            num_tokens = batch_size * sum(0.7**d for d in range(depth + 1))
            seconds = 1.0 + 0.1 * batch_size * (1 + depth)
            tuner.observe(one_file.StepRecord(depth, batch_size, round(num_tokens), seconds, 0.0))
    assert max(chosen[1], key=chosen[1].count) == 4
    assert max(chosen[16], key=chosen[16].count) == 0
    assert all(chosen[size].count(depth) >= 3 for size in chosen for depth in one_file.Tuner.DEPTHS)
