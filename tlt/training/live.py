"""Live rollouts: engine, drafter and work queue beside the user's own training loop.

the caller's module ── weights, at every call ──▶ engine ──▶ a response per prompt, on the prompt's rank
      ▲                                           ▲    │
      └──────── the caller's own update           │    └─▶ drafter, trained on idle ranks
                                                  └── queue: all ranks share the work of all
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tlt.base.config.drafter import DrafterSection
from tlt.base.config.mistakes import validate
from tlt.base.io.hub import Repository, resolve_model
from tlt.base.speculation import Off, parse_speculation
from tlt.base.types import (
    Problem,
    Purpose,
    Request,
    ResponseId,
    Reward,
    Rollout,
    SamplingParams,
    Turns,
    UserError,
    checked,
    id_of,
    resolve_dtype,
)
from tlt.base.value_types import BatchSize, Share, plain, shorten
from tlt.drafter.formats.folder import load_drafter
from tlt.engine.build.engine import build_engine
from tlt.engine.settings import EngineSettings
from tlt.engine.stats import EngineStats
from tlt.models.hf.module import module_config, module_tensors, unwrap
from tlt.models.hf.prompts import read_ids
from tlt.models.hf.tokenizer import check_prompt
from tlt.models.hf.weights import expected_shapes
from tlt.training.build.models import build_drafter_training
from tlt.training.idle.protocol import NO_TRAINING
from tlt.training.idle.work import IdleWork, build_idle_choice
from tlt.training.ranks.world import gather_objects, join_process_group, shutdown
from tlt.training.report.timeline import Timeline, shared_epoch
from tlt.training.rollout.phase import RolloutPhase
from tlt.training.rollout.protocol import BetweenTurns, Sinks
from tlt.training.rollout.result import PhaseResult
from tlt.training.rollout.work_queue import connect_work_queue


@dataclass(frozen=True)
class LiveSettings:
    """The own engine beside another trainer; vLLM is not available there. Raises UserError for invalid
    values.

    drafter: a drafter's folder or its name on the hub; None: drafts are retrieved from earlier responses to
        the same prompt.
    speculation: "adaptive" (chosen at every engine step), "off", or a strategy such as "4x1x4".
    dtype: of the engine, "float32", "float64" or "bfloat16"; None: the model's.
    max_batch_size: sequences that a rank decodes at a time.
    drafting: keys of the configuration section [drafter], such as {"learning_rate": 1e-4}.
    idle_share: share of a rollout's seconds in which a single rank, which is never idle, trains the drafter.
    """

    drafter: str | Path | None = None
    speculation: str = "adaptive"
    dtype: str | None = None
    max_batch_size: int = 64
    drafting: Mapping[str, Any] = field(default_factory=dict)
    idle_share: float = 0.05

    def __post_init__(self) -> None:
        name = self.drafter
        is_named = isinstance(name, str | Path) and (Path(name).is_dir() or Repository.parse(name))
        if name is not None and not is_named:
            hub = "give a drafter's folder, or its name on the Hugging Face hub"
            raise UserError(f"drafter: {self.drafter} does not exist; {hub}")
        parse_speculation(checked("speculation", self.speculation, str))
        if checked("dtype", self.dtype, str | None) is not None:
            resolve_dtype(str(self.dtype))
        checked("max_batch_size", self.max_batch_size, BatchSize)
        checked("idle_share", self.idle_share, Share)
        if not isinstance(self.drafting, Mapping):
            raise UserError(
                f"drafting: is {shorten(self.drafting)}; give a dict of keys of the section [drafter]"
            )
        assert self.section is not None, "keys and values are right"

    @property
    def section(self) -> DrafterSection:
        return validate(DrafterSection, {"train": self.drafter is not None, **self.drafting}, "drafting")

    def of_engine(self, policy: Tensor) -> EngineSettings:
        return EngineSettings(
            parse_speculation(self.speculation),
            dtype=resolve_dtype(self.dtype or str(policy.dtype).removeprefix("torch.")),
            device=policy.device,
            max_batch_size=self.max_batch_size,
            drafting=self.section,
            borrows=True,
        )


class LiveRollouts:
    """Generates with the weights that a module has at the moment of the call. In a default process group
    every rank makes one and takes part in every call.

    model: a Llama, Qwen2 or Qwen3 of transformers, not sharded, without adapters. The engine shares its
        tensors where its own layout allows, and copies the others.
    between_turns: what answers the policy between turns; None: responses of one turn.
    latest: the latest call, with all ranks' responses and times.
    seconds: this rank's seconds in it, by span.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LiveSettings | None = None,
        between_turns: BetweenTurns | None = None,
    ) -> None:
        settings = settings or LiveSettings()
        self.model = unwrap(model)
        self.config = module_config(self.model)
        self._expected = expected_shapes(self.config)
        tensors = module_tensors(self.model, self._expected)
        policy = next(iter(tensors.values()))
        self.world = world = join_process_group(policy.device)
        self.timeline = Timeline(world.rank, epoch=shared_epoch(world.rank, partial(gather_objects, world)))
        engine_settings = settings.of_engine(policy)
        named = None if isinstance(engine_settings.speculation, Off) else settings.drafter
        folder = None if named is None else resolve_model(named)
        share = settings.idle_share if world.world_size == 1 else 0.0
        with torch.random.fork_rng():  # the caller's random numbers stay as they are
            stored = None if folder is None else load_drafter(folder, self.config, tensors)
            self.engine = build_engine(
                self.config, tensors, engine_settings, stored, on_span=self.timeline.add
            )
            self.drafter_training = build_drafter_training(
                settings.section, stored, self.engine, world, self.timeline, seed=0, share=share
            )
        queue = connect_work_queue(world.store, world.rank, world.world_size, timeout=world.timeout_seconds)
        sinks = Sinks(Unscored(), lambda _: "", between_turns=between_turns or BetweenTurns())
        self._phase = RolloutPhase(world, self.engine, queue, sinks, self.timeline, lambda: False)
        trains = folder is not None and settings.section.train
        self._idle_choice = build_idle_choice(world, self.timeline.epoch.machine, False, trains)
        self._occurrences = {purpose: PromptCounts() for purpose in ("rollout", "evaluation", "generate")}
        self._num_calls = 0
        self.latest: PhaseResult | None = None
        self.seconds: dict[str, float] = {}

    @property
    def stats(self) -> EngineStats:
        return EngineStats() if self.latest is None else self.latest.stats

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        step: int,
        purpose: Purpose = "rollout",
        states: Sequence[str] = (),
    ) -> list[Rollout]:
        """A response to each of this rank's prompts (token ids), in their order. Every rank calls it, and all
        share the work.

        A repeated prompt gets a different response each time. A response's key is (params.seed, purpose,
        step, prompt, its earlier occurrences in this step and purpose on all ranks): the same calls with the
        same weights give the same tokens.

        step: updates of the policy so far.
        states: each prompt's environment before the first turn (`Turns.state`); empty: none.
        Raises UserError, on all ranks, for a prompt that the model cannot read.
        """
        told = gather_objects(self.world, ([plain(prompt) for prompt in prompts], [*states]))
        named = self._name([given for given, _ in told], step, purpose)
        groups: dict[str, list[Request]] = {}
        for of_rank, (_, begun) in zip(named, told, strict=True):
            turns: Sequence[Turns | None] = [Turns(state=state) for state in begun] or [None] * len(of_rank)
            for ((name, index), prompt), one in zip(of_rank, turns, strict=True):
                request = Request(name, index, prompt, params, purpose, step, turns=one)
                groups.setdefault(name, []).append(request)
        if not groups:
            return []
        problems = [Problem(name, requests[0].prompt_ids) for name, requests in groups.items()]
        self._num_calls += 1
        self.engine.load_policy(module_tensors(self.model, self._expected), step)
        label = f"{purpose} {step}, call {self._num_calls}"
        training = self.drafter_training if purpose == "rollout" else NO_TRAINING
        self.drafter_training.foresee(problem.prompt_ids for problem in problems)
        try:
            idle_work = IdleWork(training=training, plan=self._idle_choice.plan(self._num_calls))
            self.latest = self._phase.answer(problems, list(groups.values()), label, idle_work)
            if purpose == "rollout":
                self._idle_choice.observe(self.latest.idle_facts(), self.latest.slowdown)
        except BaseException:  # such as Ctrl-C in a notebook: the next call begins anew
            self.engine.abort()
            self._phase.queue.abandon()
            self._phase.sinks.between_turns.abandon()
            training.abandon()
            raise
        self.seconds = defaultdict(float)
        for span in self.timeline.spans:
            self.seconds[span.name] += span.end - span.start
        self.timeline.clear()
        rollouts = {id_of(rollout): rollout for rollout in self.latest.rollouts}
        return [rollouts[response_id] for response_id, _ in named[self.world.rank]]

    def restart(self, purpose: Purpose) -> None:
        """Resets this purpose's prompt counts: a repeated evaluation draws the same noise. Every rank calls
        it."""
        self._occurrences[purpose] = PromptCounts()

    def save_drafter(self, folder: str | Path) -> None:
        """For this class, `tlt train` or another engine to load. One rank calls it."""
        self.drafter_training.save(Path(folder), {})

    def close(self) -> None:
        """Every rank calls it, at the end."""
        world = self.world
        del self._phase, self.drafter_training, self.engine
        shutdown(world)

    def _name(
        self, prompts: Sequence[Sequence[Any]], step: int, purpose: Purpose
    ) -> list[list[tuple[ResponseId, tuple[int, ...]]]]:
        counts = self._occurrences[purpose]
        read = [
            [self._read(prompt, f"prompt {n} of rank {rank}") for n, prompt in enumerate(given, start=1)]
            for rank, given in enumerate(prompts)
        ]
        return [[(counts.next(step, prompt_name(prompt)), prompt) for prompt in given] for given in read]

    def _read(self, prompt: Any, place: str) -> tuple[int, ...]:
        ids = read_ids(prompt, place)
        check_prompt(ids, place, vocab_size=self.config.vocab_size, window=self.config.max_positions)
        return ids


