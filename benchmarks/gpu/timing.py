"""Seconds of a call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, num_calls: int = 10, num_rounds: int = 3) -> float:
    """Returns the seconds of one call: the median of rounds of `num_calls`, after two that warm up."""
    call()
    call()
    rounds = []
    for _ in range(num_rounds):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait_for(device)
        rounds.append((time.perf_counter() - began) / num_calls)
    return statistics.median(rounds)
