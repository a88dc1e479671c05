"""Chooses which of a run's kept responses the page shows: some of each of a few steps and evaluations, spread
over the run. Their number and their text are bounded, and what is left out is said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from tlt.hf.tokenizer import has_tokenizer, load_tokenizer
from tlt.io.files import Record, parse_json
from tlt.page.gather import RunRecords
from tlt.saved.responses import kept_by
from tlt.types import UserError

MAX_FILES = 8
"""Steps, and evaluations, whose responses are shown."""
MAX_RESPONSES = 240
"""Responses shown of all runs."""
MAX_CHARACTERS = 2000
"""Characters shown of a prompt or response, its begin and its end."""

DecodePrompt = Callable[[Sequence[int]], str]


def spread(items: Sequence[Path], count: int) -> list[Path]:
    """Returns up to `count` items, evenly spread, the first and the last among them."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]


def show_responses(runs: Sequence[RunRecords]) -> tuple[list[Record], list[str]]:
    """Returns the responses to show, and one line on what is left out or missing of each run."""
    shown, notes = list[Record](), list[str]()
    for run in runs:
        files = {purpose: kept_by(run.folder, purpose) for purpose in ("rollout", "evaluation")}
        chosen = [(purpose, path) for purpose, paths in files.items() for path in spread(paths, MAX_FILES)]
        if not chosen:
            notes.append(f"{run.name} has kept no responses (run.keep_responses)")
            continue
        decode, reason = _find_decode(run)
        share, num_all = MAX_RESPONSES // len(runs) // len(chosen), 0
        before = len(shown)
        for purpose, path in chosen:
            lines = path.read_bytes().splitlines()
            num_all += len(lines)
            for line in _evenly(lines, max(share, 1)):
                shown.append(_read(line, path, purpose, run.name, decode))
        num_files = sum(map(len, files.values()))
        of_files = f"{len(chosen)} of {num_files} steps and evaluations"
        notes.append(f"{run.name}: {len(shown) - before} of {num_all} responses of {of_files}{reason}")
    return shown, notes


def _evenly(lines: Sequence[bytes], count: int) -> Iterable[bytes]:
    return lines if len(lines) <= count else [lines[i * len(lines) // count] for i in range(count)]


def _read(line: bytes, path: Path, purpose: str, run: str, decode: DecodePrompt | None) -> Record:
    """Reads a response for the page. Raises UserError for a line that is none."""
    try:
        kept = parse_json(line.decode())
        prompt_ids, token_ids = kept["prompt_ids"], kept["token_ids"]
        return {
            "run": run,
            "purpose": "held-out" if purpose == "evaluation" else "training",
            "step": kept["policy_step"] + 1 if purpose == "rollout" else int(path.stem.rpartition("-")[2]),
            "problem": str(kept["problem_id"]),
            "sample": kept["sample_index"],
            "reward": kept.get("reward"),
            "solved": bool(kept.get("is_solved")),
            "tokens": len(token_ids),
            "finish": kept["finish_reason"],
            "prompt": _clip(f"{len(prompt_ids)} token ids" if decode is None else decode(prompt_ids)),
            "text": _clip(str(kept["text"])),
            "error": kept.get("reward_error", ""),
        }
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: holds a line that is no response ({reason}); remove the line") from None


def _clip(text: str) -> str:
    half = MAX_CHARACTERS // 2
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:half]}\n[… {left_out:,} characters …]\n{text[-half:]}"


def _find_decode(run: RunRecords) -> tuple[DecodePrompt | None, str]:
    """Returns what decodes prompts, or None and why there is nothing that does."""
    named = run.setting("model.path")
    folders = [run.folder / "policy", run.folder / "best", *([Path(named)] if isinstance(named, str) else [])]
    for folder in folders:
        if folder.is_dir() and has_tokenizer(folder):
            try:
                return load_tokenizer(folder).decode, ""
            except UserError as error:
                return None, f"; prompts are not decoded: {error}"
    return None, "; prompts are not decoded, for the model's tokenizer is not at hand"
