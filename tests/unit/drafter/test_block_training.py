"""Training of block drafters: the loss written out, what a block may see, and whether it learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import cases
from tests.lossless.helpers import CONFIG, VOCAB, Given, make_policy, pack
from tests.unit.drafter.block_parts import (
    DEEP,
    FORMS,
    NUM_DRAFTED,
    POLICY,
    SIZE,
    TARGET,
    captured_of,
    drafting_slots,
    make_batch,
    make_block,
    plain_logits,
    plain_slots,
)
from tests.unit.drafter.parts import context_of, make_request, make_rollout
from tests.unit.drafter.training_parts import Parts
from tlt.base.strategy import Strategy
from tlt.drafter.block import BlockModel, run_blocks
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.measure import draw_counts, engine_logits, read_sample, trainer_logits
from tlt.drafter.shape import BlockOptions, Method, drafter_shape
from tlt.drafter.training.batch import DrafterBatch
from tlt.drafter.training.block_loss import BlockPreset
from tlt.drafter.training.buffer import PackedBatch
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.offline import OfflineSettings, train_offline
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary
from tlt.models.decoder import Transformer
from tlt.models.hf.weights import content_hash

forms = pytest.mark.parametrize(("method", "draft_vocab"), FORMS)
LOSSES = [
    BlockPreset("uneven", "dflash", 0.7, 0.4, decay=3.0, anchor_share=0.6),
    BlockPreset("pace", "dflash", 1.0, slots="d-pace", anchor_share=1.0),
    replace(PRESETS["dspark"], anchor_share=0.5),
]


def anchors_of(preset: BlockPreset, trainer: DrafterTrainer, batch: PackedBatch) -> Sequence[Sequence[int]]:
    drawn: list[Sequence[Sequence[int]]] = []

    class Watched(BlockPreset):
        def sample_anchors(self, drafter_batch: DrafterBatch) -> list[list[int]]:
            anchors = super().sample_anchors(drafter_batch)
            drawn.append(anchors)
            return anchors

    trainer.preset = Watched(**vars(preset))
    trainer.loss(batch)
    trainer.preset = preset
    return drawn[0]


# ── the loss ────────────────────────────────────────────────────────────────────────────────────────────────


def pace(losses: list[Tensor]) -> list[float]:
    """D-PACE's weights of a block's slots, from their cross-entropies."""
    chances = [0.5 * float(torch.exp(-loss)) + 0.5 for loss in losses]
    survival = [float(torch.tensor(chances[: d + 1]).prod()) for d in range(len(chances))]
    return [sum(survival[d:]) for d in range(len(chances))]


@torch.no_grad()
@pytest.mark.parametrize("preset", LOSSES, ids=lambda p: p.name)
@pytest.mark.parametrize("draft_vocab", [None, VOCAB - 3])
def test_the_loss_is_its_sum_over_anchors_and_slots(preset: BlockPreset, draft_vocab: int | None) -> None:
    """Every block written out by itself; a slot counts if the window holds the target's word about it."""
    model = make_block(preset.method, draft_vocab)
    batch, trainer = make_batch(model.config), DrafterTrainer(model, TARGET, preset)
    anchors = anchors_of(preset, trainer, batch)
    kept = list(range(VOCAB)) if draft_vocab is None else model.t2d.nonzero()[:, 0].tolist()
    start, total, weights = 0, 0.0, 0.0
    for length, places in zip(batch.lengths, anchors, strict=True):
        tokens = batch.token_ids_N[start : start + length].tolist()
        captured = batch.captured_NF[start : start + length]
        for place in places:
            slots, losses, entropies = (
                drafting_slots(model, plain_slots(model, tokens, captured, place)),
                [],
                [],
            )
            for d, hidden in enumerate(slots):
                if place + d >= length:
                    break
                p = (POLICY.model.embed_tokens.weight[kept] @ captured[place + d, -SIZE:]).softmax(0)
                log_q = plain_logits(model, hidden, tokens[place + d])[kept].log_softmax(0)
                entropy, distance = -(p * log_q).sum(), (p - log_q.exp()).abs().sum()
                loss = preset.distribution_weight * entropy + preset.variation_weight * distance
                losses.append(loss)
                entropies.append(entropy)
            decayed = [float(torch.exp(torch.tensor(-d / preset.decay))) for d in range(len(losses))]
            weight = pace(entropies) if preset.slots == "d-pace" else decayed
            total += sum(w * float(loss) for w, loss in zip(weight, losses, strict=True))
            weights += sum(weight)
        start += length
    assert sum(map(len, anchors)) > 3
    assert trainer.loss(batch).item() == pytest.approx(total / weights, abs=1e-6)


