"""Tasksets of verifiers (`verifiers.v1`, 0.4) as tasks: those of one turn of text, whose rewards read the
conversation alone.

    --task.name verifiers:my-taskset        as verifiers' own loader finds it: a package, or a module that lies here

A taskset that wants more (tools, a runtime or container, set-up, judges) is refused; nothing of it is left
out in silence.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from tlt.io.extras import how_to_install
from tlt.io.plugins import describe, see_working_directory
from tlt.tasks.splits import TEST_ONE_IN, check_split, split_of
from tlt.types import UserError

MAX_TRIES = 32
"""Times as many tasks as the problems of a split should take, after which an endless taskset seems to have
no more."""


def make_task(name: str) -> Verifiers:
    """Returns the task of the taskset called `name`. Raises UserError."""
    see_working_directory()
    try:
        from verifiers.v1.utils.loaders import taskset_class
    except ModuleNotFoundError as error:
        raise UserError(
            f"task verifiers:{name}: no module {error.name!r}; {how_to_install('verifiers')}"
        ) from None
    try:
        return Verifiers(name, taskset_class(name))
    except Exception as error:  # the taskset's own module is imported, and may raise anything
        raise UserError(
            f"task verifiers:{name}: cannot be loaded ({describe(error)}); install it, or correct it"
        ) from None


class Verifiers:
    """The problems of one taskset. A reward is the weighted sum of its reward functions."""

    def __init__(self, name: str, taskset_class: Any) -> None:
        self.name, self.taskset_class = name, taskset_class
        self.task_class = taskset_class.task_type()

    def problems(
        self, num: int, seed: int, split: str, solved_at: float = 1.0, **options: Any
    ) -> list[dict[str, Any]]:
        """Returns `num` problems, of a finite taskset in an order drawn by the seed. The prompt decides the
        split, for tasksets have none.

        solved_at: the least reward of a solved problem.
        options: those of the taskset's configuration.
        """
        wanted = check_split(f"verifiers:{self.name}", split)
        taskset = self._make(options)
        tasks = iter(taskset)
        if taskset.bounded:
            tasks = iter(random.Random(f"{self.name}/{seed}").sample(found := list(tasks), len(found)))
        else:
            tasks = itertools.islice(tasks, MAX_TRIES * TEST_ONE_IN * (num + 1))
        prompts = ((task, self._prompt(task)) for task in tasks)
        chosen = ((task, prompt) for task, prompt in prompts if split_of(str(prompt)) == wanted)
        problems = [
            {
                "problem_id": f"{self.name}-{task.data.idx}",
                **prompt,
                "solved_at": solved_at,
                "options": options,
                "data": task.data.model_dump(mode="json", exclude_unset=True),
            }
            for task, prompt in itertools.islice(chosen, num)
        ]
        if len(problems) < num:
            raise UserError(
                f"task verifiers:{self.name}: has {len(problems)} {split} problems; ask for no more"
            )
        return problems

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        """Scores the conversation of prompt and response by the taskset's reward functions."""
        import verifiers.v1 as vf
        from verifiers.v1.graph import MessageNode

        data = self.task_class.data_type().model_validate(problem["data"])
        task = self.task_class(data, self._make(problem["options"]).config.task)
        messages = problem.get("messages") or [{"role": "user", "content": problem["prompt"]}]
        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        said = [kinds[message["role"]](content=message["content"]) for message in messages]
        nodes = [MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(said)]
        nodes.append(
            MessageNode(
                parent=len(said) - 1, message=vf.AssistantMessage(content=response_text), sampled=True
            )
        )
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        asyncio.run(task.score(trace))
        return {"reward": trace.reward, "solved": trace.reward >= problem["solved_at"]}

    def _make(self, options: Mapping[str, Any]) -> Any:
        """Returns the taskset. Raises UserError for options that it refuses, and where it is more than a
        conversation."""
        from pydantic import ValidationError
        from verifiers.v1 import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type

        kind = concrete_type(self.taskset_class, TasksetConfig) or TasksetConfig
        try:
            config = kind.model_validate({"id": self.name, **options})
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
        """Yields what the taskset wants beyond a conversation of one turn."""
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
        functions = [function for _, function in inspect.getmembers(self.task_class, callable)]
        for function in functions:
            if (
                getattr(function, "reward", False) is True
                and "runtime" in inspect.signature(function).parameters
            ):
                yield f"a runtime in {function.__name__}()"

    def _prompt(self, task: Any) -> dict[str, Any]:
        """Returns the prompt as text, or as messages where it has a system message or several."""
        data = task.data
        place = f"task verifiers:{self.name}, task {data.idx}"
        if data.prompt is None:
            raise UserError(
                f"{place}: has no prompt, for a simulated user opens the conversation; take another taskset"
            )
        if isinstance(data.prompt, str) and data.system_prompt is None:
            return {"prompt": data.prompt}
        messages = (
            [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
        )
        rest = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        for message in rest:
            said = (
                message if isinstance(message, dict) else {"role": message.role, "content": message.content}
            )
            if not isinstance(said["content"], str) or said["role"] not in ("system", "user", "assistant"):
                raise UserError(f"{place}: a message of {said['role']} is no text; take another taskset")
            messages.append(said)
        return {"messages": messages}
