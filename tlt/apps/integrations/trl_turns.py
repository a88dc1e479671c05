"""Responses of several turns beside TRL's GRPOTrainer, by its own tools, environments, parser and template.

    GRPOTrainer ── prompts, environments after their reset ──▶ TLTRollout: every turn is played
                ◀── first turns, which TRL parses ───────────────────┘   │
                ── _tool_call_loop, in which TRL would play the others ──▶ tells what was played
                ◀── tokens, mask, messages ──────────────────────────────┘

As in TRL, synchronous calls run in the trainer's thread, asynchronous ones in its event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tlt.base.types import ResponseId, Rollout, UserError, id_of
from tlt.base.value_types import shorten
from tlt.models.hf.template import Message
from tlt.models.hf.turns import ToolCall, Turn
from tlt.tasks.environments.environment import Answer, Ask, dump, load
from tlt.tasks.environments.pool import Reply
from tlt.training.rollout.conversations import Conversations, Talk

NO_TOOLS = ("reset", "get_reward")


class TRLTurns(Conversations):
    """The trainer has tools, or environments that have some."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.instances = Instances(trainer)
        self.calls = Calls(self.instances)
        self._played: list[Rollout] = []
        limit, window = trainer.max_tool_calling_iterations, trainer.model.config.max_position_embeddings
        super().__init__(
            self.calls,
            self._writer_of,
            limit + 1,
            window,
            speaks=False,
            gives_reward=False,
            keeps_states=True,
        )

    def note(self, played: Sequence[Rollout]) -> list[int]:
        """Keeps the responses until TRL asks for them. Returns their first turns' lengths."""
        self._played = [*played]
        self.instances.take_back([_state_of(rollout) for rollout in played])
        return [_first_end(rollout) for rollout in played]

    def tool_call_loop(
        self,
        prompts: Any,
        prompt_ids: Any,
        completion_ids: Any,
        completions: list[Any],
        logprobs: Any,
        images: Any,
        multimodal_fields: Any,
    ) -> tuple[Any, ...]:
        """In place of GRPOTrainer._tool_call_loop, with its arguments and results."""
        played = self._played
        turns = [rollout.turns for rollout in played if rollout.turns is not None]
        return (
            [mask(rollout) for rollout in played],
            [self._messages(rollout, first) for rollout, first in zip(played, completions, strict=True)],
            [list(rollout.token_ids) for rollout in played],
            [list(rollout.logprobs) for rollout in played],
            sum(one.num_calls for one in turns),
            sum(one.num_errors for one in turns),
            [[] for _ in played],  # images
        )

    def _messages(self, rollout: Rollout, first: Sequence[Message]) -> list[Mapping[str, Any]]:
        if rollout.turns is None or not rollout.turns.given:
            return [*first]
        return [*rollout.turns.messages, self._writer(rollout).read(rollout.last_turn).message]

    def _writer_of(self, rollout: Rollout, row: Mapping[str, Any]) -> TrlTurnWriter:
        settled, instances = 0 if rollout.turns is None else rollout.turns.num_settled, self.instances
        before = [*rollout.prompt_ids, *rollout.token_ids[:settled]]
        return TrlTurnWriter(self.trainer, before, instances.tools_in(instances.read(_state_of(rollout))))

    def _advance(self, talk: Talk, ends: bool = False) -> None:
        """TRL itself asks for rewards."""
        if ends:
            self._end(talk)
        else:
            super()._advance(talk)

    def _is_answered(self, talk: Talk) -> bool:
        """TRL makes the calls of a turn that was cut off, too."""
        return bool(talk.calls)

    def _message(self, talk: Talk, text: str) -> dict[str, Any]:
        return super()._message(talk, text) | {"content": self.calls.contents.pop(id_of(talk.rollout))}


def mask(rollout: Rollout) -> list[int]:
    """1: the policy drew the token."""
    drawn = set(rollout.drawn)
    return [int(place in drawn) for place in range(len(rollout.token_ids))]


def _first_end(rollout: Rollout) -> int:
    given = rollout.turns is not None and rollout.turns.given
    return given[0][0] if given else len(rollout.token_ids)


def _state_of(rollout: Rollout) -> str:
    return "" if rollout.turns is None else rollout.turns.state


@dataclass(frozen=True)
class TrlTurnWriter:
    """before: the tokens that precede the turn."""

    trainer: Any
    before: list[int]
    tools: Mapping[str, Callable[..., Any]]

    def read(self, turn_ids: Sequence[int]) -> Turn:
        """Synchronous calls first, as TRL answers them."""
        from trl.chat_template_utils import parse_response

        tokenizer, tools = self.trainer.processing_class, [*self.tools.values()]
        message = parse_response(tokenizer, list(turn_ids), prefix=self.before, tools=tools)
        calls = [ToolCall(name_of(call), call) for call in message.get("tool_calls") or ()]
        waits = [_waits(self.tools.get(call.name), call.arguments) for call in calls]
        in_order = sorted(range(len(calls)), key=waits.__getitem__)
        return Turn(message, tuple(calls[number] for number in in_order))

    def append(self, turn_ids: Sequence[int], said: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.trainer._get_tool_suffix_ids([*said]))


def _waits(tool: Callable[..., Any] | None, call: Any) -> bool:
    """Whether TRL awaits the tool's result."""
    if tool is None or not inspect.iscoroutinefunction(tool) or call.get("type") != "function":
        return False
    try:
        inspect.signature(tool).bind(**call["function"]["arguments"])
    except TypeError:
        return False
    return True


