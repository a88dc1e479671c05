"""TLT: train reasoning models with reinforcement learning, faster, without changing the result.

    engine = tlt.Engine.from_pretrained(
        "recipes/countdown/base", drafter="recipes/countdown/drafter", speculation="adaptive"
    )
    responses = engine.generate(["[2,9,16:5]"], samples=4, temperature=1.0, max_tokens=256, seed=0)

`import tlt` alone brings no torch: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tlt.apps.api import Engine, TrainingResult, train
    from tlt.base.config.load import load_config
    from tlt.base.config.schema import Config
    from tlt.base.strategy import Strategy
    from tlt.base.types import Request, Response, SamplingParams, UserError
    from tlt.tasks.base import Task
    from tlt.training.live import LiveRollouts, LiveSettings
    from tlt.training.saved.evaluations import Evaluation

_HOMES = {
    "tlt.apps.api": ("Engine", "TrainingResult", "train"),
    "tlt.base.config.load": ("load_config",),
    "tlt.base.config.schema": ("Config",),
    "tlt.tasks.base": ("Task",),
    "tlt.training.saved.evaluations": ("Evaluation",),
    "tlt.training.live": ("LiveRollouts", "LiveSettings"),
    "tlt.base.strategy": ("Strategy",),
    "tlt.base.types": ("Request", "Response", "SamplingParams", "UserError"),
}
"""The module that defines each public name; the imports above tell the same to type checkers."""

__all__ = [
    "Config",
    "Engine",
    "Evaluation",
    "LiveRollouts",
    "LiveSettings",
    "Request",
    "Response",
    "SamplingParams",
    "Strategy",
    "Task",
    "TrainingResult",
    "UserError",
    "__version__",
    "load_config",
    "train",
]


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'tlt' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
