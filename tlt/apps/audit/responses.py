"""Another engine's responses, from a file."""

from __future__ import annotations

from pathlib import Path

from tlt.base.io.files import get_id, read_jsonl
from tlt.base.types import Rollout, UserError
from tlt.base.value_types import shorten
from tlt.training.saved.response_reader import response_ids


def read_responses(path: Path, *, vocab_size: int, window: int) -> tuple[Rollout, ...]:
    """`finish_reason` and `logprobs` are optional."""
    rollouts = []
    for index, (place, record) in enumerate(read_jsonl(path, "FILE")):
        prompt_ids, token_ids = response_ids(place, record, vocab_size=vocab_size, window=window)
        if not prompt_ids or not token_ids:
            raise UserError(
                f"{place}: prompt_ids and token_ids need at least one token each; remove the line"
            )
        logprobs = record.get("logprobs") or []
        if not isinstance(logprobs, list) or not all(type(one) in (int, float) for one in logprobs):
            raise UserError(
                f"{place}: logprobs is {shorten(logprobs)}; give a number for each token, or none"
            )
        if logprobs and len(logprobs) != len(token_ids):
            counts = f"{len(token_ids)} token_ids but {len(logprobs)} logprobs"
            raise UserError(f"{place}: has {counts}; give one each, or none")
        sample_index = record.get("sample_index")
        rollouts.append(
            Rollout(
                get_id(place, record, default=f"line {index + 1}"),
                sample_index if isinstance(sample_index, int) else 0,
                prompt_ids,
                token_ids,
                tuple(logprobs),
                "stop" if record.get("finish_reason") == "stop" else "length",
                policy_version=0,
            )
        )
    return tuple(rollouts)
