"""tlt task and tlt score: problems, rewards, and one line for whatever a user's task does wrong."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.parts import fail, read_lines, succeed, write_lines
from tlt.cli import main as cli
from tlt.tasks.base import make_problems
from tlt.types import UserError


@pytest.mark.usefixtures("here")
def test_task_writes_equal_problems_for_equal_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    summary = succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "a.jsonl")
    assert summary["problems"] == 5
    succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "b.jsonl")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert {"problem_id", "prompt"} <= set(read_lines("a.jsonl")[0])


@pytest.mark.usefixtures("here")
def test_task_passes_the_split_and_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(
        capsys,
        "task",
        "countdown",
        "--num",
        "9",
        "--split",
        "test",
        "--options",
        '{"mix": {"2": 1.0}}',
        "--out",
        "a.jsonl",
    )
    problems = read_lines("a.jsonl")
    assert all(len(problem["numbers"]) == 2 and "test" in problem["problem_id"] for problem in problems)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["countdwn", "--num", "1", "--out", "o"], "unknown task 'countdwn'"),
        (["countdown", "--num", "0", "--out", "o"], "--num: is 0; it must be greater than or equal to 1"),
        (["countdown", "--num", "1", "--out", "."], "--out: . is a folder; give the name of a file"),
        (
            ["countdown", "--num", "1", "--out", "o", "--options", "{"],
            "--options: is {; it is no JSON object",
        ),
        (
            ["countdown", "--num", "1", "--out", "o", "--options", "[1]"],
            "--options: is [1]; it is no JSON object",
        ),
        (
            ["countdown", "--num", "1", "--out", "o", "--options", '{"mixx": 1}'],
            "no option 'mixx'; known options are mix",
        ),
    ],
)
def test_task_refuses_in_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in fail(capsys, "task", *arguments)


@pytest.mark.usefixtures("here")
def test_outputs_make_the_folders_that_they_lie_in(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(capsys, "task", "countdown", "--num", "1", "--out", "new/problems.jsonl")
    (problem,) = read_lines("new/problems.jsonl")
    write_lines("responses.jsonl", {"problem_id": problem["problem_id"], "text": "1"})
    arguments = (
        "--problems",
        "new/problems.jsonl",
        "--responses",
        "responses.jsonl",
        "--out",
        "newer/yet/scored.jsonl",
    )
    succeed(capsys, "score", "countdown", *arguments)
    assert not read_lines("newer/yet/scored.jsonl")[0]["solved"]


def write_countdown() -> None:
    write_lines(
        "problems.jsonl",
        {"problem_id": "a", "prompt": "[2,9:7]", "numbers": [2, 9], "target": 7},
        {"problem_id": "b", "prompt": "[2,9:11]", "numbers": [2, 9], "target": 11},
        {"problem_id": "c", "prompt": "[2,9:18]", "numbers": [2, 9], "target": 18},
    )


@pytest.mark.usefixtures("here")
def test_score_reports_each_problem_and_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    write_countdown()
    write_lines(
        "responses.jsonl",
        {"problem_id": "a", "sample_index": 0, "text": "9-2=7!9-2=7"},
        {"problem_id": "a", "sample_index": 1, "text": "9+2=11x!9+2=11"},
        {"problem_id": "b", "sample_index": 0, "text": "nothing"},
    )
    assert (
        cli.main(
            [
                "score",
                "countdown",
                "--problems",
                "problems.jsonl",
                "--responses",
                "responses.jsonl",
                "--out",
                "s.jsonl",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a  solved 1/2  mean reward 0.500"
    summary = json.loads(lines[-1])
    assert summary["solve_rate"] == pytest.approx(1 / 3)
    assert summary["problems_solved_at_least_once"] == 0.5
    assert summary["problems_without_responses"] == 1
    assert [record["solved"] for record in read_lines("s.jsonl")] == [True, False, False]


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
    arguments = ("--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "s.jsonl")
    assert part in fail(capsys, "score", "countdown", *arguments)


# ── a user's own task ───────────────────────────────────────────────────────────────────────────────────────


def write_task(body: str) -> None:
    """mytask.py in the working directory, both of whose methods begin with `body`."""
    problems = "[{'problem_id': 'a', 'prompt': 'x'}]"
    Path("mytask.py").write_text(
        f"class T:\n    def problems(self, num, seed, **options):\n        {body}\n        return "
        f"{problems}\n"
        f"    def score(self, problem, text):\n        {body}\nTASK = T()\n"
    )


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
    arguments = ("--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "s.jsonl")
    Path("__pycache__").mkdir()
    message = fail(capsys, "score", own_task, *arguments)
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
def test_a_problem_without_problem_id_is_named_by_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("problems.jsonl", "", {"prompt": "[2,9:7]", "numbers": [2, 9], "target": 7})
    write_lines("responses.jsonl", {"problem_id": "2", "text": "9-2=7!9-2=7"})
    summary = succeed(
        capsys, "score", "countdown", "--problems", "problems.jsonl", "--responses", "responses.jsonl"
    )
    assert summary["solve_rate"] == 1.0


@pytest.mark.usefixtures("here")
def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full_disk(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    message = fail(capsys, "task", "countdown", "--num", "1", "--out", "out.jsonl")
    assert message == "out.jsonl: cannot be written (No space left on device); make room or give another path"


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (
            "PLAIN",
            "problems() takes no option 'mix'; known options are none: correct task.options, or remove "
            "them all with",
        ),
        ("NO_SPLIT", "problems() does not take split"),
        ("Plain", "is a class; give an object of it, such as TASK = Plain()"),
    ],
)
def test_a_task_that_cannot_take_its_options_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, said: str
) -> None:
    (tmp_path / "task_of_options.py").write_text(
        "class Plain:\n    def problems(self, num, seed, split): ...\n    def score(self, problem, text): "
        "...\n"
        "class NoSplit(Plain):\n    def problems(self, num, seed): ...\n"
        "PLAIN, NO_SPLIT = Plain(), NoSplit()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        make_problems(f"task_of_options:{attribute}", 2, 0, {"split": "test", "mix": {}})
    assert said in str(caught.value)


@pytest.mark.usefixtures("here")
def test_task_writes_the_problems_that_a_task_makes_of_data_and_score_reads_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    Path("sums.py").write_text(
        "class Sums:\n"
        "    def problems(self, num, seed, split='train'):\n        return [{'problem_id': 'a', 'prompt': "
        "split}]\n"
        "    def prepare(self, record, options):\n"
        "        return record if 'gold' in record else {'prompt': record['q'] + '=', 'gold': record['a']}\n"
        "    def score(self, problem, text):\n        return {'reward': 1.0, 'solved': text == "
        "problem['gold']}\n"
        "TASK = Sums()\n"
    )
    write_lines("rows.jsonl", *({"question": f"{i}+1", "a": str(i + 1)} for i in range(4)))
    data = ("--data", "rows.jsonl", "--columns", '{"q": "question"}')
    summary = succeed(capsys, "task", "sums:TASK", *data, "--num", "3", "--out", "problems.jsonl")
    assert summary["problems"] == 3
    assert read_lines("problems.jsonl")[1] == {"problem_id": "2", "prompt": "1+1=", "gold": "2"}
    write_lines("responses.jsonl", {"problem_id": "1", "text": "1"}, {"problem_id": "2", "text": "9"})
    for problems in (("--problems", "problems.jsonl"), ("--problems", *data[1:])):
        assert (
            succeed(capsys, "score", "sums:TASK", *problems, "--responses", "responses.jsonl")["solve_rate"]
            == 0.5
        )
    assert "rows.jsonl:1: task sums:TASK: prepare() failed (KeyError: 'q'" in fail(
        capsys, "task", "sums:TASK", *data[:2], "--num", "3", "--out", "o"
    )
    assert "--split: is dev; it must be train or test" in fail(
        capsys, "task", "sums:TASK", "--split", "dev", "--num", "3", "--out", "o"
    )
