"""Is the drafter fit to draft? Steps end with a measurement; what fails it is set aside.

    this step's update ── finite on every rank? ── no ─▶ undone: back to the last finite version ─┐
                                │ yes                                                             │ set aside: retrieval
                            published ─▶ the engine's copy on this step's responses               │ drafts until a
                                             ├ differs from the trainer's copy ─▶ error           │ measurement is passed
                                             ├ below retrieval on the same positions ─────────────┘
                                             └ passed ─▶ drafts in the next step

A response is sent through the engine's target once, which gives p, the distribution its next token was drawn from; the
drafter, teacher-forced on the same tokens, gives q. The measure is sum_v min(p, q): what one draft can be accepted with at
best, whichever strategies the tuner happened to choose, and without the noise of the tokens drawn. All decisions are made
from numbers gathered from all ranks, so that all ranks decide alike. Where steps are so short that measuring is dear, only
every so many of them measure acceptance; the rest is checked in each. Knows neither ranks nor engines: what it needs of them
are arguments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.drafter.model import DraftModel, PackedDrafter, align, training_capture
from tlt.drafter.trainer import DrafterTrainer
from tlt.models.attention import PackedCausal
from tlt.models.packed import PackedTransformer
from tlt.types import DrafterCheck, DrafterReport, Rollout

CANARY_TOKENS = 256
"""Tokens of responses that each rank measures per step; their prompts are read besides."""

ARRIVAL_TOKENS = 16
"""As many where acceptance is not measured: enough to see whether the engine's copy is the trainer's."""

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative distance allowed between the logits of the engine's copy, by its dtype, and of the trainer's float32 copy."""


class Served(Protocol):
    """The learned drafter as the engine has it."""

    @property
    def model(self) -> PackedDrafter: ...

    @property
    def version(self) -> int: ...

    def load(self, tensors: dict[str, Tensor], version: int) -> None: ...


Retrieve = Callable[[Sequence[Rollout], Sequence[int]], int]
"""(responses to one prompt, tokens of each that count) → how many of these tokens retrieval alone would have drafted."""


@dataclass(frozen=True)
class Sample:
    """Some responses that have gone through the target. `is_response_M` marks the R pairs that predict a token of a response
    (models.drafter.align says what a pair is); target_RV is the distribution that token was drawn from."""

    token_ids_N: Tensor
    captured_NF: Tensor
    lengths: tuple[int, ...]
    is_response_M: Tensor
    target_RV: Tensor


@dataclass(frozen=True)
class Tally:
    """What one rank measured, sums over its positions. `distance`: between the engine's and the trainer's copy."""

    num_positions: int = 0
    accepted: float = 0.0
    retrieved: int = 0
    distance: float = 0.0
    checksum: float = 0.0


