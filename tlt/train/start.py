"""What happens in the user's own process before the ranks start: all that can be refused is refused, in one line."""

from __future__ import annotations

from tlt.build import preset_changes
from tlt.config.schema import Config
from tlt.drafter.folder import choose_preset, load_drafter
from tlt.models.hf_config import load_model_config
from tlt.train.problems import load_problems
from tlt.train.run import device_of


def preflight(config: Config) -> None:
    """Everything that can be refused before a process is started: UserError, one line."""
    device_of(config)
    model_config = load_model_config(config.model.path)
    if config.drafter.path is not None:
        stored = load_drafter(config.drafter.path, model_config)
        choose_preset(config.drafter.preset, stored, preset_changes(config.drafter))
    load_problems(config, "train")
    if config.evaluation.num_problems:
        load_problems(config, "test")
