"""Responses as `tlt generate` writes them, read again: their ids, checked against a model. Knows no use of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.files import Record, read_jsonl
from tlt.types import Request, Rollout, UserError

if TYPE_CHECKING:
    from tlt.drafter.references import References

Ids = tuple[int, ...]


def read_responses(path: Path, *, vocab_size: int, window: int) -> list[Rollout]:
    """Reads responses to train a drafter on; only their ids are needed."""
    rollouts = []
    for index, (place, record) in enumerate(read_jsonl(path, "--responses")):
        prompt_ids, token_ids = response_ids(place, record, vocab_size=vocab_size, window=window)
        rollouts.append(Rollout(f"line {index}", 0, prompt_ids, token_ids, (), "stop", policy_version=0))
    return rollouts


def read_references(path: Path, requests: Sequence[Request], *, vocab_size: int, window: int) -> References:
    """Reads responses to draft the answers to these requests from: those to the same prompts, by problem and sample. Raises
    UserError where there is none among them."""
    from tlt.drafter.references import References

    asked = {(request.problem_id, request.sample_index, request.prompt_ids): request for request in requests}
    references, num_read = References(None), 0
    for place, record in read_jsonl(path, "--references"):
        num_read += 1
        prompt_ids, token_ids = response_ids(place, record, vocab_size=vocab_size, window=window)
        request = asked.get((str(record.get("problem_id")), record.get("sample_index", 0), prompt_ids))
        if request is not None:
            references.keep(request.key, token_ids)
    if not len(references):
        raise UserError(
            f"--references: {path} has {num_read} responses, but none to a problem and sample that is asked for here; "
            "give a file that tlt generate has written for these prompts"
        )
    return references


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
