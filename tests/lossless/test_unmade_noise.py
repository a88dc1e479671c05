"""On a GPU the engine makes no noise to verify with: the law's kernel makes it while it draws. Here such an engine runs on the
CPU, where the plain law draws in the kernel's place (tests/vllm/test_fused_law.py holds the kernel to the plain law)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import Tensor

from tests.lossless.helpers import Switching, make_engine, make_policy, make_requests, tokens_of
from tlt import speculative
from tlt.engine import noise as noise_module
from tlt.engine.engine import RolloutEngine
from tlt.engine.noise import NoiseBlocks
from tlt.speculative import rows
from tlt.speculative.sampling import kernels
from tlt.speculative.verify import NoiseAt
from tlt.tuning.tuner import Fixed, default_arms
from tlt.types import Strategy, UserError

POLICY = make_policy()
REQUESTS = make_requests(num_problems=4, num_samples=2, seed=5)
OFF = tokens_of(make_engine(POLICY), REQUESTS)
CHAIN, TREE = Strategy("learned", 4, 1, 4), Strategy("learned", 3, 2, 6)


def as_on_a_gpu(engine: RolloutEngine) -> RolloutEngine:
    engine.noise.is_ahead, engine.noise.max_blocks = False, 0
    return engine


@pytest.mark.parametrize("strategy", [CHAIN, TREE, Strategy("ngram", 3, 2, 6), Strategy("hybrid", 5, 1, 5)], ids=str)
@pytest.mark.parametrize("max_batch_size", [1, 6])
def test_drafts_and_tokens_are_those_of_an_engine_that_makes_its_noise_ahead(strategy: Strategy, max_batch_size: int) -> None:
    ahead = make_engine(POLICY, Fixed(strategy), max_batch_size=max_batch_size)
    unmade = as_on_a_gpu(make_engine(POLICY, Fixed(strategy), max_batch_size=max_batch_size))
    assert tokens_of(ahead, REQUESTS) == tokens_of(unmade, REQUESTS) == OFF
    assert unmade.stats.accept_by_depth == ahead.stats.accept_by_depth
    assert unmade.stats.num_verifications > 0


def test_strategies_that_change_every_step_change_no_token() -> None:
    engine = as_on_a_gpu(make_engine(POLICY, Switching(default_arms(("learned",)), seed=2), max_batch_size=5))
    assert tokens_of(engine, REQUESTS) == OFF


def test_without_drafts_no_noise_is_made_but_by_who_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Tensor:
        raise AssertionError("noise was made ahead")

    monkeypatch.setattr(noise_module, "gumbel_noise", refused)
    engine = as_on_a_gpu(make_engine(POLICY, Fixed(Strategy.OFF), max_batch_size=5))
    assert tokens_of(engine, REQUESTS) == OFF
    assert engine.noise.blocks_SWV.numel() == 0
    with pytest.raises(AssertionError, match="made ahead"):
        tokens_of(make_engine(POLICY), REQUESTS)


def test_a_drafter_is_given_the_noise_it_can_rank_with_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = noise_module.gumbel_noise
    monkeypatch.setattr(noise_module, "gumbel_noise", lambda *args: made.append(plain(*args).shape[1]) or plain(*args))
    engine = as_on_a_gpu(make_engine(POLICY, Fixed(CHAIN), max_batch_size=5))
    assert tokens_of(engine, REQUESTS) == OFF
    assert set(made) == {CHAIN.depth}, "a verification draws at one position more"


@pytest.mark.parametrize("strategy", [Strategy.OFF, TREE], ids=str)
def test_noise_of_a_position_beside_it_is_noticed(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nodes = NoiseBlocks.of_nodes

    def shifted(self: NoiseBlocks, *args: Any) -> Any:
        noise = of_nodes(self, *args)
        assert isinstance(noise, NoiseAt)
        return NoiseAt(noise.keys_B4, noise.positions_BN + 1)

    monkeypatch.setattr(NoiseBlocks, "of_nodes", shifted)
    assert tokens_of(as_on_a_gpu(make_engine(POLICY, Fixed(strategy), max_batch_size=5)), REQUESTS) != OFF


def test_rows_drawn_a_part_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = rows._plain
    monkeypatch.setattr(rows, "_plain", lambda logits, *args: calls.append(len(logits)) or plain(logits, *args))
    for num_bytes in (1, 28 * 61 * 4, 1 << 28):
        monkeypatch.setattr(rows, "ROW_BYTES", num_bytes)
        assert tokens_of(as_on_a_gpu(make_engine(POLICY, Fixed(TREE), max_batch_size=5)), REQUESTS) == OFF
    assert {1, 4} < set(calls)


def test_a_gpu_without_triton_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tlt.speculative.fused", raising=False)
    monkeypatch.delattr(speculative, "fused", raising=False)
    with pytest.raises(UserError, match=r"^sampling on a GPU: .*triton.*; install Triton .*, or run on the CPU$"):
        kernels()
