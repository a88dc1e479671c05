"""Does every push of policy and drafter into a running vLLM arrive, at once and whole, and does memory stay flat over many?

    python -m benchmarks.vllm_push --out benchmarks/results/vllm-push      with an interpreter that has vLLM

The policies of a run differ too little from step to step for greedy responses to tell them apart; so pushes alternate between
the recipe's policy with its drafter, and strongly changed weights of both, anew for each push:

    policy     right after each push, greedy responses are compared with those of TLT's own engine under the same weights; and
               with those of the push before, which they must differ from
    drafter    the recipe's guesses well, a changed one hardly ever: accept length, tokens for each verification
    memory     the process's resident set
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_of, make_parser
from tlt.bench.report import environment, markdown, table, write_report
from tlt.build.engine import EngineSettings, build_backend, load_stored
from tlt.build.model import Model, load_model
from tlt.config.vllm import VllmSection
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.tasks.base import make_problems
from tlt.types import Request, SamplingParams
from tlt.vllm.drafter import VllmDrafter

RECIPE = Path(__file__).parents[1] / "recipes/countdown"
NUM_TOKENS, NUM_REQUESTS, DEPTH = 24, 4, 3
LONG = 30
"""Times that a problem stands in its prompt, which then fills some of vLLM's cached blocks: what they hold of an earlier policy
would be taken for the new one's, were the prefix cache not reset."""
NOISE = 2.0
"""Standard deviation of what is added to a tensor, in its own."""


def changed(tensors: Mapping[str, Tensor], seed: int, kept: float) -> dict[str, Tensor]:
    """Returns every matrix times `kept`, with noise of its own scale, so that hardly anything of what it does stays."""
    draw = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        return kept * tensor + NOISE * tensor.std() * torch.randn(tensor.shape, generator=draw)

    return {name: change(tensor) for name, tensor in tensors.items()}


def requests_of(model: Model) -> list[Request]:
    assert model.tokenizer is not None
    params = SamplingParams(0.0, max_tokens=NUM_TOKENS)
    problems = make_problems("countdown", NUM_REQUESTS, 0, {"split": "test"})
    prompts = [model.tokenizer.encode_text(LONG * str(problem["prompt"])) for problem in problems]
    return [Request(f"problem-{index}", 0, prompt, params, "generate") for index, prompt in enumerate(prompts)]


def answer(engine: RolloutBackend, requests: list[Request]) -> list[tuple[int, ...]]:
    engine.stats = EngineStats()
    found = {rollout.problem_id: rollout.token_ids for rollout in engine.generate(requests)}
    return [found[request.problem_id] for request in requests]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@dataclass(frozen=True)
class Setup:
    """vLLM with a drafter, our own engine beside it, and what both start with."""

    model: Model
    stored: StoredDrafter
    vllm: RolloutBackend
    ours: RolloutBackend


def start() -> Setup:
    model = load_model(RECIPE / "base", torch.float32)
    stored = load_stored(RECIPE / "drafter", model)
    assert stored is not None
    speculation, section = f"{DEPTH}x1x{DEPTH}", VllmSection(compile=False)
    settings = EngineSettings(speculation, max_batch_size=NUM_REQUESTS, engine="vllm", vllm=section, kv_gib=0.25, window=512)
    vllm, ours = build_backend(model, settings, stored), build_backend(model, EngineSettings(max_batch_size=NUM_REQUESTS))
    return Setup(model, stored, vllm, ours)


def push_all(setup: Setup, num: int) -> list[dict[str, Any]]:
    """Pushes so many times; returns what was seen after each."""
    model, stored, vllm, ours = setup.model, setup.stored, setup.vllm, setup.ours
    assert isinstance(vllm.drafter, VllmDrafter)
    requests, pushes, before = requests_of(model), [], None
    for number in range(1, num + 1):
        is_plain = number % 2 == 1
        policy = dict(model.tensors) if is_plain else changed(model.tensors, number, kept=1.0)
        drafter = dict(stored.tensors) if is_plain else changed(stored.tensors, number, kept=0.0)
        times = [time.perf_counter()]
        vllm.load_policy(policy, number)
        times.append(time.perf_counter())
        vllm.drafter.load(drafter, number)
        times.append(time.perf_counter())
        found = answer(vllm, requests)
        ours.load_policy(policy, number)
        expected = answer(ours, requests)
        pushes.append(
            {
                "weights": "recipe" if is_plain else "changed",
                "same_responses": sum(a == b for a, b in zip(found, expected, strict=True)),
                "same_as_before": 0 if before is None else sum(a == b for a, b in zip(found, before, strict=True)),
                "accept_length": vllm.stats.accept_length,
                "policy_seconds": times[1] - times[0],
                "drafter_seconds": times[2] - times[1],
                "resident_mib": resident_mib(),
            }
        )
        before = found
        if number % 10 == 0:
            print(number, pushes[-1], flush=True)
    return pushes


def summarize(pushes: list[dict[str, Any]]) -> dict[str, Any]:
    num, half = NUM_REQUESTS * len(pushes), len(pushes) // 2
    by_kind = {kind: [push for push in pushes if push["weights"] == kind] for kind in ("recipe", "changed")}
    resident = [push["resident_mib"] for push in pushes]
    return {
        "pushes": len(pushes),
        "responses": num,
        "same_responses": sum(push["same_responses"] for push in pushes),
        "same_as_before": sum(push["same_as_before"] for push in pushes),
        **{f"accept_length_{kind}": range_of([push["accept_length"] for push in some]) for kind, some in by_kind.items()},
        "policy_seconds": statistics.median(push["policy_seconds"] for push in pushes),
        "drafter_seconds": statistics.median(push["drafter_seconds"] for push in pushes),
        "resident_mib": [resident[0], resident[half], resident[-1]],
        "growth_of_second_half_mib": resident[-1] - resident[half],
    }


def range_of(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def to_markdown(report: dict[str, Any]) -> str:
    found = report["summary"]
    low, high = found["accept_length_recipe"]
    low_changed, high_changed = found["accept_length_changed"]
    first, middle, last = found["resident_mib"]
    rows = [
        [
            "greedy responses right after a push, as our own engine gives them",
            f"{found['same_responses']} of {found['responses']}",
        ],
        ["of these, as before the push", found["same_as_before"]],
        ["accept length, the recipe's drafter and policy", f"{low:.2f} – {high:.2f}"],
        ["accept length, changed drafters and policies", f"{low_changed:.2f} – {high_changed:.2f}"],
        ["seconds per push of the policy, median", f"{found['policy_seconds']:.3f}"],
        ["seconds per push of the drafter, median", f"{found['drafter_seconds']:.3f}"],
        ["resident set after the first, half of, and all pushes, MiB", f"{first:.0f}, {middle:.0f}, {last:.0f}"],
    ]
    title = f"{found['pushes']} pushes of policy and drafter into a running vLLM"
    how = f"The countdown recipe's policy (3.9 M parameters) and EAGLE drafter, float32, eager, {NUM_REQUESTS} greedy responses"
    how += f" of at most {NUM_TOKENS} tokens after each push, {DEPTH} drafted tokens a step. Every second push has strongly"
    how += " changed weights of both."
    return markdown(title, report, how, table(("", ""), rows))


def main() -> None:
    parser = make_parser("vllm_push", __doc__)
    parser.add_argument("--pushes", type=int, default=100, help="of policy and drafter, each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setup = start()
    pushes = push_all(setup, options.pushes)
    setup.vllm.close()
    report = {"command": command_of(parser), "environment": environment(), "summary": summarize(pushes), "each": pushes}
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
