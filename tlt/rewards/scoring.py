"""The score of one response: its task's own, the weighted sum of reward functions, or both.

A reward function is called as TRL calls it (1.16, `GRPOTrainer._calculate_rewards`), with a batch of one
response:

    f(prompts=[p], completions=[c], completion_ids=[[…]], **columns, trainer_state=…, log_metric=…, …) ->
    [float | None]

Tasks and reward functions are the user's code: an exception becomes the error of this one response.

This file runs in reward workers: it imports nothing heavy.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tlt.io.plugins import describe, get_object
from tlt.io.secrets import hide
from tlt.io.text import visible
from tlt.tasks.base import Task, get_task, warm_up
from tlt.types import Reward, UserError

if TYPE_CHECKING:
    import asyncio

OWN_SCORE = "task"
"""The name of a task's own score among the reward functions."""

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
"""A problem's columns for its prompt; the first that it has becomes the argument `prompts`."""

NOT_COLUMNS = (*PROMPT_KEYS, "completion", "completion_ids")

MAX_METRICS, MAX_NAME = 100, 100
"""Names that `log_metric` may have for a response, and of a step in the records; characters of a name."""


@dataclass(frozen=True)
class RewardSpec:
    """The rule by which responses are scored; its values survive JSON."""

    task: str
    """A task that comes with TLT, or the user's own (`tlt.io.plugins`)."""
    functions: Sequence[str] = ()
    """The user's functions (`tlt.io.plugins`), and "task" for the task's own score. Empty: that alone."""
    weights: Sequence[float] = ()
    """One for each function; empty: 1 each."""
    solved_at: float = 1.0
    """The least reward of a solved response, where the task's own score is not among the functions."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's, for its warm-up."""


@dataclass(frozen=True)
class Completion:
    """A response to score."""

    problem: dict[str, Any]
    text: str
    token_ids: tuple[int, ...] = ()
    step: int = 0
    """Updates behind the policy that wrote it."""


@dataclass(frozen=True)
class TrainerState:
    """The part of transformers' TrainerState that a reward function is given."""

    global_step: int


