"""What a published configuration's engine, update, adapters and files give beside transformers' own model, as
numbers: the tests bound them, benchmarks/families.py prints them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.lossless.helpers import ArtificialDrafter, Switching, by_id, random_drafter
from tests.unit.models.families import VOCAB, logprobs, reference, shrunk
from tests.unit.models.test_lora import make_config
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.forms import pack_drafter
from tlt.engine.build.model import Model
from tlt.engine.own.engine import RolloutEngine
from tlt.models.any import AnyTarget, AnyTransformer
from tlt.models.any_config import AnyConfig
from tlt.models.attention import PackedCausal, SharedPrompts
from tlt.models.decoder import Policy
from tlt.models.hf.families import load_model_config, parse_any
from tlt.models.hf.weights import StoredTensors, read_safetensors, save_model
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.training.build.policy import build_policy, policy_on_meta
from tlt.training.ranks.sharding import FullTensors

TREES = [Strategy.parse(text, "artificial") for text in ("4x1x4", "4x3x10", "off")]


def config_of(name: str) -> AnyConfig:
    return parse_any(shrunk(name), "config.json")


def make_engine(name: str, dtype: torch.dtype) -> RolloutEngine:
    target = AnyTarget(config_of(name), dtype)
    engine = RolloutEngine(target, max_batch_size=4, tuner=Switching(TREES, seed=1))
    stored = reference(name, dtype).state_dict()
    engine.load_policy({path: stored[path] for path in target.model.state_dict()})
    return engine


def make_requests() -> list[Request]:
    """Positions beyond a window (16) and the original positions of a stretched rope (64)."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(4, VOCAB) for _ in range(length)) for length in (3, 21, 70)]
    params = (SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(max_tokens=40))
    return [Request(f"p{i}", s, prompts[i], params[s]) for i in range(3) for s in range(2)]


@dataclass(frozen=True)
class Generated:
    """logprob_gap: to transformers' of the same tokens, at most.
    greedy_gap: how far a greedy token lies below transformers' best, at most.
    num_other: responses whose tokens with drafts are others than without.
    """

    logprob_gap: float
    greedy_gap: float
    num_other: int
    num_responses: int
    accept_length: float


def generated(name: str, dtype: torch.dtype) -> Generated:
    """Trees of changing shapes, drafted by one who knows the responses."""
    engine, model = make_engine(name, dtype), reference(name)
    off = by_id(make_engine(name, dtype).generate(make_requests()))
    engine.load_drafter(ArtificialDrafter("oracle", answers={k: r.token_ids for k, r in off.items()}))
    gaps, greedy, num_other = [0.0], [0.0], 0
    for rollout in engine.generate(make_requests()):
        text = [*rollout.prompt_ids, *rollout.token_ids]
        wanted_TV = logprobs(model, text)[len(rollout.prompt_ids) - 1 : -1]
        wanted_T = wanted_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        found_T = torch.tensor(rollout.logprobs, dtype=torch.float64)
        gaps.append((found_T - wanted_T).abs().max().item())
        if rollout.sample_index == 0:
            greedy.append((wanted_TV.max(1).values - wanted_T).max().item())
        num_other += rollout.token_ids != off[rollout.problem_id, rollout.sample_index].token_ids
    assert engine.stats.accept_length is not None
    return Generated(max(gaps), max(greedy), num_other, len(off), engine.stats.accept_length)


def num_other_by_eagle(name: str) -> int:
    """Returns the responses whose tokens differ with an EAGLE drafter of random weights, in float64."""
    engine = make_engine(name, torch.float64)
    off = by_id(make_engine(name, torch.float64).generate(make_requests()))
    model = random_drafter(engine.config, "learned")
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    engine.tuner = FixedTuner(Strategy.parse("learned:4x2x6"))
    engine.load_drafter(LearnedDrafter(packed, engine.target, 4))
    found = by_id(engine.generate(make_requests()))
    assert engine.stats.num_verifications > 0
    return sum(found[key].token_ids != off[key].token_ids for key in off)


def trainable(name: str, dtype: torch.dtype = torch.float64) -> AnyTransformer:
    own = AnyTransformer(config_of(name), dtype, checkpoints_activations=True)
    stored = reference(name).state_dict()
    own.load_state_dict({path: stored[path] for path in own.state_dict()})
    return own


