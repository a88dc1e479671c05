"""A sharded update against the replicated one, on one rank and two (gloo). Float64, two layers, vocabulary
61: while nothing is clipped, and gradients are reduced once, every weight is equal to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.forked import fork_ranks, run_ranks
from tests.unit.training.update.test_policy import SAMPLING, make_batch, shuffled
from tlt.base.config.schema import AlgorithmSection, OptimizerSection
from tlt.engine.build.model import Model
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import StoredTensors, save_model
from tlt.models.packed import PackedTransformer, layer_by_layer
from tlt.training.build.policy import build_sharded_policy
from tlt.training.ranks.sharding import (
    FullTensors,
    choose_layout,
    fill,
    full_tensor,
    local_rows,
    mesh_of,
    shard,
)
from tlt.training.ranks.world import World
from tlt.training.update import logprobs
from tlt.training.update.finite import NonFiniteUpdate
from tlt.training.update.gradients import gradients_of
from tlt.training.update.update import PolicyTrainer

LLAMA = ModelConfig("llama", 61, 32, 48, 2, 4, 2, 8, max_positions=256, tie_embeddings=True)
UNTIED = replace(LLAMA, tie_embeddings=False)
FREE = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, clip_grad_norm=1e9)
CLIPPED = OptimizerSection(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, clip_grad_norm=0.05)
KL = {"kl_coefficient": 0.3}

EXACT: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama": (UNTIED, {}),
    "llama tied": (LLAMA, {}),
    "qwen2": (replace(UNTIED, architecture="qwen2"), {}),
    "qwen3 tied": (replace(LLAMA, architecture="qwen3"), {}),
    "rows that ranks cannot share evenly": (replace(UNTIED, hidden_size=31), {}),
    "epochs and minibatches": (UNTIED, {"minibatches": 3, "epochs": 2}),
    "KL in the loss, minibatches": (LLAMA, {**KL, "minibatches": 2}),
    "KL in the reward": (UNTIED, {**KL, "name": "rloo", "epochs": 2}),
    "KL in the reward, three responses": (
        UNTIED,
        {**KL, "name": "rloo", "num_problems": 1, "num_samples": 3, "tokens_per_micro_batch": 1},
    ),
    "gspo": (UNTIED, {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "minibatches": 2}),
    "a rank without work": (UNTIED, {"num_samples": 2, "num_problems": 1, "minibatches": 2}),
    "a rank without work for some minibatch": (
        LLAMA,
        {"num_samples": 2, "num_problems": 2, "minibatches": 3, **KL},
    ),
    "no response with an advantage": (UNTIED, {"num_samples": 1, "num_problems": 3}),
}

ALONE = ("llama", "llama tied", "KL in the loss, minibatches", "no response with an advantage")
"""What a single rank is asked: its slices are whole tensors."""


class Ranks:
    """Models and updates on this rank, replicated and sharded, from the same weights."""

    def __init__(self, world: World) -> None:
        self.world, self.mesh = world, mesh_of(world)

    def model(self, config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
        return Transformer(config, **options).to(dtype).initialize(0, std=0.05)

    def sharded(
        self, config: ModelConfig, param_dtype: torch.dtype | None = None, **options: Any
    ) -> Transformer:
        source = self.model(config, **options)
        return self.cut(source, param_dtype)

    def cut(self, source: Transformer, param_dtype: torch.dtype | None = None) -> Transformer:
        with torch.device("meta"):
            model = Transformer(source.config, source.checkpoints_activations).to(source.head_weight.dtype)
        shard(model, self.mesh, param_dtype)
        model.to_empty(device="cpu")
        state = source.state_dict()
        fill(model, lambda name, rows: state[name][rows])
        return model

    def trainer(
        self,
        model: Transformer,
        reference: Transformer | None,
        optimizer: OptimizerSection,
        each: bool,
        **algorithm: Any,
    ) -> PolicyTrainer:
        settings = AlgorithmSection(**{"tokens_per_micro_batch": 100, **algorithm})
        gradients = gradients_of(model, self.world.group, each)
        return PolicyTrainer(model, settings, optimizer, SAMPLING, 10, gradients, reference)

    def updates(self, trainer: PolicyTrainer, steps: range = range(2), **batch: int) -> list[dict[str, Any]]:
        """Metrics of updates, whose rollouts come to each rank in another order. The engine's logprobs are
        about right, so that a dummy's, which are 0, would show in the gap."""
        found = []
        for step in steps:
            rollouts, rewards = shuffled(make_batch(step, **batch), 10 + self.world.rank)
            rollouts = [
                replace(rollout, logprobs=(-math.log(61),) * len(rollout.token_ids)) for rollout in rollouts
            ]
            found.append({**vars(trainer.update(rollouts, rewards, step)), "seconds": 0.0})
        return found


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in FullTensors(model).items()}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference."""
    assert ours.keys() == theirs.keys()
    return max(float((tensor.double() - theirs[name].double()).abs().max()) for name, tensor in ours.items())


def compare(
    ranks: Ranks,
    config: ModelConfig,
    optimizer: OptimizerSection = FREE,
    each: bool = False,
    *,
    num_problems: int = 5,
    num_samples: int = 4,
    **algorithm: Any,
) -> dict[str, Any]:
    """Two updates, replicated and sharded: how far they are apart, and how far a replicated model moved at
    all."""
    results = []
    for make in (lambda model: model, ranks.cut):
        model = make(ranks.model(config))
        reference = (
            make(ranks.model(config).initialize(7, std=0.05)) if "kl_coefficient" in algorithm else None
        )
        trainer = ranks.trainer(model, reference, optimizer, each, **algorithm)
        metrics = ranks.updates(trainer, num_problems=num_problems, num_samples=num_samples)
        results.append((weights(model), metrics))
    (replicated, expected), (sharded, metrics) = results
    return {
        "weights": apart(sharded, replicated),
        "moved": apart(replicated, weights(ranks.model(config))),
        "expected": expected,
        "metrics": metrics,
    }


def rank_main(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    ranks = Ranks(World(rank, num_ranks, rank, torch.device("cpu"), store, dist.group.WORLD))
    results: dict[str, Any] = {
        name: compare(ranks, config, **options)
        for name, (config, options) in EXACT.items()
        if num_ranks > 1 or name in ALONE
    }
    results["clipped"] = compare(ranks, UNTIED, CLIPPED)
    results["reduced after every micro-batch"] = compare(ranks, UNTIED, each=True, minibatches=2)
    results["checkpointed"] = [
        (weights(model), ranks.updates(ranks.trainer(model, None, FREE, each=False)))[0]
        for model in (ranks.sharded(UNTIED, checkpoints_activations=on) for on in (False, True))
    ]
    whole, logprobs.LOGITS_PER_CHUNK = logprobs.LOGITS_PER_CHUNK, 61 * 5
    results["head in chunks"] = compare(ranks, UNTIED)
    logprobs.LOGITS_PER_CHUNK = whole
    results["bf16"] = in_bfloat16(ranks)
    results["published"] = published(ranks)
    results["loaded"] = loaded(ranks, folder)
    results["resumed"] = resumed(ranks)
    results["refused"] = refused(ranks)
    results["spoilt"] = spoilt(ranks)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()


def in_bfloat16(ranks: Ranks) -> dict[str, Any]:
    """Gradients in bfloat16 with float32 weights, against those in float32."""
    model = ranks.model(UNTIED, torch.float32)
    sharded = ranks.cut(model, torch.bfloat16)
    gradients = []
    for each in (model, sharded):
        trainer = ranks.trainer(each, None, FREE, each=True)
        found: dict[str, Tensor] = {}

        def keep(trainer: PolicyTrainer = trainer, found: dict[str, Tensor] = found) -> None:
            norm = trainer.gradients.norm

            def norm_and_keep() -> float:
                named = trainer.model.named_parameters()
                found.update({name: full_tensor(p.grad).float().clone() for name, p in named})
                return norm()

            trainer.gradients.norm = norm_and_keep  # type: ignore[method-assign]  # looks at them on the way

        keep()
        trainer.update(*make_batch(0), 0)
        gradients.append(found)
    expected, found = (torch.cat([g.flatten() for g in gradient.values()]) for gradient in gradients)
    dtypes = {str(state.dtype) for of in trainer.optimizer.state.values() for state in of.values()}
    return {
        "cosine": float(torch.cosine_similarity(expected, found, dim=0)),
        "norms": float(found.norm() / expected.norm()),
        "dtypes": dtypes | {str(p.dtype) for p in sharded.parameters()},
    }


def published(ranks: Ranks) -> dict[str, Any]:
    """An engine's copy loaded layer by layer from slices, against one loaded from the whole policy."""
    model = ranks.model(UNTIED)
    tokens, outputs = torch.arange(9), []
    for parts in (layer_by_layer(FullTensors(ranks.cut(model))), [dict(model.named_parameters())]):
        engine = PackedTransformer(UNTIED, torch.float64)
        engine.load_parts(parts, 3)
        outputs.append(engine.logits(engine.forward(tokens, tokens, PackedCausal(UNTIED, [9]))))
    return {"equal": torch.equal(*outputs), "version": engine.version}