@dataclass(frozen=True)
class RewardFunction:
    """A user's reward function with its weight."""

    name: str
    """As in metrics.jsonl."""
    spec: str
    """As in rewards.functions."""
    weight: float
    call: Callable[..., Any] = field(repr=False)

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the offered arguments that the function takes; all of them where it has **kwargs."""
        parameters = inspect.signature(self.call).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(offered)
        return {name: offered[name] for name in parameters if name in offered}

    def check(self, offered: Mapping[str, Any]) -> None:
        """Raises UserError where the function needs an argument that is not offered."""
        try:
            inspect.signature(self.call).bind(**self.arguments(offered))
        except TypeError as error:
            columns = ", ".join(offered)
            raise UserError(
                f"rewards.functions: {self.spec}: {error}; the problems offer {columns}"
            ) from None


class Unscorable(Exception):
    """A response has no score; the text says why."""


class Scorer:
    """Scores responses by the rule of `spec`. Raises UserError for an unknown task or function.

    Coroutines of reward functions run in one event loop, which lives as long as the scorer, so that clients
    keep their connections.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        self.task = get_task(spec.task)
        weights = dict(zip(spec.functions, spec.weights or (1.0,) * len(spec.functions), strict=True))
        self.own_weight = weights.pop(OWN_SCORE, None)
        names = _short_names(weights)
        self.functions = tuple(
            RewardFunction(names[function], function, weight, load_function(function))
            for function, weight in weights.items()
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, problem: Mapping[str, Any]) -> None:
        """Raises UserError where a reward function needs an argument that such a problem does not offer."""
        offered = _offer(Completion(dict(problem), ""), {})
        for function in self.functions:
            function.check(offered)

    def score(self, response: Completion) -> Reward:
        """Returns the reward, with an error where there is none."""
        label = response.problem.get("task")
        task = label if isinstance(label, str) else ""
        try:
            if not self.spec.functions:
                value, is_solved = score_by_task(self.task, response)
                return Reward(value, is_solved, task=task)
            return self._score_by_functions(response, task)
        except Unscorable as error:
            return Reward(0.0, False, hide(str(error)), task=task)
        except KeyboardInterrupt:  # Ctrl-C; a worker handles it itself
            raise
        except BaseException as error:  # from the user's code, or from a value that it returned
            return Reward(0.0, False, describe(error), task=task)

    def warm_up(self) -> None:
        """Has the task get ready to score."""
        warm_up(self.task, self.spec.options)

    def close(self) -> None:
        """Ends the event loop, if there is one."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _score_by_functions(self, response: Completion, task: str) -> Reward:
        metrics: dict[str, float] = {}
        parts = self._call_functions(_offer(response, metrics))
        total = sum(f.weight * parts[f.name] for f in self.functions if f.name in parts)
        is_solved = None
        if self.own_weight is not None:
            parts[OWN_SCORE], is_solved = score_by_task(self.task, response)
            total += self.own_weight * parts[OWN_SCORE]
        if not parts:
            raise Unscorable("not applicable: every reward function returned None")
        total = _to_number(total, "the weighted sum: ")
        if is_solved is None:
            is_solved = total >= self.spec.solved_at
        return Reward(total, is_solved, "", parts, metrics, task)

    def _call_functions(self, offered: Mapping[str, Any]) -> dict[str, float]:
        """Returns function → reward, without functions that return None. Coroutines run side by side."""
        results = [_attempt(function, offered) for function in self.functions]
        awaited = iter(self._await([result for result in results if inspect.isawaitable(result)]))
        parts = {}
        for function, result in zip(self.functions, results, strict=True):
            result = next(awaited) if inspect.isawaitable(result) else result
            if isinstance(result, BaseException):
                raise Unscorable(f"{function.name}: {describe(result)}")
            try:
                (reward,) = result
            except (TypeError, ValueError):
                place = f"{function.name}: returned {_shorten(result)}"
                raise Unscorable(f"{place}; it must be a list with one reward a completion") from None
            if reward is not None:
                parts[function.name] = _to_number(reward, f"{function.name}: ")
        return parts

    def _await(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """Returns their results and exceptions."""
        if not awaitables:
            return []
        import asyncio  # only here: without it a worker starts a third faster

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_gather(awaitables), self._loop).result()


def score_by_task(task: Task, response: Completion) -> tuple[float, bool]:
    """Returns (reward, solved) of the task's own score. Raises Unscorable."""
    try:
        result = task.score(response.problem, response.text)
    except (Exception, SystemExit) as error:
        raise Unscorable(describe(error)) from None
    if not isinstance(result, Mapping) or not {"reward", "solved"} <= set(result):
        form = '{"reward": a number, "solved": whether it is right}'
        raise Unscorable(f"score() returned {_shorten(result)}; it must be {form}")
    if isinstance(result["solved"], str):
        raise Unscorable(f"solved is {_shorten(result['solved'])}; it must be True or False")
    return _to_number(result["reward"]), bool(result["solved"])


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the reward function of that name (`tlt.io.plugins`). Raises UserError."""
    function: Callable[..., Any] = get_object(f"reward function {spec!r}", spec)
    if not callable(function):
        raise UserError(f"reward function {spec!r} is a {type(function).__name__}; give a function")
    return function


def _offer(response: Completion, metrics: dict[str, float]) -> dict[str, Any]:
    """Returns all arguments that a reward function may take. `log_metric` writes into `metrics`; `log_extra`
    does nothing, as no table of completions is kept."""
    problem = response.problem
    prompt = next((problem[key] for key in PROMPT_KEYS if problem.get(key) is not None), None)
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    completion: Any = [{"role": "assistant", "content": response.text}] if is_chat else response.text
    return {
        **{key: [value] for key, value in problem.items() if key not in NOT_COLUMNS},
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [list(response.token_ids)],
        "trainer_state": TrainerState(response.step),
        "log_metric": lambda name, value: _log_metric(metrics, name, value),
        "log_extra": lambda column, values: None,
    }


def _log_metric(metrics: dict[str, float], name: Any, value: Any) -> None:
    """Keeps a figure of one response. Its name goes into the run's records, so it is short and without
    credentials. Raises ValueError for more names than a response may have."""
    text = hide(" ".join(visible(str(name)).split()))
    text = text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
    if text not in metrics and len(metrics) == MAX_METRICS:
        raise ValueError(
            f"log_metric: {text!r} is one name too many; log at most {MAX_METRICS} for a response"
        )
    metrics[text] = float(value)


def _attempt(function: RewardFunction, offered: Mapping[str, Any]) -> Any:
    try:
        return function.call(**function.arguments(offered))
    except (Exception, SystemExit) as error:
        return error


async def _gather(awaitables: list[Awaitable[Any]]) -> list[Any]:
    import asyncio

    async def settle(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except BaseException as error:  # a SystemExit would end the loop
            return error

    return await asyncio.gather(*map(settle, awaitables))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _short_names(functions: Iterable[str]) -> dict[str, str]:
    """Returns function → the object's name; with its module where two names are equal."""
    short = {function: function.rpartition(":")[2] for function in functions}
    counts = Counter([OWN_SCORE, *short.values()])
    return {function: name if counts[name] == 1 else function for function, name in short.items()}


def _to_number(value: Any, place: str = "") -> float:
    """Returns a finite number; text is none. Raises Unscorable."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Unscorable(f"{place}the reward is {_shorten(value)}; it must be a finite number")
    return number


def _shorten(value: Any) -> str:
    text = " ".join(hide(repr(value)).split())
    return text if len(text) <= 80 else text[:79] + "…"
