"""Runs that do not fit, as a user describes them to `tlt plan memory`, and what its remedies advise."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.apps.cli.options import parse_options
from tlt.apps.cli.plan import PlanMemory, planned_run
from tlt.apps.plan.fit import FitVerdict, fits, judge
from tlt.apps.plan.sizes import PlannedRun

CONFIG = """
[model]
path = "model"
[task]
name = "countdown"
"""


@dataclass(frozen=True)
class Asked:
    """The words of a command, without its configuration."""

    folder: Path
    keys: dict[str, str]
    options: dict[str, str]

    @property
    def run(self) -> PlannedRun:
        keys = {f"--{key}": value for key, value in (self.options | self.keys).items()}
        words = [str(self.folder / "run.toml"), *itertools.chain(*keys.items())]
        return planned_run(parse_options("plan memory", PlanMemory, words))

    def with_keys(self, keys: dict[str, str], options: dict[str, str]) -> Asked:
        return Asked(self.folder, self.keys | keys, self.options | options)


def write_run(folder: Path, chance: Any) -> None:
    """Writes a configuration, and a model's shape of 1 to 80 layers."""
    (folder / "model").mkdir(parents=True)
    hidden = 128 * chance.choice([2, 7, 16, 28, 40, 64])
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": chance.choice([1000, 32_000, 152_064]),
        "hidden_size": hidden,
        "intermediate_size": hidden * chance.choice([2, 3, 4]),
        "num_hidden_layers": chance.choice([1, 12, 28, 48, 80]),
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": chance.choice([1, hidden // 128]),
        "head_dim": 128,
        "max_position_embeddings": chance.choice([2048, 32_768, 131_072]),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": chance.random() < 0.5,
    }
    (folder / "model/config.json").write_text(json.dumps(shape))
    (folder / "run.toml").write_text(CONFIG)


def draw_asked(folder: Path, chance: Any) -> Asked:
    """A run of any kind on any machine."""

    def maybe(share: float, key: str, *values: object) -> dict[str, str]:
        return {key: str(chance.choice(values))} if chance.random() < share else {}

    device = chance.choice(["cpu", "cuda"])
    max_tokens = chance.choice([64, 512, 2000, 16_384])
    keys = {
        "run.device": device,
        "sampling.max_tokens": str(max_tokens),
        **maybe(0.6, "run.num_ranks", 1, 2, 3, 4, 8),
        **maybe(0.5, "run.dtype", "float32", "bfloat16"),
        **maybe(0.3, "lora.rank", 8, 64),
        **maybe(0.3, "parallel.policy", "replicate", "fsdp"),
        **maybe(0.3, "algorithm.tokens_per_micro_batch", 1024, 65_536, 400_000),
        **maybe(0.3, "rollout.kv_gib", 0.001, 0.5, 40.0),
        **maybe(0.2, "algorithm.overlong_buffer_tokens", max_tokens // 2),
        **maybe(0.2, "algorithm.kl_coefficient", 0.01),
        **maybe(0.2, "parallel.checkpoint_activations", "true"),
    }
    options = {
        "device-gib": str(chance.choice([1, 4, 16, 24, 80, 500])),
        "prompt-tokens": str(chance.choice([16, 1024])),
        **maybe(0.3, "ranks", 1, 2, 8),
    }
    return Asked(folder, keys, options)


def advised(line: str) -> tuple[dict[str, str], dict[str, str]]:
    """The keys and options that a verdict's line tells to set."""
    remedy = line.partition("; ")[2]
    if (least := re.search(r"give at least ([0-9.]+), or lower sampling", remedy)) is not None:
        return {"rollout.kv_gib": least[1]}, {}
    keys = dict(re.findall(r"([a-z]+\.[a-z_]+) = ([^\s,]+)", remedy))
    options = dict(re.findall(r"--(ranks) ([0-9]+)", remedy))
    return keys, options


def ways_out(run: PlannedRun) -> Iterator[PlannedRun]:
    """Every combination of what a remedy may change."""
    longest = run.longest
    halves = [run.config.sampling.max_tokens // n for n in (1, 2, 4, 8, 16)]
    ranks = [n for n in (8, 4, 3, 2, 1) if n < run.num_ranks and run.num_sharing == run.num_ranks]
    every = {
        "parallel.policy": ["fsdp"] if run.num_ranks > 1 else [],
        "parallel.checkpoint_activations": [True],
        "algorithm.tokens_per_micro_batch": [longest, min(longest, 64)],
        "rollout.kv_gib": [None],
        "run.dtype": ["bfloat16"],
        "run.num_ranks": ranks,
        "lora.base_dtype": ["bfloat16"] if run.config.lora.rank else [],
        "sampling.max_tokens": [number for number in halves if number > 0],
    }
    kept = object()
    for values in itertools.product(*([kept, *found] for found in every.values())):
        changes = {key: value for key, value in zip(every, values, strict=True) if value is not kept}
        yield run.changed(changes)


def check(asked: Asked) -> str:
    """Follows the remedy of a run that does not fit, and returns what became of it: fits, advised, or none:
    no way is known. Raises AssertionError for a remedy that does not help."""
    verdict: FitVerdict = judge(asked.run)
    if verdict.fits:
        return "fits"
    assert verdict.fits is False
    assert "\n" not in verdict.line
    keys, options = advised(verdict.line)
    if keys or options:
        followed = judge(asked.with_keys(keys, options).run)
        assert followed.fits, f"{asked.keys} {asked.options}: {verdict.line} ── then: {followed.line}"
        return "advised"
    assert "no key makes it fit" in verdict.line
    way = next((one for one in ways_out(asked.run) if fits(one)), None)
    assert way is None, f"{asked.keys} {asked.options}: fits with {way}"
    return "none"
