"""Does a refactor change a number? Runs the command line of a tree and keeps what must not depend on the
clock.

    python benchmarks/golden.py record before.json --tree ../before   # a clone of the commit to compare with
    python benchmarks/golden.py record after.json
    python benchmarks/golden.py compare before.json after.json        # exit code 1, one line a difference
    python benchmarks/golden.py record after.json --real smollm2     # a real model, of tlt init smollm2

    train      two quickstart steps in float64, drafter as it is: policy, metrics
    generate   off, chains, trees, retrieval, both: tokens, log-probabilities, how far drafts were accepted
    drafter    one pass over these responses, two presets: tensors
    audit      one verdict: e-values
    bench      two paired steps with and without TLT, float64: digests of tokens and rewards, equal weights
    real       the recipe smollm2, responses off and with drafts, two steps of LoRA in float32: tokens,
               log-probabilities, adapter, metrics

Records of different processors differ in rounding: compare only what one machine has recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS = {
    "": ("step", "policy_version"),
    "rollout": ("num_responses", "num_tokens", "response_tokens", "truncated_share"),
    "rewards": ("mean", "solve_rate"),
    "update": ("zero_variance_groups", "loss", "grad_norm", "entropy", "clip_fraction", "kl", "lr"),
}
"""What of a step's record follows from the seed alone, part by part."""

TOO_SHORT = 3
"""The exit code of an audit that has seen too few tokens for a verdict: its figures are recorded all the
same."""

STRATEGIES = ("off", "4x1x4", "3x2x5", "ngram:8x1x8", "hybrid:6x1x6")
BENCH = ("num_tokens", "reward_mean", "num_different", "num_steps_with_same_weights")


