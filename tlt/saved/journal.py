"""The journal: what the replicas have generated since the latest checkpoint, written as it comes about. A run
that goes on takes it from there, and generates none of it twice.

    journal/step-00000020/replica-00001.0     header ▏ 1,000 tokens of a response ▏ the next 1,000 ▏ the response ▏ its reward
            └ of the latest checkpoint  └ attempt: each writes files of its own

    begin(phase)     rank 0 reads what earlier attempts have left of it ─▶ told to all ranks ─▶ fewer and shorter requests
    new checkpoint   begins a new folder; the one before stays, for responses of steps after that checkpoint may stand in it

So the steps since the checkpoint are redone as updates alone. What is lost, or not as it was written, is
generated again, by the law with the same tokens. Files survive the death of any process, and of a machine
as far as its file system had written them. Knows neither engine nor queue.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tlt.engine.backend import Unfinished
from tlt.ranks.world import World, broadcast_bytes, broadcast_json
from tlt.report.timeline import Timeline
from tlt.rollout.protocol import Journal, Recalled
from tlt.saved.checkpoint import Saved
from tlt.saved.inputs import NO_INPUTS, Inputs
from tlt.saved.journal_file import JournalRecord, read_record, read_records
from tlt.saved.manifest import folder_of
from tlt.spans import SpanName
from tlt.types import LAW_VERSION, Key, Request, Reward, Rollout, key_of

_FORMAT = 2
RUNNING_TOKENS = 1000
"""A response that runs is written whenever it has grown by so many tokens: at most these are generated
again."""
_NAME = re.compile(r"replica-(\d{5})\.(\d+)", re.ASCII)
_STEPS = 32
"""Engine steps between two looks at what runs."""


class FileJournal(Journal):
    """The journal of one replica, in the run's folder `journal`.

    run: the run's id.
    saved: returns the latest checkpoint that is whole.
    follows: digest of the one that came before what `saved` returns now. A file that was begun after neither
        of the two is not of this run's policies: it is removed, and `say` is told so.
    inputs: what the run computes from.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        run: str,
        saved: Callable[[], Saved],
        follows: str,
        timeline: Timeline,
        say: Callable[[str], None],
        inputs: Inputs = NO_INPUTS,
    ) -> None:
        self.folder, self.world, self.timeline, self.inputs = folder, world, timeline, inputs
        self._saved, self._base, self._before = saved, saved(), saved().step
        self._run = run
        self._file: int | None = None
        self._phase, self._written = "", dict[Key, int]()
        self._num_steps = 0
        index = find_phases(folder, run, {self._base.digest, follows}, say) if world.is_leader else {}
        self._index = {phase: index.get(phase, []) for phase in broadcast_json(world, sorted(index))}

    def begin(self, phase: str, requests: Sequence[Sequence[Request]]) -> Recalled:
        self._follow_checkpoint()
        self._phase, self._written = phase, {}
        if phase not in self._index:
            return Recalled(requests)
        places = self._index.pop(phase)
        chosen = choose(read_places(places)) if self.world.is_leader else []
        told = broadcast_bytes(self.world, b"".join(record.encode() for record in chosen))
        return recall(requests, [record for _, record in read_records(BytesIO(told))])

    def note_running(self, responses: Sequence[Unfinished], at_once: bool = False) -> None:
        self._num_steps += 1
        if self._num_steps % _STEPS and not at_once:
            return
        for response in responses:
            key = key_of(response.request)
            first = self._written.get(key, 0)
            if response.num_tokens - first >= (1 if at_once else RUNNING_TOKENS):
                so_far = response.to_request()
                stretch = so_far.token_ids[first:], so_far.logprobs[first:]
                self._append("part", key, *stretch, first=first, prompt=fingerprint(so_far.prompt_ids))
                self._written[key] = response.num_tokens

    def note_finished(self, rollout: Rollout) -> None:
        about = {"reason": rollout.finish_reason, "version": rollout.policy_version}
        prompt = fingerprint(rollout.prompt_ids)
        self._append("response", key_of(rollout), rollout.token_ids, rollout.logprobs, prompt=prompt, **about)

    def note_rewards(self, rewards: Mapping[Key, Reward]) -> None:
        for key, reward in rewards.items():
            if reward.is_scored:  # what could not be scored is tried again
                self._append("reward", key, reward=asdict(reward))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(
        self,
        kind: str,
        key: Key,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        **about: Any,
    ) -> None:
        with self.timeline.span(SpanName.JOURNAL):
            if self._file is None:
                self._file = self._create()
            facts = {"kind": kind, "phase": self._phase, "key": key, **about}
            _write(self._file, JournalRecord.of(facts, token_ids, logprobs))

    def _create(self) -> int:
        folder = folder_of(self.folder, self._base.step)
        self.folder.mkdir(
            exist_ok=True
        )  # without its parent, which is the run's folder: one that was removed stays so
        folder.mkdir(exist_ok=True)
        names = (path.name for path in folder.iterdir())
        earlier = [
            int(match[2])
            for match in map(_NAME.fullmatch, names)
            if match and int(match[1]) == self.world.rank
        ]
        path = folder / f"replica-{self.world.rank:05d}.{max(earlier, default=-1) + 1}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        whose = {"run": self._run, "checkpoint": self._base.digest, "inputs": asdict(self.inputs)}
        _write(file, JournalRecord({"kind": "journal", "format": _FORMAT, "law": LAW_VERSION, **whose}))
        return file

    def _follow_checkpoint(self) -> None:
        """Goes on in a new folder where a checkpoint has become whole, and removes what lies before the
        one before it."""
        now = self._saved()
        if now == self._base:
            return
        self.close()
        self._before, self._base = self._base.step, now
        if self.world.is_leader:
            for folder in self.folder.glob("step-*"):
                if folder.name < folder_of(self.folder, self._before).name:
                    shutil.rmtree(folder)


