"""As much of verifiers 0.4 as the tests of its adapter need, in one module that all its names lead to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel

_NAMES = (
    "agent",
    "configs.agent",
    "episode",
    "graph",
    "state",
    "utils.decorators",
    "utils.generic",
    "utils.loaders",
)
for _name in (*_NAMES, "configs", "utils"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]

D = TypeVar("D")
C = TypeVar("C")
AgentInfo = TraceTask = EnvInfo = Episode = SimpleNamespace


class State(BaseModel): ...


class TaskData(BaseModel):
    idx: int | None = None
    prompt: str | None = None
    system_prompt: str | None = None


class TaskConfig(BaseModel):
    judges: list[Any] = []


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class AgentConfig(BaseModel):
    harness: Any = None


class EnvConfig(BaseModel):
    taskset: Any = None
    env_id: str = ""


@dataclass
class UserMessage:
    content: str


class SystemMessage(UserMessage): ...


class AssistantMessage(UserMessage): ...


@dataclass
class MessageNode:
    parent: int | None
    message: UserMessage
    sampled: bool


@dataclass
class Segment:
    messages: Sequence[UserMessage]
    terminated: bool = False

    @property
    def last_reply(self) -> str:
        return self.messages[-1].content.strip() if self.messages else ""


@dataclass
class Trace:
    task: Any
    agent: Any
    state: State
    nodes: list[MessageNode] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def assistant_messages(self) -> list[UserMessage]:
        return [node.message for node in self.nodes if node.sampled]

    @property
    def num_turns(self) -> int:
        return len(self.assistant_messages)

    @property
    def last_reply(self) -> str:
        return Segment(self.assistant_messages).last_reply

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = weight * value

    def stop(self, condition: str) -> None: ...


def reward(weight: float) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.reward, function.weight = True, weight
        return function

    return mark


def stop(function: Any) -> Any:
    function.stop = True
    return function


def discover_decorated(found: Any, kind: str) -> list[Any]:
    return [getattr(found, name) for name, one in vars(type(found)).items() if hasattr(one, kind)]


class Task(Generic[D]):
    NEEDS_CONTAINER = False

    def __init__(self, data: Any, config: Any) -> None:
        self.data, self.config = data, config
        self.key = self.hash = data.model_dump_json()

    async def setup(self) -> None: ...

    async def finalize(self) -> None: ...

    async def score(self, trace: Trace) -> None:
        for function in self.hooks("reward"):
            trace.record_reward(function.__name__, await function(trace), function.weight)

    def hooks(self, kind: str) -> list[Any]:
        return discover_decorated(self, kind)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    @classmethod
    def data_type(cls) -> Any:
        return concrete_type(cls, TaskData)


class Taskset(Generic[D, C]):
    bounded = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def __iter__(self) -> Iterator[Any]:
        for idx, task in enumerate(self.load()):
            yield type(task)(task.data.model_copy(update={"idx": idx}), task.config)

    def load(self) -> Any: ...

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    @classmethod
    def task_type(cls) -> Any:
        return concrete_type(cls, Task)


class Env(Generic[C]):
    def __init__(self, config: Any) -> None:
        self.config = config

    async def setup(self, agents: Any) -> None: ...


def concrete_type(found: Any, kind: type) -> Any:
    arguments = [one for base in found.__orig_bases__ for one in get_args(base)]
    return next(one for one in arguments if isinstance(one, type) and issubclass(one, kind))


def state_cls(found: Any) -> type[State]:
    return State


def agent_config_fields(config: Any) -> dict[str, AgentConfig]:
    return {name: value for name, value in vars(config).items() if isinstance(value, AgentConfig)}


def _exported(name: str, kind: type) -> Any:
    module = import_module(name.replace("-", "_"))
    return next(one for one in (getattr(module, n) for n in module.__all__) if issubclass(one, kind))


def taskset_class(name: str) -> Any:
    return _exported(name, Taskset)


def environment_class(name: str) -> Any:
    return _exported(name, Env)


def env_config_type(name: str) -> Any:
    return concrete_type(environment_class(name), EnvConfig)
