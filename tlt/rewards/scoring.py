"""The score of one response: its task's own, the weighted sum of reward functions, or both. Knows no
processes (rewards.py).

A reward function is called as TRL calls it (1.16, `GRPOTrainer._calculate_rewards`), with a batch of one
response:

    f(prompts=[p], completions=[c], completion_ids=[[…]], **columns, trainer_state=…, log_metric=…, …) -> [float | None]

Tasks and reward functions are the user's code: whatever they raise becomes the error of this one response.

This file runs in reward workers: it imports nothing heavy.
"""

from __future__ import annotations

import inspect
import json
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tlt.io.plugins import describe, get_object
from tlt.io.text import visible
from tlt.tasks.base import Task, get_task, warm_up
from tlt.types import Reward, UserError

if TYPE_CHECKING:
    import asyncio

OWN_SCORE = "task"
"""The name by which a task's own score stands among the reward functions."""

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
"""Where a problem has its prompt; the first that there is becomes the argument `prompts`."""

NOT_COLUMNS = (*PROMPT_KEYS, "completion", "completion_ids")


@dataclass(frozen=True)
class RewardSpec:
    """Says what responses are scored by; processes hand it on as JSON.

    task: a registered task, or "package.module:object".
    functions: reward functions as "package.module:object", "task" among them for the task's own score. Empty:
        that alone.
    weights: one for each function; empty: 1 each.
    solved_at: where the task's own score is not among the functions, a response is solved from this reward
        on.
    options: the task's, for those that have something to get ready.
    """

    task: str
    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    solved_at: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RewardSpec:
        values = json.loads(text)
        return RewardSpec(
            **{**values, "functions": tuple(values["functions"]), "weights": tuple(values["weights"])}
        )


@dataclass(frozen=True)
class Response:
    """A response to score. step: updates behind the policy that wrote it."""

    problem: dict[str, Any]
    text: str
    token_ids: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True)
class TrainerState:
    """The part of transformers' TrainerState that a reward function gets here."""

    global_step: int


@dataclass(frozen=True)
class RewardFunction:
    """A user's reward function with its weight. name: in metrics.jsonl."""

    name: str
    spec: str
    weight: float
    call: Callable[..., Any] = field(repr=False)

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the offered arguments that the function takes: all where it has **kwargs, as
        TRL asks for."""
        parameters = inspect.signature(self.call).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(offered)
        return {name: offered[name] for name in parameters if name in offered}

    def check(self, offered: Mapping[str, Any]) -> None:
        """Raises UserError where the function wants an argument that there is not."""
        try:
            inspect.signature(self.call).bind(**self.arguments(offered))
        except TypeError as error:
            columns = ", ".join(name for name in offered)
            raise UserError(
                f"rewards.functions: {self.spec}: {error}; the problems offer {columns}"
            ) from None


class Failure(Exception):
    """Says why a response has no score."""


class Scorer:
    """Scores responses as its spec says. Raises UserError where that names what is not there.

    Coroutines of reward functions run in one event loop, which lives as long as the scorer: clients may
    keep connections.
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
        """Raises UserError where a reward function wants what a problem such as this does not have."""
        offered = _offer(Response(dict(problem), ""), {})
        for function in self.functions:
            function.check(offered)

    def score(self, response: Response) -> Reward:
        """Returns the reward, or the reason why there is none."""
        label = response.problem.get("task")
        task = label if isinstance(label, str) else ""
        try:
            if not self.spec.functions:
                value, is_solved = score_by_task(self.task, response)
                return Reward(value, is_solved, task=task)
            return self._score_by_functions(response, task)
        except Failure as failure:
            return Reward(0.0, False, str(failure), task=task)
        except KeyboardInterrupt:  # Ctrl-C, unless this is a worker, which sees to it
            raise
        except (
            BaseException
        ) as error:  # the user's code may raise anything, also when what it returned is looked at
            return Reward(0.0, False, describe(error), task=task)

    def warm_up(self) -> None:
        """Does now what the first score would wait for."""
        warm_up(self.task, self.spec.options)

    def close(self) -> None:
        """Ends the event loop, if there is one."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _score_by_functions(self, response: Response, task: str) -> Reward:
        metrics: dict[str, float] = {}
        parts = self._call_functions(_offer(response, metrics))
        total = sum(f.weight * parts[f.name] for f in self.functions if f.name in parts)
        is_solved = None
        if self.own_weight is not None:
            parts[OWN_SCORE], is_solved = score_by_task(self.task, response)
            total += self.own_weight * parts[OWN_SCORE]
        if not parts:
            raise Failure("not applicable: every reward function returned None")
        total = _to_number(total, "the weighted sum: ")
        return Reward(
            total, total >= self.spec.solved_at if is_solved is None else is_solved, "", parts, metrics, task
        )

    def _call_functions(self, offered: Mapping[str, Any]) -> dict[str, float]:
        """Returns function → reward, without those that say None. Coroutines run side by side."""
        results = [_attempt(function, offered) for function in self.functions]
        awaited = iter(self._await([result for result in results if inspect.isawaitable(result)]))
        parts = {}
        for function, result in zip(self.functions, results, strict=True):
            result = next(awaited) if inspect.isawaitable(result) else result
            if isinstance(result, BaseException):
                raise Failure(f"{function.name}: {describe(result)}")
            try:
                (reward,) = result
            except (TypeError, ValueError):
                place = f"{function.name}: returned {_shorten(result)}"
                raise Failure(f"{place}; it must be a list with one reward a completion") from None
            if reward is not None:
                parts[function.name] = _to_number(reward, f"{function.name}: ")
        return parts

    def _await(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """Returns what they give, or raise."""
        if not awaitables:
            return []
        import asyncio  # here alone: most workers have no coroutine, and start a third faster

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_gather(awaitables), self._loop).result()


def score_by_task(task: Task, response: Response) -> tuple[float, bool]:
    """Returns (reward, solved) of the task's own score. Raises Failure."""
    try:
        result = task.score(response.problem, response.text)
    except (Exception, SystemExit) as error:
        raise Failure(describe(error)) from None
    if not isinstance(result, Mapping) or not {"reward", "solved"} <= set(result):
        raise Failure(
            f'score() returned {_shorten(result)}; it must be {{"reward": a number, "solved": whether it is right}}'
        )
    if isinstance(result["solved"], str):
        raise Failure(f"solved is {_shorten(result['solved'])}; it must be True or False")
    return _to_number(result["reward"]), bool(result["solved"])


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the reward function "package.module:object". Raises UserError."""
    function: Callable[..., Any] = get_object(f"reward function {spec!r}", spec)
    if not callable(function):
        raise UserError(f"reward function {spec!r} is a {type(function).__name__}; give a function")
    return function


def _offer(response: Response, metrics: dict[str, float]) -> dict[str, Any]:
    """Returns all arguments that there are. `log_metric` writes into `metrics`; `log_extra` into nothing,
    as no table of completions is kept."""
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
        "log_metric": lambda name, value: metrics.__setitem__(visible(str(name)), float(value)),
        "log_extra": lambda column, values: None,
    }


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
    """Returns function → the object's name, with its module where two are called alike."""
    short = {function: function.rpartition(":")[2] for function in functions}
    counts = Counter([OWN_SCORE, *short.values()])
    return {function: name if counts[name] == 1 else function for function, name in short.items()}


def _to_number(value: Any, place: str = "") -> float:
    """Returns a finite number; text is none, even where Python could read it. Raises Failure."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Failure(f"{place}the reward is {_shorten(value)}; it must be a finite number")
    return number


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:79] + "…"
