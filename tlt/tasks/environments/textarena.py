"""Games of textarena for one player (docs/environments.md)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.thoughts import after_thinking
from tlt.base.types import UserError

try:
    import textarena as ta
except ModuleNotFoundError as error:
    raise UserError(f"environment: no module {error.name!r}; {how_to_install('textarena')}") from None

_OF_THE_GAME = {kind for kind in ta.ObservationType if kind is not ta.ObservationType.PLAYER_ACTION}


class Game:
    """The policy says its move, and the game the next message."""

    def reset(
        self,
        game: str,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        in_thought: bool = False,
        **row: Any,
    ) -> str:
        """options: replace those that the game is registered with."""
        self.in_thought = in_thought
        random.seed(seed)  # games draw from Python's own generator
        env = ta.make(game, **(options or {}))
        self.wrappers: list[Any] = []
        while isinstance(env, ta.Wrapper):
            self.wrappers.insert(0, type(env))
            env = env.env
        self.env = env
        env.reset(num_players=1, seed=seed)
        if not isinstance(env.state, ta.SinglePlayerState):
            raise UserError(f"{game} is for several players; take a game of one")
        self.random = random.getstate()
        return self._said()

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        random.setstate(self.random)
        wrapped = reduce(lambda env, wrap: wrap(env), self.wrappers, self.env)  # wrappers cannot be pickled
        is_over, _ = wrapped.step(after_thinking(messages[-1]["content"], in_thought=self.in_thought))
        self.random = random.getstate()
        return None if is_over else self._said()

    def get_reward(self) -> float:
        """A game that did not end gives 0."""
        rewards, _ = self.env.close()
        return float(rewards[0]) if rewards else 0.0

    def _said(self) -> str:
        """A wrapper would tell the player everything again, its own moves too."""
        _, observations = self.env.get_observation()
        return "\n".join(text for _, text, kind in observations if kind in _OF_THE_GAME)
