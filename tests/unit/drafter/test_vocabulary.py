"""The draft vocabulary: what is chosen, when it is renewed, what is trained over it, and that no token
depends on it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.lossless.helpers import CONFIG, VOCAB, tokens_of
from tests.refused import refused
from tests.unit.drafter.parts import (
    MODEL,
    POLICY,
    TARGET,
    context_of,
    make_batch,
    make_model,
    make_requests,
    make_rollout,
)
from tests.unit.drafter.training_parts import Parts, make_rollouts
from tlt.base.strategy import Strategy
from tlt.base.types import Rollout, SamplingParams
from tlt.base.value_types import DraftVocab
from tlt.drafter.drafting.learned.drafter import LearnedDrafter
from tlt.drafter.drafting.learned.vocabulary_choice import VocabularyChoice
from tlt.drafter.formats.export import export_drafter, lacks_counts, with_vocabulary
from tlt.drafter.formats.folder import StoredDrafter, load_drafter, save_drafter
from tlt.drafter.formats.layouts import DescribedTarget
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.measure import Measurement, check_arrival
from tlt.drafter.shape import Method, drafter_shape
from tlt.drafter.training.losses import PRESETS
from tlt.drafter.training.trainer import DrafterTrainer
from tlt.drafter.vocabulary import (
    KEEP,
    RESIZE_ABOVE,
    DraftCosts,
    DraftVocabulary,
    check_wanted,
    sizes_of,
)
from tlt.engine.own.engine import RolloutEngine
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.files import COUNTS
from tlt.models.packed import PackedTransformer
from tlt.speculation.tuner.tuner import FixedTuner

LARGE = replace(CONFIG, vocab_size=16_384, num_layers=4)
"""Most of its numbers are the head's."""


def costs_of(target: ModelConfig = LARGE, method: Method = "eagle") -> DraftCosts:
    return DraftCosts.of(target, drafter_shape(target, method))


def response(tokens: Sequence[int]) -> Rollout:
    return make_rollout([3, 4, *tokens], 2)


def zipf(num: int, seed: int, shift: int = 0, vocab: int = LARGE.vocab_size) -> list[int]:
    """Tokens as texts have them: the k-th most frequent about once in k."""
    generator = torch.Generator().manual_seed(seed)
    weights_V = 1 / torch.arange(1, vocab + 1)
    return ((torch.multinomial(weights_V, num, True, generator=generator) + shift) % vocab).tolist()


# ── what is chosen ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_costs_are_those_of_the_matrices_that_are_read() -> None:
    for method in ("eagle", "eagle3"):
        shape = drafter_shape(LARGE, method)
        target, drafter = Transformer(LARGE), new_model(shape)
        matrices = [
            p.numel() for name, p in target.named_parameters() if p.dim() == 2 and "embed" not in name
        ]
        tied = (
            0 if "lm_head.weight" in dict(target.named_parameters()) else LARGE.vocab_size * LARGE.hidden_size
        )
        drafted = [p.numel() for p in drafter.parameters() if p.dim() == 2]
        drafted = drafted if method == "eagle" else drafted[1:]  # fc is read once a step
        costs = DraftCosts.of(LARGE, shape)
        assert costs.forward == sum(matrices) + tied
        assert (costs.layer, costs.row) == (sum(drafted), LARGE.hidden_size)


def counted(vocabulary: DraftVocabulary, tokens: Sequence[int], keep: float = KEEP) -> None:
    """A step: what was sampled, then a choice for the next."""
    vocabulary.observe(vocabulary.count(tokens), keep)
    vocabulary.renew()


def chosen_by(vocabulary: DraftVocabulary) -> list[int]:
    assert vocabulary.token_ids is not None
    ids: list[int] = vocabulary.token_ids.tolist()
    return ids


