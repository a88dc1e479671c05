"""LoRA on one rank and two (gloo): adapters of a sharded policy against those of a replicated one, in
float64 bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.forked import fork_ranks, run_ranks
from tests.unit.models.compared import config_of
from tests.unit.training.ranks.test_sharding import LLAMA, UNTIED, apart, assert_same_metrics
from tests.unit.training.update.test_policy import make_batch, shuffled
from tlt.base.config.schema import Config
from tlt.base.types import resolve_dtype
from tlt.engine.build.model import open_model
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import save_model
from tlt.models.lora import BaseOf, adapted
from tlt.models.new import new_transformer
from tlt.training.build.policy import build_policy_trainer
from tlt.training.ranks.sharding import FullTensors, full_tensor, local_rows
from tlt.training.ranks.world import World
from tlt.training.update.update import PolicyTrainer

QWEN3 = replace(LLAMA, architecture="qwen3")
ONCE = {"reduce_each_micro_batch": False}
KL = {"kl_coefficient": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "all matrices": {},
    "tied, two of them, rslora": {
        "shape": LLAMA,
        "lora": {"targets": ("v_proj", "down_proj"), "rslora": True},
    },
    "fewer rows than ranks": {"shape": replace(UNTIED, architecture="qwen2"), "lora": {"rank": 1}},
    "KL in the loss, minibatches": {"shape": QWEN3, "algorithm": {**KL, "minibatches": 2}},
    "KL in the reward, checkpointed": {
        "algorithm": {**KL, "name": "rloo", "epochs": 2},
        "parallel": {"checkpoint_activations": True},
    },
    "experts": {"shape": config_of("Qwen3-30B-A3B"), "lora": {"rank": 2}},
    "a rank without work": {"batch": {"num_samples": 2, "num_problems": 1}},
}

ALONE = {"all matrices": CASES["all matrices"]}
"""What a single rank is asked: its slices are whole tensors."""


def make_config(folder: Path, dtype: str = "float64", **case: Any) -> Config:
    sections = {
        "run": {"dtype": dtype, "seed": 5},
        "model": {"path": folder},
        "task": {"name": "t"},
        "lora": {"rank": 3, "alpha": 6.0, **case.get("lora", {})},
        "parallel": {**ONCE, **case.get("parallel", {})},
        "algorithm": {"tokens_per_micro_batch": 100, **case.get("algorithm", {})},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 1e9},
        "sampling": {"temperature": 0.8, "max_tokens": 40},
    }
    return Config.model_validate(sections)


def make_trainer(world: World, config: Config, is_sharded: bool) -> PolicyTrainer:
    model = open_model(Path(config.model.path), resolve_dtype(config.run.dtype))
    trainer = build_policy_trainer(config, model, world, is_sharded)
    for layer in adapted(trainer.model).values():
        parameter = layer.lora_B.weight
        start = torch.linspace(-0.1, 0.1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
        if isinstance(parameter, DTensor):
            parameter.to_local().detach().copy_(start[local_rows(parameter)])
        else:
            parameter.detach().copy_(start)
    return trainer


def updates(
    world: World, trainer: PolicyTrainer, steps: range = range(2), **batch: int
) -> list[dict[str, Any]]:
    """Metrics of updates, whose rollouts come to each rank in another order."""
    found = []
    for step in steps:
        rollouts, rewards = shuffled(make_batch(step, **batch), 10 + world.rank)
        found.append({**vars(trainer.update(rollouts, rewards, step)), "seconds": 0.0})
    return found


def values(model: Transformer, is_wanted: Callable[[Tensor], bool]) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().clone() for name, p in model.named_parameters() if is_wanted(p)}


def trained(model: Transformer) -> dict[str, Tensor]:
    return values(model, lambda p: p.requires_grad)


def frozen(model: Transformer) -> dict[str, Tensor]:
    return values(model, lambda p: not p.requires_grad)


def compare(world: World, config: Config, **batch: int) -> dict[str, Any]:
    made = [make_trainer(world, config, is_sharded) for is_sharded in (False, True)]
    start = trained(made[0].model)
    began = apart(trained(made[1].model), start)
    metrics = [updates(world, trainer, **batch) for trainer in made]
    replicated, sharded = (trainer.model for trainer in made)
    base = dict(open_model(Path(config.model.path), torch.float64).tensors)
    return {
        "began": began,
        "weights": apart(trained(sharded), trained(replicated)),
        "published": apart(
            dict(FullTensors(sharded)),
            {name: tensor.detach() for name, tensor in FullTensors(replicated).items()},
        ),
        "frozen": apart(frozen(sharded), {name: base[name] for name in frozen(sharded)}),
        "moved": apart(trained(replicated), start),
        "expected": metrics[0],
        "metrics": metrics[1],
        "bases": [trainer.initial_digest for trainer in made],
        "references": [isinstance(trainer.reference, BaseOf | None) for trainer in made],
    }


def resumed(world: World, config: Config) -> float:
    """Two updates in slices, all that trains made whole and taken up by a replicated trainer, one update:
    how far from three in one go."""
    trainer = make_trainer(world, config, is_sharded=True)
    updates(world, trainer, range(2))
    kept = {name: full_tensor(tensor).detach().clone() for name, tensor in trainer.tensors().items()}
    updates(world, trainer, range(2, 3))
    again = make_trainer(world, config, is_sharded=False)
    with torch.no_grad():
        for name, tensor in again.tensors().items():
            tensor.copy_(kept[name])
    updates(world, again, range(2, 3))
    return apart(trained(again.model), trained(trainer.model))


def in_bfloat16(world: World, folder: Path, param_dtype: str | None) -> dict[str, Any]:
    config = make_config(
        folder, "bfloat16", lora={"base_dtype": "bfloat16"}, parallel={"param_dtype": param_dtype}
    )
    made = [make_trainer(world, config, is_sharded) for is_sharded in (False, True)]
    start = trained(made[0].model)
    for trainer in made:
        updates(world, trainer, range(1))
    moves = [
        torch.cat([(t - start[name]).flatten() for name, t in trained(trainer.model).items()])
        for trainer in made
    ]
    return {
        "cosine": float(torch.cosine_similarity(*moves, dim=0)),
        "frozen": {str(tensor.dtype) for tensor in frozen(made[1].model).values()},
        "trained": {str(tensor.dtype) for tensor in made[1].tensors().values()},
    }


def rank_main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    world = World(rank, num_ranks, rank, torch.device("cpu"), store, dist.group.WORLD)
    results: dict[str, Any] = {}
    for number, (name, case) in enumerate(CASES.items() if num_ranks > 1 else ALONE.items()):
        save(folder / str(number), case.get("shape", UNTIED), rank)
        results[name] = compare(world, make_config(folder / str(number), **case), **case.get("batch", {}))
    results["resumed"] = resumed(world, make_config(folder / "0"))
    results["bf16"] = [in_bfloat16(world, folder / "0", dtype) for dtype in (None, "bfloat16")]
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()


def save(folder: Path, shape: ModelConfig, rank: int) -> None:
    if rank == 0:
        torch.manual_seed(0)
        policy = new_transformer(shape, torch.float64)
        for parameter in policy.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        tensors = policy.state_dict()
        save_model(folder, shape, tensors, dtype=torch.float64, source=None, extra={"eos_token_id": 7})
    dist.barrier()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, folder, 1, 2)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def ranks_results(request: pytest.FixtureRequest, played: Path) -> list[dict[str, Any]]:
    return [torch.load(played / str(request.param) / f"rank{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize(
    ("ranks_results", "name"),
    [(num, name) for num, names in ((1, ALONE), (2, CASES)) for name in names],
    indirect=["ranks_results"],
)
def test_adapters_of_a_sharded_policy_equal_those_of_a_replicated_one_to_the_last_bit(
    ranks_results: list[dict[str, Any]], name: str
) -> None:
    for results in ranks_results:
        found = results[name]
        assert (found["began"], found["weights"], found["published"], found["frozen"]) == (0, 0, 0, 0)
        assert found["moved"] > 1e-4
        assert found["references"] == [True, True]
        assert found["bases"][0] == found["bases"][1] != ""
        assert_same_metrics(found, tolerance=0)


def test_an_update_goes_on_replicated_where_it_was_sharded(ranks_results: list[dict[str, Any]]) -> None:
    assert [results["resumed"] for results in ranks_results] == [0] * len(ranks_results)


def test_a_base_in_bfloat16_is_kept_in_it_and_adapters_and_moments_in_float32(
    ranks_results: list[dict[str, Any]],
) -> None:
    for results in ranks_results:
        for found in results["bf16"]:
            assert (found["frozen"], found["trained"]) == ({"torch.bfloat16"}, {"torch.float32"})
            assert found["cosine"] > 1 - 1e-6


if __name__ == "__main__":
    fork_ranks(rank_main)