def loaded(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """A policy's slices from a file: how many numbers were read, and how many it has."""
    source = ranks.model(UNTIED, torch.float32)
    if ranks.world.rank == 0:
        save_model(
            folder / "model",
            UNTIED,
            source.state_dict(),
            dtype=torch.float32,
            source=None,
            max_shard_bytes=9000,
        )
    dist.barrier()
    tensors, num_read = StoredTensors(folder / "model", UNTIED, torch.float64), []
    read = tensors.rows

    def count(name: str, rows: slice) -> Tensor:
        found = read(name, rows)
        num_read.append(found.numel())
        return found

    tensors.rows = count  # type: ignore[method-assign]  # looks at what is read
    with torch.device("meta"):
        planned = Transformer(UNTIED).double()
    policy = build_sharded_policy(planned, Model(folder, UNTIED, None, (), tensors), ranks.world)
    return {
        "apart": apart(weights(policy), source.state_dict()),
        "read": sum(num_read),
        "local": sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor)),
        "all": sum(p.numel() for p in source.parameters()),
    }


def resumed(ranks: Ranks) -> float:
    """Two updates, all that trains made whole, and taken up in new slices, one update: how far from three
    in one go."""
    model = ranks.sharded(UNTIED)
    trainer = ranks.trainer(model, None, FREE, each=True)
    ranks.updates(trainer, range(2))
    kept = {name: full_tensor(tensor).clone() for name, tensor in trainer.tensors().items()}
    ranks.updates(trainer, range(2, 3))
    other = ranks.sharded(UNTIED)
    again = ranks.trainer(other, None, FREE, each=True)
    for name, tensor in again.tensors().items():
        if isinstance(tensor, DTensor):
            tensor.to_local().detach().copy_(kept[name][local_rows(tensor)])
        else:
            tensor.copy_(kept[name])
    ranks.updates(again, range(2, 3))
    return apart(weights(other), weights(model))


