"""A run's prompts as token ids: encoded once, by the process that starts the run.

rows, chat format, tokenizer's files and libraries ─▶ key ─┬─ the file's ─▶ its token ids
                                                           └─ another, or no file ─▶ encoded anew
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from tlt.base.io.data import PROMPTS, Records
from tlt.base.io.files import write_atomically
from tlt.base.value_types import plain
from tlt.models.hf.prompts import ChatFormat

NAMES = {"train": "prompts.train.jsonl", "test": "prompts.test.jsonl"}
"""Split → file. Its lines: key and digest, then the token ids of each row; none: the row is left out."""
_READ = (*PROMPTS, "tools", "images", "problem_id")
"""Columns that the encoding depends on."""
_LIBRARIES = "tokenizers", "transformers", "jinja2"
_TEXT = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class Encoded:
    key: str
    rows: Sequence[Sequence[int]]

    def write(self, path: Path) -> None:
        lines = "".join(f"{json.dumps(ids)}\n" for ids in self.rows)
        with write_atomically(path) as file:
            file.write(_header(self.key, lines) + lines)


def _header(key: str, lines: str) -> str:
    return json.dumps({"key": key, "sha256": hashlib.sha256(lines.encode()).hexdigest()}) + "\n"


def key_of(records: Records, chat: ChatFormat, longest: int | None, model: Path) -> str:
    """longest: longer prompts are omitted. model: folder of the tokenizer."""
    digest = hashlib.sha256()
    for line in _facts(records, chat, longest):
        digest.update(f"{line}\n".encode())
    files = chain(model.iterdir(), model.glob("additional_chat_templates/*"))
    for path in sorted(path for path in files if path.suffix in _TEXT and path.is_file()):
        digest.update(f"{path.name!a} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _facts(records: Records, chat: ChatFormat, longest: int | None) -> Iterator[str]:
    yield repr((chat, longest, [version(name) for name in _LIBRARIES]))
    for _, record in records:
        read = [record.get(name) for name in _READ]
        yield json.dumps(read, skipkeys=True, default=_as_json)


def _as_json(value: Any) -> Any:
    return repr(value) if (found := plain(value)) is value else found


def read_encoded(path: Path, key: str) -> Encoded | None:
    """None: no file, another key, or a damaged file."""
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError):
        return None
    if header != _header(key, "".join(lines)):
        return None
    return Encoded(key, [tuple(json.loads(line)) for line in lines])
