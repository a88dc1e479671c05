"""Records of a prompts file become token ids: text, chat messages or ids, checked against the model. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt.files import Record, get_id, read_jsonl
from tlt.models.tokenizer import Tokenizer, check_prompt
from tlt.types import Request, SamplingParams, UserError

KINDS = ("prompt", "prompt_ids", "messages")
"""Keys by which a record gives its prompt: text, token ids, or chat messages for the tokenizer's template."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and the name that its responses go by."""

    problem_id: str
    prompt_ids: tuple[int, ...]


def read_prompts(path: Path, tokenizer: Tokenizer | None, *, vocab_size: int, window: int) -> list[Prompt]:
    """Reads a JSONL file of prompts. A line without problem_id is named by its number."""
    return encode_prompts(read_jsonl(path, "--prompts"), tokenizer, vocab_size=vocab_size, window=window)


def encode_prompts(
    records: Sequence[tuple[str, Record]], tokenizer: Tokenizer | None, *, vocab_size: int, window: int
) -> list[Prompt]:
    """Encodes (place, record) pairs; a place ends with ":line". Raises UserError for a problem_id that is given twice, and for
    a prompt that the model cannot read."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, record in records:
        problem_id = get_id(place, record, default=place.rpartition(":")[2])
        if problem_id in places:
            raise UserError(f"{place}: problem_id {problem_id!r} was given at {places[problem_id]} already; make it unique")
        places[problem_id] = place
        where = f"{place} (problem {problem_id!r})"
        prompt_ids = encode_prompt(record, tokenizer, where)
        check_prompt(prompt_ids, where, vocab_size=vocab_size, window=window)
        prompts.append(Prompt(problem_id, prompt_ids))
    return prompts


def encode_prompt(record: Record, tokenizer: Tokenizer | None, place: str) -> tuple[int, ...]:
    """Encodes one record, which gives exactly one of `KINDS`."""
    kinds = [kind for kind in KINDS if kind in record]
    if len(kinds) != 1:
        found = "no prompt" if not kinds else " and ".join(kinds)
        raise UserError(f"{place}: has {found}; give exactly one of prompt (text), prompt_ids (token ids), messages (chat)")
    (kind,) = kinds
    value = record[kind]
    if kind == "prompt_ids":
        if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
            raise UserError(f"{place}: prompt_ids must be a list of whole numbers")
        return tuple(value)
    if tokenizer is None:
        raise UserError(f"{place}: {kind} needs a tokenizer but the model's folder has none; add it, or give prompt_ids")
    if kind == "prompt":
        if not isinstance(value, str) or not value:
            raise UserError(f"{place}: prompt is {value!r}; it must be text")
        return tokenizer.encode_text(value, place)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise UserError(f"{place}: messages must be a list of objects such as {{'role': 'user', 'content': '…'}}")
    return tokenizer.encode_chat(value, place)


def make_requests(prompts: Iterable[Prompt], params: SamplingParams, samples: int) -> list[Request]:
    """Returns a request for every sample of every prompt, in their order."""
    return [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for sample_index in range(samples)
    ]
