"""`tlt bench … --geometry`: what is grown is said, measured, reused or refused. Timings decide nothing
here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from tlt.bench import geometry as bench_geometry
from tlt.bench.geometry import HELD_STILL, check_disk, grown_config, hold_still, plan_growth
from tlt.bench.memory import engines_bytes, plan_subject, refuse_engines, refuse_runs, runs_bytes
from tlt.bench.subject import Subject
from tlt.cli.main import main
from tlt.config.load import load_config
from tlt.config.schema import Config
from tlt.hf import growth as growing
from tlt.hf.config import config_to_hf
from tlt.hf.files import write_hf_json
from tlt.hf.geometry import find_geometry
from tlt.models.decoder import ModelConfig
from tlt.plan.memory import ALWAYS, plan_memory
from tlt.types import UserError

RECIPE = Path(__file__).parents[3] / "recipes/countdown/headline.toml"
FEW = ("--task.num_problems", "16", "--run.num_ranks", "1")
LITTLE = ModelConfig("qwen2", 300, 160, 400, 21, 6, 3, 64, tie_embeddings=True)


@pytest.fixture
def little(tmp_path: Path) -> Path:
    """A config.json of a model a little larger than the recipe's."""
    write_hf_json(tmp_path / "little.json", config_to_hf(LITTLE, torch.float32))
    return tmp_path / "little.json"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(RECIPE, [*FEW, "--run.out_dir", str(tmp_path / "run")])


