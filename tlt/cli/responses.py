"""Responses as `tlt generate` writes them, read again: their ids, checked against a model. Knows no use of them."""

from __future__ import annotations

from pathlib import Path

from tlt.files import Record, read_jsonl
from tlt.types import Rollout, UserError

Ids = tuple[int, ...]


def read_responses(path: Path, *, vocab_size: int, window: int) -> list[Rollout]:
    """Reads responses to train a drafter on; only their ids are needed."""
    rollouts = []
    for index, (place, record) in enumerate(read_jsonl(path, "--responses")):
        prompt_ids, token_ids = response_ids(place, record, vocab_size=vocab_size, window=window)
        rollouts.append(Rollout(f"line {index}", 0, prompt_ids, token_ids, (), "stop", policy_version=0))
    return rollouts


def response_ids(place: str, record: Record, *, vocab_size: int, window: int) -> tuple[Ids, Ids]:
    """Returns the ids of the prompt and of the response. Raises UserError for ids that the model does not have or hold."""
    from tlt.models.tokenizer import check_prompt

    ids: list[Ids] = []
    for key in ("prompt_ids", "token_ids"):
        value = record.get(key)
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UserError(f"{place}: {key} must be a list of whole numbers, as tlt generate writes it")
        ids.append(tuple(value))
    prompt_ids, token_ids = ids
    if len(prompt_ids) + len(token_ids) > window:
        length = len(prompt_ids) + len(token_ids)
        raise UserError(f"{place}: has {length} tokens but the model's window is {window}; remove the line")
    check_prompt(prompt_ids + token_ids, place, vocab_size=vocab_size, window=window + 1)
    return prompt_ids, token_ids
