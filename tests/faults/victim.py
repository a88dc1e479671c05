"""A small run whose ranks are killed by a plan; kills.py starts it.

    python -m tests.faults.victim FOLDER      FOLDER/plan.json: the kills, one in each attempt

A rank sends SIGKILL to itself or to its launcher at a given call of a function, or a number of seconds after
training has begun. In the journal the kill comes in the middle of a record, which is then torn.

FOLDER/events.jsonl   {"kill": number, "at": Unix time} · {"ready": Unix time} when an attempt begins to train
                      {"twice": …} for a response of a journal that is generated again, or a call of it that
                      is made again
FOLDER/calls-R.json   number of calls of each function on rank R, in the last attempt
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tlt.apps.run.start import describe_saved
from tlt.base.clock import Moment
from tlt.base.config.load import load_config
from tlt.base.types import id_of
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.training import loop
from tlt.training.build.ranks import all_ranks
from tlt.training.launch import local
from tlt.training.launch.failures import Restarts
from tlt.training.launch.signals import StopRequest
from tlt.training.rollout.conversations import Conversations
from tlt.training.saved import journal
from tlt.training.saved.journal_file import JournalRecord, read_records

MOMENTS = {
    "loading": "tlt.training.run:Run._load",
    "recalling": "tlt.training.saved.journal:FileJournal.begin",
    "asking": "tlt.tasks.environments.pool:EnvironmentPool.ask",
    "a result": "tlt.training.rollout.conversations:Conversations._after",
    "a turn": "tlt.training.rollout.conversations:Conversations._go_on",
    "taking work": "tlt.training.rollout.work_queue:WorkQueue.take",
    "prefill": "tlt.engine.own.engine:RolloutEngine._prefill",
    "decode": "tlt.models.packed:PackedTransformer.forward_capturing",
    "hand-over": "tlt.training.rollout.work_queue:WorkQueue.hand_over",
    "taking over": "tlt.training.rollout.work_queue:WorkQueue.receive",
    "journal": "tlt.training.saved.journal:_write",
    "generating ahead": "tlt.training.idle.ahead:AheadOfPolicy._next",
    "keeping what was": "tlt.training.idle.ahead:AheadOfPolicy.keep",
    "spot training": "tlt.drafter.training.spot:SpotTrainer.micro_step",
    "scoring": "tlt.tasks.rewards.pool:RewardPool.drain",
    "averaging": "tlt.training.build.models:average_weighted",
    "measuring": "tlt.training.idle.drafter_training:LearnedDrafterTraining.publish_and_measure",
    "update": "tlt.training.update.update:PolicyTrainer._accumulate",
    "optimizer step": "tlt.training.update.update:PolicyTrainer._optimizer_step",
    "publication": "tlt.engine.own.engine:RolloutEngine.load_policy_parts",
    "record": "tlt.training.loop:record",
    "evaluation": "tlt.training.saved.evaluations:Evaluations.add",
    "checkpoint": "tlt.training.saved.checkpoint:_write_share",
    "manifest": "tlt.training.saved.checkpoint:commit",
    "removing older": "tlt.training.saved.checkpoint:remove_older",
    "products": "tlt.training.run:save_model",
}
"""The functions, by moment: module:object.attribute."""
ANYWHERE = "anywhere"
LAUNCHER = -1
EXTRA_RESTARTS = 3
RUNNING_TOKENS, STEPS = 12, 4
"""The journal writes running responses more often here, for they are short."""


@dataclass(frozen=True)
class Kill:
    """A planned kill."""

    moment: str
    rank: int
    """The rank that dies; LAUNCHER: the process that has started the ranks, killed by rank 0."""
    call: int = 1
    """Number of the call of the moment's function, from 1."""
    seconds: float = 0.0
    """For ANYWHERE: seconds since training has begun in this attempt."""
    signal: int = signal.SIGKILL
    """SIGTERM, of a launcher: the run stops in order, and is started again."""


def run(folder: Path) -> int:
    """Runs, or continues, the run in `folder` by its plan; returns the exit code."""
    fork_ranks()
    load_tokenizer(folder.parent / "model")  # which imports much
    kills = read_plan(folder)
    config = load_config(folder.parent / "run.toml", {"run.out_dir": folder / "run"})
    restarts = Restarts(len(kills) + EXTRA_RESTARTS, lambda: describe_saved(config.run.out_dir))
    argument = json.dumps({"folder": str(folder), "description": loop.describe_run(config, Moment.now())})
    return local.launch(argument, all_ranks(config), "tests.faults.victim:main", restarts=restarts)


def fork_ranks() -> None:
    """Makes the launcher fork ranks instead of spawning them, which saves their imports. All else is as in
    `tlt train`."""
    local.START_METHOD = "fork"


