"""Does every push of policy and drafter into a running vLLM arrive, and does memory stay flat over many?

    python -m benchmarks.vllm_push --out benchmarks/results/vllm-push      with an interpreter that has vLLM

Pushes alternate between the Countdown recipe's policy with its drafter, and strongly changed weights of both, anew
for each push: the policies of a run differ too little from step to step for greedy responses to tell them apart.

    policy     right after a push, greedy responses are TLT's own engine's under the same weights
    drafter    the recipe's guesses well, a changed one hardly ever: accept length
    memory     the process's resident set. Of twelve steps nine draft nothing: the drafter does not run, and
               the hidden states that it has missed are kept, and read when drafts come back. Responses that
               differ are judged after the last push: the judge loads a policy of its own, in float64
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_of, make_parser
from benchmarks.report import environment, markdown, table, write_report
from tests.side_by_side import NEAR_TIE, Responses, answers, compare, step_by_step
from tlt.base.config.vllm import VllmSection
from tlt.base.types import Request, SamplingParams
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.engine import EngineSettings, build_backend, load_stored_drafter
from tlt.engine.build.model import Model, load_model
from tlt.engine.stats import EngineStats
from tlt.engine.vllm.engine import VllmEngine
from tlt.models.hf.weights import save_model
from tlt.tasks.base import make_problems

RECIPE = Path(__file__).parents[1] / "recipes/countdown"
NUM_TOKENS, NUM_REQUESTS, DEPTH = 64, 8, 4
LONG = 10
"""Times that a problem stands in its prompt, which then fills some of vLLM's cached blocks: what they hold of an
earlier policy would be taken for the new one's, were the prefix cache not emptied."""
NOISE = 2.0
"""Standard deviation of what is added to a tensor, in its own."""
OFF, ON = 9, 3
"""Steps without drafts, and with them, in turns."""


@dataclass(frozen=True)
class Setup:
    """vLLM with a drafter, our own engine beside it, and what both start with."""

    model: Model
    stored: StoredDrafter
    vllm: VllmEngine
    ours: RolloutBackend

    @property
    def runner(self) -> Any:
        worker = self.vllm.link._engine.engine_core.engine_core.model_executor.driver_worker.worker
        return worker.model_runner


def start() -> Setup:
    model = load_model(RECIPE / "base", torch.float32)
    stored = load_stored_drafter(RECIPE / "drafter", model)
    assert stored is not None, "the recipe has it"
    settings = EngineSettings(
        f"{DEPTH}x1x{DEPTH}",
        max_batch_size=NUM_REQUESTS,
        engine="vllm",
        vllm=VllmSection(compile=False),
        kv_gib=0.25,
        window=512,
    )
    vllm = build_backend(model, settings, stored)
    assert isinstance(vllm, VllmEngine)
    return Setup(model, stored, vllm, build_backend(model, EngineSettings(max_batch_size=NUM_REQUESTS)))


def changed(tensors: Mapping[str, Tensor], seed: int, kept: float) -> dict[str, Tensor]:
    """Returns every matrix times `kept`, with noise of its own scale, so that hardly anything of what it does
    stays."""
    draw = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        return kept * tensor + NOISE * tensor.std() * torch.randn(tensor.shape, generator=draw)

    return {name: change(tensor) for name, tensor in tensors.items()}


def policy_of(model: Model, number: int) -> dict[str, Tensor]:
    """Returns the policy of a push, always the same for its number."""
    return dict(model.tensors) if is_plain(number) else changed(model.tensors, number, kept=1.0)


def is_plain(number: int) -> bool:
    """Whether a push has the recipe's own weights."""
    return number % 2 == 1


def requests_of(model: Model) -> list[Request]:
    assert model.tokenizer is not None
    params = SamplingParams(0.0, max_tokens=NUM_TOKENS)
    problems = make_problems("countdown", NUM_REQUESTS, 0, {"split": "test"})
    prompts = [model.tokenizer.encode_text(LONG * str(problem["prompt"])) for problem in problems]
    return [Request(f"p{index}", 0, prompt, params, "generate") for index, prompt in enumerate(prompts)]


def lengths() -> Iterator[int]:
    while True:
        yield from [0] * OFF + [DEPTH] * ON


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def num_same(one: Responses, other: Responses) -> int:
    return sum(other[key].token_ids == rollout.token_ids for key, rollout in one.items())


def margins(
    requests: Sequence[Request],
    ours: Responses,
    theirs: Responses,
    policy: Mapping[str, Tensor],
    model: Model,
) -> list[float]:
    """Returns the law's margin at each response's first difference, in float64."""
    with TemporaryDirectory() as folder:
        save_model(Path(folder) / "policy", model.config, policy, dtype=torch.float32, source=model.path)
        compared = compare(requests, ours, theirs, Path(folder) / "policy")
    return [difference.margin for difference in compared.differences]


