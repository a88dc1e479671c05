"""Environments answer the policy between its turns, by TRL's contract.

    tools      typed functions with docstrings
    factory    a class without arguments: `reset(**row) -> str | None`, public methods that are tools, and
               optionally `get_reward() -> float` and `respond(messages) -> str | None`
    respond    a function of the messages so far, for turns without a call; None ends the response

An instance is a value: it is pickled after every call and loaded before the next, in any worker
(docs/environments.md). What it draws from Python's and NumPy's generators is a function of its problem and of
how often it was asked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
import random
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from tlt.base.io.plugins import describe, get_object
from tlt.base.io.secrets import hide
from tlt.base.io.text import one_line
from tlt.base.types import UserError
from tlt.base.value_types import shorten

NO_TOOLS = ("reset", "get_reward", "respond")
COLUMN = "environment"
"""Of a row: the name of its factory, where there are several."""
MAX_RESULT = 100_000
"""Characters of what an environment may say at once: beyond any window that it would not fill."""
MAX_STATE = 2**24
"""Bytes of a pickled environment, compressed."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class EnvironmentSpec:
    """Its values survive JSON. factories: by the name in a row's column `environment`; a single one's
    is ""."""

    tools: Sequence[str] = ()
    factories: Mapping[str, str] = field(default_factory=dict)
    respond: str = ""


class Ask(NamedTuple):
    """state: the environment before it, as "number of questions:pickle"; "": a new one, after `reset(**row)`.
    name, arguments: of a call.
    messages: the conversation, for `respond`.
    """

    kind: Literal["observe", "call", "respond", "reward"]
    row: dict[str, Any]
    state: str = ""
    name: str = ""
    arguments: Any = None
    messages: Sequence[Message] = ()


class Answer(NamedTuple):
    """text: what it says; None: nothing, which ends the response (`respond`) or adds nothing (`observe`).
    failure: why the environment itself cannot go on.
    """

    text: str | None
    state: str = ""
    is_error: bool = False
    is_late: bool = False
    reward: float | None = None
    failure: str = ""


class ToolError(Exception):
    """The text is for the policy."""


class Environments:
    """Raises UserError for code that is not found or of no use."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self.tools = dict(map(_tool, spec.tools))
        if len(self.tools) < len(spec.tools):
            raise UserError("environment.tools: names one tool twice; give each a name of its own")
        self.factories = {name: _factory(factory) for name, factory in spec.factories.items()}
        place = f"environment.respond {spec.respond!r}"
        self.respond = _callable(place, spec.respond) if spec.respond else None
        self._schemas: dict[str, list[dict[str, Any]]] = {}

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools of a row's environment. Raises UserError for a tool without types or docstring."""
        name = self.name_of(row)
        if name not in self._schemas:
            self._schemas[name] = self._describe(row)
        return self._schemas[name]

    def _describe(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        from transformers.utils import get_json_schema

        schemas = []
        for name, tool in self._tools_of(self._make(row)).items():
            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:  # transformers' own, of several kinds
                what = f"tool {name!r} cannot be described ({one_line(error, 200)})"
                raise UserError(f"environment: {what}; give it types and a docstring with Args") from None
        return schemas

    @staticmethod
    def refuse(ask: Ask, why: str) -> Answer:
        return Answer(None, ask.state, failure=f"{ask.kind}: {why}")

    @property
    def gives_reward(self) -> bool:
        return any(map(_gives_reward, self.factories.values()))

    def rewards(self, row: Mapping[str, Any]) -> bool:
        """Whether the row's environment gives a reward."""
        return _gives_reward(self.factories.get(self.name_of(row)))

    @property
    def speaks(self) -> bool:
        own = [callable(getattr(factory, "respond", None)) for factory in self.factories.values()]
        return self.respond is not None or any(own)

    def answer(self, ask: Ask) -> Answer:
        """The policy reads errors of a call; others are raised."""
        instance, observation = self._instance(ask)
        number = num_asked(ask.state) + 1
        if instance is not None:
            seed_generators(ask.row, number)
        match ask.kind:
            case "observe":
                dump(instance)  # it can be pickled
                return Answer(None if observation is None else _text(observation))
            case "reward":
                state = ask.state or write_state(number, instance)
                get_reward = getattr(instance, "get_reward", None)
                reward = None if get_reward is None else _number(_settle(get_reward()))
                return Answer(None, state, reward=reward)
            case "respond":
                return self._respond(instance, ask, number)
        try:
            said = _text(self._call(instance, ask.name, ask.arguments))
        except ToolError as error:
            return Answer(say_error(str(error)), write_state(number, instance), is_error=True)
        return Answer(said, write_state(number, instance))

    def _respond(self, instance: Any, ask: Ask, number: int) -> Answer:
        respond = getattr(instance, "respond", None) or self.respond
        if respond is None:
            return Answer(None, ask.state)
        said = _settle(respond([dict(message) for message in ask.messages]))
        return Answer(None if said is None else _text(said), write_state(number, instance))

    def _call(self, instance: Any, name: str, arguments: Any) -> Any:
        tools = self._tools_of(instance)
        if name not in tools:
            raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {name} are no object with names and values")
        try:
            inspect.signature(tools[name]).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"{name}: {error}") from None
        try:
            return _settle(tools[name](**arguments))
        except BaseException as error:  # the user's code; SystemExit and KeyboardInterrupt as well
            # neither the user's files nor this machine's paths: the same message everywhere
            raise ToolError(hide(one_line(error, 300))) from None

    def _instance(self, ask: Ask) -> tuple[Any, Any]:
        if ask.state:
            return read_instance(ask.state), None
        seed_generators(ask.row, 0)
        instance = self._make(ask.row)
        if instance is None:
            return None, None
        columns = dict(ask.row)
        if "" not in self.factories:
            del columns[COLUMN]
        if "in_thought" not in inspect.signature(instance.reset).parameters:
            columns.pop("in_thought", None)  # no column of the user's
        return instance, _settle(instance.reset(**columns))

    def _make(self, row: Mapping[str, Any]) -> Any:
        return self.factories[self.name_of(row)]() if self.factories else None

    def name_of(self, row: Mapping[str, Any]) -> str:
        if "" in self.factories or not self.factories:
            return ""
        name = row.get(COLUMN)
        if name not in self.factories:
            known = ", ".join(self.factories)
            raise UserError(
                f"problem {row.get('problem_id')!r}: its column {COLUMN} is {name!r}; give one of {known}"
            )
        return str(name)

    def _tools_of(self, instance: Any) -> dict[str, Callable[..., Any]]:
        methods = inspect.getmembers(type(instance), inspect.isfunction) if instance is not None else []
        own = [name for name, _ in methods if not name.startswith("_") and name not in NO_TOOLS]
        return {**self.tools, **{name: getattr(instance, name) for name in own}}


