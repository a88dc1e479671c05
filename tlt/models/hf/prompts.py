"""Encodes and checks records of prompts: text, chat messages or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from tlt.base.io.data import PROMPTS
from tlt.base.io.files import Record, get_id
from tlt.base.types import Problem, Request, SamplingParams, UserError
from tlt.base.value_types import plain, shorten
from tlt.models.hf.chat import read_tools
from tlt.models.hf.tokenizer import Tokenizer, check_prompt


@dataclass(frozen=True)
class ChatFormat:
    """wraps: whether a text becomes the user's message; messages always use the template.
    system_prompt: the system message before every prompt; texts then use the template, too.
    variables, day: see `Chat`.
    """

    wraps: bool = False
    system_prompt: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    day: date | None = None


PLAIN = ChatFormat()


@dataclass(frozen=True)
class EncodedPrompt:
    problem_id: str
    prompt_ids: tuple[int, ...]
    record: Record = field(default_factory=dict)


def encode_prompts(
    records: Sequence[tuple[str, Record]],
    tokenizer: Tokenizer | None,
    chat: ChatFormat = PLAIN,
    *,
    vocab_size: int,
    window: int,
    longest: int | None = None,
    known: Sequence[Sequence[int]] | None = None,
) -> list[EncodedPrompt]:
    """Raises UserError for a repeated problem_id, and for a prompt that the model cannot read.

    records: with their places, such as "file:line".
    longest: longer prompts are left out.
    known: token ids by record, encoded earlier; empty: left out.
    """
    if chat.variables and tokenizer is not None:
        tokenizer.check_variables(chat.variables, "chat_template_kwargs")
    prompts: list[EncodedPrompt] = []
    places: dict[str, str] = {}
    for number, (place, record) in enumerate(records):
        problem_id = get_id(place, record, default=place.rpartition(":")[2])
        if (before := places.get(problem_id)) is not None:
            raise UserError(
                f"{place}: problem_id {problem_id!r} was given at {before} already; make it unique"
            )
        places[problem_id] = place
        where = f"{place} (problem {problem_id!r})"
        prompt_ids = encode_prompt(record, tokenizer, where, chat) if known is None else tuple(known[number])
        is_left_out = longest is not None and len(prompt_ids) > longest
        if is_left_out or (known is not None and not prompt_ids):
            continue
        check_prompt(prompt_ids, where, vocab_size=vocab_size, window=window)
        prompts.append(EncodedPrompt(problem_id, prompt_ids, record))
    if records and not prompts:
        what = f"each of the {len(records)} prompts has more than {longest} tokens"
        raise UserError(f"{records[0][0]}: {what} (max_prompt_tokens); raise that, or give shorter prompts")
    return prompts


def describe_prompts(
    records: Sequence[Record], num_kept: int, longest: int | None, place: str
) -> Iterator[str]:
    """Lines about prompts left out, and prompts that the assistant has begun to answer.

    place: name of the key or option that leaves prompts out.
    """
    if num_left_out := len(records) - num_kept:
        total = f"{num_left_out:,} of {len(records):,} prompts are left out"
        yield f"{total}: they have more than {longest} tokens ({place})"
    num_begun = sum(map(_is_begun, records))
    if num_begun:
        told = f"{num_begun:,} prompts end with the assistant's message, which the model continues"
        yield f"{told}; where that is the answer to learn, leave it out of the messages"


def _is_begun(record: Record) -> bool:
    messages = record.get("messages") or record.get("prompt")
    if not isinstance(messages, list | tuple) or not messages or not isinstance(messages[-1], Mapping):
        return False
    return messages[-1].get("role") == "assistant" and bool(messages[-1].get("content"))


def encode_prompt(
    record: Record, tokenizer: Tokenizer | None, place: str, chat: ChatFormat = PLAIN
) -> tuple[int, ...]:
    if record.get("images"):
        raise UserError(f"{place}: has images, which a text model does not read; leave that row out")
    kinds = [kind for kind in PROMPTS if record.get(kind) is not None]
    if not kinds:
        raise UserError(f"{place}: has no prompt; {_remedy(record)}")
    if len(kinds) > 1:
        raise UserError(
            f"{place}: has {' and '.join(kinds)}; give exactly one of them, by {_naming(kinds[-1])}"
        )
    (kind,) = kinds
    value = record[kind]
    if kind == "prompt_ids":
        ids = read_ids(value, place)
        if chat.system_prompt is not None:
            remedy = "remove it, or give prompt or messages"
            raise UserError(f"{place}: the system prompt cannot be put before prompt_ids; {remedy}")
        return ids
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
    messages = _with_system_prompt(value, kind, place, chat)
    variables = dict(chat.variables)
    if record.get("tools") and (tools := read_tools(record["tools"], place)):
        variables["tools"] = tools
    return tokenizer.encode_chat(messages, place, variables, chat.day, kind)


def describe_template(
    records: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, chat: ChatFormat, key: str
) -> Iterator[str]:
    """Lines about texts for a chat model without its template, and chats whose answers end at an unknown
    token. These are no errors: base models often have a template, too.

    key: the option that puts texts into the template.
    """
    if tokenizer is None or not tokenizer.has_template:
        return
    num_texts = sum(isinstance(record.get("prompt"), str) for record in records)
    num_raw = 0 if chat.wraps or chat.system_prompt is not None else num_texts
    if num_raw:
        told = f"{num_raw:,} prompts are text and go to the model as they are, though it has a chat template"
        yield f"{told}; {key} puts them into it"
    num_ids = sum(record.get("prompt_ids") is not None for record in records)
    if tokenizer.unknown_end and num_raw + num_ids < len(records):
        ends = " or ".join(map(tokenizer.name_of, tokenizer.stop_ids)) or "no token"
        what = f"the chat template refuses a question with its answer ({tokenizer.unknown_end})"
        remedy = "where answers end at another, add it to eos_token_id in the model's generation_config.json"
        yield f"{what}: responses end at {ends}; {remedy}"


def _remedy(record: Record) -> str:
    columns = [name for name in record if name not in ("problem_id", *PROMPTS)]
    if not columns:
        return "give one of prompt (text), prompt_ids (token ids), messages (chat)"
    example = next((name for name in columns if isinstance(record[name], str)), columns[0])
    return f"its columns are {', '.join(columns)[:200]}: name the one that is, such as {_naming(example)}"


def _naming(column: str) -> str:
    ours = column if column == "prompt_ids" else "prompt"
    in_file, typed = f"{{ {ours} = {json.dumps(column)} }}", json.dumps({ours: column})
    return f"task.columns = {in_file}, or --columns '{typed}' on a command line"


def read_ids(value: Any, place: str) -> tuple[int, ...]:
    """value: a list, a tuple, or a one-dimensional array."""
    is_list = isinstance(value, list | tuple)
    ids = value if is_list and all(type(token) is int for token in value) else plain(value)
    is_ordered = isinstance(value, Sequence) or hasattr(value, "tolist")
    if not (is_ordered and isinstance(ids, list | tuple) and all(type(token) is int for token in ids)):
        raise UserError(f"{place}: prompt_ids is {shorten(value)}; it must be a list of whole numbers")
    return tuple(ids)


def _with_system_prompt(value: Any, kind: str, place: str, chat: ChatFormat) -> Any:
    is_list = isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value)
    if chat.system_prompt is None or not is_list or not value:
        return value
    if value[0].get("role") == "system":
        raise UserError(
            f"{place}: {kind} begins with a system message already; remove the system prompt that is set"
        )
    return [{"role": "system", "content": chat.system_prompt}, *value]


def check_max_tokens(
    prompts: Iterable[EncodedPrompt | Problem], max_tokens: int, window: int, place: str
) -> None:
    """Raises UserError if the window has no room for a response of `max_tokens`."""
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids), default=None)
    if longest is None or (room := window - len(longest.prompt_ids)) >= max_tokens:
        return
    raise UserError(
        f"{place}: is {max_tokens}, but the model's window of {window} tokens leaves {room} after the prompt "
        f"of problem {longest.problem_id!r}; give {room} or less, or shorter prompts "
        f"(max_prompt_tokens {window - max_tokens} leaves longer ones out)"
    )


def make_requests(prompts: Iterable[EncodedPrompt], params: SamplingParams, samples: int) -> list[Request]:
    return [
        Request(prompt.problem_id, sample_index, prompt.prompt_ids, params, purpose="generate")
        for prompt in prompts
        for sample_index in range(samples)
    ]
