"""Rows of one's own become records: of files, folders, and datasets of the hub, with our names of columns
and values of JSON. The hub is a stand-in on loopback."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.standin import Hub, serve_hub
from tests.unit.apps.cli.parts import save_tokenizer
from tlt.base.config.load import load_config
from tlt.base.config.schema import Config
from tlt.base.io.data import DataSource, read_data, to_json
from tlt.base.io.files import write_jsonl
from tlt.base.types import UserError
from tlt.models.hf.prompts import ChatFormat, encode_prompt
from tlt.models.hf.tokenizer import Tokenizer, load_tokenizer
from tlt.tasks.base import PreparesRecords, Task, prepare_records
from tlt.training.build.problems import load_problems

BASE = Path(__file__).parents[4] / "recipes" / "countdown" / "base"
ROWS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(6)]


def source(name: Path | str, **given: Any) -> DataSource:
    return DataSource(Path(name), "task.data", **given)


def refusal(source: DataSource) -> str:
    with pytest.raises(UserError) as caught:
        read_data(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def records(source: DataSource) -> list[dict[str, Any]]:
    return [record for _, record in read_data(source)]


# ── JSONL: ours, without any package ────────────────────────────────────────────────────────────────────────


def test_a_row_without_a_name_has_its_line_or_its_number_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "1"}\n{"prompt": "2", "problem_id": "mine"}\n')
    assert [record["problem_id"] for record in records(source(tmp_path / "a.jsonl"))] == ["2", "mine"]
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    found = read_data(source(tmp_path))
    assert [record["problem_id"] for _, record in found] == ["1", "mine", *"345678"]
    assert found[2][0] == f"{tmp_path / 'b.jsonl'}:1"


def test_rows_of_a_jsonl_split_are_written_as_in_datasets_and_keep_their_ids(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    for name in (tmp_path / "a.jsonl", tmp_path):
        whole = records(source(name))
        assert records(source(name, split="train[:-2]")) == whole[:-2]
        assert records(source(name, split="train[-2:]")) == whole[-2:]
        assert records(source(name, split="train[1:3]")) == whole[1:3]
        told = "split 'train[:10%]' names no rows of a JSONL file; write them as train[:1000] or train[-64:]"
        assert told in refusal(source(name, split="train[:10%]"))


def test_columns_get_our_names_and_the_others_keep_theirs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1", "prompt": "no", "level": 3}])
    (record,) = records(source(tmp_path / "a.jsonl", columns={"prompt": "question"}))
    assert record == {"problem_id": "1", "prompt": "1+1", "level": 3}
    message = refusal(source(tmp_path / "a.jsonl", columns={"prompt": "problem"}))
    told = "has no column 'problem'; columns are question, prompt, level"
    assert message.startswith(f"{tmp_path / 'a.jsonl'}:1: {told}")
    told = "is one file, which has no subset, and no split but train; remove test"
    assert told in refusal(source(tmp_path / "a.jsonl", split="test"))


def test_parquet_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    assert refusal(source(tmp_path / "a.parquet")).endswith(
        "needs the package datasets (JSONL does not); pip install 'datasets>=4'"
    )


def test_values_become_those_of_json_or_are_refused() -> None:
    day = datetime.datetime(2026, 1, 2, 3, 4)
    arrays = numpy.int64(3), numpy.arange(2), numpy.float32("inf")
    value = {"a": [1, 2.5, None, float("nan")], "b": arrays, "day": day, "d": decimal.Decimal("1.50")}
    expected = {"a": [1, 2.5, None, None], "b": [3, [0, 1], None], "day": "2026-01-02T03:04:00", "d": "1.50"}
    assert json.loads(json.dumps(to_json(value), allow_nan=False)) == expected
    call = {"arguments": {"city": "Paris", "date": None}}
    assert to_json([call]) == [{"arguments": {"city": "Paris"}}], "Parquet gives all rows the keys of each"
    with pytest.raises(TypeError, match="bytes"):
        to_json({"image": [b"png"]})


# ── Parquet, save_to_disk and folders of datasets ───────────────────────────────────────────────────────────


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def test_parquet_gives_plain_values_and_names_the_row_that_has_none(datasets: Any, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1"}], "at": datetime.date(2026, 1, 1), "x": None}
    rows: list[dict[str, Any]] = [{**row, "n": i} for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    found = records(source(tmp_path / "a.parquet"))
    assert found[2] == {"problem_id": "3", "prompt": rows[0]["prompt"], "n": 2, "at": "2026-01-01", "x": None}
    datasets.Dataset.from_list([{"prompt": "1", "image": b"png"}]).to_parquet(tmp_path / "b.parquet")
    told = "column 'image' holds bytes, which is no text, number or list: remove the column"
    assert refusal(source(tmp_path / "b.parquet")) == f"{tmp_path / 'b.parquet'}, row 1: {told}"
    (tmp_path / "c.parquet").write_bytes(b"broken")
    assert "cannot be loaded" in refusal(source(tmp_path / "c.parquet"))


def test_a_folder_of_parquet_and_one_of_save_to_disk_have_their_splits(datasets: Any, tmp_path: Path) -> None:
    rows = {"train": ROWS, "test": ROWS[:2]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows[name]) for name in rows})
    splits.save_to_disk(tmp_path / "saved")
    splits["train"].save_to_disk(tmp_path / "single")
    (tmp_path / "files").mkdir()
    for name, split in splits.items():
        split.to_parquet(tmp_path / "files" / f"{name}-00000-of-00001.parquet")
    for name in ("saved", "files"):
        assert len(records(source(tmp_path / name))) == 6
        assert len(records(source(tmp_path / name, usual_split="test"))) == 2
        assert len(records(source(tmp_path / name, split="test"))) == 2
        assert len(records(source(tmp_path / name, split="train[:4]"))) == 4
        assert "dev" in refusal(source(tmp_path / name, split="dev"))
    assert len(records(source(tmp_path / "single", usual_split="test"))) == 6
    assert "has no splits; remove 'test'" in refusal(source(tmp_path / "single", split="test"))


# ── datasets of the hub ─────────────────────────────────────────────────────────────────────────────────────

CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""
READ = """
import json, sys
from pathlib import Path
from tlt.base.io.data import DataSource, read_data
from tlt.base.types import UserError
for name, *words in json.loads(sys.argv[1]):
    try:
        found = read_data(DataSource(Path(name), "task.data", *(word or None for word in words)))
        print(json.dumps([len(found), found[0], "datasets" in sys.modules]))
    except UserError as error:
        print("null")
        print(f"tlt: error: {error}", file=sys.stderr)