def name_of(call: Mapping[str, Any]) -> str:
    is_function = call.get("type") == "function"
    return str(call["function"]["name"] if is_function else call.get("name", "unknown"))


class Instances:
    """The trainer's environments as states of responses.

    In one process a state is a place in `trainer.environments`. With several processes a response may go on
    in any of them, so a state is the pickled environment.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.travel = trainer.accelerator.num_processes > 1

    def states(self) -> list[str]:
        """Returns the states of the batch that the trainer has reset."""
        environments = self.trainer.environments or []
        return [self.write(str(place), instance) for place, instance in enumerate(environments)]

    def read(self, state: str) -> Any:
        if not state:
            return None
        return load(state) if self.travel else self.trainer.environments[int(state)]

    def write(self, state: str, instance: Any) -> str:
        """Raises UserError for an environment that has to be pickled and cannot be."""
        return dump(instance) if self.travel else state

    def take_back(self, states: Sequence[str]) -> None:
        if self.travel and self.trainer.environments:
            self.trainer.environments = [*map(load, states)]

    def tools_in(self, instance: Any) -> dict[str, Callable[..., Any]]:
        members = () if instance is None else inspect.getmembers(type(instance), inspect.isfunction)
        names = [name for name, _ in members if not name.startswith("_") and name not in NO_TOOLS]
        methods = [getattr(instance, name) for name in names]
        return {tool.__name__: tool for tool in (*self.trainer._standalone_tools, *methods)}


class _Question(NamedTuple):
    key: ResponseId
    ask: Ask
    instance: Any
    start: float


class _Done(NamedTuple):
    question: _Question
    result: Any
    is_error: bool
    seconds: float


class Calls:
    """As GRPOTrainer._tool_call_loop: an exception is a message, and nothing times out.

    contents: what the latest collected call of each response returned; text, or a list for the chat template.
    """

    def __init__(self, instances: Instances) -> None:
        self.instances = instances
        self.contents: dict[ResponseId, Any] = {}
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._pending: dict[ResponseId, _Question] = {}

    def ask(self, key: ResponseId, ask: Ask) -> None:
        """Makes a synchronous call here and now."""
        instance, start = self.instances.read(ask.state), time.monotonic()
        question = self._pending[key] = _Question(key, ask, instance, start)

        def end(result: Any, is_error: bool) -> None:
            self._done.put(_Done(question, result, is_error, time.monotonic() - start))

        try:
            result = self._call(instance, ask)
        except Exception as error:  # the user's code
            end(error, True)
            return
        if not inspect.iscoroutine(result):
            end(result, False)
            return

        def end_awaited(future: Future[Any]) -> None:
            """Runs no code of the user's: an error here is lost, and the run would wait for ever."""
            result = _gathered(future)
            end(result, isinstance(result, Exception))

        future = asyncio.run_coroutine_threadsafe(result, self.instances.trainer.async_loop)
        future.add_done_callback(end_awaited)

    def put_answer(self, key: ResponseId, answer: Answer) -> None:
        raise AssertionError("every call of TRL's parser has arguments")

    @property
    def has_news(self) -> bool:
        return not self._done.empty()

    def collect(self, timeout: float | None = 0.0) -> list[Reply[ResponseId]]:
        replies: list[Reply[ResponseId]] = []
        while True:
            try:
                done = self._done.get(timeout=0.0 if replies else timeout)
            except Empty:
                return replies
            key, ask, instance, _ = done.question
            if self._pending.get(key) is not done.question:
                continue  # abandoned
            del self._pending[key]
            result = {"error": str(done.result)} if done.is_error else done.result
            content = result if isinstance(result, list) else str(result)
            _check_text(content)
            if self.instances.travel:
                _check_travels(content, ask.name)
            self.contents[key] = content
            state = self.instances.write(ask.state, instance)
            replies.append(Reply(key, Answer(str(content), state, is_error=done.is_error), done.seconds))

    def abandon(self) -> None:
        self._pending.clear()
        self.contents.clear()

    def close(self) -> None: ...

    def _call(self, instance: Any, ask: Ask) -> Any:
        call = ask.arguments
        if call["type"] != "function":
            raise ValueError(f"Unsupported tool call type: {call['type']}")
        tool = self.instances.tools_in(instance).get(ask.name)
        if tool is None:
            raise ValueError(f"Tool {ask.name} not found.")
        return tool(**call["function"]["arguments"])


def _gathered(ended: Future[Any]) -> Any:
    """As asyncio.gather(return_exceptions=True), also for a cancelled call."""
    if ended.cancelled():
        return asyncio.CancelledError()
    error = ended.exception()
    return ended.result() if error is None else error


def _check_travels(content: Any, name: str) -> None:
    try:
        is_kept = json.loads(json.dumps(content)) == content
    except (TypeError, ValueError):
        is_kept = False
    if not is_kept:
        what = f"{name} returned {shorten(content)}, which JSON does not keep as it is"
        raise UserError(f"tools: {what}, as several processes need; return text, or a list of JSON's values")


def _check_text(content: Any) -> None:
    blocks = content if isinstance(content, list) else ()
    if any(isinstance(block, Mapping) and block.get("type") == "image" for block in blocks):
        raise UserError("tools: one returned an image, which is not supported; return text")
