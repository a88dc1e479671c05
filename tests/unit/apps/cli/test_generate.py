"""tlt generate: one line per response, the same tokens for the same seed, nothing half-written."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.apps.cli.parts import (
    VOCABULARY,
    WINDOW,
    generate,
    read_lines,
    refuse,
    save_tokenizer,
    succeed,
    write_lines,
)

USER = {"role": "user", "content": "1"}


@pytest.mark.usefixtures("here")
def test_generate_writes_one_line_per_response_in_order(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"problem_id": "b", "prompt": "[2,9:7]"}, {"problem_id": 7, "prompt": "1"}
    write_lines("prompts.jsonl", named[0], "", {"prompt_ids": [3, 4]}, named[1])
    summary = generate(capsys, model, "--samples", "3", "--seed", "5", "--speculation", "off")
    records = read_lines("out.jsonl")
    keys = [(r["problem_id"], r["sample_index"]) for r in records]
    assert keys == [(p, s) for p in ("b", "3", "7") for s in range(3)]
    fields = "problem_id sample_index prompt_ids token_ids text logprobs finish_reason"
    assert list(records[0]) == fields.split()
    assert records[0]["prompt_ids"] == [VOCABULARY.index(character) for character in "[2,9:7]"]
    assert records[3]["prompt_ids"] == [3, 4]
    assert all(len(r["logprobs"]) == len(r["token_ids"]) <= 8 for r in records)
    assert all((r["token_ids"][-1] == 1) == (r["finish_reason"] == "stop") for r in records)
    assert summary["tokens"] == sum(len(r["token_ids"]) for r in records)
    assert summary["accept_length"] is None
    assert summary["elapsed"] > summary["seconds"] > 0
    assert summary["device"] == "cpu"


@pytest.mark.usefixtures("here")
def test_generate_gives_the_same_tokens_for_the_same_seed_only(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    tokens = []
    for seed, batch in (("1", "64"), ("1", "1"), ("2", "64")):
        words = ("--seed", seed, "--max-batch-size", batch, "--samples", "4", "--dtype", "float64")
        generate(capsys, model, *words)
        tokens.append([record["token_ids"] for record in read_lines("out.jsonl")])
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


@pytest.mark.usefixtures("here")
def test_either_implementation_of_the_model_gives_the_same_tokens(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    found = []
    for implementation in ("own", "transformers"):
        generate(capsys, model, "--implementation", implementation, "--dtype", "float64")
        found.append(read_lines("out.jsonl"))
    own, other = found
    assert [line["token_ids"] for line in own] == [line["token_ids"] for line in other]
    assert own != other, "rounded differently"
    told = refuse(capsys, model, "--implementation", "ours")
    assert told == "--implementation: is ours; it must be 'auto', 'own' or 'transformers'"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{'prompt': 1}", "prompts.jsonl:1: not valid JSON"),
        ({}, "prompts.jsonl:1 (problem '1'): has no prompt; give one of prompt"),
        ({"prompt": "1", "prompt_ids": [2]}, "has prompt and prompt_ids; give exactly one"),
        ({"prompt": 3}, "prompt is 3; it must be text"),
        ({"prompt": ""}, "prompt is ''; it must be text"),
        ({"prompt": "[2,9;7]"}, "has no token for ';' (column 5); remove it"),
        ({"prompt_ids": [2, 61]}, "token id 61 is outside the vocabulary of 61"),
        ({"prompt_ids": [2.5]}, "prompt_ids is [2.5]; it must be a list of whole numbers"),
        ({"prompt_ids": []}, "the prompt is empty; give at least one token"),
        ({"messages": [USER]}, "has no chat template; give prompt (text) or prompt_ids"),
        ({"messages": ["1"]}, "messages must be a list of objects"),
        ({"problem_id": "l", "prompt": "1" * WINDOW}, "(problem 'l'): the prompt has 64 tokens but the"),
        ({"problem_id": None, "prompt": "1"}, "problem_id is None; it must be text"),
    ],
)
def test_generate_refuses_a_bad_prompt_with_its_place(
    line: Any, part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", line)
    assert part in refuse(capsys, model)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--speculation learned:4x1x4", "'learned:4x1x4' needs a drafter of kind learned; there is ngram"),
        ("--speculation fast", "--speculation: is fast; give off, adaptive or DEPTHxWIDTHxBUDGET"),
        ("--speculation adaptive --drafter no", "--drafter: no does not exist"),
        ("--top-p 0", "--top-p: is 0; it must be greater than 0"),
        ("--samples 0", "--samples: is 0; it must be greater than or equal to 1"),
        ("--stop [1", "--stop: is [1; it is no JSON list"),
        ("--columns {", "--columns: is {; it is no JSON object"),
        ("--chat maybe", "--chat: is maybe"),
    ],
)
def test_generate_refuses_options_in_one_line(
    words: str, part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "1"})
    assert part in refuse(capsys, model, *words.split())


@pytest.mark.usefixtures("here")
def test_generate_refuses_a_model_whose_weights_are_not_finite(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, "broken")
    tensors = load_file("broken/model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, "broken/model.safetensors", metadata={"format": "pt"})
    write_lines("prompts.jsonl", {"prompt_ids": [2, 3]})
    message = refuse(capsys, Path("broken"))
    assert "tensor model.norm.weight holds NaN or infinite values as" in message


@pytest.mark.usefixtures("here")
def test_generate_reads_rows_with_other_names_of_columns_and_writes_prompts_as_chat(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    message = "{{ '*' if m.role == 'system' else '/' }}{{ m.content }}"
    template = f"{{% for m in messages %}}{message}{{% endfor %}}{{{{ end or '' }}}}="
    save_tokenizer(chatty, chat_template=template)
    Path("rows").mkdir()
    for file, question in (("test", "12"), ("train", "34")):
        write_lines(f"rows/{file}.jsonl", {"question": question, "level": 3})
    data = (
        *["--prompts", "rows", "--out", "out.jsonl", "--max-tokens", "2", "--columns"],
        '{"prompt": "question"}',
    )
    for options, text in (
        ((), "12"),
        (("--split", "train"), "34"),
        (("--chat", "true"), "/12="),
        (("--system-prompt", "9"), "*9/12="),
        (("--chat", "true", "--chat-template-kwargs", '{"end": "!"}'), "/12!="),
    ):
        succeed(capsys, "generate", str(chatty), *data, *options)
        (record,) = read_lines("out.jsonl")
        assert "".join(VOCABULARY[token] for token in record["prompt_ids"]) == text


@pytest.mark.usefixtures("here")
def test_generate_ends_a_response_at_a_stop_text_which_it_keeps(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"})
    options = ("--samples", "30", "--max-tokens", "20", "--dtype", "float64")
    generate(capsys, model, *options)
    whole = [record["token_ids"] for record in read_lines("out.jsonl")]
    for words, stops in ((("--stop", "7"), ("7",)), (("--stop", '["1", "23"]'), ("1", "23"))):
        for more in ((), ("--speculation", "ngram:4x1x4")):
            generate(capsys, model, *options, *words, *more)
            records = read_lines("out.jsonl")
            for record, ids in zip(records, whole, strict=True):
                assert record["token_ids"] == ids[: len(record["token_ids"])]
            ended = [record for record in records if any(stop in record["text"] for stop in stops)]
            assert ended
            assert {record["finish_reason"] for record in ended} == {"stop"}
            assert all(record["text"].endswith(stops) for record in ended)


@pytest.mark.usefixtures("here")
def test_max_tokens_beyond_the_window_is_refused_where_it_is_asked_for(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "1"}, {"problem_id": "long", "prompt": "1" * 20})
    room = WINDOW - 20
    leaves = f"leaves {room} after the prompt of problem 'long'"
    told = f"is {room + 1}, but the model's window of {WINDOW} tokens {leaves}"
    line = f"--max-tokens: {told}; give {room} or less, or shorter prompts (max_prompt_tokens "
    line += f"{WINDOW - room - 1} leaves longer ones out)"
    assert refuse(capsys, model, "--max-tokens", str(room + 1)) == line
    for words in ([], ["--max-tokens", str(room)]):
        files = ("--prompts", "prompts.jsonl", "--out", "out.jsonl")
        assert succeed(capsys, "generate", str(model), *files, *words)["responses"] == 2
