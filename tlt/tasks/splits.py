"""The train and test splits: a function of a problem's content alone, so that the two share nothing, whatever
the seeds."""

from __future__ import annotations

import hashlib
from typing import Literal, cast, get_args

from tlt.base.types import UserError

Split = Literal["train", "test"]

TEST_ONE_IN = 8
"""One problem in this many belongs to the test split."""


def digest(content: str) -> str:
    """Returns 64 bits, in hexadecimal, that identify `content`."""
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def split_of(content: str) -> Split:
    """Returns the split of the problem that `content` identifies."""
    return "test" if int(digest(content), 16) % TEST_ONE_IN == 0 else "train"


def check_split(task: str, split: str) -> Split:
    """Returns `split` where it is one. Raises UserError."""
    if split not in get_args(Split):
        raise UserError(f"task {task}: split {split!r} does not exist; use one of {get_args(Split)}")
    return cast(Split, split)
