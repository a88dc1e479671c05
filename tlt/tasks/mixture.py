"""Several tasks as one (docs/tasks.md).

A problem names its part: {"problem_id": "sums/…", "task": "sums", "scored_by": "reasoning-gym:chain_sum", …}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.base.io.plugins import without_folder
from tlt.base.types import UserError
from tlt.tasks.base import PreparesRecords, get_task, make_problems, warm_up


@dataclass(frozen=True)
class MixturePart:
    name: str
    weight: float
    options: Mapping[str, Any]
    label: str


class Mixture:
    def problems(
        self, num: int, seed: int, split: str, tasks: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Shares are rounded so that they sum to `num`.

        tasks: [{"name", "weight" (1), "options" ({}), "label" (the name)}, …]
        """
        parts = _read_parts(tasks)
        quotas = divide(num, [part.weight for part in parts])
        mixed = []
        for order, (part, quota) in enumerate(zip(parts, quotas, strict=True)):
            problems = (
                make_problems(part.name, quota, seed, {"split": split, **part.options}) if quota else []
            )
            if len(problems) < quota:
                raise UserError(
                    f"task mixture: {part.label} gives {len(problems)} {split} problems of the {quota} that "
                    "are its share; lower its weight, or the number of problems"
                )
            for index, problem in enumerate(problems[:quota]):
                mixed.append(((index + 0.5) / quota, order, _mark(problem, part)))
        return [problem for *_, problem in sorted(mixed, key=lambda entry: entry[:2])]

    def prepare(self, record: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Raises UserError unless `tlt task` has written the problem, and its task can score it."""
        if not all(isinstance(record.get(key), str) for key in ("task", "scored_by")):
            raise UserError(
                "task mixture: has no task and scored_by; give problems that tlt task mixture has written"
            )
        part = get_task(record["scored_by"])
        is_left_out = isinstance(part, PreparesRecords) and part.prepare(record, {}) is None
        return None if is_left_out else record

    def warm_up(self, options: Mapping[str, Any]) -> None:
        for part in _read_parts(options["tasks"]) if "tasks" in options else ():
            warm_up(get_task(part.name), part.options)

    def score(self, problem: dict[str, Any], response_text: str) -> dict[str, Any]:
        own = {key: value for key, value in problem.items() if key not in ("task", "scored_by")}
        own["problem_id"] = str(problem["problem_id"]).removeprefix(f"{problem['task']}/")
        return get_task(problem["scored_by"]).score(own, response_text)


TASK = Mixture()


def divide(num: int, weights: Sequence[float]) -> list[int]:
    """Hamilton's method: the largest remainders, the first of equal ones, get one more."""
    total = sum(weights)
    shares = [num * weight / total for weight in weights]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: quotas[i] - shares[i])
    for i in by_remainder[: num - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _mark(problem: Mapping[str, Any], part: MixturePart) -> dict[str, Any]:
    for key in ("task", "scored_by"):
        if key in problem:
            what = f"problems of {part.label} have a column {key!r}, which the mixture gives; rename it"
            raise UserError(f"task mixture: {what}")
    return {
        **problem,
        "problem_id": f"{part.label}/{problem['problem_id']}",
        "task": part.label,
        "scored_by": part.name,
    }


def _read_parts(tasks: Any) -> list[MixturePart]:
    place = "task mixture: options.tasks"
    if not isinstance(tasks, list) or not tasks:
        raise UserError(
            f'{place} is {tasks!r}; give a list such as [{{"name": "countdown", "weight": 1}}, …]'
        )
    parts = [_read_part(f"{place}[{index}]", entry) for index, entry in enumerate(tasks)]
    label, count = Counter(part.label for part in parts).most_common(1)[0]
    if count > 1:
        raise UserError(f"{place}: {count} parts are called {label!r}; give each a label of its own")
    return parts


def _read_part(place: str, entry: Any) -> MixturePart:
    known = ("name", "weight", "options", "label")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise UserError(f"{place} is {entry!r}; it must be a table with a name")
    if unknown := [key for key in entry if key not in known]:
        raise UserError(f"{place}: {unknown[0]} is unknown; known keys are {', '.join(known)}")
    weight, options, label = entry.get("weight", 1.0), entry.get("options", {}), entry.get("label", "")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"{place}: weight is {weight!r}; it must be a number greater than 0")
    if not isinstance(options, Mapping) or not isinstance(label, str):
        raise UserError(f"{place}: options must be a table, and label text")
    return MixturePart(entry["name"], weight, options, label or without_folder(entry["name"]))
