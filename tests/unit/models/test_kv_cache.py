"""What one forward reads of a batch of prompts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.models.kv_cache import PREFILL_TOKENS, prefill_groups


@given(st.lists(st.integers(1, PREFILL_TOKENS + 9), max_size=30))
@settings(max_examples=50, deadline=None)
def test_a_forward_is_bounded_and_takes_what_fits(lengths: list[int]) -> None:
    groups = list(prefill_groups(lengths, lambda length: length))
    assert [length for group in groups for length in group] == lengths
    assert all(sum(group) <= PREFILL_TOKENS or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > PREFILL_TOKENS for group, following in pairwise(groups))
