"""Ten thousand sequences, drafted for by every drafter, are token for token what the law written anew says.

    the engine in float64, with drafts ─▶ a sequence
    transformers in float64            ─▶ the logits at each of its places, by one plain forward
    examples/one_file.py               ─▶ the noise of its key there
    test_law.py, in plain Python       ─▶ the probabilities there: temperature, top-k, top-p, min-p
                                          is each token the argmax of log p + noise?

If each token is the one that the law draws after the tokens before it, the sequence is the law's. The drafters are
trained for some seconds, so that many drafts are accepted and many are not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples import one_file
from tests.lossless import helpers
from tests.lossless.faults import PlantedFault, Verify
from tests.lossless.helpers import (
    STOP,
    VOCAB,
    Switching,
    by_id,
    make_engine,
    make_policy,
    make_requests,
    pack,
)
from tests.lossless.test_law import probabilities
from tests.reference_kinds import KINDS, reference_of
from tests.unit.models.transformer_parts import in_float64
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, SamplingParams, Verdict, id_of
from tlt.drafter.drafting.retrieval.references import References
from tlt.drafter.forms import new_model
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import BlockOptions, drafter_shape
from tlt.drafter.training.losses import DEFAULT_PRESET, PRESETS
from tlt.drafter.training.offline import OfflineSettings, train_offline
from tlt.engine.own import tree_forward
from tlt.engine.own.engine import RolloutEngine
from tlt.engine.stats import EngineStats
from tlt.models.decoder import Transformer
from tlt.speculation.law.params import Law
from tlt.speculation.law.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONFIG = replace(helpers.CONFIG, num_layers=4, tie_embeddings=False)
"""The layers that eagle3 needs: it reads three."""


@torch.no_grad()
def make_learnable_policy() -> Transformer:
    """Returns a policy that mostly repeats four tokens in turn: drafters soon learn it, and retrieval finds what it has
    said before. The rest of the text counts little, but its share shows in the log-probabilities."""
    policy = make_policy(config=CONFIG)
    for name, parameter in policy.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.02)
    before_V = [*torch.arange(VOCAB - 1).view(-1, 4).roll(1, 1).flatten().tolist(), VOCAB - 1]
    assert policy.lm_head is not None
    policy.lm_head.weight.copy_(1.5 * F.normalize(policy.model.embed_tokens.weight[before_V], dim=-1))
    return policy


POLICY = make_learnable_policy()
REFEREE = in_float64(helpers.to_transformers(POLICY))
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.4),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02),
)
LEARNED = ("eagle", "eagle3", "dflash", "dspark")
FORMS = (*LEARNED, "retrieval", "references")
BATCH_SIZES = (1, 2, 3, 5, 8, 11, 16)


CHAINS, TREES = ("1x1x1", "4x1x4", "7x1x7"), ("1x4x4", "3x2x6", "4x3x12")
SETTINGS = (CHAINS, TREES, (*CHAINS, *TREES, "off", "hybrid:6x1x6"))
"""Arms, without the drafter's name, which follows from the form."""
NUM_SEQUENCES = math.ceil(10_000 / (len(FORMS) * len(SETTINGS) * len(BATCH_SIZES)))
"""Of each form, setting and batch size. More than a batch holds, and of 1 to 24 tokens: they begin and end at
different times."""


@cache
def trained(form: str) -> DraftModel:
    """Returns a drafter that has learned from the policy's own responses."""
    requests = make_requests(num_problems=50, num_samples=4, seed=10_000, params=PARAMS[1:4])
    rollouts = list(make_engine(POLICY, max_batch_size=50).generate(requests))
    shape = drafter_shape(CONFIG, form, block=BlockOptions(2, 5))  # type: ignore[arg-type]  # a form's name
    model = new_model(shape).initialize(2)
    settings = OfflineSettings(epochs=10.0, learning_rate=5e-3, tokens_per_step=512, seed=0)
    preset = PRESETS[DEFAULT_PRESET[shape.method]]
    train_offline(model, pack(POLICY, torch.float32), preset, rollouts, settings, lambda share, loss: None)
    return model


def arms_of(form: str, setting: Sequence[str]) -> list[Strategy]:
    if form == "references":
        return [Strategy.parse(arm) for arm in ("ahead:3x1x3", "ahead:24x1x24", "ahead+learned:5x1x5", "off")]
    arms = [Strategy.parse(arm, "ngram" if form == "retrieval" else "learned") for arm in setting]
    return [arm for arm in arms if arm.drafter != "hybrid" or form in LEARNED]


def engine_of(
    form: str, setting: Sequence[str], size: int, requests: Sequence[Request], seed: int
) -> RolloutEngine:
    tuner = Switching(arms_of(form, setting), seed)
    drafter = {"retrieval": "ngram", "references": "learned"}.get(form) or trained(form)
    engine = make_engine(POLICY, tuner, drafter, max_batch_size=size)
    if form == "references":
        helpers.use_references(engine, references_for(requests, random.Random(seed)), size)
    return engine


def references_for(requests: Sequence[Request], rng: random.Random) -> References:
    """Returns references of every kind: right ones, wrong ones, some that part on the way."""
    found, references = by_id(make_engine(POLICY, max_batch_size=16).generate(requests)), References(None)
    other = found[id_of(requests[0])].token_ids
    for number, request in enumerate(requests):
        right = found[id_of(request)].token_ids
        reference = reference_of(KINDS[number % len(KINDS)], right, other, rng, range(VOCAB))
        if reference is not None:
            references.keep(request.noise_key, reference)
    return references


