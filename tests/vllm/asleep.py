"""A vLLM with the model runner of GPUs, in a process of its own (children.py), whose drafter misses the steps
that draft nothing: what every step drafts, beside what it drafts with a drafter that runs in every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.side_by_side import interpret_triton, random_lengths
from tests.vllm.children import BASE, DEPTH
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request
from tlt.engine.build.engine import load_engine
from tlt.engine.build.model import load_model
from tlt.engine.settings import EngineSettings

Drafts = dict[tuple[str, int], tuple[int, ...]]
"""By problem and number of tokens before the draft."""


@dataclass(frozen=True)
class Case:
    """One rollout. room: positions kept of a request.  longest_pass: positions that a pass reads."""

    off: int
    """Steps in turn that draft nothing, then `on` steps that draft; 0: another length in every step."""
    on: int
    room: int | None = None
    longest_pass: int | None = None
    preempts_at: int | None = None
    """Step before which vLLM puts all sequences back."""
    is_awake: bool = False
    """Whether the drafter runs in every step."""


@dataclass(frozen=True)
class Found:
    expected: Drafts
    """Of a drafter that runs in every step."""
    drafts: Drafts
    passes: tuple[tuple[int, ...], ...]
    """Of every step: positions of each pass of the drafter. The first one of those that draft is vLLM's."""
    lengths: tuple[int, ...]
    """Drafted tokens of every step."""
    ahead: int
    """By how many tokens the host took a sequence for longer than it was, at most."""


def waking(is_awake: bool) -> Any:
    from tlt.engine.vllm.inside.unread import UnreadPositions  # imports vLLM

    return patch.object(UnreadPositions, "keep", lambda *_: True) if is_awake else nullcontext()


class Recorder:
    def __init__(self, runner: Any) -> None:
        self.states, self.speculator = runner.req_states, runner.speculator
        self.drafts: dict[tuple[str, int], tuple[int, ...]] = {}
        self.passes, self.lengths, self.ahead = list[list[int]](), list[int](), 0
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
        starts_B = input_batch.positions[input_batch.query_start_loc[: input_batch.num_reqs].long()]
        self.ahead = max(self.ahead, *(input_batch.num_computed_tokens_np - starts_B.numpy()).tolist())
        drafts, num_sampled = self._propose(input_batch, *args, **options), args[4]
        lengths = self.states.total_len.gpu[input_batch.idx_mapping].tolist()
        for row, name in enumerate(input_batch.req_ids):
            if depth and num_sampled[row]:
                self.drafts[name, lengths[row]] = tuple(drafts[row, :depth].tolist())
        return drafts

    def found(self, expected: Drafts, names: Callable[[str], str]) -> Found:
        """names: returns the problem of a request that vLLM names so."""
        drafts = {(names(name), length): draft for (name, length), draft in self.drafts.items()}
        passes = tuple(tuple(some) for some in self.passes)
        return Found(expected or drafts, drafts, passes, tuple(self.lengths), self.ahead)


def forget_all(runner: Any) -> None:
    """Overwrites keys, values and hidden states of earlier rollouts, which may be right by chance."""
    unread = runner.tlt.unread
    for cache in runner.kv_caches:
        cache.fill_(30)
    kept, unread.kept_SRF = unread.kept_SRF, None
    width = runner.model_config.get_hidden_size() if kept is None else kept.shape[2]
    unread.make_room(torch.empty(1, width)).fill_(30)


def lengths_of(case: Case) -> Iterator[int]:
    if not case.off:
        return random_lengths(DEPTH, 3)
    return (0 if step % (case.off + case.on) < case.off else DEPTH for step in count())


def rollout(engine: Any, requests: Sequence[Request], case: Case, expected: Drafts) -> Found:
    tuner, engine.tuner = engine.tuner, None
    scheduler, lengths, names = engine.link._scheduler, lengths_of(case), dict[str, str]()
    core = engine.link._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    unread = runner.tlt.unread
    longest, longest_pass = unread.longest, unread.longest_pass
    unread.longest = case.room or longest
    unread.longest_pass = case.longest_pass or longest_pass
    forget_all(runner)
    recorder = Recorder(runner)
    with waking(case.is_awake), recorder.recording():
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
    return recorder.found(expected, names.__getitem__)


