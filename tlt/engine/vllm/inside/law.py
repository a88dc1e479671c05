"""The law at the rows of vLLM's batches. Imports no vLLM.

    a request enters ─▶ slot: key, parameters    a step ─▶ rows (slot, position) ─▶ the law's tokens, logprobs

Rows may come in any order, several per sequence while a draft is verified: a row's token depends only on
its slot's key and its own position.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from tlt.base.types import Request, SamplingParams, UserError, checked
from tlt.speculation.law.draw import draw, noise_to_rank_with
from tlt.speculation.law.params import MAX_INVERSE_TEMPERATURE, BatchParams, Law
from tlt.speculation.law.sampling import keys_tensor

EXTRA = "tlt"
"""Key of a request's law in vLLM's `extra_args`."""

AnySeed = Annotated[int, Ge(-(2**63)), Lt(2**63)]

_Word = Annotated[int, Ge(0), Lt(2**32)]
Words = tuple[_Word, _Word, _Word, _Word]

DEFAULT_TAU = 0.7
"""See LawTable."""

Recorded = tuple[Tensor, Tensor, Tensor]
"""A draw: logits [R, V], positions [R], keys [R, 4]."""


class VllmSamplingParams(Protocol):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    extra_args: dict[str, Any] | None


@dataclass(frozen=True)
class RowLaw:
    key: tuple[int, int, int, int]
    params: SamplingParams

    @staticmethod
    def of(asked: VllmSamplingParams) -> RowLaw:
        """Our engine sends the law whole; else the key follows from the request's seed, or is random, as in
        vLLM's warm-up. Raises UserError."""
        given = checked("extra_args", asked.extra_args or {}, dict[str, Any]).get(EXTRA)
        if given is not None:
            return RowLaw._sent(given)
        seed = secrets.randbits(62) if asked.seed is None else checked("seed", asked.seed, AnySeed) % 2**63
        top_k = min(max(checked("top_k", asked.top_k, int), 0), 2**31 - 1)  # vLLM's -1 keeps all tokens, too
        params = SamplingParams(asked.temperature, top_k, asked.top_p, asked.min_p, seed=seed)
        return RowLaw(Request("served", 0, (), params, "generate").noise_key, params)

    @staticmethod
    def _sent(given: Any) -> RowLaw:
        """The inverse of `extra_args`."""
        try:
            return RowLaw(checked("key", given["key"], Words), SamplingParams(**given["params"]))
        except (KeyError, TypeError, UserError):
            remedy = "leave it out, and give a seed"
            raise UserError(f"vllm_xargs: {EXTRA} is what engines of tlt send; {remedy}") from None

    @staticmethod
    def extra_args(request: Request) -> dict[str, Any]:
        p = request.params
        params = {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p}
        return {EXTRA: {"key": list(request.noise_key), "params": params}}


_FREE = RowLaw((0, 0, 0, 0), SamplingParams())


class LawTable:
    """Draws by the law at rows of any slots.

    tau: the drafter's temperature where drafts are ranked with the target's noise.
    on_enter: called with every slot given to a request.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, tau: float) -> None:
        self.vocab_size, self.device, self.tau = vocab_size, device, tau
        self.laws = [_FREE] * num_slots
        self.on_enter: list[Callable[[int], object]] = []
        self.keys_S4 = torch.zeros(num_slots, 4, dtype=torch.int64, device=device)
        self.inverse_temperature_S1 = torch.ones(num_slots, 1, device=device)
        self.noise_scale_S1 = torch.ones(num_slots, 1, device=device)
        self._params: BatchParams | None = None
        self._unwritten: set[int] = set()
        self.recorded: list[Recorded] | None = None
        """Draws for the self-check; None: they are not recorded."""

    def put(self, slot: int, law: RowLaw | None) -> None:
        """law: None frees the slot."""
        self.laws[slot] = law or _FREE
        self._unwritten.add(slot)
        for call in self.on_enter if law else ():
            call(slot)

    def flush(self) -> None:
        """Comes before a step's first draw."""
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
            self._params = BatchParams.of([law.params for law in self.laws], self.device)

    @property
    def params(self) -> BatchParams:
        assert self._params is not None, "flush comes first"
        return self._params

    def draw(self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens, int64[R], and log-probabilities, [R]. positions_R: of the tokens to draw."""
        logits_RV, keys_R4 = logits_RV[:, : self.vocab_size], self.keys_S4[slots_R]  # some heads are padded
        if self.recorded is not None:
            self.recorded.append((logits_RV.clone(), positions_R.clone(), keys_R4))
        return draw(logits_RV, Law(keys_R4, positions_R, self.params.take(slots_R)))

    def rank(self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor) -> Tensor:
        """Returns argmax of log q / tau + the target's noise, int64[R], with q at the sequence's temperature.
        Reads only tensors that stay in place: vLLM may capture it in a graph."""
        noise_RV = noise_to_rank_with(self.keys_S4[slots_R], positions_R, self.vocab_size)
        inverse_R1 = self.inverse_temperature_S1[slots_R] / self.tau
        scaled_RV = logits_RV[:, : self.vocab_size].float() * inverse_R1
        return torch.addcmul(scaled_RV, noise_RV, self.noise_scale_S1[slots_R]).argmax(-1)


class Slots:
    def __init__(self, table: LawTable) -> None:
        self.table = table
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(table.laws)))[::-1]

    def enter(self, request_ids: Sequence[str], asked: Callable[[str], VllmSamplingParams]) -> None:
        """asked: a new request's sampling parameters."""
        for gone in self._slot_of.keys() - set(request_ids):
            self._free.append(slot := self._slot_of.pop(gone))
            self.table.put(slot, None)
        for request_id in request_ids:
            if request_id not in self._slot_of:
                self._slot_of[request_id] = slot = self._free.pop()
                self.table.put(slot, RowLaw.of(asked(request_id)))
        self.table.flush()

    def slot_of(self, request_id: str) -> int:
        return self._slot_of[request_id]

    def of(self, request_ids: Sequence[str]) -> Tensor:
        """Returns int64[B]."""
        return torch.tensor([self._slot_of[name] for name in request_ids], device=self.table.device)
