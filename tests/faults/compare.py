"""Says in what two runs differ that should be one and the same: policy, metrics, evaluations and the best
policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tlt.training.report.step_record import read_metrics

FIXED = (
    "rewards/mean",
    "rewards/solve_rate",
    "rollout/num_tokens",
    *(f"rollout/response_tokens/{name}" for name in ("mean", "p50", "p95", "max")),
    "rollout/truncated_share",
    "update/loss",
    "update/grad_norm",
    "update/entropy",
)
"""What the law fixes of a step's record."""


def difference(run: Path, whole: Path) -> str:
    """Returns what is not the same in the folders of both runs; empty: nothing is. `whole` met no
    disturbance."""
    parts = {"metrics.jsonl": fixed_metrics, "evaluations.jsonl": evaluations, "best": best}
    for name, read in parts.items():
        one, other = read(run), read(whole)
        if one != other:
            return f"{name}: {one} and {other}"
    names = different_weights(run / "policy", whole / "policy") + different_weights(
        run / "best", whole / "best"
    )
    return f"weights: {names}" if names else ""


def fixed_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns of every step what must not depend on how and when it was computed."""
    records = read_metrics(run / "metrics.jsonl")
    return [
        {"step": record.step, **{place: record.figures().get(place) for place in FIXED}} for record in records
    ]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Returns the evaluations, all but how long they took."""
    return [
        {key: value for key, value in one.items() if key != "seconds"}
        for one in _records(run / "evaluations.jsonl")
    ]


def best(run: Path) -> dict[str, str]:
    """Returns what the folder of the best policy holds beside its weights: file → text."""
    files = sorted(
        path for path in (run / "best").rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )
    return {str(path.relative_to(run)): path.read_text() for path in files}


def different_weights(folder: Path, expected: Path) -> list[str]:
    """Returns the tensors that are not the same in both folders, to the last bit, and those that `folder`
    lacks."""
    other = load_file(expected / "model.safetensors")
    one = load_file(folder / "model.safetensors") if folder.exists() else {}
    return sorted(
        f"{folder.name}/{name}"
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
