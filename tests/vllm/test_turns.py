"""A run with tools that generates with vLLM: the tokens, calls and weights of our own engine, with drafts and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.hf.checkpoint_parts import hash_of
from tests.unit.training.environments import parts
from tests.unit.training.environments.test_turns import configure, responses, tokens_of
from tests.vllm.parts import in_vllm, make_drafter
from tlt.training.report.step_record import read_metrics

pytestmark = [*in_vllm, pytest.mark.timeout(1200)]
PROGRAM = """
import sys
from pathlib import Path
from tlt.apps.api import train
from tlt.base.config.schema import Config

if __name__ == "__main__":
    train(Config.from_json(Path(sys.argv[1]).read_text()))
"""


def run(model: Path, folder: Path, rollout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Runs in a process of its own. Returns what must be the same."""
    calls, program, written = (
        folder.with_suffix(".calls"),
        folder.with_suffix(".py"),
        folder.with_suffix(".json"),
    )
    config = configure(
        model,
        folder,
        "tools",
        run={"num_ranks": 1, "num_steps": 2, "out_dir": str(folder), "device": "cpu", "dtype": "float32"},
        rollout={"problems_per_step": 2, "samples_per_problem": 4, **rollout},
        **sections,
    )
    for path, text in ((calls, ""), (program, PROGRAM), (written, config.to_json())):
        path.write_text(text)
    told = {"TLT_TEST_CALLS": str(calls), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, program, written],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {
        "tokens": sorted(tokens_of(folder)),
        "calls": Counter(calls.read_text().splitlines()),
        "weights": hash_of(folder / "policy"),
    }


def test_turns_with_vllm_are_those_of_our_own_engine(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    model = parts.write_model(tmp_path / "model", **sizes)
    drafter = make_drafter(model, tmp_path / "drafter")
    vllm: dict[str, Any] = {"engine": "vllm", "kv_gib": 0.1}
    drafts = {"drafter": {"path": str(drafter)}, "vllm": {"compile": False}}
    own = run(model, tmp_path / "own", {"speculation": "off"})
    off = run(model, tmp_path / "off", {**vllm, "speculation": "off"}, vllm={"compile": False})
    on = run(model, tmp_path / "on", {**vllm, "speculation": "3x1x3"}, **drafts)
    assert sum(len(one["turns"]["given"]) for one in responses(tmp_path / "own")) > 4
    for name, expected in own.items():
        assert off[name] == expected, name
        assert on[name] == expected, name
    assert all(
        record.rollout.accept_length >= 1 for record in read_metrics(tmp_path / "on" / "metrics.jsonl")
    )
