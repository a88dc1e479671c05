"""What a run says of its prompts, and what of them a resumed run is held to."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.models.hf.chat_parts import template_of, write_tokenizer
from tlt.apps.run import start
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.types import SamplingParams, UserError
from tlt.models.hf import prompts
from tlt.models.hf.families import load_model_config
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.training.build.problems import load_problems
from tlt.training.build.run_data import RunData, read_run_data
from tlt.training.saved.inputs import Inputs, special_tokens_of

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}


def configure(folder: Path, rows: list[Any], name: str = "chatml", **task: Any) -> Config:
    """A run of rows, with a template's tokenizer."""
    model = write_tokenizer(folder / "model", template_of(name))
    (model / "config.json").write_text(json.dumps(SHAPE))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(model)},
        "task": {"name": "data", "data": str(folder / "rows.jsonl"), **task},
        "rollout": {"problems_per_step": 1},
        "evaluation": {"num_problems": 0},
        "rewards": {"functions": ["rewards:length"]},
        "run": {"out_dir": str(folder / "out"), "num_ranks": 1, "device": "cpu"},
    }
    return load_config(values)


def read(config: Config) -> RunData:
    folder = config.model.path
    return read_run_data(config, load_tokenizer(folder), load_model_config(folder))


def rows_of(*texts: str) -> list[Any]:
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def test_prompts_beyond_the_longest_are_left_out_and_counted(tmp_path: Path) -> None:
    config = configure(tmp_path, rows_of("a", "b" * 200, "c", "d" * 5000), max_prompt_tokens=100)
    data = read(config)
    assert [problem.problem_id for problem in data.problems] == ["1", "3"]
    assert data.notes == [
        "2 of 4 prompts are left out: they have more than 100 tokens (task.max_prompt_tokens)",
    ]
    with pytest.raises(
        UserError, match=r"each of the 4 prompts has more than 3 tokens \(max_prompt_tokens\)"
    ):
        load_problems(configure(tmp_path, rows_of("a", "b", "c", "d"), max_prompt_tokens=3), "train")


def test_a_prompt_that_the_window_does_not_hold_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    rows = rows_of("a", "d" * 5000)
    with pytest.raises(UserError, match=r"rows.jsonl:2 .*leave such prompts out by max_prompt_tokens"):
        load_problems(configure(tmp_path, rows), "train")
    assert len(load_problems(configure(tmp_path, rows, max_prompt_tokens=4000), "train")) == 1


def test_answers_that_have_begun_are_counted(tmp_path: Path) -> None:
    begun = [
        *rows_of("a"),
        {"messages": [*rows_of("b")[0]["messages"], {"role": "assistant", "content": "c"}]},
    ]
    assert read(configure(tmp_path, begun)).notes == [
        "1 prompts end with the assistant's message, which the model continues; where that is the answer to "
        "learn, leave it out of the messages",
    ]


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "granite3"])
def test_a_run_keeps_the_date_on_which_it_began(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(date):
        @classmethod
        def today(cls) -> date:
            return date(2031, 3, 4)

    pinned = start.pin(configure(tmp_path, rows_of("a"), name))
    assert pinned.task.date == date.today().isoformat()
    monkeypatch.setattr(start, "date", Later)
    assert start.pin(pinned).task.date == pinned.task.date
    assert start.pin(configure(tmp_path, rows_of("a"), name)).task.date == "2031-03-04"
    assert load_problems(pinned, "train")[0].prompt_ids != (
        load_problems(start.pin(configure(tmp_path, rows_of("a"), name)), "train")[0].prompt_ids
    )
    assert start.pin(configure(tmp_path, rows_of("a"))).task.date is None, "this template writes none"


DAMAGED = {
    "cut off": lambda text: text[:-20],
    "a digit": lambda text: text[:-4] + b"9" + text[-3:],
    "empty": lambda text: b"",
    "no text": lambda text: b"\xff\xfe",
}
ROWS = rows_of("a", "b" * 200, "c")


def write_prompts(config: Config) -> RunData:
    config.run.out_dir.mkdir()
    data = read(config)
    data.write_prompts(config.run.out_dir)
    return data


def test_prompts_are_encoded_once_and_read_by_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, ROWS, max_prompt_tokens=100)
    written = write_prompts(config)
    monkeypatch.setattr(prompts, "encode_prompt", Mock(side_effect=AssertionError("encoded twice")))
    found = read(config)
    assert found.problems == written.problems
    assert [problem.problem_id for problem in found.problems] == ["1", "3"], "the long one is left out again"
    assert found.notes == written.notes


@pytest.mark.parametrize(
    "change",
    [
        {"rows": rows_of("a", "b" * 200, "d")},
        {"rows": ROWS[::-1]},
        {"rows": [*ROWS, *ROWS[:1]]},
        {"system_prompt": "Be brief."},
        {"max_prompt_tokens": 1000},
        {"name": "smollm2"},
        {"damage": "cut off"},
        {"damage": "a digit"},
        {"damage": "empty"},
        {"damage": "no text"},
    ],
    ids=str,
)
def test_prompts_are_encoded_anew_where_what_they_come_from_is_not_as_it_was(
    change: dict[str, Any], tmp_path: Path
) -> None:
    written = write_prompts(configure(tmp_path, ROWS, max_prompt_tokens=100))
    path, damage = tmp_path / "out" / "prompts.train.jsonl", change.get("damage")
    if damage is not None:
        path.write_bytes(DAMAGED[damage](path.read_bytes()))
    given = {"rows": ROWS, "max_prompt_tokens": 100, **change}
    config = configure(tmp_path, **{name: value for name, value in given.items() if name != "damage"})
    found = read(config)
    shutil.rmtree(config.run.out_dir)
    assert found.problems == read(config).problems, "as without the file"
    assert (found.problems == written.problems) == (damage is not None)


def inputs_of(config: Config) -> Inputs:
    tokenizer = load_tokenizer(config.model.path)
    params = tokenizer.with_ends(SamplingParams(stop_ids=tokenizer.stop_ids))
    problems = {"train": load_problems(config, "train")}
    return Inputs.of(config, problems, config.model.path, special_tokens=special_tokens_of(tokenizer, params))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chat_template": template_of("smollm2")}, "the prompts of the training problems have other tokens"),
        ({"chat_template": template_of("phi4")}, "for the chat template or the tokenizer of"),
        ({"eos_token": "<|im_start|>"}, r"the stop ids of .* are '\[258, 259\]', and were '\[256, 258\]'"),
        ({"pad_token": "<|im_start|>"}, None),
    ],
)
def test_a_resumed_run_is_held_to_what_the_tokenizers_settings_say(
    change: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    config = configure(tmp_path, rows_of("a", "b"))
    was = inputs_of(config)
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    if told is None:
        inputs_of(config).refuse_other(was, config, "then")
        return
    with pytest.raises(UserError, match=told):
        inputs_of(config).refuse_other(was, config, "then")
