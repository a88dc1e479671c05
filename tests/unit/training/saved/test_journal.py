"""The journal: what it gives back after a crash is what was generated, or nothing."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.lossless.helpers import make_engine, make_policy
from tests.unit.training.rollout.phase_parts import Scorers
from tlt.base.strategy import Strategy
from tlt.base.types import DraftOutcome, Problem, Request, Reward, Rollout, SamplingParams, Turns
from tlt.engine.own.engine import RolloutEngine
from tlt.speculation.tuner.tuner import FixedTuner
from tlt.training.ranks.world import World
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.dynamic import DynamicSampling
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import Recalled, Sinks
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.work_queue import WorkQueue
from tlt.training.saved import journal as journal_module
from tlt.training.saved.checkpoint import Saved
from tlt.training.saved.journal import FileJournal, choose
from tlt.training.saved.journal_file import JournalRecord, read_records
from tlt.training.saved.run_folder import can_go_on, forget_journal

PARAMS = SamplingParams(max_tokens=60, stop_ids=(0,), seed=4)
WORLD = World(0, 1, 0, torch.device("cpu"), HashStore(), None)
POLICY = make_policy()


BEGINNING = Saved()


def open_journal(
    folder: Path, saved: Saved = BEGINNING, follows: str = "", said: list[str] | None = None
) -> FileJournal:
    said = [] if said is None else said
    return FileJournal(folder, WORLD, "run", lambda: saved, follows, Timeline(0), said.append)


def ask(num: int = 3, num_samples: int = 2) -> list[list[Request]]:
    return [[Request(f"p{i}", j, (3, 4, 5 + i), PARAMS) for j in range(num_samples)] for i in range(num)]


def answer(request: Request, num_tokens: int = 5) -> Rollout:
    rng = random.Random(str(request.noise_key))
    token_ids = tuple(rng.randrange(1, 50) for _ in range(num_tokens))
    logprobs = tuple(-rng.random() for _ in token_ids)
    about = request.problem_id, request.sample_index, request.prompt_ids
    return Rollout(*about, token_ids, logprobs, "stop", 7, drafts_until(num_tokens))


def drafts_until(num_tokens: int) -> tuple[DraftOutcome, ...]:
    """Verifications of a response that has so many tokens now: each accepted three."""
    kinds = "learned", "ngram", "ahead"
    return tuple(DraftOutcome(i, kinds[i % 3], 5, 3, None if i % 2 else i) for i in range(0, num_tokens, 4))


def records_in(folder: Path) -> list[JournalRecord]:
    (path,) = folder.rglob("replica-*")
    with path.open("rb") as file:
        return [record for _, record in read_records(file)]


def written_in(folder: Path) -> list[JournalRecord]:
    return [record for record in records_in(folder) if "phase" in record.about] if folder.exists() else []


class Running:
    """A response in the making, so many tokens long."""

    num_cached = num_left = 0

    def __init__(self, request: Request, num_tokens: int) -> None:
        whole = answer(request, num_tokens)
        self.request, self.num_tokens = request, num_tokens
        self._so_far = replace(
            request, token_ids=whole.token_ids, logprobs=whole.logprobs, drafts=whole.drafts
        )

    def to_request(self) -> Request:
        return self._so_far


def note_running(journal: FileJournal, *responses: Running) -> None:
    for _ in range(32):
        journal.note_running(responses)


# ── what comes back ─────────────────────────────────────────────────────────────────────────────────────────


def test_finished_responses_and_their_rewards_come_back_as_they_were(tmp_path: Path) -> None:
    requests = ask()
    first, second = replace(answer(requests[0][0]), routes=bytes(range(256))), answer(requests[2][1])
    reward = Reward(1 / 3, True, parts={"length": 0.1}, metrics={"ratio": float("inf")}, task="sums")
    journal = open_journal(tmp_path)
    assert journal.begin("rollout 0", requests) == Recalled(requests)
    journal.note_finished(first)
    journal.note_finished(second)
    journal.note_rewards({("p0", 0): reward})
    recalled = open_journal(tmp_path).begin("rollout 0", requests)
    assert [*recalled.rollouts] == [first, second]
    assert recalled.rewards == {("p0", 0): reward}
    assert recalled.requests == [[requests[0][1]], requests[1], [requests[2][0]]]
    assert recalled.num_tokens == 10


def test_a_running_response_goes_on_where_it_was_written_last(tmp_path: Path) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    request = requests[0][0]
    note_running(journal, Running(request, 999))
    assert not [*tmp_path.iterdir()], "999 tokens are not worth a record"
    routes = random.Random(0).randbytes(2 * (3 + 3500 - 1))  # two experts of a token, the last one not read
    whole = replace(Running(request, 3500).to_request(), routes=routes)
    for num_tokens in (
        1100,
        1500,
        2400,
        3500,
    ):  # 1,100 and 2,400 and 3,500 are written: each 1,000 more, or beyond
        so_far = Running(request, num_tokens)
        so_far._so_far = replace(
            request,
            token_ids=whole.token_ids[:num_tokens],
            logprobs=whole.logprobs[:num_tokens],
            drafts=drafts_until(num_tokens),
            routes=routes[: 2 * (3 + num_tokens - 1)],
        )
        note_running(journal, so_far)
    ((begun, untouched),) = open_journal(tmp_path).begin("rollout 0", requests).requests
    assert begun == whole
    assert untouched == requests[0][1]
    assert [record.num_tokens for record in records_in(tmp_path)] == [0, 1100, 1300, 1100], (
        "each token is written once"
    )


def test_routes_of_several_turns_are_written_once_though_what_was_said_has_none_yet(tmp_path: Path) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    request, routes = requests[0][0], random.Random(0).randbytes(2 * (3 + 40 - 1))
    whole = replace(Running(request, 40).to_request(), turns=Turns())
    for num_tokens, num_read in ((10, 12), (14, 12), (40, 42)):  # a turn, what was said to it, the next turn
        so_far = replace(whole, token_ids=whole.token_ids[:num_tokens], routes=routes[: 2 * num_read])
        journal.note_turn(replace(so_far, logprobs=whole.logprobs[:num_tokens]))
    ((begun, _),) = open_journal(tmp_path).begin("rollout 0", requests).requests
    assert (begun.token_ids, begun.routes) == (whole.token_ids, routes)


def test_a_response_that_could_not_be_scored_is_scored_again(tmp_path: Path) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    journal.note_finished(answer(requests[0][0]))
    journal.note_rewards({("p0", 0): Reward(0.0, False, "no answer within 10 s")})
    recalled = open_journal(tmp_path).begin("rollout 0", requests)
    assert len(recalled.rollouts) == 1
    assert not recalled.rewards


def test_what_rewards_need_an_environment_for_counts_with_its_whole_group(tmp_path: Path) -> None:
    """A file holds no environment, so that such a response cannot be scored again."""
    requests = ask(2)
    played = [[replace(answer(one), turns=Turns(state="1:x")) for one in group] for group in requests]
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    for one in (*played[0], *played[1]):
        journal.note_finished(one)
    assert open_journal(tmp_path).begin("rollout 0", requests).requests == requests
    reward = Reward(1.0, True)
    journal.note_rewards({("p0", 0): reward, ("p0", 1): reward, ("p1", 0): reward})
    recalled = open_journal(tmp_path).begin("rollout 0", requests)
    assert recalled.requests == requests[1:]
    assert [*recalled.rollouts] == [replace(one, turns=Turns()) for one in played[0]]
    assert recalled.rewards == {("p0", 0): reward, ("p0", 1): reward}


def test_no_environment_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is a pickle, which runs code."""
    requests = ask(1)
    monkeypatch.setattr(journal_module, "_write_turns", lambda turns: asdict(replace(turns, state="planted")))
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    done, running = requests[0]
    journal.note_finished(replace(answer(done), turns=Turns()))
    journal.note_turn(replace(running, token_ids=(1, 2), logprobs=(0.0, 0.0), drafts=(), turns=Turns()))
    assert "planted" in str([record.about for record in written_in(tmp_path)])
    recalled = open_journal(tmp_path).begin("rollout 0", requests)
    found = [*recalled.rollouts, *(request for unit in recalled.requests for request in unit)]
    assert [one.turns for one in found] == [Turns(), Turns()]


