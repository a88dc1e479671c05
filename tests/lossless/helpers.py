"""Tiny engines, adversarial drafters, and an independent referee: full forwards of transformers' own model
and the law."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, ResponseId, Rollout, SamplingParams, id_of
from tlt.drafter.drafting.hybrid import make_drafter
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.drafting.reference_drafter import ReferenceDrafter
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.model import DraftModel
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal
from tlt.drafter.shape import BlockOptions, drafter_shape
from tlt.engine.own.engine import RolloutEngine
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.params import BatchParams, truncate
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample
from tlt.speculation.tuner.protocol import BatchState, Choice, StrategyTuner

VOCAB, STOP = 61, 7
CONFIG = ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 8, tie_embeddings=True, max_positions=160)


BLOCKS = {
    "dflash": drafter_shape(CONFIG, "dflash", block=BlockOptions(1, 5)),
    "dspark": drafter_shape(CONFIG, "dspark", block=BlockOptions(1, 4)),
    "reduced": drafter_shape(CONFIG, "dspark", VOCAB - 9, BlockOptions(1, 4)),
}
"""Block drafters by the name that `make_engine` gives them."""


@torch.no_grad()
def stir(model: DraftModel) -> None:
    """Moves every weight a little, for heads that start without effect."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def make_policy(seed: int = 1, std: float = 0.3, config: ModelConfig = CONFIG) -> Transformer:
    """Random, and sharp enough (about 2 nats) that both certain and uncertain tokens occur."""
    return Transformer(config).double().initialize(seed, std)


def pack(model: Transformer, dtype: torch.dtype = torch.float64) -> PackedTransformer:
    packed = PackedTransformer(model.config, dtype)
    packed.load(dict(model.named_parameters()), version=0)
    return packed


