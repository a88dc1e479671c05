"""The law at the rows of vLLM's batches: keys and parameters lie in slots, written once per request. Knows no vLLM.

    a request enters ─▶ slot: key, parameters        a step ─▶ rows (slot, position) ─▶ the law's tokens, log-probabilities

vLLM hands logits over row by row, several rows of one sequence where drafts are verified, in an order of its own. A row's token
depends on its slot's key and its own position alone, so the order does not matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tlt.speculative.rows import draw
from tlt.speculative.sampling import MAX_INVERSE_TEMPERATURE, BatchParams, gumbel_noise, keys_tensor
from tlt.types import Request, SamplingParams

EXTRA = "tlt"
"""The key of vLLM's `extra_args` under which our engine sends a request's own law."""

DEFAULT_TAU = 0.7
"""The drafter's temperature where nobody has found a better one."""

_BLOCK_VALUES = 1 << 13
"""Noise values of a slot that are computed at a time on a CPU, where a call costs for one position what it costs for many."""


class Sampling(Protocol):
    """What is read of vLLM's sampling parameters."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    extra_args: dict[str, Any] | None


@dataclass(frozen=True)
class RowLaw:
    """The law of one request: the key of its noise, and its sampling parameters."""

    key: tuple[int, int, int, int]
    params: SamplingParams

    @staticmethod
    def of(asked: Sampling) -> RowLaw:
        """Returns the law of a request as vLLM has it. Our engine sends it whole. For anybody else's request the key follows
        from its seed; what vLLM warms up with has none, and is drawn at random."""
        given = (asked.extra_args or {}).get(EXTRA)
        if given is not None:
            return RowLaw(tuple(given["key"]), SamplingParams(**given["params"]))
        seed = secrets.randbits(62) if asked.seed is None else asked.seed % 2**63
        top_k = max(asked.top_k, 0)  # vLLM's -1 keeps all tokens, too
        params = SamplingParams(float(asked.temperature), top_k, float(asked.top_p), float(asked.min_p), seed=seed)
        return RowLaw(Request("served", 0, (), params, "generate").key, params)

    @staticmethod
    def extra_args(request: Request) -> dict[str, Any]:
        """Returns what vLLM has to carry along with a request of our engine's."""
        p = request.params
        params = {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p}
        return {EXTRA: {"key": list(request.key), "params": params}}


_FREE = RowLaw((0, 0, 0, 0), SamplingParams())


class LawTable:
    """Draws by the law at rows of any slots.

    tau: the temperature of the drafter's distribution where drafts are drawn with the target's noise (`rank`).
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, tau: float) -> None:
        self.vocab_size, self.device, self.tau = vocab_size, device, tau
        self.laws = [_FREE] * num_slots
        self.keys_S4 = torch.zeros(num_slots, 4, dtype=torch.int64, device=device)
        self.inverse_temperature_S1 = torch.ones(num_slots, 1, device=device)
        self.noise_scale_S1 = torch.ones(num_slots, 1, device=device)
        self._params: BatchParams | None = None
        self._unwritten: set[int] = set()
        self._window = NoiseWindow(num_slots, vocab_size)
        self.recorded: list[tuple[Tensor, Tensor, Tensor]] | None = None
        """(logits [R, V], positions [R], keys [R, 4]) of every draw while somebody checks it; None: nobody does."""

    def put(self, slot: int, law: RowLaw | None) -> None:
        """Writes a slot; None: its request has left."""
        self.laws[slot] = law or _FREE
        self._window.forget(slot)
        self._unwritten.add(slot)

    def flush(self) -> None:
        """Brings what was put to the device, before the next step."""
        if self._unwritten:
            slots = sorted(self._unwritten)
            laws = [self.laws[slot] for slot in slots]
            self.keys_S4[slots] = keys_tensor([law.key for law in laws], self.device)
            inverse = [[min(1 / (law.params.temperature or 1.0), MAX_INVERSE_TEMPERATURE)] for law in laws]
            self.inverse_temperature_S1[slots] = torch.tensor(inverse, device=self.device)
            scale = [[float(law.params.temperature > 0)] for law in laws]
            self.noise_scale_S1[slots] = torch.tensor(scale, device=self.device)
            self._params = None
            self._unwritten.clear()
        if self._params is None:
            self._params = BatchParams([law.params for law in self.laws], self.device)

    @property
    def params(self) -> BatchParams:
        assert self._params is not None, "flush comes first"
        return self._params

    def draw(self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the law's tokens, int64[R], and their log-probabilities, [R]; positions: of the tokens to draw."""
        logits_RV, keys_R4 = logits_RV[:, : self.vocab_size], self.keys_S4[slots_R]  # some heads are padded
        if self.recorded is not None:
            self.recorded.append((logits_RV.clone(), positions_R.clone(), keys_R4))
        return draw(logits_RV, keys_R4, positions_R, self.params.take(slots_R), self._noise(slots_R, positions_R))

    def rank(self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor) -> Tensor:
        """Returns the tokens that a drafter guesses: the argmax of log q / tau + the target's own noise, q being the draft
        distribution at the sequence's temperature (as drafting/learned.py ranks). On a GPU it reads nothing but tensors that
        stay where they are, for vLLM may capture it in a graph."""
        noise_RV = self._noise(slots_R, positions_R)
        if noise_RV is None:
            noise_RV = gumbel_noise(self.keys_S4[slots_R], positions_R[:, None], self.vocab_size)[:, 0]
        scaled_RV = logits_RV[:, : self.vocab_size].float() * (self.inverse_temperature_S1[slots_R] / self.tau)
        return torch.addcmul(scaled_RV, noise_RV, self.noise_scale_S1[slots_R]).argmax(-1)

    def _noise(self, slots_R: Tensor, positions_R: Tensor) -> Tensor | None:
        """Returns noise computed ahead, on a CPU; None: it is computed with the draw."""
        if self.device.type != "cpu":
            return None
        return self._window.rows(slots_R, positions_R, self.keys_S4)


