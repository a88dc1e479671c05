"""What do the commands say to input that is damaged or absurd? Every case is a command run on a mutation of what it reads:
configurations, overrides, prompts, problems, responses, models, drafters and the folder of a run.

    python -m benchmarks.faults.fuzz --num 2000 --out benchmarks/results/fuzz.json

A case ends well by success, or by exit code 2 and one line that says what is wrong. A traceback, a line without remedy and
anything that takes too long are failures, kept with the case's number. Each case has a generator of its own, so that it can be
played again alone: --only NUMBER. `tlt train` ends here where it would start its ranks; the other commands run to their end.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import math
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported: a fuzzed name is asked of nobody

import torch

from tlt.cli.main import main as tlt
from tlt.cli.train import resolve_config
from tlt.config.load import load_config
from tlt.distributed.signals import say
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import save_model
from tlt.report.metrics import read_metrics
from tlt.report.timeline import merge_timelines
from tlt.report.tracking import run_id
from tlt.training.evaluate import read_evaluations
from tlt.training.saved.manifest import latest_checkpoint
from tlt.training.start import prepare
from tlt.types import UserError

BASE = Path(__file__).parents[2] / "recipes" / "countdown" / "base"
GOOD = ("success", "refused")
Case = Callable[[], int]
"""Runs a command; returns its exit code."""

# ── what is mutated ──────────────────────────────────────────────────────────────────────────────────────────────────

CONFIG: dict[str, Any] = {
    "run": {"num_steps": 2, "num_ranks": 1, "dtype": "float64", "seed": 7, "device": "cpu"},
    "parallel": {"policy": "auto"},
    "model": {"path": "model"},
    "task": {"name": "countdown", "num_problems": 8, "options": {"mix": {"2": 0.5, "3": 0.5}, "max_number": 12}},
    "rollout": {"problems_per_step": 2, "samples_per_problem": 2, "max_batch_size": 4, "speculation": "adaptive"},
    "sampling": {"max_tokens": 8, "temperature": 1.0, "stop": ["\n"]},
    "drafter": {"path": "drafter", "train": True, "tokens_per_micro_step": 64},
    "algorithm": {"clip_low": 0.2, "minibatches": 1},
    "optimizer": {"learning_rate": 1e-4, "schedule": "cosine"},
    "evaluation": {"num_problems": 4, "samples_per_problem": 1},
    "rewards": {"num_workers": 1, "timeout_seconds": 5.0},
    "tracking": {"use": [], "project": "fuzz"},
}
PROBLEMS = [
    {"problem_id": f"p{i}", "prompt": f"[{i + 1},{i + 2}:{2 * i + 3}]", "numbers": [i + 1, i + 2], "target": 2 * i + 3}
    for i in range(3)
]
RESPONSES = [
    {"problem_id": f"p{i}", "text": f"{i + 1}+{i + 2}={2 * i + 3}", "token_ids": [1, 2], "prompt_ids": [3]} for i in range(3)
]
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, 10**400, -(10**30), 0.0, -0.5, 1e-320, 1e308),
    *(
        math.nan,
        math.inf,
        "",
        " ",
        "none",
        "true",
        "1",
        "1e3",
        "off",
        "../../x",
        "./x",
        "~",
        ".",
        "\0",
        "a\0b",
        "a\nb",
        "\x1b[31m",
    ),
    *(
        "\ud800",
        "é" * 300,
        "😀",
        "\u202e",
        "x" * 5000,
        "%s{0}$HOME",
        "a:b",
        "tlt.x:y",
        "os:getcwd",
        "owner/name",
        "owner/name@main",
    ),
    *([], [[]], [None], [1, "a", {}], {}, {"a": {"b": [1]}}, {"": 1}, [0] * 2000, {"role": "user", "content": "1"}),
)
BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\n\n\n",
    b"{",
    b'"',
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"[" * 9000,
    b"9" * 5000,
    b"\r",
    b",",
)


def mutated(value: Any, rng: random.Random) -> Any:
    """Returns nested lists and dicts with something replaced, removed, doubled, renamed or put in elsewhere."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _mutated_once(value, rng)
    return value


def _mutated_once(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return _near(value, rng) if rng.random() < 0.3 else rng.choice(ODD)
    key: Any = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[rng.choice((f"{key}s", str(key).upper(), "", "a.b", "\0", "é", "path", "prompt", "messages"))] = value.pop(
                key
            )
        case 1 if isinstance(value, list):
            value.insert(key, value[key])
        case 2 if isinstance(value, dict):
            value[rng.choice((*value, "unknown"))] = rng.choice(ODD)
        case _:
            value[key] = _mutated_once(value[key], rng)
    return value


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str):
        return (
            value[: rng.randrange(len(value) + 1)]
            + rng.choice(("x", ":", "/", "-", "\t"))
            + value[rng.randrange(len(value) + 1) :]
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice((-value, value * 1000, value + 0.5, str(value), [value]))
    return [value]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes of which some are changed, cut out, doubled, or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(out) + 1)
        end = min(len(out), start + rng.choice((1, 4, 64)))
        match rng.randrange(6):
            case 0:
                del out[start:]
            case 1:
                del out[start:end]
            case 2:
                out[start:start] = out[start:end]
            case 3:
                out[start:end] = rng.randbytes(end - start)
            case _:
                out[start:start] = rng.choice(BYTES)
    return bytes(out)