def law_probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """The distribution p_n that the law samples from, float64[V]."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_V.argmax(), logits_V.numel()).double()
    batch = BatchParams.of([params], logits_V.device)
    scaled = batch.scale(logits_V.double()[None, None])
    kept = truncate(scaled, batch) if batch.truncates else scaled
    return kept[0, 0].softmax(dim=-1)


def fit(tokens: Tensor, expected: np.ndarray) -> float:
    """Returns the p-value of a chi-square test; 0 when a token appears that cannot. Tokens that are
    expected fewer than 5 times share a bin."""
    counts = np.bincount(tokens.numpy(), minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    often = expected * len(tokens) >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * len(tokens)
    if (wanted > 0).sum() <= 1:
        return 1.0
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


def make_engine(
    policy: Transformer,
    tuner: StrategyTuner | None = None,
    drafter: str | DraftModel = "learned",
    dtype: torch.dtype = torch.float64,
    max_batch_size: int = 8,
    window: int = 4096,
) -> RolloutEngine:
    packed = PackedTransformer(policy.config, dtype)
    engine = RolloutEngine(packed, max_batch_size=max_batch_size, tuner=tuner)
    engine.load_policy(dict(policy.named_parameters()))
    if tuner is None:
        return engine
    if isinstance(drafter, str) and drafter not in ("learned", "ngram", *BLOCKS):
        engine.load_drafter(ArtificialDrafter(drafter))
        return engine
    learned = None
    if drafter != "ngram":
        model = random_drafter(policy.config, drafter) if isinstance(drafter, str) else drafter
        drafting = pack_drafter(model.config, model.state_dict(), dtype)
        settings = LearnedSettings(window=window)
        learned = LearnedDrafter(drafting, engine.target, max_batch_size, settings)
    engine.load_drafter(make_drafter(learned, max_batch_size))
    return engine


def random_drafter(config: ModelConfig, name: str) -> DraftModel:
    model = new_model(BLOCKS.get(name) or drafter_shape(config)).initialize(2)
    if name in BLOCKS:
        stir(model)
    return model


@dataclass(frozen=True)
class Given:
    """Stands for the law's noise while drafts are made (`DraftNoise`): noise_BDV[b, l] is row b's at level
    l."""

    noise_BDV: Tensor
    law: None = None

    def of_level(self, level: int, token_ids_V: Tensor | None = None) -> Tensor:
        noise_BV = self.noise_BDV[:, level]
        return noise_BV if token_ids_V is None else noise_BV[:, token_ids_V]

    def of_tokens(self, places: Sequence[tuple[int, int, int]]) -> list[float]:
        return [self.noise_BDV[place].item() for place in places]


class ArtificialDrafter(Drafter[Proposal]):
    """Random trees of random shapes; candidates are random ("random"), always the same wrong-headed guess
    ("adversarial"), or what the target is known to say ("oracle", from `answers`)."""

    kinds = ("artificial",)

    def __init__(
        self, kind: str, seed: int = 0, answers: dict[tuple[str, int], Sequence[int]] | None = None
    ) -> None:
        self.kind, self.random, self.answers = kind, random.Random(seed), answers or {}

    def propose(
        self,
        context: DraftContext,
        strategy: Strategy,
        noise: DraftNoise,
        discarded: Sequence[int] = (),
    ) -> Proposal:
        num_nodes = 1 + self.random.randint(1, strategy.budget)
        tokens, parents = [], []
        for committed, request in zip(context.tokens, context.requests, strict=True):
            row_tokens, row_parents, depths = [committed[-1]], [-1], [0]
            answer = self.answers.get(id_of(request), ())
            done = len(committed) - len(request.prompt_ids)
            while len(row_tokens) < num_nodes:
                parent = self.random.randrange(len(row_tokens))
                taken = {t for t, p in zip(row_tokens, row_parents, strict=True) if p == parent}
                ahead = done + depths[parent]
                guess = self.random.randrange(VOCAB)
                if self.kind == "adversarial":
                    guess = row_tokens[parent]
                if self.kind == "oracle" and ahead < len(answer) and self.random.random() < 0.7:
                    guess = answer[ahead]
                is_padding = depths[parent] >= strategy.depth or guess in taken or self.random.random() < 0.05
                row_tokens.append(0 if is_padding else guess)
                row_parents.append(-1 if is_padding else parent)
                depths.append(strategy.depth if is_padding else depths[parent] + 1)
            tokens.append(row_tokens)
            parents.append(row_parents)
        return Proposal(DraftTree(torch.tensor(tokens), torch.tensor(parents)))


class Switching(StrategyTuner):
    def __init__(self, strategies: Sequence[Strategy], seed: int) -> None:
        self.strategies, self.random = list(strategies), random.Random(seed)

    def choose(self, batch: BatchState) -> Choice:
        return Choice(self.random.choice(self.strategies))


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
)


def make_requests(
    num_problems: int,
    num_samples: int,
    seed: int,
    params: Sequence[SamplingParams] = PARAMS,
    longest: int = 60,
) -> list[Request]:
    """Prompts of 1 to 12 tokens, every sampling setting in turn, responses of 1 to `longest` tokens."""
    rng = random.Random(seed)
    requests = []
    for problem in range(num_problems):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))
        for index in range(num_samples):
            base = params[(problem * num_samples + index) % len(params)]
            one = replace(base, max_tokens=rng.randint(1, longest), stop_ids=(STOP,), seed=seed)
            requests.append(Request(f"p{problem}", index, prompt, one))
    return requests


def by_id(rollouts: Iterable[Rollout]) -> dict[ResponseId, Rollout]:
    return {id_of(rollout): rollout for rollout in rollouts}


def tokens_of(engine: RolloutEngine, requests: Sequence[Request]) -> dict[ResponseId, tuple[int, ...]]:
    return {id_of(rollout): rollout.token_ids for rollout in engine.generate(requests)}


def step_of(engine: RolloutEngine) -> dict[ResponseId, tuple[int, ...]]:
    """Runs an engine step; returns the tokens of the responses that it ended."""
    return {id_of(finished.rollout): finished.rollout.token_ids for finished in engine.step()}


def use_references(engine: RolloutEngine, references: References, max_slots: int = 8) -> ReferenceDrafter:
    """Lets the engine draft from references, and with its own drafter where there is none."""
    assert engine.drafter is not None
    drafter = ReferenceDrafter(engine.drafter, references, max_slots)
    engine.load_drafter(drafter)
    return drafter


def to_transformers(policy: Transformer) -> LlamaForCausalLM:
    c = policy.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_positions,
        rope_theta=c.rope_theta,
        tie_word_embeddings=c.tie_embeddings,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).double().eval()
    missing, unexpected = model.load_state_dict(policy.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@torch.no_grad()
def referee(model: LlamaForCausalLM, request: Request) -> tuple[int, ...]:
    """The response by the law alone: one full forward per token, no cache, no batch."""
    tokens = list(request.prompt_ids)
    params = BatchParams.of([request.params])
    for _ in range(request.params.max_tokens):
        logits_V = model(torch.tensor([tokens])).logits[0, -1]
        noise = gumbel_noise(keys_tensor([request.noise_key]), torch.tensor([[len(tokens)]]), VOCAB)
        if request.params.temperature == 0:
            noise = torch.zeros_like(noise)
        token = int(sample(logits_V[None, None], noise, params)[0])
        tokens.append(token)
        if token in request.params.stop_ids:
            break
    return tuple(tokens[len(request.prompt_ids) :])
