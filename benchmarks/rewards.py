"""Responses through the reward workers, some of which raise, hang, return None, NaN or text: are all counted, is none lost, is
none held longer than its time-out?

    python -m benchmarks.rewards --out benchmarks/results/rewards

Every response says in its text what is to happen to it, so the verdict on each is known. `held` is the time from a worker's
taking up a response to its verdict; what a time-out costs beyond its seconds is the kill. `waited` is the time for which the
next response after a kill waits for the worker that steps in.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import patch

from benchmarks.command import command_of, make_parser
from tlt.bench.report import environment, markdown, table, write_report
from tlt.rl.reward_worker import Worker
from tlt.rl.rewards import RewardPool, summarize
from tlt.rl.scoring import Response, RewardSpec
from tlt.types import Reward

FAULTS = ("raise", "hang", "None", "nan", "text")
EXPECTED = {
    "fine": "",
    "raise": "obey: RuntimeError: no such luck",
    "hang": "time-out: not scored within",
    "None": "not applicable: every reward function returned None",
    "nan": "obey: the reward is nan; it must be a finite number",
    "text": "obey: the reward is 'high'; it must be a finite number",
}


def obey(completions: Sequence[str], worth: Sequence[float], **columns: Any) -> list[Any]:
    """A reward function that does what the response says."""
    (text,), (value,) = completions, worth
    if text == "raise":
        raise RuntimeError("no such luck")
    while text == "hang":
        pass
    return [{"None": None, "nan": float("nan"), "text": "high"}.get(text, value)]


class TimedWorker(Worker):
    """A worker that notes for how long it held a response, kill included, and for how long its first one waited for it."""

    held: ClassVar[list[tuple[str, float]]] = []
    waited: ClassVar[list[float]] = []

    def score(self, response: Response, timeout_seconds: float) -> Reward:
        began = time.perf_counter()
        if not self.is_ready:
            self.pipe.poll(60)
            self.waited.append(time.perf_counter() - began)
            began = time.perf_counter()
        try:
            return super().score(response, timeout_seconds)
        finally:
            self.held.append((response.text, time.perf_counter() - began))


def make_texts(num: int, share: float, seed: int) -> list[str]:
    """Returns what is to happen to each response: `share` of them at fault, every fault as often, at random places."""
    num_faults = round(num * share)
    texts = [FAULTS[i % len(FAULTS)] for i in range(num_faults)] + ["fine"] * (num - num_faults)
    random.Random(seed).shuffle(texts)
    return texts


def run(num: int, share: float, num_workers: int, timeout: float, seed: int) -> dict[str, Any]:
    """Returns the counts and times of one pass, or raises AssertionError where a verdict is not the one that was due."""
    texts = make_texts(num, share, seed)
    TimedWorker.held.clear()
    TimedWorker.waited.clear()
    start = time.perf_counter()
    with (
        patch("tlt.rl.rewards.Worker", TimedWorker),
        RewardPool(RewardSpec("data", ("benchmarks.rewards:obey",)), num_workers, timeout) as pool,
    ):
        for i, text in enumerate(texts):
            pool.submit((f"p{i}", 0), {"worth": i / num}, text)
        submitted = time.perf_counter() - start
        found = pool.drain()
        seconds = time.perf_counter() - start
        assert pool.drain() == {}
    return checked(texts, [found[f"p{i}", 0] for i in range(num)], submitted, seconds)


def checked(texts: Sequence[str], found: Sequence[Reward], submitted: float, seconds: float) -> dict[str, Any]:
    summary = summarize(found)
    for i, (text, reward) in enumerate(zip(texts, found, strict=True)):
        assert reward.error.startswith(EXPECTED[text]), (text, reward)
        assert reward.is_scored == (text == "fine"), (text, reward)
        assert not reward.is_scored or reward.value == i / len(texts), "its own reward"
    held: dict[str, list[float]] = {text: [] for text in EXPECTED}
    for text, elapsed in TimedWorker.held:
        held[text].append(elapsed)
    return {
        "responses": len(texts),
        "verdicts": dict(sorted(Counter(texts).items())),
        "errors_counted": summary.num_errors,
        "first_error": summary.first_error,
        "reward_mean": summary.mean,
        "submit_seconds": round(submitted, 3),
        "total_seconds": round(seconds, 2),
        "waited_ms": _spread(TimedWorker.waited),
        "held_ms": {text: _spread(values) for text, values in held.items() if values},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(1e3 * ordered[len(ordered) // 2], 3),
        "p99": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 3),
        "max": round(1e3 * ordered[-1], 3),
    }


def main() -> None:
    parser = make_parser("rewards", __doc__)
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.05, help="of responses that are at fault")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--timeout", type=float, default=0.2)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "command": command_of(parser),
        "environment": environment(),
        "timeout_seconds": arguments.timeout,
        "runs": [],
    }
    for num_workers in arguments.workers:
        row = {"workers": num_workers} | run(arguments.responses, arguments.share, num_workers, arguments.timeout, seed=0)
        report["runs"].append(row)
        print(json.dumps(row), flush=True)
    write_report(arguments.out, report, to_markdown(report))


def to_markdown(report: dict[str, Any]) -> str:
    columns = ["workers", "verdicts as due", "errors", "seconds", "hangs held, ms: median, longest", "waited, ms: the same"]
    rows = []
    for run in report["runs"]:
        held, waited = run["held_ms"]["hang"], run["waited_ms"]
        times = [f"{spread['median']:.0f}, {spread['max']:.0f}" for spread in (held, waited)]
        rows.append([run["workers"], run["responses"], run["errors_counted"], run["total_seconds"], *times])
    return markdown("Rewards, some of them at fault", report, table(columns, rows))


if __name__ == "__main__":
    main()
