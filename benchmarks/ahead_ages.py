"""What references are worth by their age, and by whose noise: tokens that an older policy draws like a newer one.

For each learning rate a run of recipes/countdown/headline.toml keeps the policy of every update. 64 responses of the last
policy are compared with those of policies 1, 2, 5, 10 and all updates earlier with the same noise, and with those of the same
policy and of one update earlier with other noise. Then the last policy generates again with each of them as its references,
which must change no token, and the tokens that it keeps of their drafts are counted.

python -m benchmarks.ahead_ages                 # trains what is not there, about 25 minutes; then about as long again
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tlt.bench.report import header, provenance, table, write_report
from tlt.bench.subject import Subject
from tlt.build.engine import build_backend
from tlt.config.load import load_config
from tlt.drafter.drafting.references import References
from tlt.types import Request, Rollout

CONFIG = "recipes/countdown/headline.toml"
AGES = (1, 2, 5, 10)
NUM_PROBLEMS, NUM_SAMPLES = 16, 4
STRETCH = 8
"""Tokens from which on a matching stretch counts: shorter ones come by chance."""
FOLLOWING = "ahead:64x1x64"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far references agree with the responses: shares of responses, and of their tokens."""

    identical: float
    before_first_difference: float
    in_stretches: float

    @classmethod
    def of(cls, ours: Sequence[Rollout], theirs: Sequence[Rollout]) -> Agreement:
        same = prefix = stretches = total = 0
        for mine, other in zip(ours, theirs, strict=True):
            a, b = mine.token_ids, other.token_ids
            total += len(a)
            same += a == b
            prefix += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
            stretches += sum(block.size for block in blocks if block.size >= STRETCH)
        return cls(same / len(ours), prefix / total, stretches / total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1e-5,3e-5,1e-4")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/ahead-ages"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ahead-ages"))
    options = parser.parse_args()
    config = load_config(CONFIG, ["--run.num_ranks", "1"])
    report: dict[str, Any] = {**header(config, " ".join(["python -m benchmarks.ahead_ages", *sys.argv[1:]])), "rates": {}}
    for rate in options.rates.split(","):
        run = options.folder / rate
        if not (run / "policy").is_dir():
            train(run, rate, options.updates)
        report["rates"][rate] = measure(Subject(config), run, options.updates)
        write_report(options.out, report, to_markdown(report, options.updates))
    return 0


def train(run: Path, rate: str, num_updates: int) -> None:
    """Makes a run that keeps the policy of every update."""
    words = f"--run.num_steps {num_updates} --run.checkpoint_every 1 --run.keep_checkpoints {num_updates}"
    words += f" --evaluation.num_problems 0 --drafter.train false --optimizer.learning_rate {rate} --run.out_dir {run}"
    subprocess.run([sys.executable, "-m", "tlt", "train", CONFIG, *words.split()], check=True)


def policy_of(run: Path, update: int) -> dict[str, Tensor]:
    """Returns the policy's tensors after so many updates, from the run's checkpoint."""
    files = sorted((run / "checkpoints" / f"step-{update:08d}").glob("rank-*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name.removeprefix("policy."): tensor for name, tensor in tensors.items() if name.startswith("policy.")}


def measure(subject: Subject, run: Path, last: int) -> dict[str, Any]:
    """Returns the agreement of every kind of reference with the last policy's responses, and what is kept of its drafts."""
    references = References()
    adaptive = build_backend(subject.model, dataclasses.replace(subject.settings, speculation="adaptive"), subject.drafter)
    settings = dataclasses.replace(subject.settings, speculation=FOLLOWING)
    following = build_backend(subject.model, settings, subject.drafter, references=references)
    following.load_policy(policy_of(run, last), last)
    problems = sorted(subject.problems[:NUM_PROBLEMS], key=lambda problem: problem.problem_id)
    requests = [
        Request(problem.problem_id, sample, problem.prompt_ids, subject.params, "rollout", last)
        for problem in problems
        for sample in range(NUM_SAMPLES)
    ]
    elsewhere = [dataclasses.replace(request, policy_step=last + 1) for request in requests]

    def responses(update: int, asked: Sequence[Request]) -> list[Rollout]:
        adaptive.load_policy(policy_of(run, update) if update else subject.model.tensors, update)
        return in_order(adaptive.generate(asked))

    ours = responses(last, requests)
    rows: dict[str, Any] = {}
    kinds = [*((f"{age}, same noise", last - age, requests) for age in (*AGES, last))]
    kinds += [("0, other noise", last, elsewhere), ("1, other noise", last - 1, elsewhere)]
    for name, update, asked in kinds:
        theirs = responses(update, asked)
        for request, rollout in zip(requests, theirs, strict=True):
            references.keep(request.key, rollout.token_ids, update)
        following.stats = type(following.stats)()
        again = in_order(following.generate(requests))
        unchanged = sum(mine.token_ids == other.token_ids for mine, other in zip(ours, again, strict=True))
        stats = following.stats
        kept = stats.followed_by_age.total() / stats.num_tokens
        rows[name] = {**vars(Agreement.of(ours, theirs)), "kept": kept, "tokens_per_step": stats.accept_length}
        rows[name]["unchanged"] = unchanged
        print(f"{run.name} {name}: {rows[name]}", flush=True)
    num_tokens = [len(rollout.token_ids) for rollout in ours]
    return {"rows": rows, "num_responses": len(ours), "num_tokens": sum(num_tokens), "longest": max(num_tokens)}


def in_order(rollouts: Iterator[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.problem_id, rollout.sample_index))


def to_markdown(report: dict[str, Any], last: int) -> str:
    lines = ["# What references are worth, by age", "", *provenance(report), ""]
    for rate, found in report["rates"].items():
        responses = f"{found['num_responses']} responses, {found['num_tokens']:,} tokens, the longest {found['longest']:,}"
        lines += [f"## Learning rate {rate}, after {last} updates: {responses}", ""]
        columns = ["updates between, noise", "responses identical", "tokens before the first difference"]
        columns += [
            f"in matching stretches of {STRETCH} or more",
            "kept of drafts",
            "tokens per sequence and step",
            "unchanged",
        ]
        shares = ("identical", "before_first_difference", "in_stretches", "kept")
        rows = [
            [name, *(f"{row[key]:.1%}" for key in shares), f"{row['tokens_per_step']:.1f}", row["unchanged"]]
            for name, row in found["rows"].items()
        ]
        lines += [table(columns, rows), ""]
    lines += [
        f"Kept: tokens that were drafted by `{FOLLOWING}`, which has no other source of drafts, and accepted, over all tokens."
    ]
    lines += [
        "Unchanged: responses that the last policy gives with these references as without; in float32 a near-tie may differ."
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
