"""What is refused of an engine that is vLLM before one is started; without vLLM."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.refused import refused
from tlt.apps.plan.memory import COPY, plan_memory
from tlt.apps.plan.sizes import PlannedRun
from tlt.apps.run import start
from tlt.base.config.load import load_config
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import Adaptive, Off, parse_speculation
from tlt.engine.vllm import preflight
from tlt.engine.vllm.inside import release

RECIPE = Path(__file__).parents[4] / "recipes/countdown/quickstart.toml"
VLLM = {"rollout.engine": "vllm"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The release of vLLM that is installed, by its package's name; none at first but one that is known."""
    found = {"vllm": "0.32.0"}
    monkeypatch.setattr(release, "version_of", found.get)
    return found


def check(**changes: Any) -> None:
    given = {"speculation": Adaptive(), "has_learned": True, "dtype": torch.float32, "device": "cpu"}
    preflight.check_vllm(**{**given, "section": VllmSection(), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"section": VllmSection(tensor_parallel=2)}, None),
        ({"speculation": parse_speculation("4x2x8")}, "is a tree, and vLLM drafts chains; give 4x1x4"),
        ({"dtype": torch.float64}, "float64, which vLLM does not compute in; give float32 or bfloat16"),
        (
            {"section": VllmSection(transfer="ipc")},
            "^vllm.transfer: ipc: .*computes on a CPU here; give auto",
        ),
    ],
)
def test_a_user_s_mistake_is_one_line(
    installed: dict[str, str], changes: dict[str, Any], said: str | None
) -> None:
    if said is None:
        check(**changes)
        return
    with refused(said):
        check(**changes)


def test_engines_need_as_many_gpus_as_they_are_spread_over(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check(device="cuda", section=VllmSection(tensor_parallel=2), num_engines=2)
    with refused(r"2 engine\(s\) of 3 GPU\(s\) each need 6, and this machine has 4; give 2"):
        check(device="cuda", section=VllmSection(tensor_parallel=3), num_engines=2)
    with refused("vLLM computes on this machine's GPUs; give cuda"):
        check(device="cpu")


@pytest.mark.parametrize(
    ("capability", "envs", "said"),
    [
        ((9, 0), "VLLM_BATCH_INVARIANT = False", None),
        (
            (7, 5),
            "VLLM_BATCH_INVARIANT = False",
            "needs compute capability 8.0, this GPU has 7.5; give false, or",
        ),
        ((9, 0), "", "this vLLM does not know VLLM_BATCH_INVARIANT; give false, or rollout.engine tlt$"),
    ],
)
def test_equal_rows_need_vllms_batch_invariant_mode(
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    envs: str,
    said: str | None,
) -> None:
    (tmp_path / "envs.py").write_text(envs)
    monkeypatch.setattr(
        preflight, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with nullcontext() if said is None else refused(f"^run.equal_rows: .*{said}"):
        check(device="cuda", equal_rows=True)
    check(device="cuda")
    with refused(
        "^run.equal_rows: vLLM has no batch-invariant mode on a CPU; give false, or rollout.engine tlt$"
    ):
        start.preflight(load_config(RECIPE, {**VLLM, "run.equal_rows": True, "run.device": "cpu"}))


def test_weights_through_gpu_memory_are_refused_where_no_worker_shares_it(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    ipc = VllmSection(transfer="ipc")
    check(device="cuda", section=ipc, is_in_group=True)
    with refused(r"^vllm.transfer: ipc: vLLM's worker is in this process.*; give auto$"):
        check(device="cuda", section=ipc)
    with refused(r"^vllm.transfer: ipc: each of 2 workers reads memory of its own GPU.*; give auto"):
        check(device="cuda", section=ipc.model_copy(update={"tensor_parallel": 2}))


def test_a_run_of_several_ranks_has_a_worker_that_is_a_process(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(start, "check_vllm", lambda *given, **_: asked.append(given[-1]))
    one = {"run.num_ranks": 1}
    for values in (one, {"run.num_ranks": 2}, {**one, "parallel.policy": "fsdp"}):
        start.preflight(load_config(RECIPE, {**VLLM, **values}))
    assert asked == [False, True, True]


def test_a_run_is_refused_before_its_ranks_start_where_vllm_is_missing_or_unknown(
    installed: dict[str, str],
) -> None:
    config = load_config(RECIPE, VLLM)
    start.preflight(config)
    installed["vllm"] = "0.99.1"
    with refused(r"vllm 0\.99\.1 is installed, known is <0\.33,>=0\.32"):
        start.preflight(config)
    installed.clear()
    with refused(r"vllm is not installed here; pip install .vllm"):
        start.preflight(config)


def test_a_plan_counts_vllm_s_weights_and_caches_and_the_policy_s_copy_beside_them() -> None:
    plans = {}
    for engine in ("tlt", "vllm"):
        config = load_config(RECIPE, {"rollout.engine": engine})
        model, drafter = start.load_model_config(config.model.path), start.load_drafter
        shape = drafter(config.drafter.path, model).config if config.drafter.path is not None else None
        run = PlannedRun(config, model, shape, 1, is_gpu=False, rank_bytes=None, longest_prompt=20)
        plans[engine] = {term.name: term.num_bytes for term in plan_memory(run).terms}
    assert plans["vllm"][COPY] == plans["tlt"]["engine"], "the same layout"
    assert plans["vllm"]["engine"] == 4 * run.num_parameters
    assert plans["vllm"]["vLLM"] > 0
    assert plans["vllm"]["caches"] == 2**30
    assert COPY not in plans["tlt"]
    alone = plan_memory(run.changed({"rollout.speculation": Off(), "drafter.train": False}))
    assert COPY not in {term.name for term in alone.terms}, "nobody trains or measures a drafter"
