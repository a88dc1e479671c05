"""References in an engine that is vLLM, over a pretend one: what its scheduler is given, what is counted
and what refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.helpers import VOCAB
from tests.reference_kinds import KINDS, reference_of
from tests.unit.engine.test_sequence import assert_account_for_all
from tests.unit.vllm.test_engine import EXPECTED, REQUESTS, SLOTS, WINDOW, Pretended, PretendLink, Told, texts
from tlt.assembly import vllm as assembly
from tlt.assembly.vllm import VllmPlan
from tlt.config.load import load_config
from tlt.drafter.drafting.reference_drafter import reference_kinds
from tlt.drafter.drafting.references import References
from tlt.speculative.strategy import ExpectedSpeeds, Strategy
from tlt.tuning.cost_model import CostModel
from tlt.tuning.tuner import Fixed, default_arms
from tlt.types import Request, SamplingParams, UserError, id_of
from tlt.vllm.check import check_law
from tlt.vllm.engine import Speculation, VllmEngine
from tlt.vllm.inside.given import LOGITS_BYTES, NoDrafts, Room, Want
from tlt.vllm.references import RunningReferences
from tlt.vllm.settings import VllmSettings
from tlt.vllm.strategies import refuse_references

LONG = [replace(r, params=replace(r.params, stop_ids=(), max_tokens=60)) for r in REQUESTS[:9]]
AHEAD, BESIDE = Strategy.parse("ahead:64x1x64"), Strategy.parse("ahead+ngram:64x1x64")
NGRAM = Strategy.parse("ngram:4x1x4")


def engine_with(references: References, tuner: Any, link: PretendLink | None = None) -> VllmEngine:
    speculation = Speculation(tuner, references=RunningReferences(references, VOCAB))
    return VllmEngine(link or PretendLink(), max_batch_size=SLOTS, window=WINDOW, speculation=speculation)  # type: ignore[arg-type]  # the pretend one


def answered(requests: Sequence[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    return texts(list(VllmEngine(PretendLink(), max_batch_size=SLOTS, window=WINDOW).generate(requests)))  # type: ignore[arg-type]  # the pretend one


def references_for(requests: Sequence[Request], kinds: Sequence[str], version: int = 0) -> References:
    rng, references, right = random.Random(1), References(None), answered(requests)
    for index, request in enumerate(requests):
        tokens, kind = right[request.problem_id, request.sample_index], kinds[index % len(kinds)]
        reference = reference_of(kind, tokens, EXPECTED["p0", 0], rng, range(8, VOCAB), 90)
        if reference is not None:
            references.keep(request.noise_key, reference, version)
    return references


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(
    "tuner",
    [Fixed(AHEAD), Fixed(BESIDE), Told([Strategy.OFF, AHEAD, BESIDE, NGRAM])],
    ids=["ahead", "beside", "switching"],
)
def test_no_reference_changes_a_token(tuner: Any, offset: int) -> None:
    references = references_for(REQUESTS, KINDS[offset:] + KINDS[:offset])
    assert texts(list(engine_with(references, tuner).generate(REQUESTS))) == EXPECTED


def test_a_right_reference_is_followed_to_its_end() -> None:
    engine = engine_with(references_for(LONG, ["right"]), Fixed(AHEAD))
    assert texts(list(engine.generate(LONG))) == answered(LONG)
    assert engine.stats.accept_length is not None
    assert engine.stats.accept_length > 25


def test_a_reference_that_is_one_token_off_is_found_one_place_on() -> None:
    references, right = References(None), answered(LONG)
    for request in LONG:
        references.keep(request.noise_key, [3, *right[request.problem_id, request.sample_index]])
    engine = engine_with(references, Fixed(AHEAD))
    list(engine.generate(LONG))
    assert engine.stats.draft_acceptance_rate is not None
    assert engine.stats.draft_acceptance_rate > 0.5


def test_what_was_followed_is_counted_by_the_reference_s_age() -> None:
    references = references_for(LONG[:4], ["right"], version=3)
    for request in LONG[2:4]:
        known = references.get(request.noise_key)
        assert known is not None
        references.keep(request.noise_key, known.token_ids, 4)
    engine = engine_with(references, Fixed(BESIDE))
    engine.policy_version = 5
    rollouts = list(engine.generate(LONG))
    assert len(rollouts) == 9
    assert engine.stats.followed_by_age.keys() == {"1", "2"}
    followed = engine.stats.followed_by_age
    assert all(2 * 60 - 10 < count < 2 * 60 for count in followed.values()), followed


def kept_as(request: Request, references: References, num: int | None, is_whole: bool) -> None:
    """Cuts a reference to its first tokens."""
    known = references.get(request.noise_key)
    assert known is not None
    references.keep(request.noise_key, known.token_ids[:num], is_whole=is_whole)


def test_vllm_s_own_drafter_rests_while_every_sequence_has_a_reference() -> None:
    for num, is_whole in ((9, True), (9, False), (8, True)):
        references, link = references_for(LONG[:num], ["right"]), PretendLink()
        for request in LONG[:num]:
            kept_as(request, references, None, is_whole)
        list(engine_with(references, Fixed(BESIDE), link).generate(LONG))
        rests = link.draft_depths.count(0)
        assert (rests == len(link.draft_depths)) == (num == 9 and is_whole)
        assert rests > 0


def test_vllm_s_own_drafter_is_back_when_a_reference_ends() -> None:
    """The step that verifies the reference's end also drafts what comes behind it."""
    (request,) = LONG[1:2]
    references, link = references_for([request], ["right"]), PretendLink()
    kept_as(request, references, 31, False)
    engine = engine_with(references, Fixed(Strategy.parse("ahead+ngram:8x1x8")), link)
    (found,) = engine.generate([request])
    assert found.drafts is not None
    by_whom = [draft.drafter for draft in found.drafts]
    num = by_whom.index("ngram")
    assert by_whom == ["ahead"] * num + ["ngram"] * (len(by_whom) - num)
    assert found.drafts[num].place == 31 + 1, "the target has added a token of its own"