def of_cases(requests: Sequence[Request], cases: Sequence[Case], drafter: Path, batch: int) -> list[Found]:
    """Returns what our engine drafts by vLLM's scheduler, one step after the other."""
    interpret_triton()
    settings = EngineSettings(
        parse_speculation(f"{DEPTH}x1x{DEPTH}"),
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
            awake = Case(*key[:2], preempts_at=key[2], is_awake=True)
            expected[key] = rollout(engine, requests, awake, {}).drafts
        found.append(rollout(engine, requests, case, expected[key]))
    engine.link.close()
    return found


def of_a_schedule(prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], eagle: Path) -> list[Found]:
    """Returns what vLLM drafts by its own asynchronous scheduler, four tokens while one request runs and none
    while two do. CPUs have no such scheduling by default: the host goes ahead, and nothing is faster."""
    interpret_triton()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from tlt.engine.vllm.inside.plugin import register

    register()
    make = EngineArgs.create_engine_config

    def make_ahead(self: Any, *args: Any, **options: Any) -> Any:
        config = make(self, *args, **options)
        config.scheduler_config.async_scheduling = True
        return config

    drafting = {
        "method": "eagle",
        "model": str(eagle),
        "num_speculative_tokens": DEPTH,
        "num_speculative_tokens_per_batch_size": [(1, 1, DEPTH), (2, 2, 0)],
    }
    with patch.object(EngineArgs, "create_engine_config", make_ahead):
        llm = vllm.LLM(
            str(BASE),
            dtype="float32",
            max_model_len=80,
            max_num_seqs=2,
            enforce_eager=True,
            kv_cache_memory_bytes=2**25,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            additional_config={"tlt": {}},
            speculative_config=drafting,
        )
    core: Any = llm.llm_engine.engine_core
    core = core.engine_core
    assert type(core.scheduler).__name__ == "AsyncScheduler"
    params = [
        vllm.SamplingParams(seed=seed, max_tokens=num, ignore_eos=True, detokenize=False)
        for seed, num in enumerate(max_tokens)
    ]
    runner, expected, found = core.model_executor.driver_worker.worker.model_runner, Drafts(), list[Found]()
    for is_awake in (True, False):
        recorder = Recorder(runner)
        forget_all(runner)
        with waking(is_awake), recorder.recording():
            llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        found.append(recorder.found(expected, lambda name: str(int(name.split("-")[0]) % len(prompts))))
        expected = found[0].drafts
    core.shutdown()
    return found


def of_blocks(requests: Sequence[Request], drafter: Path, block: int) -> tuple[Drafts, dict[str, Any]]:
    """Returns what our engine drafts with a DFlash drafter by vLLM's scheduler, another length at every step,
    and the tokens of each problem."""
    interpret_triton()
    settings = EngineSettings(
        parse_speculation(f"{block}x1x{block}"),
        engine="vllm",
        max_batch_size=2,
        # at the window's end vLLM shortens blocks
        window=max(len(r.prompt_ids) + r.params.max_tokens for r in requests) + 2 * block,
        kv_gib=0.05,
        vllm=VllmSection(compile=False),
    )
    engine: Any = load_engine(load_model(BASE, torch.float32), settings, drafter)
    assert engine.link.is_v2
    runner = engine.link._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder, lengths, names, tokens = Recorder(runner), random_lengths(block, 3), dict[str, str](), {}
    engine.tuner = None
    with recorder.recording():
        engine.add(requests)
        while not engine.is_idle:
            names |= {engine.link._internal_ids[n]: s.request.problem_id for n, s in engine._running.items()}
            engine.link.draft(next(lengths))
            for finished in engine.step():
                rollout = finished.rollout
                tokens[rollout.problem_id] = (*rollout.prompt_ids, *rollout.token_ids)
    engine.link.close()
    return recorder.found({}, names.__getitem__).drafts, tokens
