"""The Python API: what a script or a notebook sees. Its tokens are the command line's; its mistakes are one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt.config.schema import load_config
from tlt.recipes import find_recipe
from tlt.types import UserError

# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_configuration_is_a_recipe_by_its_name_with_overrides_as_a_dict(tmp_path: Path) -> None:
    overrides = {"run.num_steps": 7, "task.options": {"max_number": 9}, "run.out_dir": tmp_path / "run", "drafter.path": None}
    config = load_config("countdown", {**overrides, "drafter.train": False})
    assert (config.run.num_steps, config.run.out_dir) == (7, tmp_path / "run")
    assert config.task.options == {"max_number": 9}
    assert config.drafter.path is None
    assert config.model == load_config(find_recipe("countdown")).model


def test_a_configuration_is_built_from_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = find_recipe("countdown").parent / "base"
    sections = {"model": {"path": base}, "task": {"name": "countdown", "options": {"max_number": 9}}}
    monkeypatch.chdir(tmp_path)
    config = load_config(sections, {"task.options.max_number": 12})
    assert config.task.options == {"max_number": 12}
    assert config.run.out_dir == tmp_path / "runs" / "run"
    assert sections["task"] == {"name": "countdown", "options": {"max_number": 9}}  # the caller's own stays as it is
    monkeypatch.chdir(base.parent)
    assert load_config({**sections, "model": {"path": "base"}}).model.path == base


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"run.num_steps": 0}, r"^overrides\['run.num_steps'\]: run.num_steps is 0; it must be greater than"),
        ({"run.num_step": 1}, "run.num_step is unknown; did you mean run.num_steps"),
        ({"num_steps": 1}, r"^overrides\['num_steps'\]: unknown key; write section.key, such as run.seed$"),
        ({"model.path": "nowhere"}, r"^overrides\['model.path'\]: .* there is no such folder"),
    ],
)
def test_a_mistake_in_an_override_names_it_as_it_was_written(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("countdown", overrides)
