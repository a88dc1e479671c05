"""Compares a run that generates with vLLM with the same run that generates with TLT's own engine.

    python -m benchmarks.vllm_rl --out benchmarks/results/vllm-rl      with an interpreter that has vLLM

    tlt     engine tlt, one rank
    vllm    engine vllm, one rank
    killed  as vllm, but killed in the middle of a rollout and resumed from its journal

The runs are of the Countdown recipe, small, with one seed. All responses of every step are compared, token by
token. The engines add numbers in different orders, so a response may differ where two tokens are nearly as
likely: transformers computes the margin there, noise included, in float64 from the step's policy. From then
on the runs train on different responses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.command import make_parser
from tlt.bench.report import environment, markdown, number, table, write_report
from tlt.report.record import read_metrics
from tlt.speculative.sampling import gumbel_noise, keys_tensor
from tlt.types import Finished, Request, SamplingParams

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/countdown/quickstart.toml"
SMALL = {
    "run.num_ranks": 1, "run.checkpoint_every": 5, "run.time_limit_minutes": 60,
    "rollout.problems_per_step": 8, "rollout.samples_per_problem": 4, "rollout.max_batch_size": 32,
    "sampling.max_tokens": 128, "evaluation.num_problems": 0,
    "task.options": '{"mix": {"2": 1.0}, "max_number": 15, "max_target": 60}', "vllm.compile": "false",
}  # fmt: skip
"""Puzzles of two numbers, which are solved within few tokens."""
ARMS = ("tlt", "vllm", "killed")
Place = tuple[int, str, int]
"""(step, problem, sample)."""


# ── a run, in a process of its own ──────────────────────────────────────────────────────────────────────────


def child(folder: Path, kill: Sequence[int], words: Sequence[str]) -> int:
    """Runs `tlt WORDS…` and keeps every step's responses and policy in the folder. kill: (step, engine step
    in it) at which the process kills itself; (): never."""
    from tlt.cli.main import main
    from tlt.training import loop
    from tlt.vllm.engine import VllmEngine

    sample, step = loop.sample, VllmEngine.step
    current, num_steps = -1, 0

    def keep(run: Any) -> Any:
        nonlocal current, num_steps
        current, num_steps = run.step, 0
        tensors = {name: tensor.detach().clone() for name, tensor in run.policy.state_dict().items()}
        save_file(tensors, folder / f"policy-{run.step}.safetensors")
        phase = sample(run)
        with (folder / "responses.jsonl").open("a") as file:
            for rollout in phase.rollouts:
                record = {"step": run.step, "recalled": phase.recalled_tokens, **vars(rollout)}
                file.write(json.dumps(record) + "\n")
        return phase

    def count(engine: VllmEngine, captures: bool = False) -> list[Finished]:
        nonlocal num_steps
        num_steps += 1
        if [current, num_steps] == list(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, captures)

    loop.sample, VllmEngine.step = keep, count  # type: ignore[method-assign, assignment]  # in between, and then as before
    return main(list(words))


def run_arm(
    arm: str, folder: Path, steps: int, kill: str, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Runs an arm to its end, in two attempts where it is killed. kill: "STEP,ENGINE_STEP".
    changes: to the configuration."""
    if (folder / "run" / "policy").exists():
        return read_arm(arm, folder)
    folder.mkdir(parents=True)
    values = {**SMALL, **(changes or {}), "run.num_steps": steps, "run.out_dir": folder / "run"}
    given = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    words = ["train", str(RECIPE), *given, "--rollout.engine", "tlt" if arm == "tlt" else "vllm"]
    if arm == "killed":
        code = attempt(folder, kill, words)
        if code != -signal.SIGKILL:
            sys.exit(f"{arm}: ended with {code}, and was to be killed at {kill}")
        words = ["train", "--resume", str(folder / "run")]
    if code := attempt(folder, "", words):
        sys.exit(f"{arm}: exit code {code}\n{(folder / 'said.txt').read_text()[-3000:]}")
    return read_arm(arm, folder)


def read_arm(arm: str, folder: Path) -> dict[str, Any]:
    records = read_metrics(folder / "run" / "metrics.jsonl")
    return {"arm": arm, "steps": [record.figures() for record in records]}


def attempt(folder: Path, kill: str, words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "benchmarks.vllm_rl", "--child", str(folder), kill, *words]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with (folder / "said.txt").open("a") as said:
        return subprocess.run(command, env=environ, stdout=said, stderr=said, check=False).returncode


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────


def read_responses(folder: Path) -> tuple[dict[Place, dict[str, Any]], dict[int, int]]:
    """Returns the responses by place, and the tokens that each step took from a journal."""
    lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    by_place = {(one["step"], one["problem_id"], one["sample_index"]): one for one in lines}
    return by_place, {one["step"]: one["recalled"] for one in lines}


def compare(name: str, one: Path, other: Path) -> dict[str, Any]:
    """Returns how far two arms have the same tokens, and the margins where they part."""
    (ours, _), (theirs, recalled) = read_responses(one), read_responses(other)
    assert theirs.keys() <= ours.keys(), "the second run has the same problems, perhaps fewer steps"
    ours = {place: ours[place] for place in theirs}
    differing = [place for place in ours if ours[place]["token_ids"] != theirs[place]["token_ids"]]
    first = min((place[0] for place in differing), default=None)
    same = [place for place in ours if first is None or place[0] < first]
    found: dict[str, Any] = {
        "name": name,
        "responses": len(ours),
        "same_responses": len(ours) - len(differing),
        "first_difference": first,
        "responses_before": len(same),
        "tokens_before": sum(len(ours[place]["token_ids"]) for place in same),
        "recalled_tokens": {step: num for step, num in recalled.items() if num},
    }
    if first is not None:
        at_first = [place for place in differing if place[0] == first]
        found["of_that_step"] = sum(place[0] == first for place in ours)
        found["differ_in_that_step"] = len(at_first)
        policy = load_file(one / f"policy-{first}.safetensors")
        found["margins"] = list(margins(policy, [(ours[place], theirs[place]) for place in at_first]))
    return found