def _write(file: int, record: JournalRecord) -> None:
    left = memoryview(record.encode())
    while left:
        left = left[os.write(file, left) :]


def fingerprint(prompt_ids: tuple[int, ...]) -> int:
    """Returns a number by which a prompt is known again."""
    return crc32(np.array(prompt_ids, "<i4").tobytes())


# ── what earlier attempts have left ─────────────────────────────────────────────────────────────────────────

Location = tuple[Path, int]
"""A record's file, and where it begins there."""


def find_phases(
    folder: Path, run: str, checkpoints: set[str], say: Callable[[str], None] = lambda text: None
) -> dict[str, list[Location]]:
    """Returns the records of every phase, in the order written, of the run's files that follow one of
    these checkpoints (their digests). Other files are removed, and `say` is told of them, and of what is
    damaged."""
    phases: dict[str, list[Location]] = defaultdict(list)
    for path in _files_in(folder):
        if not path.is_file():
            say(f"{path}: is a folder, where the journal has files; it is left alone, move it away")
            continue
        with path.open("rb") as file:
            header = read_record(file)
            if fault := _fault(header, run, checkpoints):
                say(f"{path}: {fault}; it is removed, and what it held is generated again")
                path.unlink()
                continue
            for place, record in read_records(file):
                phases[record.about["phase"]].append((path, place))
            if num_left := path.stat().st_size - file.tell():
                say(
                    f"{path}: its last {num_left:,} bytes are torn or damaged; what they held is generated "
                    "again"
                )
    return phases


def _files_in(folder: Path) -> list[Path]:
    """Returns the files of all replicas and attempts, the earliest checkpoint's first."""
    return sorted(path for path in folder.glob("step-*/replica-*") if _NAME.fullmatch(path.name))


def read_header(folder: Path) -> Mapping[str, Any] | None:
    """Returns the header of a journal's newest file that has one, without looking whose it is; None: none
    has."""
    for path in reversed([path for path in _files_in(folder) if path.is_file()]):
        with path.open("rb") as file:
            header = read_record(file)
        if (
            header is not None
            and header.about.get("kind") == "journal"
            and header.about.get("format") == _FORMAT
        ):
            return header.about
    return None


def _fault(header: JournalRecord | None, run: str, checkpoints: set[str]) -> str:
    """Returns why the file with this header is not of the run as it stands; empty: it is."""
    about = {} if header is None else header.about
    if about.get("kind") != "journal":
        return "has no header as it was written"
    if about.get("format") != _FORMAT or about.get("law") != LAW_VERSION:
        return f"has format {about.get('format')} and law {about.get('law')}, not {_FORMAT} and {LAW_VERSION}"
    if about.get("run") != run:
        return f"is of another run, {about.get('run')}"
    return (
        ""
        if about.get("checkpoint") in checkpoints
        else "does not follow the checkpoint that the run goes on from"
    )


def read_places(places: Iterable[Location]) -> Iterable[tuple[Path, JournalRecord]]:
    """Yields the records at these places, each with its file."""
    for path, place in places:
        with path.open("rb") as file:
            file.seek(place)
            record = read_record(file)
        if record is not None:
            yield path, record


def choose(records: Iterable[tuple[Path, JournalRecord]]) -> list[JournalRecord]:
    """Returns of every response what is known of it: of several files the best, one with a reward before
    one that is finished before one that has most tokens. Stretches of a response and its reward count only
    behind what they follow in their file."""
    known: dict[tuple[Path, str, int], JournalRecord] = {}
    for path, record in records:
        problem_id, sample_index = record.about["key"]
        place = path, problem_id, sample_index
        before = known.get(place)
        if record.about["kind"] == "response" or record.about.get("first") == 0:
            known[place] = record
        elif before is None:
            continue
        elif record.about["kind"] == "reward":
            known[place] = replace(before, about={**before.about, "reward": record.about["reward"]})
        elif before.num_tokens == record.about["first"]:
            known[place] = JournalRecord(
                before.about, before.tokens + record.tokens, before.numbers + record.numbers
            )
    best: dict[Key, JournalRecord] = {}
    for (_, problem_id, sample_index), record in known.items():
        other = best.get((problem_id, sample_index))
        if other is None or _worth(other) < _worth(record):
            best[problem_id, sample_index] = record
    return list(best.values())


def _worth(record: JournalRecord) -> tuple[bool, bool, int]:
    return "reward" in record.about, record.about["kind"] == "response", record.num_tokens


def recall(requests: Sequence[Sequence[Request]], records: Iterable[JournalRecord]) -> Recalled:
    """Returns what these records leave to do of the requests. A response to another prompt is none of
    theirs."""
    known = {tuple(record.about["key"]): record for record in records}
    rollouts: list[Rollout] = []
    rewards: dict[Key, Reward] = {}
    units = []
    for group in requests:
        unit = []
        for request in group:
            record = known.get(key_of(request))
            if record is None or record.about["prompt"] != fingerprint(request.prompt_ids):
                unit.append(request)
            elif record.about["kind"] == "part":
                unit.append(replace(request, token_ids=record.token_ids, logprobs=record.logprobs))
            else:
                rollouts.append(_to_rollout(request, record))
                if "reward" in record.about:
                    rewards[key_of(request)] = Reward(**record.about["reward"])
        if unit:
            units.append(unit)
    return Recalled(units, rollouts, rewards)


def _to_rollout(request: Request, record: JournalRecord) -> Rollout:
    reason, version = record.about["reason"], record.about["version"]
    stretch = record.token_ids, record.logprobs
    return Rollout(request.problem_id, request.sample_index, request.prompt_ids, *stretch, reason, version)
