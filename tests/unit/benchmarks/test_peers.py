"""Peers get the same work as we do, and a peer that cannot run says so in one line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.longtail import Workload, hash_model
from benchmarks.peers import PeerResult, generate_batch, run_transformers, run_vllm, setup_vllm
from benchmarks.real_size.competitors import PeerError
from tests.lossless.helpers import CONFIG, make_policy
from tlt.hf.weights import save_model
from tlt.types import Request, SamplingParams, UserError

PROMPTS = ((1, 2, 3), (4,), (5, 6, 8, 9), (1, 2, 3), (10, 11))
LENGTHS = (3, 9, 1, 5, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "model"
    save_model(folder, CONFIG, dict(make_policy().state_dict()), dtype=torch.float32, source=None)
    return folder


@pytest.fixture(scope="module")
def workload(model: Path) -> Workload:
    params = SamplingParams(max_tokens=20, stop_ids=(7,))
    requests = tuple(Request(f"p{i}", 0, prompt, params) for i, prompt in enumerate(PROMPTS))
    return Workload("five", hash_model(model), requests, LENGTHS)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, attn_implementation="sdpa")


def test_transformers_generates_exactly_the_wanted_lengths(loaded: Any) -> None:
    torch.manual_seed(0)
    responses = generate_batch(loaded, PROMPTS, LENGTHS, temperature=1.0)
    assert [len(response) for response in responses] == list(LENGTHS)
    assert responses[0] != responses[3][:3] or len(set(map(tuple, responses))) > 1  # it samples


def test_padding_on_the_left_does_not_change_what_transformers_says(loaded: Any) -> None:
    together = generate_batch(loaded, PROMPTS, LENGTHS, temperature=0.0)
    alone = [
        generate_batch(loaded, [p], [n], temperature=0.0)[0] for p, n in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert together == alone


def test_transformers_runs_a_workload_in_rounds_and_leaves_the_threads_alone(
    model: Path, workload: Workload
) -> None:
    shown: list[PeerResult] = []
    before = torch.get_num_threads()
    (result,) = run_transformers(model, [workload], batch_size=2, rounds=3, threads=1, on_result=shown.append)
    assert shown == [result]
    assert torch.get_num_threads() == before
    assert result.num_tokens == sum(LENGTHS)
    assert len(result.seconds) == 3
    assert result.details["num_steps"] == 9 + 5 + 5  # a batch lasts as long as its longest response
    assert set(result.versions) == {"transformers", "torch"}
    assert json.loads(json.dumps(result.to_json()))["tokens_per_second"] == pytest.approx(
        result.tokens_per_second
    )


def test_another_models_workload_is_refused(model: Path, workload: Workload) -> None:
    other = dataclasses.replace(workload, model_hash="ab" * 32)
    with pytest.raises(PeerError, match=r"but the workload 'five' was made for abababababab…"):
        run_transformers(model, [other], batch_size=2)


def test_a_folder_that_is_no_environment_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(PeerError, match="exists but holds no environment with vLLM"):
        setup_vllm(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_failed_installation_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: no matching distribution\\nnotice: pip is old"
    command = [sys.executable, "-c", f"import sys; sys.exit('{said}')"]
    monkeypatch.setattr(peers, "setup_commands", lambda folder: [command])
    with pytest.raises(PeerError, match=r"failed \(ERROR: no matching distribution\)") as caught:
        setup_vllm(tmp_path / "env")
    assert "\n" not in str(caught.value)


def test_a_missing_interpreter_or_package_is_told_in_one_line(
    model: Path, workload: Workload, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"there is no interpreter .*nowhere; set the environment up first"
    ) as caught:
        run_vllm(tmp_path / "nowhere", model, workload, max_num_seqs=2)
    assert "\n" not in str(caught.value)
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    with pytest.raises(PeerError, match="has no vLLM"):
        run_vllm(empty / "bin" / "python", model, workload, max_num_seqs=2)
