"""The subject of a measurement: a configuration's model, drafter and problems, and engines for its variants.

Our own engines share one copy of the weights: a device on which the model just fits is enough.
"""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.report import side_by_side
from tlt.apps.plan.sizes import PlannedRun
from tlt.apps.run.start import plan_run
from tlt.base.config.schema import Config
from tlt.base.speculation import parse_speculation
from tlt.base.types import Request
from tlt.drafter.formats.folder import StoredDrafter, load_shape
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.engine import build_backend, build_engine, load_stored_drafter
from tlt.engine.build.model import Model, adapter_folder, drafter_folder, model_folder, open_model
from tlt.models.hf.families import load_model_config
from tlt.models.target import Target
from tlt.training.build.layout import device_of
from tlt.training.build.policy import master_dtype
from tlt.training.build.problems import load_problems, problems_of_step
from tlt.training.build.run_engine import engine_settings


class Subject:
    """Makes fresh engines and requests for them.

    model, drafter: None: read those that the configuration names.
    """

    def __init__(
        self, config: Config, model: Model | None = None, drafter: StoredDrafter | None = None
    ) -> None:
        torch.set_num_threads(config.run.threads_per_rank)
        self.config = config = side_by_side(config)
        settings = engine_settings(config, device_of(config).name)
        untrained = settings.drafting.model_copy(update={"train": False})  # keeps nothing for training
        self.settings = dataclasses.replace(settings, drafting=untrained, own_process=True)
        self.model = model or open_model(
            model_folder(config), master_dtype(config), adapter_folder(config), config.model.implementation
        )
        self.weights: Target | None = None
        self.drafter = drafter or load_stored_drafter(drafter_folder(config), self.model)
        self.problems = load_problems(config, "train")
        self.params = self.model.with_ends(config.sampling.params(config.run.seed, self.model.stop_ids))

    def engine(self, variant: str, max_batch_size: int) -> RolloutBackend:
        """Returns a fresh engine. variant: off, adaptive (with `rollout.tuner`), or a fixed strategy."""
        settings = dataclasses.replace(
            self.settings, speculation=parse_speculation(variant), max_batch_size=max_batch_size
        )
        drafter = None if variant == "off" else self.drafter
        if settings.engine == "vllm":
            return build_backend(self.model, settings, drafter)
        policy = self.weights or self.model.tensors
        engine = build_engine(self.model.config, policy, settings, drafter, decode=self.model.decode)
        self.weights = engine.target
        return engine

    def requests(self, helping: int, num: int) -> list[Request]:
        """Returns the `helping`-th share of endless work: one response to each of `num` problems."""
        chosen = problems_of_step(self.problems, helping, min(num, len(self.problems)), seed=1)
        return [Request(p.problem_id, 0, p.prompt_ids, self.params, "rollout", helping) for p in chosen]


def plan_subject(config: Config) -> PlannedRun:
    """Returns the run that the memory plan of a configuration is about."""
    model, folder = load_model_config(model_folder(config)), drafter_folder(config)
    drafter = None if folder is None else load_shape(folder, model)
    longest_prompt = max(len(problem.prompt_ids) for problem in load_problems(config, "train"))
    return plan_run(config, model, drafter, longest_prompt)
