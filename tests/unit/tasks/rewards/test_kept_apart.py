"""What reward workers keep apart: modules of the working directory from Python's own, and credentials from
every record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlt.apps.cli import main as cli
from tlt.base.io.plugins import describe
from tlt.base.io.text import one_line
from tlt.base.types import Reward, UserError
from tlt.tasks.rewards.pool import RewardPool, summarize
from tlt.tasks.rewards.scoring import Completion, RewardSpec, Scorer

KEY = "sk-live1234567890abcdefABCDEF123456"
FUNCTIONS = """
import os
KEY = os.environ["MY_API_KEY"]
WORD = os.environ["MY_PASSWORD"]

def raises(completions, **_):
    raise RuntimeError(f"401 for https://api.host/score?api_key={KEY}")

def raises_at_times(completions, **_):
    if completions[0] == "a":
        raise RuntimeError(KEY)
    return [1.0]

def raises_late(completions, **_):
    raise RuntimeError("x" * 270 + " " + KEY)

def returns(completions, **_):
    return "y" * 60 + KEY

def names_a_bad_number(completions, **_):
    return [f"password={WORD}"]

async def awaits(completions, **_):
    raise OSError(f"Authorization: Bearer {KEY}")

def exits(completions, **_):
    raise SystemExit(WORD)

def logs(completions, log_metric, **_):
    log_metric(f"latency of {KEY}", 1.0)
    log_metric("z" * 5000, 2.0)
    return [1.0]

def logs_without_end(completions, log_metric, **_):
    for n in range(101):
        log_metric(f"name {n}", n)
    return [1.0]
"""


@pytest.fixture
def spend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of reward functions that know credentials."""
    (tmp_path / "spend.py").write_text(FUNCTIONS)
    monkeypatch.setenv("MY_API_KEY", KEY)
    monkeypatch.setenv("MY_PASSWORD", "correct horse battery")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("shadowed", ["json", "socket", "struct", "tlt", "pydantic"])
def test_no_module_of_the_working_directory_takes_the_place_of_an_installed_one_in_a_worker(
    shadowed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{shadowed}.py").write_text("raise SystemExit('the module of the working directory')\n")
    (tmp_path / "beside.py").write_text("def reward(completions, **_):\n    return [len(completions[0])]\n")
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(RewardSpec("countdown", ("beside:reward",)), num_workers=1, timeout_seconds=60)
    pool.submit(("p", 0), {"prompt": "?"}, "four")
    pool.complete([("p", 0)])
    found = pool.drain(60)[("p", 0)]
    pool.close()
    assert (found.value, found.error) == (4.0, "")


@pytest.mark.parametrize(
    "name", ["raises", "raises_late", "returns", "names_a_bad_number", "awaits", "exits"]
)
def test_a_credential_in_a_rewards_error_stands_in_no_record(name: str, spend: None) -> None:
    scorer = Scorer(RewardSpec("countdown", (f"spend:{name}",)))
    error = scorer.score([Completion({"prompt": "?"}, "text")])[0].error
    scorer.close()
    assert error
    assert not any(part in error for part in (KEY, KEY[:12], "correct horse"))
    assert "***" in error


def test_a_credential_in_a_tasks_or_an_imports_error_stands_in_no_line(spend: None, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\nraise RuntimeError('key ' + os.environ['MY_API_KEY'])\n")
    with pytest.raises(UserError) as refused:
        Scorer(RewardSpec("countdown", ("broken:reward",)))
    assert KEY not in str(refused.value)
    for error in (RuntimeError(KEY), UserError(f"place: {KEY}; remedy")):
        assert KEY not in describe(error)
    assert KEY not in one_line(RuntimeError(f"{'x' * 100}{KEY}"), 120)


def test_a_credential_in_a_rewards_error_stands_neither_on_the_screen_nor_in_the_file_of_tlt_score(
    spend: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("problems.jsonl").write_text("".join(f'{{"problem_id": "{n}", "prompt": "?"}}\n' for n in "ab"))
    responses = (f'{{"problem_id": "{text}", "text": "{text}"}}\n' for text in "ab")
    Path("responses.jsonl").write_text("".join(responses))
    files = ["--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "out.jsonl"]
    cli.main(["score", *files, "--functions", "spend:raises_at_times"])
    said, written = capsys.readouterr(), Path("out.jsonl").read_text()
    assert "***" in said.out + said.err + written
    assert KEY not in said.out + said.err + written


def test_names_of_figures_are_short_few_and_without_credentials(spend: None) -> None:
    scorer = Scorer(RewardSpec("countdown", ("spend:logs",)))
    metrics = scorer.score([Completion({"prompt": "?"}, "text")])[0].metrics
    scorer.close()
    assert metrics == {"latency of ***": 1.0, "z" * 99 + "…": 2.0}
    scorer = Scorer(RewardSpec("countdown", ("spend:logs_without_end",)))
    error = scorer.score([Completion({"prompt": "?"}, "text")])[0].error
    scorer.close()
    assert "'name 100' is one name too many; log at most 100 for a group" in error
    rewards = [Reward(1.0, True, metrics={f"of response {n:04d}": float(n)}) for n in range(1000)]
    means = summarize(rewards).metrics
    assert (len(means), means["names left out"]) == (101, 900.0)
    assert json.dumps(means)
