"""A chat template as a function of messages, variables and a date. It renders what transformers renders, but
for the date, which here is an argument. What reads or renders a template runs in a process of its own
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
"""Variables of a template that the caller of `render` sets."""
DATE_FUNCTION = "strftime_now"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thought, the usual one first."""


class TemplateRefusal(Exception):
    """A chat template cannot be read, or refuses messages. The text says why, in one line."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template.

    special: its special tokens by name, such as bos_token.
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set itself, unless it first asks whether they are."""
        return find_variables(self.text)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        day: date | None = None,
        *,
        opens_turn: bool = True,
    ) -> str:
        """Returns the text of messages. Raises TemplateRefusal where the template raises anything.

        day: the date that the template writes; None: today.
        opens_turn: whether the assistant's turn is opened at the end (add_generation_prompt).
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
    """Raises TemplateRefusal for all that jinja2, or a template's own expressions, raise."""
    try:
        yield
    except MemoryError:  # limited.py tells the limit
        raise
    except Exception as error:
        raise TemplateRefusal(one_line(error, 160)) from None


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@functools.lru_cache(maxsize=16)
def find_variables(text: str) -> frozenset[str]:
    """Returns the `ChatTemplate.variables` of a template. Raises TemplateRefusal for one that cannot be
    read."""
    from jinja2 import meta, nodes

    with _refusals():
        tree = _environment().parse(text)
        tested = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
        stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        return frozenset(meta.find_undeclared_variables(tree) - (stored - tested))


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Returns the environment for templates, which come from the hub: a sandbox."""
    from jinja2 import ext, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The block {% generation %}, by which trainers find the assistant's tokens; here its contents."""

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
    """jinja2's own filter escapes what HTML reads."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_reasoning(message: Message) -> Message:
    """Returns the message with its thought under the two names that templates read."""
    thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
