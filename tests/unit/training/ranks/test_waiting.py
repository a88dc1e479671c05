"""Who is awaited: named where a collective's time-out has passed; and a store that has fallen silent is
left."""

from __future__ import annotations

import os
import traceback

import pytest
import torch
import torch.distributed as dist

from tlt.training.ranks import store as store_module
from tlt.training.ranks import waiting
from tlt.training.ranks.store import Watch, leave_when_silent
from tlt.training.ranks.waiting import RankAwaited, naming_absent_ranks
from tlt.training.ranks.world import World


def all_reduce(message: str) -> None:
    """Stands in for a collective that fails."""
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("others", "who"), [((), "ranks 1, 2"), ((2,), "rank 1"), ((1, 2), "nobody: all ranks waited")], ids=str
)
def test_a_time_out_names_the_ranks_that_did_not_wait_themselves(
    others: tuple[int, ...], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ROLL_CALL_SECONDS", 0.0)
    store = dist.HashStore()
    for rank in others:
        store.set(f"waited/{rank}", "here")
    world = World(0, 3, 0, torch.device("cpu"), store, None, timeout_seconds=20)
    with pytest.raises(RankAwaited) as caught, naming_absent_ranks(world):
        all_reduce("Timed out waiting 20000ms for recv operation to complete")
    assert str(caught.value) == f"rank 0 has waited 20 s (run.timeout_seconds) in a collective for {who}"
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.name == "all_reduce", "a restart is judged by the line that failed"


@pytest.mark.parametrize(("message", "num_ranks"), [("Connection closed by peer", 2), ("Timed out", 1)])
def test_every_other_error_stays_what_it_is(message: str, num_ranks: int) -> None:
    world = World(0, num_ranks, 0, torch.device("cpu"), dist.HashStore(), None)
    with pytest.raises(RuntimeError, match=message) as caught, naming_absent_ranks(world):
        all_reduce(message)
    assert type(caught.value) is RuntimeError


def test_a_rank_whose_store_has_fallen_silent_leaves_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, codes = Watch(), []

    def leave(code: int) -> None:
        codes.append(code)
        watch.has_left.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(store_module, "_WATCH_SECONDS", 0.01)
    leave_when_silent(watch, 0.05, "10.0.0.1:29500")
    assert watch.has_left.wait(60)
    assert codes == [1]
    said = capsys.readouterr().err
    assert said.startswith("tlt: error: the store of rank 0 at 10.0.0.1:29500 has not answered for 0.06 s")
