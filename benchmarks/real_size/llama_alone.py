"""A competitor's process: llama.cpp by llama-cpp-python, in an environment that need not have TLT's.

off     one llama_batch a step with a token of every sequence; llama.cpp's own sampler
lookup  one sequence, by llama-cpp-python's own loop with LlamaPromptLookupDecoding
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from benchmarks.real_size.serving import Job, Took, Watch, Work, serve

llama: Any = importlib.import_module("llama_cpp")

LOOKUP_TOKENS = 2
"""Tokens drafted at a time; llama-cpp-python's page advises two on a CPU."""


def prepare(job: Job) -> tuple[Callable[[Work], Took], dict[str, str]]:
    """Loads the GGUF file, which stays mapped."""
    versions = {"llama-cpp-python": version("llama-cpp-python"), "built for": _features()}
    return (_lookup if job["speculation"] == "lookup" else _batched)(job), versions


def _features() -> str:
    """Returns the features that llama.cpp was built with."""
    text = llama.llama_print_system_info().decode()
    return " ".join(
        part.split(" = ")[0].split()[-1] for part in text.split("|") if part.strip().endswith("= 1")
    )


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────


def _batched(job: Job) -> Callable[[Work], Took]:
    llama.llama_log_set(SILENT, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(job["gguf"].encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"Error: llama.cpp does not load {job['gguf']}")
    contexts: dict[int, Any] = {}

    def measure(work: Work) -> Took:
        num = len(work.prompts)
        if num not in contexts:
            for context in contexts.values():
                llama.llama_free(context)
            contexts.clear()
            contexts[num] = llama.llama_init_from_model(model, _context_params(job, num))
        return Batch(contexts[num], work).run()

    return measure


SILENT = llama.llama_log_callback(lambda level, text, data: None)
"""A callback that llama.cpp holds as long as the process lives."""


def _context_params(job: Job, num_sequences: int) -> Any:
    """Returns llama.cpp's defaults (with attention in half precision) and room for all sequences."""
    params = llama.llama_context_default_params()
    params.n_ctx = num_sequences * -(-job["window"] // 256) * 256  # each has its share, in blocks of 256
    params.n_batch = max(params.n_ctx, 512)
    params.n_seq_max = num_sequences
    params.n_threads = params.n_threads_batch = job["threads"]
    return params


class Batch:
    """One batch of responses."""

    def __init__(self, context: Any, work: Work) -> None:
        self.context, self.work = context, work
        self.room = llama.llama_batch_init(sum(len(ids) for _, ids in work.prompts), 0, 1)
        self.sampler = make_sampler(work.temperature, work.index)

    def run(self) -> Took:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        watch = Watch()
        prompts, lengths = [ids for _, ids in self.work.prompts], self.work.lengths
        tokens = dict(enumerate(self._step([(sequence, ids, 0) for sequence, ids in enumerate(prompts)])))
        watch.step()
        for index in range(1, max(lengths)):
            going = [sequence for sequence in tokens if index < lengths[sequence]]
            drawn = self._step([(s, [tokens[s]], len(prompts[s]) + index - 1) for s in going])
            tokens |= zip(going, drawn, strict=True)
        took = watch.took(sum(lengths), len(lengths))
        llama.llama_sampler_free(self.sampler)
        llama.llama_batch_free(self.room)
        return took

    def _step(self, pieces: list[tuple[int, list[int], int]]) -> list[int]:
        """Reads pieces (sequence, tokens, first position); returns the next token of each."""
        room, row, lasts = self.room, 0, []
        for sequence, ids, start in pieces:
            for offset, token in enumerate(ids):
                room.token[row], room.pos[row] = token, start + offset
                room.n_seq_id[row], room.seq_id[row][0] = 1, sequence
                room.logits[row] = offset == len(ids) - 1
                row += 1
            lasts.append(row - 1)
        room.n_tokens = row
        if (code := llama.llama_decode(self.context, room)) != 0:
            raise SystemExit(f"Error: llama_decode returned {code} for {row} tokens")
        return [llama.llama_sampler_sample(self.sampler, self.context, last) for last in lasts]


def make_sampler(temperature: float, seed: int) -> Any:
    """Returns a chain that draws from the whole softmax at this temperature."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if temperature == 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
        return chain
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(temperature))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(seed))
    return chain


# ── one sequence, with lookup ───────────────────────────────────────────────────────────────────────────────


def _lookup(job: Job) -> Callable[[Work], Took]:
    speculative = importlib.import_module("llama_cpp.llama_speculative")
    drafts = speculative.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    model = llama.Llama(job["gguf"], n_ctx=job["window"], draft_model=drafts, verbose=False, **threads)
    evaluate, count = model.eval, {"calls": 0}

    def counted(tokens: Any) -> None:
        count["calls"] += 1
        evaluate(tokens)

    model.eval = counted

    def measure(work: Work) -> Took:
        ((_, ids),) = work.prompts
        model.reset()
        count["calls"], watch, num_tokens = 0, Watch(), 0
        for _ in model.generate(ids, top_k=0, top_p=1.0, min_p=0.0, temp=work.temperature):
            watch.step()
            num_tokens += 1
            if num_tokens == work.lengths[0]:
                break
        return watch.took(num_tokens, 1, num_tokens / count["calls"])

    return measure


if __name__ == "__main__":
    serve(prepare)