def to_toml(values: Mapping[str, Any]) -> str:
    """Returns TOML; what TOML has no word for is left to be refused."""
    lines = []
    for section, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{_toml_key(section)}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())]
        else:
            lines.insert(0, f"{_toml_key(section)} = {_toml(table)}")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


# ── the kinds of cases ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Place:
    """Where a case may write: an empty folder, the working directory. model, drafter: sound ones, not to be changed."""

    here: Path
    model: Path
    drafter: Path

    def write(self, name: str, data: str | bytes) -> Path:
        file = self.here / name
        file.write_bytes(data.encode(errors="surrogatepass") if isinstance(data, str) else data)
        return file

    def copy(self, source: Path) -> Path:
        return Path(shutil.copytree(source, self.here / source.name))

    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(CONFIG))
        values["model"]["path"], values["drafter"]["path"] = str(self.model), str(self.drafter)
        return values

    def generate(self, model: Path, prompts: Path, *options: str) -> Case:
        words = ["generate", str(model), "--prompts", str(prompts), "--out", "out.jsonl", "--max-tokens", "2", *options]
        return lambda: tlt(words)

    def lines(self, records: Sequence[Any]) -> str:
        return "".join(json.dumps(record) + "\n" for record in records)


def start_training(path: Path | None, overrides: Sequence[str], resume: Path | None = None) -> int:
    """Does what `tlt train` does before it starts the ranks."""
    try:
        prepare(resolve_config(path, overrides, resume))
    except UserError as error:
        say(f"error: {error}")
        return 2
    return 0


def config_values(place: Place, rng: random.Random) -> Case:
    values = mutated(place.config(), rng)
    is_table = isinstance(values, dict)
    file = (
        place.write("run.toml", to_toml(values))
        if is_table and rng.random() < 0.7
        else place.write("run.json", json.dumps(values))
    )
    return lambda: start_training(file, ())


def config_bytes(place: Place, rng: random.Random) -> Case:
    file = place.write("run.toml", damaged(to_toml(place.config()).encode(), rng))
    return (lambda: start_training(file, ())) if rng.random() < 0.5 else (lambda: tlt(["plan", "memory", str(file)]))


def overrides(place: Place, rng: random.Random) -> Case:
    file = place.write("run.toml", to_toml(place.config()))
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        section = rng.choice(list(CONFIG))
        key = rng.choice([*CONFIG[section], *load_config(file).model_dump()[section]])
        name = rng.choice(
            (f"{section}.{key}",) * 6 + (section, f"{key}.{section}", f"{section}.{key}.deep", f"{section}..{key}", "")
        )
        odd = rng.choice(ODD)
        text = odd if isinstance(odd, str) else json.dumps(odd)
        words += rng.choice(([f"--{name}", text], [f"--{name}={text}"], [f"--{name}"], [text]))
    command = rng.choice((["train-checks"], ["plan", "memory", str(file)]))
    return (lambda: start_training(file, words)) if command == ["train-checks"] else (lambda: tlt([*command, *words]))


def prompt_values(place: Place, rng: random.Random) -> Case:
    chat = {"problem_id": "chat", "messages": [{"role": "user", "content": "1+1"}]}
    ids = {"problem_id": 9, "prompt_ids": [1, 2, 3]}
    records = mutated([*PROBLEMS, rng.choice((chat, ids, PROBLEMS[0]))], rng)
    file = place.write("prompts.jsonl", place.lines(records) if isinstance(records, list) else json.dumps(records))
    options = rng.choice(((), (), ("--chat", "true"), ("--columns", json.dumps({"prompt": rng.choice(("target", "x", ""))}))))
    return place.generate(place.model, file, *options)


def prompt_bytes(place: Place, rng: random.Random) -> Case:
    return place.generate(place.model, place.write("prompts.jsonl", damaged(place.lines(PROBLEMS).encode(), rng)))


