"""Environments on an OpenEnv server, where an action and an observation have a text each
(docs/environments.md).

A session lasts for one question: it begins with the seed, and is told again what the policy has said. Any
worker can go on, and the server needs only a session for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError

try:
    from openenv.core.generic_client import GenericEnvClient
except ModuleNotFoundError as error:
    raise UserError(f"environment: no module {error.name!r}; {how_to_install('openenv')}") from None


class Client:
    """The reward is the sum of the steps' rewards."""

    def reset(
        self,
        base_url: str,
        action: str,
        observation: str,
        seed: int | None = None,
        in_thought: bool = False,
        **row: Any,
    ) -> str:
        """action, observation: names of the field that holds the text.
        seed: given to the server's reset."""
        self.base_url, self.seed, self.in_thought = base_url, seed, in_thought
        self.action, self.observation = action, observation
        self.spoken: list[str] = []
        self.heard: list[str] = []
        return str(self._play())

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        self.spoken.append(after_thinking(messages[-1]["content"], in_thought=self.in_thought))
        return self._play()

    def get_reward(self) -> float:
        return self.reward

    def _play(self) -> str | None:
        """Returns the environment's last words, or None at its end. Raises UserError where it does not repeat
        itself."""
        with GenericEnvClient(base_url=self.base_url).sync() as server:
            results = [server.reset() if self.seed is None else server.reset(seed=self.seed)]
            results += [server.step({self.action: text}) for text in self.spoken]
        heard = [self._text(result.observation) for result in results]
        if heard[:-1] != self.heard:
            raise UserError(
                f"{self.base_url} answers otherwise when it is told the same again; give it a seed"
            )
        self.heard, self.reward = heard, sum(float(result.reward or 0.0) for result in results)
        return None if results[-1].done else heard[-1]

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation not in observation:
            known = ", ".join(observation)
            raise UserError(f"column observation is {self.observation!r}; {self.base_url} gives {known}")
        return str(observation[self.observation])
