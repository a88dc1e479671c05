"""A vLLM with the model runner of GPUs, in a process of its own (children.py), whose drafter misses the steps
that draft nothing: what every step drafts, beside what it drafts with a drafter that runs in every step.

    a pickled list of requests, cases and a drafter ─▶ main, in the child ─▶ their pickled Found
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.side_by_side import interpret_triton, random_lengths
from tests.vllm.children import BASE, DEPTH
from tlt.assembly.engine import EngineSettings, load_engine
from tlt.assembly.model import load_model
from tlt.config.vllm import VllmSection
from tlt.types import Request

Drafts = dict[tuple[str, int], tuple[int, ...]]
"""By problem and number of tokens before the draft."""


@dataclass(frozen=True)
class Case:
    """One rollout. room: positions kept of a request.  longest_pass: positions that a pass reads.  fault: of
    FAULTS."""

    off: int
    """Steps in turn that draft nothing, then `on` steps that draft; 0: another length in every step."""
    on: int
    room: int | None = None
    longest_pass: int | None = None
    preempts_at: int | None = None
    """Step before which vLLM puts all sequences back."""
    is_ahead: bool = False
    """Whether the host knows no more of a sequence's length than a bound, as with asynchronous scheduling."""
    fault: str | None = None


@dataclass(frozen=True)
class Found:
    expected: Drafts
    """Of a drafter that runs in every step."""
    drafts: Drafts
    passes: tuple[tuple[int, ...], ...]
    """Of every step: positions of each pass of the drafter. The first one of those that draft is vLLM's."""
    lengths: tuple[int, ...]
    """Drafted tokens of every step."""


def fault_of(name: str | None, runner: Any) -> Any:
    """Returns the patch that plants a fault."""
    from tlt.vllm.inside.drafter_v2 import DrafterV2  # imports vLLM
    from tlt.vllm.inside.unread import NOTHING, Rows, UnreadPositions

    take, rows_of = UnreadPositions.take, DrafterV2._rows

    def missed(unread: UnreadPositions, rows: Rows, indices: Any, _: Any) -> None:
        unread.first_S[rows.slots_B[indices]] = NOTHING

    def with_rejected(drafter: DrafterV2, input_batch: Any) -> Rows:
        rows = rows_of(drafter, input_batch)
        return Rows(rows.slots_B, rows.starts_B, rows.counts_B, input_batch.is_prefilling_np)

    faults: dict[str | None, Callable[[], Any]] = {
        None: lambda: patch.object(UnreadPositions, "__doc__", ""),
        "awake": lambda: patch.object(UnreadPositions, "keep", lambda *_: True),
        "one position off": lambda: patch.object(UnreadPositions, "take", lambda u, s, p: take(u, s, p - 1)),
        "never read": lambda: patch.object(UnreadPositions, "read", missed),
        "rejected drafts kept": lambda: patch.object(DrafterV2, "_rows", with_rejected),
        "tables of the pass left": lambda: patch.object(runner, "prepare_attn", _after_the_first(runner)),
        "a slot's past kept": lambda: patch.object(UnreadPositions, "forget", lambda *_: None),
    }
    return faults[name]()


def _after_the_first(runner: Any) -> Callable[..., Any]:
    """Prepares once a step, and not again after a pass."""
    prepare, last = runner.prepare_attn, list[Any]()

    def prepared(input_batch: Any) -> Any:
        if last and last[-1] is input_batch:
            return None
        last[:] = [input_batch]
        return prepare(input_batch)

    return prepared


