"""The referee: the target's own probabilities, by transformers and without any code of the engine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tlt.base.types import SamplingParams, UserError

_CHUNK_LOGITS = 2**24


class Referee:
    """Runs the target with transformers. Raises UserError if it cannot load the model."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: holds no model (no config.json); give a Hugging Face checkpoint folder"
            )
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            # fused attention ignores the soft cap on its scores (Gemma 2), as of transformers 5.19
            attention = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
            self.model = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                dtype=dtype,
                attn_implementation=attention,
            ).eval()
            self.model.to(device)
        except Exception as error:  # transformers raises exceptions of many kinds
            message = " ".join(str(error).split())[:200]
            raise UserError(
                f"{folder}: transformers cannot load it ({message}); give a complete checkpoint folder"
            ) from None
        config = self.model.config.get_text_config()
        takes = inspect.signature(type(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"  # until 5.23
        self.vocab_size = int(config.vocab_size)
        self.window = int(getattr(config, "max_position_embeddings", None) or 2**31)

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Yields the logits that each response token was drawn from, [T, V], in pieces of at most 128 MiB, on
        the CPU."""
        ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=self.model.device)
        first, cache = len(prompt_ids) - 1, None
        step = max(_CHUNK_LOGITS // self.vocab_size, 16)
        begin = 0
        while begin < ids.shape[1]:
            end = min(begin + step, ids.shape[1])
            out = self.model(ids[:, begin:end], use_cache=True, **{self.cache_name: cache})
            cache = out[self.cache_name]
            if end > first:
                yield out.logits[0, max(first - begin, 0) :].cpu()
            begin = end


@dataclass(frozen=True)
class Distribution:
    logp_TV: Tensor
    """float64; -inf for truncated tokens."""
    border_TV: Tensor
    """Tokens removed so narrowly that an engine's rounding may keep them."""


def law(logits_TV: Tensor, params: SamplingParams, tolerance: float = 0.0) -> Distribution:
    """logits → temperature → top-k → top-p → min-p → softmax, in float64.

    tolerance: nats by which an engine's rounding may move a logit.
    """
    scaled_TV = logits_TV.double() / params.temperature
    kept_TV = torch.ones_like(scaled_TV, dtype=torch.bool)
    if not params.truncates:
        return Distribution(scaled_TV.log_softmax(-1), ~kept_TV)
    wide_TV = kept_TV.clone()
    order_TV = (-scaled_TV).argsort(dim=-1, stable=True)
    ranks_TV = order_TV.argsort(dim=-1)
    if 0 < params.top_k < scaled_TV.shape[-1]:
        last_T1 = scaled_TV.topk(params.top_k).values[:, -1:]
        kept_TV = ranks_TV < params.top_k
        wide_TV = scaled_TV >= last_T1 - tolerance
    p_TV = scaled_TV.masked_fill(~kept_TV, -math.inf).softmax(-1)
    ranked_TV = p_TV.gather(-1, order_TV)
    ahead_TV = (ranked_TV.cumsum(-1) - ranked_TV).gather(-1, ranks_TV)
    if params.top_p < 1:
        kept_TV = kept_TV & (ahead_TV < params.top_p)
        wide_TV = wide_TV & (ahead_TV < params.top_p + tolerance)
    floor_T1 = scaled_TV.amax(-1, keepdim=True) + (math.log(params.min_p) if params.min_p > 0 else -math.inf)
    kept_TV = kept_TV & (scaled_TV >= floor_T1)
    wide_TV = wide_TV & (scaled_TV >= floor_T1 - tolerance)
    kept_TV = kept_TV | (ranks_TV == 0)
    return Distribution(scaled_TV.masked_fill(~kept_TV, -math.inf).log_softmax(-1), wide_TV & ~kept_TV)
