"""The Python API: what a script or a notebook sees. Its tokens are the command line's; its mistakes are
one line each."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import tlt
from tlt.apps.api import Engine, Sampling, _named, train
from tlt.apps.cli.main import main
from tlt.base.config.engine import DeviceSection, EngineSection
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.recipes import find_recipe
from tlt.base.strategy import Strategy
from tlt.base.types import Reward, SamplingParams, UserError
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.engine.build.engine import EngineSettings
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import load_model_config
from tlt.models.hf.weights import save_model
from tlt.tasks.base import get_task
from tlt.tasks.countdown import TASK
from tlt.training.live import LiveSettings
from tlt.training.report.console import Console

BASE = find_recipe("countdown").parent / "base"
PROMPTS = ["[2,9,16:5]", "[4,8:12]"]
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with Countdown's tokenizer and a chat template, and a random drafter."""
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        "llama", load_model_config(BASE).vocab_size, 32, 64, 2, 4, 2, 8, tie_embeddings=True, max_positions=64
    )
    policy = Transformer(config).initialize(0, std=0.15)
    save_model(folder / "base", config, policy.state_dict(), dtype=torch.float32, source=BASE)
    settings = json.loads((folder / "base/tokenizer_config.json").read_text())
    (folder / "base/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
    save_drafter(folder / "drafter", new_model(drafter_shape(config)).initialize(0), torch.float32)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder / "base", dtype="float64", device="cpu", speculation="off")


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_importing_the_package_brings_neither_torch_nor_pydantic() -> None:
    code = "import sys, tlt; dir(tlt); tlt.__version__; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "pydantic", "transformers", "numpy", "tlt.apps.api"} & set(loaded)


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in tlt.__all__:
        assert getattr(tlt, name) is not None
    assert set(tlt.__all__) <= set(dir(tlt))
    assert tlt.Engine is Engine
    assert issubclass(tlt.UserError, ValueError)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        tlt.Engin  # noqa: B018  # the look-up is what is tested


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("speculation", ["off", "adaptive", "4x1x4"])
def test_the_same_seed_and_problems_give_the_command_lines_tokens(
    folder: Path, tmp_path: Path, speculation: str
) -> None:
    records: list[dict[str, Any]] = [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1], "problem_id": "second"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [
        "--samples",
        "3",
        "--max-tokens",
        "24",
        "--seed",
        "5",
        "--temperature",
        "0.9",
        "--top-p",
        "0.95",
        "--top-k",
        "9",
        "--dtype",
        "float64",
        "--device",
        "cpu",
    ]
    words += ["--speculation", speculation, "--drafter", str(folder / "drafter")]
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(folder / "base"), *files, *words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    engine = tlt.Engine.from_pretrained(
        folder / "base",
        drafter=folder / "drafter",
        speculation=speculation,
        dtype=torch.float64,
        device="cpu",
    )
    prompts = [PROMPTS[0], records[1]]
    responses = engine.generate(
        prompts, samples=3, max_tokens=24, seed=5, temperature=0.9, top_p=0.95, top_k=9
    )
    for response, line in zip(responses, lines, strict=True):
        record = json.loads(json.dumps(dataclasses.asdict(response)))
        assert record.pop("logprobs") == pytest.approx(
            line.pop("logprobs"), abs=1e-12
        )  # another shape of draft, another last bit
        assert record == line
    assert [response.problem_id for response in responses] == ["1"] * 3 + ["second"] * 3
    if speculation != "adaptive":  # which may find that drafting does not pay
        assert (engine.stats.accept_length is None) == (speculation == "off")


def test_text_ids_messages_and_records_are_prompts(engine: Engine) -> None:
    ids = engine.generate(PROMPTS[:1], max_tokens=8)[0].prompt_ids
    kinds: list[Any] = [PROMPTS[0], list(ids), ids, np.array(ids).tolist(), [np.int64(i) for i in ids]]
    kinds += [[{"role": "user", "content": PROMPTS[0]}], {"prompt": PROMPTS[0]}, {"prompt_ids": ids}]
    responses = engine.generate(kinds, max_tokens=8)
    assert [response.problem_id for response in responses] == [
        str(number) for number in range(1, len(kinds) + 1)
    ]
    assert {response.prompt_ids[-len(PROMPTS[0]) :] for response in responses} == {ids[-len(PROMPTS[0]) :]}
    named = engine.generate([{"prompt_ids": ids, "problem_id": "1"}], max_tokens=8)
    assert named == engine.generate([PROMPTS[0]], max_tokens=8)