def margins(
    policy: dict[str, torch.Tensor], pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yields the token at which each pair of responses parts, and the law's margin there, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(RECIPE.parent / "base", dtype=torch.float64)
    missing, unexpected = model.load_state_dict(policy, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    for one, other in pairs:
        pair = zip(one["token_ids"], other["token_ids"], strict=False)
        index = next(i for i, (a, b) in enumerate(pair) if a != b)
        prefix = [*one["prompt_ids"], *one["token_ids"][:index]]
        request = request_of(one)
        with torch.no_grad():
            logits_V = model(torch.tensor([prefix])).logits[0, -1]
        noise_V = gumbel_noise(
            keys_tensor([request.noise_key]), torch.tensor([[len(prefix)]]), len(logits_V)
        )[0, 0]
        scores_V = logits_V + noise_V
        a, b = one["token_ids"][index], other["token_ids"][index]
        margin, best_2 = float((scores_V[a] - scores_V[b]).abs()), set(scores_V.topk(2).indices.tolist())
        yield {"index": index, "margin": margin, "are_the_best_two": best_2 == {a, b}}


def request_of(response: dict[str, Any]) -> Request:
    params = SamplingParams(1.0, seed=0)
    return Request(response["problem_id"], response["sample_index"], (), params, "rollout", response["step"])


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────


def to_markdown(report: dict[str, Any]) -> str:
    by_arm = {run["arm"]: run["steps"] for run in report["runs"]}
    figures = {
        "reward": ("rewards/mean", ".3f"),
        "tokens": ("rollout/num_tokens", "d"),
        "rollout, s": ("rollout/seconds", ".1f"),
        "step, s": ("step_seconds", ".1f"),
    }
    columns = ["step", *(f"{arm}: {name}" for name in figures for arm in by_arm)]
    rows = []
    for index, steps in enumerate(zip_longest(*by_arm.values(), fillvalue={})):
        row = [number(step.get(key), form) for key, form in figures.values() for step in steps]
        rows.append([index + 1, *row])
    found = [describe(found) for found in report["comparisons"]]
    title = "A run with vLLM beside the same run with our own engine"
    return markdown(title, report, report["configuration"], *found, table(columns, rows))


def describe(found: dict[str, Any]) -> str:
    """Returns a comparison in words."""
    name, num, tokens = found["name"], found["responses"], f"{found['tokens_before']} tokens"
    steps = found["recalled_tokens"].items()
    recalled = ", ".join(f"{taken} tokens of step {int(step) + 1}" for step, taken in steps)
    from_journal = f" From the journal came {recalled}." if recalled else ""
    if found["first_difference"] is None:
        return f"**{name}**: all {num} responses have the same tokens ({tokens}).{from_journal}"
    worst = max(margin["margin"] for margin in found["margins"])
    return (
        f"**{name}**: {found['responses_before']} of {num} responses, {tokens}, have the same tokens, all of"
        f" the steps before step {found['first_difference'] + 1}. There {found['differ_in_that_step']} of"
        f" {found['of_that_step']} part, where the law's two best tokens are {worst:.1e} apart at"
        f" most.{from_journal}"
    )


def measure(options: argparse.Namespace, folder: Path) -> None:
    command = f"python -m benchmarks.vllm_rl --steps {options.steps} --kill-step {options.kill_step}"
    command += f" --killed-steps {options.killed_steps} --kill-after {options.kill_after}"
    report: dict[str, Any] = {"command": command, "environment": environment(), "runs": [], "comparisons": []}
    said = ", ".join(f"{key} = {value}" for key, value in SMALL.items() if key != "run.time_limit_minutes")
    recipe = f"`recipes/countdown/quickstart.toml` with {said}"
    report["configuration"] = f"{recipe}; float32, one thread. Steps count from 1."
    for arm in ARMS:
        steps = options.killed_steps if arm == "killed" else options.steps
        report["runs"].append(run_arm(arm, folder / arm, steps, f"{options.kill_step},{options.kill_after}"))
        print(arm, [round(step["rewards/mean"], 3) for step in report["runs"][-1]["steps"]], flush=True)
    for one, other in (("tlt", "vllm"), ("vllm", "killed")):
        found = compare(f"{one} and {other}", folder / one, folder / other)
        report["comparisons"].append(found)
        print(describe(found), flush=True)
    write_report(options.out, report, to_markdown(report))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        folder, kill, *words = sys.argv[2:]
        sys.exit(child(Path(folder), [int(part) for part in kill.split(",") if part], words))
    parser = make_parser("vllm_rl", __doc__)
    parser.add_argument("--steps", type=int, default=20, help="policy updates")
    parser.add_argument("--killed-steps", type=int, default=8, help="policy updates of the third arm")
    parser.add_argument("--kill-step", type=int, default=6, help="step in which it is killed, from 0 on")
    parser.add_argument("--kill-after", type=int, default=20, help="engine steps in it before that")
    parser.add_argument("--folder", type=Path, help="keeps the runs; ended ones are not run again")
    options = parser.parse_args()
    if options.folder is not None:
        measure(options, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="tlt-rl-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
