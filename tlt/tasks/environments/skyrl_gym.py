"""Environments of skyrl-gym, whose rows are SkyRL's (docs/environments.md). A connection that an environment
holds must survive pickling between turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.io.plugins import get_object
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError

try:
    import skyrl_gym
    from omegaconf import OmegaConf
    from skyrl_gym.tools.core import ToolGroup
except ModuleNotFoundError as error:
    raise UserError(f"environment: no module {error.name!r}; {how_to_install('skyrl-gym')}") from None


def _without_tools(group: ToolGroup) -> dict[str, Any]:
    return {name: value for name, value in vars(group).items() if name != "_tool_registry"}


def _with_tools(group: ToolGroup, state: Mapping[str, Any]) -> None:
    vars(group).update(state, _tool_registry={})
    group._register_tools()


ToolGroup.__getstate__, ToolGroup.__setstate__ = _without_tools, _with_tools  # lambdas, which no pickle holds


class Env:
    """A turn of the policy is an action; its reward is the sum of its actions'."""

    def reset(
        self,
        env_class: str,
        env_config: Mapping[str, Any] | None = None,
        in_thought: bool = False,
        **row: Any,
    ) -> str | None:
        """env_class: a registered name, or a class as "module:Class" or "FILE.py:Class".
        env_config: what SkyRL configures for this kind of environment.
        row: the environment's extras.
        """
        prompt = row.get("messages") or row.get("prompt") or []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        settings = {"env_config": OmegaConf.create(dict(env_config or {})), "extras": row}
        if ":" in env_class:
            self.env = get_object(f"env_class {env_class!r}", env_class)(**settings)
        else:
            self.env = skyrl_gym.make(env_class, **settings)
        self.in_thought, self.reward = in_thought, 0.0
        return _added(messages, self.env.init([*messages])[0])

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        step = self.env.step(after_thinking(messages[-1]["content"], in_thought=self.in_thought))
        self.reward += float(step["reward"])
        return None if step["done"] else "\n".join(said["content"] for said in step["observations"])

    def get_reward(self) -> float:
        return self.reward


def _added(given: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns what `init` wrote behind the prompt. Raises UserError for another prompt."""
    if [*shown] == [*given]:
        return None
    text = "".join(str(message["content"]) for message in given)
    said = "".join(str(message["content"]) for message in shown)
    if not said.startswith(text):
        raise UserError("init() of the environment rewrites its prompt; write the new one into the rows")
    return said[len(text) :]
