"""The subject of a measurement: a configuration's model, drafter and problems, loaded once, and an engine for each variant."""

from __future__ import annotations

import dataclasses

import torch

from tlt.bench.report import side_by_side, with_changes
from tlt.build.engine import EngineSettings, build_backend, load_stored
from tlt.build.model import drafter_folder, load_model, model_folder
from tlt.build.policy import master_dtype, sampling_params
from tlt.config.schema import Config
from tlt.engine.backend import RolloutBackend
from tlt.training.problems import load_problems, problems_of_step
from tlt.training.run import device_of
from tlt.types import Request


class Subject:
    """Makes engines that have seen nothing, and work for them."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.run.threads_per_rank)
        self.config = config = with_changes(config, side_by_side(config))
        settings = EngineSettings.of_run(config, device_of(config).name)
        untrained = settings.drafting.model_copy(update={"train": False})  # nothing here trains: remember nothing for it
        self.settings = dataclasses.replace(settings, drafting=untrained)
        self.model = load_model(model_folder(config), master_dtype(config))
        self.drafter = load_stored(drafter_folder(config), self.model)
        self.problems = load_problems(config, "train")
        self.params = sampling_params(config, self.model.stop_ids)

    def engine(self, variant: str, max_batch_size: int) -> RolloutBackend:
        """Returns a fresh engine. variant: off, adaptive (the cost model), beg-mab, or a fixed strategy."""
        speculation, tuner = ("adaptive", "beg-mab") if variant == "beg-mab" else (variant, "cost-model")
        settings = dataclasses.replace(self.settings, speculation=speculation, tuner=tuner, max_batch_size=max_batch_size)
        return build_backend(self.model, settings, None if variant == "off" else self.drafter)

    def requests(self, helping: int, num: int) -> list[Request]:
        """Returns the `helping`-th share of endless work: one response to each of `num` problems."""
        chosen = problems_of_step(self.problems, helping, min(num, len(self.problems)), seed=1)
        return [Request(problem.problem_id, 0, problem.prompt_ids, self.params, "rollout", helping) for problem in chosen]
