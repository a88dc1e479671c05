"""The score of a response: its task's own, the weighted sum of reward functions, or both.

A task scores each response alone, a reward function a group, called as by TRL (1.16,
`GRPOTrainer._calculate_rewards`):

    f(prompts=[p, p], completions=[c, d], completion_ids=[[…], […]], **columns, trainer_state=…, …) ->
    [float | None, float | None]

A function with the parameter `environments` gets the instances, too, as each response left them. An exception
becomes the error of the call's responses.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt.base.io.plugins import describe, get_object
from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.types import Reward, Turns, UserError
from tlt.tasks.base import Task, get_task, warm_up

if TYPE_CHECKING:
    import asyncio

OWN_SCORE = "task"
OF_ENVIRONMENT = "environment"

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
"""The first key that a problem has becomes the argument `prompts`."""

NOT_COLUMNS = (*PROMPT_KEYS, "completion", "completion_ids")

MAX_METRICS, MAX_NAME = 100, 100
"""Names of `log_metric` in a group, and in a step's record; characters of a name."""


@dataclass(frozen=True)
class RewardSpec:
    """Its values survive JSON."""

    task: str
    """Name of a task of TLT, or of the user's code (`tlt.base.io.plugins`)."""
    functions: Sequence[str] = ()
    """The user's reward functions, and "task" for the task's own score; empty: the task's own score alone."""
    weights: Sequence[float] = ()
    """Empty: 1 for each function."""
    solved_at: float = 1.0
    """Least reward of a solved response where the task's own score does not count."""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: bool = False
    """Whether environments give rewards: alone, or beside the functions, with weight 1."""
    factories: Sequence[str] = ()
    """Of the environments that functions get."""


@dataclass(frozen=True)
class Completion:
    problem: dict[str, Any]
    text: str
    token_ids: tuple[int, ...] = ()
    step: int = 0
    """Updates behind the policy that wrote it."""
    turns: Turns | None = None
    """Those before it, `text` being the last."""


class Call(NamedTuple):
    responses: tuple[Completion, ...]
    is_group: bool

    def refused(self, why: str) -> list[Reward]:
        return [Reward(0.0, False, why, task=_task_of(response)) for response in self.responses]


@dataclass(frozen=True)
class TrainerState:
    global_step: int


@dataclass(frozen=True)
class RewardFunction:
    name: str
    """The function's name in metrics.jsonl."""
    spec: str
    """The function's entry in rewards.functions."""
    weight: float
    call: Callable[..., Any] = field(repr=False)

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.call).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(offered)
        return {name: offered[name] for name in parameters if name in offered}

    def check(self, offered: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self.call).bind(**self.arguments(offered))
        except TypeError as error:
            columns = ", ".join(offered)
            raise UserError(
                f"rewards.functions: {self.spec}: {error}; the problems offer {columns}"
            ) from None


class Unscorable(Exception):
    """The text says why a response has no score."""