class Tree:
    """A checkout, run through its command line."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.recipe = self.root / "recipes" / "countdown"

    def tlt(self, *words: str | Path) -> str:
        """Standard output of `tlt WORDS`; an exit code that says failure ends the recording."""
        has_module = (self.root / "tlt" / "__main__.py").is_file()
        program = (
            ["-m", "tlt"]
            if has_module
            else ["-c", "import sys; from tlt.apps.cli import main; sys.exit(main())"]
        )
        return self.python(*program, *words)

    def summary(self, *words: str | Path) -> dict[str, Any]:
        """The JSON of the last line."""
        found: dict[str, Any] = json.loads(self.tlt(*words).splitlines()[-1])
        return found

    def python(self, *words: str | Path) -> str:
        """Standard output of `python WORDS` with this tree's packages."""
        process = self.start(*words, errors=subprocess.PIPE)
        output, errors = process.communicate()
        if process.returncode not in (0, TOO_SHORT):
            sys.exit(f"{process.args!r}: exit code {process.returncode}\n{errors}")
        return output

    def start(self, *words: str | Path, errors: int | None = None) -> subprocess.Popen[str]:
        """Starts `python WORDS` with this tree's packages, between pipes."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.root, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
        )

    def child(self, script: Path, *words: str | Path) -> dict[str, Any]:
        """The JSON of the last line of a script that measures whatever tree is imported."""
        found: dict[str, Any] = json.loads(self.python("-P", script, *words).splitlines()[-1])
        return found

    @property
    def commit(self) -> str:
        words = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(words, cwd=self.root, capture_output=True, text=True, check=True).stdout.strip()


def sha256(value: Any) -> str:
    data = value.read_bytes() if isinstance(value, Path) else json.dumps(value).encode()
    return hashlib.sha256(data).hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns what `METRICS` names of each step, under the names of trees whose lines had no parts: they
    are read, too."""

    def values(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for part, names in METRICS.items():
            for name in names:
                flat = "reward_mean" if name == "mean" else name
                yield flat, line[part][name] if part in line else line[flat]

    return [dict(values(line)) for line in read_lines(path)]


def record(tree: Tree, folder: Path) -> dict[str, Any]:
    """Every part of the record, by name; `folder` is scratch."""
    found: dict[str, Any] = {}
    base, drafter = tree.recipe / "base", tree.recipe / "drafter"
    problems = folder / "problems.jsonl"
    tree.tlt("task", "countdown", "--num", "12", "--split", "test", "--seed", "3", "--out", problems)
    found["task"] = sha256(problems)

    for strategy in STRATEGIES:
        out = folder / f"{strategy.replace(':', '-')}.jsonl"
        words: list[str | Path] = [
            "--prompts",
            problems,
            "--out",
            out,
            "--samples",
            "4",
            "--max-tokens",
            "512",
        ]
        words += ["--speculation", strategy]
        words += [] if strategy == "off" else ["--drafter", drafter]
        summary = tree.summary("generate", base, *words)
        lines = read_lines(out)
        found[f"generate {strategy}"] = {
            "tokens": sha256([line["token_ids"] for line in lines]),
            "logprobs": sha256([line["logprobs"] for line in lines]),
            "accept_length": summary["accept_length"],
        }

    for preset in ("hass", "eagle3"):
        out = folder / f"drafter-{preset}"
        words = ["--responses", folder / "off.jsonl", "--preset", preset, "--out", out, "--threads", "1"]
        found[f"drafter train {preset}"] = {
            "loss": tree.summary("drafter", "train", base, *words)["loss"],
            "tensors": sha256(out / "model.safetensors"),
        }

    words = [
        "--task",
        "countdown",
        "--num",
        "8",
        "--samples",
        "2",
        "--speculation",
        "off,4x1x4",
        "--drafter",
        drafter,
    ]
    found["audit"] = tree.summary("audit", "engine", base, *words)

    run, quickstart = folder / "run", tree.recipe / "quickstart.toml"
    exact = ["--run.dtype", "float64", "--drafter.train", "false", "--evaluation.num_problems", "0"]
    tree.tlt("train", quickstart, *exact, "--run.num_steps", "2", "--run.out_dir", run)
    found["train"] = {
        "policy": sha256(run / "policy" / "model.safetensors"),
        "metrics": read_steps(run / "metrics.jsonl"),
    }

    words = [
        "--rollout.problems_per_step",
        "4",
        "--rollout.samples_per_problem",
        "4",
        "--run.out_dir",
        folder / "bench",
    ]
    variants: list[str | Path] = ["--variants", "tlt", "--steps", "2", "--out", folder / "report"]
    if (tree.root / "benchmarks" / "train.py").exists():
        tree.python("-m", "benchmarks.train", quickstart, *variants, *exact, *words)
    else:
        tree.tlt("bench", "train", quickstart, *variants, *exact, *words)
    report = json.loads((folder / "report.json").read_text())
    found["bench train"] = {
        "runs": {name: {key: run[key] for key in BENCH} for name, run in report["runs"].items()},
        "digests": [line["digest"] for line in read_lines(folder / "bench" / "turns.jsonl")],
    }
    return found


def write_sums(tree: Tree, folder: Path, num: int) -> Path:
    """Writes problems of the recipe smollm2, and returns their file."""
    problems = folder / "sums.jsonl"
    options = json.dumps({"operations": ["+"], "digits": [1, 2], "terms": [2, 5], "steps": "checked"})
    recipe = tree.recipe.parent / "smollm2"
    named = tomllib.loads((recipe / "reasoning.toml").read_text())["task"]["name"]
    task = recipe / named if ".py:" in named else named  # earlier trees have it in the package
    tree.tlt("task", task, "--options", options, "--num", str(num), "--seed", "3", "--out", problems)
    return problems


def record_real(tree: Tree, model: Path, folder: Path) -> dict[str, Any]:
    """What the recipe smollm2 does with its real model, which `tlt init smollm2` has written to `model`."""
    found: dict[str, Any] = {}
    sums = tree.recipe.parent / "smollm2" / "reasoning.toml"
    problems = write_sums(tree, folder, 4)
    for strategy in ("off", "4x1x4", "3x2x5"):
        out = folder / f"real-{strategy}.jsonl"
        words: list[str | Path] = [
            "--prompts",
            problems,
            "--out",
            out,
            "--samples",
            "2",
            "--max-tokens",
            "48",
        ]
        words += ["--chat", "true", "--adapter", model / "warm-up", "--speculation", strategy]
        words += [] if strategy == "off" else ["--drafter", model / "drafter"]
        summary = tree.summary("generate", model / "base", *words)
        lines = read_lines(out)
        found[f"generate {strategy}"] = {
            "tokens": sha256([line["token_ids"] for line in lines]),
            "logprobs": sha256([line["logprobs"] for line in lines]),
            "accept_length": summary["accept_length"],
        }
    run = folder / "real-run"
    words = [
        "--model.path",
        model / "base",
        "--model.adapter",
        model / "warm-up",
        "--drafter.path",
        model / "drafter",
    ]
    words += ["--drafter.train", "false", "--rollout.speculation", "4x1x4", "--evaluation.num_problems", "0"]
    words += [
        "--rollout.problems_per_step",
        "2",
        "--rollout.samples_per_problem",
        "4",
        "--sampling.max_tokens",
        "64",
    ]
    tree.tlt("train", sums, *words, "--run.num_steps", "2", "--run.out_dir", run)
    found["train"] = {
        "adapter": sha256(run / "adapter" / "adapter_model.safetensors"),
        "metrics": read_steps(run / "metrics.jsonl"),
    }
    return found


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """One line for each value that is not the same."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in differences(before.get(key), after.get(key), f"{place} / {key}" if place else key)
        ]
    return [] if before == after else [f"{place}: {before} → {after}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run everything and write the record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the checkout to run")
    recording.add_argument(
        "--real", type=Path, help="a folder of `tlt init smollm2`, for the part with a real model"
    )
    comparing = commands.add_parser("compare", help="print what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            tree, scratch = Tree(options.tree), Path(folder)
            found = record(tree, scratch)
            if options.real is not None:
                found["real"] = record_real(tree, options.real.resolve(), scratch)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    lines = differences(before, after)
    print("\n".join(lines) or f"identical: {', '.join(before)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
