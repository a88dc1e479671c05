"""tlt task and tlt score: problems, rewards, and one line for whatever a user's task does wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.apps.cli.parts import fail, read_lines, succeed, write_lines
from tlt.apps.cli import main as cli


@pytest.mark.usefixtures("here")
def test_task_writes_equal_problems_for_equal_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    summary = succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "a.jsonl")
    assert summary["problems"] == 5
    succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "b.jsonl")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert {"problem_id", "prompt"} <= set(read_lines("a.jsonl")[0])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("countdwn --num 1 --out o", "unknown task 'countdwn'"),
        ("countdown --num 0 --out o", "--num: is 0; it must be greater than or equal to 1"),
        ("countdown --num 1 --out .", "--out: . is a folder; give the name of a file"),
        ("countdown --num 1 --out o --options {", "--options: is {; it is no JSON object"),
        ("countdown --num 1 --out o --options [1]", "--options: is [1]; it is no JSON object"),
        ('countdown --num 1 --out o --options {"mixx":1}', "no option 'mixx'; known options are mix"),
        ("countdown --num 1 --out o --split dev", "--split: is dev; it must be train or test"),
    ],
)
def test_task_refuses_in_one_line(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in fail(capsys, "task", *words.split())


def write_countdown() -> None:
    goals = {"a": 7, "b": 11, "c": 18}
    rows = [
        {"problem_id": name, "prompt": f"[2,9:{goal}]", "numbers": [2, 9], "target": goal}
        for name, goal in goals.items()
    ]
    write_lines("problems.jsonl", *rows)


SCORE = ("--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "s.jsonl")


@pytest.mark.usefixtures("here")
def test_score_prints_the_whole_alone_and_out_has_each_response(capsys: pytest.CaptureFixture[str]) -> None:
    write_countdown()
    write_lines(
        "responses.jsonl",
        {"problem_id": "a", "sample_index": 0, "text": "9-2=7!9-2=7"},
        {"problem_id": "a", "sample_index": 1, "text": "9+2=11x!9+2=11"},
        {"problem_id": "b", "sample_index": 0, "text": "nothing"},
    )
    assert cli.main(["score", "countdown", *SCORE]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["solve_rate"] == pytest.approx(1 / 3)
    assert summary["problems_solved_at_least_once"] == 0.5
    assert summary["problems_without_responses"] == 1
    scored = [(record["problem_id"], record["reward"], record["solved"]) for record in read_lines("s.jsonl")]
    assert scored == [("a", 1.0, True), ("a", 0.0, False), ("b", 0.0, False)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "responses.jsonl:1: not valid JSON"),
        ("[]", "responses.jsonl:1: holds a list; write one object per line"),
        ({"text": "x"}, "responses.jsonl:1: problem_id is None"),
        ({"problem_id": "z", "text": "x"}, "responses.jsonl:1: problem_id 'z' is not in problems.jsonl"),
        ({"problem_id": "a"}, "responses.jsonl:1: text is None"),
        ("", "--responses: responses.jsonl is empty; give at least one line"),
    ],
)
def test_score_refuses_a_malformed_line_with_its_place(
    line: Any, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_countdown()
    write_lines("responses.jsonl", line)
    assert part in fail(capsys, "score", "countdown", *SCORE)


FUNCTIONS = """
def short(completions, **kwargs):
    return [None if c == "nothing" else 1.0 / len(c) for c in completions]

def near(completions, target):
    return [float(goal) for goal in target]

def broken(completions, **kwargs):
    raise KeyError("judge")

def shortest(completions):
    return [float(len(c) == min(map(len, completions))) for c in completions]
