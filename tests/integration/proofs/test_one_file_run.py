"""examples/one_file.py as a program: two ranks with drafts, one without."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from tests.unit.test_one_file import FILE, one_file

pytestmark = pytest.mark.slow


def train_alone(speculation: str, *words: str) -> None:
    """Runs the program in this process, as one rank."""

    def call(train: Callable[..., None], args: tuple[object, ...], nprocs: int) -> None:
        train(0, *args)

    with (
        patch.object(one_file, "NUM_RANKS", 1),
        patch.object(torch.multiprocessing, "spawn", call),
        patch.object(sys, "argv", [str(FILE), "--speculation", speculation, *words]),
    ):
        one_file.main()


def test_two_ranks_train_on_the_same_tokens_with_drafts_as_one_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps in float64, by the command line. The second step's tokens follow from the first's update."""
    words = ["--steps", "2", "--max-tokens", "48", "--dtype", "float64"]
    with subprocess.Popen([sys.executable, str(FILE), *words], stdout=subprocess.PIPE, text=True) as drafting:
        train_alone("off", *words)
        printed = {"off": capsys.readouterr().out, "adaptive": drafting.communicate()[0]}
    assert drafting.returncode == 0
    digests = {how: re.findall("digest of all tokens ([0-9a-f]{16})", text) for how, text in printed.items()}
    assert len(set(digests["off"])) == 2
    assert digests["adaptive"] == digests["off"]
    rewards = [float(reward) for reward in re.findall(r"reward ([0-9.]+)", printed["off"])]
    assert 0 < rewards[0] < 1, "without a reward there is no update"
    assert "no tokens per verification" in printed["off"]
    assert "no tokens per verification" not in printed["adaptive"]
