"""The journal: responses generated since the latest checkpoint. A resumed run generates none twice.

    journal/step-00000020/replica-00001.0     header ▏ 1,000 tokens of a response ▏ the next 1,000 ▏ …
                 │                      │     … ▏ a finished response ▏ its reward
                 └ latest checkpoint    └ attempt: each writes its own files

    begin(phase)     rank 0 reads the phase's earlier records ─▶ all ranks: fewer and shorter requests
    new checkpoint   begins a new folder; the one before stays, because it may hold responses of later steps

Lost or damaged responses are generated again: the law gives the same tokens.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tlt.base.io.files import remove_own
from tlt.base.spans import SpanName
from tlt.base.types import (
    LAW_VERSION,
    Request,
    ResponseId,
    Reward,
    Rollout,
    Turns,
    id_of,
    read_drafts,
    read_routes,
    write_routes,
)
from tlt.engine.backend import Unfinished
from tlt.training.ranks.world import World, broadcast_bytes, broadcast_json
from tlt.training.report.timeline import Timeline
from tlt.training.rollout.protocol import Journal, Recalled
from tlt.training.saved.checkpoint import Saved
from tlt.training.saved.inputs import NO_INPUTS, Inputs
from tlt.training.saved.journal_file import JournalRecord, read_record, read_records
from tlt.training.saved.manifest import folder_of
from tlt.training.saved.run_folder import JOURNAL_FILES, step_folders

_FORMAT = 3
RUNNING_TOKENS = 1000
"""A running response is written whenever it has grown by this many."""
_NAME = re.compile(r"replica-(\d{5})\.(\d+)", re.ASCII)
_STEPS = 32
"""Engine steps between checks of running responses."""


class FileJournal(Journal):
    """saved: returns the latest whole checkpoint.
    follows: digest of the checkpoint before.
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
        self._run, self._saved, self._base = run, saved, saved()
        self._file: int | None = None
        self._phase, self._written = "", dict[ResponseId, int]()
        self._routed: dict[ResponseId, int] = {}
        self._num_steps = 0
        index = find_phases(folder, run, {self._base.digest, follows}, say) if world.is_leader else {}
        self._index = {phase: index.get(phase, []) for phase in broadcast_json(world, sorted(index))}

    def begin(self, phase: str, requests: Sequence[Sequence[Request]]) -> Recalled:
        self._follow_checkpoint()
        self._phase, self._written, self._routed = phase, {}, {}
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
            first = self._written.get(id_of(response.request), 0)
            if response.num_tokens - first >= (1 if at_once else RUNNING_TOKENS):
                self.note_turn(response.to_request())

    def note_turn(self, request: Request) -> None:
        """Skips a response whose environment has a state (`_turns_of`)."""
        if request.turns is not None and request.turns.state:
            return
        response_id = id_of(request)
        first = self._written.get(response_id, 0)
        drafts = request.drafts
        drafts = None if drafts is None else tuple(one for one in drafts if one.place >= first)
        about: dict[str, Any] = {
            "prompt": fingerprint(request.prompt_ids),
            "drafts": drafts,
            "routes": self._new_routes(request),
            "turns": _write_turns(request.turns),
        }
        stretch = request.token_ids[first:], request.logprobs[first:]
        self._append("part", response_id, *stretch, first=first, **about)
        self._written[response_id] = len(request.token_ids)

    def _new_routes(self, so_far: Request) -> list[str] | None:
        if so_far.routes is None:
            return None
        first = self._routed.get(id_of(so_far), 0)
        self._routed[id_of(so_far)] = len(so_far.routes)
        return [b64encode(so_far.routes[first:]).decode()]

    def note_finished(self, rollout: Rollout) -> None:
        """A record with `by_group` counts only once its whole group has rewards: without the environment,
        which no file holds, it cannot be scored again."""
        prompt = fingerprint(rollout.prompt_ids)
        about = {
            "reason": rollout.finish_reason,
            "version": rollout.policy_version,
            "drafts": rollout.drafts,
            "routes": write_routes(rollout.routes),
            "turns": _write_turns(rollout.turns),
            "by_group": rollout.turns is not None and bool(rollout.turns.state),
        }
        self._append("response", id_of(rollout), rollout.token_ids, rollout.logprobs, prompt=prompt, **about)

    def note_rewards(self, rewards: Mapping[ResponseId, Reward]) -> None:
        for response_id, reward in rewards.items():
            if reward.is_scored:  # what could not be scored is tried again
                self._append("reward", response_id, reward=asdict(reward))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(
        self,
        kind: str,
        response_id: ResponseId,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        **about: Any,
    ) -> None:
        with self.timeline.span(SpanName.JOURNAL):
            if self._file is None:
                self._file = self._create()
            facts = {"kind": kind, "phase": self._phase, "key": response_id, **about}
            _write(self._file, JournalRecord.of(facts, token_ids, logprobs))

    def _create(self) -> int:
        folder = folder_of(self.folder, self._base.step)
        self.folder.mkdir(exist_ok=True)  # without its parent: a run's folder that was removed stays removed
        folder.mkdir(exist_ok=True)
        name = f"replica-{self.world.rank:05d}."
        earlier = [int(path.name[len(name) :]) for path in _files_in(folder, f"{name}*")]
        path = folder / f"{name}{max(earlier, default=-1) + 1}"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        whose = {"run": self._run, "checkpoint": self._base.digest, "inputs": asdict(self.inputs)}
        _write(file, JournalRecord({"kind": "journal", "format": _FORMAT, "law": LAW_VERSION, **whose}))
        return file

    def _follow_checkpoint(self) -> None:
        if (now := self._saved()) == self._base:
            return
        self.close()
        before, self._base = folder_of(self.folder, self._base.step), now
        if self.world.is_leader:
            for folder in step_folders(self.folder):
                if folder.name < before.name:
                    remove_own(folder, JOURNAL_FILES)


