"""Updates of the drafter that cannot fail in silence: every fault here is planted, and must be seen (FIELD §2, 9 and 10)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import HashStore

from tests.lossless.helpers import CONFIG, VOCAB, make_engine, make_policy
from tlt.config.schema import Config, DrafterConfig, ModelConfig, TaskConfig
from tlt.distributed.world import World
from tlt.drafter.buffer import TrajectoryBuffer
from tlt.drafter.folder import load_drafter, save_drafter
from tlt.drafter.hybrid import HybridDrafter
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.losses import PRESETS
from tlt.drafter.model import DraftModel, PackedDrafter, drafter_config
from tlt.drafter.ngram import NgramDrafter, count_retrieved
from tlt.drafter.service import DrafterWatch, distribution, draw, engine_logits, judge, read, trainer_logits
from tlt.drafter.spot import SpotTrainer
from tlt.drafter.trainer import DrafterTrainer
from tlt.files import replace_folder
from tlt.models.attention import PackedCausal
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import content_hash, load_tensors, save_model
from tlt.models.packed import PackedTransformer
from tlt.report.timeline import Timeline
from tlt.train.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RunState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tlt.train.run import Run, restore
from tlt.tuning.tuner import Fixed
from tlt.types import DrafterReport, Request, Rollout, SamplingParams, Strategy, UserError

POLICY = make_policy()
TARGET = PackedTransformer.from_module(POLICY, torch.float64)


def make_rollouts(num: int = 6, length: int = 24, seed: int = 0) -> list[Rollout]:
    rng = random.Random(seed)
    rows = [[rng.randrange(VOCAB) for _ in range(4 + length)] for _ in range(num)]
    return [Rollout(f"p{i // 2}", i % 2, tuple(r[:4]), tuple(r[4:]), (0.0,) * length, "stop", 0) for i, r in enumerate(rows)]


class Parts:
    """A watched drafter of a run of one rank."""

    def __init__(
        self,
        gate: float | None = None,
        retrieved_share: float = 0.0,
        check_every: int = 1,
        max_passes: float | None = None,
    ) -> None:
        self.model = DraftModel(drafter_config(CONFIG)).initialize(2)
        packed = PackedDrafter.from_tensors(self.model.config, self.model.state_dict(), torch.float64)
        self.learned = LearnedDrafter(packed, TARGET, 4)
        self.hybrid = HybridDrafter(self.learned, NgramDrafter(4))
        self.trainer = DrafterTrainer(self.model, TARGET, PRESETS["hass"], 1e-3)
        self.spot = SpotTrainer(self.trainer, TrajectoryBuffer(10**7), 64, max_passes=max_passes)
        self.retrieved_share = retrieved_share
        self.watch = DrafterWatch(
            self.model,
            self.trainer,
            TARGET,
            self.learned,
            self.hybrid.set_aside,
            lambda group, counts: round(self.retrieved_share * sum(counts)),
            lambda value: [value],
            lambda tensors, weight: weight,
            gate=gate,
            check_every=check_every,
        )

    def step(self, seed: int = 0, micro_steps: int = 6, trains: bool = True) -> Any:
        rollouts = make_rollouts(seed=seed)
        for rollout in rollouts:
            self.spot.buffer.add(rollout)
        left = iter([False] * micro_steps + [True])
        report = self.watch.run(lambda: self.spot.run(lambda: next(left))) if trains else DrafterReport()
        return self.watch.end_step(rollouts, report.num_tokens, 1.0)


# ── the measure ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_measure_is_the_overlap_of_target_and_drafter_position_by_position() -> None:
    """Against forwards of the trainable models, one response at a time, and a sum written out."""
    parts, rollouts = Parts(), make_rollouts(3)
    tally = parts.watch._measure(rollouts, 0.7)
    total, count = 0.0, 0
    for rollout in rollouts:
        tokens = torch.tensor([*rollout.prompt_ids, *rollout.token_ids])
        with torch.no_grad():
            attend = PackedCausal(CONFIG, [len(tokens)])
            features = POLICY(tokens, attend.positions(), attend)
            logits = POLICY.logits(features) / 0.7
            attend = PackedCausal(parts.model.config.layer, [len(tokens) - 1])
            embeddings = POLICY.model.embed_tokens(tokens[1:])
            hidden = parts.model.double()(embeddings, features[:-1], attend.positions(), attend)
            drafted = POLICY.logits(hidden) / 0.7
        for position in range(4, len(tokens)):
            p, q = logits[position - 1].softmax(0), drafted[position - 2].softmax(0)
            total, count = total + float(torch.minimum(p, q).sum()), count + 1
    assert tally.num_positions == count
    assert tally.accepted == pytest.approx(total, abs=1e-4)


def test_at_temperature_0_the_measure_counts_equal_first_choices() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    assert distribution(logits, 0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert distribution(torch.tensor([[1.0, math.nan]]), 0).isnan().any()


def test_the_sample_stays_within_its_tokens_and_prefers_no_response() -> None:
    rollouts = make_rollouts(10)
    seen = set()
    for seed in range(40):
        counts = draw(rollouts, 60, random.Random(seed))
        assert sum(counts.values()) == 60
        seen |= counts.keys()
    assert seen == set(range(10))


def test_a_prompt_longer_than_the_sample_leaves_something_to_measure() -> None:
    (rollout,) = make_rollouts(1)
    counts = draw([replace(rollout, prompt_ids=(3, 4) * 400)] * 2, 30, random.Random(0))
    assert sorted(counts.values()) == [6, 24]
    parts, prompt_ids = Parts(), tuple(range(1, 61)) * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.drafter.service.CANARY_TOKENS", 30)
        check = parts.watch.end_step([replace(r, prompt_ids=prompt_ids) for r in make_rollouts(2)], 0, 1.0)
    assert 0 < check.acceptance < 1


def test_the_engines_copy_and_the_trainers_say_the_same() -> None:
    parts = Parts()
    chosen = [(rollout, 20) for rollout in make_rollouts(3)]
    with torch.no_grad():
        sample = read(chosen, TARGET, (CONFIG.num_layers,), 1.0)
        ours, theirs = (
            engine_logits(parts.learned.model, TARGET, sample),
            trainer_logits(parts.model, TARGET, sample),
        )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_retrieval_is_counted_where_a_response_or_its_sibling_has_said_the_words_before() -> None:
    words = tuple(range(10, 22))

    def rollout(index: int, response: tuple[int, ...]) -> Rollout:
        return Rollout("p", index, (1, 2), response, (0.0,) * len(response), "stop", 0)

    repeating = rollout(0, words + words)
    assert count_retrieved([repeating], [24]) == 8  # all of the second time but the anchor
    assert count_retrieved([repeating], [12]) == 0
    ahead = [rollout(0, words), rollout(1, (30, 31, 32, *words))]  # three tokens behind its sibling
    assert count_retrieved(ahead, [0, 15]) == 8
    assert count_retrieved(ahead, [12, 0]) == 0


# ── publication ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_trained_drafter_is_published_measured_and_stamped() -> None:
    parts = Parts()
    checks = [parts.step(seed) for seed in range(3)]
    assert [check.version for check in checks] == [1, 2, 3]
    assert all(check.training == "trained" and not check.set_aside for check in checks)
    assert all(0 < check.acceptance < 1 for check in checks)
    assert parts.step(trains=False).training == "no idle time"
    assert parts.learned.version == 3


@pytest.mark.parametrize("stale", ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"])
def test_a_publication_that_does_not_arrive_is_an_error(stale: str) -> None:
    """The engine's copy takes the version and leaves one tensor as it was, which has changed enough to matter."""
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
    foreign = other.watch._measure(make_rollouts(), 1.0)
    parts.watch.gather = lambda value: [value, ("", 0, False) if isinstance(value, tuple) else foreign]
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step()


