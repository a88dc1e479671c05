"""A tiny target and its drafters, in float64: what the tests of drafting and of drafter training are made
of."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG, STOP, VOCAB, ArtificialDrafter, make_policy, pack
from tlt.base.strategy import Strategy
from tlt.base.types import Finished, Request, Rollout, SamplingParams
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedProposal, LearnedSettings
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.model import DraftModel
from tlt.drafter.protocol import DraftContext, DraftNoise
from tlt.drafter.shape import BlockOptions, Method, drafter_shape
from tlt.drafter.training.buffer import PackedBatch, TrajectoryBuffer
from tlt.drafter.training.eagle_loss import EaglePreset
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.spot import SpotTrainer
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.engine.own.engine import RolloutEngine
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.packed import PackedTransformer
from tlt.speculation.law.params import BatchParams
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner

SIZE = CONFIG.hidden_size
POLICY = make_policy()
TARGET = pack(POLICY)


def make_model(
    seed: int = 2,
    method: Method = "eagle",
    draft_vocab: int | None = None,
    config: ModelConfig = CONFIG,
    block: BlockOptions | None = None,
) -> DraftModel:
    """A random drafter whose matrices are strong enough to matter, and of whose norms no two are alike."""
    model = new_model(drafter_shape(config, method, draft_vocab, block)).double().initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            if "markov" in name:
                parameter.copy_(4 * drawn - 2)
            elif parameter.dim() == 1:
                parameter.copy_(1 + drawn)
            elif name != "fc.weight":
                parameter.mul_(8.0 if block is None else 12.0)
    if draft_vocab is not None:
        model.set_vocabulary(torch.tensor([t for t in range(VOCAB) if t not in (0, 7, 11)]))
    return model


MODEL = make_model()
HASS = PRESETS["hass"]
ONE_STEP = EaglePreset("uneven", "eagle", 1, 1.0, 0.7, 1.3)


def make_drafter(
    max_slots: int = 4,
    target: PackedTransformer = TARGET,
    tau: float = 0.7,
    window: int = 4096,
) -> LearnedDrafter:
    packed = pack_drafter(MODEL.config, MODEL.state_dict(), torch.float64)
    settings = LearnedSettings(tau=tau, window=window, calibrate=False)
    return LearnedDrafter(packed, target, max_slots, settings)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@torch.no_grad()
def features_of(policy: Transformer, tokens: Sequence[int]) -> Tensor:
    """A plain forward of the trainable target over the tokens."""
    attend = PackedCausal(CONFIG, [len(tokens)])
    return policy(torch.tensor(tokens), attend.positions(), attend)


@torch.no_grad()
def plain_forward(embeddings: Tensor, features: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    attend = PackedCausal(MODEL.config.layer, lengths or [len(embeddings)])
    return MODEL(embeddings, features, attend.positions(), attend)


def make_rollout(
    tokens: Sequence[int], num_prompt: int, name: str = "p", index: int = 0, version: int = 0
) -> Rollout:
    response = tuple(tokens[num_prompt:])
    return Rollout(
        name, index, tuple(tokens[:num_prompt]), response, (0.0,) * len(response), "length", version
    )


def make_request(tokens: Sequence[int], name: str = "p", params: SamplingParams | None = None) -> Request:
    return Request(name, 0, tuple(tokens), params or SamplingParams())


def remember(drafter: LearnedDrafter, slot: int, features: Tensor, start: int = 0) -> None:
    drafter.remember([slot], [start], features[None, start:])


def context_of(rows: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None) -> DraftContext:
    params = params or [SamplingParams()] * len(rows)
    requests = [
        make_request(row[:2], f"p{i}", p) for i, (row, p) in enumerate(zip(rows, params, strict=True))
    ]
    return DraftContext(rows, requests, BatchParams.of(params), torch.device("cpu"))


class OracleTrees(LearnedDrafter):
    """Remembers as the learned drafter does, but proposes random trees that often hold what the target
    will say."""

    artificial: ArtificialDrafter

    def propose(self, context: DraftContext, strategy: Strategy, noise: DraftNoise) -> LearnedProposal:
        return LearnedProposal(self.artificial.propose(context, strategy, noise).tree)


def run_engine(
    tuner: StrategyTuner, requests: Sequence[Request], oracle: bool = False
) -> tuple[RolloutEngine, list[Finished]]:
    """Returns the engine and all that it finished, with what was captured."""
    engine = RolloutEngine(PackedTransformer(CONFIG, torch.float64), max_batch_size=3, tuner=tuner)
    engine.load_policy(dict(POLICY.named_parameters()))
    drafter = make_drafter(3, engine.target)
    if oracle:
        rollouts = [finished.rollout for finished in run_engine(FixedTuner(Strategy.OFF), requests)[1]]
        answers = {(r.problem_id, r.sample_index): r.token_ids for r in rollouts}
        drafter.__class__ = OracleTrees
        drafter.artificial = ArtificialDrafter("oracle", 0, answers)
    engine.load_drafter(drafter)
    engine.add(requests)
    ended: list[Finished] = []
    while not engine.is_idle:
        ended += engine.step(captures=True)
    return engine, ended


def make_requests(num: int = 8) -> list[Request]:
    rng = random.Random(4)
    prompts = [random_tokens(rng.randint(1, 9), seed) for seed in range(num)]
    limits = [
        SamplingParams(temperature=0.7, max_tokens=rng.randint(2, 45), stop_ids=(STOP,)) for _ in range(num)
    ]
    return [Request(f"p{i // 2}", i % 2, tuple(prompts[i // 2]), limits[i]) for i in range(num)]


def make_batch(lengths: Sequence[int] = (6, 11, 3), seed: int = 0) -> PackedBatch:
    total = sum(lengths)
    weight = torch.tensor([float(t >= 2) for n in lengths for t in range(1, n)])
    return PackedBatch(
        torch.tensor(random_tokens(total, seed)), randn(total, SIZE, seed=seed), tuple(lengths), weight
    )


def unpack(batch: PackedBatch) -> list[PackedBatch]:
    tokens, features = batch.token_ids_N.split(batch.lengths), batch.captured_NF.split(batch.lengths)
    weights = batch.weight_M.split([n - 1 for n in batch.lengths])
    return [PackedBatch(t, f, (len(t),), w) for t, f, w in zip(tokens, features, weights, strict=True)]


def ready_buffer(num: int = 4, length: int = 40, with_features: bool = True) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(10**6)
    for index in range(num):
        tokens = random_tokens(length, index)
        features = features_of(POLICY, tokens[:-1]) if with_features else None
        buffer.add(make_rollout(tokens, 5, index=index), features)
    return buffer


def make_spot(
    buffer: TrajectoryBuffer,
    target: PackedTransformer = TARGET,
    carry_longest: int = 2,
    max_passes: float = 1e9,
) -> SpotTrainer:
    trainer = DrafterTrainer(make_model(), target, HASS)
    return SpotTrainer(
        trainer, buffer, tokens_per_micro_step=48, carry_longest=carry_longest, max_passes=max_passes
    )
