"""A run that goes on computes from what it began with: configuration, data and base model. Changed reward
code is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import Tlt

FEW = "--run.num_ranks 1 --run.num_steps 1 --evaluation.num_problems 2 --rewards.num_workers 0"
ROWS = [{"prompt": f"[{i % 9 + 1},{i % 7 + 1}:{i + 1}]", "answer": i} for i in range(12)]
TASK = """
class Share:
    def problems(self, num, seed, split="train"):
        return [{"problem_id": str(i), "prompt": f"[{i + 1},2:3]"} for i in range(num)]

    def score(self, problem, text):
        return {"reward": len(text) / 99, "solved": False}

TASK = Share()
"""


@pytest.fixture
def place(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of its own, whose files a test may change."""
    for name in ("model", "drafter"):
        shutil.copytree(workspace / name, tmp_path / name)
    shutil.copy(workspace / "run.toml", tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "share.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(tlt_here: Tlt, *words: str) -> int:
    return tlt_here(
        "train", "run.toml", "--run.out_dir", "out", *FEW.split(), "--task.data", "rows.jsonl", *words
    )


def set_key(section: str, key: str, value: object) -> None:
    path = Path("out/config.json")
    values = json.loads(path.read_text())
    values[section][key] = value
    path.write_text(json.dumps(values))


def change_a_row() -> None:
    rows = [{**row, "answer": 7} if number == 3 else row for number, row in enumerate(ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_a_weight() -> None:
    path = Path("model/model.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = tensors["model.norm.weight"][0].nextafter(torch.tensor(9.0))
    save_file(tensors, path, {"format": "pt"})


def change_the_shape() -> None:
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}))


OTHER_INPUTS: dict[str, tuple[str, Callable[[], None]]] = {
    "sampling.temperature is 0.5, and was 1.0": (
        "out/config.json",
        lambda: set_key("sampling", "temperature", 0.5),
    ),
    "run.seed is 5, and was 0": ("out/config.json", lambda: set_key("run", "seed", 5)),
    "the training problems are not those of the run": ("rows.jsonl", change_a_row),
    "has other weights than the base model": ("model/model.safetensors", change_a_weight),
    "has other config.json than the base model": ("model/config.json", change_the_shape),
}


def test_a_run_does_not_go_on_from_other_inputs(
    place: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(tlt_here) == 0
    kept = {
        path: path.read_bytes()
        for path in Path("out").rglob("*")
        if path.is_file() and path.name not in ("config.json", "console.log")
    }
    for said, (name, change) in OTHER_INPUTS.items():
        before = Path(name).read_bytes()
        change()
        capsys.readouterr()
        assert tlt_here("train", "--resume", "out") == 2, said
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tlt: error: --resume: ")
        assert f"{said} at its checkpoint of step 1; " in line
        assert line.endswith("or begin a new run in another --run.out_dir")
        assert {path: path.read_bytes() for path in kept} == kept
        Path(name).write_bytes(before)
    assert tlt_here("train", "--resume", "out") == 0


def test_reward_code_that_was_mended_is_said_and_the_run_goes_on(
    place: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(tlt_here, "--task.name", "share:TASK") == 0
    assert tlt_here("train", "--resume", "out") == 0
    assert "is not as it was" not in capsys.readouterr().out
    (place / "share.py").write_text(TASK.replace("/ 99", "/ 98"))
    for is_first in (True, False):
        assert tlt_here("train", "--resume", "out", "--run.num_steps", "2") == 0
        lines = [
            line for line in capsys.readouterr().out.splitlines() if "share.py: is not as it was" in line
        ]
        assert len(lines) == is_first, "what the next checkpoint was scored by is what counts from then on"


def test_what_says_how_long_and_on_what_a_run_runs_may_change_and_its_folder_may_move(
    place: Path, tlt_here: Tlt
) -> None:
    assert begin(tlt_here) == 0
    Path("out").rename("moved")
    assert tlt_here("train", "--resume", "moved", "--run.num_steps", "2", "--run.keep_checkpoints", "1") == 0
