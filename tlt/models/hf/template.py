"""A chat template as a function of messages, variables and a date. It runs in a process of its own
(limited.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any, NoReturn

from tlt.base.io.text import one_line

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]

GIVEN = frozenset({"messages", "add_generation_prompt", "strftime_now"})
"""Variables set by the caller of `render`."""
DATE_FUNCTION = "strftime_now"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's thought, the usual one first."""


class TemplateRefusal(Exception):
    """Says why a chat template cannot be read, or refuses messages."""


@dataclass(frozen=True)
class ChatTemplate:
    """special: special tokens by name, such as bos_token."""

    text: str
    special: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> frozenset[str]:
        return find_variables(self.text)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        day: date | None = None,
        *,
        opens_turn: bool = True,
    ) -> str:
        """Raises TemplateRefusal if the template raises anything.

        day: see `Chat`.
        opens_turn: transformers' add_generation_prompt.
        """
        now = datetime.now() if day is None else datetime.combine(day, time())
        given = {
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": opens_turn,
            DATE_FUNCTION: now.strftime,
        }
        absent = {"tools": None, "documents": None}
        with _refusals():
            return _compiled(self.text).render(absent | dict(self.special) | dict(variables) | given)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except MemoryError:  # limited.py reports it
        raise
    except Exception as error:
        raise TemplateRefusal(one_line(error, 160)) from None


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@functools.lru_cache(maxsize=16)
def find_variables(text: str) -> frozenset[str]:
    """Names that the template reads but does not set, and those that it sets after asking `is defined`.
    Raises TemplateRefusal."""
    from jinja2 import meta, nodes

    with _refusals():
        tree = _environment().parse(text)
        tested = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
        stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        return frozenset(meta.find_undeclared_variables(tree) - (stored - tested))


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """A sandbox: templates come from the hub."""
    from jinja2 import ext, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} marks the assistant's tokens for trainers; here its contents stay."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {"raise_exception": refuse}
    environment.globals |= functions
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_reasoning(message: Message) -> Message:
    """Templates read the thought under either of two names."""
    thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
