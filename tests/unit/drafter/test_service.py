"""Updates of the drafter that cannot fail in silence: every fault here is planted, and must be seen (FIELD
§2, 9 and 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG, VOCAB, make_engine
from tests.unit.watch_parts import POLICY, TARGET, Parts, make_rollouts
from tlt.accounts import DrafterReport
from tlt.config.drafter import DrafterSection
from tlt.config.schema import Config, ModelSection, TaskSection
from tlt.drafter.drafting.hybrid import HybridDrafter
from tlt.drafter.formats.folder import load_drafter, save_drafter
from tlt.drafter.measure import Tally
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.drafter.watch import RankState
from tlt.hf.config import load_model_config as load_config
from tlt.hf.weights import content_hash, load_tensors, save_model
from tlt.ranks.world import World
from tlt.report.timeline import Timeline
from tlt.speculative.strategy import Strategy
from tlt.training.run import Run
from tlt.tuning.tuner import Fixed
from tlt.types import Request, SamplingParams, UserError


def test_a_trained_drafter_is_published_measured_and_stamped() -> None:
    parts = Parts()
    checks = [parts.step(seed) for seed in range(3)]
    assert [check.version for check in checks] == [1, 2, 3]
    assert all(check.training == "trained" for check in checks)
    assert all(0 < check.acceptance < 1 for check in checks)
    assert parts.step(trains=False).training == "no idle time"
    assert parts.learned.version == 3


@pytest.mark.parametrize(
    "stale", ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"]
)
def test_a_publication_that_does_not_arrive_is_an_error(stale: str) -> None:
    """The engine's copy takes the version and leaves one tensor as it was, which has changed enough to
    matter."""
    parts = Parts()
    parts.trainer.optimizer.param_groups[0]["lr"] = 0.1
    before = parts.model.state_dict()[stale].clone()
    load = parts.learned.model.load
    parts.learned.model.load = lambda tensors, version: load({**tensors, stale: before}, version)
    with pytest.raises(RuntimeError, match=r"version 1 did not arrive in rank 0's engine"):
        parts.step()


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_tensors_are_checked_by_name_both_ways_and_by_shape(fault: str) -> None:
    parts = Parts()
    tensors: dict[str, Tensor] = dict(parts.model.state_dict())
    if fault == "missing":
        del tensors["layers.0.mlp.down_proj.weight"]
    elif fault == "unexpected":
        tensors["embed_tokens.weight"] = torch.zeros(VOCAB, CONFIG.hidden_size)
    else:
        tensors["fc.weight"] = tensors["fc.weight"].T
    with pytest.raises(RuntimeError, match=r"tensor \S+ is"):
        parts.learned.load(tensors, 5)
    assert parts.learned.version == 0


def test_ranks_that_hold_different_drafters_are_an_error() -> None:
    parts = Parts()
    other = Parts()
    with torch.no_grad():
        other.model.fc.weight[0, 0] += 1e-6
    foreign = other.measure(make_rollouts(), 1.0)
    parts.join(RankState("", 0, False), foreign)
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step()


def test_a_step_in_which_any_rank_ran_out_of_passes_says_so_and_the_next_one_starts_anew() -> None:
    parts = Parts(max_passes=1.0)
    parts.spot.buffer.add(make_rollouts()[0])
    report = parts.watch.run(lambda: parts.spot.run(lambda: parts.trainer.num_tokens > 1000))
    parts.watch.run(lambda: DrafterReport(1))
    assert (
        parts.watch.end_step(make_rollouts(), report.num_tokens, 1.0).training
        == "trained; max_passes reached"
    )
    parts.spot.end_step(make_rollouts(), 1.0)
    assert parts.step(micro_steps=4).training == "trained"
    alone = parts.watch.ranks
    parts.join(RankState("", 0, True))
    assert parts.step(micro_steps=4).training == "trained; max_passes reached"
    parts.watch.ranks = alone
    parts.watch.run(lambda: DrafterReport(is_limited=True))
    parts.watch.abandon()
    assert parts.step(micro_steps=4).training == "trained"
    assert parts.step(trains=False).training == "no idle time"


def is_measured(check: Any) -> bool:
    assert math.isnan(check.acceptance) == math.isnan(check.retrieval)
    return not math.isnan(check.acceptance)


def test_acceptance_is_measured_every_so_many_steps_all_else_in_each_and_a_restart_keeps_count() -> None:
    """The ranks' collectives are the same in every step, whatever is measured."""
    parts, again = Parts(check_every=3), Parts(check_every=3)
    calls: list[str] = []

    def gather(value: Any) -> list[Any]:
        calls.append(type(value).__name__)
        return [value]

    def average(tensors: Sequence[Tensor], weight: float) -> float:
        calls.append("average")
        return weight

    assert parts.watch.publisher is not None
    parts.watch.ranks, parts.watch.publisher.average = replace(parts.watch.ranks, gather=gather), average
    checks = [parts.step(seed) for seed in range(5)]
    assert [is_measured(check) for check in checks] == [True, False, False, True, False]
    assert [check.version for check in checks] == [1, 2, 3, 4, 5]
    assert all(check.training == "trained" for check in checks)
    assert calls == ["RankState", "average", "Tally"] * 5
    again.watch.restore(parts.watch.counters())
    assert [is_measured(again.step(seed)) for seed in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "stale", ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"]
)
def test_a_publication_that_does_not_arrive_is_an_error_in_a_step_without_a_measurement(stale: str) -> None:
    parts = Parts(check_every=10)
    parts.step(0)
    parts.trainer.optimizer.param_groups[0]["lr"] = 0.1
    before = parts.model.state_dict()[stale].clone()
    load = parts.learned.model.load
    parts.learned.model.load = lambda tensors, version: load({**tensors, stale: before}, version)
    with pytest.raises(RuntimeError, match=r"version 2 did not arrive in rank 0's engine"):
        parts.step(1)


