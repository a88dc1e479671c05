"""Recipes are found by their names, in the repository as in a wheel, and are copied whole to where a user
works."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tlt.apps.cli.commands import COMMANDS, find_command
from tlt.apps.cli.main import main
from tlt.apps.cli.options import parse_options
from tlt.base.config.load import load_config
from tlt.base.io.recipes import copy_recipe, find_config, find_recipe, list_configs
from tlt.base.types import UserError
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.tasks.base import make_problems
from tlt.training.build.problems import load_problems


def test_a_recipes_name_stands_for_its_configuration() -> None:
    names = list_configs()
    assert {
        "countdown",
        "countdown/headline",
        "experts",
        "math",
        "math/chain_sum",
        "smollm2/reasoning",
    } < set(names)
    assert "paper/qwen2.5-7b" in names
    assert all(find_config(Path(name)).is_file() for name in names)
    assert find_recipe("countdown").name == "quickstart.toml"
    assert find_recipe("countdown/headline") == find_recipe("countdown").with_name("headline.toml")
    config = load_config(find_recipe("countdown"))
    assert config.model.path == find_recipe("countdown").with_name("base")


@pytest.mark.parametrize("name", ["countdown", "experts", "math"])
def test_every_model_that_comes_along_has_a_tokenizer_that_reads_its_problems(name: str) -> None:
    config = load_config(find_recipe(name), ["--task.num_problems", "64"])
    problems = load_problems(config, "train")
    assert len(problems) == 64
    tokenizer = load_tokenizer(config.model.path)
    for problem in problems:
        text = problem.data["prompt"] if "prompt" in problem.data else problem.data["messages"][-1]["content"]
        assert tokenizer.decode(problem.prompt_ids) == text


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("chess", r"recipes are countdown, countdown/headline, experts, math, .*paper/qwen2\.5-7b"),
        ("countdown/tail", "countdown/headline, countdown/quickstart"),
        ("", "countdown"),
    ],
)
def test_an_unknown_name_is_told_the_known_ones(name: str, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        find_recipe(name)


def test_a_file_wins_over_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(Path("countdown")) == find_recipe("countdown")
    assert find_config(Path("countdown/headline")) == find_recipe("countdown/headline")
    assert find_config(Path("countdwon.toml")) == Path("countdwon.toml")
    with pytest.raises(
        UserError, match="countdwon: is neither a file nor a recipe; recipes are countdown, countdown/h"
    ):
        find_config(Path("countdwon"))
    assert find_config(Path("paper/qwen2.5-7b")) == find_recipe("paper/qwen2.5-7b")
    assert find_config(Path("paper/no.toml")) == Path("paper/no.toml")
    for name, remedy in (
        ("paper", "give one of paper/deepseek"),
        ("paper/qwen3.5-7b", "give one of paper/deepseek"),
    ):
        with pytest.raises(UserError, match=remedy):
            find_config(Path(name))
    with pytest.raises(UserError, match=r"countdown\.txt: is neither a file nor a recipe"):
        find_config(Path("countdown.txt"))
    with pytest.raises(UserError, match="is neither a file nor a recipe"):
        find_config(Path(5000 * "a"))
    Path("countdown").write_text("")
    assert find_config(Path("countdown")) == Path("countdown")


def test_a_copy_holds_all_that_a_run_needs_and_not_how_it_was_made(tmp_path: Path) -> None:
    parts = copy_recipe("countdown", tmp_path / "a" / "mine")
    names = [path.name for path in parts]
    assert names[0] == "quickstart.toml"
    assert {"headline.toml", "base", "drafter"} <= set(names)
    assert not [*(tmp_path / "a").rglob("*.py"), *(tmp_path / "a").rglob("README.md")]
    config = load_config(tmp_path / "a" / "mine" / "quickstart.toml")
    assert config.model.path == tmp_path / "a" / "mine" / "base"
    assert config.drafter.path == tmp_path / "a" / "mine" / "drafter"


def test_a_copy_of_qwen_brings_the_script_that_makes_its_drafter(tmp_path: Path) -> None:
    copy_recipe("qwen2.5-0.5b", tmp_path / "mine")
    recorder = tmp_path / "tlt"
    recorder.write_text('#!/usr/bin/env bash\nprintf "%s\\t" "$@" >> commands; echo >> commands\n')
    recorder.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", "drafter.sh", "data"]
    subprocess.run(script, cwd=tmp_path / "mine", env=environment, check=True)
    asked = [line.split("\t")[:-1] for line in (tmp_path / "mine" / "commands").read_text().splitlines()]
    commands = [find_command(words) for words in asked]
    assert [name for name, _ in commands] == ["task", "generate", "drafter train"]
    for name, words in commands:
        parse_options(name, COMMANDS[name].options, words)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("math", "word_problems.py"),
        ("smollm2", "arithmetic.py"),
        ("smollm2/calculator", "calculator.py"),
        ("smollm2/skyrl-gym", "largest.py"),
    ],
)
def test_a_copy_brings_the_files_of_its_tasks_and_no_others_and_draws_the_same_problems(
    name: str, task: str, tmp_path: Path
) -> None:
    copy_recipe(name, tmp_path / "mine")
    few = {"task.num_problems": 9, "rollout.problems_per_step": 2}
    config = tmp_path / "mine" / find_recipe(name).name
    ours, copied = (load_config(path, few) for path in (find_recipe(name), config))
    file = tmp_path / "mine" / task
    loaded = r"\w+\.py(?=:\w)|(?<=verifiers:)\w+\.py|(?<=`python )\w+\.py"
    own = {*re.findall(loaded, _configs(tmp_path / "mine"))}
    assert {path.name for path in (tmp_path / "mine").rglob("*.py")} == own
    assert copied.task.name == f"{file}:TASK"
    assert ours.task.name == f"{find_recipe(name).with_name(task)}:TASK"
    respond = f"{file}:calculate" if task == "calculator.py" else None
    assert copied.environment.respond == respond
    drawn = [
        make_problems(config.task.name, 9, 0, {"split": "train", **config.task.options})
        for config in (ours, copied)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "name",
    [
        "math/chain_sum",
        "paper/qwen2.5-7b",
        "countdown/headline",
        "smollm2/quickstart",
        "smollm2/reasoning",
        "smollm2/calculator",
        "smollm2/guess",
        "smollm2/skyrl-gym",
        "smollm2/verifiers",
        "smollm2/openenv",
    ],
)
def test_a_name_that_train_knows_can_be_copied_and_is_what_to_run_next(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name, str(tmp_path / "mine")]) == 0
    config = Path(f"{name}.toml").name
    *_, said = capsys.readouterr().out.splitlines()
    assert said == f"Next: cd {tmp_path / 'mine'} && tlt train {config}"
    assert (tmp_path / "mine" / config).read_bytes() == find_recipe(name).read_bytes()


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    copy_recipe("countdown", tmp_path)  # empty so far
    for taken in (tmp_path, tmp_path / "quickstart.toml"):
        with pytest.raises(UserError, match="is not an empty folder; give a new one"):
            copy_recipe("countdown", taken)
    with pytest.raises(UserError, match="cannot be written there"):
        copy_recipe("countdown", tmp_path / "quickstart.toml" / "below")


def test_init_without_a_name_lists_what_comes_along(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 2
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert [line.split()[0] for line in said.splitlines() if re.match(r"  \S", line)] == [
        *list_configs(),
        "own",
    ]


def _configs(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.toml"))
