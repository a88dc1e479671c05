"""Part `environment`: the machine, its driver, and which of the packages that the other parts use are
there."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import Record, seconds_of
from benchmarks.report import environment

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "pydantic",
    "vllm",
    "huggingface_hub",
    "safetensors",
)
COMMIT_FILE = Path(".gpu/commit")
"""Written by `make gpu-carry`: where the working tree travels without its history."""


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages; None: it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def describe() -> dict[str, Any]:
    described = environment()
    if described["commit"] == "unknown" and COMMIT_FILE.exists():
        described["commit"] = COMMIT_FILE.read_text().strip()
    return described


def gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        sizes = {"gib": round(p.total_memory / 2**30, 1), "multiprocessors": p.multi_processor_count}
        found.append({"name": p.name, "capability": f"{p.major}.{p.minor}", **sizes})
    return found


def driver() -> str | None:
    """Returns what nvidia-smi says of each GPU; None: there is no such command."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm",
        "--format=csv,noheader",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout + done.stderr).strip()


def copy_gbps(device: torch.device, num_bytes: int) -> float:
    """Returns how fast the device copies within its memory, in GB a second, read and written bytes
    counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device) / 1e9


def main() -> None:
    record = Record.of_arguments()
    record.add(environment=describe(), versions=versions(), gpus=gpus(), driver=driver())
    device = torch.device(record.settings["device"])
    record.add(
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        copy_gbps=copy_gbps(device, record.settings["copy_bytes"]),
    )


if __name__ == "__main__":
    main()
