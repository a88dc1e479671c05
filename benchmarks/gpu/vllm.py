"""Part `vllm`: vLLM, where it is installed, by itself: its own sampling, no drafts, at the batches of
`throughput`.

The grown model is written to disk for it, in bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.harness import Record
from benchmarks.gpu.subjects import geometry_of, recipe
from benchmarks.grown import grown_config, plan_growth
from tlt.training.build.problems import load_problems


def measure(record: Record, folder: Path) -> None:
    settings = record.settings
    config = recipe(settings, run__dtype=settings["dtype"])
    growth = plan_growth(config, geometry_of(settings["geometry"], folder))
    with grown_config(config, growth, keep=folder / "grown") as (grown, _):
        from vllm import LLM, SamplingParams

        engine: Any = LLM(
            model=str(grown.model.path),
            dtype=settings["dtype"],
            max_model_len=2048,
            max_num_seqs=max(settings["batches"]),
        )
        prompts = [
            {"prompt_token_ids": list(problem.prompt_ids)} for problem in load_problems(config, "train")
        ]
        params = SamplingParams(temperature=1.0, max_tokens=settings["tokens"], ignore_eos=True)
        for batch in settings["batches"]:
            engine.generate(prompts[:batch], params, use_tqdm=False)
            began = time.perf_counter()
            engine.generate(prompts[:batch], params, use_tqdm=False)
            record.append(
                "vllm",
                {
                    "batch": batch,
                    "tokens_per_second": batch * settings["tokens"] / (time.perf_counter() - began),
                },
            )


def main() -> None:
    record = Record.of_arguments()
    if importlib.util.find_spec("vllm") is None:
        record.skip("vLLM is not installed")
    os.environ["VLLM_PLUGINS"] = ""  # by itself, without our law inside
    with TemporaryDirectory() as name:
        measure(record, Path(name))


if __name__ == "__main__":
    main()
