"""Before the ranks start: a folder in use is refused, and the header says what will be trained."""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from tests.standin import serve_hub
from tests.unit.base.io.test_hub import point_at
from tlt.apps.cli.train import resolve_config
from tlt.apps.run.start import describe_environment, preflight, prepare
from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import UserError
from tlt.models.hf.tokenizer import Tokenizer
from tlt.training.build.problems import load_problems
from tlt.training.run_products import next_commands
from tlt.training.saved.run_folder import FolderLock

RECIPE = Path(__file__).parents[4] / "recipes" / "countdown"
SIZES = ["--task.num_problems", "8", "--evaluation.num_problems", "4"]


def make_config(folder: Path) -> Config:
    words = ["--run.out_dir", str(folder), "--run.device", "cpu", "--run.num_ranks", "2", *SIZES]
    return load_config(RECIPE / "quickstart.toml", words)


def test_a_folder_in_which_another_process_runs_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match=f"another process is running in {tmp_path}"):
        prepare(make_config(tmp_path))
    lock.release()
    prepare(make_config(tmp_path))


def test_the_header_names_model_parameters_task_device_drafter_and_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(make_config(tmp_path / "mine"))
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    assert list(rows) == ["model", "task", "algorithm", "ranks", "update", "speculation", "folder"]
    assert rows["algorithm"] == "grpo: advantage group-std, token ratio clipped at [0.8, 1.28], token mean"
    assert "recipes/countdown/base: " in rows["model"]
    assert rows["model"].endswith("M parameters")
    assert "8 problems, 4 held out" in rows["task"]
    assert rows["ranks"] == "2 on cpu (run.device is cpu), float32"
    assert rows["update"] == "policy replicated (ranks on CPUs)"
    assert "recipes/countdown/drafter, trained in idle time" in rows["speculation"]
    assert rows["folder"] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("given", "chosen", "notes"),
    [
        ([], 4, []),
        (
            ["--run.num_ranks", "3"],
            3,
            ["  1 GPU(s) stay idle, for run.num_ranks is 3; --run.num_ranks 4 takes all"],
        ),
        (["--run.device", "cpu"], 2, []),
    ],
)
def test_the_number_of_ranks_that_is_chosen_stands_in_the_configuration_and_idle_gpus_in_a_note(
    given: list[str],
    chosen: int,
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tlt.training.build.ranks.num_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    lines = (RECIPE / "quickstart.toml").read_text().splitlines()
    (tmp_path / "mine.toml").write_text("\n".join(x for x in lines if not x.startswith("num_ranks")))
    words = ["--model.path", str(RECIPE / "base"), "--drafter.path", str(RECIPE / "drafter")]
    words += [*SIZES, "--run.out_dir", str(tmp_path / "mine")]
    config = prepare(load_config(tmp_path / "mine.toml", [*words, *given]))
    said = capsys.readouterr().out.splitlines()
    assert config.run.num_ranks == chosen
    assert next(line for line in said if line.startswith("ranks ")).split()[1] == str(chosen)
    assert [line for line in said if "idle," in line] == notes
    ranks = next(line for line in said if line.startswith("ranks "))
    assert ("as many as the cores allow" in ranks) == ("cpu" in given)


def test_responses_that_the_window_would_cut_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config, window = make_config(tmp_path), 4096
    problems = [*load_problems(config, "train"), *load_problems(config, "test")]
    room = window - max(len(problem.prompt_ids) for problem in problems)
    for max_tokens, is_refused in ((room, False), (room + 1, True)):
        longer = load_config(config.model_dump(), {"sampling.max_tokens": max_tokens})
        told = f"is {room + 1}, but the model's window of {window} tokens leaves {room} after .*; give {room}"
        with (
            pytest.raises(UserError, match=rf"^sampling\.max_tokens: {told}") if is_refused else nullcontext()
        ):
            preflight(longer)


def test_names_of_the_hub_are_looked_up_once_and_the_run_and_its_resumption_stay_with_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copy(RECIPE / "quickstart.toml", "run.toml")
    words = [
        "--model.path",
        "me/base",
        "--drafter.path",
        "me/drafter",
        "--run.out_dir",
        "out",
        "--run.device",
        "cpu",
    ]
    words += SIZES
    with serve_hub() as hub:
        point_at(monkeypatch, hub.url)
        base, drafter = hub.add("me/base", RECIPE / "base"), hub.add("me/drafter", RECIPE / "drafter")
        commits = base.commit, drafter.commit
        config = prepare(resolve_config(Path("run.toml"), words, None))
        assert config.model.path == Path(f"me/base@{commits[0]}")
        assert config.drafter.path == Path(f"me/drafter@{commits[1]}")
        assert f"me/base@{commits[0][:8]}: " in capsys.readouterr().out
        Path("out/config.json").write_text(config.to_json())
        hub.add("me/base", {"config.json": b"another"})
        for path, overrides in ((None, []), (Path("run.toml"), words)):
            resumed = resolve_config(path, overrides, Path("out"))
            assert (resumed.model, resumed.drafter) == (config.model, config.drafter)
    point_at(monkeypatch, "http://127.0.0.1:9")  # as ranks and resumed runs may find it
    ranks = Config.from_json(config.to_json())
    assert len(preflight(ranks).data.problems) == len(load_problems(ranks, "train")) == 8


def test_the_next_commands_make_problems_and_answer_them_with_the_drafter_where_the_run_has_one(
    tmp_path: Path,
) -> None:
    products = {"policy": Path("run/policy"), "drafter": Path("run/drafter")}
    task, generate = next_commands(make_config(tmp_path), products)
    words = shlex.split(task)
    assert words[:3] == ["tlt", "task", "countdown"]
    assert json.loads(words[words.index("--options") + 1])["max_number"] == 15
    assert words[words.index("--out") + 1] == "problems.jsonl"
    assert generate.startswith("tlt generate run/policy --prompts problems.jsonl ")
    assert generate.endswith(" --speculation adaptive --drafter run/drafter")
    assert "drafter" not in next_commands(make_config(tmp_path), {"policy": Path("run/policy")})[1]


def test_the_next_commands_answer_in_the_environment_that_the_run_had(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    changed = config.model_copy(update={"environment": EnvironmentSection(respond="my_user:answer")})
    products = {"policy": tmp_path / "policy"}
    words = [shlex.split(next_commands(one, products)[1]) for one in (config, changed)]
    assert "--environment" not in words[0]
    assert words[1][words[1].index("--environment") + 1] == str(tmp_path)


@pytest.mark.parametrize("has_template", [True, False])
def test_texts_that_go_raw_to_a_model_with_a_chat_template_are_said_in_one_line(
    has_template: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "has_template", has_template)
    prepare(make_config(tmp_path))
    said = (
        "12 prompts are text and go to the model as they are, though it has a chat template; task.chat = true"
    )
    assert (said in " ".join(capsys.readouterr().out.split())) == has_template


def test_the_header_tells_an_environment_that_is_not_deterministic() -> None:
    section = EnvironmentSection(tools=("tools:search",))
    assert describe_environment(section) == "tools:search; at most 8 turns, 10 s a call"
    told = describe_environment(section.model_copy(update={"deterministic": False}))
    assert told.endswith("; not deterministic, so another run with this seed may part")
