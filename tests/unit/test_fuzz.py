"""A seeded few of the cases that tests/faults/fuzz plays by the hundred, and that its judge would see
what is bad."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.faults.commands import Command, run
from tests.faults.fuzz.case import Case
from tests.faults.fuzz.judge import GOOD, judge, try_one
from tests.faults.fuzz.kinds import INPUTS
from tests.faults.fuzz.sound import Sound, make_models, preload
from tlt.apps.cli.main import main
from tlt.training.launch.signals import say

IN_THIS_PROCESS = [
    kind for kind in INPUTS if kind not in ("environment", "standard streams", "variables of launchers")
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    sound = make_models(tmp_path_factory.mktemp("fuzz"))
    preload(sound)
    return sound


@pytest.mark.parametrize("kind", IN_THIS_PROCESS)
def test_damaged_or_absurd_input_is_taken_or_refused_in_one_line(kind: str, sound: Sound) -> None:
    for seed in range(2):
        assert try_one(INPUTS[kind][0], sound, Random(f"{kind} {seed}"), 60.0).what in GOOD, seed


def fail() -> int:
    raise KeyError("x")


def hang() -> int:
    while True:
        time.sleep(1)


def two_lines() -> int:
    say("error: a: is 1; give 2")
    sys.stderr.write("and more\n")
    return 2


def half_a_character() -> int:
    print("\ud800")
    return 0


def color() -> int:
    print("\x1b[31mred")
    return 0


def die() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def judged(call: Callable[[], int], folder: Path, seconds: float = 60.0) -> str:
    return judge(Case(()), run(Command(folder, call), seconds, patience=0.0))


def test_the_judge_sees_tracebacks_hangs_and_whatever_is_not_one_line(tmp_path: Path) -> None:
    assert judged(fail, tmp_path).startswith("traceback: KeyError")
    assert judged(half_a_character, tmp_path).startswith("traceback: UnicodeEncodeError")
    assert judged(hang, tmp_path, 0.2).startswith("hang")
    assert judged(color, tmp_path).startswith("escape sequence")
    assert judged(die, tmp_path).startswith("unclear: exit code 137")
    for call in (lambda: 1, lambda: 2, two_lines):
        assert judged(call, tmp_path).startswith("unclear")
    assert judged(lambda: main(["generate"]), tmp_path) == "refused"
    assert judged(lambda: 0, tmp_path) == "success"


# ── what the fuzzing has found ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"problem_id": "\\ud83d", "prompt": "1"}', "an escape such as"),
        ("[" * 100_000, "nested too deeply"),
        ('{"problem_id": ' + "9" * 5000 + ', "prompt": "1"}', "not valid JSON"),
    ],
    ids=["half a character", "deep", "a long number"],
)
def test_what_python_reads_and_nobody_can_write_is_refused_with_its_line(
    line: str, why: str, sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "1"}}\n{line}\n')
    words = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(sound.model), *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "prompts.jsonl:2: not valid JSON (" in said
    assert why in said


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\ud800"])
def test_a_path_that_no_file_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", name, "--prompts", "p", "--out", "o"]) == 2
    assert "no file can be called so" in capsys.readouterr().err
    assert main(["plan", "memory", "countdown", "--run.out_dir", name]) == 2
    assert "run.out_dir" in capsys.readouterr().err