def make_policy(name: str, **lora: Any) -> Policy:
    """Of random weights, whose adapters do something, too."""
    shape, config = config_of(name), make_config(**lora)
    stored = reference(name).state_dict()
    tensors = {path: stored[path] for path in AnyTransformer(shape).state_dict()}
    model = Model(Path(), shape, None, (), tensors)
    policy = build_policy(policy_on_meta(config, shape), model, torch.device("cpu"), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in policy.named_parameters():
            if ".lora_B." in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def logits_of(model: Any) -> Tensor:
    attend = PackedCausal(model.config, [42] if model.config.is_hybrid else [30, 12])
    tokens = torch.randint(4, VOCAB, (42,), generator=torch.Generator().manual_seed(0))
    features = model(tokens, attend.positions(), attend)
    logits: Tensor = model.logits(features)
    return logits


def logprob_gap(name: str, dtype: torch.dtype) -> float:
    """Returns how far the update's log-probabilities of a hybrid's sequence are from transformers', at most."""
    own = trainable(name, dtype)
    tokens = torch.randint(4, VOCAB, (110,), generator=torch.Generator().manual_seed(0))
    attend = SharedPrompts(own.config, [(70, [40])])
    with torch.no_grad():
        found_NV = own.logits(own(tokens, attend.positions(), attend)).double().log_softmax(-1)
    gap_NV = (found_NV - logprobs(reference(name), tokens.tolist())).abs()
    return gap_NV[69:-1].gather(1, tokens[70:, None]).max().item()


def adapter_gap(name: str) -> float:
    """Returns how far the engine's logits, with the adapters of every matrix merged, are from the update's."""
    policy = make_policy(name)
    target = AnyTarget(config_of(name), torch.float64)
    target.load(dict(FullTensors(policy, torch.float64)), 1)
    with torch.no_grad():
        return (logits_of(target.model) - logits_of(policy)).abs().max().item()


def gradient_error(name: str) -> float:
    """Returns ‖found - wanted‖ / ‖wanted‖ of the worst tensor: packed sequences with a shared prompt, or a hybrid's
    one after the other, against transformers' gradient of one sequence at a time."""
    config, model, own = config_of(name), reference(name), trainable(name)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, VOCAB, (20,), generator=generator)
    responses = [torch.randint(4, VOCAB, (length,), generator=generator) for length in (30, 50)]
    weights = torch.linspace(-1, 1, 100, dtype=torch.float64)
    for places in ((0,), (1,)) if config.is_hybrid else ((0, 1),):
        attend = SharedPrompts(config, [(20, [len(responses[i]) for i in places])])
        tokens = torch.cat([prompt, *(responses[i] for i in places)])
        logprobs_NV = own.logits(own(tokens, attend.positions(), attend)).log_softmax(-1)
        chosen_N, begin = logprobs_NV.gather(1, tokens.roll(-1)[:, None])[:, 0], 20
        for i in places:
            length, first = len(responses[i]), (20, 50)[i]
            chosen = chosen_N[begin : begin + length - 1] * weights[first : first + length - 1]
            chosen.sum().backward(retain_graph=True)
            begin += length
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for response, start in zip(responses, (20, 50), strict=True):
        both = torch.cat([prompt, response])
        found = model(both[None], use_cache=False).logits[0].log_softmax(-1)
        chosen = found[20:-1].gather(1, response[1:, None])[:, 0]
        loss = loss + (chosen * weights[start : start + len(response) - 1]).sum()
    loss.backward()
    wanted = dict(model.named_parameters())
    errors = [0.0]
    for path, parameter in own.named_parameters():
        if (gradient := wanted[path].grad) is not None:
            assert parameter.grad is not None
            errors.append(((parameter.grad - gradient).norm() / gradient.norm()).item())
    return max(errors)


def differing_tensors_when_saved_again(name: str, folder: Path) -> list[str]:
    """Saved by transformers, read, and written again; an error where the configuration is another."""
    model = reference(name, torch.float32)
    model.save_pretrained(folder / "given")
    config = load_model_config(folder / "given", "transformers")
    stored = StoredTensors(folder / "given", config)
    assert all(torch.equal(stored[path], model.state_dict()[path]) for path in stored)
    save_model(folder / "saved", config, stored, dtype=torch.float32, source=folder / "given")
    given, saved = (read_safetensors(folder / kind) for kind in ("given", "saved"))
    assert load_model_config(folder / "saved", "transformers") == config
    names = given.keys() | saved.keys()
    return sorted(n for n in names if n not in given or n not in saved or not torch.equal(given[n], saved[n]))
