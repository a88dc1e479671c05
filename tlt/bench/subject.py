"""What is measured: a configuration's model and drafter, in as many engines as there are variants to compare."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.arms import ArmCosts
from tlt.config.schema import Config
from tlt.drafter.folder import load_drafter
from tlt.drafter.hybrid import drafter_kinds, make_drafter
from tlt.drafter.learned import LearnedDrafter
from tlt.drafter.model import PackedDrafter
from tlt.engine.engine import RolloutEngine
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import load_tensors
from tlt.models.tokenizer import load_tokenizer
from tlt.train.problems import load_problems, problems_of_step
from tlt.train.run import device_name
from tlt.tuning.tuner import make_tuner
from tlt.types import BatchState, Request, SamplingParams, StepOutcome, Strategy, StrategyTuner, resolve_dtype


class BestArms:
    """Hindsight: at every batch size the arm that was best at the nearest recorded one."""

    predicted_speed = None

    def __init__(self, costs: list[ArmCosts]) -> None:
        self.best = {c.batch_size: c.best for c in costs}

    def choose(self, batch: BatchState) -> Strategy:
        nearest = min(self.best, key=lambda size: abs(size - batch.num_running) / min(size, batch.num_running))
        return self.best[nearest]

    def observe(self, strategy: Strategy, batch: BatchState, outcome: StepOutcome) -> None:
        """Nothing to learn."""


class Subject:
    """Loads once; `engine(variant)` makes an engine whose tuner has seen nothing."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.run.threads_per_rank)
        self.config = config
        self.model_config = load_model_config(config.model.path)
        self.dtype, self.device = resolve_dtype(config.run.dtype), torch.device(device_name(config))
        master = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.tensors = load_tensors(config.model.path, self.model_config, master)
        path = config.drafter.path
        self.drafter = None if path is None else load_drafter(path, self.model_config, self.tensors)
        self.kinds = drafter_kinds(self.drafter is not None)
        self.problems = load_problems(config, "train")
        s = config.sampling
        stop_ids = load_tokenizer(config.model.path).stop_ids
        self.params = SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p, s.max_tokens, stop_ids, config.run.seed)

    def tuner(self, variant: str) -> StrategyTuner | None:
        """`off`, `adaptive` (the cost model), `beg-mab`, or a fixed strategy."""
        if variant == "beg-mab":
            return make_tuner("adaptive", self.kinds, "beg-mab")
        return make_tuner(variant, self.kinds)

    def engine(self, variant: str | StrategyTuner, max_batch_size: int, *, ranking: str = "coupled") -> RolloutEngine:
        tuner = self.tuner(variant) if isinstance(variant, str) else variant
        engine = RolloutEngine(
            self.model_config, dtype=self.dtype, device=self.device, max_batch_size=max_batch_size, tuner=tuner
        )
        engine.load_policy(self.tensors)
        if tuner is not None:
            settings = self.config.drafter
            learned = self._learned(engine, max_batch_size, ranking)
            drafter = make_drafter(learned, max_batch_size, settings.ngram_tokens, settings.confidence_threshold)
            engine.load_drafter(drafter)
        return engine

    def _learned(self, engine: RolloutEngine, max_slots: int, ranking: str) -> LearnedDrafter | None:
        if self.drafter is None:
            return None
        packed = PackedDrafter.from_tensors(self.drafter.config, self.drafter.tensors, self.dtype, self.device)
        settings = self.config.drafter
        return LearnedDrafter(
            packed,
            engine.model,
            max_slots,
            ranking=ranking,
            tau=settings.coupling_temperature,
            confidence_threshold=settings.confidence_threshold,
            window=settings.feature_window,
        )

    def requests(self, helping: int, num: int, temperature: float | None = None) -> list[Request]:
        """The `helping`-th share of endless work: one response to each of `num` problems."""
        params = self.params if temperature is None else dataclasses.replace(self.params, temperature=temperature)
        num = min(num, len(self.problems))
        chosen = problems_of_step(self.problems, helping, num, seed=1)
        return [Request(problem.problem_id, 0, problem.prompt_ids, params, "rollout", helping) for problem in chosen]