def read_plan(folder: Path) -> list[Kill]:
    return [Kill(**kill) for kill in json.loads((folder / "plan.json").read_text())]


def main(argument: str, stop: StopRequest) -> None:
    """Runs on every rank."""
    given = json.loads(argument)
    folder, rank = Path(given["folder"]), int(os.environ["RANK"])
    journal.RUNNING_TOKENS, journal._STEPS = RUNNING_TOKENS, STEPS
    done = sum("kill" in event for event in read_events(folder))
    kill = dict(enumerate(read_plan(folder))).get(done)
    if kill is not None and kill.rank not in (rank, LAUNCHER if rank == 0 else rank):
        kill = None

    def die() -> None:
        assert kill is not None
        note(folder, kill=done, at=time.time())
        os.kill(os.getppid() if kill.rank == LAUNCHER else os.getpid(), kill.signal)
        if kill.signal == signal.SIGKILL:
            time.sleep(60)  # a rank whose launcher is gone ends by itself

    calls: Counter[str] = Counter()
    for moment in MOMENTS:
        _watch(moment, calls, kill, die)
    _check_journal(folder, checks_tokens=rank == 0)
    _announce(folder, rank, kill, die)
    loop.main(given["description"], stop)
    (folder / f"calls-{rank}.json").write_text(json.dumps(calls))


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(folder: Path, **event: Any) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def owner_of(place: str) -> tuple[Any, str]:
    """Returns the module or class that has the function, and its name there."""
    module, _, path = place.partition(":")
    owner, _, name = path.rpartition(".")
    return resolve_name(f"{module}:{owner}" if owner else module), name


def replace(place: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function at a place by another, made from it."""
    owner, name = owner_of(place)
    setattr(owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))


def before(place: str, act: Callable[..., None]) -> None:
    """Calls `act`, with the same arguments, before every call of the function at a place."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            act(*arguments, **options)
            return function(*arguments, **options)

        return call

    replace(place, make)


def _watch(moment: str, calls: Counter[str], kill: Kill | None, die: Callable[[], None]) -> None:
    """Counts the calls of a moment's function, and kills at the planned one."""

    def act(*arguments: Any, **_: Any) -> None:
        calls[moment] += 1
        if kill is not None and kill.moment == moment and kill.call == calls[moment]:
            if moment == "journal":
                file, record = arguments
                data = record.encode()
                os.write(file, data[: len(data) // 2])
            die()

    before(MOMENTS[moment], act)


def _announce(folder: Path, rank: int, kill: Kill | None, die: Callable[[], None]) -> None:
    """Notes when training begins, and starts the timer of a kill ANYWHERE."""

    def act(*_: Any, **__: Any) -> None:
        if rank == 0:
            note(folder, ready=time.time())
        if kill is not None and kill.moment == ANYWHERE:
            timer = threading.Timer(kill.seconds, die)
            timer.daemon = True
            timer.start()

    before("tlt.training.loop:train", act)


def _check_journal(folder: Path, checks_tokens: bool) -> None:
    """Notes the responses that a phase generates although the journals of earlier attempts, read here anew,
    hold them, and the calls that are made although their result stands there."""
    known: Counter[tuple[str, str, int]] = Counter()
    calls: Counter[tuple[str, str, int]] = Counter()
    finished = set()
    for path in sorted((folder / "run" / "journal").glob("step-*/*")):
        length: Counter[tuple[str, str, int]] = Counter()  # of what stands in this file
        for record in records_of(path):
            if record.about["kind"] == "journal":
                continue
            place = (record.about["phase"], *record.about["key"])
            if turns := record.about.get("turns"):
                calls[place] = max(calls[place], turns["num_calls"])
            if record.about["kind"] == "response":
                finished.add(place)
            elif record.about["kind"] == "part" and record.about["first"] in (0, length[place]):
                length[place] = record.about["first"] + record.num_tokens
                known[place] = max(known[place], length[place])

    def make(begin: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, phase: str, requests: Sequence[Any]) -> Any:
            recalled = begin(self, phase, requests)
            for request in (request for unit in recalled.requests for request in unit if checks_tokens):
                place = phase, request.problem_id, request.sample_index
                if place in finished or len(request.token_ids) < known[place]:
                    note(folder, twice=place)
            return recalled

        return checked

    replace(MOMENTS["recalling"], make)

    def check_call(talks: Conversations, talk: Any, ends: bool = False) -> None:
        held: Any = talks._journal
        place = (held._phase, *id_of(talk.rollout))
        if talk.calls and not ends and talk.turns.num_calls < calls[place]:
            note(folder, twice=[*place, f"call {talk.turns.num_calls}"])

    before("tlt.training.rollout.conversations:Conversations._advance", check_call)


def records_of(path: Path) -> list[JournalRecord]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return [record for _, record in read_records(file)]
    return []


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
