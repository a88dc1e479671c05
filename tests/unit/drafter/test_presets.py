"""The three ways to train a drafter, and EAGLE-3's form of one: what is trained is what drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.lossless.helpers import VOCAB, to_transformers
from tests.refused import refused
from tests.unit.drafter.block_parts import DEEP, POLICY, SIZE, TARGET, make_batch
from tests.unit.drafter.parts import make_model, randn
from tlt.apps.run.start import preflight
from tlt.base.config.schema import Config
from tlt.base.strategy import Strategy
from tlt.base.types import Request, SamplingParams
from tlt.drafter.drafting.learned.drafter import LearnedDrafter, LearnedSettings
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import pack_drafter
from tlt.drafter.pairs import align
from tlt.drafter.shape import Method, capture_layers, training_capture
from tlt.drafter.training.batch import Preset
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.engine.own.engine import RolloutEngine
from tlt.models.attention import PackedCausal, Unrolled, causal_and_own
from tlt.models.cpu_kernels import CausalAndOwn
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.tuner import FixedTuner

DRAFT_VOCAB = VOCAB - 3
METHODS: list[tuple[Method, int | None]] = [("eagle", None), ("eagle3", None), ("eagle3", DRAFT_VOCAB)]
forms = pytest.mark.parametrize(("method", "draft_vocab"), METHODS)


def preset_of(method: Method) -> Preset:
    return PRESETS["hass" if method == "eagle" else "eagle3"]


# ── what the target hands over ──────────────────────────────────────────────────────────────────────────────


def test_captured_are_the_residual_sums_that_transformers_shows_and_the_features() -> None:
    tokens = torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(4))
    attend = PackedCausal(DEEP, [11])
    features, captured = TARGET.forward_capturing(tokens, attend.positions(), attend, (1, 2, 4, 6))
    shown = to_transformers(POLICY)(tokens[None], output_hidden_states=True).hidden_states
    for index, part in zip((1, 2, 4, 6), captured.split(SIZE, dim=-1), strict=True):
        torch.testing.assert_close(part, shown[index][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(captured[:, -SIZE:], features, rtol=0, atol=0)


def test_three_layers_are_captured_where_engines_expect_them() -> None:
    assert capture_layers(32) == (2, 16, 29)
    assert capture_layers(20) == (2, 10, 17)
    for num_layers in range(4, 8):
        assert len(set(capture_layers(num_layers))) == 3
        assert max(capture_layers(num_layers)) < num_layers
    with refused("only 3"):
        capture_layers(3)


# ── training lives through what drafting sees ───────────────────────────────────────────────────────────────


@forms
def test_a_step_in_training_equals_the_draft_from_there(method: Method, draft_vocab: int | None) -> None:
    """Brute force: for every pair and step, a plain causal forward over the true pairs up to it and its
    own states since."""
    model, steps = make_model(2, method, draft_vocab, DEEP), 4
    batch = make_batch(model.config, (9, 6, 4))
    pairs = align(batch.lengths)
    attend = Unrolled(model.config.layer, pairs.lengths)
    true_hidden = model.fuse(batch.captured_NF[pairs.feature_index_M])
    hidden, states = true_hidden, []
    for step in range(steps):
        index, _ = pairs.ahead(step)
        hidden = model(TARGET.embed(batch.token_ids_N[index]), hidden, pairs.positions_M + step, attend)
        states.append(hidden)
    first_token, first_pair = 0, 0
    for length in batch.lengths:
        embeddings = TARGET.embed(batch.token_ids_N[first_token : first_token + length])
        for t in range(length - 1):
            inputs = list(true_hidden[first_pair : first_pair + t + 1])
            for step in range(min(steps, length - 1 - t)):
                count = len(inputs)
                plain = PackedCausal(model.config.layer, [count])
                out = model(embeddings[1 : count + 1], torch.stack(inputs), torch.arange(count), plain)
                torch.testing.assert_close(states[step][first_pair + t], out[-1], rtol=0, atol=1e-10)
                inputs.append(out[-1])
        first_token, first_pair = first_token + length, first_pair + length - 1


@pytest.mark.parametrize("num_own", [1, 3])
def test_the_fused_attention_and_its_gradients_are_those_of_the_plain_one(num_own: int) -> None:
    shapes = [(3, 11, 8)] * 3 + [(num_own, 3, 11, 8)] * 2
    inputs = [(2 * randn(*shape, seed=i)).requires_grad_() for i, shape in enumerate(shapes)]
    outputs = [attend(*inputs) for attend in (causal_and_own, CausalAndOwn.apply)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
    plain, fused = (torch.autograd.grad(out, inputs, randn(3, 11, 8, seed=9)) for out in outputs)
    for found, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@forms
def test_the_loss_is_its_sum_over_steps_and_pairs(method: Method, draft_vocab: int | None) -> None:
    """Written out with loops, for the preset with most steps of each form, its weights made uneven."""
    model = make_model(2, method, draft_vocab, DEEP)
    preset = replace(preset_of(method), distribution_weight=1.3, step_decay=0.9)
    if method == "eagle":
        preset = replace(preset, feature_weight=0.7)
    batch = make_batch(model.config)
    pairs, attend = align(batch.lengths), Unrolled(model.config.layer, [n - 1 for n in batch.lengths])
    features = batch.captured_NF[:, -SIZE:]
    kept = list(range(VOCAB)) if draft_vocab is None else (model.t2d.nonzero()[:, 0]).tolist()
    hidden, total = model.fuse(batch.captured_NF[pairs.feature_index_M]), 0.0
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths))]
    for step in range(preset.unrolled_steps):
        index, _ = pairs.ahead(step)
        hidden = model(TARGET.embed(batch.token_ids_N[index]), hidden, pairs.positions_M + step, attend)
        states, losses = iter(hidden), []
        for start, length in zip(starts, batch.lengths, strict=True):
            for t in range(length - 1):
                state = next(states)
                if t + 1 + step > length - 1 or t + 2 + step < 3:  # the response begins with token 3
                    continue
                wanted = features[start + t + 1 + step]
                p = F.linear(wanted, TARGET.head_VE)[kept].softmax(-1)
                normed = model.norm(state) if method == "eagle3" else state
                q = F.linear(normed, TARGET.head_VE)[kept].log_softmax(-1)
                loss = -preset.distribution_weight * (p * q).sum()
                losses.append(loss + preset.feature_weight * F.smooth_l1_loss(state, wanted))
        if losses:
            total += preset.step_decay**step * torch.stack(losses).mean().item()
    found = DrafterTrainer(model, TARGET, preset).loss(batch).item()
    assert found == pytest.approx(total, abs=1e-10)


# ── the engine's copy ───────────────────────────────────────────────────────────────────────────────────────


@forms
def test_the_packed_drafter_computes_what_the_trainable_one_does(
    method: Method, draft_vocab: int | None
) -> None:
    model = make_model(2, method, draft_vocab, DEEP)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    batch = make_batch(model.config, (8,))
    embeddings, attend = randn(8, SIZE, seed=1), PackedCausal(model.config.layer, [8])
    with torch.no_grad():
        hidden = packed.fuse(batch.captured_NF)
        torch.testing.assert_close(hidden, model.fuse(batch.captured_NF), rtol=0, atol=1e-10)
        found = packed.forward(embeddings, hidden, attend.positions(), attend)
        expected = model(embeddings, hidden, attend.positions(), attend)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        rows = model.restrict(TARGET.head_VE)
        torch.testing.assert_close(
            packed.logits(found, TARGET), model.logits(expected, rows), rtol=0, atol=1e-10
        )


@forms
@pytest.mark.parametrize(
    ("strategy", "temperature"),
    [(Strategy("learned", 4, 1, 4), 1.0), (Strategy("learned", 3, 3, 9), 0.0)],
    ids=str,
)
def test_tokens_are_those_of_off(
    method: Method, draft_vocab: int | None, temperature: float, strategy: Strategy
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, stop_ids=(), seed=5)
    requests = [Request(f"p{i}", 0, (1 + i, 2, 3 + i), params) for i in range(5)]
    plain = RolloutEngine(PackedTransformer(DEEP, torch.float64), max_batch_size=3)
    plain.load_policy(POLICY.state_dict())
    expected = {r.problem_id: r.token_ids for r in plain.generate(requests)}
    engine = RolloutEngine(
        PackedTransformer(DEEP, torch.float64), max_batch_size=3, tuner=FixedTuner(strategy)
    )
    engine.load_policy(POLICY.state_dict())
    model = make_model(2, method, draft_vocab, DEEP)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    drafter = LearnedDrafter(packed, engine.target, 3, LearnedSettings(keep_targets=True))
    engine.load_drafter(drafter)
    engine.add(requests)
    found, captured = {}, {}
    while not engine.is_idle:
        for finished in engine.step(captures=True):
            found[finished.rollout.problem_id] = finished.rollout.token_ids
            captured[finished.rollout.problem_id] = finished.captured_TF
    assert found == expected
    capture = training_capture(model.config, DEEP.num_layers)
    for request in requests:  # what was kept to train on is what a plain forward gives
        tokens = torch.tensor([*request.prompt_ids, *expected[request.problem_id]][:-1])
        attend = PackedCausal(DEEP, [len(tokens)])
        _, wanted = TARGET.forward_capturing(tokens, attend.positions(), attend, capture)
        torch.testing.assert_close(captured[request.problem_id], wanted, rtol=0, atol=1e-9)


# ── directories ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_preset_of_another_form_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(tmp_path, make_model(2, "eagle3", None, DEEP), torch.float64, {"preset": "hass"})
    config = Config.model_validate(
        {
            "model": {"path": tmp_path},
            "task": {"name": "countdown"},
            "drafter": {"path": tmp_path, "train": True},
            "run": {"num_ranks": 1},
        }
    )
    monkeypatch.setattr("tlt.apps.run.start.load_model_config", lambda *_: DEEP)
    with refused(r"preset: hass does not train a drafter of form eagle3"):
        preflight(config)
