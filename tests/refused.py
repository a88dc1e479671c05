"""A user's mistake, as every test expects it: a UserError of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tlt.base.types import UserError


@contextmanager
def refused(match: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects a UserError of one line. match: a pattern that is found in it."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
