"""What a run learns from: problems, tokenizer and sampling law. Reading it needs no accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tlt.base.config.schema import Config
from tlt.base.types import Problem, SamplingParams
from tlt.engine.build.model import adapter_folder
from tlt.models.decoder import ModelConfig
from tlt.models.hf.tokenizer import Tokenizer
from tlt.training.build.problems import ReadProblems, describe_overlap, read_problems
from tlt.training.saved.encoded import NAMES
from tlt.training.saved.inputs import Inputs, special_tokens_of


@dataclass(frozen=True)
class RunData:
    """read: by split.
    params: the law of training responses, with the model's ends.
    """

    config: Config
    tokenizer: Tokenizer
    params: SamplingParams
    read: dict[str, ReadProblems]

    @property
    def problems(self) -> list[Problem]:
        return self.read["train"].problems

    @property
    def held_out(self) -> list[Problem]:
        return self.read["test"].problems if "test" in self.read else []

    @property
    def all_problems(self) -> list[Problem]:
        return [*self.problems, *self.held_out]

    @property
    def longest_prompt(self) -> int:
        return max(len(problem.prompt_ids) for problem in self.all_problems)

    @property
    def notes(self) -> list[str]:
        overlap = describe_overlap(self.problems, self.held_out, self.config.environment.has_factory)
        return [*chain.from_iterable(one.notes for one in self.read.values()), *filter(None, [overlap])]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def inputs(self, weights: str = "") -> Inputs:
        """weights: digest of the first policy; empty: unknown."""
        problems = {"train": self.problems, "test": self.held_out}
        special_tokens = special_tokens_of(self.tokenizer, self.params)
        folder, adapter = self.tokenizer.path, adapter_folder(self.config)
        return Inputs.of(self.config, problems, folder, weights, adapter, special_tokens)

    def write_prompts(self, folder: Path) -> None:
        """For the ranks, and a resumed run."""
        for split, one in self.read.items():
            one.encoded.write(folder / NAMES[split])


def read_run_data(config: Config, tokenizer: Tokenizer, shape: ModelConfig) -> RunData:
    params = config.sampling.params(config.run.seed, tokenizer.stop_ids)
    splits = ("train", "test") if config.evaluation.num_problems else ("train",)
    read = {split: read_problems(config, split, tokenizer, shape.max_positions) for split in splits}
    return RunData(config, tokenizer, tokenizer.with_ends(params, "sampling.stop"), read)
