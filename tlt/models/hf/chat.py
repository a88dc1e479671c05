"""Chat messages become a prompt, which holds all their texts and ends in an open turn of the assistant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from tlt.base.config.mistakes import find_nearest
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.models.hf.template import GIVEN, ChatTemplate, Message, TemplateRefusal

_FIRST_MARK, _NUM_MARKS = 0x10F000, 0xFF0
"""Private characters that mark messages while a template is tried."""
_END = chr(_FIRST_MARK - 1)
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT = re.compile(r"<think>.*?</think>|\A(?:(?!<think>).)*?</think>", re.DOTALL)
_TAG = re.compile(r"</?\w+>")
_OPTIONS = frozenset(
    (
        *("chat_template", "conversation", "continue_final_message", "max_length", "padding", "truncation"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens"),
        *("tokenize", "tokenizer_kwargs"),
    )
)
"""Arguments of transformers' apply_chat_template, which are no variables."""


@dataclass(frozen=True)
class Chat:
    """variables: further variables of the template, such as enable_thinking.
    day: the date that the template writes; None: today.
    """

    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    day: date | None = None

    @property
    def is_continued(self) -> bool:
        last = self.messages[-1]
        return last["role"] == "assistant" and not last.get("tool_calls") and bool(last.get("content"))


def read_messages(value: Any, key: str, place: str) -> list[Message]:
    """Null keys are dropped: a Parquet file has the same keys in all messages. Raises UserError for an image
    and the like."""
    is_list = isinstance(value, list | tuple) and bool(value)
    if not is_list or not all(isinstance(message, Mapping) for message in value):
        if key == "prompt":
            raise UserError(
                f"{place}: prompt is {shorten(value)}; it must be text, or a list of chat messages"
            )
        example = "{'role': 'user', 'content': '…'}"
        raise UserError(f"{place}: messages must be a list of objects such as {example}")
    messages = [
        _read_message(dict(message), f"{place}: message {n}") for n, message in enumerate(value, start=1)
    ]
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise UserError(f"{place}: {key} has no text; give a message with a text")
    last = messages[-1]
    if last["role"] != "assistant":
        return messages
    if last.get("tool_calls"):
        what = "ends with the assistant's tool calls, whose results are not there"
        raise UserError(f"{place}: {key} {what}; add the results, or leave the calls out")
    if last.get("content") or len(messages) == 1:
        return messages
    return messages[:-1]  # an empty last answer: the template opens its turn


def _read_message(message: Message, place: str) -> Message:
    message = {name: item for name, item in message.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        known = ", ".join(map(str, message)) or "no key"
        remedy = "write {'role': 'user', 'content': '…'}"
        raise UserError(f"{place} has no role (it has {known[:100]}); {remedy}")
    for name in ("images", "image", "audio", "video"):
        if message.get(name):
            raise UserError(f"{place} has {name}, which a text model does not read; leave that row out")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_read_part(part, f"{place}, part {n}") for n, part in enumerate(content, start=1))
        message["content"] = content
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return message
    if content is None:
        raise UserError(f"{place} ({role}) has no content; give its text")
    raise UserError(f"{place} ({role}): content is {shorten(content)}; give text, or a list of text parts")


def _read_part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{place} is {shorten(part)}; give {{'type': 'text', 'text': '…'}}")
    kind, text = part.get("type", "text"), part.get("text")
    if kind in _TEXT_PARTS and isinstance(text, str):
        return text
    what = f"is of type {kind!r}" if kind not in _TEXT_PARTS else "has no text"
    raise UserError(f"{place} {what}: a text model reads text alone; leave the part, or the row, out")


def check_variables(template: ChatTemplate, variables: Mapping[str, Any], place: str) -> None:
    """Raises UserError for a variable that the template does not read."""
    for name in variables:
        if name in GIVEN or name in _OPTIONS:
            remedy = "remove it from chat_template_kwargs"
            raise UserError(f"{place}: {name} is no variable of the chat template but set by TLT; {remedy}")
        if name not in template.variables:
            known = sorted(template.variables - GIVEN - template.special.keys() - {"tools", "documents"})
            nearest = find_nearest(name, known)
            remedy = f"did you mean {nearest}?" if nearest else f"it reads {', '.join(known) or 'none'}"
            raise UserError(
                f"{place}: the chat template does not read {name} (chat_template_kwargs); {remedy}"
            )


