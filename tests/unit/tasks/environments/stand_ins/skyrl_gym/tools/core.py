"""Tools and their groups, which hold lambdas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class tool:
    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else lambda *values: self.func(instance, *values)


class ToolGroup:
    def __init__(self, name: str) -> None:
        self.name, self._tool_registry = name, {}
        self._register_tools()

    def _register_tools(self) -> None:
        for name in dir(self):
            if isinstance(getattr(type(self), name, None), tool):
                self._tool_registry[name] = getattr(self, name)

    def execute_tool(self, name: str, *values: Any) -> Any:
        return self._tool_registry[name](*values)
