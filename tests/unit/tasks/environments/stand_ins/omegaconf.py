"""As much of omegaconf as the adapter of skyrl-gym asks for."""

from types import SimpleNamespace
from typing import Any


class OmegaConf:
    @staticmethod
    def create(values: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**values)
