"""transformers' `generate`, with padded batches, and prompt lookup as its drafts.

Its own sampling takes one generator for a whole batch. Where a seed must be repeatable, a logits processor adds
noise by seed and position, and `generate` takes the largest: a sample of the same distribution.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from benchmarks.invariance.ways import Answer, Asked, Job, serve

PAD = 0


class Recording(LogitsProcessor):
    """Records log-probabilities of the tokens that are taken. After a wrong draft a place is recorded anew."""

    def __init__(self, num_prompt: int, seeds: list[int] | None) -> None:
        """num_prompt: tokens of the padded prompts. seeds: None: the largest logit is taken."""
        self.num_prompt, self.seeds = num_prompt, seeds
        self.logprobs: dict[int, list[float]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.num_prompt
        logp_BV = scores.log_softmax(-1)
        noisy_BV = logp_BV
        if self.seeds is not None:
            rows = [_gumbel(seed, place, scores.shape[-1]) for seed in self.seeds]
            noisy_BV = logp_BV + torch.stack(rows)
        chosen_B1 = noisy_BV.argmax(-1, keepdim=True)
        self.logprobs[place] = logp_BV.gather(-1, chosen_B1)[:, 0].tolist()
        return noisy_BV


def _gumbel(seed: int, place: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
    return -torch.empty(size).exponential_(generator=generator).log()


class Transformers:
    drafts_in_batches = False

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        self.job, self.versions = job, {"transformers": version("transformers"), "torch": torch.__version__}
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, job["dtype"]), local_files_only=True
        ).eval()

    @torch.inference_mode()
    def respond(self, asked: list[Asked], temperature: float, is_repeatable: bool) -> list[Answer]:
        num_prompt = max(len(one.prompt_ids) for one in asked)
        padded = [[PAD] * (num_prompt - len(one.prompt_ids)) + one.prompt_ids for one in asked]
        is_real = [[0] * (num_prompt - len(one.prompt_ids)) + [1] * len(one.prompt_ids) for one in asked]
        samples = temperature > 0 and not is_repeatable
        recording = Recording(num_prompt, [one.seed for one in asked] if temperature > 0 else None)
        torch.manual_seed(asked[0].seed)
        sampling = (
            {"do_sample": True, "top_k": 0, "temperature": temperature} if samples else {"do_sample": False}
        )
        texts = self.model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(is_real),
            max_new_tokens=self.job["max_tokens"],
            eos_token_id=self.job["stop_ids"],
            pad_token_id=PAD,
            logits_processor=LogitsProcessorList([] if samples else [recording]),
            prompt_lookup_num_tokens=4 if self.job["drafts"] else None,
            **sampling,
        )
        return [
            self._answer(one, row, text[num_prompt:].tolist(), {} if samples else recording.logprobs)
            for row, (one, text) in enumerate(zip(asked, texts, strict=True))
        ]

    def _answer(self, asked: Asked, row: int, ids: list[int], logprobs: dict[int, list[float]]) -> Answer:
        ends = [place for place, token in enumerate(ids) if token in self.job["stop_ids"]]
        ids = ids[: ends[0] + 1] if ends else ids
        return Answer.to(asked, ids, [logprobs[place][row] for place in range(len(ids))] if logprobs else [])

    @torch.inference_mode()
    def read(self, answer: Answer) -> list[float]:
        ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
        logits_TV = self.model(ids[:, :-1]).logits[0, len(answer.prompt_ids) - 1 :].float()
        tokens_T1 = torch.tensor(answer.token_ids)[:, None]
        found: list[float] = logits_TV.log_softmax(-1).gather(-1, tokens_T1)[:, 0].tolist()
        return found


if __name__ == "__main__":
    serve(Transformers)