class Scorer:
    """Raises UserError for an unknown task or function.

    Coroutines share one event loop: clients keep their connections.
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
        if self.reads_environments:
            for factory in spec.factories:  # pickles find their classes
                get_object(f"environment.factory {factory!r}", factory)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def reads_environments(self) -> bool:
        if not self.spec.factories:
            return False
        return any("environments" in inspect.signature(one.call).parameters for one in self.functions)

    @property
    def scores_alone(self) -> bool:
        return (not self.spec.functions and not self.spec.environment) or self.own_weight is not None

    @property
    def by_group(self) -> bool:
        return bool(self.functions)

    def check(self, problem: Mapping[str, Any]) -> None:
        """Raises UserError for an argument that the problem lacks."""
        offered = _offer([Completion(dict(problem), "")], {})
        offered |= {"environments": [None]} if self.reads_environments else {}
        for function in self.functions:
            function.check(offered)

    def score(self, group: Sequence[Completion]) -> list[Reward]:
        own = [self.answer(Call((one,), False))[0] if self.scores_alone else None for one in group]
        of_functions = self.answer(Call(tuple(group), True)) if self.by_group else [None] * len(group)
        return [self.combine(*parts) for parts in zip(own, of_functions, group, strict=True)]

    def answer(self, call: Call) -> list[Reward]:
        try:
            if call.is_group:
                return self._score_by_functions(call.responses)
            (response,) = call.responses
            value, is_solved = score_by_task(self.task, response)
            return [Reward(value, is_solved, task=_task_of(response))]
        except BaseException as error:  # from the user's code, or from a value that it returned
            return [_unscored(response, error) for response in call.responses]

    def combine(
        self, own: Reward | None, of_functions: Reward | None, response: Completion | None = None
    ) -> Reward:
        """own: the task's own score; None: it does not count.
        of_functions: the functions' weighted sum; None: there are none.
        response: of which an environment may have given a reward.
        """
        turns = None if response is None else response.turns
        if response is not None and turns is not None and turns.failure:
            return Reward(0.0, False, f"environment: {turns.failure}", task=_task_of(response))
        found = [part for part in (of_functions, own) if part is not None]
        failed = next((part for part in found if part.error), None)
        if failed is not None or (not self.spec.functions and not self.spec.environment):
            return failed or found[0]
        task = found[0].task if response is None else _task_of(response)
        total, parts = 0.0, dict[str, float]()
        if of_functions is not None:
            total, parts = of_functions.value, dict(of_functions.parts)
        if own is not None and self.own_weight is not None:
            total, parts[OWN_SCORE] = total + self.own_weight * own.value, own.value
        if turns is not None and turns.reward is not None:
            total, parts[OF_ENVIRONMENT] = total + turns.reward, turns.reward
        if not parts:
            return Reward(0.0, False, "not applicable: every reward function returned None", task=task)
        try:
            total = _to_number(total, "the weighted sum: ")
        except Unscorable as error:
            return Reward(0.0, False, str(error), task=task)
        is_solved = total >= self.spec.solved_at if own is None else own.is_solved
        return Reward(total, is_solved, "", parts, {} if of_functions is None else of_functions.metrics, task)

    def warm_up(self) -> None:
        warm_up(self.task, self.spec.options)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _score_by_functions(self, group: Sequence[Completion]) -> list[Reward]:
        logged: dict[str, list[float]] = defaultdict(list)
        offered = _offer(group, logged)
        if self.reads_environments:
            offered["environments"] = [_environment_of(response) for response in group]
        given = self._call_functions(offered, len(group))
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        return [
            self._weigh(one, row, metrics) for one, row in zip(group, zip(*given, strict=True), strict=True)
        ]

    def _weigh(self, response: Completion, given: Sequence[Any], metrics: Mapping[str, float]) -> Reward:
        pairs = [(f, reward) for f, reward in zip(self.functions, given, strict=True) if reward is not None]
        try:
            parts = {f.name: _to_number(reward, f"{f.name}: ") for f, reward in pairs}
        except BaseException as error:  # a number that does not bear being looked at
            return _unscored(response, error)
        total = sum(f.weight * parts[f.name] for f, _ in pairs)
        return Reward(total, False, "", parts, metrics, _task_of(response))

    def _call_functions(self, offered: Mapping[str, Any], num: int) -> list[list[Any]]:
        results = [_attempt(function, offered) for function in self.functions]
        awaited = iter(self._await([result for result in results if inspect.isawaitable(result)]))
        given = []
        for function, result in zip(self.functions, results, strict=True):
            result = next(awaited) if inspect.isawaitable(result) else result
            if isinstance(result, BaseException):
                raise Unscorable(f"{function.name}: {describe(result)}")
            try:
                rewards = [*islice(result, num + 1)]  # it may have no end
            except TypeError:
                rewards = []
            if len(rewards) != num:
                place = f"{function.name}: returned {_shorten(result)}"
                raise Unscorable(f"{place}; it must be a list with one reward a completion, {num} here")
            given.append(rewards)
        return given

    def _await(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        if not awaitables:
            return []
        import asyncio  # only here: without it a worker starts a third faster

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return asyncio.run_coroutine_threadsafe(_gather(awaitables), self._loop).result()


def score_by_task(task: Task, response: Completion) -> tuple[float, bool]:
    """Returns (reward, solved). Raises Unscorable."""
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
    function: Callable[..., Any] = get_object(f"reward function {spec!r}", spec)
    if not callable(function):
        raise UserError(f"reward function {spec!r} is a {type(function).__name__}; give a function")
    return function


def _task_of(response: Completion) -> str:
    label = response.problem.get("task")
    return label if isinstance(label, str) else ""


def _unscored(response: Completion, error: BaseException) -> Reward:
    """A worker handles KeyboardInterrupt itself."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    why = hide(str(error)) if isinstance(error, Unscorable) else describe(error)
    return Reward(0.0, False, why, task=_task_of(response))


def _offer(group: Sequence[Completion], logged: dict[str, list[float]]) -> dict[str, Any]:
    problems = [response.problem for response in group]
    prompts = [_prompt_of(problem) for problem in problems]
    columns = [key for key in dict.fromkeys(chain(*problems)) if key not in NOT_COLUMNS]
    return {
        **{key: [problem.get(key) for problem in problems] for key in columns},
        "prompts": prompts,
        "completions": [_completion(prompt, one) for prompt, one in zip(prompts, group, strict=True)],
        "completion_ids": [list(response.token_ids) for response in group],
        "trainer_state": TrainerState(group[0].step),
        "log_metric": lambda name, value: _log_metric(logged, name, value),
        "log_extra": lambda column, values: None,
    }


def _environment_of(response: Completion) -> Any:
    from tlt.tasks.environments.environment import read_instance  # only here: few functions read them

    turns = response.turns or Turns()
    if not turns.state:
        raise Unscorable(f"environment: {turns.failure or 'nothing is left of it'}")
    return read_instance(turns.state)


def _prompt_of(problem: Mapping[str, Any]) -> Any:
    return next((problem[key] for key in PROMPT_KEYS if problem.get(key) is not None), None)


def _completion(prompt: Any, response: Completion) -> Any:
    """As TRL gives it: messages in a conversation, else text."""
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    before = () if response.turns is None else response.turns.messages
    said = [*map(dict, before), {"role": "assistant", "content": response.text}]
    return said if is_chat or before else response.text


def _log_metric(logged: dict[str, list[float]], name: Any, value: Any) -> None:
    """Shortens names and hides credentials in them, for the run's records. Raises ValueError for too many."""
    text = hide(" ".join(visible(str(name)).split()))
    text = text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…"
    if text not in logged and len(logged) == MAX_METRICS:
        raise ValueError(f"log_metric: {text!r} is one name too many; log at most {MAX_METRICS} for a group")
    logged[text].append(float(value))


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
    short = {function: function.rpartition(":")[2] for function in functions}
    counts = Counter([OWN_SCORE, *short.values()])
    return {function: name if counts[name] == 1 else function for function, name in short.items()}


def _to_number(value: Any, place: str = "") -> float:
    """Raises Unscorable unless the number is finite; text is none."""
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