class Recorder:
    """Records passes and drafts of a runner's speculator."""

    def __init__(self, runner: Any, is_ahead: bool) -> None:
        self.states, self.speculator, self.is_ahead = runner.req_states, runner.speculator, is_ahead
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self.passes, self.lengths = list[list[int]](), list[int]()
        self._propose, self._run_model = self.speculator.propose, self.speculator._run_model

    @contextmanager
    def recording(self) -> Iterator[None]:
        with (
            patch.object(self.speculator, "propose", self.propose),
            patch.object(self.speculator, "_run_model", self.run_model),
        ):
            yield

    def run_model(self, num_tokens: int, *args: Any, **options: Any) -> Any:
        self.passes[-1].append(num_tokens)
        return self._run_model(num_tokens, *args, **options)

    def propose(self, input_batch: Any, *args: Any, **options: Any) -> Any:
        self.passes.append([])
        self.lengths.append(depth := options["num_speculative_tokens"])
        if self.is_ahead:
            input_batch.num_computed_tokens_np = input_batch.num_computed_tokens_np + 3
        drafts, num_sampled = self._propose(input_batch, *args, **options), args[4]
        lengths = self.states.total_len.gpu[input_batch.idx_mapping].tolist()
        for row, name in enumerate(input_batch.req_ids):
            if depth and num_sampled[row]:
                self.drafts[name, lengths[row]] = tuple(drafts[row, :depth].tolist())
        return drafts


def lengths_of(case: Case) -> Iterator[int]:
    if not case.off:
        return random_lengths(DEPTH, 3)
    return (0 if step % (case.off + case.on) < case.off else DEPTH for step in count())


def rollout(engine: Any, requests: Sequence[Request], case: Case) -> Recorder:
    tuner, engine.tuner = engine.tuner, None
    scheduler, lengths, names = engine.link._scheduler, lengths_of(case), dict[str, str]()
    core = engine.link._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    unread = runner.tlt.unread
    unread.kept_SRF, longest, longest_pass = None, unread.longest, unread.longest_pass
    unread.longest = case.room or longest
    unread.longest_pass = case.longest_pass or longest_pass
    recorder = Recorder(runner, case.is_ahead)
    with fault_of(case.fault, runner), recorder.recording():
        engine.add(requests)
        for step in count():
            if engine.is_idle:
                break
            if step == case.preempts_at:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            names |= {engine.link._internal_ids[n]: s.request.problem_id for n, s in engine._running.items()}
            engine.link.draft(next(lengths))
            engine.step()
    unread.longest, unread.longest_pass, engine.tuner = longest, longest_pass, tuner
    unread.first_S[:] = np.iinfo(np.int64).max
    recorder.drafts = {(names[name], length): draft for (name, length), draft in recorder.drafts.items()}
    return recorder


def child(requests: Sequence[Request], cases: Sequence[Case], drafter: Path, batch: int) -> list[Found]:
    interpret_triton()
    torch.set_num_threads(1)
    settings = EngineSettings(
        f"{DEPTH}x1x{DEPTH}",
        engine="vllm",
        max_batch_size=batch,
        window=max(len(r.prompt_ids) + r.params.max_tokens for r in requests),
        kv_gib=0.05,
        vllm=VllmSection(compile=False),
    )
    engine: Any = load_engine(load_model(BASE, torch.float32), settings, drafter)
    assert engine.link.is_v2
    expected: dict[tuple[int, int, int | None], Drafts] = {}
    found = []
    for case in cases:
        key = case.off, case.on, case.preempts_at
        if key not in expected:
            expected[key] = rollout(
                engine, requests, Case(*key[:2], preempts_at=key[2], fault="awake")
            ).drafts
        done = rollout(engine, requests, case)
        found.append(Found(expected[key], done.drafts, tuple(map(tuple, done.passes)), tuple(done.lengths)))
    engine.link.close()
    return found


def run_asleep(
    requests: Sequence[Request], cases: Sequence[Case], drafter: Path, batch: int, folder: Path
) -> list[Found]:
    job, out = folder / "job", folder / "found"
    job.write_bytes(pickle.dumps((requests, cases, drafter, batch)))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from tests.vllm.asleep import main; main()", str(job), str(out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Found] = pickle.loads(out.read_bytes())
    return found


def main() -> None:
    job, out = map(Path, sys.argv[1:])
    out.write_bytes(pickle.dumps(child(*pickle.loads(job.read_bytes()))))
