"""The command line: what it accepts, one line for every mistake, and nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tlt.cli.train import resolve_config
from tlt.cli import main as cli
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf_weights import save_model
from tlt.models.tokenizer import load_tokenizer
from tlt.types import Rollout, UserError

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*/=,:[]x!")
WINDOW = 64


def save_tokenizer(path: Path, vocabulary: tuple[str, ...] = VOCABULARY, chat_template: str | None = None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = chat_template
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a character tokenizer; its vocabulary is larger than the tokenizer's."""
    path = tmp_path_factory.mktemp("cli") / "model"
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = ModelConfig("llama", vocab_size=61, max_positions=WINDOW, **shape)
    tensors = Transformer(config).initialize(seed=0).state_dict()
    save_model(path, config, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    save_tokenizer(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_lines(path: str, *records: Any) -> None:
    Path(path).write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def succeed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON summary, the last line on stdout."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    summary: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    return summary


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a refusal: exit code 2, one line on stderr, nothing on stdout, no file left behind."""
    before = sorted(Path.cwd().iterdir())
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tlt: error: ")
    assert captured.err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before
    return captured.err.removeprefix("tlt: error: ").rstrip("\n")


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_help_is_fast_and_loads_no_torch() -> None:
    code = "import sys; from tlt.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    begin = time.monotonic()
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0
    assert "drafter train" in finished.stdout
    assert time.monotonic() - begin < 5.0  # generous: the machine may be busy; without torch it takes 0.2 s


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*name.split(), "--help"])
    assert caught.value.code == 0
    assert f"usage: tlt {name}" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gen"], "gen: unknown command; did you mean tlt generate?"),
        (["zzz"], f"zzz: unknown command; commands are {', '.join(cli.COMMANDS)}"),
        (["drafter"], "drafter: incomplete command; write tlt drafter train | tlt drafter export | tlt drafter eval"),
        (["generate"], "Missing from tlt generate: MODEL --prompts PATH --out PATH; see tlt generate --help"),
        (["generate", "m", "--prompts"], "Missing value for argument '--prompts'. Expected 1 values; see tlt generate --help"),
        (
            ["generate", "m", "--prompts", "p", "--out", "o", "--temp", "3"],
            "Unrecognized options: --temp, 3 Perhaps you meant: --temperature FLOAT; see tlt generate --help",
        ),
        (
            ["generate", "m", "--prompts", "p", "--out", "o", "--seed", "x"],
            "Error parsing --seed: invalid literal for int() with base 10: 'x'; see tlt generate --help",
        ),
        (["train", "--foo", "3"], "Unrecognized options: --foo, 3; see tlt train --help"),
        (["train"], "train: no configuration given; write tlt train CONFIG.toml, or --resume DIR to continue a run"),
        (["train", "no.toml"], "no.toml: no such file; give the path of a TOML configuration"),
        (["train", "--resume", "no"], "--resume: no holds no run (no config.json); give the folder that the run wrote"),
        (
            ["score", "countdown", "--problems", "p", "--responses", "r"],
            "--problems: p does not exist; give the path of a JSONL file",
        ),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(capsys, *arguments) == message


def test_overrides_are_taken_out_of_the_arguments_wherever_they_stand() -> None:
    arguments = ["--run.seed", "3", "run.toml", "--task.options.a=b c", "--resume", "dir", "--optimizer.learning_rate", "-1"]
    rest, overrides = cli.split_overrides(arguments)
    assert rest == ["run.toml", "--resume", "dir"]
    assert overrides == ["--run.seed", "3", "--task.options.a=b c", "--optimizer.learning_rate", "-1"]


def test_an_error_box_becomes_one_line() -> None:
    box = " Title \n ------ \n  first -- one\n  second. \n  -------\n  For full helptext, run x --help \n"
    assert cli.condense(box) == "first -- one second"
    assert cli.condense("something unforeseen\nof two lines\n") == "something unforeseen of two lines"


def test_an_error_of_ours_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(cli, "run", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["train", "x.toml"])


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert cli.main(["train", "x.toml"]) == 130
    assert capsys.readouterr().err == "tlt: interrupted\n"


# ── task and score ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("here")
def test_task_writes_equal_problems_for_equal_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    summary = succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "a.jsonl")
    assert summary["problems"] == 5
    succeed(capsys, "task", "countdown", "--num", "5", "--seed", "3", "--out", "b.jsonl")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert {"problem_id", "prompt"} <= set(read_lines("a.jsonl")[0])


@pytest.mark.usefixtures("here")
def test_task_passes_the_split_and_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(
        capsys, "task", "countdown", "--num", "9", "--split", "test", "--options", '{"mix": {"2": 1.0}}', "--out", "a.jsonl"
    )
    problems = read_lines("a.jsonl")
    assert all(len(problem["numbers"]) == 2 and "test" in problem["problem_id"] for problem in problems)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["countdwn", "--num", "1", "--out", "o"], "unknown task 'countdwn'"),
        (["countdown", "--num", "0", "--out", "o"], "--num: is 0; it must be 1 or more"),
        (["countdown", "--num", "1", "--out", "no/o"], "does not exist; create it or give another path"),
        (["countdown", "--num", "1", "--out", "."], "--out: . is a folder; give the name of a file"),
        (["countdown", "--num", "1", "--out", "o", "--options", "{"], "--options: '{' is no JSON"),
        (["countdown", "--num", "1", "--out", "o", "--options", "[1]"], "--options: '[1]' is no JSON object"),
        (["countdown", "--num", "1", "--out", "o", "--options", '{"mixx": 1}'], "known options are split, mix"),
    ],
)
def test_task_refuses_in_one_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in fail(capsys, "task", *arguments)


def write_countdown() -> None:
    write_lines(
        "problems.jsonl",
        {"problem_id": "a", "prompt": "[2,9:7]", "numbers": [2, 9], "target": 7},
        {"problem_id": "b", "prompt": "[2,9:11]", "numbers": [2, 9], "target": 11},
        {"problem_id": "c", "prompt": "[2,9:18]", "numbers": [2, 9], "target": 18},
    )


@pytest.mark.usefixtures("here")
def test_score_reports_each_problem_and_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    write_countdown()
    write_lines(
        "responses.jsonl",
        {"problem_id": "a", "sample_index": 0, "text": "9-2=7!9-2=7"},
        {"problem_id": "a", "sample_index": 1, "text": "9+2=11x!9+2=11"},
        {"problem_id": "b", "sample_index": 0, "text": "nothing"},
    )
    assert (
        cli.main(["score", "countdown", "--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "s.jsonl"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a  solved 1/2  mean reward 0.500"
    summary = json.loads(lines[-1])
    assert summary["solve_rate"] == pytest.approx(1 / 3)
    assert summary["problems_solved_at_least_once"] == 0.5
    assert summary["problems_without_responses"] == 1
    assert [record["solved"] for record in read_lines("s.jsonl")] == [True, False, False]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "responses.jsonl:1: not valid JSON"),
        ("[]", "responses.jsonl:1: holds a list; write one object per line"),
        ({"text": "x"}, "responses.jsonl:1: problem_id is None"),
        ({"problem_id": "z", "text": "x"}, "responses.jsonl:1: problem_id 'z' is not in problems.jsonl"),
        ({"problem_id": "a"}, "responses.jsonl:1: text is None"),
        ("", "--responses: responses.jsonl is empty; give at least one line"),
    ],
)
def test_score_refuses_a_malformed_line_with_its_place(line: Any, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_countdown()
    write_lines("responses.jsonl", line)
    arguments = ("--problems", "problems.jsonl", "--responses", "responses.jsonl", "--out", "s.jsonl")
    assert part in fail(capsys, "score", "countdown", *arguments)


@pytest.mark.usefixtures("here")
def test_an_output_appears_whole_or_not_at_all() -> None:
    write_lines("out.jsonl", {"old": 1})

    def records() -> Any:
        yield {"new": 1}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        commands.write_jsonl(Path("out.jsonl"), records())
    assert read_lines("out.jsonl") == [{"old": 1}]
    assert [path.name for path in Path.cwd().iterdir()] == ["out.jsonl"]


# ── generate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def generate(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> dict[str, Any]:
    options = ("--prompts", "prompts.jsonl", "--out", "out.jsonl", "--max-tokens", "8")
    return succeed(capsys, "generate", str(model), *options, *arguments)


def refuse(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> str:
    return fail(capsys, "generate", str(model), "--prompts", "prompts.jsonl", "--out", "out.jsonl", *arguments)


@pytest.mark.usefixtures("here")
def test_generate_writes_one_line_per_response_in_order(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(
        "prompts.jsonl", {"problem_id": "b", "prompt": "[2,9:7]"}, "", {"prompt_ids": [3, 4]}, {"problem_id": 7, "prompt": "1"}
    )
    summary = generate(capsys, model, "--samples", "3", "--seed", "5")
    records = read_lines("out.jsonl")
    assert [(r["problem_id"], r["sample_index"]) for r in records] == [(p, s) for p in ("b", "3", "7") for s in range(3)]
    assert list(records[0]) == ["problem_id", "sample_index", "prompt_ids", "token_ids", "text", "logprobs", "finish_reason"]
    assert records[0]["prompt_ids"] == [VOCABULARY.index(character) for character in "[2,9:7]"]
    assert records[3]["prompt_ids"] == [3, 4]
    assert all(len(r["logprobs"]) == len(r["token_ids"]) <= 8 for r in records)
    assert all((r["token_ids"][-1] == 1) == (r["finish_reason"] == "stop") for r in records)
    assert summary["tokens"] == sum(len(r["token_ids"]) for r in records)
    assert summary["seconds"] > 0
    assert summary["accept_length"] is None


@pytest.mark.usefixtures("here")
def test_generate_gives_the_same_tokens_for_the_same_seed_only(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    tokens = []
    for seed, batch in (("1", "64"), ("1", "1"), ("2", "64")):
        generate(capsys, model, "--seed", seed, "--max-batch-size", batch, "--samples", "4", "--dtype", "float64")
        tokens.append([record["token_ids"] for record in read_lines("out.jsonl")])
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{'prompt': 1}", "prompts.jsonl:1: not valid JSON"),
        ({}, "prompts.jsonl:1 (problem '1'): has none of them; give exactly one of prompt"),
        ({"prompt": "1", "prompt_ids": [2]}, "has prompt and prompt_ids; give exactly one"),
        ({"prompt": 3}, "prompt is 3; it must be text"),
        ({"prompt": ""}, "prompt is ''; it must be text"),
        ({"prompt": "[2,9;7]"}, "has no token for ';' (column 5); remove it"),
        ({"prompt_ids": [2, 61]}, "token id 61 is outside the vocabulary of 61"),
        ({"prompt_ids": [2.5]}, "prompt_ids must be a list of whole numbers"),
        ({"prompt_ids": []}, "the prompt is empty; give at least one token"),
        ({"messages": [{"role": "user", "content": "1"}]}, "has no chat template; give prompt (text) or prompt_ids"),
        ({"messages": ["1"]}, "messages must be a list of objects"),
        (
            {"problem_id": "long", "prompt": "1" * WINDOW},
            "(problem 'long'): the prompt has 64 tokens but the model's window is 64",
        ),
        ({"problem_id": None, "prompt": "1"}, "problem_id is None; it must be text"),
    ],
)
def test_generate_refuses_a_bad_prompt_with_its_place(
    line: Any, part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", line)
    assert part in refuse(capsys, model)


@pytest.mark.usefixtures("here")
def test_generate_refuses_the_same_problem_twice(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("prompts.jsonl", {"problem_id": "2", "prompt": "1"}, {"prompt": "2"})
    assert refuse(capsys, model) == "prompts.jsonl:2: problem_id '2' was given at prompts.jsonl:1 already; make it unique"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--speculation", "learned:4x1x4"], "speculation: 'learned:4x1x4' needs a drafter of kind learned; there is ngram"),
        (["--speculation", "fast"], "speculation: 'fast' is no strategy"),
        (["--speculation", "adaptive", "--drafter", "no"], "--drafter: no does not exist"),
        (["--top-p", "0"], "sampling: top_p is 0.0; it must be in (0, 1]"),
        (["--temperature", "-1"], "sampling: temperature is -1.0"),
        (["--samples", "0"], "--samples: is 0; it must be 1 or more"),
        (["--seed", "-1"], "--seed: is -1; it must be in [0, 2^63)"),
    ],
)
def test_generate_refuses_options_in_one_line(
    arguments: list[str], part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "1"})
    assert part in refuse(capsys, model, *arguments)


@pytest.mark.usefixtures("here")
def test_generate_refuses_a_missing_model_and_missing_prompts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompts: prompts.jsonl does not exist" in refuse(capsys, model)
    write_lines("prompts.jsonl", {"prompt": "1"})
    assert refuse(capsys, Path("nowhere")).startswith("nowhere: ")


# ── the tokenizer ─────────────────────────────────────────────────────────────────────────────────────────────────────


def write_model_config(path: Path, **values: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 61, **values}))


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write_model_config(tmp_path, vocab_size=9)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match=f"has {len(VOCABULARY)} tokens but the model's embedding only 9 rows"):
        load_tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(tmp_path / "no")
    with pytest.raises(UserError, match="has no config"):
        load_tokenizer(tmp_path)
    write_model_config(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_stop_ids_come_from_the_first_that_names_them(tmp_path: Path) -> None:
    write_model_config(tmp_path)
    save_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).stop_ids == (VOCABULARY.index("<eos>"),)
    write_model_config(tmp_path, eos_token_id=5)
    assert load_tokenizer(tmp_path).stop_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 6]}))
    assert load_tokenizer(tmp_path).stop_ids == (6, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 61}))
    with pytest.raises(UserError, match="eos_token_id is 61; ids must be below the vocabulary size 61"):
        load_tokenizer(tmp_path)


def test_chat_messages_go_through_the_template_and_decoding_drops_special_tokens(tmp_path: Path) -> None:
    write_model_config(tmp_path)
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('who?') }}{% endif %}[{{ m.content }}]{% endfor %}!"
    )
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "12"}]) == tokenizer.encode_text("[12]!")
    assert tokenizer.decode([*tokenizer.encode_text("[12]!"), 1]) == "[12]!"
    with pytest.raises(UserError, match=r"the chat template .* refuses them \(TemplateError: who\?\)"):
        tokenizer.encode_chat([{"role": "judge", "content": "12"}])


# ── train and drafter train ───────────────────────────────────────────────────────────────────────────────────────────


def write_run(model: Path) -> Path:
    Path("run.toml").write_text(f'[model]\npath = "{model}"\n[task]\nname = "countdown"\n[run]\nout_dir = "out"\n')
    return Path("run.toml")


@pytest.mark.usefixtures("here")
def test_a_run_is_never_overwritten_and_a_resumed_one_keeps_what_it_computes(model: Path) -> None:
    path = write_run(model)
    config = commands.resolve_train_config(path, ["--run.seed", "4"], resume=None)
    Path("out").mkdir()
    Path("out/config.json").write_text(config.to_json())
    with pytest.raises(UserError, match="holds a run already; continue it with --resume"):
        commands.resolve_train_config(path, [], resume=None)
    assert commands.resolve_train_config(None, [], resume=Path("out")) == config
    longer = commands.resolve_train_config(None, ["--run.num_steps", "500"], resume=Path("out"))
    assert (longer.run.num_steps, longer.run.seed) == (500, 4)
    with pytest.raises(UserError, match=r"run\.seed is 0 but the run in out has 4"):
        commands.resolve_train_config(path, [], resume=Path("out"))
    with pytest.raises(UserError, match=r"sampling\.temperature is 0\.5 but the run in out has 1.0"):
        commands.resolve_train_config(None, ["--sampling.temperature", "0.5"], resume=Path("out"))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({"prompt_ids": [3], "token_ids": "x"}, "responses.jsonl:1: token_ids must be a list of whole numbers"),
        ({"token_ids": [3]}, "responses.jsonl:1: prompt_ids must be a list of whole numbers"),
        ({"prompt_ids": [3], "token_ids": [61]}, "responses.jsonl:1: token id 61 is outside the vocabulary of 61"),
        ({"prompt_ids": [3], "token_ids": [4] * WINDOW}, "has 65 tokens but the model's window is 64"),
        ({"prompt_ids": [3], "token_ids": [4]}, "has no response of three tokens or more"),
    ],
)
def test_drafter_train_refuses_bad_responses(line: Any, part: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("responses.jsonl", line)
    assert part in fail(capsys, "drafter", "train", str(model), "--responses", "responses.jsonl", "--out", "drafter")


@pytest.mark.usefixtures("here")
def test_drafter_train_does_not_overwrite(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("drafter").mkdir()
    message = fail(capsys, "drafter", "train", str(model), "--responses", "r.jsonl", "--out", "drafter")
    assert message == "--out: drafter exists; give the name of a new folder"


@pytest.mark.usefixtures("here")
def test_a_trained_drafter_drafts_and_changes_no_token(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    generate(capsys, model, "--samples", "4", "--dtype", "float64")
    plain = read_lines("out.jsonl")
    arguments = ("--responses", "out.jsonl", "--out", "drafter", "--tokens-per-micro-step", "32")
    summary = succeed(capsys, "drafter", "train", str(model), *arguments)
    assert summary["steps"] >= 1
    for speculation in ("2x1x2", "3x2x5", "adaptive"):
        options = ("--speculation", speculation, "--drafter", "drafter", "--samples", "4", "--dtype", "float64")
        summary = generate(capsys, model, *options)
        if speculation != "adaptive":  # whether that one ever speculates is decided by the clock
            assert summary["accept_length"] >= 1
        assert [r["token_ids"] for r in read_lines("out.jsonl")] == [r["token_ids"] for r in plain]


@pytest.mark.usefixtures("here")
def test_a_drafter_trained_from_prompts_is_the_one_trained_from_their_responses(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("prompts.jsonl", {"prompt": "[2,9:7]"}, {"prompt": "[1:1]"})
    generate(capsys, model, "--samples", "4", "--max-tokens", "20")
    common = ("--tokens-per-micro-step", "32")
    succeed(capsys, "drafter", "train", str(model), "--responses", "out.jsonl", "--out", "a", *common)
    answering = ("--prompts", "prompts.jsonl", "--samples", "4", "--max-tokens", "20")
    summary = succeed(capsys, "drafter", "train", str(model), *answering, "--out", "b", *common)
    assert summary["responses"] == 8
    one, other = (load_file(Path(name) / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", [(), ("--responses", "r.jsonl", "--prompts", "p.jsonl")])
def test_a_drafter_is_trained_on_responses_or_on_answers_to_prompts(
    arguments: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fail(capsys, "drafter", "train", str(model), "--out", "drafter", *arguments)
    assert message.endswith("given; give one of them")


def test_a_response_record_of_a_model_without_tokenizer_has_no_text() -> None:
    rollout = Rollout("a", 0, (1,), (2,), (-0.5,), "stop", policy_version=0)
    assert commands._response_record(rollout, None)["text"] is None


def test_a_drafter_to_start_from_brings_its_vocabulary_and_its_preset(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("responses.jsonl", {"prompt_ids": [2, 3], "token_ids": [4, 5, 6, 7, 1]})
    common = ["--responses", "responses.jsonl", "--tokens-per-micro-step", "16"]
    succeed(capsys, "drafter", "train", str(model), *common, "--out", "first", "--preset", "eagle")
    message = fail(capsys, "drafter", "train", str(model), *common, "--out", "x", "--init", "first", "--draft-vocab", "20")
    assert "--draft-vocab: 20 given, but the drafter of --init brings its own" in message
    for index, (given, expected) in enumerate([([], "eagle"), (["--preset", "hass"], "hass")]):
        succeed(capsys, "drafter", "train", str(model), *common, "--out", str(index), "--init", "first", *given)
        assert json.loads((here / str(index) / "config.json").read_text())["tlt"]["preset"] == expected
