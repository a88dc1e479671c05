"""What a command reads is odd: configurations, overrides, prompts, problems, responses, models and
drafters."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.fuzz.case import Case, Place, lines
from tests.faults.fuzz.sound import CONFIG
from tests.faults.mutations import ODD, damaged, mutated, to_toml
from tlt.base.config.load import load_config

PROBLEMS = [
    {
        "problem_id": f"p{i}",
        "prompt": f"[{i + 1},{i + 2}:{2 * i + 3}]",
        "numbers": [i + 1, i + 2],
        "target": 2 * i + 3,
    }
    for i in range(3)
]
RESPONSES = [
    {"problem_id": f"p{i}", "text": f"{i + 1}+{i + 2}={2 * i + 3}", "token_ids": [1, 2], "prompt_ids": [3]}
    for i in range(3)
]

NO_PUZZLES = (
    {"max_target": 3, "max_number": 10**8}, {"mix": {"2": 1}, "max_number": 2, "max_target": 2},
    {"mix": {"6": 1}, "max_number": 1},
)  # fmt: skip
"""Options of Countdown that hardly any puzzle fulfils, or none."""


def config_values(place: Place, rng: Random) -> Case:
    values = mutated(place.config(), rng)
    is_table = isinstance(values, dict)
    if is_table and rng.random() < 0.7:
        return Case(("train", str(place.write("run.toml", to_toml(values)))))
    return Case(("train", str(place.write("run.json", json.dumps(values)))))


def config_bytes(place: Place, rng: Random) -> Case:
    file = place.write("run.toml", damaged(to_toml(place.config()).encode(), rng))
    return Case((*rng.choice((("train",), ("plan", "memory"))), str(file)))


def overrides(place: Place, rng: Random) -> Case:
    file = place.write("run.toml", to_toml(place.config()))
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        section = rng.choice(list(CONFIG))
        key = rng.choice([*CONFIG[section], *load_config(file).model_dump()[section]])
        others = (section, f"{key}.{section}", f"{section}.{key}.deep", f"{section}..{key}", "")
        name = rng.choice((f"{section}.{key}",) * 6 + others)
        odd = rng.choice(ODD)
        text = odd if isinstance(odd, str) else json.dumps(odd)
        words += rng.choice(([f"--{name}", text], [f"--{name}={text}"], [f"--{name}"], [text]))
    return Case((*rng.choice((("train",), ("plan", "memory"))), str(file), *words))


def prompt_values(place: Place, rng: Random) -> Case:
    chat = {"problem_id": "chat", "messages": [{"role": "user", "content": "1+1"}]}
    ids = {"problem_id": 9, "prompt_ids": [1, 2, 3]}
    records = mutated([*PROBLEMS, rng.choice((chat, ids, PROBLEMS[0]))], rng)
    file = place.write("prompts.jsonl", lines(records) if isinstance(records, list) else json.dumps(records))
    options = rng.choice(
        ((), (), ("--chat", "true"), ("--columns", json.dumps({"prompt": rng.choice(("target", "x", ""))})))
    )
    return place.generate(place.sound.model, file, *options)


def prompt_bytes(place: Place, rng: Random) -> Case:
    return place.generate(
        place.sound.model, place.write("prompts.jsonl", damaged(lines(PROBLEMS).encode(), rng))
    )


def problems(place: Place, rng: Random) -> Case:
    records = mutated(PROBLEMS, rng)
    text = lines(records).encode() if isinstance(records, list) else json.dumps(records).encode()
    file = place.write("data.jsonl", text if rng.random() < 0.7 else damaged(text, rng))
    task = rng.choice(("countdown", "math", "data", "mixture"))
    words = ("task", task, "--num", "2", "--out", "out.jsonl")
    if rng.random() < 0.5:
        named = ({"mix": rng.choice(ODD)}, {"tasks": rng.choice(ODD)}, {"split": "x"})
        odd = rng.choice((CONFIG["task"]["options"], *named, *NO_PUZZLES))
        return Case((*words, "--options", json.dumps(mutated(odd, rng))))
    return Case((*words, "--data", str(file)))


def responses(place: Place, rng: Random) -> Case:
    records = mutated(RESPONSES, rng)
    text = lines(records).encode() if isinstance(records, list) else json.dumps(records).encode()
    file = place.write("responses.jsonl", text if rng.random() < 0.6 else damaged(text, rng))
    asked = place.write("problems.jsonl", lines(PROBLEMS))
    if rng.random() < 0.3:
        asked = place.write("problems.jsonl", lines(mutated([*PROBLEMS], rng) or []))
        file = place.write("r.jsonl", lines(RESPONSES))
    return Case(
        ("score", "countdown", "--problems", str(asked), "--responses", str(file), "--out", "out.jsonl")
    )


def model_config(place: Place, rng: Random) -> Case:
    model = place.copy(place.sound.model)
    values = mutated(json.loads((model / "config.json").read_text()), rng)
    text = json.dumps(values).encode()
    (model / "config.json").write_bytes(text if rng.random() < 0.8 else damaged(text, rng))
    return place.generate(model, place.write("prompts.jsonl", lines(PROBLEMS)))


def model_weights(place: Place, rng: Random) -> Case:
    model = place.copy(place.sound.model)
    damage_weights(model, rng)
    return place.generate(model, place.write("prompts.jsonl", lines(PROBLEMS)))


def damage_weights(folder: Path, rng: Random) -> None:
    """Changes a safetensors file: its header's JSON, the header's length, any bytes; or puts an index in
    its place."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(5):
        case 0 | 1:
            text = json.dumps(mutated(json.loads(header), rng)).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + body)
        case 2:
            told = rng.choice((0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1))
            file.write_bytes(struct.pack("<Q", told) + header + body)
        case 3:
            file.write_bytes(damaged(data, rng))
        case _:
            file.rename(folder / "shard.safetensors")
            index = {"weight_map": dict.fromkeys(list(json.loads(header))[:4], "shard.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(mutated(index, rng)))


def tokenizer(place: Place, rng: Random) -> Case:
    model = place.copy(place.sound.model)
    file = model / rng.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json"))
    text = json.dumps(mutated(json.loads(file.read_text()), rng)).encode()
    file.write_bytes(text if rng.random() < 0.7 else damaged(file.read_bytes(), rng))
    return place.generate(model, place.write("prompts.jsonl", lines(PROBLEMS)))


def drafter(place: Place, rng: Random) -> Case:
    folder = place.copy(place.sound.drafter)
    if rng.random() < 0.4:
        damage_weights(folder, rng)
    else:
        text = json.dumps(mutated(json.loads((folder / "config.json").read_text()), rng)).encode()
        (folder / "config.json").write_bytes(text if rng.random() < 0.8 else damaged(text, rng))
    prompts = place.write("prompts.jsonl", lines(PROBLEMS))
    return place.generate(place.sound.model, prompts, "--drafter", str(folder), "--speculation", "2x1x2")


# ── settings of a run of two steps ────────────────────────────────────────────────────────────────────────

NUMBERS = ("0", "1", "2", "7", "65536", "2147483648", "4611686018427387904", "-1")
EXTREME = ("1e-320", "1e-300", "1e-9", "1e300", "1.7e308", "0", "1", "0.999999", "7", "-1")
WORDS = ("auto", "off", "none", "adaptive", "x", "1x1x1", "ngram:4", "bfloat16", "float32")
SLOW = {
    "run.num_steps", "run.num_ranks", "run.out_dir", "run.launcher", "task.num_problems",
    "evaluation.num_problems", "rollout.samples_per_problem", "rollout.problems_per_step",
    "evaluation.samples_per_problem", "rewards.num_workers", "sampling.max_tokens",
    "model.path",
}  # fmt: skip
"""More of these is more work, which takes its time, or more processes."""


def settings(place: Place, rng: Random, ranks: int = 1) -> Case:
    """A number is extreme, or a switch or a choice another; seldom two at once, of which one may hide the
    other."""
    keys = [*_keys(load_config(place.config()).model_dump())]
    numbers = [(key, value) for key, value in keys if not isinstance(value, bool | str)]
    words = []
    for key, value in rng.sample(numbers if rng.random() < 0.8 else keys, rng.choice((1, 1, 1, 2))):
        if isinstance(value, bool):
            words += [f"--{key}", str(not value).lower()]
        elif isinstance(value, str):
            words += [f"--{key}", rng.choice(WORDS)]
        else:
            words += [f"--{key}", rng.choice(NUMBERS if isinstance(value, int) else EXTREME)]
    return place.train("--run.num_ranks", str(ranks), *words)


def _keys(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, keys in values.items():
        for key, value in keys.items():
            if f"{section}.{key}" not in SLOW and not isinstance(value, dict | list | tuple):
                yield f"{section}.{key}", value
