"""The train and test splits. A problem's content alone decides: they are disjoint whatever the seeds."""

from __future__ import annotations

import hashlib
from typing import Literal, cast, get_args

from tlt.base.types import UserError

Split = Literal["train", "test"]

TEST_ONE_IN = 8


def digest(content: str) -> str:
    """64 bits, in hexadecimal."""
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def split_of(content: str) -> Split:
    return "test" if int(digest(content), 16) % TEST_ONE_IN == 0 else "train"


def check_split(task: str, split: str) -> Split:
    if split not in get_args(Split):
        raise UserError(f"task {task}: split {split!r} does not exist; use one of {get_args(Split)}")
    return cast(Split, split)
