"""The law at the rows of vLLM's batches, without vLLM: slots, keys, parameters, and noise that is computed
ahead."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tlt.speculation.law.draw as draw_module
from tests.lossless.helpers import PARAMS
from tests.refused import refused
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request, SamplingParams
from tlt.engine.vllm.inside.law import LawTable, RowLaw, Slots
from tlt.engine.vllm.strategies import check_speculation, draft_depths, vllm_kinds
from tlt.speculation.law.draw import draw
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample

VOCAB, NUM_SLOTS = 61, 9
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """A served request's sampling parameters, as vLLM has them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    extra_args: dict[str, Any] | None = None
    n: int = 1
    logprob_token_ids: None = None


def laws(num: int) -> list[RowLaw]:
    rng = random.Random(4)
    return [RowLaw(tuple(rng.getrandbits(32) for _ in range(4)), PARAMS[i % len(PARAMS)]) for i in range(num)]  # type: ignore[arg-type]


def table_of(found: list[RowLaw], vocab_size: int = VOCAB) -> LawTable:
    table = LawTable(NUM_SLOTS, vocab_size, CPU, tau=0.7)
    for slot, law in enumerate(found):
        table.put(slot, law)
    table.flush()
    return table


def one_by_one(
    found: list[RowLaw], logits_RV: Tensor, slots: list[int], positions: list[int]
) -> tuple[Tensor, Tensor]:
    drawn = []
    for logits_V, slot, position in zip(logits_RV, slots, positions, strict=True):
        law, vocab_size = found[slot], logits_RV.shape[-1]
        noise_11V = gumbel_noise(keys_tensor([law.key]), torch.tensor([[position]]), vocab_size)
        drawn.append(sample(logits_V[None, None], noise_11V, BatchParams.of([law.params])))
    return torch.cat([tokens[0] for tokens, _ in drawn]), torch.cat([scores[0] for _, scores in drawn])


@pytest.mark.parametrize("vocab_size", [VOCAB, 24, 5000, 20_000])
def test_a_row_has_the_law_s_token_whatever_stands_around_it(vocab_size: int) -> None:
    """The block of noise is 128, 128, 1 and 0 positions wide at these vocabularies."""
    rng, found = random.Random(vocab_size), laws(NUM_SLOTS)
    table = table_of(found, vocab_size)
    for _ in range(6):
        slots = [rng.randrange(NUM_SLOTS) for _ in range(rng.randint(1, 20))]
        positions = [rng.randrange(1, 400) for _ in slots]
        logits_RV = 3 * torch.randn(
            len(slots), vocab_size, generator=torch.Generator().manual_seed(rng.randrange(99))
        )
        tokens_R, scores_R = table.draw(logits_RV, torch.tensor(slots), torch.tensor(positions))
        expected_R, logprobs_R = one_by_one(found, logits_RV, slots, positions)
        assert tokens_R.tolist() == expected_R.tolist()
        torch.testing.assert_close(scores_R.double(), logprobs_R.double(), rtol=1e-6, atol=1e-6)


def test_a_slot_that_changes_hands_takes_up_the_new_key_and_parameters() -> None:
    found = laws(NUM_SLOTS)
    table = table_of(found)
    logits_RV, slots, positions = torch.randn(NUM_SLOTS, VOCAB), list(range(NUM_SLOTS)), [30] * NUM_SLOTS
    table.draw(logits_RV, torch.tensor(slots), torch.tensor(positions))
    found[2], found[5] = replace(found[5], key=(9, 9, 9, 9)), replace(found[2], key=(8, 7, 6, 5))
    table.put(2, found[2])
    table.put(5, found[5])
    table.flush()
    drawn, _ = table.draw(logits_RV, torch.tensor(slots), torch.tensor(positions))
    assert drawn.tolist() == one_by_one(found, logits_RV, slots, positions)[0].tolist()


def test_values_that_pad_a_head_are_never_drawn() -> None:
    table = table_of(laws(1))
    logits_RV = torch.randn(3, VOCAB + 3)
    logits_RV[:, VOCAB:] = 1e4
    drawn, _ = table.draw(logits_RV, torch.zeros(3, dtype=torch.int64), torch.tensor([4, 5, 6]))
    ranked = table.rank(logits_RV, torch.zeros(3, dtype=torch.int64), torch.tensor([4, 5, 6]))
    assert max(int(drawn.max()), int(ranked.max())) < VOCAB


def test_a_drafter_with_the_target_s_own_logits_guesses_what_the_target_draws() -> None:
    """At tau 1 and without truncation the ranking is the law itself."""
    pairs = zip(laws(3), (0.0, 0.6, 1.0), strict=True)
    table = table_of([replace(law, params=SamplingParams(temperature)) for law, temperature in pairs])
    table.tau = 1.0
    rows = torch.randn(30, VOCAB), torch.arange(30) % 3, torch.arange(30) + 7
    assert torch.equal(table.rank(*rows), table.draw(*rows)[0])


def test_what_is_drawn_from_is_kept_while_somebody_checks() -> None:
    found = laws(2)
    table = table_of(found)
    logits_RV, slots_R, positions_R = torch.randn(2, VOCAB), torch.tensor([1, 0]), torch.tensor([8, 3])
    table.recorded = []
    table.draw(logits_RV, slots_R, positions_R)
    ((logits, positions, keys),) = table.recorded
    assert torch.equal(logits, logits_RV)
    assert positions.tolist() == [8, 3]
    assert [tuple(key) for key in keys.tolist()] == [found[1].key, found[0].key]


