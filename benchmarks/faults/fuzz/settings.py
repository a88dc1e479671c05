"""Values that a configuration may have, and hardly ever has, reach the ranks: of a run of two steps."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from benchmarks.faults.fuzz.case import Case, Place
from tlt.config.load import load_config

NUMBERS = ("0", "1", "2", "7", "65536", "2147483648", "4611686018427387904", "-1")
EXTREME = ("1e-320", "1e-300", "1e-9", "1e300", "1.7e308", "0", "1", "0.999999", "7", "-1")
WORDS = ("auto", "off", "none", "adaptive", "x", "1x1x1", "ngram:4", "bfloat16", "float32")
SLOW = {
    "run.num_steps", "run.num_ranks", "run.out_dir", "run.launcher", "task.num_problems",
    "evaluation.num_problems", "rollout.samples_per_problem", "rollout.problems_per_step",
    "evaluation.samples_per_problem", "rewards.num_workers", "sampling.max_tokens",
    "algorithm.max_resamples", "model.path",
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