def test_what_another_phase_or_another_prompt_was_answered_does_not_count(tmp_path: Path) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    journal.note_finished(answer(requests[0][0]))
    assert open_journal(tmp_path).begin("rollout 1", requests) == Recalled(requests)
    other = [[replace(request, prompt_ids=(9, 9)) for request in requests[0]]]
    recalled = open_journal(tmp_path).begin("rollout 0", other)
    assert recalled.requests == other
    assert not recalled.rollouts


def test_what_runs_when_the_user_stops_the_run_is_written_to_its_last_token(tmp_path: Path) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path)
    journal.begin("rollout 0", requests)
    journal.note_running([Running(requests[0][0], 17)], at_once=True)
    journal.note_running([Running(requests[0][1], 0)], at_once=True)
    ((begun, untouched),) = open_journal(tmp_path).begin("rollout 0", requests).requests
    assert begun == Running(requests[0][0], 17).to_request()
    assert untouched == requests[0][1]


# ── whose it is ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("saved", "follows", "counts"),
    [
        (Saved(4, "d4"), "d0", True),  # the checkpoint after which it was written
        (Saved(8, "d8"), "d4", True),  # the next one: it became whole while the file was written
        (Saved(12, "d12"), "d8", False),
        (Saved(4, "other"), "d0", False),
        (Saved(), "", False),
    ],
)
def test_a_file_counts_after_its_checkpoint_and_after_the_next(
    tmp_path: Path, saved: Saved, follows: str, counts: bool
) -> None:
    requests = ask(1)
    journal = open_journal(tmp_path, Saved(4, "d4"), "d0")
    journal.begin("rollout 4", requests)
    journal.note_finished(answer(requests[0][0]))
    said: list[str] = []
    recalled = open_journal(tmp_path, saved, follows, said).begin("rollout 4", requests)
    assert len(recalled.rollouts) == counts
    assert bool(said) != counts, "what is removed is told"
    assert bool([*tmp_path.rglob("replica-*")]) == counts


