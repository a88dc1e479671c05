"""Small runs that generate with vLLM or with our own engine, each in a process of its own, and how far their
responses are the same.

    tlt     engine tlt, one rank
    vllm    engine vllm, one rank
    off     as vllm, without drafts
    killed  as vllm, but killed in the middle of a rollout and resumed from its journal

The arms after tlt update with the responses of tlt, so that every step of every arm begins with the same
weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.side_by_side import compare
from tlt.base.types import Finished, Request, ResponseId, Reward, Rollout, SamplingParams, id_of
from tlt.models.hf.weights import content_hash
from tlt.training.report.step_record import read_metrics
from tlt.training.rollout.dynamic import Group
from tlt.training.rollout.result import PhaseResult

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/countdown/quickstart.toml"
SMALL = {
    "run.num_ranks": 1, "run.checkpoint_every": 5, "run.time_limit_minutes": 60,
    "rollout.problems_per_step": 8, "rollout.samples_per_problem": 4, "rollout.max_batch_size": 32,
    "sampling.max_tokens": 128, "evaluation.num_problems": 0, "rollout.measure_speedup_every": 0,
    "task.options": '{"mix": {"2": 1.0}, "max_number": 15, "max_target": 60}', "vllm.compile": "false",
}  # fmt: skip
"""Puzzles of two numbers, which are solved within few tokens."""
SMALL_REAL = {
    "run.num_ranks": 1, "run.threads_per_rank": 2, "run.checkpoint_every": 0, "run.time_limit_minutes": 60,
    "rollout.problems_per_step": 4, "rollout.samples_per_problem": 4, "rollout.max_batch_size": 16,
    "sampling.max_tokens": 160, "evaluation.num_problems": 0, "rollout.measure_speedup_every": 0,
    "drafter.train": "false",
}  # fmt: skip
"""SmolLM2 on sums that it writes out: 16 responses a step, on both of two cores."""
BY_TASK: Mapping[str, Mapping[str, Any]] = {"countdown": SMALL, "arithmetic.py:TASK": SMALL_REAL}
ARMS = {
    "tlt": {"rollout.engine": "tlt"},
    "vllm": {"rollout.engine": "vllm"},
    "off": {"rollout.engine": "vllm", "rollout.speculation": "off", "drafter.train": "false"},
    "killed": {"rollout.engine": "vllm"},
}
Place = tuple[int, str, int]
"""(step, problem, sample)."""


# ── a run, in a process of its own ──────────────────────────────────────────────────────────────────────────


def child(folder: Path, kill: Sequence[int], words: Sequence[str]) -> int:
    """Runs `tlt WORDS…` and keeps every step's responses in the folder. With an arm `tlt` beside the folder,
    the updates take that arm's responses.

    kill: (step, engine step in it) at which the process kills itself; (): never.
    """
    from tlt.apps.cli.main import main
    from tlt.engine.vllm.engine import VllmEngine
    from tlt.training import loop

    sample, step = loop.sample, VllmEngine.step
    current, num_steps = -1, 0
    lead = folder.parent / "tlt"
    led = {} if folder == lead else read_responses(lead)

    def keep(run: Any) -> PhaseResult:
        nonlocal current, num_steps
        current, num_steps = run.step, 0
        trained = {name: one for name, one in run.policy.named_parameters() if one.requires_grad}
        digest = content_hash(trained)
        phase = sample(run)
        with (folder / "responses.jsonl").open("a") as file:
            for rollout, reward in zip(phase.rollouts, phase.rewards, strict=True):
                about = {"step": run.step, "recalled": phase.recalled_tokens, "policy": digest}
                file.write(json.dumps({**about, "rollout": vars(rollout), "reward": vars(reward)}) + "\n")
        ours = {place[1:]: one for place, one in led.items() if place[0] == run.step}
        if all(rollout.token_ids == ours[id_of(rollout)][0].token_ids for rollout in phase.rollouts if ours):
            return phase
        run.save_policy(folder / f"policy-{run.step}")
        return following(phase, ours)

    def count(engine: VllmEngine, captures: bool = False) -> list[Finished]:
        nonlocal num_steps
        num_steps += 1
        if [current, num_steps] == list(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, captures)

    loop.sample, VllmEngine.step = keep, count  # type: ignore[method-assign, assignment]  # in between, and then as before
    return main(list(words))


def following(phase: PhaseResult, ours: Mapping[ResponseId, tuple[Rollout, Reward]]) -> PhaseResult:
    def follow(group: Group) -> Group:
        rollouts, rewards = zip(*(ours[id_of(rollout)] for rollout in group.rollouts), strict=True)
        return replace(group, rollouts=rollouts, rewards=rewards)

    rollouts, rewards = zip(*(ours[id_of(rollout)] for rollout in phase.rollouts), strict=True)
    return replace(
        phase,
        rollouts=list(rollouts),
        rewards=list(rewards),
        groups=[follow(group) for group in phase.groups],
        kept=[follow(group) for group in phase.kept],
    )


def run_arm(
    arm: str,
    folder: Path,
    steps: int,
    kill: str,
    changes: Mapping[str, Any] | None = None,
    recipe: Path = RECIPE,
) -> dict[str, Any]:
    """Runs an arm to its end, in two attempts where it is killed. kill: "STEP,ENGINE_STEP".
    changes: to the configuration."""
    if (folder / "run" / "policy").exists():
        return read_arm(arm, folder)
    folder.mkdir(parents=True)
    values = {**small(recipe), **(changes or {}), **ARMS[arm]}
    values |= {"run.num_steps": steps, "run.out_dir": folder / "run"}
    words = [
        "train",
        str(recipe),
        *(word for key, value in values.items() for word in (f"--{key}", str(value))),
    ]
    if arm == "killed":
        code = attempt(folder, kill, words)
        if code != -signal.SIGKILL:
            sys.exit(f"{arm}: ended with {code}, and was to be killed at {kill}")
        words = ["train", "--resume", str(folder / "run")]
    if code := attempt(folder, "", words):
        sys.exit(f"{arm}: exit code {code}\n{(folder / 'said.txt').read_text()[-3000:]}")
    return read_arm(arm, folder)


def small(recipe: Path) -> Mapping[str, Any]:
    return BY_TASK[tomllib.loads(recipe.read_text(encoding="utf-8"))["task"]["name"]]


def read_arm(arm: str, folder: Path) -> dict[str, Any]:
    records = read_metrics(folder / "run" / "metrics.jsonl")
    return {"arm": arm, "steps": [record.figures() for record in records]}


def attempt(folder: Path, kill: str, words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "tests.vllm.arms", str(folder), kill, *words]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with (folder / "said.txt").open("a") as said:
        return subprocess.run(command, env=environ, stdout=said, stderr=said, check=False).returncode


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


def read_responses(folder: Path) -> dict[Place, tuple[Rollout, Reward]]:
    found = {}
    for line in read_lines(folder):
        tuples = {key: tuple(line["rollout"][key]) for key in ("prompt_ids", "token_ids", "logprobs")}
        rollout = Rollout(**{**line["rollout"], **tuples, "drafts": None})
        found[line["step"], *id_of(rollout)] = rollout, Reward(**line["reward"])
    return found


def compare_arms(name: str, one: Path, other: Path) -> dict[str, Any]:
    """Returns how far the other arm has the first one's tokens, and the margins where they part."""
    theirs, lines = read_responses(other), {line["step"]: line for line in read_lines(other)}
    ours = {place: response for place, response in read_responses(one).items() if place in theirs}
    assert ours.keys() == theirs.keys(), "the second run has the same problems, perhaps fewer steps"
    policies = {line["step"]: line["policy"] for line in read_lines(one)}
    found: dict[str, Any] = {
        "name": name,
        "responses": len(ours),
        "same_policies": sum(line["policy"] == policies[step] for step, line in lines.items()),
        "steps": len(lines),
        "recalled_tokens": {step: line["recalled"] for step, line in lines.items() if line["recalled"]},
    }
    counts = {"num_equal": 0, "num_tokens": 0}
    found |= {"logprob_gap": 0.0, "differences": []}
    for step in sorted(lines):
        requests = [request_of(place, ours[place][0]) for place in ours if place[0] == step]
        at_step = [{place[1:]: of[place][0] for place in ours if place[0] == step} for of in (ours, theirs)]
        compared = compare(requests, at_step[0], at_step[1], other / f"policy-{step}")
        counts = {key: value + getattr(compared, key) for key, value in counts.items()}
        found["logprob_gap"] = max(found["logprob_gap"], compared.logprob_gap)
        found["differences"] += [
            {"step": step, **vars(each), "is_near_tie": each.is_near_tie} for each in compared.differences
        ]
    return found | counts


def request_of(place: Place, response: Rollout) -> Request:
    step, problem_id, sample_index = place
    params = SamplingParams(1.0, seed=0)
    return Request(problem_id, sample_index, response.prompt_ids, params, "rollout", step)


if __name__ == "__main__":
    folder, kill, *words = sys.argv[1:]
    sys.exit(child(Path(folder), [int(part) for part in kill.split(",") if part], words))
