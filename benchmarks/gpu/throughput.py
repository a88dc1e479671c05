"""Part `throughput`: tokens a second of our engine at constant batches, in the sizes of a large model: off
and with drafts.

The grown model is made on the device. Where vLLM is installed, it generates from the same prompts (part
`vllm`).
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.constant import constant
from benchmarks.gpu.harness import Record
from benchmarks.gpu.subjects import geometry_of, grown_subject, recipe


def measure(record: Record, folder: Path) -> None:
    settings, device = record.settings, torch.device(record.settings["device"])
    began = time.perf_counter()
    config = recipe(settings, run__dtype=settings["dtype"])
    made = grown_subject(config, geometry_of(settings["geometry"], folder), device)
    record.add(lines=made.lines, growing_seconds=time.perf_counter() - began)
    for batch in settings["batches"]:
        measured = constant(
            made.subject, settings["variants"], batch, settings["rounds"], settings["seconds_a_round"]
        )
        record.append("constant", measured)
        gc.collect()
        if device.type == "cuda":
            record.add(peak_gib=torch.cuda.max_memory_allocated() / 2**30)
            torch.cuda.empty_cache()


def main() -> None:
    with TemporaryDirectory() as folder:
        measure(Record.of_arguments(), Path(folder))


if __name__ == "__main__":
    main()