def test_a_response_records_who_drafted_it() -> None:
    engine = engine_with(references_for(LONG[:3], KINDS[:3]), Fixed(BESIDE))
    rollouts = list(engine.generate(LONG[:6]))
    assert_account_for_all(rollouts, [engine])
    by_whom = {id_of(rollout): {one.drafter for one in rollout.drafts or ()} for rollout in rollouts}
    whose = [by_whom[id_of(request)] for request in LONG[:6]]
    assert all("ahead" in drafters for drafters in whose[:3])
    assert whose[3:] == [{"ngram"}] * 3


def test_a_tuner_is_told_which_sequences_were_drafted_for_from_references() -> None:
    tuner = Told([BESIDE])
    engine = engine_with(references_for(LONG[:3], ["right"]), tuner)
    list(engine.generate(LONG[:6]))
    steady = [outcome for strategy, outcome in tuner.told if strategy == BESIDE]
    assert len(steady) > 3
    assert all(len(o.from_reference) == len(o.accepted) == len(o.drafted) for o in steady)
    assert sum(steady[0].from_reference) == 3
    assert max(steady[0].drafted) > 30
    drafts = [pair for o in steady for pair in zip(o.drafted, o.from_reference, strict=True)]
    without = [drafted for drafted, is_followed in drafts if not is_followed]
    assert max(without) == 4, "vLLM's own drafts stay where there is no reference"


def test_the_cost_model_follows_references_that_are_right() -> None:
    arms = default_arms(reference_kinds(("ngram",)), 4, trees=False)
    engine = engine_with(references_for(LONG, ["right"]), CostModel(arms))
    assert texts(list(engine.generate(LONG))) == answered(LONG)
    assert engine.stats.followed_by_age["0"] > 300


class Slow(Fixed):
    """Expects a token in a thousand seconds without references."""

    expected = ExpectedSpeeds(otherwise=1e-3)


def test_what_references_win_is_counted_in_the_steps_that_followed_them() -> None:
    engine = engine_with(references_for(LONG, ["right"]), Slow(AHEAD))
    list(engine.generate(LONG))
    followed = engine.stats.by_strategy[str(AHEAD)]
    assert followed.num_tokens > 300
    assert engine.stats.won_seconds == pytest.approx(1000 * followed.num_tokens - followed.seconds)


def test_drafts_stay_with_their_requests_when_others_leave_and_come() -> None:
    """More requests than slots, of all lengths: a neighbour's draft would agree with nothing."""
    requests = [replace(r, params=replace(r.params, max_tokens=8 + 7 * i)) for i, r in enumerate(LONG)]
    engine = engine_with(references_for(requests, ["right"]), Fixed(AHEAD))
    engine.add(requests)
    while not engine.is_idle:
        engine.step()
        if engine.stats.num_steps in (2, 3):  # after the prompts were read, some leave in the middle
            engine.add(engine.withdraw([*range(len(engine.running))][::2]))
    assert engine.stats.draft_acceptance_rate == 1.0


def test_references_leave_with_their_sequences() -> None:
    engine = engine_with(references_for(LONG, ["right"]), Fixed(AHEAD))
    engine.add(LONG)
    engine.step()
    engine.abort()
    assert engine.references is not None
    assert engine.references._cursors == {}
    assert texts(list(engine.generate(LONG))) == answered(LONG)
    assert engine.references._cursors == {}


class Deaf(PretendLink):
    """A vLLM that takes no drafts."""

    def give(self, drafts: Any) -> None: ...


class Believing(PretendLink):
    """A vLLM that commits whatever it is given."""

    def verify(self, request: Pretended) -> tuple[list[int], list[float]]:
        if request.name not in self.followed:
            return super().verify(request)
        return [*request.drafts[:2]], [-1.0] * len(request.drafts[:2])


@pytest.mark.parametrize(("link", "said"), [(Deaf, "given were not verified"), (Believing, "by the law")])
def test_the_self_check_sees_a_vllm_that_drops_or_believes_what_it_is_given(
    link: type[PretendLink], said: str
) -> None:
    references = References(None)
    check_law(engine_with(references, None), VOCAB)
    assert len(references) == 0
    with pytest.raises(UserError, match=said):
        check_law(engine_with(references, None, link()), VOCAB)