def problems(place: Place, rng: random.Random) -> Case:
    records = mutated(PROBLEMS, rng)
    text = place.lines(records).encode() if isinstance(records, list) else json.dumps(records).encode()
    file = place.write("data.jsonl", text if rng.random() < 0.7 else damaged(text, rng))
    task = rng.choice(("countdown", "math", "data", "word-problems", "mixture"))
    words = ["task", task, "--num", "2", "--out", "out.jsonl"]
    if rng.random() < 0.5:
        odd = rng.choice((CONFIG["task"]["options"], {"mix": rng.choice(ODD)}, {"tasks": rng.choice(ODD)}, {"split": "x"}))
        return lambda: tlt([*words, "--options", json.dumps(mutated(odd, rng))])
    return lambda: tlt([*words, "--data", str(file)])


def responses(place: Place, rng: random.Random) -> Case:
    records = mutated(RESPONSES, rng)
    text = place.lines(records).encode() if isinstance(records, list) else json.dumps(records).encode()
    file = place.write("responses.jsonl", text if rng.random() < 0.6 else damaged(text, rng))
    asked = place.write("problems.jsonl", place.lines(PROBLEMS))
    if rng.random() < 0.3:
        asked, file = (
            place.write("problems.jsonl", place.lines(mutated([*PROBLEMS], rng) or [])),
            place.write("r.jsonl", place.lines(RESPONSES)),
        )
    return lambda: tlt(["score", "countdown", "--problems", str(asked), "--responses", str(file), "--out", "out.jsonl"])


def model_config(place: Place, rng: random.Random) -> Case:
    model = place.copy(place.model)
    values = mutated(json.loads((model / "config.json").read_text()), rng)
    text = json.dumps(values).encode()
    (model / "config.json").write_bytes(text if rng.random() < 0.8 else damaged(text, rng))
    return place.generate(model, place.write("prompts.jsonl", place.lines(PROBLEMS)))


def model_weights(place: Place, rng: random.Random) -> Case:
    model = place.copy(place.model)
    damage_weights(model, rng)
    return place.generate(model, place.write("prompts.jsonl", place.lines(PROBLEMS)))