# ── the law written anew ────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def law_says(request: Request, token_ids: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Returns the token that the law draws at each place of a response, after the response's tokens before it; and
    the log-probabilities of the response's own tokens."""
    start, num, params = len(request.prompt_ids), len(token_ids), request.params
    ids = torch.tensor([[*request.prompt_ids, *token_ids[:-1]]])
    logits_TV = REFEREE(ids, use_cache=False).logits[0, start - 1 :].numpy()
    key = one_file.noise_key(
        params.seed, request.purpose, request.policy_step, request.problem_id, request.sample_index
    )
    positions_1T = torch.arange(start, start + num)[None]
    noise_TV = one_file.gumbel_noise(torch.tensor([key]), positions_1T, VOCAB)[0].numpy()
    with np.errstate(divide="ignore"):
        log_p_TV = np.log([probabilities(row, params) for row in logits_TV.tolist()])
    scaled_TV = logits_TV / (params.temperature or 1.0)
    chosen_T = scaled_TV[np.arange(num), token_ids]
    return (log_p_TV + noise_TV).argmax(-1).tolist(), chosen_T - np.log(np.exp(scaled_TV).sum(-1))


def faults_of(request: Request, rollout: Rollout) -> Iterator[str]:
    """Yields what is not the law's in a response."""
    token_ids, most = rollout.token_ids, request.params.max_tokens
    lawful, logprobs_T = law_says(request, token_ids)
    pairs = zip(token_ids, lawful, strict=True)
    if differ := [place for place, (own, law) in enumerate(pairs) if own != law]:
        yield f"{id_of(request)}: token {differ[0]} is {token_ids[differ[0]]}, the law's is {lawful[differ[0]]}"
    if np.abs(logprobs_T - rollout.logprobs).max() > 1e-9:
        yield f"{id_of(request)}: log-probabilities"
    ends = [i for i, token in enumerate(lawful, 1) if token == STOP]
    expected = (ends[0], "stop") if ends else (most, "length")
    if (len(token_ids), rollout.finish_reason) != expected:
        yield f"{id_of(request)}: its end"


def judge(engine: RolloutEngine, requests: Sequence[Request]) -> list[str]:
    """Returns all faults of an engine's responses to the requests."""
    rollouts = by_id(engine.generate(requests))
    assert len(rollouts) == len(requests)
    return [fault for request in requests for fault in faults_of(request, rollouts[id_of(request)])]


def requests_for(seed: int) -> list[Request]:
    """Returns requests of keys of their own, four to a prompt."""
    num_problems = math.ceil(NUM_SEQUENCES / 4)
    return make_requests(num_problems, 4, seed, PARAMS, longest=24)[:NUM_SEQUENCES]


@pytest.mark.parametrize("form", FORMS)
def test_every_token_end_and_logprob_is_the_laws(form: str) -> None:
    faults, stats, num_tokens = [], EngineStats(), 0
    runs = list(product(SETTINGS, BATCH_SIZES))
    for number, (setting, size) in enumerate(runs, len(runs) * FORMS.index(form)):
        requests = requests_for(number)
        engine = engine_of(form, setting, size, requests, number)
        faults += judge(engine, requests)
        stats.add(engine.stats)
        num_tokens += engine.stats.num_tokens
    assert faults == []
    assert stats.accept_length is not None
    num = len(runs) * NUM_SEQUENCES
    print(f"{form}: {num} sequences of {num_tokens} tokens, accept length {stats.accept_length:.2f}")
    assert stats.accept_length > 1.3, "hardly a draft is accepted: this shows nothing"


# ── the referee sees faults ─────────────────────────────────────────────────────────────────────────────────


class NoiseOfTheWrongPlace:
    """Draws with the noise of the next position after a draft was rejected."""

    def __init__(self) -> None:
        self.was_rejected: set[Any] = set()

    def __call__(self, tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
        keys = [tuple(key) for key in law.keys_R4.tolist()]
        shift_R = torch.tensor([int(key in self.was_rejected) for key in keys])
        verdicts = verify(tree, logits_BNV, law._replace(positions_R=law.positions_R + shift_R))
        by_row = zip(keys[:: tree.num_nodes], verdicts, strict=True)
        self.was_rejected = {key for key, one in by_row if one.rejected is not None}
        return verdicts


def tempered(tree: DraftTree, logits_BNV: Tensor, law: Law) -> list[Verdict]:
    """Draws at drafted places with the temperature that drafts are ranked with."""
    return verify(tree, logits_BNV / 0.9 if tree.num_nodes > 1 else logits_BNV, law)


FAULTS: list[Callable[[], Verify]] = [NoiseOfTheWrongPlace, lambda: tempered, lambda: PlantedFault(0.5)]


@pytest.mark.parametrize("form", ["eagle", "dspark", "retrieval"])
@pytest.mark.parametrize(
    "fault", FAULTS, ids=["noise of the wrong place", "tempered", "one accepted too many"]
)
def test_a_planted_fault_is_seen(
    form: str, fault: Callable[[], Verify], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_for(0)
    engine = engine_of(form, SETTINGS[0], 5, requests, 0)
    monkeypatch.setattr(tree_forward, "verify", fault())
    assert any("the law's is" in one for one in judge(engine, requests))
