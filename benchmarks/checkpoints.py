"""How long a drafter's checkpoint keeps training waiting: plain, asynchronous, selective asynchronous.

    plain                    the drafter as a whole model (embedding and head with it) and its optimizer, written on the spot
    asynchronous             the same, copied on the spot and written by a thread
    selective asynchronous   only what trains, copied and written by a thread: what `tlt train` does

Variants take turns within a round. The thread is waited for before the next one, and is timed too.

    python -m benchmarks.checkpoints --out benchmarks/results/checkpoints.json [--rounds 9] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.distributed.world import World
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.adam import trained_tensors
from tlt.models.decoder import ModelConfig
from tlt.models.hf_config import load_model_config
from tlt.training.saved.checkpoint import Checkpoint, CheckpointWriter, save_checkpoint

BASE = Path(__file__).parents[1] / "recipes" / "countdown" / "base"
SHAPES = {
    "countdown": load_model_config(BASE),
    "qwen2.5-0.5b (random weights)": ModelConfig("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, tie_embeddings=True),
}
VARIANTS = ("plain", "asynchronous", "selective asynchronous")


ALONE = World(0, 1, 0, torch.device("cpu"), dist.HashStore(), None)


def make_state(target: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what trains, moments included; what does not) of a drafter."""
    model = DraftModel(drafter_shape(target)).initialize(0)
    trained = trained_tensors("drafter", torch.optim.AdamW(model.parameters()), dict(model.named_parameters()))
    frozen = {"embed_tokens.weight": torch.randn(target.vocab_size, target.hidden_size)}
    if not target.tie_embeddings:
        frozen["lm_head.weight"] = torch.randn(target.vocab_size, target.hidden_size)
    return trained, frozen


def measure(folder: Path, step: int, variant: str, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> Any:
    """Seconds that training waits, and until all is on the disk."""
    tensors = trained if variant.startswith("selective") else {**trained, **frozen}
    checkpoint = Checkpoint(step, "run", tensors, {}, {})
    writer = CheckpointWriter(folder, ALONE, keep=1)
    start = time.perf_counter()
    if variant == "plain":
        save_checkpoint(folder, checkpoint, ALONE, keep=1)
    else:
        writer.save(checkpoint)
    waited = time.perf_counter() - start
    writer.wait()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"waited_ms": 1e3 * waited, "total_ms": 1e3 * (time.perf_counter() - start), "megabytes": size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; a temporary folder by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        step = 0
        for name, target in SHAPES.items():
            state = make_state(target)
            runs: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
            for round_index in range(arguments.rounds + 1):
                for shift in range(len(VARIANTS)):
                    variant = VARIANTS[(round_index + shift) % len(VARIANTS)]
                    step += 1
                    runs[variant].append(measure(Path(folder) / "checkpoints", step, variant, *state))
            for variant, results in runs.items():
                row: dict[str, Any] = {"shape": name, "variant": variant, "megabytes": round(results[0]["megabytes"], 1)}
                for key in ("waited_ms", "total_ms"):
                    values = sorted(result[key] for result in results[1:])  # the first round warms up
                    row[key] = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
                report["rows"].append(row)
                waited, total = row["waited_ms"], row["total_ms"]
                print(
                    f"{name:30} {variant:24} {row['megabytes']:8.1f} MB   waited {waited['median']:8.1f} ms "
                    f"({waited['min']:.1f} to {waited['max']:.1f})   on disk after {total['median']:.0f} ms"
                )
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
