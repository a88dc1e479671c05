"""vLLM's memory where it sleeps between rollouts, on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tlt.engine.vllm.link import Link
from tlt.engine.vllm.weights import Weights


class PretendLlm:
    """Asleep, it has no memory and begins no request."""

    def __init__(self) -> None:
        self.is_asleep, self.loaded, self.begun = False, list[str](), list[str]()

    def sleep(self, level: int) -> None:
        assert level == 1
        self.is_asleep = True

    def wake_up(self) -> None:
        self.is_asleep = False

    def begin(self, is_drafter: bool) -> None:
        assert not self.is_asleep

    def carry(self, is_drafter: bool, part: Mapping[str, Tensor]) -> None:
        self.loaded += part

    def end(self, is_drafter: bool) -> None:
        assert not self.is_asleep

    def call(self, name: str, *given: Any) -> list[Any]:
        return [(0.0, ())]

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        assert not self.is_asleep
        self.begun.append(name)
        return name


def test_a_drafter_that_comes_while_vllm_sleeps_wakes_it_for_that_time() -> None:
    llm: Any = PretendLlm()
    weights = Weights(llm, llm.call, llm)
    weights.load_drafter({"a": torch.ones(1)})
    assert not llm.is_asleep
    weights.sleep()
    weights.load_drafter({"b": torch.ones(1)})
    assert (llm.is_asleep, llm.loaded) == (True, ["a", "b"])


def test_a_request_wakes_it_also_where_no_policy_came_since() -> None:
    """As after an evaluation."""
    llm: Any = PretendLlm()
    link: Any = object.__new__(Link)
    link.weights, link._engine, link._internal_ids = Weights(llm, llm.call, llm), llm, {}
    link._request_params = lambda *given: None
    link.weights.sleep()
    link.add("one", (1, 2), 4, (), {})
    assert (llm.is_asleep, llm.begun) == (False, ["one"])