def test_what_the_prompts_name_is_chosen_beside_what_was_sampled() -> None:
    vocabulary = DraftVocabulary(costs_of(CONFIG), 6)
    vocabulary.foresee([(40, 41), (41, 42)])
    vocabulary.renew()
    assert chosen_by(vocabulary) == [0, 1, 2, 40, 41, 42], "before the first response the lowest ids beside"
    counted(vocabulary, [20] * 50 + [21] * 40 + [22] * 30 + [3])
    assert chosen_by(vocabulary) == [20, 21, 22, 40, 41, 42]
    vocabulary.foresee([(50, 51)])
    vocabulary.renew()
    assert chosen_by(vocabulary) == [3, 20, 21, 22, 50, 51], "the former prompts say nothing any more"


def test_the_sizes_are_powers_of_two_up_to_a_quarter_where_the_head_is_a_tenth_of_a_forward() -> None:
    costs = costs_of()
    assert sizes_of(costs, "auto") == [1024, 2048, 4096]
    assert sizes_of(replace(costs, forward=10 * costs.row * costs.vocab_size), "auto") == [1024, 2048, 4096]
    assert sizes_of(replace(costs, forward=11 * costs.row * costs.vocab_size), "auto") == []
    assert sizes_of(costs_of(CONFIG), "auto") == sizes_of(costs, "full") == []
    assert sizes_of(costs, 77) == [77]


def test_the_size_with_the_fewest_seconds_a_token_by_what_each_covered_of_later_tokens_is_chosen() -> None:
    vocabulary = DraftVocabulary(costs_of())
    assert vocabulary.size == LARGE.vocab_size, "nothing is known"
    vocabulary.foresee([zipf(100, 9)])
    vocabulary.renew()
    assert vocabulary.size == 4096, "the largest until it is known what others cover"
    ranking = vocabulary._ranked_V
    first = zipf(5000, 1)
    counted(vocabulary, first)
    assert ranking is not None
    held = [
        sum(token in set(ranking[:size].tolist()) for token in first) / len(first)
        for size in (1024, 2048, 4096)
    ]
    assert vocabulary.covered == pytest.approx(held)
    for step in range(8):
        counted(vocabulary, zipf(5000, step))
        costs = dict(
            zip(
                vocabulary.sizes,
                map(vocabulary.costs.of_token, vocabulary.sizes, vocabulary.covered),
                strict=True,
            )
        )
        costs[LARGE.vocab_size] = vocabulary.costs.of_token(LARGE.vocab_size, 1.0)
        assert costs[vocabulary.size] <= min(costs.values()) / (1 - RESIZE_ABOVE)


def test_a_vocabulary_that_covers_too_little_becomes_whole() -> None:
    costs = replace(costs_of(), forward=6 * costs_of().row * LARGE.vocab_size)
    vocabulary = DraftVocabulary(costs)
    for step in range(6):
        uniform = torch.randint(
            LARGE.vocab_size, (3000,), generator=torch.Generator().manual_seed(step)
        ).tolist()
        counted(vocabulary, uniform)
    assert vocabulary.token_ids is None
    for step in range(12):
        counted(vocabulary, [step % 3, *range(40)] * 20)
    assert vocabulary.size == 1024, "what is sampled now is covered"


def test_another_size_must_be_worth_new_kernels() -> None:
    vocabulary = DraftVocabulary(costs_of(), counts_V=torch.ones(LARGE.vocab_size))
    assert vocabulary.size == 4096
    costs = vocabulary.costs
    equal = next(
        share
        for share in (0.001 * k for k in range(1000))
        if costs.of_token(2048, share) < costs.of_token(4096, 0.9)
    )
    vocabulary.covered = [0.1, equal + 0.005, 0.9]
    vocabulary.renew()
    assert vocabulary.size == 4096
    vocabulary.covered = [0.1, equal + 0.05, 0.9]
    vocabulary.renew()
    assert vocabulary.size == 2048


@pytest.mark.parametrize(("wanted", "shape", "told"), [
    (VOCAB, MODEL.config, f"{VOCAB} must be less than the model's vocabulary, {VOCAB}"),
    (9, drafter_shape(CONFIG, "eagle", 20), "the drafter has a vocabulary of its own, of 20 tokens"),
    (9, replace(MODEL.config, owns_head=True), "the drafter has a head of its own"),
])  # fmt: skip
def test_a_size_that_cannot_be_had_is_refused_in_one_line(wanted: int, shape: Any, told: str) -> None:
    with refused(told):
        check_wanted(wanted, shape)
    check_wanted("auto", shape)