def test_anchors_stand_before_response_tokens_each_once_and_follow_from_what_was_trained_on() -> None:
    model, preset = make_block("dflash"), replace(PRESETS["dflash"], anchor_share=0.5)
    batch, trainer = make_batch(model.config, (9, 4, 12, 30)), DrafterTrainer(model, TARGET, preset)
    seen = set()
    for num_tokens in range(60):
        trainer.num_tokens = num_tokens
        anchors = anchors_of(preset, trainer, batch)
        assert anchors == anchors_of(preset, trainer, batch)
        for window, places in enumerate(anchors):
            assert list(places) == sorted(set(places))
            seen |= {(window, place) for place in places}
        assert sum(map(len, anchors)) == round(0.5 * batch.num_predicted)
    # the response begins with the third token, which the second one proposes, and ends behind the window
    assert seen == {(w, place) for w, length in enumerate(batch.lengths) for place in range(2, length)}
    few = replace(preset, max_anchors=3)
    assert sum(map(len, anchors_of(few, trainer, batch))) == 3


# ── what a block sees ───────────────────────────────────────────────────────────────────────────────────────


@forms
def test_a_block_sees_its_own_window_before_its_anchor_and_nothing_else(
    method: Method, draft_vocab: int | None
) -> None:
    """Token and captured columns of every place are changed in turn: those before the anchor in its window
    change its block, the anchor's token alone does at the anchor, and no other does: no later place, no other
    document, whether it stands before or behind."""
    model = make_block(method, draft_vocab)
    batch, anchors = make_batch(model.config, (6, 8, 5)), [[2, 4], [1, 5, 7], [3]]
    owners = [(w, place) for w, places in enumerate(anchors) for place in places]
    starts = (0, 6, 14)

    def blocks(tokens_N: Tensor, captured_NF: Tensor) -> Tensor:
        changed = replace(batch, token_ids_N=tokens_N, captured_NF=captured_NF)
        with torch.no_grad():
            return run_blocks(model, changed, anchors, TARGET.embed)

    base = blocks(batch.token_ids_N, batch.captured_NF)
    for window, length in enumerate(batch.lengths):
        for place in range(length):
            at = starts[window] + place
            captured_NF, tokens_N = batch.captured_NF.clone(), batch.token_ids_N.clone()
            captured_NF[at] += 1.0
            tokens_N[at] = (tokens_N[at] + 1) % VOCAB
            moved_features = (blocks(batch.token_ids_N, captured_NF) - base).abs().amax((1, 2)) > 1e-9
            moved_tokens = (blocks(tokens_N, batch.captured_NF) - base).abs().amax((1, 2)) > 1e-9
            assert moved_features.tolist() == [w == window and place < a for w, a in owners]
            assert moved_tokens.tolist() == [(w, a) == (window, place) for w, a in owners]


# ── learning ────────────────────────────────────────────────────────────────────────────────────────────────


def make_counting_policy() -> Transformer:
    """A target that says token t + 1 after token t, nearly always: its layers add nothing."""
    policy = make_policy(config=replace(DEEP, tie_embeddings=False))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        rows_VE = policy.model.embed_tokens.weight
        assert policy.lm_head is not None
        policy.lm_head.weight.copy_(1.5 * F.normalize(rows_VE.roll(1, 0), dim=-1))
    return policy


COUNTING = pack(make_counting_policy())
RESPONSES = [
    make_rollout([(start + i) % VOCAB for i in range(44)], 4, index=index)
    for index, start in enumerate(range(0, VOCAB, 7))
]


@pytest.mark.parametrize("preset", cases(["dflash-pace", "dspark"], usual=["dspark"]))
def test_the_loss_falls_and_longer_chains_are_accepted(preset: str) -> None:
    shape = drafter_shape(DEEP, PRESETS[preset].method, block=BlockOptions(2, NUM_DRAFTED))
    model = new_model(shape).initialize(0)
    assert isinstance(model, BlockModel)
    before, losses = accepted(model.double()), []
    settings = OfflineSettings(60.0, 5e-3, 200, seed=0, temperature=1.0)
    summary = train_offline(
        model, COUNTING, PRESETS[preset], RESPONSES, settings, lambda share, loss: losses.append(loss)
    )
    known = [loss for loss in losses if loss is not None]
    assert known[-1] < 0.7 * known[0]
    assert before < 1.5
    assert accepted(model) > 3.0
    assert summary.acceptance is not None
    assert summary.acceptance > 0.8


