"""Tasksets of verifiers (`verifiers.v1`, 0.4) as tasks of one turn (docs/tasks.md). Those of several turns
need their environment, too (environments/verifiers.py)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.io.plugins import describe, see
from tlt.base.types import UserError
from tlt.tasks.drawing import draw_alike
from tlt.tasks.splits import TEST_ONE_IN, Split, check_split, split_of

_PATIENCE = 32
"""An endless taskset is read for this many times the expected number of tasks."""


class Verifiers:
    """Raises UserError."""

    def __init__(self, name: str) -> None:
        is_file = name.endswith(".py")
        see(Path(name).parent.absolute() if is_file else Path.cwd())
        self.name = name
        self.id = Path(name).stem if is_file else name  # verifiers' own
        try:
            from verifiers.v1.utils.loaders import taskset_class
        except ModuleNotFoundError as error:
            raise UserError(
                f"task verifiers:{name}: no module {error.name!r}; {how_to_install('verifiers')}"
            ) from None
        try:
            self.taskset_class = taskset_class(self.id)
            self.task_class = self.taskset_class.task_type()
        except Exception as error:  # the taskset's own module is imported, and may raise anything
            raise UserError(
                f"task verifiers:{name}: cannot be loaded ({describe(error)}); install it, or correct it"
            ) from None

    def problems(
        self, num: int, seed: int, split: str, solved_at: float = 1.0, **options: Any
    ) -> list[dict[str, Any]]:
        """The seed orders a finite taskset; the split follows from the prompt.

        solved_at   the least reward of a solved problem
        options     the taskset's
        """
        wanted = check_split(f"verifiers:{self.name}", split)
        place, function = f"task verifiers:{self.name}", f"{__name__}:_draw"
        drawn: list[dict[str, Any]] = draw_alike(
            place, function, self.name, num, seed, wanted, solved_at, options
        )
        return drawn

    def draw_here(
        self, num: int, seed: int, split: Split, solved_at: float, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        taskset = self._make(options)
        tasks = iter(taskset)
        if taskset.bounded:
            tasks = iter(random.Random(f"{self.id}/{seed}").sample(found := list(tasks), len(found)))
        else:
            tasks = itertools.islice(tasks, _PATIENCE * TEST_ONE_IN * (num + 1))
        prompts = ((task, self._prompt(task)) for task in map(partial(self._check, taskset), tasks))
        asked = ((task, prompt, prompt or task.data.model_dump(exclude={"idx"})) for task, prompt in prompts)
        chosen = ((task, prompt) for task, prompt, known in asked if split_of(str(known)) == split)
        problems = [
            {
                "problem_id": f"{self.id}-{task.data.idx}",
                **prompt,
                "solved_at": solved_at,
                "taskset": self.name,
                "options": options,
                "data": task.data.model_dump(mode="json", exclude_none=True),
            }
            for task, prompt in itertools.islice(chosen, num)
        ]
        if len(problems) < num:
            raise UserError(
                f"task verifiers:{self.name}: has {len(problems)} {split} problems; ask for no more"
            )
        return problems

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        import verifiers.v1 as vf

        task = self.task_of(problem["data"], problem["options"])
        trace = begin_trace(task)
        make_nodes(trace, [vf.AssistantMessage(content=response_text)], sampled=True)
        trace.is_completed = trace.ok = True
        asyncio.run(task.score(trace))
        return {"reward": trace.reward, "solved": trace.reward >= problem["solved_at"]}

    def task_of(self, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        read = self.task_class.data_type().model_validate(data)
        return self.task_class(read, self._make(options).config.task)

    def _make(self, options: Mapping[str, Any]) -> Any:
        from pydantic import ValidationError
        from verifiers.v1 import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type

        kind = concrete_type(self.taskset_class, TasksetConfig) or TasksetConfig
        try:
            config = kind.model_validate({"id": self.id, **options})
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise UserError(
                f"task verifiers:{self.name}: option {key}: {fault['msg']}; correct it, or remove it"
            ) from None
        if needs := ", ".join(self._needs(config)):
            raise UserError(
                f"task verifiers:{self.name}: needs {needs}, which TLT does not have; take another taskset"
            )
        return self.taskset_class(config)

    def _needs(self, config: Any) -> Iterator[str]:
        from verifiers.v1 import Task

        if self.taskset_class.toolsets(config) or self.task_class.toolsets(config.task):
            yield "tools"
        if self.task_class.NEEDS_CONTAINER:
            yield "a container"
        if config.task.judges:
            yield "judges"
        for hook in ("setup", "finalize"):
            if getattr(self.task_class, hook) is not getattr(Task, hook):
                yield f"{hook}()"
        for function in self._rewards(config):
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                yield f"a runtime in {function.__name__}()"

    def _rewards(self, config: Any) -> list[Any]:
        task = object.__new__(self.task_class)  # what it rewards does not depend on its data
        task.config = config.task
        try:
            return list(task.hooks("reward"))
        except Exception as error:  # the user's modules are imported, and may raise anything
            raise UserError(
                f"task verifiers:{self.name}: option task.rewards: cannot be loaded ({describe(error)}); "
                "correct it"
            ) from None

    def _check(self, taskset: Any, task: Any) -> Any:
        of_other_kind = type(task) is not self.task_class
        if of_other_kind or task.config != taskset.config.task:
            what = f"is a {type(task).__name__}" if of_other_kind else "has a configuration of its own"
            remedy = f"give all tasks as {self.task_class.__name__}(data, self.config.task)"
            raise UserError(f"task verifiers:{self.name}, task {task.data.idx}: {what}; {remedy}")
        return task

    def _prompt(self, task: Any) -> dict[str, Any]:
        """Empty where the environment opens the conversation."""
        data = task.data
        if data.prompt is None and data.system_prompt is None:
            return {}
        if isinstance(data.prompt, str) and data.system_prompt is None:
            return {"prompt": data.prompt}
        messages = messages_of(data)
        if data.prompt is None:  # what the environment says joins the last message
            messages.append({"role": "user", "content": ""})
        for message in messages:
            role = message["role"]
            if not isinstance(message["content"], str) or role not in ("system", "user", "assistant"):
                place = f"task verifiers:{self.name}, task {data.idx}"
                raise UserError(f"{place}: a message of {role} is no text; take another taskset")
        return {"messages": messages}


def messages_of(data: Any) -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    given = [m if isinstance(m, dict) else {"role": m.role, "content": m.content} for m in prompt]
    return [*system, *given]


def begin_trace(task: Any) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=state_cls(type(task))(),
    )
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    make_nodes(trace, [kinds[one["role"]](content=one["content"]) for one in messages_of(task.data)])
    return trace


def make_nodes(trace: Any, messages: Sequence[Any], sampled: bool = False) -> None:
    """sampled: by the policy."""
    from verifiers.v1.graph import MessageNode

    for message in messages:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


def _draw(name: str, *arguments: Any) -> list[dict[str, Any]]:
    return Verifiers(name).draw_here(*arguments)
