"""What somebody types is odd: commands, their options, and values that reach the ranks."""

from __future__ import annotations

import json
from random import Random

from tests.faults.fuzz.case import Case, Place, lines
from tests.faults.fuzz.inputs import PROBLEMS, RESPONSES
from tests.faults.mutations import ODD, to_toml
from tlt.apps.cli.commands import COMMANDS

AMOUNTS = {
    "num", "num_problems", "samples", "steps", "rounds", "seconds", "minutes", "epochs", "max_tokens",
}  # fmt: skip
"""More of these is more work, which takes its time: they are given what is too little, or no number."""
SPECULATION = (
    "4x1x²", "0x0x0", "1x1x-1", "99999999x1x1", "ngram:0", "ngram:99999999", "hybrid:", "off+off",
    "adaptive:1", "4×1×4",
)  # fmt: skip
HARMLESS = (
    "task", "score", "plan memory", "generate", "drafter export", "train", "audit engine", "drafter eval",
    "init", "bench",
)  # fmt: skip
TYPED = (
    "[" * 5000, "{" * 2000, "'" + "\\" * 3001, "0x", "1_0", "١", "²", "--", "-", "-1", "=", "--=", "a=b",
    "\t", "''", '""',
)  # fmt: skip


def commands(place: Place, rng: Random) -> Case:
    """A sound command, one or two of whose words are odd, missing, doubled or new."""
    name = rng.choice(HARMLESS)
    words = list(_sound_words(place, name))
    options = [option.replace("_", "-") for option in COMMANDS[name].options.model_fields]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(words) + 1)
        match rng.randrange(5):
            case 0 if words:
                del words[at % len(words)]
            case 1 if words and _can_be_odd(words, at % len(words)):
                words[at % len(words)] = _odd_word(rng)
            case 2:
                words.insert(at, _odd_word(rng))
            case _:
                option = rng.choice(options)
                value = (
                    rng.choice(("0", "-1", "x", "", "1.5"))
                    if option.replace("-", "_") in AMOUNTS
                    else _odd_word(rng)
                )
                words += rng.choice(([f"--{option}", value], [f"--{option}={value}"], [f"--{option}"]))
    codes = {0, 2, 3} if name == "audit engine" else {0, 2}  # 3: too few tokens to decide
    return Case((*name.split(), *words), codes=frozenset(codes))


def _can_be_odd(words: list[str], at: int) -> bool:
    return words[at - 1].removeprefix("--").replace("-", "_") not in AMOUNTS


def _odd_word(rng: Random) -> str:
    odd = rng.choice((*ODD, *TYPED, *TYPED, *SPECULATION))
    return odd if isinstance(odd, str) else json.dumps(odd)


def _sound_words(place: Place, name: str) -> tuple[str, ...]:
    model, drafter = str(place.sound.model), str(place.sound.drafter)
    config, prompts = (
        str(place.write("run.toml", to_toml(place.config()))),
        str(place.write("prompts.jsonl", lines(PROBLEMS))),
    )
    responses = str(place.write("responses.jsonl", lines(RESPONSES)))
    few = ("--max-tokens", "2", "--samples", "1")
    return {
        "init": ("countdown", "folder"),
        "train": (config,),
        "plan memory": (config,),
        "generate": (model, "--prompts", prompts, "--out", "out.jsonl", *few),
        "task": ("countdown", "--num", "2", "--out", "out.jsonl"),
        "score": ("countdown", "--problems", prompts, "--responses", responses),
        "audit engine": (model, "--prompts", prompts, *few),
        "drafter export": (drafter, "--target", model, "--to", "exported", "--format", "vllm-eagle"),
        "bench": (model, "--prompts", prompts, "--num", "2", "--rounds", "1", *few),
        "drafter eval": (drafter, "--model", model, "--prompts", prompts, *few),
    }[name]


def strange_commands(place: Place, rng: Random) -> Case:
    """Words that are no command, or one without what it needs."""
    families = ",drafter,plan,bench,--help,--version,-h,train --help,help,TRAIN,bench"
    words = rng.choice(families.split(",")).split() + [_odd_word(rng) for _ in range(rng.randrange(3))]
    return Case(tuple(word for word in words if "\0" not in word or rng.random() < 0.5))