# ── when it is renewed ──────────────────────────────────────────────────────────────────────────────────────


def test_it_stays_while_the_same_is_sampled_and_follows_a_policy_that_moves() -> None:
    vocabulary = DraftVocabulary(costs_of(), 40)
    for _ in range(4):
        counted(vocabulary, [token for token in range(60) for _ in range(60 - token)])
    assert (chosen_by(vocabulary), vocabulary.num_renewals) == ([*range(40)], 1)
    for _ in range(8):
        counted(vocabulary, [100 + token for token in range(60) for _ in range(60 - token)])
    assert chosen_by(vocabulary)[-1] > 130


def test_what_was_counted_before_fades_however_much_it_was() -> None:
    recorded = torch.zeros(VOCAB)
    recorded[10:20] = 1e6
    vocabulary = DraftVocabulary(costs_of(CONFIG), 10, recorded)
    assert chosen_by(vocabulary) == [*range(10, 20)], "a folder's counts are there before the first response"
    for _ in range(40):
        counted(vocabulary, [*range(10)] * 3)
    assert chosen_by(vocabulary) == [*range(10)]
    assert float(vocabulary.counts_V.sum()) == pytest.approx(300, rel=0.05), "ten steps' worth of tokens"


def test_an_engine_alone_counts_every_token_of_its_responses_once_however_often_it_looks() -> None:
    vocabulary = DraftVocabulary(costs_of(CONFIG), 10)
    model: Any = SimpleNamespace(choose=lambda token_ids: None)
    choice = VocabularyChoice(model, vocabulary)
    for tokens in ([20] * 3, [20] * 3 + [30] * 5):
        choice.admit()
        choice.look(context_of([[3, 4, *tokens]]))
    choice.finish(response([20] * 3 + [30] * 5))
    choice.admit()
    choice.look(context_of([[3, 4, 40]]))
    assert {token: int(vocabulary.counts_V[token]) for token in (20, 30, 40)} == {20: 3, 30: 5, 40: 1}


def test_ranks_that_were_told_the_same_choose_alike_and_so_does_one_that_was_resumed() -> None:
    ranks = [DraftVocabulary(costs_of()) for _ in range(2)]
    for step in range(6):
        for vocabulary in ranks:
            vocabulary.foresee([zipf(50, 70 + step)])
            counted(vocabulary, zipf(3000, step))
        if step % 2:
            resumed = DraftVocabulary(costs_of())
            resumed.restore(json.loads(json.dumps(ranks[1].counters())))
            assert resumed.counters() == ranks[1].counters()
            ranks[1] = resumed
            for vocabulary in ranks:  # as the next step begins
                vocabulary.foresee([zipf(50, step)])
                vocabulary.renew()
    assert ranks[0].counters() == ranks[1].counters()
    assert ranks[0].num_renewals > 1


# ── in the engine ───────────────────────────────────────────────────────────────────────────────────────────


def drafting_engine(
    wanted: DraftVocab, strategy: Strategy, method: Method = "eagle"
) -> tuple[RolloutEngine, LearnedDrafter, set[int]]:
    """An engine, its drafter, and what that proposes from the second choice on."""
    engine = RolloutEngine(
        PackedTransformer(CONFIG, torch.float64), max_batch_size=4, tuner=FixedTuner(strategy)
    )
    engine.load_policy(dict(POLICY.named_parameters()))
    packed = pack_drafter(MODEL.config, MODEL.state_dict(), torch.float64)
    vocabulary = DraftVocabulary(costs_of(CONFIG), wanted)
    learned = LearnedDrafter(packed, engine.target, 4, vocabulary=vocabulary)
    engine.load_drafter(learned)
    outside: set[int] = set()
    original = learned.propose

    def spy(*args: Any) -> Any:
        proposal = original(*args)
        tree = proposal.tree
        if packed.token_ids is not None:
            drafted = tree.tokens_BN[:, 1:][tree.parents_BN[:, 1:] >= 0].tolist()
            outside.update(set(drafted) - set(packed.token_ids.tolist()))
        return proposal

    learned.propose = spy  # type: ignore[method-assign]  # it proposes as before, and is watched
    return engine, learned, outside


