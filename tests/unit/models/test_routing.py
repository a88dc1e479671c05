"""Routes of experts: recorded by the engine, compared and replayed by the update, against transformers' routers
and, for replay, their formulas written out once more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.cases import cases
from tests.lossless.helpers import ArtificialDrafter, Switching, by_id
from tests.refused import refused
from tests.unit.models.compared import TREES, config_of, make_requests
from tests.unit.models.families import families, reference, shrunk
from tests.unit.models.test_lora_experts import EXPERTS
from tests.unit.training.update.test_policy import OPTIMIZER
from tlt.apps.run.start import preflight
from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.load import load_config
from tlt.base.config.sampling import SamplingSection
from tlt.base.types import Reward, Rollout, Turns, id_of
from tlt.engine import sequence
from tlt.engine.own.engine import RolloutEngine
from tlt.models.any import AnyTarget, AnyTransformer
from tlt.models.hf.families import parse_any
from tlt.models.routing import routers_of
from tlt.training.update.gradients import gradients_of
from tlt.training.update.logprobs import response_logprobs
from tlt.training.update.micro_batches import Experience
from tlt.training.update.routes import Routes
from tlt.training.update.update import PolicyTrainer


def make_engine(name: str, routes: sequence.Routes) -> RolloutEngine:
    target = AnyTarget(config_of(name), torch.float64)
    engine = RolloutEngine(target, max_batch_size=4, tuner=Switching(TREES, seed=1), routes=routes)
    stored = reference(name).state_dict()
    engine.load_policy({path: stored[path] for path in target.model.state_dict()})
    return engine


def make_policy(name: str, checkpoints_activations: bool = False) -> AnyTransformer:
    policy = AnyTransformer(config_of(name), torch.float64, checkpoints_activations)
    policy.load_state_dict({path: reference(name).state_dict()[path] for path in policy.state_dict()})
    return policy


@torch.no_grad()
def their_routes(name: str, tokens: list[int]) -> Tensor:
    """[T, R, K], rising, by transformers' own routers over the whole text."""
    model, found = reference(name), []
    hooks = [
        router.register_forward_hook(lambda router, inputs, outputs: found.append(outputs[2]))
        for router in routers_of([*model.model.layers])
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values


def routes_of(rollout: Rollout, shape: tuple[int, int]) -> Tensor:
    assert rollout.routes is not None
    return (
        torch.frombuffer(bytearray(rollout.routes), dtype=torch.uint8).view(-1, *shape).long().sort(-1).values
    )


@pytest.mark.parametrize("name", families(EXPERTS, usual=["Qwen3-30B-A3B", "gpt-oss-20b"]))
def test_the_engine_records_the_experts_of_every_token_that_it_reads(name: str) -> None:
    off = by_id(make_engine(name, "none").generate(make_requests()))
    assert all(rollout.routes is None for rollout in off.values())
    engine = make_engine(name, "all")
    engine.load_drafter(ArtificialDrafter("oracle", answers={key: r.token_ids for key, r in off.items()}))
    for rollout in engine.generate(make_requests()):
        assert rollout.token_ids == off[rollout.problem_id, rollout.sample_index].token_ids
        wanted = their_routes(name, [*rollout.prompt_ids, *rollout.token_ids[:-1]])
        assert torch.equal(routes_of(rollout, engine.target.model.route_shape), wanted)
    assert engine.stats.accept_length > 1.5
    assert not engine.target.records_routes, "others, such as a drafter's training, call it too"


def test_a_response_that_is_read_again_has_all_routes_and_a_sample_has_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence, "ROUTED_TOKENS", 7)
    name = "Qwen3-30B-A3B"
    for routes in ("all", "first"):
        engine = make_engine(name, routes)
        engine.add(make_requests())
        ended = [finished.rollout for _ in range(5) for finished in engine.step()]
        moved = engine.withdraw([0, 1])
        assert all((request.routes is None) == (routes == "first") for request in moved)
        engine.add(moved)
        while not engine.is_idle:
            ended += [finished.rollout for finished in engine.step()]
        assert len(ended) == 6
        for rollout in ended:
            wanted = their_routes(name, [*rollout.prompt_ids, *rollout.token_ids[:-1]])
            if routes == "first":
                if id_of(rollout) in map(id_of, moved):
                    assert rollout.routes is None, "another engine drew its first tokens"
                    continue
                wanted = wanted[len(rollout.prompt_ids) :][:7]
            assert torch.equal(routes_of(rollout, (4, 2)), wanted)