class PromptCounts:
    def __init__(self) -> None:
        self._step = -1
        self._seen: Counter[str] = Counter()

    def next(self, step: int, name: str) -> ResponseId:
        if step != self._step:
            self._step = step
            self._seen.clear()
        self._seen[name] += 1
        return name, self._seen[name] - 1


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """The same on all ranks and in all runs."""
    text = ",".join(map(str, prompt_ids))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Unscored:
    """Scores nothing: the caller computes the rewards."""

    by_group = False

    def __init__(self) -> None:
        self._ids: list[ResponseId] = []

    def submit(
        self,
        response_id: ResponseId,
        problem: Mapping[str, Any],
        text: str,
        token_ids: Sequence[int],
        step: int,
        turns: Turns | None = None,
    ) -> None:
        self._ids.append(response_id)

    def complete(self, group: Sequence[ResponseId]) -> None: ...

    def withdraw(self, response_ids: Iterable[ResponseId]) -> None: ...

    def collect(self) -> dict[ResponseId, Reward]:
        return {}

    def drain(self, patience: float) -> dict[ResponseId, Reward]:
        ids, self._ids = self._ids, []
        return {response_id: Reward(0.0, False, "rewards are the caller's") for response_id in ids}

    def abandon(self) -> None:
        self._ids.clear()