def damage_weights(folder: Path, rng: random.Random) -> None:
    """Changes a safetensors file: its header's JSON, the header's length, any bytes; or puts an index in its place."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(5):
        case 0 | 1:
            text = json.dumps(mutated(json.loads(header), rng)).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + body)
        case 2:
            file.write_bytes(
                struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1))) + header + body
            )
        case 3:
            file.write_bytes(damaged(data, rng))
        case _:
            file.rename(folder / "shard.safetensors")
            index = {"weight_map": dict.fromkeys(list(json.loads(header))[:4], "shard.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(mutated(index, rng)))


def tokenizer(place: Place, rng: random.Random) -> Case:
    model = place.copy(place.model)
    file = model / rng.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json"))
    text = json.dumps(mutated(json.loads(file.read_text()), rng)).encode()
    file.write_bytes(text if rng.random() < 0.7 else damaged(file.read_bytes(), rng))
    return place.generate(model, place.write("prompts.jsonl", place.lines(PROBLEMS)))


def drafter(place: Place, rng: random.Random) -> Case:
    folder = place.copy(place.drafter)
    if rng.random() < 0.4:
        damage_weights(folder, rng)
    else:
        text = json.dumps(mutated(json.loads((folder / "config.json").read_text()), rng)).encode()
        (folder / "config.json").write_bytes(text if rng.random() < 0.8 else damaged(text, rng))
    prompts = place.write("prompts.jsonl", place.lines(PROBLEMS))
    return place.generate(place.model, prompts, "--drafter", str(folder), "--speculation", "2x1x2")


def run_folder(place: Place, rng: random.Random) -> Case:
    """What a resumed run reads of its folder, but for the checkpoints."""
    run = place.here / "run"
    run.mkdir()
    config = load_config(place.config(), {"run.out_dir": str(run)})
    files = {
        "config.json": config.to_json(),
        "tracking.json": '{"run_id": "0123abcd"}',
        "evaluations.jsonl": place.lines(
            [{"step": 0, "solve_rate": 0.5, "seconds": 1.0, "by_problem": {"p0": 0.5}, "by_task": {}}]
        ),
        "timeline.rank0.jsonl": place.lines([["step", 0.5, 1.5, 1.0, 1]] * 2),
    }
    chosen = rng.choice(list(files))
    for name, text in files.items():
        (run / name).write_text(text)
    data = files[chosen].encode()
    if rng.random() < 0.5:
        lines = [data.decode()] if chosen.endswith(".json") else data.decode().splitlines()
        data = "".join(json.dumps(mutated(json.loads(line), rng)) + "\n" for line in lines).encode()
    else:
        data = damaged(data, rng)
    (run / rng.choice((chosen, chosen, "metrics.jsonl"))).write_bytes(data)
    (run / "checkpoints" / rng.choice(("step-00000001", "step-x", "step-", ".step-1.new"))).mkdir(parents=True)

    def resume() -> int:
        try:
            resolve_config(None, (), run)
            run_id(run)
            read_evaluations(run / "evaluations.jsonl")
            merge_timelines(run, run / "timeline.json")
            latest_checkpoint(run / "checkpoints")
            if (run / "metrics.jsonl").exists():
                read_metrics(run / "metrics.jsonl")
        except UserError as error:
            say(f"error: {error}")
            return 2
        return 0

    return resume


KINDS: dict[str, Callable[[Place, random.Random], Case]] = {
    "configuration, values": config_values,
    "configuration, bytes": config_bytes,
    "overrides": overrides,
    "prompts, values": prompt_values,
    "prompts, bytes": prompt_bytes,
    "problems and options of tasks": problems,
    "responses": responses,
    "a model's config.json": model_config,
    "a model's weights": model_weights,
    "a model's tokenizer": tokenizer,
    "a drafter": drafter,
    "the folder of a run": run_folder,
}

# ── what becomes of them ─────────────────────────────────────────────────────────────────────────────────────────────


class Hang(BaseException):
    """The case took too long."""


def judge(case: Case, seconds: float) -> str:
    """Returns "success", "refused", or what was wrong with the end of the case."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a terminal
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said), alarm(seconds):
            code = case()
            shown.flush()
    except Hang:
        return f"hang: more than {seconds:g} s"
    except BaseException as error:  # what a user would see as a traceback: the very thing to be found
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tlt/" in frame.filename]
        place = f"{frames[-1].filename.rpartition('/tlt/')[2]}:{frames[-1].lineno}" if frames else "?"
        return f"traceback: {type(error).__name__} at {place}: {str(error)[:200]}"
    if code == 0:
        return "success"
    said.seek(0)
    lines = said.read().split("\n")
    errors = [line for line in lines if (line and not line.startswith("tlt: ")) or "tlt: error: " in line]
    if code != 2 or len(errors) != 1:
        return f"unclear: exit code {code}, said {lines[-3:]!r}"
    is_clear = errors[0].startswith("tlt: error: ") and any(mark in errors[0] for mark in ("; ", ": ", ", "))
    return "refused" if is_clear and len(errors[0]) < 20_000 else f"unclear: {errors[0][:300]}"


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises Hang after so many seconds of the processor's, or twenty times as many of the clock's; where no Python code runs
    then, the process ends with its traceback, later."""

    def ring(*_: object) -> None:
        raise Hang

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 20 * seconds)}
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, after in timers.values():
        signal.setitimer(timer, after)
    faulthandler.dump_traceback_later(40 * seconds, exit=True, file=2)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        faulthandler.cancel_dump_traceback_later()


def make_models(folder: Path) -> tuple[Path, Path]:
    """Writes a random model with Countdown's tokenizer, and a drafter."""
    shape = ModelConfig("llama", load_model_config(BASE).vocab_size, 16, 24, 2, 2, 1, 8, tie_embeddings=True, max_positions=128)
    save_model(folder / "model", shape, Transformer(shape).initialize(0).state_dict(), dtype=torch.float32, source=BASE)
    save_drafter(folder / "drafter", DraftModel(drafter_shape(shape)).initialize(0), torch.float32)
    return folder / "model", folder / "drafter"


def try_one(kind: str, models: tuple[Path, Path], rng: random.Random, seconds: float) -> str:
    """Makes a case of a kind in a folder of its own, which is the working directory, and judges it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=models[0].parent) as folder:
        here = Path(folder) / "a" / "b" / "c"
        here.mkdir(parents=True)
        os.chdir(here)
        try:
            return judge(KINDS[kind](Place(here, *models), rng), seconds)
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--num", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the processor, after which a case hangs")
    parser.add_argument("--only", type=int, help="the number of a case to play alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    failures: dict[int, str] = {}
    begin, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for number in range(arguments.num) if arguments.only is None else [arguments.only]:
            kind, started = list(KINDS)[number % len(KINDS)], time.monotonic()
            outcome = try_one(kind, models, random.Random(f"{arguments.seed}/{number}"), arguments.seconds)
            longest = max(longest, time.monotonic() - started)
            outcomes[kind][outcome.partition(":")[0]] += 1
            if outcome not in GOOD:
                failures[number] = f"{kind}: {outcome}"
                print(number, failures[number], flush=True)
    total = sum(outcomes.values(), Counter())
    report = {"num": arguments.num, "seed": arguments.seed, "outcomes": dict(total), "failures": failures}
    report |= {"by_kind": {kind: dict(counts) for kind, counts in outcomes.items()}}
    report |= {"seconds": round(time.monotonic() - begin, 1), "longest": round(longest, 1)}
    print(json.dumps({key: report[key] for key in ("num", "outcomes", "seconds", "longest")}))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
