"""The largest of three numbers, as rows of SkyRL for skyrl-gym's gsm8k_multi_turn: see skyrl-gym.toml.

Which is the largest of 47, 35 and 81?      ─▶ #### 47    wrong, in the form that the environment reads
Now provide only the final numeric …        ─▶ #### 81    right: the environment ends the response
"""

from __future__ import annotations

import random

from tlt.base.io.files import Record
from tlt.tasks.exact import ExactTask
from tlt.tasks.splits import Split, split_of

EXAMPLE = [
    {"role": "user", "content": "Which is the largest of 28, 64 and 35?"},
    {"role": "assistant", "content": "#### 64"},
]


class Largest(ExactTask):
    """The environment rewards; `score` is not asked."""

    name = "largest"

    def problems(self, num: int, seed: int, *, split: str = "train", max_turns: int = 2) -> list[Record]:
        """max_turns: attempts that the environment grants."""

        def draw(rng: random.Random, split: Split) -> Record:
            while True:
                a, b, c = numbers = rng.sample(range(10, 100), 3)
                if split_of(str(sorted(numbers))) == split:
                    asked = {"role": "user", "content": f"Which is the largest of {a}, {b} and {c}?"}
                    return {
                        "env_class": "gsm8k_multi_turn",
                        "messages": [*EXAMPLE, asked],
                        "reward_spec": {"ground_truth": str(max(numbers))},
                        "max_turns": max_turns,
                    }

        return self.draw_each(num, seed, split, draw)


TASK = Largest()
