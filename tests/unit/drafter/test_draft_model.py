"""The trainable drafter sees nothing that it will not know when it drafts (FIELD §2, 1 and 2)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafter.parts import MODEL, SIZE, make_batch, plain_forward, randn, unroll
from tlt.drafter.model import PackedDrafter, align


@pytest.mark.parametrize("changed", [0, 4, 10])
def test_the_training_forward_of_a_pair_depends_on_no_later_pair(changed: int) -> None:
    embeddings, features = randn(11, SIZE, seed=1), randn(11, SIZE, seed=2)
    before = plain_forward(embeddings, features)
    for inputs in (embeddings, features):
        inputs[changed:] += 1.0
        after = plain_forward(embeddings, features)
        torch.testing.assert_close(after[:changed], before[:changed], rtol=0, atol=1e-12)
        assert (after[changed:] - before[changed:]).abs().amax(-1).min() > 1e-6, (
            "and on itself and all before"
        )
        inputs[changed:] -= 1.0


def test_a_pair_that_drafts_on_in_training_sees_no_later_pair_but_the_token_it_reads() -> None:
    """Step s of pair t reads token t + 1 + s, and nothing beyond: neither a feature after t nor another
    pair's step."""
    lengths, changed, steps = (9, 7), 4, 3
    base, other = make_batch(lengths), make_batch(lengths)
    other.captured_NF[changed:9] += 1.0
    before, after = (unroll(MODEL, batch, steps) for batch in (base, other))
    for s in range(steps):
        torch.testing.assert_close(after[s][:changed], before[s][:changed], rtol=0, atol=1e-12)
        assert (after[s][changed:8] - before[s][changed:8]).abs().amax(-1).min() > 1e-6, (
            "what comes from it changes"
        )
        torch.testing.assert_close(after[s][8:], before[s][8:], rtol=0, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=6))
def test_the_pair_at_t_joins_feature_t_with_token_t_plus_1_and_predicts_its_feature(
    lengths: list[int],
) -> None:
    """Tokens and features hold their own (sequence, position)."""
    code = torch.tensor([[sequence, position] for sequence, n in enumerate(lengths) for position in range(n)])
    pairs = align(lengths)
    expected = [(sequence, t) for sequence, n in enumerate(lengths) for t in range(n - 1)]
    assert [tuple(row) for row in code[pairs.feature_index_M].tolist()] == expected
    assert [tuple(row) for row in code[pairs.token_index_M].tolist()] == [(s, t + 1) for s, t in expected]
    assert [tuple(row) for row in code[pairs.token_index_M].tolist()] == [(s, t + 1) for s, t in expected]
    assert pairs.positions_M.tolist() == [t for _, t in expected]
    assert pairs.lengths == tuple(n - 1 for n in lengths)


def test_packed_weights_that_lack_a_tensor_are_refused() -> None:
    for name in MODEL.state_dict():
        partial = {k: v for k, v in MODEL.state_dict().items() if k != name}
        with pytest.raises(RuntimeError, match=f"{name} is missing"):
            PackedDrafter(MODEL.config, torch.float64).load(partial, 0)
