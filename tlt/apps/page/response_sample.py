"""Chooses a run's kept responses for the page: a bounded sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tlt.apps.page.gather import RunRecords
from tlt.apps.page.tokens import MAX_SHOWN_TOKENS, clip, drafts_within, sum_up
from tlt.apps.page.turns import describe, own_stretches, show_turns
from tlt.base.io.files import Record
from tlt.base.types import DraftOutcome, Turns, UserError, num_drawn
from tlt.base.value_types import describe_mistakes
from tlt.models.hf.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from tlt.training.saved.kept_responses import kept_by

MAX_FILES = 8
"""Of steps, and of evaluations, each."""
MAX_RESPONSES = 256
"""Of all runs together."""
TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


@dataclass(frozen=True)
class KeptTurns(Turns):
    last_turn: str = ""


class Kept(BaseModel):
    """What the page reads of a line of responses/."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    problem_id: str | int
    sample_index: int
    policy_step: int
    prompt_ids: TokenIds
    token_ids: TokenIds
    text: str
    finish_reason: str
    reward: float | None = None
    is_solved: bool = False
    reward_error: str = ""
    drafts: tuple[DraftOutcome, ...] | None = None
    turns: KeptTurns | None = None

    @model_validator(mode="after")
    def _turns_lie_within(self) -> Kept:
        given = () if self.turns is None else self.turns.given
        edges = [0, *(place for stretch in given for place in stretch), len(self.token_ids)]
        if edges != sorted(edges):
            raise ValueError("turns: given is no list of stretches of the response's tokens")
        return self


def spread(items: Sequence[Path], count: int) -> list[Path]:
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]


def show_responses(runs: Sequence[RunRecords]) -> tuple[list[Record], list[str]]:
    """Returns the responses, and for each run a line on what is left out or missing."""
    shown, notes = list[Record](), list[str]()
    for run in runs:
        files = {purpose: kept_by(run.folder, purpose) for purpose in ("rollout", "evaluation")}
        chosen = [(purpose, path) for purpose, paths in files.items() for path in spread(paths, MAX_FILES)]
        if not chosen:
            notes.append(f"{run.name} has kept no responses (run.keep_responses)")
            continue
        reader = _Reader(run)
        share, num_all = MAX_RESPONSES // len(runs) // len(chosen), 0
        before = len(shown)
        for purpose, path in chosen:
            lines = path.read_bytes().splitlines()
            num_all += len(lines)
            shown += [reader.read(line, path, purpose) for line in _evenly(lines, max(share, 1))]
        num_files = sum(map(len, files.values()))
        of_files = f"{len(chosen)} of {num_files} steps and evaluations"
        notes.append(
            f"{run.name}: {len(shown) - before} of {num_all} responses of {of_files}{reader.missing()}"
        )
    return shown, notes


def _evenly(lines: Sequence[bytes], count: int) -> Sequence[bytes]:
    """Chooses whole groups, which are neighbouring lines."""
    if len(lines) <= count:
        return lines
    groups = [[*group] for _, group in groupby(lines, lambda line: line.partition(b'"sample_index"')[0])]
    num_groups = max(count * len(groups) // len(lines), 1)
    chosen = [groups[i * len(groups) // num_groups] for i in range(num_groups)]
    return [line for group in chosen for line in group][:count]


class _Reader:
    def __init__(self, run: RunRecords) -> None:
        self.run, self.uncoloured = run, Counter[str]()
        self._names: dict[int, str] = {}
        self.tokenizer, self.no_tokenizer = _find_tokenizer(run)

    def read(self, line: bytes, path: Path, purpose: str) -> Record:
        try:
            kept = Kept.model_validate_json(line)
        except ValidationError as error:
            reason = describe_mistakes(error)
            raise UserError(f"{path}: holds a line that is no response ({reason}); remove the line") from None
        tokenizer, is_rollout = self.tokenizer, purpose == "rollout"
        prompt = (
            f"{len(kept.prompt_ids)} token ids" if tokenizer is None else tokenizer.decode(kept.prompt_ids)
        )
        return {
            "run": self.run.name,
            "purpose": "training" if is_rollout else "held-out",
            "step": kept.policy_step + 1 if is_rollout else int(path.stem.rpartition("-")[2]),
            "problem": str(kept.problem_id),
            "sample": kept.sample_index,
            "reward": kept.reward,
            "solved": kept.is_solved,
            "tokens": num_drawn(kept),
            "finish": kept.finish_reason,
            "prompt": clip(prompt)[0],
            "error": kept.reward_error,
            **(self._text(kept) if kept.turns is None else self._turns(kept, kept.turns)),
        }

    def missing(self) -> str:
        lacks = [f"; tokens of {num} are not coloured, for {why}" for why, num in self.uncoloured.items()]
        return self.no_tokenizer + "".join(lacks)

    def _text(self, kept: Kept) -> Record:
        drafts, pieces = kept.drafts, self._pieces(kept)
        if drafts is None or pieces is None:
            return {"text": clip(kept.text)[0]}
        shown, stretches = clip(pieces, MAX_SHOWN_TOKENS)
        return {
            "text": shown,
            "stretches": stretches,
            "drafts": drafts_within(drafts, stretches, self._name_of),
            "drafted": sum_up(drafts, [len(pieces)], len(pieces)),
        }

    def _turns(self, kept: Kept, turns: KeptTurns) -> Record:
        drafts, pieces, num_tokens = kept.drafts, self._pieces(kept), len(kept.token_ids)
        shown: Record = {
            "text": clip(kept.text)[0],
            "turns": len(turns.given) + 1,
            "told": describe(turns),
            "parts": show_turns(turns, turns.last_turn, num_tokens, pieces, drafts or (), self._name_of),
        }
        if drafts is None or pieces is None:
            return shown
        ends = [end for _, end in own_stretches(turns, num_tokens)]
        return shown | {"drafted": sum_up(drafts, ends, num_drawn(kept))}

    def _pieces(self, kept: Kept) -> list[str] | None:
        if kept.drafts is None:
            self.uncoloured["vLLM on a GPU does not tell who drafted them"] += 1
            return None
        if self.tokenizer is None:
            return None
        pieces = self.tokenizer.pieces(kept.token_ids)
        if "".join(pieces) == kept.text:
            return pieces
        self.uncoloured["the tokenizer gives another text"] += 1
        return None

    def _name_of(self, token_id: int) -> str:
        assert self.tokenizer is not None
        if token_id not in self._names:
            self._names[token_id] = self.tokenizer.name_of(token_id)
        return self._names[token_id]


def _find_tokenizer(run: RunRecords) -> tuple[Tokenizer | None, str]:
    named = run.setting("model.path")
    folders = [run.folder / "policy", run.folder / "best", *([Path(named)] if isinstance(named, str) else [])]
    lacks = "; prompts are not decoded and tokens not coloured"
    for folder in folders:
        if folder.is_dir() and has_tokenizer(folder):
            try:
                return load_tokenizer(folder), ""
            except UserError as error:
                return None, f"{lacks}: {error}"
    return None, f"{lacks}, for the model's tokenizer is not at hand"
