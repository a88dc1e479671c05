"""Rollouts beside somebody else's trainer, in processes: the bare loop of examples/, and two ranks against
one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_live import make_model
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.hf.module import module_config

ROOT = Path(__file__).parents[3]

LIVE = """
import sys
import torch.distributed as dist
import tlt
from tests.unit.training.test_live import PARAMS, make_model

rollouts = tlt.LiveRollouts(make_model(), tlt.LiveSettings(sys.argv[1] + "/drafter", "learned:3x1x3", max_batch_size=4))
prompts = [[1, 5, 6 + number] for number in range(6) for _ in range(4)]
share = len(prompts) // size
mine = prompts[rank * share : (rank + 1) * share]
for step in range(2):
    responses = rollouts.generate(mine, PARAMS, step)
    assert [list(response.prompt_ids) for response in responses] == mine
    say([response.token_ids for response in responses], rollouts.latest.check.version)
rollouts.close()
"""

PREPARED = """
import json, os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def say(tokens, about):
    with open(f"{sys.argv[1]}/of-{size}.rank{rank}.jsonl", "a") as file:
        file.write(json.dumps({"tokens": tokens, "about": about}) + "\\n")
"""
JOIN = """
if size > 1:
    dist.init_process_group("gloo")
"""
LEAVE = """
if size > 1:
    dist.destroy_process_group()
"""


def run(folder: Path, words: list[str], ranks: int) -> None:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=folder,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    folder.joinpath(f"stdout-{ranks}").write_text(done.stdout)


def responses(folder: Path, ranks: int) -> list[Any]:
    """By step, the responses of all ranks, one rank after the other."""
    files = [(folder / f"of-{ranks}.rank{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [
        [ids for line in lines for ids in json.loads(line)["tokens"]] for lines in zip(*files, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bare_loop_of_the_examples_runs(workspace: Path, ranks: int) -> None:
    words = [str(ROOT / "examples" / "bare_loop.py"), "--model", "model", "--drafter", "drafter"]
    run(workspace, [*words, "--steps", "2", "--group", "2", "--max-tokens", "24"], ranks)
    lines = (workspace / f"stdout-{ranks}").read_text().splitlines()
    for rank in range(ranks):
        assert sum(f"rank {rank}: reward" in line for line in lines) == 2


@pytest.mark.slow
def test_two_ranks_get_the_responses_that_one_gets_each_of_its_own_prompts(tmp_path: Path) -> None:
    save_drafter(
        tmp_path / "drafter",
        new_model(drafter_shape(module_config(make_model()))).initialize(1),
        torch.float32,
    )
    (tmp_path / "program.py").write_text(PREPARED + JOIN + LIVE + LEAVE)
    for ranks in (1, 2):
        run(tmp_path, ["program.py", str(tmp_path)], ranks)
    assert responses(tmp_path, 2) == responses(tmp_path, 1)
    assert len(responses(tmp_path, 1)) == 2