def test_tokens_keep_the_routes_that_they_were_drawn_with_where_another_engine_goes_on() -> None:
    engine = make_engine("Qwen3-30B-A3B", "all")
    engine.add(make_requests())
    for _ in range(5):
        engine.step()
    moved = engine.withdraw([0, 1])
    others = [
        replace(request, routes=bytes(7 - route for route in request.routes or b"")) for request in moved
    ]
    drawn = {id_of(request): request.routes for request in others}
    engine.add(others)
    while not engine.is_idle:
        for rollout in (finished.rollout for finished in engine.step()):
            routes = drawn.get(id_of(rollout))
            if routes is not None and rollout.routes is not None:
                rows = len(rollout.prompt_ids) + len(rollout.token_ids) - 1
                assert rollout.routes.startswith(routes)
                assert len(rollout.routes) == 4 * 2 * rows
                del drawn[id_of(rollout)]
    assert not drawn


@pytest.mark.parametrize("parks", [True, False])
def test_a_later_turn_keeps_the_routes_of_earlier_ones(parks: bool) -> None:
    """Also of tokens that are read again: those of the first turn are swapped here, and stay so."""
    engine, said = make_engine("Qwen3-30B-A3B", "all"), (3, 5, 7)
    engine.parks = parks
    ended = {}
    asked = make_requests()
    first = {id_of(one): replace(one, params=replace(one.params, max_tokens=9)) for one in asked}
    for rollout in [*engine.generate(first.values())]:
        swapped = bytes(7 - route for route in rollout.routes or b"")
        turns = Turns(given=((len(rollout.token_ids), len(rollout.token_ids) + len(said)),))
        request = next(one for one in asked if id_of(one) == id_of(rollout))
        ended[id_of(rollout)] = replace(
            request,
            token_ids=rollout.token_ids + said,
            logprobs=rollout.logprobs + (0.0,) * len(said),
            routes=swapped,
            turns=turns,
        )
    for rollout in engine.generate(ended.values()):
        before = ended[id_of(rollout)].routes or b""
        wanted = their_routes("Qwen3-30B-A3B", [*rollout.prompt_ids, *rollout.token_ids[:-1]])
        assert (rollout.routes or b"").startswith(before)
        assert torch.equal(routes_of(rollout, (4, 2))[len(before) // 8 :], wanted[len(before) // 8 :])


# ── the update ──────────────────────────────────────────────────────────────────────────────────────────────


def scores_by_formula(name: str, router: Any, hidden_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    logits_NX = hidden_NE.to(router.weight.dtype) @ router.weight.T
    if name == "gpt-oss-20b":
        return (logits_NX + router.bias).gather(1, chosen_NK).softmax(1)
    if name == "GLM-4.5-Air":
        weights_NK = logits_NX.sigmoid().gather(1, chosen_NK)
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True) if router.norm_topk_prob else weights_NK
        return weights_NK * router.routed_scaling_factor
    weights_NK = logits_NX.softmax(1).gather(1, chosen_NK)
    if name == "Mixtral-8x7B" or router.norm_topk_prob:
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
    return weights_NK


@contextmanager
def routed(name: str, model: PreTrainedModel, routes_TRK: Tensor) -> Iterator[None]:
    routers = routers_of([*model.model.layers])

    def forward_of(number: int, router: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            chosen_NK = routes_TRK[:, number]
            hidden_NE = hidden.reshape(-1, hidden.shape[-1])
            scores_NK = scores_by_formula(name, router, hidden_NE, chosen_NK)
            return scores_NK, scores_NK, chosen_NK

        return forward

    for number, router in enumerate(routers):
        router.forward = forward_of(number, router)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def make_rollouts(name: str) -> list[Rollout]:
    """Two families, with random routes of all tokens; of one response none."""
    shape, generator = make_policy(name).route_shape, torch.Generator().manual_seed(5)
    found = []
    for problem, (num_prompt, lengths) in enumerate([(12, (9, 1, 20)), (1, (15, 30))]):
        prompt = torch.randint(4, 300, (num_prompt,), generator=generator).tolist()
        of_prompt = torch.rand(num_prompt, shape[0], 8, generator=generator).topk(shape[1]).indices
        for sample, length in enumerate(lengths):
            tokens = torch.randint(4, 300, (length,), generator=generator).tolist()
            own = torch.rand(length - 1, shape[0], 8, generator=generator).topk(shape[1]).indices
            routes = torch.cat([of_prompt, own]).to(torch.uint8).numpy().tobytes()
            given = None if (problem, sample) == (1, 1) else routes
            logprobs = (-1.0,) * length
            found.append(
                Rollout(f"p{problem}", sample, tuple(prompt), tuple(tokens), logprobs, "stop", 0, None, given)
            )
    return found


@pytest.mark.parametrize("name", families(EXPERTS, usual=["Qwen3-30B-A3B", "gpt-oss-20b", "GLM-4.5-Air"]))
def test_the_update_takes_the_experts_that_the_engine_took(name: str) -> None:
    policy, rollouts, model = (
        make_policy(name, checkpoints_activations=True),
        make_rollouts(name),
        reference(name),
    )
    batch = [Experience(rollout, (1.0,) * len(rollout.token_ids), True) for rollout in rollouts]
    routes = Routes(policy, torch.device("cpu"))
    found_T, _ = response_logprobs(policy, batch, 1.0, routes)
    weights_T = torch.linspace(-1, 1, len(found_T), dtype=torch.float64)
    (found_T * weights_T).sum().backward()
    wanted, without = [], []
    for rollout in rollouts:
        tokens, first = [*rollout.prompt_ids, *rollout.token_ids[:-1]], len(rollout.prompt_ids) - 1
        own = torch.tensor(rollout.token_ids)[:, None]

        def logprobs() -> Tensor:
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, first:]  # noqa: B023
            return logits.log_softmax(-1).gather(1, own)[:, 0]  # noqa: B023

        without.append(logprobs().detach())
        if rollout.routes is None:
            wanted.append(logprobs())
        else:
            rows = torch.frombuffer(bytearray(rollout.routes), dtype=torch.uint8).view(
                -1, *policy.route_shape
            )
            with routed(name, model, rows.long()):
                wanted.append(logprobs())
    tolerance = 1e-5  # routers compute in float32
    assert (found_T - torch.cat(wanted)).abs().max() < tolerance
    assert (found_T - torch.cat(without)).abs().max() > 0.1, "other experts compute something else"
    model.zero_grad()
    (torch.cat(wanted) * weights_T).sum().backward()
    gradients = dict(model.named_parameters())
    for path, parameter in policy.named_parameters():
        if (gradient := gradients[path].grad) is not None and gradient.norm() > 1e-9:
            assert parameter.grad is not None, path
            assert (parameter.grad - gradient).norm() / gradient.norm() < tolerance, path
    model.zero_grad()


def make_trainer(policy: AnyTransformer, minibatches: int = 1) -> PolicyTrainer:
    section = AlgorithmSection(tokens_per_micro_batch=100, minibatches=minibatches)
    sampling = SamplingSection(temperature=1.0, max_tokens=64)
    return PolicyTrainer(policy, section, OPTIMIZER, sampling, 10, gradients_of(policy, None))


@pytest.mark.parametrize("routes", cases(["all", "first"], usual=["first"]))
def test_metrics_tell_the_loads_of_experts_and_that_engine_and_update_take_the_same(
    routes: sequence.Routes,
) -> None:
    name = "Qwen3-30B-A3B"
    rollouts = list(make_engine(name, routes).generate(make_requests()))
    rewards = [Reward(float(i % 2), True) for i in range(len(rollouts))]
    in_two = make_trainer(make_policy(name), minibatches=2).update(rollouts, rewards, 0)
    assert in_two.router_gap == 0, "of the policy that sampled, not of the one that moved since"
    metrics = make_trainer(make_policy(name)).update(rollouts, rewards, 0)
    assert metrics.router_gap == 0
    loads_RX = torch.zeros(4, 8, dtype=torch.float64)
    for rollout in rollouts:
        own = their_routes(name, [*rollout.prompt_ids, *rollout.token_ids[:-1]])[len(rollout.prompt_ids) :]
        for layer in range(4):
            loads_RX[layer] += torch.bincount(own[:, layer].flatten(), minlength=8)
    shares_RX = loads_RX / loads_RX.sum(1, keepdim=True)
    assert metrics.router_load_max == pytest.approx(float((8 * shares_RX.max(1).values).mean()))
    entropy = -(shares_RX * shares_RX.clamp_min(1e-300).log()).sum(1).mean() / math.log(8)
    assert metrics.router_load_entropy == pytest.approx(float(entropy))
    swapped = [replace(r, routes=bytes(7 - route for route in r.routes or b"")) for r in rollouts]
    assert make_trainer(make_policy(name)).update(swapped, rewards, 0).router_gap > 0.3
    unknown = [replace(rollout, routes=None) for rollout in rollouts]
    assert math.isnan(make_trainer(make_policy(name)).update(unknown, rewards, 0).router_gap)


def test_replay_is_for_experts_in_our_own_engine() -> None:
    with refused(
        "rollout.router_replay: is true, but .*/countdown/base has no experts to route to; set it to false"
    ):
        preflight(load_config("countdown", {"rollout.router_replay": True}))
    with refused("rollout.router_replay is true, but engine vllm tells no routes: set it to false, or"):
        load_config("countdown", {"rollout.router_replay": True, "rollout.engine": "vllm"})
    with refused("config.json: num_experts is 512; routes are kept for 256 experts of a layer at most"):
        parse_any(shrunk("Qwen3-30B-A3B") | {"num_experts": 512}, "config.json")