"""


def read_all_in_process(
    hub: Hub, cache: Path, sources: Sequence[Sequence[str]], **environment: str
) -> tuple[list[Any], str]:
    """Returns what was found of each, None where it was refused, and stderr, as a new process with
    HF_ENDPOINT has it."""
    paths = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    known = {**paths, "HF_HOME": str(cache), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", READ, json.dumps(sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=known | environment, check=False)
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def read_in_process(hub: Hub, cache: Path, *words: str, **environment: str) -> tuple[Any, str]:
    (found,), said = read_all_in_process(hub, cache, [words], **environment)
    return found, said


def test_a_dataset_of_the_hub_is_downloaded_once_and_read_offline_without_the_package(
    datasets: Any, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    for name, rows in {"main/train": ROWS, "main/test": ROWS[:2], "socratic/train": ROWS[:1]}.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(repo / f"{name}-00000-of-00001.parquet")
    (repo / "README.md").write_text(CARD)
    cache = tmp_path / "home"
    with serve_hub() as hub:
        hub.add("openai/gsm8k", repo, kind="datasets")
        found, said = read_in_process(hub, cache, "openai/gsm8k", "main")
        assert found == [6, ["openai/gsm8k (main), row 1", {"problem_id": "1", **ROWS[0]}], True]
        assert said == "tlt: downloading openai/gsm8k\n"
        hub.requests.clear()
        found, said = read_in_process(hub, cache, "openai/gsm8k", "main")
        assert (found[0], found[2], said, hub.downloads) == (6, False, "", [])
        hub.requests.clear()
        found, said = read_in_process(hub, cache, "openai/gsm8k", "main", HF_HUB_OFFLINE="1")
        assert (found[0], said, hub.requests) == (6, "", [])
        wrong = {
            ("openai/gsm8k", "mine"): "BuilderConfig 'mine' not found. Available: ['main', 'socratic']",
            ("openai/gsm8k", ""): "Config name is missing.",
            ("openai/gsm8k", "main", "dev"): 'Unknown split "dev"',
            ("openai/none",): f"openai/none: is no folder or file here, and {hub.url} has no such dataset",
        }
        found, said = read_all_in_process(hub, cache, [("openai/gsm8k", "main", "test[:1]"), *wrong])
    assert found[0][0] == 1
    assert found[1:] == [None] * len(wrong)
    for part, line in zip(wrong.values(), said.splitlines(), strict=True):
        assert part in line


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────

USER = {"role": "user", "content": "2"}
TEMPLATE = (
    "{% for m in messages %}[{{ '0' if m.role == 'system' else '1' }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking %}+{% endif %}!"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "config.json").write_text('{"vocab_size": 61}')
    save_tokenizer(tmp_path, chat_template=TEMPLATE)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("record", "chat", "text"),
    [
        ({"prompt": "2"}, ChatFormat(), "2"),
        ({"prompt": "2"}, ChatFormat(wraps=True), "[1:2]!"),
        ({"prompt": "2"}, ChatFormat(system_prompt="9"), "[0:9][1:2]!"),
        ({"prompt": [{**USER, "tools": None}]}, ChatFormat(), "[1:2]!"),
        ({"messages": [USER]}, ChatFormat(system_prompt="9"), "[0:9][1:2]!"),
        ({"messages": [USER]}, ChatFormat(variables={"enable_thinking": True}), "[1:2]+!"),
        ({"prompt": "2", "messages": None}, ChatFormat(), "2"),
    ],
)
def test_a_prompt_is_text_or_messages_and_the_template_gets_what_is_set(
    record: dict[str, Any], chat: ChatFormat, text: str, tokenizer: Tokenizer
) -> None:
    assert encode_prompt(record, tokenizer, "here", chat) == tokenizer.encode_text(text)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"problem_id": "7", "level": 3, "question": "2", "answer": "4"},
            "has no prompt; its columns are level, question, answer: name the one that is, such as "
            "task.columns"
            """ = { prompt = "question" }, or --columns '{"prompt": "question"}' on a command line""",
        ),
        (
            {"problem_id": "7"},
            "has no prompt; give one of prompt (text), prompt_ids (token ids), messages (chat)",
        ),
        (
            {"prompt": "2", "prompt_ids": [3]},
            "has prompt and prompt_ids; give exactly one of them, by task.columns = "
            """{ prompt_ids = "prompt_ids" }, or --columns '{"prompt_ids": "prompt_ids"}' on a command line""",
        ),
    ],
)
def test_a_row_without_a_prompt_is_told_its_columns_and_how_to_name_one(
    record: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        encode_prompt(record, None, "here")
    assert str(refused.value) == f"here: {said}"


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({"prompt_ids": [3]}, "the system prompt cannot be put before prompt_ids"),
        ({"messages": [{"role": "system", "content": "1"}]}, "messages begins with a system message already"),
        ({"prompt": ["2"]}, "prompt is ['2']; it must be text, or a list of chat messages"),
    ],
)
def test_a_system_prompt_that_has_no_place_is_refused(
    record: dict[str, Any], part: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError) as caught:
        encode_prompt(record, tokenizer, "here", ChatFormat(system_prompt="9"))
    assert str(caught.value).startswith(f"here: {part}")


# ── problems of a run ───────────────────────────────────────────────────────────────────────────────────────


def config_of(tmp_path: Path, task: dict[str, Any], **evaluation: Any) -> Config:
    values = {"model": {"path": str(BASE)}, "task": {"name": "countdown", **task}, "evaluation": evaluation}
    return load_config(values, {"rollout.problems_per_step": 1})


def test_held_out_problems_are_the_first_of_their_own_data_or_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"[2,9,16:{i}]", "numbers": [2, 9, 16], "target": i} for i in range(1, 7)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", rows[3:])
    task = {"data": str(tmp_path / "train.jsonl")}
    own = config_of(tmp_path, task, data=str(tmp_path / "test.jsonl"), num_problems=2)
    assert [problem.data["target"] for problem in load_problems(own, "test")] == [4, 5]
    assert len(load_problems(own, "train")) == 6
    split = config_of(tmp_path, {"data": str(tmp_path)}, split="test")
    assert [len(load_problems(split, name)) for name in ("train", "test")] == [6, 3]
    made = load_problems(config_of(tmp_path, task, num_problems=5), "test")
    assert [problem.problem_id for problem in made] == [f"countdown-test-0-{i}" for i in range(5)]


def test_sources_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for task, evaluation, part in (
        ({"split": "train"}, {}, "split is set but data, which it belongs to, is not"),
        ({}, {"split": "test"}, "evaluation.split and evaluation.subset need data"),
        ({"data": str(tmp_path), "num_problems": 3}, {}, "data and num_problems exclude each other"),
        (
            {"data": str(tmp_path / "no")},
            {},
            "no such file or folder: give one that exists, or a dataset's name",
        ),
    ):
        with pytest.raises(UserError, match=part):
            config_of(tmp_path, task, **evaluation)


class Sums:
    """A task that makes problems of rows."""

    def problems(self, num: int, seed: int, **options: Any) -> list[dict[str, Any]]:
        return []

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        return {"reward": 0.0, "solved": False}

    def prepare(self, record: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any] | None:
        if record["answer"] == options.get("leave_out"):
            return None
        return {"prompt": record["question"] + "=", "gold": record["answer"]}


def test_a_task_that_prepares_records_makes_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Sums()
    assert isinstance(task, Task)
    assert isinstance(task, PreparesRecords)
    monkeypatch.setattr("tlt.tasks.base.get_task", lambda name: task)
    rows = [(f"f:{i}", {"problem_id": str(i), **row}) for i, row in enumerate(ROWS)]
    assert prepare_records("sums", rows, {})[1] == ("f:1", {"problem_id": "1", "prompt": "1+1=", "gold": "2"})
    with pytest.raises(
        UserError,
        match=r"^f:9: task sums: prepare\(\) failed \(KeyError: 'question', .*test_data.py:\d+\); corr",
    ):
        prepare_records("sums", [("f:9", {"problem_id": "9", "answer": "0"})], {})
    assert [place for place, _ in prepare_records("sums", rows, {"leave_out": "2"})] == [
        place for place, row in rows if row["answer"] != "2"
    ]
    with pytest.raises(
        UserError, match=r"^f:1: task sums: leaves out this row and all others; change task.options"
    ):
        prepare_records("sums", rows[1:2], {"leave_out": "2"})
    monkeypatch.setattr(task, "prepare", lambda record, options: "2")
    with pytest.raises(UserError, match=r"prepare\(\) returned a str; it must be a dict"):
        prepare_records("sums", rows, {})
