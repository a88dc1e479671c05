"""Conversations of verifiers (`verifiers.v1`, 0.4), in which an environment's `run` talks to the policy.

    run()  ── await interaction.turn("…") ──▶ what the policy reads
           ◀── its reply ───────────────────┘

A coroutine cannot be kept between two turns. So every question runs `run` from its beginning, with the
replies so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError
from tlt.tasks.environments.environment import seed_generators
from tlt.tasks.verifiers import Verifiers, begin_trace, make_nodes, messages_of

try:
    import verifiers.v1 as vf
    from verifiers.v1.agent import Segment
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.episode import EnvInfo, Episode
    from verifiers.v1.utils.decorators import discover_decorated
    from verifiers.v1.utils.loaders import env_config_type, environment_class
except ModuleNotFoundError as error:
    raise UserError(f"environment: no module {error.name!r}; {how_to_install('verifiers')}") from None


class Env:
    """The reward is the trace's: of the task's reward functions, of `run` and of `finalize`."""

    def reset(
        self,
        taskset: str,
        options: Mapping[str, Any],
        data: Mapping[str, Any],
        in_thought: bool = False,
        **row: Any,
    ) -> str | None:
        """taskset, options, data: from a problem of verifiers:NAME."""
        self.taskset, self.options, self.data = taskset, dict(options), dict(data)
        self.in_thought = in_thought
        self.replies: list[str] = []
        self.heard: list[str | None] = []
        return self._play().waits_for

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        reply = after_thinking(messages[-1]["content"], in_thought=self.in_thought)
        self.replies.append(reply)
        return self._play().waits_for

    def get_reward(self) -> float:
        """`run` may not have ended when the policy's last turn does."""
        agents = self._play(is_over=True)
        return float(agents.trace.reward)

    def _play(self, is_over: bool = False) -> _Agents:
        """Raises UserError where `run` does not repeat itself."""
        verifiers = Verifiers(self.taskset)
        task = verifiers.task_of(self.data, self.options)
        env = _environment(verifiers, self.options)
        agents = _Agents(self.taskset, env.config, task, self.replies, is_over)
        seed_generators({"problem_id": task.key}, 0)  # the same in every turn
        with suppress(_Waits):
            asyncio.run(_run(env, task, agents))
        before, self.heard = self.heard, agents.heard
        if self.heard[: len(before)] != before:
            raise UserError(
                f"verifiers:{self.taskset} says something else when it is told the same again; "
                "have its run() draw from the task's data alone"
            )
        return agents


def _environment(verifiers: Verifiers, options: Mapping[str, Any]) -> Any:
    """Raises UserError unless the environment has one agent without a harness of verifiers: the policy."""
    kind, given = env_config_type(verifiers.id), {"taskset": {"id": verifiers.id, **options}}
    names = [*agent_config_fields(kind.model_validate(given))]
    if len(names) != 1:
        found = ", ".join(names)
        raise UserError(f"verifiers:{verifiers.name}: has agents {found}; take one of a single agent")
    config = kind.model_validate({**given, names[0]: {"harness": {"id": "null"}}})
    return environment_class(verifiers.id)(config)


async def _run(env: Any, task: Any, agents: _Agents) -> None:
    """As `Env.run_episode`."""
    await env.setup(agents)
    await env.run(task, agents)
    if (trace := agents.trace) is None:
        raise UserError(f"verifiers:{agents.taskset}: run() begins no conversation; take another one")
    episode = Episode(env=EnvInfo(id=env.config.env_id), task=trace.task, traces=[trace])
    await env.finalize(task, episode)


class _Waits(BaseException):
    """The policy has not replied yet. An environment's `except Exception` does not catch it."""


class _Agents:
    """heard: what `run` said before each of the policy's turns; None: nothing, for the task's prompt came
    first.
    """

    def __init__(self, taskset: str, config: Any, task: Any, replies: Sequence[str], is_over: bool) -> None:
        self.taskset, self.task, self.replies, self.is_over = taskset, task, replies, is_over
        self.trace: Any = None
        self.heard: list[str | None] = []
        self.waits_for: str | None = None
        self.trainable = True
        (name,) = agent_config_fields(config)
        setattr(self, name, self)

    @asynccontextmanager
    async def interaction(self, task: Any, **more: Any) -> AsyncIterator[_Agents]:
        if self.trace is not None:
            raise UserError(f"verifiers:{self.taskset}: run() begins several conversations; take another one")
        if messages_of(task.data) != messages_of(self.task.data):
            what = "run() begins with another prompt than the task's, which the policy reads"
            remedy = "take another one"
            raise UserError(f"verifiers:{self.taskset}: {what}; {remedy}")
        if needs := [name for name in ("stop", "intercept") if discover_decorated(task, name)]:
            raise UserError(
                f"verifiers:{self.taskset}: has @{needs[0]}, which TLT does not have; take another"
            )
        self.trace = begin_trace(task)
        yield self
        self.trace.stop("user_closed")
        self.trace.is_completed = self.trace.ok = True
        await task.score(self.trace)

    async def run(self, task: Any, **more: Any) -> Any:
        async with self.interaction(task):
            await self.turn()
        return self.trace

    async def turn(self, message: Any = None) -> Segment:
        number, said = len(self.heard), self._text(message)
        self.heard.append(said)
        if number >= len(self.replies) and self.is_over:
            return Segment([], terminated=True)
        if number == len(self.replies):
            self.waits_for = said
            raise _Waits
        reply = vf.AssistantMessage(content=self.replies[number])
        if said is not None:
            make_nodes(self.trace, [vf.UserMessage(content=said)])
        make_nodes(self.trace, [reply], sampled=True)
        return Segment([reply])

    def _text(self, message: Any) -> str | None:
        messages = [message] if isinstance(message, str) else [one.content for one in message or ()]
        if not all(isinstance(text, str) for text in messages):
            raise UserError(f"verifiers:{self.taskset}: says more than text; take another one")
        return "\n".join(messages) if messages else None