def test_a_response_holds_what_was_asked_and_drawn(engine: Engine) -> None:
    (response,) = engine.generate(PROMPTS[:1], max_tokens=12, seed=3)
    assert len(response.logprobs) == len(response.token_ids) <= 12
    assert engine.tokenizer is not None
    assert response.text == engine.tokenizer.decode(response.token_ids)
    assert all(logprob < 0 for logprob in response.logprobs)
    first = response.token_ids[0]
    (stopped,) = engine.generate(PROMPTS[:1], max_tokens=12, seed=3, stop_ids=(first,))
    assert (stopped.token_ids, stopped.finish_reason) == ((first,), "stop")


def test_a_stream_yields_the_same_responses_and_may_be_left_early(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, samples=2, max_tokens=12)
    assert sorted(engine.stream(PROMPTS, samples=2, max_tokens=12), key=expected.index) == expected
    stream = engine.stream(PROMPTS, samples=2, max_tokens=12)
    next(stream)
    with pytest.raises(UserError, match="a stream of it is still open"):
        engine.generate(PROMPTS)
    stream.close()
    assert engine.generate(PROMPTS, samples=2, max_tokens=12) == expected


def test_stats_are_of_the_latest_call(folder: Path) -> None:
    engine = Engine.from_pretrained(folder / "base", speculation=Strategy("ngram", 4, 1, 4), device="cpu")
    for samples in (3, 2):
        responses = engine.generate(PROMPTS, samples=samples, max_tokens=20)
        assert engine.stats.num_tokens == sum(len(response.token_ids) for response in responses)
    assert engine.device == torch.device("cpu")


def test_the_sampling_arguments_are_those_of_the_law() -> None:
    assert get_type_hints(Sampling) == get_type_hints(SamplingParams)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (Engine.from_pretrained, {"engine", "max_batch_size", "device", "dtype"}),
        (EngineSettings, {"engine", "max_batch_size", "kv_gib"}),
        (LiveSettings, {"max_batch_size"}),
    ],
)
def test_an_engine_has_the_defaults_of_the_configuration(call: Callable[..., Any], names: set[str]) -> None:
    declared = {**EngineSection().model_dump(), **DeviceSection().model_dump()}
    defaults = {name: parameter.default for name, parameter in signature(call).parameters.items()}
    assert {name: defaults[name] for name in names} == {name: declared[name] for name in names}


def test_a_model_that_is_not_there_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError, match="nowhere: is no directory; give a local checkpoint"):
        Engine.from_pretrained(folder / "nowhere")


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_configuration_is_a_recipe_by_its_name_with_overrides_as_a_dict(tmp_path: Path) -> None:
    overrides = {
        "run.num_steps": 7,
        "task.options": {"max_number": 9},
        "run.out_dir": tmp_path / "run",
        "drafter.path": None,
    }
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
    assert sections["task"] == {
        "name": "countdown",
        "options": {"max_number": 9},
    }  # the caller's own stays as it is
    monkeypatch.chdir(base.parent)
    assert load_config({**sections, "model": {"path": "base"}}).model.path == base


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────


