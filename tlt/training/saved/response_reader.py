"""Reads files of responses (`tlt generate`, run.keep_responses), and checks token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.base.io.files import Record, read_jsonl
from tlt.base.types import Request, ResponseId, Rollout, UserError, id_of

if TYPE_CHECKING:
    from tlt.drafter.drafting.retrieval.references import References

Ids = tuple[int, ...]


def read_responses(path: Path, *, vocab_size: int, window: int) -> list[Rollout]:
    """Omits log-probabilities: a drafter's training needs none."""
    read = _read(path, "--responses", vocab_size=vocab_size, window=window)
    return [
        Rollout(f"line {i}", 0, prompt, tokens, (), "stop", 0) for i, (_, prompt, tokens) in enumerate(read)
    ]


def read_references(path: Path, requests: Sequence[Request], *, vocab_size: int, window: int) -> References:
    """Responses to the same prompts, by problem and sample. Raises UserError if there are none."""
    from tlt.drafter.drafting.retrieval.references import References  # here, since it loads NumPy

    asked = {(id_of(request), request.prompt_ids): request for request in requests}
    references, num_read = References(None), 0
    for response_id, prompt_ids, token_ids in _read(
        path, "--references", vocab_size=vocab_size, window=window
    ):
        num_read += 1
        if (request := asked.get((response_id, prompt_ids))) is not None:
            references.keep(request.noise_key, token_ids)
    if not len(references):
        raise UserError(
            f"--references: {path} has {num_read} responses, but none to a problem and sample that is asked "
            "for here; give a file that tlt generate has written for these prompts"
        )
    return references


def _read(path: Path, option: str, *, vocab_size: int, window: int) -> Iterator[tuple[ResponseId, Ids, Ids]]:
    for place, record in read_jsonl(path, option):
        ids = response_ids(place, record, vocab_size=vocab_size, window=window)
        yield (str(record.get("problem_id")), record.get("sample_index", 0)), *ids


def response_ids(place: str, record: Record, *, vocab_size: int, window: int) -> tuple[Ids, Ids]:
    """(prompt, response). Raises UserError for unknown ids, and beyond the model's window."""
    from tlt.models.hf.tokenizer import check_prompt

    ids: list[Ids] = []
    for key in ("prompt_ids", "token_ids"):
        value = record.get(key)
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UserError(f"{place}: {key} must be a list of whole numbers, as tlt generate writes it")
        ids.append(tuple(value))
    prompt_ids, token_ids = ids
    if (length := len(prompt_ids) + len(token_ids)) > window:
        raise UserError(f"{place}: has {length} tokens but the model's window is {window}; remove the line")
    check_prompt(prompt_ids + token_ids, place, vocab_size=vocab_size, window=window + 1)
    return prompt_ids, token_ids