def refused(ranks: Ranks) -> tuple[str, bool, bool]:
    """An update that is not finite: its message, whether the weights are as before, whether gradients are
    left."""
    source = ranks.model(UNTIED)
    with torch.no_grad():
        source.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf
    model = ranks.cut(source)
    try:
        ranks.updates(ranks.trainer(model, None, FREE, each=True), range(4, 5))
    except NonFiniteUpdate as error:
        same = all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in weights(model).items())
        return str(error), same, any(p.grad is not None for p in model.parameters())
    return "", False, False


def spoilt(ranks: Ranks) -> str:
    """The message of an update whose optimizer spoils one weight, which the last rank alone holds."""
    model = ranks.cut(ranks.model(UNTIED))
    trainer = ranks.trainer(model, None, FREE, each=True)
    take_step = trainer.optimizer.step

    def spoil() -> None:
        take_step()
        head = dict(model.named_parameters())["lm_head.weight"]
        rows = local_rows(head)
        if rows.stop == len(head):
            head.to_local()[-1, -1] = math.nan

    trainer.optimizer.step = torch.no_grad()(spoil)
    try:
        ranks.updates(trainer, range(4, 5))
    except NonFiniteUpdate as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, folder, 1, 2)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def ranks_results(request: pytest.FixtureRequest, played: Path) -> list[dict[str, Any]]:
    return [torch.load(played / str(request.param) / f"rank{rank}.pt") for rank in range(request.param)]