def accepted(model: BlockModel) -> float:
    """Mean number of tokens of greedy chains that the responses confirm."""
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    drafter = LearnedDrafter(packed, COUNTING, 4)
    strategy, noise, total = Strategy("learned", NUM_DRAFTED, 1, NUM_DRAFTED), torch.zeros(1, 4, VOCAB), 0
    for rollout in RESPONSES:
        row = [*rollout.prompt_ids, *rollout.token_ids]
        drafter.admit(0, make_request(row[:4]))
        drafter.remember([0], [0], captured_of(model.config, row, COUNTING)[None])
        tree = drafter.propose(context_of([row[:20]]), strategy, Given(noise)).tree
        hits = [a == b for a, b in zip(tree.tokens_BN[0, 1:].tolist(), row[20:], strict=False)]
        total += [*hits, False].index(False)
    return total / len(RESPONSES)


def test_a_restored_trainer_goes_on_bit_for_bit() -> None:
    models = [make_block("dspark", seed=seed) for seed in (2, 77)]
    trainers = [DrafterTrainer(model, TARGET, PRESETS["dspark"]) for model in models]
    batches = [make_batch(models[0].config, (20, 30), seed) for seed in range(6)]
    for batch in batches[:3]:
        trainers[0].step(batch)
    with torch.no_grad():
        for name, tensor in trainers[1].tensors().items():
            tensor.copy_(trainers[0].tensors()[name])
    trainers[1].num_tokens = trainers[0].num_tokens
    for batch in batches[3:]:
        assert trainers[0].step(batch) == trainers[1].step(batch)
    assert content_hash(trainers[0].model.state_dict()) == content_hash(trainers[1].model.state_dict())


@pytest.mark.parametrize("preset", ["dflash", "dspark"])
def test_idle_time_trains_publishes_and_measures_it_as_any_drafter(preset: str) -> None:
    parts, twin = Parts(preset=preset), Parts(preset=preset)
    first = parts.step()
    assert (first.training, first.version) == ("trained", 1)
    assert first.acceptance != first.before
    before = content_hash(parts.model.state_dict())
    assert parts.step(1, micro_steps=0).version == 1
    assert content_hash(parts.model.state_dict()) == before
    for copy in (parts.model, parts.learned.model):  # resumed: the same tokens, hence the same anchors
        assert copy.config == twin.model.config
    twin.step()
    assert content_hash(twin.model.state_dict()) == before
    parts.training.served.load = lambda tensors, version: None  # type: ignore[method-assign]  # loses it
    with pytest.raises(RuntimeError, match="did not arrive in rank 0's engine"):
        parts.step(2)


def test_a_chosen_vocabulary_is_trained_and_measured_over_its_tokens() -> None:
    costs = DraftCosts.of(CONFIG, drafter_shape(CONFIG, "dspark"))
    parts = Parts(vocabulary=DraftVocabulary(costs, 30), preset="dspark")
    parts.training.foresee([[3, 4, 5]])
    assert parts.trainer.token_ids is not None
    assert len(parts.trainer.token_ids) == 30
    before = parts.model.state_dict()["markov_head.markov_w2.weight"].clone()
    check = parts.step()
    assert check.training == "trained"
    moved_V = (parts.model.state_dict()["markov_head.markov_w2.weight"] != before).any(1)
    assert not moved_V[[t for t in range(VOCAB) if t not in parts.trainer.token_ids.tolist()]].any()


# ── the measure ─────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@forms
def test_the_measure_is_the_overlap_of_the_first_draft_at_every_response_token(
    method: Method, draft_vocab: int | None
) -> None:
    model = make_block(method, draft_vocab)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    counts = draw_counts(RESPONSES[:3], 50, random.Random(0))
    sample = read_sample(RESPONSES[:3], counts, TARGET, model.config.capture, 0.7)
    logits_RV = engine_logits(packed, TARGET, sample)
    theirs_RV = trainer_logits(model, TARGET, sample, packed.token_ids)
    torch.testing.assert_close(theirs_RV, logits_RV, rtol=0, atol=1e-9)
    total = 0.0
    for index, count in counts.items():
        tokens = [*RESPONSES[index].prompt_ids, *RESPONSES[index].token_ids]
        captured = captured_of(model.config, tokens, for_training=True)
        for place in range(3, 3 + count):
            p = (POLICY.model.embed_tokens.weight @ captured[place, -SIZE:] / 0.7).softmax(0)
            first = drafting_slots(model, plain_slots(model, tokens, captured, place))[0]
            q = (plain_logits(model, first, tokens[place]) / 0.7).softmax(0)
            total += float(torch.minimum(p, q).sum())
    assert sample.overlap(logits_RV, packed.token_ids) == pytest.approx(total, abs=1e-6)