def say_error(what: str) -> str:
    return json.dumps({"error": what}, ensure_ascii=False)


def write_state(number: int, instance: Any) -> str:
    return "" if instance is None else f"{number}:{dump(instance)}"


def num_asked(state: str) -> int:
    return int(state.partition(":")[0]) if state else 0


def read_instance(state: str) -> Any:
    return load(state.partition(":")[2])


def seed_generators(row: Mapping[str, Any], number: int) -> None:
    """The same question to the same problem then draws the same in any worker."""
    seed = zlib.crc32(f"{row.get('problem_id')}/{number}".encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what the user's code draws from


def dump(instance: Any) -> str:
    """Raises UserError for an environment that cannot be pickled, or is too large."""
    if instance is None:
        return ""
    place, remedy = f"environment.factory: {type(instance).__name__}", "give its class __getstate__"
    try:
        state = zlib.compress(pickle.dumps(instance), 1)
    except Exception as error:  # of any kind: the user's own __getstate__ may raise
        raise UserError(f"{place} cannot be pickled ({describe(error)}); {remedy}") from None
    if len(state) > MAX_STATE:
        raise UserError(f"{place} has {len(state):,} bytes when pickled, more than {MAX_STATE:,}; {remedy}")
    return b64encode(state).decode()


def load(state: str) -> Any:
    return pickle.loads(zlib.decompress(b64decode(state)))


def _tool(spec: str) -> tuple[str, Callable[..., Any]]:
    tool = _callable(f"environment.tools {spec!r}", spec)
    return str(getattr(tool, "__name__", spec.rpartition(":")[2])), tool


def _factory(spec: str) -> Callable[[], Any]:
    place = f"environment.factory {spec!r}"
    factory = _callable(place, spec)
    if not callable(getattr(factory, "reset", None)):
        raise UserError(f"{place}: has no reset(**row); give the environment's class")
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}; it must be a class without arguments") from None
    return factory


def _callable(place: str, spec: str) -> Callable[..., Any]:
    found: Callable[..., Any] = get_object(place, spec)
    if not callable(found):
        raise UserError(f"{place}: is a {type(found).__name__}; give a function or a class")
    return found


def _settle(result: Any) -> Any:
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _text(said: Any) -> str:
    """As TRL, joins the texts of content blocks. Raises ToolError."""
    if (
        isinstance(said, list)
        and said
        and all(isinstance(block, Mapping) and "type" in block for block in said)
    ):
        if any(not isinstance(block.get("text"), str) for block in said):
            raise ToolError("the result holds other blocks than text, which this model does not read")
        said = "\n".join(block["text"] for block in said)
    try:
        text = (said if isinstance(said, str) else str(said)).encode(errors="replace").decode()
    except BaseException as error:  # the user's __str__
        raise ToolError(f"the result cannot be written as text ({type(error).__name__})") from None
    if len(text) > MAX_RESULT:
        raise ToolError(f"the result has {len(text):,} characters; at most {MAX_RESULT:,} can be read")
    return text


def _gives_reward(factory: Any) -> bool:
    return callable(getattr(factory, "get_reward", None))


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"get_reward() returned {shorten(value)}; it must be a finite number")
    return number