class DrafterWatch:
    """Publishes the drafter, measures it, and decides whether it drafts and whether it is trained.

    model, trainer: the copy that is trained, and by whom (None: it stays as it is).
    served, set_aside: the engine's copy, and the switch that makes the engine draft without it.
    gather: every rank's value on every rank.  average: as collectives.average_weighted, without the world.
    gate: training is skipped in the step after one whose acceptance is not lower than after the last training by more than
        this; None: never skipped.
    check_every: steps between two measurements of acceptance, the first step's included. What they decide holds until the next.
    """

    def __init__(
        self,
        model: DraftModel,
        trainer: DrafterTrainer | None,
        target: PackedTransformer,
        served: Served,
        set_aside: Callable[[bool], None],
        retrieve: Retrieve,
        gather: Callable[[Any], list[Any]],
        average: Callable[[Sequence[Tensor], float], float],
        *,
        rank: int = 0,
        gate: float | None = None,
        check_every: int = 1,
    ) -> None:
        self.model, self.trainer, self.target, self.served = model, trainer, target, served
        self._set_aside, self.retrieve, self.gather, self.average = set_aside, retrieve, gather, average
        self.rank, self.gate, self.check_every = rank, gate, check_every
        self.reason_aside = ""  # why the drafter is set aside; empty: it is in service
        self.reason_skipped = ""  # why the next step does not train; empty: it does
        self.level: float | None = None  # acceptance first measured after the latest training; NaN: not yet
        self._failure = ""  # of this rank's training in this step
        self._is_limited = False  # this rank could have trained more in this step, but for drafter.max_passes
        self._num_checks = 0
        self._keep()

    # ── while the step goes on ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def trains(self) -> bool:
        """Whether this step trains the drafter."""
        return self.trainer is not None and not self.reason_skipped

    def run(self, session: Callable[[], DrafterReport]) -> DrafterReport:
        """A session of training. One that meets a number that is not finite ends the training of this step."""
        if self._failure:
            return DrafterReport()
        try:
            report = session()
        except FloatingPointError as error:
            self._failure = str(error)
            return DrafterReport()
        self._is_limited |= report.is_limited
        return report

    def abandon(self) -> None:
        """The step was broken off: what was trained in it is dropped, as its responses are."""
        self._failure, self._is_limited = "", False
        if self.trainer is not None:
            self._undo(self.served.version)

    # ── at its end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def end_step(self, rollouts: Sequence[Rollout], num_tokens: int, temperature: float) -> DrafterCheck:
        """Every rank calls this with the same responses, all that the step brought, and the tokens it trained on itself.
        Raises RuntimeError where the drafter did not arrive in an engine, or not the same on all ranks."""
        was_aside, trained = self.reason_aside, self.trains
        found: list[tuple[str, int, bool]] = self.gather((self._failure, self.served.version, self._is_limited))
        failures, versions, limits = zip(*found, strict=True)
        self._failure, self._is_limited = "", False
        failure = next(filter(None, failures), "")
        version = max(versions)  # engines that were refreshed meanwhile are ahead of the others
        is_published = False
        if trained and not failure:
            is_published, failure = self._publish(num_tokens, version + 1)
        if failure:
            self._undo(version)
        is_due = self._num_checks % self.check_every == 0
        tallies: list[Tally] = self.gather(self._measure(rollouts, temperature, is_due))
        _check_arrival(tallies, self.served.version, TOLERANCE[self.served.model.dtype])
        num_positions = sum(tally.num_positions for tally in tallies)
        acceptance, retrieval = math.nan, math.nan
        if num_positions:
            acceptance = sum(tally.accepted for tally in tallies) / num_positions
            retrieval = sum(tally.retrieved for tally in tallies) / num_positions
            self.reason_aside = judge(acceptance, retrieval)
        if failure:
            self.reason_aside = failure
        self._set_aside(bool(self.reason_aside))
        training = "off"
        if self.trainer is not None:
            training = self._outcome(is_published, failure, any(limits))
        if is_published or (self.level is not None and math.isnan(self.level)):
            self.level = acceptance
        if is_due or num_positions:
            self.reason_skipped = self._gate(acceptance)
        self._num_checks += 1
        return DrafterCheck(
            self.served.version, acceptance, retrieval, training, self.reason_aside, bool(self.reason_aside) != bool(was_aside)
        )

    def _outcome(self, is_published: bool, failure: str, is_limited: bool) -> str:
        if failure:
            return f"undone: {failure}"
        if self.reason_skipped:
            return f"skipped: {self.reason_skipped}"
        if not is_published:
            return "no idle time"
        return "trained; max_passes reached" if is_limited else "trained"

    def _gate(self, acceptance: float) -> str:
        """Why the next step need not train; empty: it trains."""
        if self.gate is None or self.level is None or self.reason_aside or not acceptance >= self.level - self.gate:
            return ""
        return f"acceptance {acceptance:.3f} has not fallen by more than {self.gate:g} from {self.level:.3f}"

    def _publish(self, num_tokens: int, version: int) -> tuple[bool, str]:
        """Averages the ranks' drafters and hands the result to the engine: (whether anybody had trained, what is wrong)."""
        assert self.trainer is not None
        shared = self.trainer.shared_tensors()
        if self.average(shared, num_tokens) == 0:
            return False, ""
        if not all(bool(tensor.isfinite().all()) for tensor in shared):
            return False, "its weights are not finite after training"
        self.served.load(self.model.state_dict(), version)
        self._keep()
        return True, ""

    def _keep(self) -> None:
        """Remembers the drafter and its optimizer as they are: the last version known to be finite."""
        self._kept = [tensor.clone() for tensor in self.trainer.shared_tensors()] if self.trainer is not None else []
        self._kept_tokens = self.trainer.num_tokens if self.trainer is not None else 0
        self._kept_version = self.served.version

    def _undo(self, version: int) -> None:
        """Trainer and optimizer go back to what `_keep` remembers, and so does the engine where drafters were refreshed
        meanwhile (`version`: the latest of any engine); else its copy never left it."""
        assert self.trainer is not None, "only training can fail"
        for tensor, kept in zip(self.trainer.shared_tensors(), self._kept, strict=True):
            tensor.copy_(kept)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        self.trainer.num_tokens = self._kept_tokens
        if version != self._kept_version:
            self.served.load(self.model.state_dict(), version + 1)
            self._kept_version = version + 1

    # ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _measure(self, rollouts: Sequence[Rollout], temperature: float, is_due: bool = True) -> Tally:
        """This rank's part: a random few of the responses, others on every rank and in every step. Not due: fewer, and no
        position counts unless the drafter's outputs are not finite."""
        checksum = float(sum(parameter.double().sum() for parameter in self.model.parameters()))
        max_tokens = CANARY_TOKENS if is_due else ARRIVAL_TOKENS
        counts = draw(rollouts, max_tokens, random.Random(f"{self._num_checks}/{self.rank}"))
        if not counts:
            return Tally(checksum=checksum)
        chosen = [(rollouts[index], count) for index, count in counts.items()]
        sample = read(chosen, self.target, training_capture(self.model.config, self.target.config.num_layers), temperature)
        ours_RV, theirs_RV = (
            engine_logits(self.served.model, self.target, sample),
            trainer_logits(self.model, self.target, sample),
        )
        is_sound = bool(theirs_RV.isfinite().all())  # where not even the trainer's are, nothing can be told from a distance
        distance = float((ours_RV - theirs_RV).norm() / theirs_RV.norm()) if is_sound else 0.0
        if not is_due and bool(ours_RV.isfinite().all()):
            return Tally(distance=distance, checksum=checksum)
        kept = self.served.model.token_ids
        target_RV = sample.target_RV if kept is None else sample.target_RV[:, kept]
        overlap = torch.minimum(target_RV, distribution(ours_RV, temperature)).sum()
        groups: dict[str, list[tuple[Rollout, int]]] = {}
        for index, rollout in enumerate(rollouts):
            groups.setdefault(rollout.problem_id, []).append((rollout, counts.get(index, 0)))
        drawn = [group for group in groups.values() if any(count for _, count in group)]
        retrieved = sum(self.retrieve([r for r, _ in group], [count for _, count in group]) for group in drawn)
        return Tally(len(sample.target_RV), float(overlap), retrieved, distance, checksum)

    # ── across restarts ──────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        return {"aside": self.reason_aside, "skipped": self.reason_skipped, "level": self.level, "checks": self._num_checks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """After model and trainer have been restored."""
        self.reason_aside, self.reason_skipped = state["aside"], state["skipped"]
        self.level, self._num_checks = state["level"], state["checks"]
        self._set_aside(bool(self.reason_aside))
        self._keep()


