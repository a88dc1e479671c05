"""Draws the plots of the benchmarks. matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay import Replay
from benchmarks.traces import Trace
from tlt.extras import how_to_install
from tlt.types import UserError


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError(f"benchmarks: matplotlib is not installed; {how_to_install('bench')}") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tlt"  # the same figures give the same file
    import matplotlib.pyplot as plt

    return plt


def check_plots() -> None:
    """Raises UserError now rather than after an hour of measuring."""
    _pyplot()


def plot_longtail(traces: Mapping[str, Trace], path: Path) -> None:
    """Running requests and tokens per second over time, one line per variant."""
    plt = _pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for name, trace in traces.items():
        times, tokens = np.asarray(trace.times), np.asarray(trace.tokens)
        above.step(times, trace.running, where="post", label=f"{name}, {trace.seconds:.0f} s")
        edges = np.linspace(0, times[-1], 60)
        at_edges = np.interp(edges, times, tokens)
        below.plot((edges[1:] + edges[:-1]) / 2, np.diff(at_edges) / np.diff(edges), label=name)
    above.set_ylabel("running requests")
    above.legend(frameon=False)
    below.set_ylabel("tokens per second")
    below.set_xlabel("seconds")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_regret(replays: Mapping[str, Sequence[Replay]], path: Path) -> None:
    """Cumulative regret over the tokens of one rollout: every replay thin, their median thick."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (name, runs) in zip(("C0", "C1", "C2"), replays.items(), strict=False):
        grid = np.linspace(0, runs[0].tokens[-1], 200)
        curves = [np.interp(grid, run.tokens, run.regrets) for run in runs]
        for curve in curves:
            axes.plot(grid, curve, color=color, alpha=0.2, linewidth=0.7)
        axes.plot(grid, np.median(curves, axis=0), color=color, label=name)
    axes.set_xlabel("tokens of the rollout")
    axes.set_ylabel("seconds lost to the best arms")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_runs(steps_by_run: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, marked_step: int | None = None) -> None:
    """Runs side by side over their steps (see bench/train.py), each step thin, a running mean thick. Rewards that are the
    same lie upon each other: the later a run, the thinner its line. `marked_step`: where something changed."""
    plt = _pyplot()
    panels = {
        "accept_length": "accept length",
        "rollout_seconds": "rollout, s",
        "seconds": "step, s",
        "reward_mean": "mean reward",
    }
    figure, all_axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for axes, (key, label) in zip(all_axes.flat, panels.items(), strict=True):
        for rank, (name, steps) in enumerate(steps_by_run.items()):
            values = np.asarray([step[key] for step in steps], dtype=float)
            if np.isnan(values).all():
                continue
            width = max(len(values) // 15, 1)
            smooth = np.convolve(values, np.ones(width) / width, mode="valid")
            middles = np.arange(len(smooth)) + (width - 1) / 2
            if key != "reward_mean":
                axes.plot(values, color=f"C{rank}", alpha=0.25, linewidth=0.6)
            thick = 1.5 if key != "reward_mean" else 1 + 1.5 * (len(steps_by_run) - rank)
            axes.plot(middles, smooth, color=f"C{rank}", linewidth=thick, label=name)
        if marked_step is not None:
            axes.axvline(marked_step, color="black", linestyle=":", linewidth=1)
        axes.set_ylabel(label)
    for axes in all_axes[1]:
        axes.set_xlabel("RL step")
    all_axes[0, 1].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
