"""Chooses a run's kept responses for the page: a bounded sample, spread over steps and evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tlt.apps.page.gather import RunRecords
from tlt.apps.page.tokens import MAX_SHOWN_TOKENS, clip, drafts_within, sum_up
from tlt.apps.page.turns import describe, own_stretches, show_turns
from tlt.base.io.files import Record, parse_json, refuse_endless
from tlt.base.types import Turns, UserError, read_drafts
from tlt.models.hf.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from tlt.training.saved.responses import kept_by

MAX_FILES = 8
"""Of steps, and of evaluations, each."""
MAX_RESPONSES = 256
"""Of all runs together."""
_MOST = 1 << 31


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
    """Chooses whole groups, which are neighbouring lines; the last may be cut."""
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
            kept = _checked(parse_json(line.decode()))
            prompt_ids, tokenizer = kept["prompt_ids"], self.tokenizer
            prompt = f"{len(prompt_ids)} token ids" if tokenizer is None else tokenizer.decode(prompt_ids)
            return {
                "run": self.run.name,
                "purpose": "held-out" if purpose == "evaluation" else "training",
                "step": kept["policy_step"] + 1
                if purpose == "rollout"
                else int(path.stem.rpartition("-")[2]),
                "problem": str(kept["problem_id"]),
                "sample": kept["sample_index"],
                "reward": kept.get("reward"),
                "solved": bool(kept.get("is_solved")),
                "tokens": num_own_tokens(kept),
                "finish": kept["finish_reason"],
                "prompt": clip(prompt)[0],
                "error": kept.get("reward_error", ""),
                **(self._text(kept) if kept.get("turns") is None else self._turns(kept)),
            }
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{path}: holds a line that is no response ({reason}); remove the line") from None

    def missing(self) -> str:
        lacks = [f"; tokens of {num} are not coloured, for {why}" for why, num in self.uncoloured.items()]
        return self.no_tokenizer + "".join(lacks)

    def _text(self, kept: Record) -> Record:
        text, drafts, pieces = str(kept["text"]), read_drafts(kept.get("drafts")), self._pieces(kept)
        if drafts is None or pieces is None:
            return {"text": clip(text)[0]}
        shown, stretches = clip(pieces, MAX_SHOWN_TOKENS)
        return {
            "text": shown,
            "stretches": stretches,
            "drafts": drafts_within(drafts, stretches, self._name_of),
            "drafted": sum_up(drafts, [len(pieces)], len(pieces)),
        }

    def _turns(self, kept: Record) -> Record:
        turns, drafts, num_tokens = _read_turns(kept), read_drafts(kept.get("drafts")), len(kept["token_ids"])
        pieces, last_turn = self._pieces(kept), str(kept["turns"].get("last_turn", ""))
        shown: Record = {
            "text": clip(str(kept["text"]))[0],
            "turns": len(turns.given) + 1,
            "told": describe(turns),
            "parts": show_turns(turns, last_turn, num_tokens, pieces, drafts or (), self._name_of),
        }
        if drafts is None or pieces is None:
            return shown
        ends = [end for _, end in own_stretches(turns, num_tokens)]
        return shown | {"drafted": sum_up(drafts, ends, num_own_tokens(kept))}

    def _pieces(self, kept: Record) -> list[str] | None:
        """None: the tokens are not coloured."""
        if kept.get("drafts") is None:
            self.uncoloured["vLLM on a GPU does not tell who drafted them"] += 1
            return None
        if self.tokenizer is None:
            return None
        pieces = self.tokenizer.pieces(kept["token_ids"])
        if "".join(pieces) == kept["text"]:
            return pieces
        self.uncoloured["the tokenizer gives another text"] += 1
        return None

    def _name_of(self, token_id: int) -> str:
        assert self.tokenizer is not None
        if token_id not in self._names:
            self._names[token_id] = self.tokenizer.name_of(token_id)
        return self._names[token_id]


def num_own_tokens(kept: Record) -> int:
    """The policy's own."""
    turns = _read_turns(kept)
    return len(kept["token_ids"]) - sum(end - first for first, end in turns.given)


def _read_turns(kept: Record) -> Turns:
    return Turns.read(kept.get("turns")) or Turns()


def _checked(kept: Any) -> Record:
    if not isinstance(kept, dict):
        raise TypeError("it is no object")
    refuse_endless(kept)
    for name in ("prompt_ids", "token_ids"):
        if not isinstance(kept[name], list) or not all(type(i) is int and 0 <= i < _MOST for i in kept[name]):
            raise ValueError(f"{name} is no list of token ids")
    if type(kept.get("reward")) not in (int, float, type(None)):
        raise ValueError("reward is no number")
    if not all(type(kept[name]) is int for name in ("policy_step", "sample_index")):
        raise ValueError("policy_step or sample_index is no whole number")
    if not all(isinstance(kept.get(name, ""), str) for name in ("text", "finish_reason", "reward_error")):
        raise ValueError("text, finish_reason or reward_error is no text")
    _check_turns(kept)
    for draft in read_drafts(kept.get("drafts")) or ():
        counts = draft.place, draft.num_drafted, draft.num_accepted, draft.rejected or 0
        if not isinstance(draft.drafter, str) or not all(type(n) is int and 0 <= n < _MOST for n in counts):
            raise ValueError("drafts: a draft is not (place, drafter, drafted, accepted, rejected)")
    return kept


def _check_turns(kept: Record) -> None:
    turns = _read_turns(kept)
    edges = [0, *(place for stretch in turns.given for place in stretch), len(kept["token_ids"])]
    if not all(type(edge) is int for edge in edges) or edges != sorted(edges):
        raise ValueError("turns: given is no list of stretches of the response's tokens")
    if not all(isinstance(message, dict) for message in turns.messages):
        raise ValueError("turns: messages is no list of messages")
    counts = turns.num_calls, turns.num_errors, turns.num_timeouts
    if not all(type(count) is int for count in counts) or type(turns.seconds) not in (int, float):
        raise ValueError("turns: a count of calls, or seconds, is no number")


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
