"""tlt train: which configuration a new or a continued run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.apps.cli.main import main
from tlt.apps.cli.train import resolve_config
from tlt.apps.run import start
from tlt.base.types import UserError
from tlt.training.launch.place import Place


def write_run(model: Path) -> Path:
    Path("run.toml").write_text(
        f'[model]\npath = "{model}"\n[task]\nname = "countdown"\n[run]\nout_dir = "out"\n'
    )
    return Path("run.toml")


@pytest.mark.usefixtures("here")
def test_a_run_is_never_overwritten_and_a_resumed_one_keeps_what_it_computes(model: Path) -> None:
    path = write_run(model)
    config = resolve_config(path, ["--run.seed", "4"], resume=None)
    Path("out").mkdir()
    Path("out/config.json").write_text(config.to_json())
    Path("out/metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds a run already; continue it with tlt train --resume"):
        resolve_config(path, [], resume=None)
    assert resolve_config(None, [], resume=Path("out")) == config
    longer = resolve_config(None, ["--run.num_steps", "500"], resume=Path("out"))
    assert (longer.run.num_steps, longer.run.seed) == (500, 4)
    tracked = resolve_config(None, ["--tracking.use", "wandb"], resume=Path("out"))
    assert tracked.tracking.use == ["wandb"]
    with pytest.raises(UserError, match=r"run\.seed is 0 but the run in out has 4"):
        resolve_config(path, [], resume=Path("out"))
    with pytest.raises(UserError, match=r"sampling\.temperature is 0\.5 but the run in out has 1.0"):
        resolve_config(None, ["--sampling.temperature", "0.5"], resume=Path("out"))


@pytest.mark.usefixtures("here")
def test_ranks_that_somebody_else_has_started_wait_for_each_other_as_long_as_the_configuration_says(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, waited = write_run(model), []

    def nobody_comes(place: Place, seconds: float) -> None:
        waited.append(seconds)
        raise UserError("nobody came")

    monkeypatch.setattr(start, "meet_ranks", nobody_comes)
    for variable in ("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"):
        monkeypatch.setenv(*variable.split("="))
    for words in ([str(path), "--run.timeout_seconds", "77"], [str(path)], ["elsewhere.toml"]):
        assert main(["train", *words]) == 2
    assert waited == [77.0, 600.0, 600.0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_resumed_run_keeps_the_number_of_steps_by_which_its_learning_rate_ends(
    schedule: str, model: Path
) -> None:
    path = write_run(model)
    Path("out").mkdir()
    config = resolve_config(path, ["--optimizer.schedule", schedule, "--run.out_dir", "new"], resume=None)
    Path("out/config.json").write_text(config.to_json())
    with pytest.raises(UserError, match=rf"num_steps is 500 .* has 100, .*schedule is {schedule}"):
        resolve_config(None, ["--run.num_steps", "500"], resume=Path("out"))
    assert resolve_config(None, [], resume=Path("out")).run.num_steps == 100


@pytest.mark.usefixtures("here")
def test_one_command_begins_a_run_and_goes_on_with_it(model: Path) -> None:
    path = write_run(model)
    begun = resolve_config(path, ["--run.seed", "4"], resume="auto")
    assert begun == resolve_config(path, ["--run.seed", "4"], resume=None)
    Path("out").mkdir()
    Path("out/config.json").write_text(begun.to_json())
    assert resolve_config(path, ["--run.seed", "5"], resume="auto").run.seed == 5, (
        "nothing has begun: the mistake may be mended"
    )
    Path("out/metrics.jsonl").write_text("{}\n")
    assert resolve_config(path, ["--run.seed", "4"], resume="auto") == begun
    machine = ["--run.seed", "4", "--run.num_ranks", "1", "--run.keep_checkpoints", "5"]
    assert resolve_config(path, machine, resume="auto").run.keep_checkpoints == 5
    with pytest.raises(UserError, match=r"run\.seed is 0 but the run in .*out has 4"):
        resolve_config(path, [], resume="auto")
    with pytest.raises(UserError, match="no configuration given"):
        resolve_config(None, [], resume="auto")
