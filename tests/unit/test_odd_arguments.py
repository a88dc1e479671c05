"""Odd arguments to the Python API: each is one UserError, a line with the place, the value and the remedy.
None is taken for another value, and none ends in the middle of a generation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tlt
from tlt.base.io.recipes import find_recipe
from tlt.base.types import SamplingParams, UserError
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.config import load_model_config
from tlt.models.hf.weights import save_model

BASE = find_recipe("countdown").parent / "base"
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
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        "llama", load_model_config(BASE).vocab_size, 32, 64, 1, 4, 2, 8, tie_embeddings=True, max_positions=64
    )
    save_model(
        folder, config, Transformer(config).initialize(0).state_dict(), dtype=torch.float32, source=BASE
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": "{{ messages[0]['content'] }}"})
    )
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
        ("temperature", None, NUMBER),
        ("temperature", True, NUMBER),
        ("temperature", [0.7], NUMBER),
        ("temperature", 1 + 0j, NUMBER),
        ("temperature", float("nan"), "it must be a finite number"),
        ("temperature", 1e300, "it must be less than or equal to 1000000"),
        ("temperature", -1.0, "it must be greater than or equal to 0"),
        ("top_k", 2.5, WHOLE),
        ("top_k", 10**30, "it must be less than or equal to 2147483647"),
        ("top_p", 0, "it must be greater than 0"),
        ("min_p", 1.5, "it must be less than or equal to 1"),
        ("max_tokens", 2.5, WHOLE),
        ("max_tokens", None, WHOLE),
        ("max_tokens", "5", WHOLE),
        ("max_tokens", True, WHOLE),
        ("max_tokens", 64, "the model's window of 64 tokens leaves"),
        ("stop", None, LIST),
        ("stop", "###", LIST),
        ("stop", b"###", LIST),
        ("stop", [5], "it must be a valid string"),
        ("stop", [""], "it must have at least 1 character"),
        ("stop", ["\ud800"], "it must be a valid string"),
        ("stop_ids", 5, LIST),
        ("stop_ids", [1.5], WHOLE),
        ("seed", None, WHOLE),
        ("seed", -1, "it must be greater than or equal to 0"),
        ("seed", 2**63, "it must be less than 9223372036854775808"),
        ("samples", 2.5, WHOLE),
        ("samples", 0, "it must be greater than or equal to 1"),
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
        (b"ab", "prompts", "b'ab'", "give a list of prompts"),
        (None, "prompts", "None", "give a list of prompts"),
        ({"prompt": PROMPT}, "prompts", "{'prompt'", "give a list of prompts"),
        ({PROMPT}, "prompts", "{'[2,9", "give a list of prompts"),
        ([PROMPT, b"ab"], "prompts:2", "b'ab'", PROMPTS),
        ([bytearray(b"ab")], "prompts:1", "bytearray(b'ab')", PROMPTS),
        ([{1, 2}], "prompts:1", "{1, 2}", PROMPTS),
        ([(i for i in (1, 2))], "prompts:1", "<generator", PROMPTS),
        ([None], "prompts:1", "None", PROMPTS),
        ([PROMPT, 7], "prompts:2", "7", PROMPTS),
        ([[1, "2"]], "prompts:1", "[1, '2']", IDS),
        ([[1, 2.5]], "prompts:1", "[1, 2.5]", IDS),
        ([[[1, 2]]], "prompts:1", "[[1, 2]]", IDS),
        ([[1.0]], "prompts:1", "[1.0]", IDS),
        ([[True]], "prompts:1", "[True]", IDS),
        ([np.array([1.5])], "prompts:1", "array([1.5])", IDS),
        ([torch.ones(1, 2, dtype=torch.int64)], "prompts:1", "tensor([[1, 1]])", IDS),
        ([[-1]], "prompts:1", "-1", "encode with the model's own tokenizer"),
        ([[10**6]], "prompts:1", "1000000", "encode with the model's own tokenizer"),
        ([[]], "prompts:1", "empty", "give at least one token"),
        ([""], "prompts:1", "''", "it must be text"),
        ([PROMPT + "\ud800"], "prompts:1", r"'\ud800'", "remove it"),
        ([[{"role": "user", "content": "\ud800"}]], "prompts:1", "half a character", "remove it"),
        ([{"text": PROMPT}], "prompts:1", "no prompt", "name the one that is"),
        ([{"role": "user", "content": "x"}], "prompts:1", "no prompt", "name the one that is"),
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
        ("path", "", FOLDER),
        ("drafter", 5, FOLDER),
        ("drafter", "nowhere", "give"),
        ("revision", 5, "it must be a valid string"),
        ("speculation", None, "give off, adaptive or"),
        ("speculation", 4, "give off, adaptive or"),
        ("speculation", "fast", "give off, adaptive or"),
        ("speculation", "learned:4x1x4", "a drafter of kind learned"),
        ("dtype", None, "use one of float64"),
        ("dtype", torch.float16, "use one of float64"),
        ("device", None, "give auto, cpu or cuda"),
        ("device", "meta", "give auto, cpu or cuda"),
        ("max_batch_size", 0, "it must be greater than or equal to 1"),
        ("max_batch_size", 1.5, WHOLE),
        ("max_batch_size", 10**9, "it must be less than or equal to 65536"),
        ("engine", None, "give tlt or vllm"),
        ("engine", ["tlt"], "give tlt or vllm"),
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


@pytest.mark.parametrize("source", [None, 5, b"countdown", ["countdown"], object()])
@pytest.mark.parametrize("call", [tlt.load_config, tlt.train])
def test_a_configuration_of_another_kind_is_one_line(call: Callable[[Any], Any], source: Any) -> None:
    refused(lambda: call(source), "config", repr(source), SECTIONS)


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"),
    [
        (None, "overrides", "None", "give a dict"),
        ("--run.seed 1", "overrides", "'--run.seed 1'", "give a dict"),
        ([1], "overrides", "[1]", "give a dict"),
        ({1: 2}, "overrides", "{1: 2}", "give a dict"),
        ({"seed": 1}, "overrides['seed']", "unknown", "did you mean run.seed?"),
        ({"run.num_step": 1}, "overrides['run.num_step']", "unknown", "did you mean run.num_steps"),
        ({"run.num_steps": -1}, "overrides['run.num_steps']", "-1", "it must be greater than"),
        ({"run.seed": True}, "overrides['run.seed']", "True", WHOLE),
        ({"sampling.top_k": 2.5}, "overrides['sampling.top_k']", "2.5", WHOLE),
        ({"sampling.stop": 5}, "overrides['sampling.stop']", "5", LIST),
        ({"model.path": 5}, "overrides['model.path']", "5", "it must be a path"),
        ({"model.path": "nowhere"}, "overrides['model.path']", "no such folder", ""),
        ({"task.options": 5}, "overrides['task.options']", "5", "it must be a table"),
    ],
)
def test_odd_overrides_are_one_line(overrides: Any, place: str, value: str, remedy: str) -> None:
    refused(lambda: tlt.load_config("countdown", overrides), place, value, remedy)


@pytest.mark.parametrize("sections", [{1: 2}, {"run": 5}, {"run": {1: 2}}, {"run": None}, {"runs": {}}, {}])
def test_odd_sections_are_one_line(sections: Any) -> None:
    refused(lambda: tlt.load_config(sections), "config", " is ", "")


@pytest.mark.parametrize("task", ["countdown", {}, 5, object, lambda problem: 1])
def test_an_odd_task_is_one_line(task: Any) -> None:
    refused(
        lambda: tlt.train("countdown", task=task),
        "task",
        repr(task),
        "give an object with problems() and score(), or",
    )


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("drafter", 5, "give a drafter's folder"),
        ("speculation", None, "it must be a valid string"),
        ("dtype", torch.float32, "it must be a valid string"),
        ("dtype", "float16", "use one of float64"),
        ("max_batch_size", 1.5, WHOLE),
        ("idle_share", 2, "it must be less than or equal to 1"),
        ("drafting", 5, "give a dict"),
    ],
)
def test_an_odd_setting_beside_another_trainer_is_one_line(argument: str, value: Any, remedy: str) -> None:
    refused(lambda: tlt.LiveSettings(**{argument: value}), argument, repr(value), remedy)


# ── and what is not odd ─────────────────────────────────────────────────────────────────────────────────────


def test_numbers_of_other_libraries_are_pythons_own() -> None:
    mixed = SamplingParams(
        np.float32(0.7),  # type: ignore[arg-type]  # as NumPy gives it
        np.int64(3),  # type: ignore[arg-type]
        torch.tensor(0.5),  # type: ignore[arg-type]
        max_tokens=torch.tensor(4),  # type: ignore[arg-type]
        stop_ids=np.array([1, 2]),  # type: ignore[arg-type]
        stop=["a", "b"],  # type: ignore[arg-type]
    )
    assert mixed == SamplingParams(
        float(np.float32(0.7)), 3, 0.5, max_tokens=4, stop_ids=(1, 2), stop=("a", "b")
    )
    assert [type(value) for value in (mixed.temperature, mixed.top_k, mixed.top_p)] == [float, int, float]
    assert type(SamplingParams(temperature=1).temperature) is float


def test_a_mixed_batch_of_whole_and_broken_temperatures_draws_what_each_draws_alone(
    engine: tlt.Engine,
) -> None:
    """A temperature of NumPy's must not choose the type of the batch's tensor."""
    alone = engine.generate([PROMPT], temperature=float(np.float32(0.7)), max_tokens=8)
    temperature: Any = np.float32(0.7)
    assert engine.generate([PROMPT], temperature=temperature, max_tokens=8) == alone


def test_arrays_of_ids_are_prompts(engine: tlt.Engine) -> None:
    ids = engine.generate([PROMPT], max_tokens=4)[0].prompt_ids
    kinds: list[Any] = [
        np.array(ids),
        torch.tensor(ids),
        np.array(ids, np.int32),
        {"prompt_ids": np.array(ids)},
        list(ids),
    ]
    responses = engine.generate(kinds, max_tokens=4)
    assert {response.prompt_ids for response in responses} == {ids}
    assert all(type(token) is int for response in responses for token in response.prompt_ids)
    rows: Any = np.array([ids, ids])
    assert [response.prompt_ids for response in engine.generate(rows, max_tokens=4)] == [ids, ids]


def test_max_tokens_that_is_left_out_is_what_the_window_leaves(engine: tlt.Engine) -> None:
    (response,) = engine.generate([PROMPT], stop_ids=())
    assert len(response.prompt_ids) + len(response.token_ids) == 64
    (again,) = engine.generate([PROMPT], stop_ids=(), max_tokens=64 - len(response.prompt_ids))
    assert again == response


def test_train_takes_what_load_config_takes(folder: Path, tmp_path: Path) -> None:
    sections = {
        "model": {"path": folder},
        "task": {"name": "nobodys"},
        "run": {"out_dir": tmp_path / "run", "num_ranks": 1},
    }
    for given in (sections, tlt.load_config(sections)):
        with pytest.raises(UserError, match="unknown task 'nobodys'"):
            tlt.train(given)
    file = tmp_path / "run.toml"
    run = f'[run]\nout_dir = "{tmp_path / "run"}"\nnum_ranks = 1\n'
    file.write_text(f'[model]\npath = "{folder}"\n[task]\nname = "nobodys"\n{run}')
    for path in (file, str(file)):
        with pytest.raises(UserError, match="unknown task 'nobodys'"):
            tlt.train(path)
