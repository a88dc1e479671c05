"""The words of a command line: help, one line for every mistake, and what an error or Ctrl-C is."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.unit.apps.cli.parts import fail
from tlt.apps.cli import main as cli
from tlt.apps.cli.commands import COMMANDS
from tlt.base.config.schema import Config


def test_help_is_fast_and_loads_no_torch() -> None:
    code = (
        "import sys; from tlt.apps.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    )
    begin = time.monotonic()
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0
    assert "drafter train" in finished.stdout
    assert time.monotonic() - begin < 5.0  # generous: the machine may be busy; without torch it takes 0.2 s


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("columns", ["80", "140"])
def test_every_command_explains_itself(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: tlt {name}" in shown
    assert COMMANDS[name].purpose[:60] in shown
    _usage, *lines = shown.splitlines()
    assert max(map(len, lines)) <= int(columns)


def test_the_help_of_train_lists_every_key_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["train", "--help"])
    shown = capsys.readouterr().out
    config = Config.model_validate({"model": {"path": "m"}, "task": {"name": "t"}})
    keys = {f"--{section}.{key}" for section, values in config.model_dump().items() for key in values}
    assert {key for key in keys if f"{key} " not in shown} == set()
    assert "--task.options.KEY" in shown


@pytest.mark.parametrize("family", ["drafter", "hub", ""])
def test_tlt_or_a_family_alone_lists_its_commands(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = family.split()
    for arguments, code in ((words, 2), ([*words, "--help"], 0), (["-h", *words], 0)):
        assert cli.main(arguments) == code
        shown = capsys.readouterr().out
        assert all((f"  {name} " in shown) == name.startswith(family) for name in COMMANDS)


GENERATE = ["generate", "m", "--prompts", "p", "--out", "o"]
EMPTY = "is ''; it is empty: give a path (the working directory is .)"
NO_FILE = "no file can be called so: give another path"
MISTAKES = {
    "gen": "gen: unknown command; did you mean tlt generate?",
    "zzz": f"zzz: unknown command; commands are {', '.join(COMMANDS)}",
    "drafter evl": "drafter evl: unknown command; did you mean tlt drafter eval?",
    "generate": "generate: needs MODEL, --prompts, --out; see tlt generate --help",
    "generate m --prompts": "--prompts: has no value; write --prompts VALUE",
    "GENERATE --temp 3": "--temp: unknown option; did you mean --temperature?",
    "GENERATE --zzz 3": "--zzz: unknown option; see tlt generate --help",
    "GENERATE --model x": "--model: is written without its name; see tlt generate --help",
    "GENERATE --run.seed 3": "--run.seed: unknown option; did you mean --seed?",
    "GENERATE more": "more: unexpected argument; see tlt generate --help",
    "GENERATE --seed x": "--seed: is x; it must be a valid integer",
    "GENERATE --top-p nan": "--top-p: is nan; it must be a finite number",
    "GENERATE --dtype float8": "--dtype: is float8; it must be 'auto', 'float32', 'float64' or 'bfloat16'",
    "train --foo 3": "--foo: unknown option; see tlt train --help",
    "train --seed 3": "--seed: unknown option; did you mean --run.seed?",
    "train": "train: no configuration given; write tlt train CONFIG.toml, --resume DIR to continue a run, or --model.path and --task.data or --task.name",
    "train no.toml": "no.toml: no such file; give the path of a TOML configuration",
    "train --resume no": "--resume: no holds no run (no config.json); give the folder that the run wrote",
    "train --resume ''": f"--resume: {EMPTY}",
    "generate '' --prompts p --out o": f"MODEL: {EMPTY}",
    "GENERATE --drafter ''": f"--drafter: {EMPTY}",
    "plan memory ''": f"CONFIG: {EMPTY}",
    f"GENERATE --out {300 * 'a'}": f"--out: is '{78 * 'a'}…; {NO_FILE}",
    "score math --problems p --responses r": "--problems: p does not exist; give the path of a JSONL file",
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_in_the_arguments_is_one_line(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(typed.replace("GENERATE", " ".join(GENERATE)))
    assert fail(capsys, *words) == MISTAKES[typed]


def test_a_path_is_shown_as_it_was_given(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (here / "own.py").write_text("1 / 0")
    relative, absolute = (
        fail(capsys, "train", "countdown", "--task.name", f"{name}:TASK")
        for name in ("own.py", here / "own.py")
    )
    assert relative.startswith("task 'own.py:TASK': cannot be imported (ZeroDivisionError")
    assert "own.py:1)" in relative
    assert str(here) not in relative
    assert absolute.startswith(f"task '{here / 'own.py'}:TASK'")


USAGE_ERRORS = (
    "train",
    "train countdown --foo 1",
    "train no.toml",
    "train countdown --run.num_step 1",
    "train countdown --run.seed x",
    "train countdown --model.path ./nowhere",
    "train --resume no",
    "train --learning_rate 1",
    "generate m --prompts p",
    "audit engine m",
    "audit server m --task countdown",
    "audit responses m",
    "plan memory no.toml",
    "drafter eval d",
    "serve",
    "task nonsense --num 1 --out o",
    "init own d",
    "gen",
)
HEAVY = """
import shlex, sys
from tlt.apps.cli.main import main
for words in sys.argv[1:]:
    assert main(shlex.split(words)) == 2, words
    heavy = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "ray"}
    loaded = {name.partition(".")[0] for name in sys.modules} & heavy
    assert not loaded, (words, loaded)
"""


def test_a_usage_error_loads_neither_torch_nor_numpy(here: Path) -> None:
    command = [sys.executable, "-c", HEAVY, *USAGE_ERRORS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tlt: error: ") == len(USAGE_ERRORS)


# ── errors and interrupts ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_an_error_of_ours_shows_its_traceback_and_an_interrupt_is_130(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_run", Mock(side_effect=error))
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="a bug"):
            cli.main(["train", "x.toml"])
        return
    assert cli.main(["train", "x.toml"]) == 130
    assert capsys.readouterr().err == "tlt: interrupted\n"


SLEEP = "from pathlib import Path; import time\nPath('begun').touch()\n{}"
SLOWLY = SLEEP.format("time.sleep(60)")
SLOWLY_AND_BADLY = SLEEP.format(
    "try: time.sleep(60)\nexcept KeyboardInterrupt: pass\nraise ImportError('numpy failed')"
)


@pytest.mark.parametrize("library", ["pydantic", "torch"])
@pytest.mark.parametrize("source", [SLOWLY, SLOWLY_AND_BADLY])
def test_ctrl_c_while_a_library_is_imported_is_one_line(library: str, source: str, here: Path) -> None:
    """A library of that name, put before the real one, that takes a minute to be imported."""
    (here / library).mkdir()
    (here / library / "__init__.py").write_text(source)
    folders = [str(here), str(Path(cli.__file__).parents[3])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "tlt", *GENERATE]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (here / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "tlt: interrupted\n")
