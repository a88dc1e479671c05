"""Turns of a conversation as tokens and as messages. Tokens that were drawn are never encoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

from tlt.base.types import UserError
from tlt.models.hf.template import Message, TemplateRefusal
from tlt.models.hf.tokenizer import Tokenizer

_MARK = "TLT-ANSWER"
_QUESTION = {"role": "user", "content": "?"}
_FUNCTION = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(\{.*\})\s*(?:```\s*)?", re.DOTALL)
_REST = {"content": "text", "repeats": True, "join": ""}
_VALUES = {"value_parser": {"name": "text"}}  # typed by the tool's description
FORMATS: dict[str, dict[str, Any]] = {
    "xml": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            **_VALUES,
        },
        "transform": _NAMED,
    },
    "glm": {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]+)\s*",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            **_VALUES,
        },
        "transform": _NAMED,
    },
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": _FUNCTION},
    "llama": {
        "open_pattern": r'(?:<\|python_tag\|>)?\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}\s*;?\s*(?=<\||\{|$)",
        "content": "json",
        "transform": _NAMED,
    },
    "harmony": {
        "open_pattern": r"to=functions\.(?P<name>\S+?)(?:<\|channel\|>commentary)?\s*"
        r"(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        "close_pattern": r"<\|call\|>|$",
        "content": "json",
        "transform": _NAMED,
    },
}
"""How a call is written, as a field of transformers' response templates."""
_SIGNS = {
    "xml": ("<function=",),
    "glm": ("<arg_key>",),
    "hermes": ("<tool_call>",),
    "harmony": ("'functions'", "to=functions."),
    "llama": ('"parameters"', "python_tag"),
}
"""What a chat template holds that writes calls so; the first format that is found counts."""


class ToolCall(NamedTuple):
    """arguments: None: it cannot be read, and `name` says why."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True)
class Turn:
    message: Message
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class TurnWriter:
    """variables, day: see `Chat`; `tools` is among the variables where there are tools."""

    tokenizer: Tokenizer
    variables: Mapping[str, Any] = field(default_factory=dict)
    day: date | None = None

    def check(self, calls: bool) -> None:
        """Raises UserError if the template cannot write a turn between two of the policy, or how it writes
        calls is unknown. calls: whether there are tools."""
        if not self.tokenizer.has_template:
            path = self.tokenizer.path
            raise UserError(
                f"environment: {path} has no chat template, which writes turns; give a chat model"
            )
        role = "tool" if calls else "user"
        self._between([{"role": role, "name": "f", "content": "?"}])
        if calls:
            self._response_template()

    def append(self, turn_ids: Sequence[int], said: Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens from the end of the policy's turn to the beginning of its next.

        turn_ids: the policy's turn; what it wrote of the turn's end is not written twice.
        said: messages of tools, or of the user.
        """
        tokenizer = self.tokenizer
        safe = [
            {**message, "content": tokenizer.without_control(str(message["content"]))} for message in said
        ]
        text = self._between(safe)
        if turn_ids and turn_ids[-1] in tokenizer.stop_ids:
            end = tokenizer.name_of(turn_ids[-1])
            ended = text.lstrip()
            text = ended[len(end) :] if ended.startswith(end) else text
        return tokenizer.encode_as_it_is(text)

    def read(self, turn_ids: Sequence[int]) -> Turn:
        """An unreadable call has no arguments."""
        text = self.tokenizer.decode_all([t for t in turn_ids if t not in self.tokenizer.stop_ids])
        plain = self.tokenizer.decode(turn_ids)
        if not self.variables.get("tools"):
            return Turn({"role": "assistant", "content": plain})
        from transformers.utils.chat_parsing.response_parser import parse_response

        spoken = re.split(r"</think(?:ing)?>", text)[-1]  # what a thought considers is not called
        try:
            parsed = parse_response(
                spoken, self._response_template(), prefix="", tools=list(self.variables["tools"])
            )
        except Exception as error:  # broken JSON and the like
            why = " ".join(str(error).split())[:200]
            return Turn(
                {"role": "assistant", "content": plain}, (ToolCall(f"the call cannot be read: {why}", None),)
            )
        calls = tuple(map(_read_call, parsed.get("tool_calls") or ())) or self._bare(plain)
        if not calls:
            return Turn({"role": "assistant", "content": plain})
        message = {"role": "assistant", "content": str(parsed.get("content") or "").strip()}
        asked = [call for call in calls if call.arguments is not None]
        functions = [{"name": call.name, "arguments": dict(call.arguments or {})} for call in asked]
        return Turn(message | {"tool_calls": [{"type": "function", "function": f} for f in functions]}, calls)

    def _bare(self, text: str) -> tuple[ToolCall, ...]:
        """Small models write a turn of a call's JSON alone, without the template's tags."""
        found = _BARE.fullmatch(re.split(r"</think(?:ing)?>", text)[-1])
        try:
            value = json.loads(found[1]) if found else None
        except ValueError:
            return ()
        names = {tool.get("function", tool).get("name") for tool in self.variables["tools"]}
        call = _read_call({"function": value})
        return (call,) if call.name in names and call.arguments is not None else ()

    def _response_template(self) -> Any:
        own = getattr(self.tokenizer.hf, "response_template", None)
        if own is not None:
            return own
        text = self.tokenizer.template.text
        for name, signs in _SIGNS.items():
            if any(sign in text for sign in signs):
                call = {**FORMATS[name], "repeats": True}
                return {"start_anchor": "\0", "fields": {"tool_calls": call, "content": _REST}}
        what = f"how {self.tokenizer.path} writes calls of tools is not known from its chat template"
        remedy = "give its tokenizer_config.json a response_template (transformers)"
        raise UserError(f"environment: {what}; {remedy}")

    def _between(self, said: Sequence[Message]) -> str:
        """Returns what the template writes after an answer, with the next turn opened. What it rewrites of
        earlier turns stands before the mark: drawn tokens stay."""
        refusals = []
        called = {"type": "function", "function": {"name": said[0].get("name", "f"), "arguments": {}}}
        for answer in ({}, {"tool_calls": [called]}):
            messages: list[Message] = [_QUESTION, {"role": "assistant", "content": _MARK, **answer}, *said]
            try:
                text = self.tokenizer.render(messages, self.variables, self.day, opens_turn=True)
            except TemplateRefusal as refusal:
                refusals.append(str(refusal))
                continue
            if _MARK in text:
                rest = text.partition(_MARK)[2]
                if not answer:
                    return rest
                return _after_call(self.tokenizer, rest)
        why = refusals[0] if refusals else "it does not write the answer"
        raise UserError(
            f"environment: the chat template of {self.tokenizer.path} has no turns of a "
            f"{said[0]['role']} after an answer ({why}); use a model whose template has"
        )


def _after_call(tokenizer: Tokenizer, rest: str) -> str:
    """Cuts off the call that some templates want before a result."""
    ends = [rest.find(name) for name in map(tokenizer.name_of, tokenizer.stop_ids)]
    found = [place for place in ends if place >= 0]
    return rest[min(found) :] if found else rest


def _read_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        return ToolCall("the call cannot be read: it needs a name and arguments", None)
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(f"the call of {name} cannot be read: its arguments are no object", None)
    return ToolCall(name, dict(arguments))