def test_a_new_checkpoint_begins_a_folder_and_the_one_before_it_stays(tmp_path: Path) -> None:
    saved = [Saved()]
    journal = FileJournal(tmp_path, WORLD, "run", lambda: saved[0], "", Timeline(0), print)
    requests = ask(1)
    for step in (0, 4, 8, 12):
        saved[0] = Saved(step, f"d{step}" if step else "")
        journal.begin(f"rollout {step}", requests)
        journal.note_finished(answer(requests[0][0]))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000008", "step-00000012"]


def test_an_attempt_that_is_not_gone_on_with_leaves_nothing(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal")
    journal.begin("rollout 0", ask(1))
    (tmp_path / "config.json").touch()
    assert not can_go_on(tmp_path), "nothing was generated"
    journal.note_finished(answer(ask(1)[0][0]))
    assert can_go_on(tmp_path)
    assert forget_journal(tmp_path), "so that it can be told"
    assert not can_go_on(tmp_path)
    assert not forget_journal(tmp_path)


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(
    folder: Path,
) -> tuple[list[list[Request]], dict[tuple[str, int], Rollout], dict[tuple[str, int], Reward]]:
    """Writes a phase of finished and running responses."""
    requests = ask(4, 3)
    journal = open_journal(folder)
    journal.begin("rollout 0", requests)
    rollouts = {(r.problem_id, r.sample_index): answer(r) for group in requests[:3] for r in group}
    rewards = {key: Reward(len(rollout.token_ids) / 7, True) for key, rollout in rollouts.items()}
    for key, rollout in rollouts.items():
        journal.note_finished(rollout)
        journal.note_rewards({key: rewards[key]})
    note_running(journal, *(Running(request, 1200) for request in requests[3]))
    return requests, rollouts, rewards


def is_true(
    recalled: Recalled, rollouts: dict[tuple[str, int], Rollout], rewards: dict[tuple[str, int], Reward]
) -> bool:
    """Whether all that came back is as it was written."""
    return (
        all(rollouts[r.problem_id, r.sample_index] == r for r in recalled.rollouts)
        and all(rewards[key] == reward for key, reward in recalled.rewards.items())
        and all(
            request == Running(replace(request, token_ids=(), logprobs=(), drafts=()), 1200).to_request()
            for unit in recalled.requests
            for request in unit
            if request.token_ids
        )
    )


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_file_gives_back_nothing_that_was_not_written(tmp_path: Path, seed: int) -> None:
    requests, rollouts, rewards = written(tmp_path)
    rng = random.Random(seed)
    (path,) = tmp_path.rglob("replica-*")
    data = bytearray(path.read_bytes())
    kind = seed % 4
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        start = rng.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    else:
        start = rng.randrange(len(data))
        del data[start : start + rng.randrange(1, 64)]
    path.write_bytes(data)
    said: list[str] = []
    recalled = open_journal(tmp_path, said=said).begin("rollout 0", requests)
    assert is_true(recalled, rollouts, rewards)
    is_whole = len(recalled.rollouts) == 9 and recalled.num_tokens == 45 + 3 * 1200
    assert said or is_whole or kind == 0, "damage is told; a cut between two records cannot be seen"


def test_a_record_that_is_whole_but_makes_no_sense_ends_its_file() -> None:
    good = JournalRecord.of({"kind": "part"}, (1, 2), (-0.5, -0.25))
    data = good.encode()
    assert [record for _, record in read_records(BytesIO(data + data))] == [good, good]
    for about in ([1], "text", None):
        strange = JournalRecord(about).encode()  # type: ignore[arg-type]  # what no journal writes
        assert [record for _, record in read_records(BytesIO(data + strange + data))] == [good]


# ── within a phase ──────────────────────────────────────────────────────────────────────────────────────────


class Killed(Exception):
    pass


def run_phase(folder: Path, kill_after: int | None = None) -> tuple[PhaseResult, RolloutEngine, Scorers]:
    """Runs a phase of two rounds with its journal; kill_after: engine steps after which this process
    'dies'."""
    engine = make_engine(POLICY, FixedTuner(Strategy.parse("learned:2x1x2")), max_batch_size=3)
    step, num_steps = engine.step, iter(range(10**6))

    def dying_step(captures: bool = False) -> list[object]:
        if kill_after is not None and next(num_steps) >= kill_after:
            raise Killed
        return [*step(captures)]

    engine.step = dying_step  # type: ignore[method-assign, assignment]  # the fault
    scorers, journal = Scorers(lambda token_ids: sum(token_ids) % 5 / 4), open_journal(folder)
    sinks, queue = Sinks(scorers, str, journal), WorkQueue(HashStore(), 0, 1, 60.0)
    phase = RolloutPhase(WORLD, engine, queue, sinks, Timeline(0), lambda: False)
    problems = [Problem(f"p{i}", (3, 4, 5 + i)) for i in range(4)]
    sampling = DynamicSampling(4, 2, [Problem(f"s{i}", (3, 5, 5 + i)) for i in range(4)], 1)
    return phase.run(problems, 2, PARAMS, "rollout", 0, dynamic_sampling=sampling), engine, scorers


def tokens_of(rollout: Rollout) -> tuple[str, int, tuple[int, ...]]:
    return rollout.problem_id, rollout.sample_index, rollout.token_ids


@pytest.mark.parametrize("kill_after", [0, 1, 35, 70, 100])
def test_after_a_death_the_phase_ends_as_it_would_have_and_generates_none_of_it_twice(
    tmp_path: Path, kill_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.training.saved.journal.RUNNING_TOKENS", 8)
    monkeypatch.setattr("tlt.training.saved.journal._STEPS", 4)
    whole, engine, _ = run_phase(tmp_path / "whole")
    with pytest.raises(Killed):
        run_phase(tmp_path / "killed", kill_after)
    if kill_after >= 35:
        kinds = {record.about["kind"] for record in records_in(tmp_path / "killed")}
        assert kinds == {"journal", "part", "response", "reward"}
    before = choose((Path(), record) for record in written_in(tmp_path / "killed"))
    num_known = sum(len(record.about["drafts"]) for record in before)
    again, engine_again, _ = run_phase(tmp_path / "killed")
    assert [*map(tokens_of, again.rollouts)] == [*map(tokens_of, whole.rollouts)]
    for one, other in zip(again.rollouts, whole.rollouts, strict=True):  # what is read again rounds otherwise
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    num_drafts = sum(len(rollout.drafts or ()) for rollout in again.rollouts)
    assert num_drafts == num_known + engine_again.stats.num_drafts > 0
    assert again.rewards == whole.rewards
    assert again.num_rounds == whole.num_rounds
    assert engine_again.stats.num_tokens == engine.stats.num_tokens - again.recalled_tokens
    if kill_after >= 35:
        assert again.recalled_tokens > 0
    third, idle_engine, unused = run_phase(tmp_path / "killed")
    assert third.rollouts == again.rollouts
    assert third.rewards == whole.rewards
    assert idle_engine.stats.num_tokens == 0, "all of it stands in the journal now"
    assert not unused.submitted
