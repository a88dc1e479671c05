"""Journals that were damaged at random, but seeded: a run that goes on takes from them what was written, or
nothing.

    three phases by two replicas in two attempts ─▶ one mutation of one file ─▶ each phase is read again
        ├ all of it                                                harmless
        ├ a part, each response and reward as it was written       the rest is generated again
        └ a token, a reward or a response that was never written   a failure

    python -m benchmarks.faults.journal_mutations --out benchmarks/results/journal-mutations --num 1000

Knows no model: the responses are random numbers.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import HashStore

from benchmarks.faults.mutations import DAMAGES, damage, exchange
from benchmarks.faults.report import tally
from tlt.ranks.world import World
from tlt.report.timeline import Timeline
from tlt.rollout.protocol import Recalled
from tlt.saved.checkpoint import Saved
from tlt.saved.journal import RUNNING_TOKENS, FileJournal
from tlt.types import Request, Reward, Rollout, SamplingParams, id_of

PHASES = ("rollout 0, policy 0", "rollout 0, round 1, policy 0", "evaluation 0, policy 1")
NUM_PROBLEMS, NUM_SAMPLES = 6, 4
Known = dict[tuple[str, str, int], tuple[Rollout, Reward]]


def open_journal(folder: Path, replica: int = 0) -> FileJournal:
    world = World(replica, 1, replica, torch.device("cpu"), HashStore(), None)
    return FileJournal(folder, world, "run", Saved, "", Timeline(replica), lambda text: None)


def requests_of(phase: int) -> list[list[Request]]:
    params = SamplingParams(max_tokens=4000)
    return [
        [Request(f"{phase}-{i}", j, (3, 4, 5 + i), params) for j in range(NUM_SAMPLES)]
        for i in range(NUM_PROBLEMS)
    ]


class Running:
    """A response in the making."""

    num_cached = num_left = 0

    def __init__(self, request: Request, whole: Rollout, num_tokens: int) -> None:
        self.request, self.num_tokens = request, num_tokens
        self._so_far = replace(
            request, token_ids=whole.token_ids[:num_tokens], logprobs=whole.logprobs[:num_tokens]
        )

    def to_request(self) -> Request:
        return self._so_far


def write(folder: Path, rng: random.Random) -> Known:
    """Writes a journal; returns what every response would become. A third of them have ended, a third run."""
    known: Known = {}
    for number, phase in enumerate(PHASES):
        for attempt in range(2):
            for replica in range(2):
                journal = open_journal(folder, replica)
                # so that every attempt writes all that it has, as one on another machine would
                journal._index.clear()
                journal.begin(phase, requests_of(number))
                for request in (request for unit in requests_of(number) for request in unit):
                    place = (phase, *id_of(request))
                    if place not in known:
                        ids = tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 2500)))
                        logprobs = tuple(-rng.expovariate(1.0) for _ in ids)
                        rollout = Rollout(*id_of(request), request.prompt_ids, ids, logprobs, "stop", 0)
                        known[place] = rollout, Reward(rng.random(), True, parts={"length": rng.random()})
                    append(journal, request, *known[place], rng, attempt)
                journal.close()
    return known


def append(
    journal: FileJournal, request: Request, rollout: Rollout, reward: Reward, rng: random.Random, attempt: int
) -> None:
    """Writes some of what happens to a response, more of it in a later attempt."""
    fate = rng.random() + 0.3 * attempt
    for num_tokens in range(RUNNING_TOKENS, len(rollout.token_ids) if fate > 0.3 else 0, RUNNING_TOKENS):
        for _ in range(32):
            journal.note_running([Running(request, rollout, num_tokens)])
    if fate > 0.6:
        journal.note_finished(rollout)
    if fate > 0.8:
        journal.note_rewards({id_of(request): reward})


def take_back(folder: Path, known: Known) -> tuple[list[Recalled], str]:
    """Returns what comes back of every phase, and what of it was never written; empty: nothing."""
    journal = open_journal(folder)
    recalled = [journal.begin(phase, requests_of(number)) for number, phase in enumerate(PHASES)]
    for phase, one in zip(PHASES, recalled, strict=True):
        for rollout in one.rollouts:
            if rollout != known[phase, *id_of(rollout)][0]:
                return recalled, f"{phase}: {id_of(rollout)} is another response"
        for key, reward in one.rewards.items():
            if reward != known[phase, *key][1]:
                return recalled, f"{phase}: {key} has another reward"
        for request in (request for unit in one.requests for request in unit):
            whole, num = known[phase, *id_of(request)][0], len(request.token_ids)
            if (request.token_ids, request.logprobs) != (whole.token_ids[:num], whole.logprobs[:num]):
                return recalled, f"{phase}: {id_of(request)} goes on from other tokens"
    return recalled, ""


KINDS = (*DAMAGES, "a file missing", "files exchanged")


def mutate(folder: Path, kind: str, rng: random.Random) -> None:
    """Damages one file, or exchanges it with another."""
    one, other = (rng.choice(sorted(folder.rglob("replica-*"))) for _ in range(2))
    if kind in DAMAGES:
        damage(one, kind, rng)
    elif kind == "a file missing":
        one.unlink()
    elif one != other:
        exchange(one, other)


def play(num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields what became of every mutation."""
    with tempfile.TemporaryDirectory() as name:
        original, copy = Path(name) / "original", Path(name) / "copy"
        known = write(original, random.Random(seed))
        whole, fault = take_back(original, known)
        assert not fault, fault
        for number in range(num):
            kind = KINDS[number % len(KINDS)]
            shutil.copytree(original, copy)
            mutate(copy, kind, random.Random(f"{seed}/{number}"))
            recalled, fault = take_back(copy, known)
            yield kind, fault or ("harmless" if recalled == whole else "generated again")
            shutil.rmtree(copy)


if __name__ == "__main__":
    sys.exit(tally("journal_mutations", __doc__, play, ("harmless", "generated again")))