@pytest.mark.parametrize(
    ("strategy", "temperature"),
    [(Strategy("learned", 4, 1, 4), 1.0), (Strategy("learned", 3, 3, 9), 0.0)],
    ids=str,
)
def test_tokens_are_those_of_off_while_the_vocabulary_is_renewed(
    temperature: float, strategy: Strategy
) -> None:
    params = SamplingParams(temperature, max_tokens=60)
    requests = [replace(request, params=params) for request in make_requests(10)]
    expected: dict[Any, tuple[int, ...]] = {}
    for wanted in ("full", 12):
        engine, learned, outside = drafting_engine(wanted, strategy if wanted != "full" else Strategy.OFF)
        found = tokens_of(engine, requests)
        assert found == (expected := expected or found)
    assert learned.vocabulary_choice is not None
    assert learned.vocabulary_choice.vocabulary.num_renewals > 1, "in the middle of the responses"
    assert learned.model.num_proposed == 12
    assert not outside, "only what it holds is proposed"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_engines_copy_ranks_with_the_chosen_rows_of_the_current_head(method: Method) -> None:
    model = new_model(drafter_shape(LARGE, method)).double().initialize(1)
    packed = pack_drafter(model.config, model.state_dict(), torch.float64)
    target = PackedTransformer(LARGE, torch.float64)
    hidden = torch.randn(
        3, LARGE.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    choices = [torch.tensor([1, 5, 60]), torch.tensor([0, 5, 61]), torch.tensor([4, 9]), None]
    for version, chosen in enumerate(choices * 2):
        if version >= len(
            choices
        ):  # another policy each time, and new weights, which leave the choice as it is
            target.load(dict(Transformer(LARGE).double().initialize(version).named_parameters()), version)
            packed.choose(chosen)
            packed.load(model.state_dict(), version)
        elif version == 0:
            target.load(dict(Transformer(LARGE).double().initialize(9).named_parameters()), 9)
        packed.choose(chosen)
        with torch.no_grad():
            whole = model.logits(hidden, target.head_VE)
        expected = whole if chosen is None else whole[:, chosen]
        torch.testing.assert_close(packed.logits(hidden, target), expected, rtol=0, atol=1e-10)


# ── in training, and at the end of a step ───────────────────────────────────────────────────────────────────


def test_the_loss_over_a_vocabulary_is_that_of_a_drafter_which_has_it_alone() -> None:
    chosen = torch.tensor([token for token in range(VOCAB) if token % 3])
    target = replace(CONFIG, num_layers=4)
    policy = Transformer(target).double().initialize(3)
    packed = PackedTransformer(target, torch.float64)
    packed.load(dict(policy.named_parameters()), 0)
    losses = []
    for reduced in (False, True):
        model = (
            new_model(drafter_shape(target, "eagle3", len(chosen) if reduced else None))
            .double()
            .initialize(2)
        )
        if reduced:
            model.set_vocabulary(chosen)
        trainer = DrafterTrainer(model, packed, PRESETS["eagle3"])
        trainer.token_ids = None if reduced else chosen
        batch = make_batch((9, 7))
        columns = torch.randn(
            16, 4 * target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        losses.append(trainer.loss(replace(batch, captured_NF=columns)).detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)
    whole = DrafterTrainer(make_model(), TARGET, PRESETS["hass"])
    before = whole.loss(make_batch()).item()
    whole.token_ids = chosen
    assert abs(whole.loss(make_batch()).item() - before) > 1e-3


def watched(wanted: DraftVocab) -> tuple[Any, DraftVocabulary]:
    """A drafter of a run of one rank, with the parts that choose."""
    vocabulary = DraftVocabulary(costs_of(CONFIG), wanted)
    return Parts(vocabulary=vocabulary).training, vocabulary


def test_a_step_is_recorded_with_the_vocabulary_it_drafted_with_which_its_responses_do_not_change() -> None:
    training, vocabulary = watched(10)
    first, second = make_rollouts(seed=1), make_rollouts(seed=2)
    check = training.publish_and_measure(first, 0, 1.0)
    assert (check.vocabulary, check.coverage) == (VOCAB, 1.0), "nothing was known in the first step"
    training.foresee([(1, 2)])
    chosen = chosen_by(vocabulary)
    assert {1, 2} < set(chosen)
    assert training.served.model.token_ids.tolist() == training.spot.trainer.token_ids.tolist() == chosen
    check = training.publish_and_measure(second, 0, 1.0)
    assert chosen_by(vocabulary) == chosen
    tokens = [token for rollout in second for token in rollout.token_ids]
    assert check.vocabulary == 10
    assert check.coverage == pytest.approx(sum(token in chosen for token in tokens) / len(tokens))


def test_a_saved_drafter_has_what_was_counted_and_the_acceptance_that_was_measured_last(
    tmp_path: Path,
) -> None:
    training, _ = watched("full")
    training.check_every = 2
    measured = training.publish_and_measure(make_rollouts(seed=1), 0, 1.0).acceptance
    assert math.isnan(training.publish_and_measure(make_rollouts(seed=2), 0, 1.0).acceptance), "not due"
    restarted, _ = watched("full")
    restarted.restore(training.counters(), training.own_counters())
    for number, one in enumerate((training, restarted)):
        one.save(tmp_path / str(number), {})
        about = load_drafter(tmp_path / str(number), CONFIG, POLICY.state_dict()).about
        assert about["acceptance"] == measured
        assert (tmp_path / str(number) / COUNTS).is_file()


def test_ranks_that_propose_other_tokens_stop_the_run() -> None:
    training, _ = watched(10)
    training.foresee([(30, 31)])
    ours = Measurement(training.copies, make_rollouts(), 1.0, random.Random(1)).tally()
    training.served.model.choose(torch.arange(10))
    theirs = Measurement(training.copies, make_rollouts(), 1.0, random.Random(1)).tally()
    with pytest.raises(RuntimeError, match="rank 1 proposes other tokens than rank 0"):
        check_arrival([ours, theirs], 3, 1e-4)


def test_a_run_leads_so_that_no_rank_chooses_by_its_own_responses() -> None:
    training, vocabulary = watched(10)
    context = SimpleNamespace(tokens=[[*range(60)] * 20], requests=[SimpleNamespace(prompt_ids=(1, 2))])
    for is_led in (True, False):
        training.served.vocabulary_choice.is_led = is_led
        training.served.finish(0, make_rollouts()[0])
        training.served.vocabulary_choice.look(context)
        assert (vocabulary.num_renewals, float(vocabulary.counts_V.sum()) > 0) == (
            (0, False) if is_led else (1, True)
        )


def test_a_resumed_run_drafts_with_what_it_had_and_with_another_size_if_that_is_wanted_now() -> None:
    training, vocabulary = watched(10)
    training.foresee([(30, 31)])
    training.publish_and_measure(make_rollouts(seed=1), 0, 1.0)
    counters = json.loads(json.dumps(training.counters()))
    again, restored = watched(10)
    again.restore(counters, training.own_counters())
    assert restored.counters() == vocabulary.counters()
    assert again.served.model.token_ids.tolist() == vocabulary.token_ids.tolist()  # type: ignore[union-attr]  # both have one
    assert torch.equal(again.spot.trainer.token_ids, again.served.model.token_ids)
    wider, _ = watched(15)
    wider.restore(counters, training.own_counters())
    wider.foresee([(30, 31)])
    assert wider.served.model.num_proposed == 15


# ── in folders ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_keeps_the_counts(tmp_path: Path) -> None:
    counts_V = torch.zeros(VOCAB)
    counts_V[[3, 9, 60]] = torch.tensor([4.0, 2.25, 1.0])
    save_drafter(tmp_path / "a", MODEL, torch.float32, {}, counts_V)
    found = load_drafter(tmp_path / "a", CONFIG)
    assert found.counts_V is not None
    assert torch.equal(found.counts_V, counts_V)
    save_drafter(tmp_path / "b", MODEL, torch.float32)
    assert load_drafter(tmp_path / "b", CONFIG).counts_V is None


COUNTS_OF = '{"token_ids": %s, "counts": %s}'


@pytest.mark.parametrize("text", [
    "{", "[]", '{"token_ids": [1]}', COUNTS_OF % ([61], [1]), COUNTS_OF % ([1], [-1]),
    COUNTS_OF % ([1, 2], '["x", 1]'), COUNTS_OF % ([-1], [1]),
])  # fmt: skip
def test_damaged_counts_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    save_drafter(tmp_path / "a", MODEL, torch.float32)
    (tmp_path / "a" / COUNTS).write_text(text)
    with refused(COUNTS):
        load_drafter(tmp_path / "a", CONFIG)


def stored(method: Method, counts_V: Tensor | None) -> StoredDrafter:
    model = new_model(drafter_shape(LARGE, method)).initialize(1)
    return StoredDrafter(
        model.config, {name: t.detach() for name, t in model.state_dict().items()}, {}, counts_V
    )


def frequent() -> Tensor:
    counts_V = torch.zeros(LARGE.vocab_size)
    counts_V[5000:5100] = 100.0
    return counts_V


@pytest.mark.parametrize("name", ["vllm-eagle3", "sglang-eagle3", "speculators"])
@pytest.mark.parametrize(("wanted", "size"), [("auto", 4096), (300, 300), ("full", LARGE.vocab_size)])
def test_an_export_carries_the_rows_of_the_tokens_that_pay(
    tmp_path: Path, name: str, wanted: DraftVocab, size: int
) -> None:
    drafter = with_vocabulary(stored("eagle3", frequent()), name, wanted, LARGE)
    head_VE = torch.randn(LARGE.vocab_size, LARGE.hidden_size, generator=torch.Generator().manual_seed(1))
    export_drafter(drafter, name, DescribedTarget("org/model", "LlamaForCausalLM", head_VE), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["draft_vocab_size"] == len(tensors["lm_head.weight"]) == size
    if size == LARGE.vocab_size:  # vLLM fails on a map between equal vocabularies
        assert not {"d2t", "t2d"} & tensors.keys()
        return
    ids = tensors["d2t"] + torch.arange(size)
    assert set(range(5000, 5100)) <= set(ids.tolist())
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(tensors["lm_head.weight"], head_VE[ids])
    assert f"{size} of {LARGE.vocab_size} tokens" in (tmp_path / "out" / "README.md").read_text()


def test_an_export_without_counts_stays_whole_and_a_size_it_cannot_have_is_refused() -> None:
    assert not with_vocabulary(stored("eagle3", None), "vllm-eagle3", "auto", LARGE).config.is_reduced
    assert "give --responses" in str(lacks_counts(stored("eagle3", None), "speculators", "auto", LARGE))
    for drafter, name, wanted in (
        (stored("eagle3", frequent()), "vllm-eagle3", "auto"),
        (stored("eagle3", None), "vllm-eagle3", "full"),
        (stored("eagle", None), "vllm-eagle", "auto"),
    ):
        assert lacks_counts(drafter, name, wanted, LARGE) is None
    assert not with_vocabulary(stored("eagle", frequent()), "vllm-eagle", "auto", LARGE).config.is_reduced
    with refused(r"--draft-vocab: 300 needs counts of tokens.*give --responses"):
        with_vocabulary(stored("eagle3", None), "vllm-eagle3", 300, LARGE)
    with refused(r"--draft-vocab: 300 has no place in vllm-eagle"):
        with_vocabulary(stored("eagle", frequent()), "vllm-eagle", 300, LARGE)
