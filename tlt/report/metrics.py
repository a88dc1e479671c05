"""The record of a step, one JSON line each, and the statistics that say whether training helped. Knows files and numbers only.

JSON has no NaN: a quantity that does not exist (the accept length of a step without verification) is null in the file and
NaN in the record.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from tlt.files import dumps, read_appended, write_atomically
from tlt.types import UserError

NAN = float("nan")
Number = Annotated[float, BeforeValidator(lambda value: NAN if value is None else value)]
"""A number that is null in JSON where it does not exist."""


@dataclass(frozen=True)
class LengthStats:
    """The lengths of a step's responses, in tokens (of 128, say, p95 is interpolated between the 121st and the 122nd)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    mean: Number
    p50: Number
    p95: Number
    max: int

    @staticmethod
    def of(lengths: Sequence[int]) -> LengthStats:
        if not lengths:
            return LengthStats(NAN, NAN, NAN, 0)
        return LengthStats(float(np.mean(lengths)), percentile(lengths, 50), percentile(lengths, 95), max(lengths))


@dataclass(frozen=True)
class StepRecord:
    """One RL step: a line of metrics.jsonl. Seconds are wall-clock unless said otherwise; sums run over all ranks.

    reward_mean, solve_rate: over this step's responses that could be scored, as sampled for training; NaN: none could. Like
        `num_responses` and `num_tokens` they count the groups that dynamic sampling discarded.
    algorithm: by name.
    groups_sampled: problems of the step, each as often as it was sampled.  groups_discarded: of those, not in the update.
    resample_rounds: rounds of dynamic sampling after the first.
    recalled_tokens: tokens of the responses that an earlier attempt generated; the step found them in the journal.
    reward_errors: responses that could not.  first_reward_error: why the first one could not; empty: all could.
    reward_parts: reward function → mean, before its weight, over the responses to which it applied; empty without
        rewards.functions.  reward_metrics: what they logged → mean.
    reward_by_task, solve_rate_by_task: by the problems' column `task`, as a mixture gives it; empty without.
    truncated_share: of responses that reached their token limit.  zero_variance_groups: groups that give no gradient.
    engine_trainer_logprob_gap: mean |log-probability by the engine - by the trainer| over response tokens. Like `entropy` an
        estimate where most responses have no advantage (rl/update.py, SAMPLED_TOKENS).
    cpu_seconds: processor time of all ranks.
    idle_seconds: without work, up to the last token of all, summed over ranks.
    drafter_train_seconds: of those, spent training the drafter.  harvested_share: their quotient.
    drafter_tokens: trained on.  drafter_captured_tokens: of those, with features that the engine captured while generating.
    drafter_recomputed_tokens: that went through the target again for their features.
    num_migrated: responses that a rank which had run dry took over, each as often as it moved.
    ahead_seconds, ahead_tokens: idle seconds in which responses of later steps were generated, and their tokens.
    followed_by_age: tokens of this step that were drafted from references and kept, by the updates between the two policies;
        "replay": from another run's.
    won_seconds: by that, summed over ranks: what those tokens would have taken without, as the tuner predicts, less what they
        took.
    idle_seconds_by_use: seconds without work until the phase's end, summed over ranks: ahead, train, rest.
    idle_gain, idle_cost: by use, seconds by which a step becomes shorter, and longer, for every second that a rank spends on
        it, as measured so far (docs/ahead.md).
    num_preemptions: sequences that had to wait again for want of memory (rollout.kv_gib).
    num_reread_tokens: of those, the tokens that were read once more.
    preemption_seconds: from the last response's end to the return of the drafter's trainer, for every rank that trained then.
    accept_length: tokens committed per verification, the bonus token included, OFF steps excluded.
    accept_by_depth: survival to depth 1, 2, …, of the verifications that drafted so deep
    draft_acceptance_rate, draft_mean_acceptance_length, draft_acceptance_rate_pos: as vLLM counts them (engine/stats.py),
        the last for positions 1, 2, …
    strategy_seconds: engine seconds under each strategy, "off" included.
    strategy_speed: tokens per second of the engine steps under each.  strategy_predicted: what the tuner expected of them.
    tokens_per_second: response tokens / rollout seconds.
    drafter_acceptance: sum_v min(p, q) per response token at the end of the step, with the drafter the next one drafts with;
        like `retrieval_acceptance` NaN in steps that measure nothing (drafter.check_every).
    retrieval_acceptance: share of the same tokens that retrieval would have drafted.
    drafter_training: "trained", "trained; max_passes reached" (idle time was left), "no idle time", "off", or
        "undone: …" with the reason.
    drafter_vocabulary: tokens that the drafter could propose in this step; 0: there is no drafter, or its head is its own.
    drafter_coverage: the part of the step's response tokens among them; the others could be sampled, but not drafted.
    finished_at: Unix time.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    reward_mean: Number
    solve_rate: Number
    num_responses: int
    num_tokens: int
    response_tokens: LengthStats
    truncated_share: Number
    zero_variance_groups: int
    loss: Number
    grad_norm: Number
    entropy: Number
    clip_fraction: Number
    kl: Number
    lr: Number
    engine_trainer_logprob_gap: Number
    rollout_seconds: Number
    update_seconds: Number
    step_seconds: Number
    cpu_seconds: Number
    idle_seconds: Number
    drafter_train_seconds: Number
    harvested_share: Number
    drafter_loss: Number
    drafter_tokens: int
    drafter_captured_tokens: int
    drafter_recomputed_tokens: int
    preemption_seconds: tuple[Number, ...]
    accept_length: Number
    accept_by_depth: tuple[Number, ...]
    strategy_seconds: dict[str, Number]
    strategy_speed: dict[str, Number]
    strategy_predicted: dict[str, Number]
    tokens_per_second: Number
    policy_version: int
    drafter_version: int
    finished_at: Number
    num_migrated: int = 0
    ahead_seconds: Number = 0.0
    ahead_tokens: int = 0
    followed_by_age: dict[str, int] = field(default_factory=dict)
    won_seconds: Number = 0.0
    idle_seconds_by_use: dict[str, float] = field(default_factory=dict)
    idle_gain: dict[str, float] = field(default_factory=dict)
    idle_cost: dict[str, float] = field(default_factory=dict)
    num_preemptions: int = 0
    num_reread_tokens: int = 0
    drafter_acceptance: Number = NAN
    retrieval_acceptance: Number = NAN
    drafter_training: str = "off"
    drafter_vocabulary: int = 0
    drafter_coverage: Number = NAN
    draft_acceptance_rate: Number = NAN
    draft_mean_acceptance_length: Number = NAN
    draft_acceptance_rate_pos: tuple[Number, ...] = ()
    reward_errors: int = 0
    first_reward_error: str = ""
    algorithm: str = ""
    groups_sampled: int = 0
    groups_discarded: int = 0
    resample_rounds: int = 0
    recalled_tokens: int = 0
    reward_parts: dict[str, Number] = field(default_factory=dict)
    reward_metrics: dict[str, Number] = field(default_factory=dict)
    reward_by_task: dict[str, Number] = field(default_factory=dict)
    solve_rate_by_task: dict[str, Number] = field(default_factory=dict)

    def to_json(self) -> str:
        return dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> StepRecord:
        """Raises ValueError, naming the fields, where they are not those of a StepRecord, or of an older TLT's."""
        if any(f'"{name}"' in line for name in _RETIRED):
            line = json.dumps({name: value for name, value in json.loads(line).items() if name not in _RETIRED})
        try:
            return _STEP_RECORD.validate_json(line)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, fault['loc'])) or 'line'}: {fault['msg']}" for fault in error.errors())
            raise ValueError("; ".join(wrong)) from None


