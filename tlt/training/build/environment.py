"""A run's configuration → its environment: what prompts show of it, and what answers in the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.schema import Config
from tlt.base.io.files import Record
from tlt.base.types import ResponseId, Rollout, UserError
from tlt.models.hf.prompts import ChatFormat
from tlt.models.hf.tokenizer import Tokenizer
from tlt.models.hf.turns import TurnWriter
from tlt.tasks.environments.environment import Ask, Environments, EnvironmentSpec
from tlt.tasks.environments.pool import EnvironmentPool
from tlt.training.rollout.conversations import Conversations
from tlt.training.rollout.protocol import BetweenTurns

_PROMPTS = ("messages", "prompt")


def environment_spec(section: EnvironmentSection) -> EnvironmentSpec:
    factories = {"": section.factory} if section.factory else section.factories
    return EnvironmentSpec(section.tools, factories, section.respond or "")


def gives_reward(section: EnvironmentSection) -> bool:
    return section.is_used and Environments(environment_spec(section)).gives_reward


def with_environment(
    section: EnvironmentSection, records: Sequence[tuple[str, Record]]
) -> list[tuple[str, Record]]:
    """Records as the policy sees them: with tools, and what `reset` says appended to the last message.
    UserError where a reset fails, and for an empty chat without a `reset`."""
    if not section.has_factory:
        for place, record in records:
            _check_asks(record, place)
    if not section.is_used:
        return [*records]
    environments = Environments(environment_spec(section))
    said = _observations(section, records) if environments.factories else [None] * len(records)
    shown = []
    for (place, record), observation in zip(records, said, strict=True):
        tools = environments.schemas(record)
        messages = _messages(record, observation or "", place)
        others = {name: value for name, value in record.items() if name not in _PROMPTS}
        shown.append((place, {**others, "messages": messages, **({"tools": tools} if tools else {})}))
    return shown


def build_between_turns(
    section: EnvironmentSection,
    tokenizer: Tokenizer | None,
    chat: ChatFormat,
    window: int,
    keeps_states: bool = False,
    keeps_routes: bool = False,
) -> BetweenTurns:
    """tokenizer: None: only without an environment."""
    if not section.is_used:
        return BetweenTurns()
    assert tokenizer is not None
    spec = environment_spec(section)
    environments = Environments(spec)
    pool = EnvironmentPool[ResponseId](spec, section.num_workers, section.tool_timeout_seconds)
    writers: dict[str, TurnWriter] = {}

    def writer_of(rollout: Rollout, row: Mapping[str, Any]) -> TurnWriter:
        name = environments.name_of(row)
        if name not in writers:
            writers[name] = turn_writer(environments, row, tokenizer, chat)
        return writers[name]

    speaks, rewards = environments.speaks, environments.gives_reward
    return Conversations(
        pool,
        writer_of,
        section.max_turns,
        window,
        speaks=speaks,
        gives_reward=rewards,
        keeps_states=keeps_states,
        keeps_routes=keeps_routes,
    )


def check_rewards(config: Config, records: Sequence[tuple[str, Record]]) -> None:
    """UserError if nothing but environments scores, and a row's gives no reward."""
    if config.rewards.functions or not gives_reward(config.environment):
        return
    environments = Environments(environment_spec(config.environment))
    for place, row in records:
        if not environments.rewards(row):
            what = f"{place}: its environment, {environments.name_of(row)!r}, has no get_reward()"
            raise UserError(f"{what}, and nothing else scores; write one, or give rewards.functions")


def check_turns(
    section: EnvironmentSection,
    records: Sequence[tuple[str, Record]],
    tokenizer: Tokenizer,
    chat: ChatFormat,
) -> None:
    """UserError if the chat template cannot write the turns of an environment that rows name."""
    if section.is_used:
        environments = Environments(environment_spec(section))
        rows = {environments.name_of(row): row for _, row in records}
        for row in rows.values():
            turn_writer(environments, row, tokenizer, chat)


def turn_writer(
    environments: Environments, row: Mapping[str, Any], tokenizer: Tokenizer, chat: ChatFormat
) -> TurnWriter:
    tools = environments.schemas(row)
    writer = TurnWriter(tokenizer, {**chat.variables, **({"tools": tools} if tools else {})}, chat.day)
    writer.check(bool(tools))
    return writer


def _observations(section: EnvironmentSection, records: Sequence[tuple[str, Record]]) -> list[str | None]:
    spec = environment_spec(section)
    pool = EnvironmentPool[int](spec, section.num_workers, section.tool_timeout_seconds)
    said: dict[int, str | None] = {}
    try:
        for number, (place, record) in enumerate(records):
            pool.ask(number, Ask("observe", {"problem_id": place.rpartition(":")[2], **record}))
        while len(said) < len(records):
            for number, answer, _ in pool.collect(None):
                if answer.failure:
                    raise UserError(f"{records[number][0]}: environment: {answer.failure}; correct it")
                said[number] = answer.text
    finally:
        pool.close()
    return [said[number] for number in range(len(records))]


def _check_asks(record: Record, place: str) -> None:
    messages = record.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "user" and last.get("content") == "":
        remedy = "give it text, or an environment.factory that opens the conversation"
        raise UserError(f"{place}: its last message is empty; {remedy}")


def _messages(record: Record, observation: str, place: str) -> list[Any]:
    """As TRL. Without a prompt the observation is the prompt."""
    if record.get("prompt_ids") is not None:
        raise UserError(f"{place}: prompt_ids cannot be shown tools; give prompt or messages")
    prompt = next((record[name] for name in _PROMPTS if record.get(name)), None)
    if prompt is None or isinstance(prompt, str):
        return [{"role": "user", "content": (prompt or "") + observation}]
    if not observation:
        return [*prompt]
    last = dict(prompt[-1])
    text = last.get("content")
    added = (
        text + observation
        if isinstance(text, str)
        else [*(text or []), {"type": "text", "text": observation}]
    )
    return [*prompt[:-1], {**last, "content": added}]
