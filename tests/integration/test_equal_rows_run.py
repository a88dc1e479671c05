"""Whole runs with run.equal_rows, in bfloat16: the update's log-probabilities are the engine's in every step, and
speculation changes no token and no weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Tlt
from tests.integration.programs import Programs
from tests.integration.test_run import PATIENCE, records, same_weights, train, what_the_law_fixes

pytest.importorskip("numba", reason="rows are equal in compiled loops")
pytestmark = pytest.mark.timeout(3 * PATIENCE)

EQUAL = (
    "--run.equal_rows",
    "true",
    "--run.dtype",
    "bfloat16",
    "--run.num_steps",
    "2",
    "--evaluation.num_problems",
    "0",
)
KL, LORA = ("--algorithm.kl_coefficient", "0.1"), ("--lora.rank", "4", "--lora.alpha", "8")
MINIBATCHES = ("--algorithm.minibatches", "2", "--algorithm.epochs", "2")


def assert_no_gap(out_dir: Path) -> None:
    updates = [record.update for record in records(out_dir)]
    assert [update.engine_trainer_logprob_gap_max for update in updates] == [0.0, 0.0]
    assert all(update.grad_norm > 0 for update in updates)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(KL, id="a KL", marks=pytest.mark.slow),
        pytest.param(LORA, id="adapters", marks=pytest.mark.slow),
        pytest.param((*KL, *LORA, *MINIBATCHES), id="all, in minibatches"),
    ],
)
def test_the_update_has_the_engines_logprobs_with_and_without_drafts(
    words: tuple[str, ...], workspace: Path, tlt_here: Tlt, tmp_path: Path
) -> None:
    for name, modes in (("drafted", ("4x1x4",)), ("off", ("off", "--drafter.train", "false"))):
        here = ("--run.out_dir", str(tmp_path / name), "--run.num_ranks", "1", *EQUAL, *words)
        assert tlt_here("train", str(workspace / "run.toml"), *here, "--rollout.speculation", *modes) == 0
        assert_no_gap(tmp_path / name)
    assert what_the_law_fixes(tmp_path / "drafted") == what_the_law_fixes(tmp_path / "off")
    assert same_weights(tmp_path / "drafted", tmp_path / "off")


def test_a_sharded_update_has_the_engines_logprobs(workspace: Path, programs: Programs) -> None:
    sharded = ("--parallel.policy", "fsdp", *MINIBATCHES, *KL)
    assert_no_gap(train(workspace, "sharded", *EQUAL, *sharded, programs=programs))
