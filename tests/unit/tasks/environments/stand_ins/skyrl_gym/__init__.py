"""As much of skyrl-gym 0.4's interface as the adapter asks for."""

from typing import Any


def make(name: str, **settings: Any) -> Any:
    raise ValueError(f"No registered env with id: {name}")
