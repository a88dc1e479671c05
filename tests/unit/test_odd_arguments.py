"""Odd arguments to the Python API: each is one UserError, a line with the place, the value and the remedy.
None is taken for another value, and none ends in the middle of a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tlt
from tests.faults.workspace import make_models
from tlt.base.types import UserError

PROMPT = "[2,9,16:5]"
NUMBER, WHOLE, LIST = "it must be a valid number", "it must be a valid integer", "it must be a list"
PROMPTS, IDS = "give text, token ids, messages or a record", "it must be a list of whole numbers"
FOLDER, SECTIONS = (
    "give a folder, or a name on the Hugging Face hub",
    "give a TOML file, the name of a recipe, or a dict",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with Countdown's tokenizer and a window of 64 tokens."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    make_models(folder.parent, max_positions=64)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    chatty = {**settings, "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chatty))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> tlt.Engine:
    return tlt.Engine.from_pretrained(folder, speculation="off", device="cpu")  # drafts change roundings


def refused(call: Callable[[], Any], place: str, value: str, remedy: str) -> None:
    """Asserts that the call raises one line which begins with the place, holds the value, and ends in the
    remedy."""
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert re.fullmatch(rf"{re.escape(place)}(?=\W)[^\n]*[:,;] [^\n]+", line), line
    assert value in line
    assert remedy in line.partition(value)[2]


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("temperature", "1", NUMBER),
        ("temperature", True, NUMBER),
        ("temperature", float("nan"), "it must be a finite number"),
        ("temperature", 1e300, "it must be less than or equal to 1000000"),
        ("top_k", 10**30, "it must be less than or equal to 2147483647"),
        ("top_p", 0, "it must be greater than 0"),
        ("max_tokens", 2.5, WHOLE),
        ("max_tokens", 64, "the model's window of 64 tokens leaves"),
        ("stop", "###", LIST),
        ("stop", [5], "it must be a valid string"),
        ("stop", [""], "it must have at least 1 character"),
        ("stop", ["\ud800"], "it must be a valid string"),
        ("stop_ids", [1.5], WHOLE),
        ("seed", 2**63, "it must be less than 9223372036854775808"),
        ("samples", 10**9, "it must be less than or equal to 65536"),
        ("temprature", 0.7, "give temperature"),
        ("n", 4, "give one of temperature, top_k"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_an_odd_keyword_is_one_line(
    engine: tlt.Engine, method: str, argument: str, value: Any, remedy: str
) -> None:
    element = value[0] if isinstance(value, list) and argument != "temperature" else value
    shown = argument if remedy.startswith("give ") else repr(element)
    refused(lambda: getattr(engine, method)([PROMPT], **{argument: value}), argument, shown, remedy)


@pytest.mark.parametrize(
    ("prompts", "place", "value", "remedy"),
    [
        (PROMPT, "prompts", repr(PROMPT), "give a list of prompts"),
        ({"prompt": PROMPT}, "prompts", "{'prompt'", "give a list of prompts"),
        ([PROMPT, b"ab"], "prompts:2", "b'ab'", PROMPTS),
        ([(i for i in (1, 2))], "prompts:1", "<generator", PROMPTS),
        ([[1, 2.5]], "prompts:1", "[1, 2.5]", IDS),
        ([[True]], "prompts:1", "[True]", IDS),
        ([torch.ones(1, 2, dtype=torch.int64)], "prompts:1", "tensor([[1, 1]])", IDS),
        ([[10**6]], "prompts:1", "1000000", "encode with the model's own tokenizer"),
        ([[]], "prompts:1", "empty", "give at least one token"),
        ([""], "prompts:1", "''", "it must be text"),
        ([PROMPT + "\ud800"], "prompts:1", r"'\ud800'", "remove it"),
        ([[{"role": "user", "content": "\ud800"}]], "prompts:1", "half a character", "remove it"),
        ([{"text": PROMPT}], "prompts:1", "no prompt", "name the one that is"),
        ([{"prompt": PROMPT, "problem_id": "a"}] * 2, "prompts:2", "'a'", "prompts:1 already"),
        (
            [{"prompt": PROMPT, "problem_id": 1.5}],
            "prompts:1",
            "1.5",
            "it must be text that names the problem",
        ),
    ],
)
def test_an_odd_prompt_is_one_line(
    engine: tlt.Engine, prompts: Any, place: str, value: str, remedy: str
) -> None:
    refused(lambda: engine.generate(prompts, max_tokens=2), place, value, remedy)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("path", None, FOLDER),
        ("drafter", 5, FOLDER),
        ("drafter", "nowhere", "give"),
        ("speculation", "fast", "give off, adaptive or"),
        ("speculation", "learned:4x1x4", "a drafter of kind learned"),
        ("dtype", torch.float16, "use one of float64"),
        ("device", "meta", "give auto, cpu or cuda"),
        ("max_batch_size", 0, "it must be greater than or equal to 1"),
        ("engine", None, "give tlt or vllm"),
    ],
)
def test_an_odd_argument_of_loading_is_one_line(folder: Path, argument: str, value: Any, remedy: str) -> None:
    call = {"path": folder, "device": "cpu", argument: value}
    refused(
        lambda: tlt.Engine.from_pretrained(**call),
        argument,
        str(value).removeprefix("torch.") or "''",
        remedy,
    )


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"),
    [
        (None, "overrides", "None", "give a dict"),
        ({1: 2}, "overrides", "{1: 2}", "give a dict"),
        ({"seed": 1}, "overrides['seed']", "unknown", "did you mean run.seed?"),
        ({"run.num_step": 1}, "overrides['run.num_step']", "unknown", "did you mean run.num_steps"),
        ({"run.num_steps": -1}, "overrides['run.num_steps']", "-1", "it must be greater than"),
        ({"sampling.stop": 5}, "overrides['sampling.stop']", "5", LIST),
        ({"model.path": 5}, "overrides['model.path']", "5", "it must be a path"),
        ({"model.path": "nowhere"}, "overrides['model.path']", "no such folder", ""),
        ({"task.options": 5}, "overrides['task.options']", "5", "it must be a table"),
    ],
)
def test_odd_overrides_are_one_line(overrides: Any, place: str, value: str, remedy: str) -> None:
    refused(lambda: tlt.load_config("countdown", overrides), place, value, remedy)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("drafter", 5, "give a drafter's folder"),
        ("speculation", None, "it must be a valid string"),
        ("dtype", "float16", "use one of float64"),
        ("idle_share", 2, "it must be less than or equal to 1"),
        ("drafting", 5, "give a dict"),
    ],
)
def test_an_odd_setting_beside_another_trainer_is_one_line(argument: str, value: Any, remedy: str) -> None:
    refused(lambda: tlt.LiveSettings(**{argument: value}), argument, repr(value), remedy)


# ── and what is not odd ─────────────────────────────────────────────────────────────────────────────────────


def test_max_tokens_that_is_left_out_is_what_the_window_leaves(engine: tlt.Engine) -> None:
    (response,) = engine.generate([PROMPT], stop_ids=())
    assert len(response.prompt_ids) + len(response.token_ids) == 64
    (again,) = engine.generate([PROMPT], stop_ids=(), max_tokens=64 - len(response.prompt_ids))
    assert again == response
