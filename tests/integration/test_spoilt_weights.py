"""An optimizer that spoils the weights: the run ends in one line, and nothing of them is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Tlt


def test_weights_that_are_not_finite_reach_no_folder_and_the_last_good_checkpoint_is_named(
    workspace: Path, tlt_here: Tlt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir, steps, take_step = workspace / "spoilt", list[int](), torch.optim.AdamW.step

    def spoil(self: torch.optim.AdamW) -> None:
        take_step(self)
        steps.append(len(steps))
        if len(steps) == 2:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0, 0] = torch.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    few = f"--run.out_dir {out_dir} --run.num_ranks 1 --run.num_steps 2 --run.checkpoint_every 1 --drafter.train false"
    plain = ("--rollout.speculation", "off", "--evaluation.num_problems", "0")
    assert tlt_here("train", str(workspace / "run.toml"), *few.split(), *plain) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tlt: error: policy update of step 2: the optimizer's step leaves weights that are not finite"
    )
    assert line.endswith(f"; the last checkpoint is {out_dir / 'checkpoints' / 'step-00000001'}")
    assert not (out_dir / "policy").exists()
    for path in out_dir.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path
