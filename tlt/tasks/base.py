"""What a task is, and how to find one by name. Knows no model: tasks also run in reward worker processes."""

import importlib
from typing import Any, Protocol, runtime_checkable

#: The tasks that come with TLT, as "module:object".
BUILTIN = {"countdown": "tlt.tasks.countdown:TASK"}


@runtime_checkable
class Task(Protocol):
    """Prompts, and a reward for every response."""

    def problems(self, num: int, seed: int, **options: Any) -> list[dict[str, Any]]:
        """`num` problems, each with `problem_id` (unique among them), `prompt` and whatever scoring needs.

        Equal arguments give equal problems. Values survive JSON.
        """
        ...

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        """At least {"reward": float, "solved": bool}. The text is the response alone, without special tokens."""
        ...


def get_task(name: str) -> Task:
    """The task called `name`, or the user's own given as "package.module:object"."""
    path = BUILTIN.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"unknown task {name!r}: use one of {sorted(BUILTIN)} or your own as 'package.module:object'")
    try:
        task: object = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"task {name!r} cannot be loaded ({error}): check its name and PYTHONPATH") from error
    if not isinstance(task, Task):
        raise ValueError(f"task {name!r} is a {type(task).__name__} without problems() and score(): give a Task")
    return task