def push_all(setup: Setup, num: int) -> list[dict[str, Any]]:
    """Pushes so many times; returns what was seen after each."""
    model, stored, vllm, ours = setup.model, setup.stored, setup.vllm, setup.ours
    assert vllm.drafter is not None
    requests, pushes, before = requests_of(model), list[dict[str, Any]](), None
    parted: dict[int, tuple[Responses, Responses]] = {}
    proposer, num_passes = setup.runner.drafter, 0
    propose = proposer.propose

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_passes
        num_passes += named["num_speculative_tokens"] == 0
        return propose(*arguments, **named)

    proposer.propose = counted
    for number in range(1, num + 1):
        policy = policy_of(model, number)
        drafter = dict(stored.tensors) if is_plain(number) else changed(stored.tensors, number, kept=0.0)
        times = [time.perf_counter()]
        vllm.load_policy(policy, number)
        times.append(time.perf_counter())
        vllm.drafter.load(drafter, number)
        times.append(time.perf_counter())
        vllm.stats, num_passes = EngineStats(), 0
        found = step_by_step(vllm, requests, lengths())
        ours.load_policy(policy, number)
        wanted = answers(ours, requests)
        if num_same(wanted, found) < len(requests):
            parted[number] = wanted, found
        pushes.append(
            {
                "weights": "recipe" if is_plain(number) else "changed",
                "same_responses": num_same(wanted, found),
                "same_as_before": 0 if before is None else num_same(before, found),
                "draft_acceptance_rate": vllm.stats.draft_acceptance_rate,
                "passes": num_passes,
                "policy_seconds": times[1] - times[0],
                "drafter_seconds": times[2] - times[1],
                "resident_mib": resident_mib(),
            }
        )
        before = found
        if number % 10 == 0:
            print(number, pushes[-1], flush=True)
    for number, push in enumerate(pushes, 1):
        both = parted.get(number)
        push["margins"] = margins(requests, *both, policy_of(model, number), model) if both else []
    return pushes


def summarize(pushes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rates = {
        kind: [one["draft_acceptance_rate"] for one in pushes if one["weights"] == kind] for kind in KINDS
    }
    total = {key: sum(push[key] for push in pushes) for key in ("same_responses", "same_as_before", "passes")}
    medians = {
        key: statistics.median(push[key] for push in pushes) for key in ("policy_seconds", "drafter_seconds")
    }
    shown = sorted({1, 20, len(pushes) // 2, len(pushes)} & set(range(1, len(pushes) + 1)))
    return {
        "pushes": len(pushes),
        "responses": NUM_REQUESTS * len(pushes),
        **total,
        "margins": [margin for push in pushes for margin in push["margins"]],
        **medians,
        "draft_acceptance_rate": {kind: [min(found), max(found)] for kind, found in rates.items()},
        "resident_mib": {number: pushes[number - 1]["resident_mib"] for number in shown},
    }


KINDS = {"recipe": "the recipe's drafter and policy", "changed": "changed drafters and policies"}


def to_markdown(report: Mapping[str, Any]) -> str:
    found = report["summary"]
    resident, num_ties = found["resident_mib"], sum(margin < NEAR_TIE for margin in found["margins"])
    rows = [
        [
            "greedy responses right after a push, as our own engine gives them",
            f"{found['same_responses']} of {found['responses']}",
        ],
        ["of the others at a near-tie", f"{num_ties} of {len(found['margins'])}"],
        ["as before the push", found["same_as_before"]],
        *(
            [f"drafted tokens accepted, {KINDS[kind]}", f"{low:.0%} – {high:.0%}"]
            for kind, (low, high) in found["draft_acceptance_rate"].items()
        ),
        ["passes of the drafter over prompts and over what it had missed", found["passes"]],
        ["seconds per push of the policy, median", f"{found['policy_seconds']:.3f}"],
        ["seconds per push of the drafter, median", f"{found['drafter_seconds']:.3f}"],
        [
            f"resident set after {', '.join(map(str, resident))} pushes, MiB",
            ", ".join(f"{mib:.0f}" for mib in resident.values()),
        ],
    ]
    how = (
        "The countdown recipe's policy (3.9 M parameters) and EAGLE drafter, float32, eager. After each push"
        f" {NUM_REQUESTS} greedy responses of at most {NUM_TOKENS} tokens; {OFF} steps without drafts, {ON} with"
        f" {DEPTH} drafted tokens, and so on. Every second push has strongly changed weights of both."
    )
    title = f"{found['pushes']} pushes of policy and drafter into a running vLLM"
    return markdown(title, report, how, table(("", ""), rows))


def main() -> None:
    parser = make_parser("vllm_push", __doc__)
    parser.add_argument("--pushes", type=int, default=100, help="of policy and drafter, each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    setup = start()
    pushes = push_all(setup, options.pushes)
    setup.vllm.close()
    report: dict[str, Any] = {"command": command_of(parser), "environment": environment()}
    report |= {"summary": summarize(pushes), "each": pushes}
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