def test_a_step_in_which_any_rank_ran_out_of_passes_says_so_and_the_next_one_starts_anew() -> None:
    parts = Parts(max_passes=1.0)
    parts.spot.buffer.add(make_rollouts()[0])
    report = parts.watch.run(lambda: parts.spot.run(lambda: parts.trainer.num_tokens > 1000))
    parts.watch.run(lambda: DrafterReport(1))
    assert parts.watch.end_step(make_rollouts(), report.num_tokens, 1.0).training == "trained; max_passes reached"
    parts.spot.end_step(make_rollouts(), 1.0)
    assert parts.step(micro_steps=4).training == "trained"
    gather = parts.watch.gather
    parts.watch.gather = lambda value: [value, ("", 0, True) if isinstance(value, tuple) else value]
    assert parts.step(micro_steps=4).training == "trained; max_passes reached"
    parts.watch.gather = gather
    parts.watch.run(lambda: DrafterReport(is_limited=True))
    parts.watch.abandon()
    assert parts.step(micro_steps=4).training == "trained"
    assert parts.step(trains=False).training == "no idle time"


# ── not every step measures ──────────────────────────────────────────────────────────────────────────────────────────


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

    parts.watch.gather, parts.watch.average = gather, average
    checks = [parts.step(seed) for seed in range(5)]
    assert [is_measured(check) for check in checks] == [True, False, False, True, False]
    assert [check.version for check in checks] == [1, 2, 3, 4, 5]
    assert all(check.training == "trained" and not check.set_aside for check in checks)
    assert calls == ["tuple", "average", "Tally"] * 5
    again.watch.load_state_dict(parts.watch.state_dict())
    assert [is_measured(again.step(seed)) for seed in range(3)] == [False, True, False]


