"""The plan of a run's memory: against measured figures, against the engine and autograd themselves, and
its verdicts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import make_policy
from tests.unit.models.families import PUBLISHED, shrunk
from tlt.apps.cli.main import main
from tlt.apps.plan.activations import count_kept
from tlt.apps.plan.fit import judge, refuse
from tlt.apps.plan.memory import ALWAYS, MemoryPlan, plan_memory, slot_bytes
from tlt.apps.plan.sizes import GIB, PlannedRun
from tlt.apps.run.start import preflight
from tlt.base.config.algorithm import AlgorithmSection
from tlt.base.config.load import load_config
from tlt.base.config.lora import LoraSection
from tlt.base.config.schema import Config
from tlt.base.speculation import Adaptive
from tlt.base.types import UserError
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.engine.build.engine import build_engine
from tlt.engine.settings import EngineSettings
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Policy
from tlt.models.hf.families import load_model_config, parse_any
from tlt.models.lora import add_adapters
from tlt.models.new import new_transformer

HERE = Path(__file__).parents[2]
RECIPES = HERE.parents[1] / "recipes"


def published(name: str, folder: Path) -> Path:
    """A folder with the config.json that a model was published with, and nothing else."""
    (folder / name).mkdir(exist_ok=True)
    shutil.copy(HERE / "published_configs" / f"{name}.json", folder / name / "config.json")
    return folder / name


def make_run(model: ModelConfig, num_ranks: int = 1, **keys: Any) -> PlannedRun:
    values = {"run.dtype": "bfloat16", "sampling.max_tokens": 32768, "evaluation.num_problems": 0, **keys}
    config = Config.model_validate({"model": {"path": Path("m")}, "task": {"name": "t"}})
    return PlannedRun(config, model, None, num_ranks, True, None, 0).changed(values)


def size(plan: MemoryPlan, name: str) -> int:
    return next(term.num_bytes for term in plan.terms if term.name == name)


# ── against figures ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "whole", "num_ranks", "sharded", "engine", "kv_kib"),
    [("Qwen2.5-7B", 121.9, 8, 15.2, 15.2, 56), ("Qwen2.5-32B", 524, 64, 8.2, 65.5, 256)],
)
def test_weights_gradients_moments_and_keys_are_those_of_the_probes(
    name: str, whole: float, num_ranks: int, sharded: float, engine: float, kv_kib: int, tmp_path: Path
) -> None:
    """GB per GPU, and KiB a token: docs of the probe, autumn 2026."""
    model = load_model_config(published(name, tmp_path))
    for ranks, policy, expected in ((1, "replicate", whole), (num_ranks, "fsdp", sharded)):
        run = make_run(model, ranks, **{"parallel.policy": policy})
        plan = plan_memory(run)
        found = sum(size(plan, kind) for kind in ("weights", "optimizer", "gradients")) / 1e9
        assert found == pytest.approx(expected, rel=0.01)
        assert size(plan, "engine") / 1e9 == pytest.approx(engine, rel=0.01)
        assert slot_bytes(run, 1024) / 1024 == kv_kib * 1024


def test_a_kl_takes_a_second_policy_unless_adapters_leave_the_first_in_place(tmp_path: Path) -> None:
    model = load_model_config(published("Qwen2.5-7B", tmp_path))
    for rank, has_reference in ((0, True), (8, False)):
        plan = plan_memory(make_run(model, **{"algorithm.kl_coefficient": 0.1, "lora.rank": rank}))
        assert ("reference policy" in {term.name for term in plan.terms}) == has_reference


def test_equal_rows_on_a_cpu_add_the_layers_inputs_and_an_engines_copy_for_a_kl(tmp_path: Path) -> None:
    model = load_model_config(published("Qwen2.5-7B", tmp_path))
    keys = {"sampling.max_tokens": 4096, "lora.rank": 8, "algorithm.kl_coefficient": 0.1}
    usual, equal = (
        plan_memory(replace(make_run(model, **keys, **{"run.equal_rows": is_on}), is_gpu=False))
        for is_on in (False, True)
    )
    added = {term.name for term in equal.terms} - {term.name for term in usual.terms}
    assert added == {"reference policy", "engine's numbers"}
    assert size(equal, "reference policy") == size(equal, "engine")
    tokens = AlgorithmSection().tokens_per_micro_batch
    assert size(equal, "engine's numbers") == tokens * (28 + 1) * 3584 * 2
    assert size(equal, "logits") > size(usual, "logits")


# ── against the code it describes ───────────────────────────────────────────────────────────────────────────


OWN = {
    name: ModelConfig(name, 61, 64, 192, 6, 4, 2, 16, max_positions=512)  # type: ignore[arg-type]  # names of the tuple below
    for name in ("llama", "qwen2", "qwen3")
}
OTHERS = ("Qwen3-30B-A3B", "gpt-oss-20b", "gemma-3-1b", "gemma-2-2b", "granite-3.3-8b")


def kept_bytes(model: Policy, num_tokens: int) -> int:
    """Saved tensors of a real forward, each storage once; parameters and tables aside."""
    known, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    attend = PackedCausal(model.config, [num_tokens])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.arange(num_tokens) % 61, attend.positions(), attend)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("name", "dtype", "rank"),
    [
        *((name, torch.float32, 0) for name in (*OWN, *OTHERS)),
        *((name, torch.bfloat16, 0) for name in OTHERS),
        ("Qwen3-30B-A3B", torch.float32, 4),
        ("Qwen3-30B-A3B", torch.bfloat16, 4),
    ],
)
def test_autograd_keeps_what_the_plan_says(name: str, dtype: torch.dtype, rank: int) -> None:
    config = OWN[name] if name in OWN else parse_any(shrunk(name), name)
    model, lora, size = new_transformer(config, dtype), LoraSection(rank=rank), dtype.itemsize
    if rank:
        add_adapters(model, lora, torch.float32)
        model.to_empty(device="cpu").initialize_buffers(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    kept = count_kept(config, lora)
    scores = sum(kept.scores(384, config.num_heads, size, has_kernel=False))
    planned = 384 * (kept.per_token(size) + scores) + kept.fixed * size
    assert planned == pytest.approx(kept_bytes(model, 384), rel=0.1)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("trains", [True, False])
def test_caches_are_those_of_the_engines_own_budget(kind: Any, trains: bool) -> None:
    policy = make_policy(config=ModelConfig("llama", 61, 32, 64, 8, 4, 2, 8, max_positions=512))
    shape = drafter_shape(policy.config, kind)
    stored = StoredDrafter(shape, new_model(shape).initialize(0).state_dict(), {})
    run = make_run(
        policy.config, **{"run.dtype": "float64", "rollout.speculation": Adaptive(), "drafter.train": trains}
    )
    settings = EngineSettings(Adaptive(), dtype=torch.float64, max_batch_size=64, drafting=run.config.drafter)
    engine = build_engine(policy.config, dict(policy.named_parameters()), settings, stored)
    run = replace(run, drafter=shape)
    for length in (1, 128, 129, 500):
        assert slot_bytes(run, length) == engine.memory.slot_bytes(length)


def test_responses_that_wait_for_their_environment_keep_caches_beside_the_slots() -> None:
    model = ModelConfig("llama", 61, 32, 64, 8, 4, 2, 8, max_positions=512)
    amounts = {"rollout.problems_per_step": 3, "rollout.samples_per_problem": 5, "rollout.max_batch_size": 4}
    run = make_run(model, 2, **amounts)
    waits = run.changed({"environment.respond": "m:f"})

    def caches(run: PlannedRun) -> int:
        return size(plan_memory(run), "caches")

    each = slot_bytes(run, run.longest)
    assert caches(run) == 4 * each
    assert caches(waits) == (4 + 8) * each  # a rank's part of the step: all of it may wait at once
    small = {"rollout.kv_gib": 6.5 * each / GIB}
    assert caches(waits.changed(small)) == pytest.approx(6.5 * each)
    told = next(term.how for term in plan_memory(waits.changed(small)).terms if term.name == "caches")
    assert told.endswith("4 of 4 sequences × 512 tokens, 2 of 8 that wait for their environment")
    assert plan_memory(waits).needed == plan_memory(run).needed  # running sequences displace them
    of_vllm = {"rollout.engine": "vllm"}
    assert caches(waits.changed(of_vllm)) == caches(run.changed(of_vllm))


# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("recipe", "model", "ranks", "gib", "has_room"),
    [
        ("qwen2.5-7b", "Qwen2.5-7B", 8, 80, True),
        ("deepseek-r1-distill-qwen-7b", "DeepSeek-R1-Distill-Qwen-7B", 8, 80, True),
        ("qwen2.5-32b", "Qwen2.5-32B", 64, 139, True),
        ("qwen2.5-32b", "Qwen2.5-32B", 64, 80, False),
        ("llama-3.3-70b", "Llama-3.3-70B-Instruct", 64, 139, False),
    ],
)
def test_every_recipe_of_the_paper_is_held_to_its_devices(
    recipe: str, model: str, ranks: int, gib: int, has_room: bool, tmp_path: Path
) -> None:
    """From config.json alone, with a drafter and without."""
    folder = published(model, tmp_path)
    config = load_config(RECIPES / "paper" / f"{recipe}.toml", {"model.path": str(folder)})
    shape = load_model_config(folder)
    for drafter in (None, drafter_shape(shape)):
        run = PlannedRun(config, shape, drafter, ranks, True, gib * GIB, 1024)
        run = run.changed({"drafter.train": True, "drafter.path": folder}) if drafter is not None else run
        verdict = judge(run)
        assert verdict.fits is has_room, verdict.line


def test_a_budget_below_one_response_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    run = make_run(load_model_config(published("Qwen2.5-7B", tmp_path)), **{"rollout.kv_gib": 0.5})
    with pytest.raises(
        UserError, match=r"rollout.kv_gib: 0.5 GiB do not hold .* 32768 tokens .* give at least 1.750"
    ):
        refuse(run)
    refuse(run.changed({"rollout.kv_gib": 1.75}))


def quickstart(folder: Path) -> Config:
    return load_config(
        RECIPES / "countdown" / "quickstart.toml", ["--run.out_dir", str(folder), "--task.num_problems", "16"]
    )


def test_training_is_refused_on_a_machine_too_small_for_all_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(quickstart(tmp_path))
    monkeypatch.setattr("tlt.apps.run.start.machine_bytes", lambda: GIB)
    with pytest.raises(UserError, match=r"memory: does not fit: .* of 0.5 GiB that a rank has"):
        preflight(quickstart(tmp_path))


def test_the_command_prints_parts_phases_and_a_line_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = published("Qwen2.5-7B", tmp_path), tmp_path / "plan.json"
    config = str(RECIPES / "paper" / "qwen2.5-7b.toml")
    words = [config, "--model.path", str(model), "--device-gib", "80", "--ranks", "8", "--out", str(out)]
    assert main(["plan", "memory", *words]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    shown = json.loads(last)
    assert shown["fits"] is True
    assert shown["peak_gib"].keys() == set(ALWAYS)
    assert shown["policy"] == "fsdp"
    for name in ("weights", "optimizer", "engine", "caches", "a step", "gradients", "activations", "total"):
        assert any(line.startswith(name) for line in table), name
    parts = json.loads(out.read_text())["parts"]
    in_update = sum(part["gib"] for part in parts if "update" in part["phases"])
    assert in_update == pytest.approx(shown["peak_gib"]["update"])
    assert main(["plan", "memory", config, "--model.path", str(model)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is (
        None if not torch.cuda.is_available() else True
    )


# ── the table of docs/memory.md ─────────────────────────────────────────────────────────────────────────────

COLUMNS = ("Qwen3-30B-A3B", "gpt-oss-20b", "gemma-3-27b", "Qwen3-32B")
PAGE = "paper/qwen2.5-32b --device-gib 139 --ranks 8 --sampling.max_tokens 8192 --algorithm.tokens_per_micro_batch 9216"
ADAPTERS = "--lora.rank 32 --lora.base_dtype bfloat16"
SHOWN = ("frozen weights", "engine", "activations", "caches")


def described(name: str, folder: Path) -> Path:
    if (HERE / "published_configs" / f"{name}.json").exists():
        return published(name, folder)
    raw = {key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"}
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(raw))
    return folder / name


def planned(name: str, words: str, folder: Path) -> dict[str, Any]:
    out = folder / "plan.json"
    path = described(name, folder)
    assert main(["plan", "memory", *words.split(), "--model.path", str(path), "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_the_page_on_memory_shows_the_plans_of_four_large_models(tmp_path: Path) -> None:
    plans = [planned(name, f"{PAGE} {ADAPTERS}", tmp_path) for name in COLUMNS]
    parts = [{part["name"]: part["gib"] for part in plan["parts"]} for plan in plans]
    rows = [[name, *(f"{of_model[name]:.2f}" for of_model in parts)] for name in SHOWN]
    rows.append(["needed with LoRA", *(f"{plan['needed_gib']:.1f}" for plan in plans)])
    for ranks in (16, 64):
        words = PAGE.replace("--ranks 8", f"--ranks {ranks}")
        found = [planned(name, words, tmp_path) for name in COLUMNS]
        rows.append(
            [f"needed with all weights, {ranks} GPUs", *(f"{plan['needed_gib']:.1f}" for plan in found)]
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in (HERE.parents[1] / "docs/memory.md").read_text(), table
