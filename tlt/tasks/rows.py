"""Tasks that score nothing: rows of a file, and rows that differ by a seed alone, for environments that begin
by it (docs/environments.md)."""

from __future__ import annotations

import random
from typing import Any

from tlt.base.io.files import Record
from tlt.base.types import UserError
from tlt.tasks.splits import check_split

MAX_SEED = 2**31


class DataRows:
    def problems(self, num: int, seed: int, **options: Any) -> list[Record]:
        if options.get("split") == "test":
            remedy = "give data to evaluation, or evaluation.num_problems = 0"
            raise UserError(f"task data: makes no held-out problems; {remedy}")
        raise UserError(
            "task data: makes no problems; give a file or dataset of them to [task], or a task.name"
        )

    def score(self, problem: Record, response_text: str) -> Record:
        raise UserError("task data: scores nothing; give rewards.functions, or a task.name")


class Seeds:
    def problems(self, num: int, seed: int, split: str, **columns: Any) -> list[Record]:
        """Held-out seeds are odd, those of training even. columns: given to the environment."""
        is_test = check_split("seeds", split) == "test"
        drawn = random.Random(f"seeds {split} {seed}").sample(range(0, MAX_SEED, 2), num)
        return [{"problem_id": f"seed-{n + is_test}", "seed": n + is_test, **columns} for n in drawn]

    def score(self, problem: Record, response_text: str) -> Record:
        raise UserError("task seeds: scores nothing; give an environment.factory with get_reward()")


DATA, SEEDS = DataRows(), Seeds()
