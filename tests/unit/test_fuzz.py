"""A seeded few of the cases that benchmarks/faults/fuzz.py tries by the thousand, and that its judge would see what is bad."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks.faults.fuzz import GOOD, KINDS, judge, make_models, try_one
from tlt.cli.main import main
from tlt.distributed.signals import say


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_or_absurd_input_is_taken_or_refused_in_one_line(kind: str, models: tuple[Path, Path]) -> None:
    for seed in range(4):
        assert try_one(kind, models, random.Random(f"{kind} {seed}"), 60.0) in GOOD, seed


def fail() -> int:
    raise KeyError("x")


def hang() -> int:
    while True:
        pass


def two_lines() -> int:
    say("error: a: is 1; give 2")
    sys.stderr.write("and more\n")
    return 2


def half_a_character() -> int:
    print("\ud800")
    return 0


def test_the_judge_sees_tracebacks_hangs_and_whatever_is_not_one_line() -> None:
    assert judge(fail, 60).startswith("traceback: KeyError")
    assert judge(half_a_character, 60).startswith("traceback: UnicodeEncodeError")
    assert judge(hang, 0.05).startswith("hang")
    for case in (lambda: 1, lambda: 2, two_lines):
        assert judge(case, 60).startswith("unclear")
    assert judge(lambda: main(["generate"]), 60) == "refused"
    assert judge(lambda: 0, 60) == "success"


# ── what the fuzzing has found ───────────────────────────────────────────────────────────────────────────────────────


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
    line: str, why: str, models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "1"}}\n{line}\n')
    words = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(models[0]), *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "prompts.jsonl:2: not valid JSON (" in said
    assert why in said


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\ud800"])
def test_a_path_that_no_file_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", name, "--prompts", "p", "--out", "o"]) == 2
    assert "no file can be called so" in capsys.readouterr().err
    assert main(["plan", "memory", "countdown", "--run.out_dir", name]) == 2
    assert "run.out_dir" in capsys.readouterr().err
