"""The task of a file's rows: rewards.functions score them."""

from __future__ import annotations

from typing import Any

from tlt.base.types import UserError


class DataRows:
    def problems(self, num: int, seed: int, **options: Any) -> list[dict[str, Any]]:
        if options.get("split") == "test":
            raise UserError(
                "task data: makes no held-out problems; give data to evaluation, or "
                "evaluation.num_problems = 0"
            )
        raise UserError(
            "task data: makes no problems; give a file or dataset of them to [task], or a task.name"
        )

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        raise UserError("task data: scores nothing; give rewards.functions, or a task.name")


TASK = DataRows()
