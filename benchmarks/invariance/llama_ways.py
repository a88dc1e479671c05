"""llama.cpp by llama-cpp-python: its own batches and sampler; drafts from the text itself, verified in one batch."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.invariance.ways import Answer, Asked, Job, serve
from benchmarks.real_size.llama_alone import SILENT, make_sampler

llama: Any = importlib.import_module("llama_cpp")

DRAFTED, SUFFIX = 4, 2
"""Tokens of a draft, which follow the last earlier occurrence of the text's last two tokens."""


class Llama:
    drafts_in_batches = False

    def __init__(self, job: Job) -> None:
        self.job, self.versions = job, {"llama-cpp-python": version("llama-cpp-python")}
        llama.llama_log_set(SILENT, None)
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(
            job["gguf"].encode(), llama.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"Error: llama.cpp does not load {job['gguf']}")
        self.num_tokens = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}
        self.room = llama.llama_batch_init(max(job["batch_sizes"]) * job["window"], 0, 1)

    def context(self, num_sequences: int) -> Any:
        """llama.cpp's defaults, with attention's cache in half precision, and room for so many sequences."""
        if num_sequences not in self.contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = num_sequences * -(-self.job["window"] // 256) * 256
            params.n_batch = max(params.n_ctx, 512)
            params.n_seq_max = num_sequences
            params.n_threads = params.n_threads_batch = self.job["threads"]
            self.contexts[num_sequences] = llama.llama_init_from_model(self.model, params)
        context = self.contexts[num_sequences]
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        return context

    def respond(self, asked: list[Asked], temperature: float, is_repeatable: bool) -> list[Answer]:
        if self.job["drafts"]:
            return [self._with_drafts(one, temperature) for one in asked]
        context = self.context(len(asked))
        samplers = [make_sampler(temperature, one.seed) for one in asked]
        token_ids: list[list[int]] = [[] for _ in asked]
        logprobs: list[list[float]] = [[] for _ in asked]
        going = list(range(len(asked)))
        while going:
            pieces = [
                (i, token_ids[i][-1:] or asked[i].prompt_ids, self._start(asked[i], token_ids[i]))
                for i in going
            ]
            rows = self._decode(context, pieces)
            for i, row in zip(going, rows, strict=True):
                token = llama.llama_sampler_sample(samplers[i], context, row)
                token_ids[i].append(token)
                logprobs[i].append(self._logprob(context, row, token))
            going = [i for i in going if not self._has_ended(token_ids[i])]
        for sampler in samplers:
            llama.llama_sampler_free(sampler)
        return [Answer.to(*row) for row in zip(asked, token_ids, logprobs, strict=True)]

    def _with_drafts(self, asked: Asked, temperature: float) -> Answer:
        context, sampler = self.context(1), make_sampler(temperature, asked.seed)
        token_ids: list[int] = []
        logprobs: list[float] = []
        while not self._has_ended(token_ids):
            start = self._start(asked, token_ids)
            draft = _propose([*asked.prompt_ids, *token_ids]) if token_ids else []
            read = [*(token_ids[-1:] or asked.prompt_ids), *draft]
            (last,) = self._decode(context, [(0, read, start)], len(draft) + 1)
            for row, drafted in zip(range(last - len(draft), last + 1), [*draft, None], strict=True):
                token = llama.llama_sampler_sample(sampler, context, row)
                token_ids.append(token)
                logprobs.append(self._logprob(context, row, token))
                if token != drafted or self._has_ended(token_ids):
                    break
            kept = self._start(asked, token_ids)
            llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, kept, -1)
        llama.llama_sampler_free(sampler)
        return Answer.to(asked, token_ids, logprobs)

    def read(self, answer: Answer) -> list[float]:
        context, num = self.context(1), len(answer.token_ids)
        ids = [*answer.prompt_ids, *answer.token_ids[:-1]]
        (last,) = self._decode(context, [(0, ids, 0)], num)
        rows = range(last - num + 1, last + 1)
        return [self._logprob(context, row, token) for row, token in zip(rows, answer.token_ids, strict=True)]

    def _start(self, asked: Asked, token_ids: list[int]) -> int:
        """The position of the first token that is not read yet."""
        return len(asked.prompt_ids) + len(token_ids) - 1 if token_ids else 0

    def _has_ended(self, token_ids: list[int]) -> bool:
        is_long = len(token_ids) >= self.job["max_tokens"]
        return is_long or (bool(token_ids) and token_ids[-1] in self.job["stop_ids"])

    def _decode(
        self, context: Any, pieces: list[tuple[int, list[int], int]], num_logits: int = 1
    ) -> list[int]:
        """Reads pieces (sequence, tokens, first position); returns each one's last row. num_logits: last tokens
        of a piece whose logits are computed."""
        room, row, lasts = self.room, 0, []
        for sequence, ids, start in pieces:
            for offset, token in enumerate(ids):
                room.token[row], room.pos[row] = token, start + offset
                room.n_seq_id[row], room.seq_id[row][0] = 1, sequence
                room.logits[row] = offset >= len(ids) - num_logits
                row += 1
            lasts.append(row - 1)
        room.n_tokens = row
        if (code := llama.llama_decode(context, room)) != 0:
            raise SystemExit(f"Error: llama_decode returned {code} for {row} tokens")
        return lasts

    def _logprob(self, context: Any, row: int, token: int) -> float:
        logits = llama.llama_get_logits_ith(context, row)
        logits_V = np.ctypeslib.as_array(logits, shape=(self.num_tokens,)).astype(np.float64)
        return float(logits_V[token] - logits_V.max() - np.log(np.exp(logits_V - logits_V.max()).sum()))


def _propose(text: list[int]) -> list[int]:
    suffix = text[-SUFFIX:]
    for end in range(len(text) - 1, SUFFIX - 1, -1):
        if text[end - SUFFIX : end] == suffix:
            return text[end : end + DRAFTED]
    return []


if __name__ == "__main__":
    serve(Llama)