@pytest.mark.slow
def test_the_command_says_what_it_grew_measures_it_and_leaves_nothing(
    little: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    amounts = ["--batches", "2", "--rounds", "1", "--seconds", "0.1", *FEW, "--run.dtype", "float64"]
    words = ["bench", "rollout", str(RECIPE), "--geometry", str(little), "--out", str(tmp_path / "result")]
    assert main([*words, *amounts]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "geometry little: 7,973,728 parameters in float64, grown from base"
    assert shown[1] == "shape: qwen2, 21 layers, hidden size 160, 6 heads, 3 of keys and values"
    assert shown[2].startswith(
        "behaviour: the small model's, its tokens and its acceptance; 128 of 128 greedy tokens equal, "
    )
    assert shown[3] == "vocabulary: 300 ids, of which 24 are ever drawn"
    report = json.loads((tmp_path / "result.json").read_text())
    assert [m["name"] for m in report["measurements"]] == ["constant batch 2"]
    assert (report["geometry"]["num_equal"], report["geometry"]["num_tokens"]) == (128, 128)
    assert report["geometry"]["difference"] < 1e-6
    assert all(line in (tmp_path / "result.md").read_text() for line in shown[:4])
    assert list(temporary.glob("tlt-*")) == []


def test_the_grown_engine_accepts_as_the_small_one_does(little: Path, config: Config) -> None:
    """The recipe's model and drafter: the same work takes as many verifications."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"dtype": "float64"})})
    stats = []
    for growth in (None, plan_growth(config, str(little))):
        with grown_config(config, growth) as (changed, _):
            subject = Subject(changed)
            subject.params = dataclasses.replace(subject.params, max_tokens=32)
            engine = subject.engine("4x1x4", 4)
            tokens = {
                rollout.problem_id: rollout.token_ids for rollout in engine.generate(subject.requests(0, 4))
            }
            stats.append((tokens, engine.stats.num_tokens, engine.stats.accept_length))
    assert stats[0] == stats[1]
    assert stats[0][2] > 2


def test_engines_of_one_subject_read_one_copy_of_the_weights(config: Config) -> None:
    subject = Subject(config)
    first, second = subject.engine("off", 2), subject.engine("2x1x2", 4)
    assert first.model is second.model


def test_a_kept_geometry_is_grown_once(
    little: Path, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = plan_growth(config, str(little))
    with grown_config(config, growth, keep=tmp_path / "kept") as (first, _):
        pass
    monkeypatch.setattr(bench_geometry, "write_grown", lambda *given: pytest.fail("it lies there already"))
    with grown_config(config, growth, keep=tmp_path / "kept") as (second, _):
        assert first == second
    assert {path.name for path in first.model.path.parent.iterdir()} == {"model", "drafter"}
    deeper = dataclasses.replace(growth.grown, config=dataclasses.replace(LITTLE, num_layers=22))
    other = dataclasses.replace(growth, grown=deeper)
    kinds = itertools.product((growth, other), (torch.float32, torch.bfloat16), ("cpu", "cuda"))
    assert len({one.folder_name(dtype, device) for one, dtype, device in kinds}) == 8


def test_a_grown_model_that_does_not_generate_as_the_small_one_is_refused(
    little: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "_rotary_places", lambda small, grown: torch.arange(small))
    with (
        pytest.raises(
            UserError,
            match=r"^--geometry: little: only \d+ of 128 greedy tokens are the small model's in float32",
        ),
        grown_config(config, plan_growth(config, str(little))),
    ):
        pytest.fail("it was refused")


@pytest.mark.slow
def test_a_training_step_of_the_grown_model_changes_nothing_and_goes_on_in_its_folder(
    little: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps by two commands: same tokens and weights with and without TLT, and in the second step the
    first one's model."""
    few = ["--rollout.problems_per_step=2", "--rollout.samples_per_problem=2", "--sampling.max_tokens=24"]
    where = ["--out", str(tmp_path / "result"), "--run.out_dir", str(tmp_path / "run"), *FEW]
    for steps in "12":
        arguments = ["--geometry", str(little), "--variants", "tlt", "--steps", steps, *where, *few]
        assert main(["bench", "train", str(RECIPE), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "128 of 128 greedy tokens equal" in shown
    assert (
        "training: policy and drafter with a learning rate of almost 0, so every step is of the same model"
        in shown
    )
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["num_steps"] == 2
    assert report["geometry"]["num_parameters"] == 7_973_728
    assert report["runs"]["tlt"]["num_different"] == 0
    assert [path.name.split("-")[0] for path in (tmp_path / "run/grown").iterdir()] == ["little"]
    assert "vocabulary: 300 ids" in (tmp_path / "result.md").read_text()


def test_learning_rates_that_the_user_gives_stay() -> None:
    held = hold_still(("--drafter.learning_rate=0.5", "--run.seed=3"))
    config = load_config(RECIPE, held)
    assert config.optimizer.learning_rate == HELD_STILL["optimizer.learning_rate"] < 1e-15
    assert (config.drafter.learning_rate, config.run.seed) == (0.5, 3)


@pytest.mark.parametrize("command", ["rollout", "train"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--geometry", "qwen9"], "--geometry: 'qwen9' is unknown; give qwen2.5-0.5b, qwen2.5-1.5b, "),
        (["--geometry", ""], "--geometry: '' is unknown; give"),
        (
            ["--geometry", str(RECIPE.parent / "base")],
            "base has hidden_size 128, but the small model takes 129; give",
        ),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    command: str, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--out", str(tmp_path / "x"), "--run.out_dir", str(tmp_path / "run"), *FEW]
    assert main(["bench", command, str(RECIPE), *where, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert part in error


def test_a_disk_without_room_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**9))
    seven = find_geometry("qwen2.5-7b")
    check_disk(tmp_path / "not" / "there", seven, 10**9)
    with pytest.raises(
        UserError,
        match=r"^--geometry: qwen2\.5-7b takes 15\.2 GB of disk in .*, where 1\.0 GB are free; set ",
    ):
        check_disk(tmp_path / "not" / "there", seven, 15_230_000_000)


def test_what_has_no_room_side_by_side_is_refused_before_anything_grows(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt.training.start.machine_bytes", lambda: 12 * 2**30)
    monkeypatch.setattr(bench_geometry, "write_grown", lambda *given: pytest.fail("it was refused"))
    out, run = ["--out", str(tmp_path / "x")], [*FEW, "--run.out_dir", str(tmp_path / "run")]
    assert main(["bench", "rollout", str(RECIPE), "--geometry", "qwen2.5-7b", *out, *run]) == 2
    assert "memory: 2 engines, which share the weights, take " in capsys.readouterr().err
    assert main(["bench", "train", str(RECIPE), "--geometry", "qwen2.5-0.5b", *out, *run]) == 2
    assert "memory: 3 runs side by side take " in capsys.readouterr().err


def test_side_by_side_engines_add_what_they_do_not_share_and_runs_all_they_hold(config: Config) -> None:
    run = plan_subject(config)
    plan = plan_memory(run)
    sizes = {term.name: term.num_bytes for term in plan.terms}
    assert engines_bytes(plan, 3) - engines_bytes(plan, 2) == sizes["drafter"] + plan.least
    assert sizes["engine"] < engines_bytes(plan, 1) < plan.needed
    assert runs_bytes(plan, 1) == plan.needed
    standing = sum(term.num_bytes for term in plan.terms if term.phases == ALWAYS)
    assert runs_bytes(plan, 3) - plan.needed == 2 * (standing - sizes["process"])
    refuse_engines(run, 2)
    refuse_runs(run, 3)