# ── whose slot, whose law ───────────────────────────────────────────────────────────────────────────────────


def test_slots_follow_the_requests_through_a_batch_that_changes() -> None:
    rng, table = random.Random(1), LawTable(NUM_SLOTS, VOCAB, CPU, tau=0.7)
    slots, known = Slots(table), {f"r{i}": Asked(seed=i, temperature=1 + i / 100) for i in range(60)}
    running: list[str] = []
    waiting = list(known)
    while waiting or running:
        running = [name for name in running if rng.random() < 0.7]
        while waiting and len(running) < NUM_SLOTS and rng.random() < 0.8:
            running.append(waiting.pop())
        rng.shuffle(running)
        slots.enter(running, known.__getitem__)
        found = slots.of(running).tolist()
        assert len(set(found)) == len(running)
        for name, slot in zip(running, found, strict=True):
            assert slots.slot_of(name) == slot
            assert table.laws[slot] == RowLaw.of(known[name])
            assert tuple(table.keys_S4[slot].tolist()) == RowLaw.of(known[name]).key


def test_a_request_keeps_its_slot_while_others_come_and_go() -> None:
    slots = Slots(LawTable(3, VOCAB, CPU, tau=0.7))
    told: list[int] = []
    slots.table.on_enter.append(told.append)
    slots.enter(["a", "b"], lambda _: Asked(seed=1))
    before = slots.slot_of("b")
    slots.enter(["c", "b", "d"], lambda _: Asked(seed=2))
    assert slots.slot_of("b") == before
    assert told == [slots.slot_of("c"), before, *slots.of(["c", "d"]).tolist()]  # c has a's slot


def test_our_engine_s_law_travels_whole() -> None:
    params = SamplingParams(0.8, 20, 0.9, 0.02, 100, (7,), 11, ("stop",))
    request = Request("p", 3, (1, 2), params, "rollout", 5)
    found = RowLaw.of(Asked(temperature=0.0, extra_args=RowLaw.extra_args(request)))
    assert found == RowLaw(request.noise_key, SamplingParams(0.8, 20, 0.9, 0.02))


def test_a_seed_is_the_key_and_its_absence_is_chance() -> None:
    assert RowLaw.of(Asked(seed=5)) == RowLaw.of(Asked(seed=5))
    assert RowLaw.of(Asked(seed=5)).key != RowLaw.of(Asked(seed=6)).key
    assert RowLaw.of(Asked(seed=-1)).key != RowLaw.of(Asked(seed=1)).key
    assert len({RowLaw.of(Asked()).key for _ in range(20)}) == 20
    assert RowLaw.of(Asked(seed=5, top_k=-1)).params.top_k == 0
    assert RowLaw.of(Asked(seed=5, extra_args={"somebody": "else"})) == RowLaw.of(Asked(seed=5))


def test_rows_are_drawn_in_parts_where_the_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = laws(7)
    params, keys_R4 = BatchParams.of([law.params for law in found]), keys_tensor([law.key for law in found])
    logits_RV = torch.randn(7, VOCAB, dtype=torch.float64)  # float64 is the reference's
    positions_R = torch.arange(7) * 3
    whole = draw(logits_RV, Law(keys_R4, positions_R, params))
    monkeypatch.setattr(draw_module, "NOISE_BYTES", 28 * VOCAB * 3)
    asked: list[int] = []

    def counted(keys_B4: Tensor, positions_BT: Tensor, vocab_size: int) -> Tensor:
        asked.append(len(keys_B4))
        return gumbel_noise(keys_B4, positions_BT, vocab_size)

    monkeypatch.setattr(draw_module, "gumbel_noise", counted)
    parts = draw(logits_RV, Law(keys_R4, positions_R, params))
    assert asked == [3, 3, 1]
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert parts[0].tolist() == one_by_one(found, logits_RV, list(range(7)), positions_R.tolist())[0].tolist()


# ── what vLLM can draft ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "has_learned", "kinds", "depth"),
    [
        ("off", True, (), 0),
        ("adaptive", True, ("learned",), 8),
        ("adaptive", False, ("ngram",), 8),
        ("4x1x4", True, ("learned",), 4),
        ("4x1x4", False, ("ngram",), 4),
        ("ngram:3x1x3", True, ("ngram",), 3),
    ],
)
def test_one_drafter_and_its_depth(text: str, has_learned: bool, kinds: tuple[str, ...], depth: int) -> None:
    speculation = parse_speculation(text)
    check_speculation(speculation, has_learned)
    assert vllm_kinds(speculation, has_learned) == kinds
    assert draft_depths(speculation, kinds, 8)[-1] == depth


@pytest.mark.parametrize(
    ("speculation", "has_learned", "message"),
    [
        ("4x2x8", True, "speculation: '4x2x8' is a tree, and vLLM drafts chains; give 4x1x4 "),
        ("4x1x5", True, "is a tree"),
        ("hybrid:4x1x4", True, "names the drafter hybrid.*give learned or ngram"),
        ("ahead:64x1x64", True, "names the drafter ahead, which engine vllm does not have here"),
        ("ahead+ngram:64x1x64", True, r"names the drafter ahead\+ngram"),
        ("learned:4x1x4", False, "names the drafter learned.*give a drafter, or ngram"),
        ("four", True, "is no strategy"),
    ],
)
def test_what_vllm_cannot_draft_is_refused_in_one_line(
    speculation: str, has_learned: bool, message: str
) -> None:
    with refused(message):
        check_speculation(parse_speculation(speculation), has_learned)