"""


@pytest.fixture
def answers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_countdown()
    (here / "own_scores.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)
    texts = {"a": "9-2=7!9-2=7", "b": "nothing"}
    write_lines("responses.jsonl", *({"problem_id": name, "text": text} for name, text in texts.items()))


@pytest.mark.usefixtures("answers")
def test_score_takes_reward_functions_with_weights_as_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--functions", "task,own_scores:short,own_scores:near", "--weights", "1,2,0.5")
    found = succeed(capsys, "score", "countdown", *SCORE, *words)
    assert found["mean_reward"] == pytest.approx((1 + 2 / 11 + 3.5 + 5.5) / 2)
    assert found["solve_rate"] == 0.5, "the task says what is solved"
    assert found["reward_parts"] == {"near": 9.0, "short": pytest.approx(1 / 11), "task": 0.5}
    assert read_lines("s.jsonl")[1]["reward_parts"] == {"near": 11.0, "task": 0.0}
    alone = succeed(capsys, "score", *SCORE, "--functions", "own_scores:near", "--solved-at", "8")
    assert (alone["mean_reward"], alone["solve_rate"]) == (9.0, 0.5), "rows of data need no task"


@pytest.mark.usefixtures("answers")
def test_a_response_that_no_function_scores_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["score", *SCORE, "--functions", "own_scores:short"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 2 responses could not be scored; the first: not applicable: " in lines[-2]
    found = json.loads(lines[-1])
    assert (found["mean_reward"], found["unscored"]) == (pytest.approx(1 / 11), 1)
    left_out = read_lines("s.jsonl")[1]
    assert (left_out["reward"], left_out["reward_error"][:14]) == (None, "not applicable")


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "--functions: rows of data have no score of their own; give it, or a task's NAME"),
        ("--functions own_scores:short --weights 1,2", "--weights has 2 values for 1 functions"),
        ("--functions own_scores:short,own_scores:short", "--functions names one twice"),
        ("--functions own_scores:shorter", "own_scores:shorter"),
        ("--functions own_scores:broken", "none of the 2 responses of responses.jsonl could be scored"),
    ],
)
def test_functions_that_cannot_score_are_refused_in_one_line(
    words: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in fail(capsys, "score", *SCORE, *words.split())


# ── a user's own task ───────────────────────────────────────────────────────────────────────────────────────


OWN_TASK = """
class T:
    def problems(self, num, seed, **options):
        BODY
        return [{'problem_id': 'a', 'prompt': 'x'}]
    def score(self, problem, text):
        BODY
TASK = T()
"""
SUMS = """
class Sums:
    def problems(self, num, seed, split="train"):
        return [{"problem_id": "a", "prompt": split}]
    def prepare(self, record, options):
        return record if "gold" in record else {"prompt": record["q"] + "=", "gold": record["a"]}
    def score(self, problem, text):
        return {"reward": 1.0, "solved": text == problem["gold"]}
TASK = Sums()
"""


def write_task(body: str) -> None:
    """mytask.py in the working directory, both of whose methods begin with `body`."""
    Path("mytask.py").write_text(OWN_TASK.replace("BODY", body))


@pytest.fixture
def own_task(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a task of one's own, which no other test has imported."""
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "mytask", raising=False)
    write_lines("problems.jsonl", {"problem_id": "a", "prompt": "x"})
    write_lines("responses.jsonl", {"problem_id": "a", "text": "y"})
    return "mytask:TASK"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("return {'reward': 1.0}", "score() returned {'reward': 1.0}; it must be"),
        ("return {'solved': True}", "score() returned {'solved': True}; it must be"),
        ("return {'reward': 'high', 'solved': True}", "the reward is 'high'; it must be a finite number"),
        ("return {'reward': float('nan'), 'solved': True}", "the reward is nan"),
        ("return None", "score() returned None; it must be"),
        ("raise RuntimeError('of its own')", "RuntimeError: of its own"),
    ],
)
def test_whatever_is_wrong_in_a_score_is_one_line_with_its_place(
    body: str, part: str, own_task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(body)
    Path("__pycache__").mkdir()
    message = fail(capsys, "score", own_task, *SCORE)
    assert message.startswith(f"responses.jsonl:1: task {own_task}, problem 'a': score() failed (")
    assert part in message


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('of its own')", "return [{'problem_id': 'a', 'x': {1}}]", "not Python"]
)
def test_whatever_is_wrong_in_a_task_is_one_line(
    body: str, own_task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(body)
    Path("__pycache__").mkdir()
    message = fail(capsys, "task", own_task, "--num", "1", "--out", "out.jsonl")
    assert message.startswith(f"task {own_task}") or message.startswith(f"task {own_task!r}")


@pytest.mark.usefixtures("here")
def test_task_writes_the_problems_that_a_task_makes_of_data_and_score_reads_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    Path("sums.py").write_text(SUMS)
    write_lines("rows.jsonl", *({"question": f"{i}+1", "a": str(i + 1)} for i in range(4)))
    data = ("--data", "rows.jsonl", "--columns", '{"q": "question"}')
    summary = succeed(capsys, "task", "sums:TASK", *data, "--num", "3", "--out", "problems.jsonl")
    assert summary["problems"] == 3
    assert read_lines("problems.jsonl")[1] == {"problem_id": "2", "prompt": "1+1=", "gold": "2"}
    write_lines("responses.jsonl", {"problem_id": "1", "text": "1"}, {"problem_id": "2", "text": "9"})
    for problems in (("--problems", "problems.jsonl"), ("--problems", *data[1:])):
        found = succeed(capsys, "score", "sums:TASK", *problems, "--responses", "responses.jsonl")
        assert found["solve_rate"] == 0.5
    told = fail(capsys, "task", "sums:TASK", *data[:2], "--num", "3", "--out", "o")
    assert "rows.jsonl:1: task sums:TASK: prepare() failed (KeyError: 'q'" in told