class Digits:
    """A response is rewarded for the digits it holds."""

    def problems(self, num: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
        return [
            {"problem_id": f"{split}-{i}", "prompt": f"[{i % 9 + 1},{i % 7 + 1}:{i + 1}]"} for i in range(num)
        ]

    def score(self, problem: dict[str, Any], text: str) -> dict[str, Any]:
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        return {"reward": share, "solved": share > 0.5}


@pytest.fixture
def sections(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of two steps on one rank, without reward workers."""
    return {
        "run": {"num_steps": 2, "num_ranks": 1, "out_dir": tmp_path / "run", "device": "cpu"},
        "model": {"path": folder / "base"},
        "task": {"name": "digits", "num_problems": 4},
        "rollout": {"problems_per_step": 2, "samples_per_problem": 2},
        "sampling": {"max_tokens": 8},
        "evaluation": {"num_problems": 2, "samples_per_problem": 1},
        "rewards": {"num_workers": 0},
    }


def test_an_object_of_this_process_is_a_task_that_trains(
    sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = []

    class Here(Digits):
        def score(self, problem: dict[str, Any], text: str) -> dict[str, Any]:
            scored.append(text)
            return super().score(problem, text)

    threads = torch.get_num_threads()
    result = train(load_config(sections), task=Here())
    assert result.folder == tmp_path / "run"
    assert result.is_finished
    assert [evaluation.step for evaluation in result.evaluations] == [0, 2]
    assert len(scored) == 2 * 2 * 2 + 2 * 2
    assert torch.get_num_threads() == threads
    assert "in_this_process" not in sys.modules
    said = capsys.readouterr().out
    assert "metrics.jsonl" in said
    assert "Try it" not in said, "no command could find the task"
    assert Engine.from_pretrained(result.folder / "policy", device="cpu").generate(PROMPTS, max_tokens=4)
    with pytest.raises(UserError, match="holds a run already; continue it with tlt train --resume"):
        train(load_config(sections), task=Here())


def test_an_object_of_a_module_is_known_by_its_name_in_every_process(sections: dict[str, Any]) -> None:
    config = load_config(sections, {"rewards.num_workers": 1, "run.num_ranks": 2})
    with _named(TASK, config) as name:
        assert (name, get_task(name)) == ("tlt.tasks.countdown:TASK", TASK)


@pytest.mark.parametrize("change", [{"rewards.num_workers": 1}, {"run.num_ranks": 2}])
def test_an_object_that_cannot_reach_the_other_processes_is_refused(
    sections: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r"^task: a Digits that no module holds .*; set run\.num_ranks = 1 and"
    ):
        train(load_config(sections, change), task=Digits())


def test_a_class_in_the_place_of_its_object_is_refused(sections: dict[str, Any]) -> None:
    for wrong in (Digits, 3):
        with pytest.raises(UserError, match="is no task; give an object with problems"):
            train(load_config(sections), task=wrong)  # type: ignore[arg-type]  # as a user without a type checker would


def test_a_mistake_in_training_is_raised_and_not_printed(
    sections: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="unknown task 'digits'"):
        train(load_config(sections))
    config = Config(model={"path": "nowhere"}, task={"name": "countdown"})  # type: ignore[arg-type]  # pydantic makes sections
    with pytest.raises(UserError, match="there is no such folder"):
        train(config)
    assert capsys.readouterr() == ("", "")


def test_tlt_train_is_the_function_however_the_packages_below_are_imported() -> None:
    assert importlib.import_module("tlt.training.run") is not None
    assert tlt.train is train
    assert tlt.train is train


def test_a_run_that_cannot_begin_says_what_it_was_doing_and_lets_go_of_its_folder(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook keeps the error, and with it all that the failed run has opened."""

    def fail(*given: Any, **named: Any) -> None:
        raise UserError("the engine has no room")

    with monkeypatch.context() as patched:
        patched.setattr("tlt.training.run.build_backend", fail)
        with pytest.raises(UserError, match="the engine has no room") as kept:
            train(load_config(sections), task=Digits())
    assert "loading model and problems" in capsys.readouterr().out
    assert train(load_config(sections), task=Digits()).is_finished
    assert kept.tb is not None


@pytest.mark.parametrize("hours", [2, -2])
def test_a_clock_that_is_set_during_a_run_changes_nothing(
    hours: int, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time_of_day, is_set = time.time, []
    monkeypatch.setattr(time, "time", lambda: time_of_day() + 3600 * hours * bool(is_set))

    class SetsTheClock(Digits):
        def score(self, problem: Mapping[str, Any], response_text: str) -> Reward:
            is_set.append(True)
            return super().score(problem, response_text)

    result = train(load_config(sections, {"run.time_limit_minutes": 60.0}), task=SetsTheClock())
    assert is_set
    assert result.is_finished
    assert (result.folder / "metrics.jsonl").read_text().count("\n") == 2
    (spent,) = (
        line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("time ")
    )
    assert 0 <= int(spent[0]) < 3600
    assert spent[1].startswith(("s", "min"))


@pytest.mark.parametrize(
    ("minutes", "title"), [(1e-6, "ended after 0 of 2 steps"), (60.0, "training complete")]
)
def test_the_summary_is_titled_by_what_was_done(
    minutes: float, title: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Console, "summary", lambda console, rows, commands, title: titles.append(title))
    train(load_config(sections, {"run.time_limit_minutes": minutes}), task=Digits())
    assert titles == [title]


def test_a_run_that_its_time_limit_ends_says_so(
    sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(load_config(sections, {"run.time_limit_minutes": 1e-6}), task=Digits())
    assert [evaluation.step for evaluation in result.evaluations] == [0]
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "time_limit_minutes" in line)
    assert said.endswith(
        f"ends the run after 0 of 2 steps; go on with: tlt train --resume {tmp_path / 'run'}"
    )