def _write(file: int, record: JournalRecord) -> None:
    left = memoryview(record.encode())
    while left:
        left = left[os.write(file, left) :]


def _write_turns(turns: Turns | None) -> dict[str, Any] | None:
    return None if turns is None else asdict(replace(turns, state=""))


def fingerprint(prompt_ids: tuple[int, ...]) -> int:
    return crc32(np.array(prompt_ids, "<i4").tobytes())


# ── records of earlier attempts ────────────────────────────────────────────────────────────────────────────

Location = tuple[Path, int]


def find_phases(
    folder: Path, run: str, checkpoints: set[str], say: Callable[[str], None] = lambda text: None
) -> dict[str, list[Location]]:
    """Phase → locations of its records, in files of this run that follow one of these checkpoints (digests).
    Other files are removed; `say` gets a line for each."""
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
                damage = f"its last {num_left:,} bytes are torn or damaged"
                say(f"{path}: {damage}; what they held is generated again")
    return phases


def _files_in(folder: Path, pattern: str = "step-*/replica-*") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if _NAME.fullmatch(path.name))


def read_header(folder: Path) -> Mapping[str, Any] | None:
    """The newest header of any run."""
    for path in reversed([path for path in _files_in(folder) if path.is_file()]):
        with path.open("rb") as file:
            header = read_record(file)
        about = {} if header is None else header.about
        if (about.get("kind"), about.get("format")) == ("journal", _FORMAT):
            return about
    return None


def _fault(header: JournalRecord | None, run: str, checkpoints: set[str]) -> str:
    about = {} if header is None else header.about
    if about.get("kind") != "journal":
        return "has no header as it was written"
    if about.get("format") != _FORMAT or about.get("law") != LAW_VERSION:
        return f"has format {about.get('format')} and law {about.get('law')}, not {_FORMAT} and {LAW_VERSION}"
    if about.get("run") != run:
        return f"is of another run, {about.get('run')}"
    if about.get("checkpoint") not in checkpoints:
        return "does not follow the checkpoint that the run goes on from"
    return ""


def read_places(places: Iterable[Location]) -> Iterable[tuple[Path, JournalRecord]]:
    for path, place in places:
        with path.open("rb") as file:
            file.seek(place)
            record = read_record(file)
        if record is not None:
            yield path, record


def choose(records: Iterable[tuple[Path, JournalRecord]]) -> list[JournalRecord]:
    """The best record of every response: with a reward, else finished, else longest. A stretch behind a gap
    is dropped."""
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
            tokens, numbers = before.tokens + record.tokens, before.numbers + record.numbers
            names = "drafts", "routes"
            joined = {name: _joined(before.about.get(name), record.about.get(name)) for name in names}
            about = {**before.about, **joined, "turns": record.about.get("turns")}
            known[place] = JournalRecord(about, tokens, numbers)
    best: dict[ResponseId, JournalRecord] = {}
    for (_, problem_id, sample_index), record in known.items():
        other = best.get((problem_id, sample_index))
        if other is None or _worth(other) < _worth(record):
            best[problem_id, sample_index] = record
    return list(best.values())


def _joined(before: Sequence[Any] | None, after: Sequence[Any] | None) -> Sequence[Any] | None:
    return None if before is None or after is None else [*before, *after]


def _worth(record: JournalRecord) -> tuple[bool, bool, int]:
    return "reward" in record.about, record.about["kind"] == "response", record.num_tokens


def _needs_group(record: JournalRecord | None) -> bool:
    return record is not None and bool(record.about.get("by_group"))


def recall(requests: Sequence[Sequence[Request]], records: Iterable[JournalRecord]) -> Recalled:
    """Splits requests into responses and remaining work. A response to another prompt does not count."""
    known = {tuple(record.about["key"]): record for record in records}
    rollouts: list[Rollout] = []
    rewards: dict[ResponseId, Reward] = {}
    units = []
    for group in requests:
        unit = []
        found = [known.get(id_of(request)) for request in group]
        is_scored = all(record is not None and "reward" in record.about for record in found)
        found = [record if is_scored or not _needs_group(record) else None for record in found]
        for request, record in zip(group, found, strict=True):
            if record is None or record.about["prompt"] != fingerprint(request.prompt_ids):
                unit.append(request)
            elif record.about["kind"] == "part":
                tokens, numbers = record.token_ids, record.logprobs
                drafts = read_drafts(record.about["drafts"])
                parts = record.about.get("routes")
                routes = None if parts is None else b"".join(map(b64decode, parts))
                turns = _turns_of(record)
                so_far = replace(request, token_ids=tokens, logprobs=numbers, drafts=drafts, routes=routes)
                unit.append(replace(so_far, turns=turns))
            else:
                rollouts.append(
                    Rollout(
                        request.problem_id,
                        request.sample_index,
                        request.prompt_ids,
                        record.token_ids,
                        record.logprobs,
                        record.about["reason"],
                        record.about["version"],
                        read_drafts(record.about["drafts"]),
                        routes=read_routes(record.about.get("routes")),
                        turns=_turns_of(record),
                    )
                )
                if "reward" in record.about:
                    rewards[id_of(request)] = Reward(**record.about["reward"])
        if unit:
            units.append(unit)
    return Recalled(units, rollouts, rewards)


def _turns_of(record: JournalRecord) -> Turns | None:
    """Without a state: whoever can write the folder could run code by a pickle."""
    turns = Turns.read(record.about.get("turns"))
    return None if turns is None else replace(turns, state="")
