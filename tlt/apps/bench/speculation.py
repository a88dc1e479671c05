"""Measures speculation: the same rollouts off and adaptive, in turns.

    round      0 (not counted)       1                    2
               adaptive ▕ off        off ▕ adaptive       adaptive ▕ off        …

Both engines live through all rounds: the tuner learns as in a run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlt.base.speculation import Adaptive, Off
from tlt.base.types import Request, SamplingParams, id_of
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.engine import build_backend, build_engine
from tlt.engine.build.model import Model, ModelFolder
from tlt.engine.settings import EngineSettings
from tlt.engine.stats import EngineStats
from tlt.training.report.ratio import Ratio

OFF, ADAPTIVE = "off", "adaptive"


@dataclass(frozen=True)
class Subject:
    """prompts: (problem id, token ids)."""

    model: ModelFolder
    drafter: StoredDrafter | None
    settings: EngineSettings
    prompts: Sequence[tuple[str, tuple[int, ...]]]
    params: SamplingParams
    samples: int

    def engines(self) -> dict[str, RolloutBackend]:
        """Our own engines share the weights; each vLLM gets a process of its own."""
        drafting = self.settings.drafting.model_copy(update={"train": False})
        base = dataclasses.replace(self.settings, own_process=True, drafting=drafting)
        off, adaptive = (dataclasses.replace(base, speculation=one) for one in (Off(), Adaptive()))
        if base.engine == "vllm":
            return {
                OFF: build_backend(self.model, off),
                ADAPTIVE: build_backend(self.model, adaptive, self.drafter),
            }
        assert isinstance(self.model, Model), "load_model_for refuses others"
        config, decode = self.model.config, self.model.decode
        first = build_engine(config, self.model.tensors, off, decode=decode)
        return {
            OFF: first,
            ADAPTIVE: build_engine(config, first.target, adaptive, self.drafter, decode=decode),
        }

    def requests(self, index: int, num: int) -> list[Request]:
        """Ids are unique to the round, so nothing is drafted from earlier rounds."""
        chosen = [self.prompts[(index * num + i) % len(self.prompts)] for i in range(num)]
        return [
            Request(f"{index}/{i}/{problem_id}", sample, prompt_ids, self.params, purpose="generate")
            for i, (problem_id, prompt_ids) in enumerate(chosen)
            for sample in range(self.samples)
        ]


@dataclass(frozen=True)
class TimedBatch:
    seconds: float
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class Measured:
    turns: Mapping[str, Sequence[TimedBatch]]
    stats: EngineStats

    @property
    def speedup(self) -> Ratio:
        return Ratio.between(
            *([turn.num_tokens / turn.seconds for turn in self.turns[name]] for name in (ADAPTIVE, OFF))
        )

    @property
    def num_different(self) -> int:
        pairs = zip(self.turns[OFF], self.turns[ADAPTIVE], strict=True)
        return sum(
            a != b for off, other in pairs for a, b in zip(off.token_ids, other.token_ids, strict=True)
        )


def measure(
    engines: Mapping[str, RolloutBackend],
    requests: Callable[[int], Sequence[Request]],
    num_rounds: int,
    log: Callable[[str], None] = lambda line: None,
) -> Measured:
    turns: dict[str, list[TimedBatch]] = {OFF: [], ADAPTIVE: []}
    for index in range(num_rounds + 1):
        asked = requests(index)
        order = (OFF, ADAPTIVE) if index % 2 else (ADAPTIVE, OFF)
        taken = {name: _take_turn(engines[name], asked) for name in order}
        if index == 0:
            engines[ADAPTIVE].stats = EngineStats()
            continue
        for name, turn in taken.items():
            turns[name].append(turn)
        speeds = ", ".join(f"{n} {taken[n].num_tokens / taken[n].seconds:,.1f} tokens/s" for n in turns)
        log(f"round {index} of {num_rounds}: {speeds}")
    return Measured(turns, engines[ADAPTIVE].stats)


def _take_turn(engine: RolloutBackend, requests: Sequence[Request]) -> TimedBatch:
    begun = time.perf_counter()
    rollouts = sorted(engine.generate(requests), key=id_of)
    return TimedBatch(time.perf_counter() - begun, tuple(one.token_ids for one in rollouts))
