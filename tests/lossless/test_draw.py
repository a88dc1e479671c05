"""The reference of draw.py: a part at a time where memory is short, and the one line that a GPU without
Triton gets."""

from __future__ import annotations

import sys

import pytest

from tests.lossless.helpers import make_engine, make_policy, make_requests, tokens_of
from tests.refused import refused
from tlt.base.strategy import Strategy
from tlt.speculation import law as speculative
from tlt.speculation.law import draw as draw_module
from tlt.speculation.law.sampling import kernels
from tlt.speculation.tuner.tuner import FixedTuner

POLICY = make_policy()
REQUESTS = make_requests(num_problems=4, num_samples=2, seed=5)
TREE = Strategy("learned", 3, 2, 6)


def test_rows_drawn_a_part_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    off = tokens_of(make_engine(POLICY), REQUESTS)
    calls: list[int] = []
    plain = draw_module.draw_by_definition
    monkeypatch.setattr(
        draw_module,
        "draw_by_definition",
        lambda logits, law: calls.append(len(logits)) or plain(logits, law),
    )
    for num_bytes in (1, 28 * 61 * 4, 1 << 28):
        monkeypatch.setattr(draw_module, "NOISE_BYTES", num_bytes)
        assert tokens_of(make_engine(POLICY, FixedTuner(TREE), max_batch_size=5), REQUESTS) == off
    assert {1, 4} < set(calls), "float64 is the reference's"


def test_a_gpu_without_triton_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tlt.speculation.law.fused", raising=False)
    monkeypatch.delattr(speculative, "fused", raising=False)
    with refused(r"^sampling on a GPU: .*triton.*; install Triton .*, or run on the CPU$"):
        kernels()


def test_without_numba_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "tlt.speculation.law.compiled", raising=False)
    monkeypatch.delattr(speculative, "compiled", raising=False)
    draw_module.compiled_loops.cache_clear()
    assert draw_module.compiled_loops() is None
    draw_module.compiled_loops.cache_clear()


def test_a_numba_that_cannot_be_loaded_is_no_reason_to_do_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tlt.speculation.law.compiled", None)
    monkeypatch.delattr(speculative, "compiled", raising=False)
    draw_module.compiled_loops.cache_clear()
    with pytest.raises(ImportError):
        draw_module.compiled_loops()