def test_ranks_that_hold_different_drafters_are_an_error_in_a_step_without_a_measurement() -> None:
    parts, other = Parts(check_every=10), Parts()
    parts.step(0)
    foreign = other.measure(make_rollouts(), 1.0, is_due=False)
    parts.join(RankState("", 0, False), foreign)
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step(1)


def test_where_no_rank_has_trained_nothing_is_read_between_measurements_and_any_rank_that_has_is_enough() -> (
    None
):
    parts = Parts(check_every=3)
    calls: list[str] = []

    def gather(value: Any) -> list[Any]:
        calls.append(type(value).__name__)
        return [value]

    parts.watch.ranks = replace(parts.watch.ranks, gather=gather)
    checks = [parts.step(seed, trains=False) for seed in range(4)]
    assert [is_measured(check) for check in checks] == [True, False, False, True]
    assert calls == ["RankState", "Tally", "RankState", "RankState", "RankState", "Tally"]
    assert [check.training for check in checks] == ["no idle time"] * 4
    parts = Parts(check_every=3)
    parts.step(0)
    foreign = Parts().measure(make_rollouts(), 1.0, is_due=False)
    parts.join(RankState("", 0, False, num_tokens=7), foreign)
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step(1, trains=False)


def test_publication_takes_as_long_as_on_the_slowest_rank_on_all_of_them() -> None:
    """By that the ranks decide what their idle time is worth, and all have to decide alike."""
    parts = Parts()

    def gather(value: Any) -> list[Any]:
        return [value, replace(value, publish_seconds=77.0) if isinstance(value, Tally) else value]

    parts.watch.ranks = replace(parts.watch.ranks, gather=gather)
    assert parts.step(0).publish_seconds == 77.0


def test_a_drafter_that_turns_nan_between_measurements_is_undone_at_once() -> None:
    parts = Parts(check_every=3)
    parts.step(0)
    weights, step = content_hash(parts.model.state_dict()), parts.trainer.step
    poisoned(parts, "weights")
    check = parts.step(1)
    assert (check.is_undone, check.version) == (True, 1)
    assert content_hash(parts.model.state_dict()) == weights
    parts.trainer.step = step
    checks = [parts.step(seed) for seed in (2, 3)]
    assert [check.training for check in checks] == ["trained", "trained"]


def poisoned(parts: Parts, where: str) -> None:
    if where == "loss":
        parts.trainer.step = lambda batch: (_ for _ in ()).throw(FloatingPointError("the loss is nan"))
    else:
        step = parts.trainer.step

        def broken(batch: Any) -> float:
            loss = step(batch)
            with torch.no_grad():
                parts.model.fc.weight[3, 5] = math.nan
            parts.trainer.step = lambda batch: 0.0
            return loss

        parts.trainer.step = broken


@pytest.mark.parametrize("where", ["loss", "weights"])
def test_a_drafter_that_turns_nan_is_undone_and_trained_again(where: str) -> None:
    parts = Parts()
    parts.step(0)
    weights, step = content_hash(parts.model.state_dict()), parts.trainer.step
    moments = [tensor.clone() for tensor in parts.trainer.shared_tensors()]
    poisoned(parts, where)
    check = parts.step(1)
    assert check.is_undone
    assert check.version == 1
    assert math.isfinite(check.acceptance), "what is measured is the version that the engine still has"
    assert content_hash(parts.model.state_dict()) == weights
    assert all(torch.equal(a, b) for a, b in zip(parts.trainer.shared_tensors(), moments, strict=True))
    parts.trainer.step = step
    check = parts.step(2)
    assert (check.training, check.version) == ("trained", 2)