# ── the measure ──────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(acceptance: float, retrieval: float) -> str:
    """Why a drafter with this acceptance must not draft; empty: it may."""
    if not math.isfinite(acceptance):
        return "its outputs are not finite"
    if acceptance < retrieval:
        return f"its acceptance {acceptance:.3f} is below retrieval's {retrieval:.3f}"
    return ""


def draw(rollouts: Sequence[Rollout], max_tokens: int, rng: random.Random) -> dict[int, int]:
    """Index of each chosen response → how many of its tokens count: whole responses until the tokens are used up; what does not
    fit is cut off. Prompts are free: however long they are, something is measured. A prompt of one token has no pair for the
    first response token; it is not chosen."""
    counts: dict[int, int] = {}
    for index in rng.sample(range(len(rollouts)), len(rollouts)):
        count = min(len(rollouts[index].token_ids), max_tokens)
        if count > 0 and len(rollouts[index].prompt_ids) > 1:
            counts[index] = count
            max_tokens -= count
    return counts


def read(
    chosen: Sequence[tuple[Rollout, int]], target: PackedTransformer, capture: tuple[int, ...], temperature: float
) -> Sample:
    """One packed forward of the target over prompts and the response tokens that count, the last of each excepted."""
    rows = [[*rollout.prompt_ids, *rollout.token_ids[: count - 1]] for rollout, count in chosen]
    token_ids_N = torch.tensor([token for row in rows for token in row], device=target.device)
    attend = PackedCausal(target.config, [len(row) for row in rows])
    features_NE, captured_NF = target.forward_capturing(token_ids_N, attend.positions(target.device), attend, capture)
    pairs = align([len(row) for row in rows], target.device)
    first = [len(rollout.prompt_ids) - 2 for rollout, _ in chosen]  # pair t predicts token t + 2
    is_response_M = torch.cat([torch.arange(len(row) - 1) >= start for row, start in zip(rows, first, strict=True)])
    is_response_M = is_response_M.to(target.device)
    target_RV = distribution(target.logits(features_NE[pairs.token_index_M[is_response_M]]), temperature)
    return Sample(token_ids_N, captured_NF, tuple(len(row) for row in rows), is_response_M, target_RV)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at the temperature, in float64; at temperature 0 all on the likeliest token. NaN stays NaN."""
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double() + 0.0 * logits.double()
    return (logits.double() / temperature).softmax(dim=-1)


def engine_logits(drafter: PackedDrafter, target: PackedTransformer, sample: Sample) -> Tensor:
    """[R, draft vocabulary], float64."""
    pairs = align(sample.lengths, target.device)
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M])
    hidden_ME = drafter.fuse(sample.captured_NF[pairs.feature_index_M])
    attend = PackedCausal(drafter.config.layer, pairs.lengths)
    hidden_ME = drafter.forward(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    return drafter.logits(hidden_ME[sample.is_response_M], target).double()


def trainer_logits(model: DraftModel, target: PackedTransformer, sample: Sample) -> Tensor:
    """The same of the copy that is trained, in its own dtype."""
    pairs, dtype = align(sample.lengths, target.device), next(model.parameters()).dtype
    embeddings_ME = target.embed(sample.token_ids_N[pairs.token_index_M]).to(dtype)
    hidden_ME = model.fuse(sample.captured_NF[pairs.feature_index_M].to(dtype))
    attend = PackedCausal(model.config.layer, pairs.lengths)
    hidden_ME = model(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    head_VE = model.lm_head.weight if model.config.owns_head else model.restrict(target.head_VE.to(dtype))
    return model.logits(hidden_ME[sample.is_response_M], head_VE).double()


def _check_arrival(tallies: Sequence[Tally], version: int, tolerance: float) -> None:
    for rank, tally in enumerate(tallies):
        if tally.checksum != tallies[0].checksum:
            raise RuntimeError(
                f"drafter version {version}: rank {rank} holds other weights than rank 0 "
                f"(their sums are {tally.checksum!r} and {tallies[0].checksum!r}); the average did not arrive"
            )
        if not tally.distance <= tolerance:
            raise RuntimeError(
                f"drafter version {version} did not arrive in rank {rank}'s engine: its outputs are {tally.distance:.1e} away "
                f"from the trainer's, where {tolerance:.0e} is allowed"
            )