def assert_same_metrics(result: dict[str, Any], tolerance: float) -> None:
    """Norms are added up in another order, in any case."""
    for ours, theirs in zip(result["metrics"], result["expected"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12, abs=1e-15)
        for name, value in theirs.items():
            if name != "grad_norm":
                assert ours[name] == pytest.approx(value, rel=0, abs=tolerance, nan_ok=True), name


@pytest.mark.parametrize(
    ("ranks_results", "name"),
    [(num, name) for num, names in ((1, ALONE), (2, EXACT)) for name in (*names, "head in chunks")],
    indirect=["ranks_results"],
)
def test_sharded_weights_equal_replicated_ones_to_the_last_bit(
    ranks_results: list[dict[str, Any]], name: str
) -> None:
    for results in ranks_results:
        assert results[name]["weights"] == 0
        assert results[name]["moved"] > 1e-4  # without an advantage by weight decay alone
        assert_same_metrics(results[name], tolerance=0)
    assert (results[name]["metrics"][0]["grad_norm"] == 0) == (name == "no response with an advantage")


@pytest.mark.parametrize("name", ["clipped", "reduced after every micro-batch"])
def test_clipping_and_another_order_of_sums_differ_by_rounding_alone(
    ranks_results: list[dict[str, Any]], name: str
) -> None:
    for results in ranks_results:
        assert results[name]["weights"] < 1e-13
        assert_same_metrics(results[name], tolerance=1e-12)


def test_all_ranks_report_the_same(ranks_results: list[dict[str, Any]]) -> None:
    for name in EXACT.keys() & ranks_results[0]:
        assert len({repr(results[name]["metrics"]) for results in ranks_results}) == 1, name


def test_checkpointed_activations_change_no_bit(ranks_results: list[dict[str, Any]]) -> None:
    for results in ranks_results:
        assert apart(*results["checkpointed"]) == 0


def test_bfloat16_computes_close_gradients_and_keeps_weights_and_moments_in_float32(
    ranks_results: list[dict[str, Any]],
) -> None:
    for results in ranks_results:
        assert 0.999 < results["bf16"]["cosine"] < 1 - 1e-7, "it did compute in bfloat16"
        assert results["bf16"]["norms"] == pytest.approx(1, abs=0.02)
        assert results["bf16"]["dtypes"] == {"torch.float32"}


def test_an_engine_loaded_layer_by_layer_from_slices_computes_the_same(
    ranks_results: list[dict[str, Any]],
) -> None:
    assert all(results["published"] == {"equal": True, "version": 3} for results in ranks_results)


def test_a_rank_reads_its_slices_of_a_checkpoint_and_no_more(ranks_results: list[dict[str, Any]]) -> None:
    for results in ranks_results:
        found = results["loaded"]
        assert found["apart"] == 0
        assert found["read"] == found["local"] == pytest.approx(found["all"] / len(ranks_results), rel=0.02)


def test_an_update_goes_on_from_whole_tensors_that_are_cut_again_and_from_slices(
    ranks_results: list[dict[str, Any]],
) -> None:
    assert [results["resumed"] for results in ranks_results] == [0] * len(ranks_results)


def test_a_weight_that_one_rank_holds_and_the_optimizer_spoils_is_named_on_all_ranks(
    ranks_results: list[dict[str, Any]],
) -> None:
    for results in ranks_results:
        assert "leaves weights that are not finite, first lm_head.weight;" in results["spoilt"]


def test_an_update_that_is_not_finite_is_refused_on_all_ranks_and_spoils_no_slice(
    ranks_results: list[dict[str, Any]],
) -> None:
    for results in ranks_results:
        message, is_unchanged, has_gradients = results["refused"]
        assert "step 5: loss nan" in message
        assert (is_unchanged, has_gradients) == (True, False)


# ── without ranks ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "device", "name"),
    [
        ("auto", 2, "cpu", "replicate"),
        ("auto", 1, "cuda", "replicate"),
        ("auto", 2, "cuda", "fsdp"),
        ("fsdp", 1, "cpu", "fsdp"),
        ("replicate", 8, "cuda", "replicate"),
    ],
)
def test_auto_shards_where_several_ranks_have_gpus(
    wanted: str, num_ranks: int, device: str, name: str
) -> None:
    choice = choose_layout(wanted, num_ranks, device)
    assert choice.name == name
    assert choice.reason


@pytest.mark.parametrize(
    "missing", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.1."]
)
def test_a_part_that_never_comes_is_an_error_that_names_it(missing: str) -> None:
    tensors = {k: v for k, v in Transformer(UNTIED).named_parameters() if not k.startswith(missing)}
    engine = PackedTransformer(UNTIED, torch.float32)
    with pytest.raises(KeyError, match=missing):
        engine.load_parts(layer_by_layer(tensors), 1)
    assert engine.version == -1


if __name__ == "__main__":
    fork_ranks(rank_main)
