"""What an engine's process does for the table: answers in each way, and writes a file of responses for each.

    off   alone · batch-4 · batch-16 · prefilled · seeded · greedy · law
    on    seeded · greedy · law                                            with drafts

Imports only Python's own modules: the engines' environments have nothing else in common. A file is what
`tlt audit responses` reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

Job = dict[str, Any]
"""model, gguf, dtype, threads, drafts, repairs, stop_ids, max_tokens, batch_sizes, asked, law, out: see
`job_of` in __main__.py."""


@dataclass(frozen=True)
class Asked:
    problem_id: str
    sample_index: int
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Answer:
    problem_id: str
    sample_index: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]

    @staticmethod
    def to(asked: Asked, token_ids: Iterable[int], logprobs: Iterable[float]) -> Answer:
        given = asked.problem_id, asked.sample_index, asked.prompt_ids
        return Answer(*given, list(token_ids), list(logprobs))


class Engine(Protocol):
    """An engine with its drafts on or off."""

    versions: dict[str, str]
    drafts_in_batches: bool

    def respond(self, asked: list[Asked], temperature: float, is_repeatable: bool) -> list[Answer]:
        """Answers all at once, with log-probabilities.

        is_repeatable: a seed's tokens must not depend on the batch; else the engine samples as it comes.
        """
        ...

    def read(self, answer: Answer) -> list[float]:
        """Returns log-probabilities of the response's tokens when the whole is read as a prompt."""
        ...


def serve(prepare: Callable[[Job], Engine]) -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine, out = prepare(job), Path(job["out"])
    (out / "versions.json").write_text(json.dumps(engine.versions), encoding="utf-8")

    def in_batches(asked: list[Asked], size: int, temperature: float, is_repeatable: bool) -> list[Answer]:
        starts = range(0, len(asked), size)
        parts = [engine.respond(asked[i : i + size], temperature, is_repeatable) for i in starts]
        return [answer for part in parts for answer in part]

    asked, for_law = ([Asked(**one) for one in job[name]] for name in ("asked", "law"))
    if not job["drafts"]:
        alone = in_batches(asked, 1, 1.0, True)
        _write(out / "alone.jsonl", alone)
        for size in job["batch_sizes"]:
            _write(out / f"batch-{size}.jsonl", in_batches(asked, size, 1.0, True))
        _write(out / "prefilled.jsonl", [replace(one, logprobs=engine.read(one)) for one in alone])
    name = "on" if job["drafts"] else "off"
    _write(out / f"seeded-{name}.jsonl", in_batches(asked, 1, 1.0, False))
    _write(out / f"greedy-{name}.jsonl", in_batches(asked, 1, 0.0, False))
    if for_law:
        is_single = job["drafts"] and not engine.drafts_in_batches
        law = in_batches(for_law, 1 if is_single else max(job["batch_sizes"]), 1.0, False)
        _write(out / f"law-{name}.jsonl", [replace(one, logprobs=[]) for one in law])


def _write(path: Path, answers: list[Answer]) -> None:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in answers), encoding="utf-8")