_STEP_RECORD = TypeAdapter(StepRecord)
_RETIRED = ("drafter_refreshes", "drafter_set_aside")
"""Fields that older records have."""


class MetricsWriter:
    """Appends one line per step and flushes it. Opening it at `first_step` drops what an earlier attempt wrote for that step
    and later ones, and a line that a kill tore: no step ever stands twice in the file."""

    def __init__(self, path: str | Path, first_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line, record in _read_lines(self.path) if record.step < first_step]
        with write_atomically(self.path) as file:
            file.writelines(line + "\n" for line in kept)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self._next_step = first_step

    def write(self, record: StepRecord) -> None:
        assert record.step >= self._next_step, f"step {record.step} after step {self._next_step - 1}"
        self._next_step = record.step + 1
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepRecord]:
    """Returns all whole records of a metrics.jsonl, also of one that is being written."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file; give the metrics.jsonl of a run")
    return [record for _, record in _read_lines(path)]


def _read_lines(path: Path) -> list[tuple[str, StepRecord]]:
    """Returns (line, record) pairs."""
    return read_appended(path, lambda line: (line, StepRecord.from_json(line)), "step record")


# -- statistics --------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the linearly interpolated percentile; NaN of nothing."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else NAN


def paired_sign_flip_test(
    before: Sequence[float],
    after: Sequence[float],
    num_permutations: int = 100_000,
    seed: int = 0,
) -> float:
    """Returns the p value of the hypothesis that training changed nothing, from one pair of scores per problem.

    Under it each difference after - before is as likely to have either sign. p = the share of sign patterns whose mean
    difference is at least the observed one (one-sided: training helped). Exact, over all 2^n patterns of the n differences
    other than 0, where these are at most `num_permutations`; otherwise from that many random patterns, the observed one
    counted among them (p is never 0; Phipson & Smyth 2010).
    """
    if len(before) != len(after):
        raise ValueError(f"paired test: {len(before)} scores before and {len(after)} after; they must be of the same problems")
    change_P = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if not np.isfinite(change_P).all():
        raise ValueError("paired test: a score is not finite")
    difference_P: NDArray[np.float64] = change_P[change_P != 0]
    num_pairs = len(difference_P)
    observed = difference_P.sum()
    slack = 1e-12 * np.abs(difference_P).sum()  # sums of the same terms in another order are ties

    def count_extreme(is_flipped_MP: NDArray[Any]) -> int:
        return int(((1.0 - 2.0 * is_flipped_MP) @ difference_P >= observed - slack).sum())

    chunk = 4096
    if num_pairs < 60 and 2**num_pairs <= num_permutations:
        num_patterns = int(2**num_pairs)
        bits_P = np.arange(num_pairs)
        patterns = (np.arange(start, min(start + chunk, num_patterns)) for start in range(0, num_patterns, chunk))
        return sum(count_extreme(pattern_M[:, None] >> bits_P & 1) for pattern_M in patterns) / num_patterns
    generator = np.random.default_rng(seed)
    num_extreme = 0
    for start in range(0, num_permutations, chunk):
        shape = (min(chunk, num_permutations - start), num_pairs)
        num_extreme += count_extreme(generator.integers(0, 2, size=shape, dtype=np.int8))
    return (1 + num_extreme) / (1 + num_permutations)
