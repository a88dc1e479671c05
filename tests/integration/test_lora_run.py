"""A whole run with LoRA, in this process: what it leaves, and that it goes on as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tlt.base.clock import Moment
from tlt.base.config.load import load_config
from tlt.models.hf.peft import PREFIX
from tlt.training import loop
from tlt.training.launch.signals import StopRequest

WORDS = {
    "run.num_ranks": "1",
    "run.checkpoint_every": "0",
    "rollout.speculation": "off",
    "drafter.train": "false",
    "sampling.max_tokens": "16",
    "evaluation.num_problems": "0",
    "rewards.num_workers": "0",
    "algorithm.kl_coefficient": "0.1",
    "lora.rank": "4",
    "lora.targets": "q_proj,v_proj,down_proj",
    "optimizer.learning_rate": "3e-2",
}


def train(workspace: Path, name: str, num_steps: int, **changes: str) -> Path:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    words = {**WORDS, "run.out_dir": str(workspace / name), "run.num_steps": str(num_steps), **changes}
    config = load_config(
        workspace / "run.toml", [word for key, value in words.items() for word in (f"--{key}", value)]
    )
    loop.main(loop.describe_run(config, Moment.now()), StopRequest())
    return workspace / name


@pytest.fixture(scope="module")
def run(workspace: Path) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(workspace)
        return train(workspace, "whole", 3)


def checkpoint(out_dir: Path, step: int = 3) -> dict[str, Tensor]:
    return load_file(out_dir / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")


def test_it_goes_on_to_the_same_bits(workspace: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(workspace)
    resumed = train(workspace, "resumed", 2)
    before = checkpoint(resumed, 2)
    train(workspace, "resumed", 3)
    for name in ("policy/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (resumed / name).read_bytes() == (run / name).read_bytes(), name
    ours, theirs = checkpoint(resumed), checkpoint(run)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.items())


def test_a_checkpoint_holds_adapters_and_their_moments_alone(run: Path) -> None:
    names = list(checkpoint(run))
    assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}
    kinds = {name.partition("model.")[0] for name in names}
    assert kinds == {
        "policy.",
        *(f"policy_optimizer.{moment}." for moment in ("exp_avg", "exp_avg_sq", "step")),
    }
    assert len(names) == 4 * 2 * 3 * 2, "weights and three of Adam's × A and B × targets × layers"


def test_the_policy_is_its_base_with_the_adapter_merged(workspace: Path, run: Path) -> None:
    base, policy = (
        load_file(folder / "model.safetensors") for folder in (workspace / "model", run / "policy")
    )
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    said = json.loads((run / "adapter" / "adapter_config.json").read_text())
    scale = said["lora_alpha"] / said["r"]
    assert said["base_model_name_or_path"] == str(workspace / "model")
    assert base.keys() == policy.keys()
    for name, tensor in base.items():
        a, b = (adapter.get(PREFIX + name.replace("weight", f"lora_{side}.weight")) for side in "AB")
        assert (a is not None) == any(f"{target}." in name for target in said["target_modules"])
        expected = tensor.double() if a is None else torch.addmm(tensor.double(), b, a, alpha=scale)
        assert torch.equal(policy[name], expected), name
        assert a is None or b.any(), "it has learned"


def policy(out_dir: Path) -> Tensor:
    return torch.cat(
        [
            tensor.flatten()
            for _, tensor in sorted(load_file(out_dir / "policy" / "model.safetensors").items())
        ]
    )


@pytest.mark.parametrize("rank", ["4", "0"])
def test_a_run_starts_from_the_adapter_of_another_whether_it_trains_that_or_all_weights(
    rank: str, workspace: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(workspace)
    lora = {"lora__rank": rank} if rank != "0" else {"lora__rank": rank, "lora__targets": "all-linear"}
    changes = {"model__adapter": str(run / "adapter"), "optimizer__learning_rate": "1e-9", **lora}
    near, far = (
        train(workspace, f"{name}-{rank}", 1, **{**changes, **change}) for name, change in CHANGES.items()
    )
    assert torch.allclose(policy(near), policy(run), atol=1e-6)
    assert not torch.allclose(policy(far), policy(run), atol=1e-6)


CHANGES = {"on": {}, "on and further": {"optimizer__learning_rate": "3e-2"}}
