"""Two thousand golds and answers with known verdicts, through every judge of numbers: no wrong verdict."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.golds import SUMS, Pair, draw_pairs, wrong_verdicts
from tlt.apps.cli.main import main
from tlt.apps.cli.own_reward import EXACT

NUM = 2000


@pytest.mark.parametrize("task", [SUMS, "math"])
def test_no_verdict_of_a_task_differs_from_that_of_the_exact_numbers(task: str) -> None:
    if task == "math":
        pytest.importorskip("math_verify")
    assert wrong_verdicts(task, NUM, seed=0) == []


def test_no_verdict_of_the_reward_that_init_own_writes_differs(tmp_path: Path) -> None:
    """A gold that is no number is there a text, which only the same text says."""
    (tmp_path / "reward.py").write_text(EXACT)
    says = runpy.run_path(str(tmp_path / "reward.py"))["says"]
    pairs = [pair for pair in draw_pairs(NUM, 0, in_latex=False) if pair.is_right is not None]
    assert len(pairs) > NUM * 0.8
    assert [pair for pair in pairs if says(pair.text, str(pair.gold)) != pair.is_right] == []


def test_no_verdict_of_tlt_score_differs_and_a_row_without_a_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = list(draw_pairs(NUM, 2, in_latex=False))
    readable = [pair for pair in pairs if pair.is_right is not None]
    assert score(readable) == 0
    scored = [json.loads(line)["solved"] for line in Path("scored.jsonl").read_text().splitlines()]
    assert [pair for pair, solved in zip(readable, scored, strict=True) if pair.is_right != solved] == []
    for pair in [pair for pair in pairs if pair.is_right is None][:20]:
        capsys.readouterr()
        assert score([readable[0], pair]) == 2
        assert "problems.jsonl:2: task" in capsys.readouterr().err


def score(pairs: list[Pair]) -> int:
    """Runs `tlt score` on the pairs, and returns its exit code."""
    rows = [
        {"problem_id": str(i), "prompt": "?", "answer": pair.gold, "search": "boxed"}
        for i, pair in enumerate(pairs)
    ]
    texts = [{"problem_id": str(i), "text": pair.text} for i, pair in enumerate(pairs)]
    for name, lines in (("problems.jsonl", rows), ("responses.jsonl", texts)):
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["score", SUMS, "--problems", "problems.jsonl", "--responses", "responses.jsonl"]
    return main([*words, "--out", "scored.jsonl"])
