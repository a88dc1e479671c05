"""The device that ranks compute on. Collectives between processes are tested in
tests/integration/test_launch.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tlt.base.config.schema import Config, ModelSection, RunSection, TaskSection
from tlt.base.types import UserError
from tlt.training.build.layout import device_of
from tlt.training.ranks.world import choose_device

MODEL = Path(__file__).parents[4] / "recipes/countdown/base"


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "num_gpus", "name"),
    [
        ("auto", 2, 0, "cpu"),
        ("auto", 2, 2, "cuda"),
        ("auto", 1, 8, "cuda"),
        ("cpu", 2, 8, "cpu"),
        ("cuda", 2, 2, "cuda"),
    ],
)
def test_ranks_compute_on_gpus_where_each_can_have_one(
    wanted: str, num_ranks: int, num_gpus: int, name: str
) -> None:
    choice = choose_device(wanted, num_ranks, num_gpus)
    assert choice.name == name
    assert choice.reason


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused_with_both_remedies(wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_device(wanted, 4, 2)
    message = str(caught.value)
    assert all(
        part in message
        for part in ("run.num_ranks: 4 ranks", "has 2", "--run.num_ranks 2", "--run.device cpu")
    )
    assert "\n" not in message


def test_a_run_with_more_ranks_than_gpus_does_not_fall_back_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = make_config(num_ranks=2)
    with pytest.raises(UserError, match=r"run\.num_ranks: 2"):
        device_of(config)


@pytest.mark.parametrize(
    ("device", "num_gpus", "said"),
    [("auto", 1, "1 of 1 GPU(s)"), ("cuda", 8, "8 of 8 GPU(s)"), ("auto", 0, "no GPU was found")],
)
def test_where_nobody_says_how_many_every_gpu_has_a_rank(
    device: Literal["auto", "cuda"], num_gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert device_of(make_config(device=device)).reason == said


def make_config(**run: Any) -> Config:
    return Config(model=ModelSection(path=MODEL), task=TaskSection(name="t"), run=RunSection(**run))
