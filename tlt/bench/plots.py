"""Pictures of a benchmark. matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt.bench.measure import Trace
from tlt.bench.replay import Replay
from tlt.types import UserError


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("tlt bench: matplotlib is not installed; install it with pip install 'tlt-rl[bench]'") from None
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
