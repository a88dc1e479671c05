"""Records of a prompts file become token ids: text, chat messages or ids, checked against the model. Knows
no engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlt.hf.tokenizer import Tokenizer, check_prompt
from tlt.io.files import Record, get_id
from tlt.kinds import plain, shorten
from tlt.types import Problem, Request, SamplingParams, UserError

KINDS = ("prompt", "prompt_ids", "messages")
"""Keys by which a record gives its prompt: text, token ids, or chat messages for the tokenizer's template.
As in TRL's and verl's data, `prompt` may be messages, too."""


@dataclass(frozen=True)
class ChatFormat:
    """Says how prompts go into the tokenizer's chat template.

    wraps: whether a text is put there, as the user's message; messages always are.
    system_prompt: what every prompt begins with; a text is then wrapped.
    variables: what else the template reads.
    """

    wraps: bool = False
    system_prompt: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAIN = ChatFormat()
"""Text as it is, messages in the template as it is."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and the name that its responses go by."""

    problem_id: str
    prompt_ids: tuple[int, ...]


def encode_prompts(
    records: Sequence[tuple[str, Record]],
    tokenizer: Tokenizer | None,
    chat: ChatFormat = PLAIN,
    *,
    vocab_size: int,
    window: int,
) -> list[Prompt]:
    """Encodes (place, record) pairs; a place ends with ":line". Raises UserError for a problem_id that is
    given twice, and for a prompt that the model cannot read."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, record in records:
        problem_id = get_id(place, record, default=place.rpartition(":")[2])
        if problem_id in places:
            raise UserError(
                f"{place}: problem_id {problem_id!r} was given at {places[problem_id]} already; make it "
                "unique"
            )
        places[problem_id] = place
        where = f"{place} (problem {problem_id!r})"
        prompt_ids = encode_prompt(record, tokenizer, where, chat)
        check_prompt(prompt_ids, where, vocab_size=vocab_size, window=window)
        prompts.append(Prompt(problem_id, prompt_ids))
    return prompts


def encode_prompt(
    record: Record, tokenizer: Tokenizer | None, place: str, chat: ChatFormat = PLAIN
) -> tuple[int, ...]:
    """Encodes one record, which gives exactly one of `KINDS`."""
    kinds = [kind for kind in KINDS if record.get(kind) is not None]
    if not kinds:
        raise UserError(f"{place}: has no prompt; {_remedy(record)}")
    if len(kinds) > 1:
        raise UserError(f"{place}: has {' and '.join(kinds)}; give exactly one of them")
    (kind,) = kinds
    value = record[kind]
    if kind == "prompt_ids":
        return _check_ids(value, place, chat)
    if tokenizer is None:
        raise UserError(
            f"{place}: {kind} needs a tokenizer but the model's folder has none; add it, or give prompt_ids"
        )
    if isinstance(value, str) and kind == "prompt":
        if not value:
            raise UserError(f"{place}: prompt is {value!r}; it must be text")
        if not chat.wraps and chat.system_prompt is None:
            return tokenizer.encode_text(value, place)
        value = [{"role": "user", "content": value}]
    return tokenizer.encode_chat(_with_system_prompt(value, kind, place, chat), place, chat.variables)


def _remedy(record: Record) -> str:
    """Returns how a row gets a prompt: the columns that it has, and how one of them is named as ours."""
    columns = [name for name in record if name not in ("problem_id", *KINDS)]
    if not columns:
        return "give one of prompt (text), prompt_ids (token ids), messages (chat)"
    example = next((name for name in columns if isinstance(record[name], str)), columns[0])
    in_file, typed = f"{{ prompt = {json.dumps(example)} }}", json.dumps({"prompt": example})
    named = f"task.columns = {in_file}, or --columns '{typed}' on a command line"
    return f"its columns are {', '.join(columns)[:200]}: name the one that is, such as {named}"


def read_ids(value: Any, place: str) -> tuple[int, ...]:
    """Returns token ids that are given as a list or tuple, or as an array of NumPy's or torch's of one
    dimension."""
    is_list = isinstance(value, list | tuple)
    ids = value if is_list and all(type(token) is int for token in value) else plain(value)
    is_ordered = isinstance(value, Sequence) or hasattr(value, "tolist")
    if not (is_ordered and isinstance(ids, list | tuple) and all(type(token) is int for token in ids)):
        raise UserError(f"{place}: prompt_ids is {shorten(value)}; it must be a list of whole numbers")
    return tuple(ids)


def _check_ids(value: Any, place: str, chat: ChatFormat) -> tuple[int, ...]:
    ids = read_ids(value, place)
    if chat.system_prompt is not None:
        raise UserError(
            f"{place}: the system prompt cannot be put before prompt_ids; remove it, or give prompt or "
            "messages"
        )
    return ids


def _with_system_prompt(value: Any, kind: str, place: str, chat: ChatFormat) -> list[Record]:
    """Returns the messages that the template gets. Keys without a value, which a Parquet file gives to all
    messages where one has them, are left out."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        if kind == "prompt":
            raise UserError(f"{place}: prompt is {value!r}; it must be text, or a list of chat messages")
        raise UserError(
            f"{place}: messages must be a list of objects such as {{'role': 'user', 'content': '…'}}"
        )
    messages = [{key: item for key, item in message.items() if item is not None} for message in value]
    if chat.system_prompt is None:
        return messages
    if messages[0].get("role") == "system":
        raise UserError(
            f"{place}: {kind} begins with a system message already; remove the system prompt that is set"
        )
    return [{"role": "system", "content": chat.system_prompt}, *messages]


def check_room(prompts: Iterable[Prompt | Problem], max_tokens: int, window: int, place: str) -> None:
    """Raises UserError, which begins with `place`, where the window ends before a response has got as long
    as it may."""
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids), default=None)
    if longest is None or (room := window - len(longest.prompt_ids)) >= max_tokens:
        return
    window_says = f"the model's window of {window} tokens leaves {room} after the prompt of problem {longest.problem_id!r}"
    raise UserError(f"{place}: is {max_tokens}, but {window_says}; give {room} or less, or shorter prompts")


def make_requests(prompts: Iterable[Prompt], params: SamplingParams, samples: int) -> list[Request]:
    """Returns a request for every sample of every prompt, in their order."""
    return [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for sample_index in range(samples)
    ]
