"""What `tlt serve` exports of a run that has not ended is what the run's end would have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.test_evaluated_runs import Judge, base, judges, make_config
from tlt.apps.run.served import open_served
from tlt.base.clock import Moment
from tlt.base.types import UserError
from tlt.training.loop import describe_run, main

__all__ = ["base"]  # a fixture


def train(model: Path, folder: Path, rank: int) -> Path:
    config = make_config(model, folder)
    lora = config.lora.model_copy(update={"rank": rank})
    evaluation = config.evaluation.model_copy(update={"every": 0, "num_problems": 0})
    judges.append(Judge())
    main(
        describe_run(config.model_copy(update={"lora": lora, "evaluation": evaluation}), Moment.now()),
        judges[-1].stop,
    )
    return folder


@pytest.mark.parametrize("rank", [0, 2])
def test_the_newest_whole_checkpoint_gives_the_policy_that_the_end_writes(
    base: Path, tmp_path: Path, rank: int
) -> None:
    folder, said = train(base, tmp_path / "run", rank), list[str]()
    assert open_served(folder, None, said.append).policy == folder / "policy"
    (folder / "policy").rename(folder / "ended")  # as if the run had been killed before its end
    found = open_served(folder, None, said.append)
    assert (found.step, found.drafter) == (3, None)
    wanted, exported = (load_file(one / "model.safetensors") for one in (folder / "ended", found.policy))
    assert wanted.keys() == exported.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-12 if rank else 0.0)
    assert [path.name for path in found.policy.glob("tokenizer*")]
    assert len(said) == 1
    open_served(folder, None, said.append)
    assert len(said) == 1, "what was exported is served again"

    manifest = folder / "checkpoints/step-00000003/manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    assert open_served(folder, None, said.append).step == 2
    assert "step-00000003" in said[1]
    assert open_served(folder, 1, said.append).step == 1
    with pytest.raises(UserError, match="step-00000003"):
        open_served(folder, 3, said.append)
    with pytest.raises(UserError, match="has checkpoints of 3, 2, 1"):
        open_served(folder, 7, said.append)
