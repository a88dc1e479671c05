"""Whole runs through the command line: two ranks, a tiny policy, real processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.compare import difference, different_weights, fixed_metrics
from tests.integration.conftest import Tlt
from tests.integration.programs import Programs
from tlt.training.report.step_record import StepRecord, read_metrics

PATIENCE = 1200.0
"""Seconds that a run may take: on an idle machine it takes 10, beside others many times as much."""
pytestmark = pytest.mark.timeout(3 * PATIENCE)


def command(workspace: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """`tlt train`."""
    paths = os.pathsep.join([str(workspace), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "tlt", "train", *arguments], environment


def train(workspace: Path, name: str, *overrides: str, programs: Programs | None = None) -> Path:
    """programs: where launcher and ranks are forked, with what is imported there; None: they start as a
    user's do."""
    out_dir = workspace / name
    words, environment = command(
        workspace, str(workspace / "run.toml"), "--run.out_dir", str(out_dir), *overrides
    )
    run = programs.run if programs else subprocess.run
    done = run(words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    (workspace / f"{name}.txt").write_text(done.stdout)
    return out_dir


def records(out_dir: Path) -> list[StepRecord]:
    return read_metrics(out_dir / "metrics.jsonl")


def what_the_law_fixes(out_dir: Path) -> list[dict[str, Any]]:
    """The part of the records that must not depend on how the tokens were generated."""
    return fixed_metrics(out_dir)


@pytest.fixture(scope="module")
def speculating_run(workspace: Path, programs: Programs) -> Path:
    """A fixed strategy: whether an adaptive run speculates in a given step is decided by its clock.
    Responses may change ranks. Every step is evaluated."""
    words = ("--rollout.speculation", "4x1x4", "--evaluation.every", "1")
    return train(workspace, "speculating", *words, programs=programs)


def same_weights(a: Path, b: Path) -> bool:
    return not different_weights(a / "policy", b / "policy")


def test_speculation_on_and_off_are_the_same_run_in_float64(
    workspace: Path, speculating_run: Path, programs: Programs
) -> None:
    nothing = ("--rollout.speculation", "off", "--drafter.train", "false")
    plain = train(workspace, "plain", *nothing, programs=programs)
    assert what_the_law_fixes(plain) == what_the_law_fixes(speculating_run)
    assert same_weights(plain, speculating_run)
    assert all(math.isnan(record.rollout.accept_length) for record in records(plain))
    assert all(record.rollout.accept_length >= 1 for record in records(speculating_run))


def test_generating_two_steps_ahead_with_a_draft_vocabulary_that_is_renewed_changes_no_token_and_no_weight(
    workspace: Path, speculating_run: Path, programs: Programs
) -> None:
    """Nine of 24 characters can be drafted, on two ranks, whose choices are compared at every step's end.
    One step ahead: proofs/test_killed_runs.py; as many as pay: proofs/test_idle_time.py."""
    follows = ("--rollout.speculation", "ahead+hybrid:64x1x64", "--rollout.ahead", "2")
    words = ("--evaluation.every", "1", "--drafter.vocabulary", "9")
    ahead = train(workspace, "ahead", *follows, *words, programs=programs)
    assert not difference(ahead, speculating_run)
    assert sum(record.idle.ahead_tokens for record in records(ahead)) > 0
    assert {age for record in records(ahead) for age in record.rollout.followed_by_age} >= {"1"}
    assert not any(record.idle.ahead_tokens for record in records(speculating_run))
    covered = [(record.drafter.vocabulary, record.drafter.coverage) for record in records(ahead)]
    assert [size for size, _ in covered[1:]] == [9] * 4
    assert all(0 < coverage <= 1 for _, coverage in covered)
    assert len(json.loads((ahead / "drafter" / "token_counts.json").read_text())["token_ids"]) > 9
    assert "from the 9 most frequent tokens" in (workspace / "ahead.txt").read_text()


def test_one_rank_generates_the_same_responses_as_two(
    workspace: Path, speculating_run: Path, tlt_here: Tlt
) -> None:
    """Tokens of the first step do not depend on the number of ranks; later ones only through the rounding
    of sums."""
    alone = workspace / "alone"
    few = ("--run.num_ranks", "1", "--run.num_steps", "1")
    assert tlt_here("train", str(workspace / "run.toml"), "--run.out_dir", str(alone), *few) == 0
    one, two = what_the_law_fixes(alone)[0], what_the_law_fixes(speculating_run)[0]
    exact = [key for key in one if not key.startswith("update/")]
    assert len(exact) > 5
    assert {key: one[key] for key in exact} == {key: two[key] for key in exact}
    assert one["update/loss"] == pytest.approx(two["update/loss"], abs=1e-12)


def test_a_run_leaves_everything_the_readme_promises(speculating_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(speculating_run / "policy")
    assert sum(p.numel() for p in model.parameters()) > 0
    assert AutoTokenizer.from_pretrained(speculating_run / "policy")("[1,2:3]").input_ids
    trace = json.loads((speculating_run / "timeline.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"prefill", "speculate", "update", "step"} <= names
    assert (speculating_run / "drafter" / "config.json").exists()
    assert (speculating_run / "config.json").exists()
    assert not (speculating_run / "journal").exists(), "the last checkpoint has all of it"
    assert [record.step for record in records(speculating_run)] == [1, 2, 3, 4, 5]
    assert [record.policy_version for record in records(speculating_run)] == [0, 1, 2, 3, 4]


def test_the_screen_names_what_is_trained_at_first_and_at_the_end_where_it_lies_and_what_to_try(
    speculating_run: Path,
) -> None:
    lines = speculating_run.with_suffix(".txt").read_text().splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert [line.split()[0] for line in lines[:7]] == [
        "model",
        "task",
        "algorithm",
        "ranks",
        "update",
        "speculation",
        "folder",
    ]
    assert "2 on cpu (" in rows["ranks"]
    said = [line.strip() for line in lines if line.strip()]
    assert said[7].startswith("evaluation: 6 of 6 held-out problems are trained on, too ('test-0' is"), (
        "this test's own task"
    )
    assert said[8:10] == ["starting 2 ranks …", "loading model and problems …"]
    for product in ("policy", "best", "drafter", "evaluations.jsonl", "metrics.jsonl"):
        assert rows[product].endswith(str(speculating_run / product))
        assert (speculating_run / product).exists()
    assert rows["tlt"].split()[1:3] == ["generate", str(speculating_run / "policy")], (
        "the last line is a command to try"
    )
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0].isdigit()] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]


def test_the_drafter_is_trained_in_idle_time_and_its_version_counts_it(speculating_run: Path) -> None:
    written = records(speculating_run)
    assert sum(record.drafter.tokens for record in written) > 0
    assert written[-1].drafter.version > 0
    initial = load_file(speculating_run.parent / "drafter" / "model.safetensors")
    trained = load_file(speculating_run / "drafter" / "model.safetensors")
    assert any(not torch.equal(initial[name], trained[name]) for name in initial)


def measured_steps(out_dir: Path) -> list[int]:
    return [record.step for record in records(out_dir) if math.isfinite(record.drafter.acceptance)]


@pytest.mark.parametrize(
    "forks",
    [pytest.param(True, id="forked ranks"), pytest.param(False, id="a user's", marks=pytest.mark.slow)],
)
def test_ctrl_c_leaves_a_run_that_resumes_to_the_same_policy_metrics_evaluations_and_best(
    workspace: Path, speculating_run: Path, programs: Programs, forks: bool
) -> None:
    """forks: or the ranks start as a user's do, and import all that they need."""
    out_dir = workspace / f"interrupted-{forks}"
    given = (str(workspace / "run.toml"), "--run.out_dir", str(out_dir), "--evaluation.every", "1")
    reader, writer = os.pipe()
    process = programs.begin(*command(workspace, *given), (writer, writer), forks)
    os.close(writer)
    metrics, deadline = out_dir / "metrics.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.02)
    os.killpg(process, signal.SIGINT)
    with open(reader) as file:
        output = file.read()  # until nobody is left who could write
    assert programs.wait(PATIENCE) == 130, output
    assert f"--resume {out_dir}" in output.replace("\n", " ")
    done = len(records(out_dir))
    assert 2 <= done < 5, output
    words, environment = command(workspace, "--resume", str(out_dir))
    resumed = programs.run(words, env=environment, timeout=PATIENCE)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert not difference(out_dir, speculating_run)
    assert measured_steps(out_dir) == [1, 5], "the count goes on where it was"


def test_a_run_is_measured_with_its_own_drafter_and_problems(
    workspace: Path, speculating_run: Path, tlt_here: Tlt, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tlt_here("bench", str(speculating_run), "--num", "2", "--rounds", "1") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["responses"], record["num_different"], record["batch_size"]) == (8, 0, 8)