def test_a_failure_on_one_rank_undoes_the_update_of_all() -> None:
    parts = Parts()
    before = content_hash(parts.model.state_dict())
    parts.join(RankState("the loss is inf", 0, False))
    check = parts.step()
    assert check.training == "undone: the loss is inf"
    assert content_hash(parts.model.state_dict()) == before


@pytest.mark.parametrize("speculation", ["learned:3x1x3", "learned:3x2x5", "hybrid:3x1x3"])
def test_a_drafter_whose_outputs_are_not_finite_changes_no_token(speculation: str) -> None:
    requests = [Request("p", i, (3, 5, 8), SamplingParams(max_tokens=30)) for i in range(3)]
    texts = []
    for is_broken in (False, True):
        engine = make_engine(POLICY, Fixed(Strategy.parse(speculation)))
        assert isinstance(engine.drafter, HybridDrafter)
        if is_broken:
            tensors = DraftModel(drafter_shape(CONFIG)).state_dict()
            engine.drafter.learned.load({name: tensor * math.nan for name, tensor in tensors.items()}, 1)
        texts.append({(r.sample_index, r.token_ids) for r in engine.generate(requests)})
    assert texts[0] == texts[1]


def test_what_the_watch_knows_survives_a_restart_and_a_broken_off_step_leaves_no_trace() -> None:
    parts, again = Parts(), Parts()
    parts.step(0)
    again.watch.restore(parts.watch.counters())
    assert again.watch.counters() == parts.watch.counters()
    before = content_hash(parts.model.state_dict())
    left = iter([False] * 6 + [True])
    parts.spot.run(lambda: next(left))
    assert content_hash(parts.model.state_dict()) != before
    parts.watch.abandon()
    assert content_hash(parts.model.state_dict()) == before


def test_what_the_configuration_limits_reaches_those_who_keep_to_it(tmp_path: Path) -> None:
    save_drafter(tmp_path, DraftModel(drafter_shape(CONFIG)).initialize(1), torch.float32)
    settings = DrafterSection(path=tmp_path, train=True, max_passes=2.5, check_every=7)
    config = Config(model=ModelSection(path=tmp_path), task=TaskSection(name="t"), drafter=settings)
    world = World(0, 1, 0, torch.device("cpu"), HashStore(), None)
    run: Any = SimpleNamespace(config=config, world=world, out_dir=tmp_path, timeline=Timeline(0))
    run.engine = make_engine(POLICY, Fixed(Strategy("learned", 3, 1, 3)))
    drafter: Any = Run._watch_drafter(run, load_drafter(tmp_path, CONFIG, dict(POLICY.state_dict())))
    assert drafter.spot.max_passes == 2.5
    assert drafter.watch.check_every == 7


def tensors_of(value: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, item in vars(value).items():
        for index, part in enumerate(item if isinstance(item, list) else [item]):
            if isinstance(part, Tensor):
                found[f"{name}.{index}"] = part
            elif type(part).__name__.startswith("Packed"):
                found |= {f"{name}.{index}.{key}": tensor for key, tensor in tensors_of(part).items()}
    return {key: tensor for key, tensor in found.items() if tensor.layout == torch.strided}


def test_training_publishing_measuring_and_undoing_leave_the_target_alone() -> None:
    parts = Parts()
    before = content_hash(tensors_of(TARGET)), content_hash(POLICY.state_dict())
    assert len(tensors_of(TARGET)) > 10
    parts.step(0)
    poisoned(parts, "weights")
    parts.step(1)
    assert (content_hash(tensors_of(TARGET)), content_hash(POLICY.state_dict())) == before
    assert not any(tensor.requires_grad for tensor in tensors_of(TARGET).values())
    assert not any("embed" in name or "head" in name for name in parts.model.state_dict())


@pytest.mark.parametrize("is_tied", [True, False])
def test_tying_is_never_skipped_in_silence(tmp_path: Path, is_tied: bool) -> None:
    """Another head beside a tied config, or none beside an untied one: refused by name; a tied engine has
    one matrix."""
    tensors = {name: tensor.float() for name, tensor in POLICY.state_dict().items()}
    save_model(tmp_path / "m", CONFIG, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    file, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    if is_tied:
        stored = load_file(file)
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
        save_file(stored, file)
    else:
        config.write_text(
            config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
        )
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load_tensors(tmp_path / "m", load_config(tmp_path / "m"), torch.float32)
    assert TARGET.head_VE is TARGET.embedding_VE
