"""The user's code by the path of its file: found beside the configuration, run once, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlt.base.config.load import load_config
from tlt.base.io.plugins import get_object, source_of
from tlt.base.types import UserError
from tlt.training.saved.inputs import code_of

TASK = """
from __future__ import annotations
import dataclasses
import beside_it

@dataclasses.dataclass
class Own:
    name: str
    parts: list[str] = dataclasses.field(default_factory=list)

TASK = Own(beside_it.NAME)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, here = tmp_path / "a.b", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (folder / "math.py").write_text(TASK)
    (folder / "beside_it.py").write_text("NAME = 'beside'")
    monkeypatch.syspath_prepend(str(tmp_path))  # what loading appends goes with it
    return folder


def test_a_file_runs_once_imports_its_neighbours_and_hides_no_library_of_its_name(folder: Path) -> None:
    task = get_object("task", f"{folder / 'math.py'}:TASK")
    assert task.name == "beside"
    assert get_object("task", "../a.b/math.py:TASK") is task
    import math

    assert math.pi > 3
    (folder / "other").mkdir()
    (folder / "other" / "math.py").write_text("TASK = 7")
    assert get_object("task", f"{folder / 'other' / 'math.py'}:TASK") == 7


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("TASK = 1", "own.py:OTHER", r"^here: /.*own\.py has no 'OTHER'; correct the name"),
        ("import nowhere", "own.py:TASK", r"^here: cannot be imported \(.*No module named 'nowhere'"),
        ("1 / 0", "own.py:TASK", r"^here: cannot be imported \(ZeroDivisionError.*own\.py:1\)"),
        ("open('own.txt')", "own.py:TASK", r"^here: cannot be imported \(FileNotFoundError"),
        ("", "none.py:TASK", r"^here: there is no file /.*/none\.py; correct its path"),
        ("", ".py:", r"^here: is no 'package\.module:object' or 'FILE\.py:object'; give one"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_each_time(text: str, name: str, message: str, folder: Path) -> None:
    Path("own.py").write_text(text)
    for _ in range(2):
        with pytest.raises(UserError, match=message) as raised:
            get_object("here", name)
        assert "\n" not in str(raised.value)


def test_files_are_sought_beside_the_configuration_then_here_and_are_inputs_of_a_run(folder: Path) -> None:
    parts = '[{name = "math.py:TASK"}, {name = "countdown"}]'
    (folder / "run.toml").write_text(
        f'[model]\npath = "."\n[task]\nname = "mixture"\noptions = {{tasks = {parts}}}\n'
        '[rewards]\nfunctions = ["task", "math.py:score"]\n[tracking]\nuse = ["tensorboard", "here.py:T"]'
    )
    config = load_config(folder / "run.toml", ["--tracking.use", "math.py:T,here.py:T"])
    beside, here = folder / "math.py", Path.cwd()
    assert [part["name"] for part in config.task.options["tasks"]] == [f"{beside}:TASK", "countdown"]
    assert config.rewards.functions == ("task", f"{beside}:score")
    assert config.tracking.use == [f"{here / 'math.py'}:T", f"{here / 'here.py'}:T"]
    assert code_of(config) == {str(beside): beside}
    assert source_of(f"{here / 'here.py'}:T") is None
    assert load_config(json.loads(config.to_json())) == config
