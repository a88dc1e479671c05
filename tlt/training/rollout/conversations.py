"""Responses of several turns: the policy's turn is read, its calls are made, what was said is appended.

    engine ─▶ take ─▶ a call, one at a time ─▶ workers ─▶ collect ─▶ the turn's tokens ─▶ journal ─▶ engine
                └─▶ without a call: `respond`, else the response has ended ─▶ `get_reward` ─▶ collect

A turn is written down before it is used, and never asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tlt.base.types import Finished, FinishReason, Problem, Request, ResponseId, Rollout, Turns, id_of
from tlt.engine.backend import RolloutBackend
from tlt.models.hf.template import Message
from tlt.models.hf.turns import ToolCall, Turn
from tlt.tasks.environments.environment import Answer, Ask, say_error
from tlt.tasks.environments.pool import Reply
from tlt.training.rollout.protocol import BetweenTurns, Journal


class Answering(Protocol):
    """See `EnvironmentPool`."""

    def ask(self, key: ResponseId, ask: Ask) -> None: ...

    def put_answer(self, key: ResponseId, answer: Answer) -> None: ...

    @property
    def has_news(self) -> bool: ...

    def collect(self, timeout: float | None = 0.0) -> list[Reply[ResponseId]]: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class Writer(Protocol):
    """See `TurnWriter`."""

    def read(self, turn_ids: Sequence[int]) -> Turn: ...

    def append(self, turn_ids: Sequence[int], said: Sequence[Message]) -> tuple[int, ...]: ...


@dataclass
class Talk:
    """A response that waits.

    calls: of its latest turn, still to be made.
    said: by the environment since that turn.
    is_ending: only the reward is missing.
    """

    finished: Finished
    turns: Turns
    spoken: dict[str, Any]
    calls: list[ToolCall] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    is_ending: bool = False

    @property
    def rollout(self) -> Rollout:
        return self.finished.rollout


class Conversations(BetweenTurns):
    """writer_of: of a response and its problem's data.
    max_turns: of the policy in a response.
    window: most tokens of prompt and response.
    speaks: an environment answers turns without a call.
    gives_reward: an environment gives rewards.
    keeps_states: ended responses keep their environment's state, for reward functions.
    keeps_routes: responses keep the routes of all tokens, earlier turns' too.
    """

    lets_go_on = True

    def __init__(
        self,
        pool: Answering,
        writer_of: Callable[[Rollout, Mapping[str, Any]], Writer],
        max_turns: int,
        window: int,
        *,
        speaks: bool,
        gives_reward: bool,
        keeps_states: bool = False,
        keeps_routes: bool = False,
    ) -> None:
        self.pool, self.writer_of = pool, writer_of
        self.max_turns, self.window = max_turns, window
        self.speaks, self.gives_reward, self.keeps_states = speaks, gives_reward, keeps_states
        self.keeps_routes = keeps_routes
        self._waiting: dict[ResponseId, Talk] = {}
        self._whole: list[Finished] = []

    def begin(
        self, problems: Iterable[Problem], requests: Iterable[Sequence[Request]], journal: Journal
    ) -> None:
        self._rows = {problem.problem_id: problem.data for problem in problems}
        self._requests = {id_of(request): request for group in requests for request in group}
        self._journal = journal

    def take(self, finished: Finished) -> bool:
        rollout = finished.rollout
        turn = self._writer(rollout).read(rollout.last_turn)
        talk = Talk(finished, rollout.turns or Turns(), turn.message, [*turn.calls])
        goes_on = self._is_answered(talk)
        if talk.calls and goes_on and self._is_last(talk):
            talk.finished, goes_on = _ended_by(finished, "turns"), False
        self._waiting[id_of(rollout)] = talk
        if goes_on:
            self._journal.note_turn(self._so_far(talk, talk.turns))
        self._advance(talk, ends=not goes_on)
        return True

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting or self._whole)

    @property
    def has_news(self) -> bool:
        return bool(self._whole) or self.pool.has_news

    def collect(self, timeout: float | None = 0.0) -> tuple[list[Request], list[Finished]]:
        going_on = []
        for response_id, answer, seconds in self.pool.collect(0.0 if self._whole else timeout):
            talk = self._waiting[response_id]
            talk.turns = self._after(talk, answer, seconds)
            if talk.is_ending or answer.failure:
                self._end(talk)
            elif answer.text is None:
                self._advance(talk, ends=True)
            else:
                talk.said.append(self._message(talk, answer.text))
                talk.calls = talk.calls[1:]
                if talk.calls:
                    self._advance(talk)
                elif self._is_last(talk):  # told to `respond`, since its reward may hang on it
                    talk.finished = _ended_by(talk.finished, "turns")
                    self._advance(talk, ends=True)
                elif (request := self._go_on(talk)) is not None:
                    going_on.append(request)
        whole, self._whole = self._whole, []
        return going_on, whole

    def abandon(self) -> None:
        self.pool.abandon()
        self._waiting.clear()
        self._whole.clear()

    def close(self) -> None:
        self.pool.close()

    # ── one turn ────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, talk: Talk, ends: bool = False) -> None:
        talk.is_ending = ends
        row, state = self._rows[talk.rollout.problem_id], talk.turns.state
        if ends and not (self.gives_reward or self.keeps_states):
            self._end(talk)
        elif ends:
            self.pool.ask(id_of(talk.rollout), Ask("reward", row, state))
        elif talk.calls and (call := talk.calls[0]).arguments is not None:
            self.pool.ask(id_of(talk.rollout), Ask("call", row, state, call.name, dict(call.arguments)))
        elif talk.calls:
            self.pool.put_answer(
                id_of(talk.rollout), Answer(say_error(talk.calls[0].name), state, is_error=True)
            )
        else:
            messages = [*_prompt(row), *talk.turns.messages, talk.spoken]
            self.pool.ask(id_of(talk.rollout), Ask("respond", row, state, messages=messages))

    def _is_answered(self, talk: Talk) -> bool:
        return talk.rollout.finish_reason == "stop" and bool(talk.calls or self.speaks)

    def _is_last(self, talk: Talk) -> bool:
        return len(talk.turns.given) + 1 >= self.max_turns

    def _message(self, talk: Talk, text: str) -> dict[str, Any]:
        if not talk.calls:
            return {"role": "user", "content": text}
        return {"role": "tool", "name": talk.calls[0].name, "content": text}

    def _after(self, talk: Talk, answer: Answer, seconds: float) -> Turns:
        turns = talk.turns
        is_call = bool(talk.calls) and not talk.is_ending  # calls of a last turn are not made
        counts = (1, int(answer.is_error), int(answer.is_late)) if is_call else (0, 0, 0)
        return replace(
            turns,
            state=answer.state or turns.state,
            num_calls=turns.num_calls + counts[0],
            num_errors=turns.num_errors + counts[1],
            num_timeouts=turns.num_timeouts + counts[2],
            seconds=turns.seconds + seconds,
            reward=answer.reward,
            failure=answer.failure,
        )

    def _go_on(self, talk: Talk) -> Request | None:
        rollout = talk.rollout
        said = self._writer(rollout).append(rollout.last_turn, talk.said)
        first, end = len(rollout.token_ids), len(rollout.token_ids) + len(said)
        request = self._requests[id_of(rollout)]
        room = min(request.params.max_tokens, self.window - len(rollout.prompt_ids))
        if end >= room:
            talk.finished = _ended_by(talk.finished, "length")
            self._advance(talk, ends=True)
            return None
        turns = replace(
            talk.turns,
            given=(*talk.turns.given, (first, end)),
            messages=(*talk.turns.messages, talk.spoken, *talk.said),
        )
        so_far = self._so_far(talk, turns, said)
        self._journal.note_turn(so_far)
        del self._waiting[id_of(rollout)]
        return so_far

    def _so_far(self, talk: Talk, turns: Turns, said: tuple[int, ...] = ()) -> Request:
        rollout = talk.rollout
        return replace(
            self._requests[id_of(rollout)],
            token_ids=rollout.token_ids + said,
            logprobs=rollout.logprobs + (0.0,) * len(said),
            drafts=rollout.drafts,
            routes=rollout.routes if self.keeps_routes else None,
            turns=turns,
        )

    def _end(self, talk: Talk) -> None:
        turns = talk.turns if self.keeps_states else replace(talk.turns, state="")
        rollout = replace(talk.rollout, turns=turns)
        del self._waiting[id_of(rollout)]
        self._whole.append(replace(talk.finished, rollout=rollout))

    def _writer(self, rollout: Rollout) -> Writer:
        return self.writer_of(rollout, self._rows[rollout.problem_id])


def converse(
    engine: RolloutBackend,
    between_turns: BetweenTurns,
    problems: Iterable[Problem],
    requests: Sequence[Request],
) -> Iterator[Rollout]:
    """Yields each response as it ends, without queue and journal."""
    engine.parks = between_turns.lets_go_on
    between_turns.begin(problems, [requests], Journal())
    engine.add(requests)
    while not engine.is_idle or between_turns.is_waiting:
        going_on, whole = between_turns.collect(None if engine.is_idle else 0.0)
        engine.add(going_on)
        if not engine.is_idle:
            whole += [finished for finished in engine.step() if not between_turns.take(finished)]
        for finished in whole:
            engine.forget(id_of(finished.rollout))
            yield finished.rollout


def _ended_by(finished: Finished, reason: FinishReason) -> Finished:
    return replace(finished, rollout=replace(finished.rollout, finish_reason=reason))


def _prompt(row: dict[str, Any]) -> list[Any]:
    messages = row.get("messages") or row.get("prompt") or []
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
