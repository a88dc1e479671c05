"""Charts of figures over steps. Colors tell figures apart; for several runs colors tell runs, dashes
figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlt.apps.page.gather import NO_VARIANCE_SHARE, WAIT_SHARE, RunRecords, Values
from tlt.apps.page.shapes import SHARES, Areas, Chart, Line, Shape, mean_interval, moving_mean

STEPS = "step"
NUM_SMOOTHED, NUM_CROWDED = 12, 150
"""Steps from which on a moving average is drawn: where it is asked for, and of any figure."""


@dataclass(frozen=True)
class SeriesSpec:
    """figures: label → name in metrics.jsonl. is_smoothed: even a short run shows the moving average."""

    key: str
    title: str
    see: str
    y_label: str
    figures: Mapping[str, str]
    is_smoothed: bool = False
    is_log: bool = False
    is_count: bool = False


LEARNING = (
    SeriesSpec(
        "reward",
        "Reward",
        "The mean reward of each step's responses, and its moving average with a 95 % band: it should rise.",
        "mean reward",
        {"reward": "rewards/mean"},
        is_smoothed=True,
    ),
    SeriesSpec(
        "solve-rate",
        "Solve rate",
        "The share of each step's responses that are solved, on problems that are trained on.",
        "solve rate",
        {"solved": "rewards/solve_rate"},
        is_smoothed=True,
    ),
    SeriesSpec(
        "reward-std",
        "Scatter of rewards",
        "The standard deviation of each step's rewards: near 0 nothing can be learned from them.",
        "reward",
        {"standard deviation": "rewards/std"},
    ),
    SeriesSpec(
        "no-variance",
        "Groups without variance",
        "The share of the update's groups whose responses all have the same advantage: they teach nothing.",
        "share of groups",
        {"without variance": NO_VARIANCE_SHARE},
    ),
)
LENGTHS = (
    SeriesSpec(
        "lengths",
        "Shortest to longest",
        "The wider the gap between median and longest, the longer a step waits for its last responses.",
        "tokens",
        {
            "longest": "rollout/response_tokens/max",
            "95th percentile": "rollout/response_tokens/p95",
            "mean": "rollout/response_tokens/mean",
            "median": "rollout/response_tokens/p50",
        },
        is_count=True,
    ),
    SeriesSpec(
        "truncated",
        "Truncated responses",
        "The share of responses cut off at their token limit: a rising line asks for a larger limit.",
        "share",
        {"truncated": "rollout/truncated_share"},
    ),
)
TURNS = (
    SeriesSpec(
        "turns",
        "Turns of a response",
        "The mean number of turns that the policy takes: it learns to ask, or to do without.",
        "turns",
        {"turns": "rollout/turns/per_response"},
    ),
    SeriesSpec(
        "calls",
        "Calls of tools",
        "Calls in a step, those that failed and those without a result in time: errors are to fall.",
        "calls",
        {
            "calls": "rollout/turns/num_calls",
            "failed": "rollout/turns/num_errors",
            "timed out": "rollout/turns/num_timeouts",
        },
        is_count=True,
    ),
    SeriesSpec(
        "tool-seconds",
        "Waiting for tools",
        "Seconds in which responses waited for tools and environment, summed over responses.",
        "seconds, summed over responses",
        {"waiting": "rollout/turns/wait_seconds"},
    ),
    SeriesSpec(
        "waiting",
        "Share of waiting",
        "The share of the rollout in which a response waited, on average, and of responses out of turns.",
        "share",
        {"waiting": WAIT_SHARE, "out of turns": "rollout/turns/out_of_turns_share"},
    ),
    SeriesSpec(
        "turn-drafts",
        "Drafts by turn",
        "Accepted tokens of a draft, plus one: in first turns, and in those after an environment has spoken.",
        "tokens",
        {
            "first turns": "rollout/turns/first_acceptance_length",
            "later turns": "rollout/turns/later_acceptance_length",
        },
    ),
)
SPEED = (
    SeriesSpec(
        "step-seconds",
        "Time of a step",
        "Seconds of a whole step, of its rollout and of its update: the lower, the faster.",
        "seconds",
        {"step": "step_seconds", "rollout": "rollout/seconds", "update": "update/seconds"},
    ),
    SeriesSpec(
        "throughput",
        "Tokens per second",
        "Response tokens per second of the rollout, all ranks together.",
        "tokens per second",
        {"rollout": "rollout/tokens_per_second"},
        is_smoothed=True,
    ),
    SeriesSpec(
        "idle",
        "Idle time",
        "Seconds in which ranks had no response to generate, and what they did in them, summed over ranks.",
        "seconds, summed over ranks",
        {
            "idle": "idle/seconds",
            "drafter training": "idle/seconds_by_use/train",
            "generating ahead": "idle/seconds_by_use/ahead",
            "rest": "idle/seconds_by_use/rest",
        },
    ),
)
SPECULATION = (
    SeriesSpec(
        "speedup",
        "Speedup",
        "How many times as fast speculation made a few responses, measured: above 1 it pays.",
        "times",
        {"speedup": "speedup/speedup"},
    ),
    SeriesSpec(
        "accept-length",
        "Accept length",
        "Tokens committed in one verification, the target's own included: 1 means that no draft was kept.",
        "tokens per verification",
        {"accept length": "rollout/accept_length"},
        is_smoothed=True,
    ),
    SeriesSpec(
        "drafter-acceptance",
        "The learned drafter's acceptance",
        "The share of drafts that could be kept at best, measured with and without the step's training, "
        "beside retrieval's.",
        "share",
        {
            "after training": "drafter/acceptance",
            "before training": "drafter/before",
            "retrieval": "drafter/retrieval",
        },
    ),
    SeriesSpec(
        "drafter-loss",
        "The drafter's loss",
        "The loss of the drafter's training in idle time: it falls while the drafter still learns.",
        "loss",
        {"loss": "drafter/loss"},
    ),
)
HEALTH = (
    SeriesSpec(
        "entropy",
        "Entropy",
        "The policy's uncertainty per token: a fall to zero means that it no longer explores.",
        "nats",
        {"entropy": "update/entropy"},
    ),
    SeriesSpec(
        "kl",
        "KL to the reference policy",
        "The distance from the reference policy, if the run measures it: a steep rise is a warning.",
        "nats",
        {"KL": "update/kl"},
    ),
    SeriesSpec(
        "grad-norm",
        "Gradient norm",
        "The norm of the gradient before clipping: peaks mark updates that were far from usual.",
        "norm",
        {"gradient norm": "update/grad_norm"},
    ),
    SeriesSpec(
        "logprob-gap",
        "Gap between engine and trainer",
        "The difference between both log-probabilities of the same tokens: it should stay near rounding.",
        "nats",
        {"mean": "update/engine_trainer_logprob_gap", "largest": "update/engine_trainer_logprob_gap_max"},
        is_log=True,
    ),
    SeriesSpec(
        "clip",
        "Clipped tokens",
        "The share of tokens whose ratio was clipped; many clipped tokens mean large steps.",
        "share",
        {"clipped": "update/clip_fraction"},
    ),
    SeriesSpec(
        "loss", "Loss", "The update's loss; its size says little, jumps do.", "loss", {"loss": "update/loss"}
    ),
)


def series_chart(spec: SeriesSpec, runs: Sequence[RunRecords]) -> Chart | None:
    shapes = list[Shape]()
    for number, run in enumerate(runs):
        for place, (label, name) in enumerate(spec.figures.items()):
            values = run.values(name)
            known = np.isfinite(values)
            if not known.any():
                continue
            color, dash = (number, place) if len(runs) > 1 else (place, 0)
            line = Line(
                label_of(run, label, runs),
                run.x[known],
                values[known],
                color,
                dash,
                width=width_of(number, runs),
            )
            fewest = NUM_SMOOTHED if spec.is_smoothed else NUM_CROWDED
            is_share = spec.y_label in SHARES
            shapes.append(smoothed(line, is_share) if known.sum() >= fewest else line)
    if not shapes:
        return None
    look = {"is_log": spec.is_log, "is_count": spec.is_count}
    return Chart(spec.key, spec.title, spec.see, STEPS, spec.y_label, shapes, True, **look)


def label_of(run: RunRecords, label: str, runs: Sequence[RunRecords]) -> str:
    return f"{run.name}: {label}" if len(runs) > 1 else label


def width_of(number: int, runs: Sequence[RunRecords]) -> float:
    """The first of several runs is drawn wide, so that equal lines all show."""
    return 5.0 if number == 0 and len(runs) > 1 else 2.0


def smoothed(line: Line, is_share: bool) -> Line:
    mean, low, high = moving_mean(line.y, max(5, len(line.y) // 12), is_share)
    behind = replace(line, label=f"{line.label}, each step")
    return replace(line, label=f"{line.label}, moving average", y=mean, low=low, high=high, behind=behind)


def held_out_charts(runs: Sequence[RunRecords]) -> list[Chart]:
    rewards_differ = any(
        e.reward_by_problem not in ({}, e.by_problem) for run in runs for e in run.evaluations
    )
    solved = _held_out("held-out", "solve rate", "Held-out problems solved", runs, "by_problem")
    reward = _held_out("held-out-reward", "mean reward", "Held-out reward", runs, "reward_by_problem")
    return [chart for chart in (solved, reward if rewards_differ else None) if chart is not None]


def _held_out(key: str, figure: str, title: str, runs: Sequence[RunRecords], field: str) -> Chart | None:
    shapes = list[Shape]()
    for number, run in enumerate(runs):
        by_problem = {one.step: [*getattr(one, field).values()] for one in run.evaluations}
        found = {step: values for step, values in by_problem.items() if values}
        if not found:
            continue
        intervals = [mean_interval(np.array(values), figure in SHARES) for values in found.values()]
        mean, low, high = np.array(intervals).T
        label, width = label_of(run, figure, runs), width_of(number, runs)
        x = np.array([*found], dtype=np.float64)
        shapes.append(Line(label, x, mean, number, 0, low, high, width))
    see = f"The {figure} of problems that are never trained on, with its 95 % interval: it is to rise."
    return Chart(key, title, see, STEPS, figure, shapes, is_by_step=True) if shapes else None


def strategy_chart(run: RunRecords) -> Chart | None:
    layers: dict[str, Values] = {}
    for name, seconds in run.group("rollout/strategy_seconds").items():
        kind = name.partition(":")[0]
        layers[kind] = layers.get(kind, np.zeros(len(run.x))) + np.nan_to_num(seconds)
    total = sum(layers.values(), np.zeros(len(run.x)))
    if not total.any():
        return None
    shares = {kind: seconds / np.where(total > 0, total, 1) for kind, seconds in sorted(layers.items())}
    see = "The share of the engine's time in which each kind of drafter drafted; off: nothing drafted."
    chart = Areas(run.x, shares)
    return Chart("strategies", "Who drafts", see, STEPS, "share of engine time", [chart], is_by_step=True)