def read_tools(value: Any, place: str) -> list[Message]:
    """A list, or JSON."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools):
        return [dict(tool) for tool in tools]
    what = f"tools is {shorten(value)}, beside messages; give a list of tools"
    raise UserError(f"{place}: {what}, or give the column another name")


def write_prompt(template: ChatTemplate, chat: Chat, place: str, source: str) -> str:
    """Raises UserError if the template ignores a variable, refuses the messages, drops a text, or opens no
    turn."""
    check_variables(template, chat.variables, place)
    messages = chat.messages
    if chat.is_continued:
        text = _render(template, chat, place, source, [*messages[:-1], _end_with(messages[-1], _END)], False)
        if _END not in text:
            what = f"the chat template of {source} does not write the assistant's last message"
            raise UserError(f"{place}: {what}; leave that message out")
        prompt = text[: text.rindex(_END)]
    else:
        prompt = _render(template, chat, place, source, messages, True)
    marked = [_with_mark(message, n) for n, message in enumerate(messages)]
    tried = _render(template, chat, place, source, marked, False)
    for number, message in enumerate(messages):
        is_last = chat.is_continued and number == len(messages) - 1
        is_dropped = _mark(number) not in tried and _mark(number) in str(marked[number].get("content"))
        lost = "" if is_dropped else next(_lost_texts(message, prompt, is_last), None)
        if lost is not None:
            what = f"text {shorten(lost)} of" if lost else "text of"
            raise UserError(
                f"{place}: the chat template of {source} drops the {what} message {number + 1} "
                f"({message['role']}); leave that message out, or write it into another"
            )
    for tool in chat.variables.get("tools") or ():
        name = str(dict(tool.get("function", tool)).get("name", ""))
        if name not in prompt:
            what = f"the chat template of {source} does not write the tool {name!r}"
            raise UserError(f"{place}: {what}; correct its description, or remove the column tools")
    if not chat.is_continued and _without_marks(tried) == prompt:
        _check_open(template, chat, place, source, prompt)
    return prompt


def _check_open(template: ChatTemplate, chat: Chat, place: str, source: str, prompt: str) -> None:
    """Raises UserError if the template writes anything between prompt and answer. Some open the turn without
    add_generation_prompt."""
    answered = [*chat.messages, {"role": "assistant", "content": _END}]
    try:
        text = template.render(answered, chat.variables, chat.day, opens_turn=False)
    except TemplateRefusal:  # the template has no answers, so nothing comes before them
        return
    before, ended = text.partition(_END)[0], prompt.rstrip()
    if before.startswith(ended) and before[len(ended) :].strip():
        what = f"the chat template of {source} does not open the assistant's turn"
        remedy = "have it write the turn's beginning where add_generation_prompt is true"
        raise UserError(f"{place}: {what}; {remedy}")


def _render(
    template: ChatTemplate, chat: Chat, place: str, source: str, messages: Sequence[Message], opens_turn: bool
) -> str:
    try:
        return template.render(messages, chat.variables, chat.day, opens_turn=opens_turn)
    except TemplateRefusal as refusal:
        raise UserError(
            f"{place}: the chat template of {source} refuses them ({refusal}); correct them"
        ) from None


# ── what stands in a prompt ─────────────────────────────────────────────────────────────────────────────────


def _mark(number: int) -> str:
    return chr(_FIRST_MARK + number % _NUM_MARKS)


def _without_marks(text: str) -> str:
    return re.sub(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _NUM_MARKS)}]", "", text)


def _end_with(message: Message, end: str) -> Message:
    return {**message, "content": message["content"] + end}


def _with_mark(message: Message, number: int) -> Message:
    """Puts a mark before the last letter of the text, where no template trims it."""
    content = message.get("content") or ""
    kept = content.rstrip()
    if not kept or kept.endswith(">"):
        return message
    return {**message, "content": kept[:-1] + _mark(number) + content[len(kept) - 1 :]}


def _lost_texts(message: Message, prompt: str, is_last: bool) -> Iterator[str]:
    """Templates leave out thoughts of earlier answers; of the continued answer (is_last) every part
    counts."""
    content = message.get("content") or ""
    if is_last:
        texts = _TAG.split(content)
    else:
        texts = _THOUGHT.split(content) if message["role"] == "assistant" else [content]
    for call in message.get("tool_calls") or ():
        texts += _leaves(call.get("function", call) if isinstance(call, Mapping) else call)
    for text in texts:
        if not _stands_in(text.strip(), prompt):
            yield text.strip()


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        yield from _leaves(parsed) if isinstance(parsed, dict | list) else (value,)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item) if name not in ("id", "type") else ()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _stands_in(text: str, prompt: str) -> bool:
    """Templates write tool results and arguments as JSON, perhaps nested."""
    for _ in range(3):
        if text in prompt:
            return True
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return False