@pytest.mark.parametrize("stale", ["fc.weight", "layers.0.self_attn.o_proj.weight", "layers.0.post_attention_layernorm.weight"])
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
    foreign = other.watch._measure(make_rollouts(), 1.0, is_due=False)
    parts.watch.gather = lambda value: [value, ("", 0, False) if isinstance(value, tuple) else foreign]
    with pytest.raises(RuntimeError, match="rank 1 holds other weights"):
        parts.step(1)


def test_a_drafter_that_turns_nan_between_measurements_is_undone_at_once_and_back_after_the_next() -> None:
    parts = Parts(check_every=3)
    parts.step(0)
    weights, step = content_hash(parts.model.state_dict()), parts.trainer.step
    poisoned(parts, "weights")
    check = parts.step(1)
    assert (check.training[:7], check.version, check.has_switched) == ("undone:", 1, True)
    assert content_hash(parts.model.state_dict()) == weights
    parts.trainer.step = step
    checks = [parts.step(seed) for seed in (2, 3)]
    assert [check.training for check in checks] == ["trained", "trained"]
    assert [check.set_aside for check in checks] == [check.set_aside, ""]
    assert [check.has_switched for check in checks] == [False, True]


def test_outputs_that_are_not_finite_are_seen_between_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(check_every=3, gate=1.0)
    assert not parts.step(0).set_aside
    for name in ("engine_logits", "trainer_logits"):
        monkeypatch.setattr(f"tlt.drafter.service.{name}", lambda drafter, target, sample: sample.target_RV * math.nan)
    check = parts.step(1, trains=False)
    assert check.set_aside == "its outputs are not finite"
    assert parts.watch.trains, "a drafter set aside is trained"


def test_what_a_measurement_decides_of_the_drafter_holds_until_the_next() -> None:
    parts = Parts(retrieved_share=1.0, check_every=2)
    assert parts.step(0).set_aside
    parts.retrieved_share = 0.0
    checks = [parts.step(1), parts.step(2)]
    assert [bool(check.set_aside) for check in checks] == [True, False]
    assert [check.has_switched for check in checks] == [False, True]


def test_the_gate_compares_only_what_was_measured() -> None:
    """It closes and opens at measurements; a level is taken at the first one after the latest training."""
    parts = Parts(gate=0.05, check_every=2)
    level = parts.step(0).acceptance
    assert parts.watch.level == level
    assert not parts.watch.trains
    assert parts.step(1, trains=False).training.startswith("skipped")
    assert not parts.watch.trains, "nothing new is known"
    parts.watch.level = 2.0
    parts.step(2, trains=False)
    assert parts.watch.trains, "acceptance has fallen"
    assert parts.step(3).training == "trained"
    assert math.isnan(parts.watch.level)
    assert parts.watch.trains, "how good the drafter is after this training is not known"
    check = parts.step(4, trains=False)
    assert check.training == "no idle time"
    assert parts.watch.level == check.acceptance
    assert not parts.watch.trains


# ── set aside ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_a_drafter_that_turns_nan_is_undone_set_aside_and_comes_back(where: str) -> None:
    parts = Parts()
    parts.step(0)
    weights, step = content_hash(parts.model.state_dict()), parts.trainer.step
    moments = [tensor.clone() for tensor in parts.trainer.shared_tensors()]
    poisoned(parts, where)
    check = parts.step(1)
    assert check.training.startswith("undone: ")
    assert check.set_aside
    assert check.has_switched
    assert check.version == 1
    assert math.isfinite(check.acceptance), "what is measured is the version that the engine still has"
    assert content_hash(parts.model.state_dict()) == weights
    assert all(torch.equal(a, b) for a, b in zip(parts.trainer.shared_tensors(), moments, strict=True))
    parts.trainer.step = step
    check = parts.step(2)
    assert (check.training, check.set_aside, check.has_switched, check.version) == ("trained", "", True, 2)


