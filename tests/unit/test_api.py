"""The Python API: what a script or a notebook sees. Its tokens are the command line's; its mistakes are
one line each."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tlt
from tests.faults.workspace import make_models
from tlt.apps.api import Engine, train
from tlt.apps.cli.main import main
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.recipes import find_recipe
from tlt.base.types import UserError

PROMPTS = ["[2,9,16:5]", "[4,8:12]"]
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with Countdown's tokenizer and a chat template, and a random drafter."""
    folder = tmp_path_factory.mktemp("api")
    make_models(folder, max_positions=64)
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    (folder / "model/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder / "model", dtype="float64", device="cpu", speculation="off")


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
    options = "--samples 3 --max-tokens 24 --seed 5 --temperature 0.9 --top-p 0.95 --top-k 9"
    words = [*options.split(), "--dtype", "float64", "--device", "cpu"]
    words += ["--speculation", speculation, "--drafter", str(folder / "drafter")]
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(folder / "model"), *files, *words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    engine = tlt.Engine.from_pretrained(
        folder / "model",
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


def test_a_stream_yields_the_same_responses_and_may_be_left_early(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, samples=2, max_tokens=12)
    assert sorted(engine.stream(PROMPTS, samples=2, max_tokens=12), key=expected.index) == expected
    stream = engine.stream(PROMPTS, samples=2, max_tokens=12)
    next(stream)
    with pytest.raises(UserError, match="a stream of it is still open"):
        engine.generate(PROMPTS)
    stream.close()
    assert engine.generate(PROMPTS, samples=2, max_tokens=12) == expected


def test_a_model_that_is_not_there_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError, match="nowhere: is no directory; give a local checkpoint"):
        Engine.from_pretrained(folder / "nowhere")


def test_the_memory_of_the_caches_is_the_callers_to_give(folder: Path) -> None:
    with pytest.raises(UserError, match="kv_gib: is 0; it must be greater than 0"):
        Engine.from_pretrained(folder / "model", kv_gib=0)
    small = Engine.from_pretrained(folder / "model", kv_gib=1e-9)
    with pytest.raises(UserError, match=r"kv_gib: .* hold 0 tokens .*; give kv_gib at least"):
        small.generate(PROMPTS, max_tokens=8)


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
        "model": {"path": folder / "model"},
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


@pytest.mark.parametrize("change", [{"rewards.num_workers": 1}, {"run.num_ranks": 2}])
def test_an_object_that_cannot_reach_the_other_processes_is_refused(
    sections: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r"^task: a Digits that no module holds .*; set run\.num_ranks = 1 and"
    ):
        train(load_config(sections, change), task=Digits())


def test_a_mistake_in_training_is_raised_and_not_printed(
    sections: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="unknown task 'digits'"):
        train(load_config(sections))
    config = Config(model={"path": "nowhere"}, task={"name": "countdown"})  # type: ignore[arg-type]  # pydantic makes sections
    with pytest.raises(UserError, match="there is no such folder"):
        train(config)
    assert capsys.readouterr() == ("", "")


def test_a_run_that_cannot_begin_says_what_it_was_doing_and_lets_go_of_its_folder(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook keeps the error, and with it all that the failed run has opened."""

    def fail(*given: Any, **named: Any) -> None:
        raise UserError("the engine has no room")

    with monkeypatch.context() as patched:
        patched.setattr("tlt.training.build.models.build_backend", fail)
        with pytest.raises(UserError, match="the engine has no room") as kept:
            train(load_config(sections), task=Digits())
    assert "loading model and problems" in capsys.readouterr().out
    assert train(load_config(sections), task=Digits()).is_finished
    assert kept.tb is not None