ROOM = Room(budget=4096, free_blocks=1000, block_size=16, lookahead=0, vocab_size=1000)


def alike(num: int, num_computed: int = 10, num_drafted: int = 600) -> dict[str, Want]:
    return {f"r{i}": Want(num_computed, num_drafted) for i in range(num)}


def test_drafts_take_half_a_step_s_tokens_at_most() -> None:
    assert set(ROOM.share(alike(4)).values()) == {512}
    assert set(ROOM.share(alike(64)).values()) == {32}
    assert sum(replace(ROOM, budget=64).share(alike(40)).values()) == 24, "each has a token of its own"


def test_what_a_request_does_not_want_is_the_others() -> None:
    wants = alike(60, num_drafted=0) | {"short": Want(10, 20)} | {"long": Want(10, 5000)}
    found = ROOM.share(wants)
    assert (found["short"], found["long"], found["r0"]) == (20, 2028, 0)


def test_drafts_end_with_a_request_s_share_of_the_blocks() -> None:
    few = replace(ROOM, free_blocks=7)
    assert set(few.share(alike(4)).values()) == {6 + 16 - 1, 6 + 2 * 16 - 1}
    assert set(replace(few, lookahead=5).share(alike(4)).values()) == {6 + 16 - 1 - 5, 6 + 2 * 16 - 1 - 5}
    assert set(replace(few, free_blocks=3).share(alike(4, num_computed=16)).values()) == {0, 15}


def test_drafts_never_take_a_block_that_another_request_needs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        room = replace(ROOM, free_blocks=rng.randrange(9, 30), lookahead=rng.randrange(5))
        wants = {f"r{i}": Want(rng.randrange(1, 90), rng.choice([0, 3, 40, 400])) for i in range(9)}
        found = room.share(wants)
        assert all(found[name] <= want.num_drafted for name, want in wants.items())
        ends = {name: want.num_computed + 1 + found[name] + room.lookahead for name, want in wants.items()}
        new = {name: -(-ends[name] // 16) - -(-want.num_computed // 16) for name, want in wants.items()}
        assert sum(new.values()) <= room.free_blocks


def test_logits_of_drafts_are_bounded() -> None:
    large = replace(ROOM, vocab_size=152_000)
    found = large.share(alike(4))
    assert sum(found.values()) * 4 * 152_000 <= LOGITS_BYTES
    assert min(found.values()) > 100


def test_the_proposer_that_vllm_needs_proposes_nothing() -> None:
    assert NoDrafts(None).propose([[1, 2], []], None, None, slot_mappings=None) == [[], []]


def test_a_gpu_s_runner_is_refused_references_in_one_line() -> None:
    refuse_references("cpu")
    with pytest.raises(UserError, match="keeps drafts on the GPU") as caught:
        refuse_references("cuda")
    assert "\n" not in str(caught.value)


class SecondRunner:
    """vLLM with the model runner of GPUs."""

    is_v2, is_closed = True, False

    def __init__(self, settings: VllmSettings) -> None: ...

    def close(self) -> None:
        SecondRunner.is_closed = True


def test_references_are_refused_where_vllm_starts_with_the_runner_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "Link", SecondRunner)
    settings = VllmSettings(Path("model"), torch.float32, 8, 80)
    with pytest.raises(UserError, match="keeps drafts on the GPU"):
        assembly.build_vllm(VllmPlan(settings, "adaptive", "cost-model", references=References()), VOCAB, {})
    assert SecondRunner.is_closed


@pytest.mark.parametrize(
    ("speculation", "tuner", "follows"),
    [("adaptive", "cost-model", True), ("adaptive", "beg-mab", False), ("ngram:4x1x4", "cost-model", False),
     ("ahead:8x1x8", "cost-model", True), ("off", "cost-model", False)],
)  # fmt: skip
def test_references_are_followed_where_the_speculation_follows_any(
    speculation: str, tuner: str, follows: bool
) -> None:
    plan = VllmPlan(None, speculation, tuner, references=References(None))  # type: ignore[arg-type]  # settings are not read
    assert (plan.used_references is not None) == follows


def test_a_run_says_whether_its_user_asks_for_references() -> None:
    asking = ("ahead=1", "speculation=ahead+learned:8x1x8")
    for word in ("speculation=adaptive", "speculation=4x1x4", *asking):
        words = ["--rollout.engine=vllm", f"--rollout.{word}"]
        rollout = load_config("recipes/countdown/quickstart.toml", words).rollout
        assert rollout.asks_for_references == (word in asking), word


def test_a_request_that_is_nearly_over_is_drafted_no_further() -> None:
    request = Request("w", 0, (9,) * 40, SamplingParams(1.0, max_tokens=WINDOW, seed=2))
    ((key, want),) = answered([request]).items()
    references = References(None)
    references.keep(request.noise_key, [*want, *range(8, 60)])
    engine = engine_with(references, Fixed(Strategy.parse("ahead:256x1x256")))
    assert texts(list(engine.generate([request]))) == {key: want}