def test_a_failure_on_one_rank_undoes_the_update_of_all() -> None:
    parts = Parts()
    before = content_hash(parts.model.state_dict())
    parts.watch.gather = lambda value: [value, ("the loss is inf", 0, False) if isinstance(value, tuple) else value]
    check = parts.step()
    assert check.training == "undone: the loss is inf"
    assert content_hash(parts.model.state_dict()) == before


def test_a_drafter_worse_than_retrieval_is_set_aside_trained_on_and_taken_back() -> None:
    parts = Parts(retrieved_share=1.0)
    check = parts.step(0)
    assert "below retrieval's" in check.set_aside
    assert check.training == "trained"
    assert check.version == 1, "it is trained on"
    again = parts.step(1)
    assert again.set_aside
    assert not again.has_switched, "said once"
    parts.retrieved_share = 0.0
    assert parts.step(2).set_aside == ""


def test_outputs_that_are_not_finite_are_never_good_enough() -> None:
    assert judge(math.nan, 0.0)
    assert judge(0.3, 0.31)
    assert not judge(0.31, 0.31)


def test_while_it_is_set_aside_retrieval_answers_for_it_and_tokens_stay_the_same() -> None:
    requests = [Request("p", i, (3, 5, 8), SamplingParams(max_tokens=30)) for i in range(3)]
    texts = []
    for is_aside in (False, True):
        engine = make_engine(POLICY, Fixed(Strategy("learned", 3, 2, 5)))
        assert isinstance(engine.drafter, HybridDrafter)
        engine.drafter.set_aside(is_aside)
        assert engine.drafter.version == is_aside, "statistics of the other state age"
        calls: list[int] = []
        propose = engine.drafter.learned.propose
        engine.drafter.learned.propose = lambda *a, p=propose, c=calls: c.append(1) or p(*a)
        texts.append({(r.sample_index, r.token_ids) for r in engine.generate(requests)})
        assert bool(calls) != is_aside
    assert texts[0] == texts[1]


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_training_is_skipped_while_acceptance_has_not_fallen_and_resumed_when_it_has() -> None:
    parts = Parts(gate=0.05)
    assert parts.step(0).training == "trained"
    assert not parts.watch.trains
    check = parts.step(0, trains=False)
    assert check.training.startswith("skipped: acceptance 0.")
    assert not parts.watch.trains
    parts.watch.level = check.acceptance + 0.06  # as if it had been better after the last training
    assert parts.step(0, trains=False).training.startswith("skipped")
    assert parts.watch.trains
    assert Parts().watch.trains


def test_a_drafter_set_aside_is_trained_whatever_the_gate_says() -> None:
    parts = Parts(gate=1.0, retrieved_share=1.0)
    parts.step(0)
    assert parts.watch.trains


def test_what_the_watch_knows_survives_a_restart_and_a_broken_off_step_leaves_no_trace() -> None:
    parts, again = Parts(gate=0.05, retrieved_share=1.0), Parts(gate=0.05)
    parts.step(0)
    again.watch.load_state_dict(parts.watch.state_dict())
    assert again.watch.state_dict() == parts.watch.state_dict()
    assert again.hybrid.version == 1, "set aside again"
    before = content_hash(parts.model.state_dict())
    left = iter([False] * 6 + [True])
    parts.spot.run(lambda: next(left))
    assert content_hash(parts.model.state_dict()) != before
    parts.watch.abandon()
    assert content_hash(parts.model.state_dict()) == before


def test_what_the_configuration_limits_reaches_those_who_keep_to_it(tmp_path: Path) -> None:
    save_drafter(tmp_path, DraftModel(drafter_config(CONFIG)).initialize(1), torch.float32)
    settings = DrafterConfig(path=tmp_path, train=True, max_passes=2.5, check_every=7, gate=0.25)
    config = Config(model=ModelConfig(path=tmp_path), task=TaskConfig(name="t"), drafter=settings)
    world = World(0, 1, 0, torch.device("cpu"), HashStore(), None)
    run: Any = SimpleNamespace(config=config, world=world, model_config=CONFIG, timeline=Timeline(0), spot=None)
    run.engine = make_engine(POLICY, Fixed(Strategy("learned", 3, 1, 3)))
    Run._attach_drafter(run, dict(POLICY.state_dict()))
    assert run.spot.max_passes == 2.5
    assert (run.watch.check_every, run.watch.gate) == (7, 0.25)


# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Another head beside a tied config, or none beside an untied one: refused by name; a tied engine has one matrix."""
    tensors = {name: tensor.float() for name, tensor in POLICY.state_dict().items()}
    save_model(tmp_path / "m", CONFIG, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    file, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    if is_tied:
        stored = load_file(file)
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
        save_file(stored, file)
    else:
        config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load_tensors(tmp_path / "m", load_model_config(tmp_path / "m"), torch.float32)
    assert TARGET.head_VE is TARGET.embedding_VE


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    training = {"policy": {"state": {0: {"exp_avg": torch.full((3,), value)}}, "lrs": [1.0, 2.0]}, "note": None}
    return Checkpoint(RunState(step, 4, "abc"), {"w": torch.full((2, 2), value)}, {"fc": torch.full((2,), value)}, training)


def test_a_checkpoint_holds_what_was_when_it_was_saved(tmp_path: Path) -> None:
    writer, given = CheckpointWriter(tmp_path / "c"), make_checkpoint(3)
    writer.save(given)
    for tensor in (given.policy["w"], given.drafter["fc"], given.training["policy"]["state"][0]["exp_avg"]):
        tensor.fill_(9.0)  # training goes on while the thread writes
    writer.wait()
    path = latest_checkpoint(tmp_path / "c")
    assert path is not None
    found = load_checkpoint(path, torch.device("cpu"))
    assert found.state == RunState(3, 4, "abc")
    assert found.policy["w"].tolist() == [[1, 1], [1, 1]]
    assert found.drafter is not None
    assert found.drafter["fc"].tolist() == [1, 1]
    assert found.training["policy"]["state"][0]["exp_avg"].tolist() == [1, 1, 1]
    assert found.training["policy"]["lrs"] == [1.0, 2.0]


def test_only_the_newest_whole_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.new").mkdir()
    for step in (1, 2, 2, 10):
        save_checkpoint(tmp_path, make_checkpoint(step, step))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_writer_that_fails_says_so_at_the_next_checkpoint_and_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(make_checkpoint(1))
    writer.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)  # after the weights have been written
        writer.save(make_checkpoint(2))
        with pytest.raises(RuntimeError, match=r"checkpoint of step 2 .* No space left"):
            writer.save(make_checkpoint(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    writer.save(make_checkpoint(3))
    writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def kill(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("breaks", [OSError, KeyboardInterrupt])
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, breaks: type[BaseException]) -> None:
    target = tmp_path / "drafter"
    with replace_folder(target) as folder:
        (folder / "a").write_text("old")

    def write() -> None:
        with replace_folder(target) as folder:
            (folder / "a").write_text("new")
            raise breaks

    with pytest.raises(breaks):
        write()
    assert (target / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_drafter_folder_is_replaced_only_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "drafter", DraftModel(drafter_config(CONFIG)).initialize(1)
    save_drafter(path, model, torch.float32)
    monkeypatch.setattr("tlt.drafter.folder.describe", kill)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(path, DraftModel(drafter_config(CONFIG)).initialize(2), torch.float32)
    assert content_hash(load_drafter(path, CONFIG).tensors) == content_hash(dict(model.state_dict()))


DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor] | None]] = {
    "no drafter": lambda tensors: None,
    "another drafter": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "fc.weight"},
    "another drafter (x)": lambda tensors: tensors | {"x": torch.zeros(1)},
    "another drafter (fc": lambda tensors: tensors | {"fc.weight": torch.zeros(2, 2)},
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_run_never_goes_on_with_a_drafter_that_its_checkpoint_does_not_hold(message: str) -> None:
    model = DraftModel(drafter_config(CONFIG)).initialize(1)
    trained = dict(model.named_parameters())
    before = content_hash(model.state_dict())
    stored = {name: tensor.detach() + 1 for name, tensor in trained.items()}
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        restore(trained, DAMAGES[message](stored), Path("checkpoint"))
    assert content_hash(model.state_dict()) == before
    restore(trained, stored, Path("checkpoint"))
    assert content_hash(model.state_dict()) == content_hash(stored)


def test_a_drafter_folder_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = DraftModel(drafter_config(CONFIG)).initialize(1)
    with torch.no_grad():
        model.fc.weight[0, 0] = math.nan
    save_drafter(tmp_path / "drafter", model, torch.float32)
    with pytest.raises(UserError, match=r"fc\.weight holds numbers that are not finite"):
        load_drafter(tmp_path / "drafter", CONFIG)