class NoiseWindow:
    """Keeps the noise of some positions ahead for every slot, on a CPU: one call then serves many steps."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.width = max(min(_BLOCK_VALUES // vocab_size, 128), 1)
        self.vocab_size = vocab_size
        self.starts_S = torch.full((num_slots,), -(2**40))
        self.blocks_SWV = torch.zeros(0, self.width, vocab_size)

    def forget(self, slot: int) -> None:
        self.starts_S[slot] = -(2**40)

    def rows(self, slots_R: Tensor, positions_R: Tensor, keys_S4: Tensor) -> Tensor | None:
        """Returns the noise at these positions, [R, V]; None where a block would hold too little to be worth it."""
        if self.width < 2:
            return None
        offsets_R = positions_R - self.starts_S[slots_R]
        if bool(((offsets_R < 0) | (offsets_R >= self.width)).any()):
            self._refill(slots_R, positions_R, keys_S4)
            offsets_R = positions_R - self.starts_S[slots_R]
            if bool((offsets_R >= self.width).any()):  # one sequence's rows are farther apart than a block is wide
                return None
        return self.blocks_SWV[slots_R, offsets_R]

    def _refill(self, slots_R: Tensor, positions_R: Tensor, keys_S4: Tensor) -> None:
        """Lets the block of every slot that lacks a row begin at the first of its rows."""
        firsts_S = torch.full_like(self.starts_S, 2**62).scatter_reduce_(0, slots_R, positions_R, "amin")
        lasts_S = torch.full_like(self.starts_S, -1).scatter_reduce_(0, slots_R, positions_R, "amax")
        stale_S = (lasts_S >= 0) & ((firsts_S < self.starts_S) | (lasts_S >= self.starts_S + self.width))
        stale_N = stale_S.nonzero()[:, 0]
        if len(self.blocks_SWV) <= int(stale_N.max()):
            grown = torch.zeros(len(self.starts_S), self.width, self.vocab_size)
            grown[: len(self.blocks_SWV)] = self.blocks_SWV
            self.blocks_SWV = grown
        self.starts_S[stale_N] = firsts_S[stale_N]
        positions_NW = firsts_S[stale_N, None] + torch.arange(self.width)
        self.blocks_SWV[stale_N] = gumbel_noise(keys_S4[stale_N], positions_NW, self.vocab_size)


class Slots:
    """Gives the requests of a running batch slots of the table, and takes those back whose requests are gone.

    on_enter: is told of every slot that a request has been given.
    """

    def __init__(self, table: LawTable) -> None:
        self.table = table
        self.on_enter: Callable[[int], None] = lambda _: None
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(table.laws)))[::-1]

    def enter(self, request_ids: Sequence[str], asked: Callable[[str], Sampling]) -> None:
        """Lets the batch be these requests. asked: what vLLM has of a request that is new."""
        for gone in self._slot_of.keys() - set(request_ids):
            self._free.append(slot := self._slot_of.pop(gone))
            self.table.put(slot, None)
        for request_id in request_ids:
            if request_id not in self._slot_of:
                self._slot_of[request_id] = slot = self._free.pop()
                self.table.put(slot, RowLaw.of(asked(request_id)))
                self.on_enter(slot)
        self.table.flush()

    def slot_of(self, request_id: str) -> int:
        return self._slot_of[request_id]

    def of(self, request_ids: Sequence[str]) -> Tensor:
        """Returns the slots of these requests, int64[B]."""
        return torch.tensor([self._slot_of[request_id] for request_id in request_ids], device=self.table.device)
