"""The long-tail workload: requests whose *natural* responses have the lengths of reasoning rollouts.

    p50 : p95 : max  =  1 : 4 : 10        (log-normal up to p95, in log length)

A response's tokens depend on its key and the weights alone, so the lengths are chosen by choosing keys:
nothing is cut off, and nothing is forced past its end. The workload is a file with the model's content hash,
from which the benchmark and its peers start alike. This file knows no peer and takes no time.

    candidates ─ measure_lengths ─▶ {request: length} ─ choose_requests ─▶ Workload ─ write ─▶ longtail.json ─ read ─▶
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tlt.base.io.files import write_atomically
from tlt.base.types import LAW_VERSION, Problem, Request, SamplingParams, UserError
from tlt.engine.own.engine import RolloutEngine
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import content_hash, load_tensors

P95, MAX = 4.0, 10.0
"""The shape, in units of the median."""


@dataclass(frozen=True)
class LengthShape:
    """Order statistics by nearest rank: p95 is the smallest length that at least 95 % do not exceed."""

    p50: int
    p95: int
    longest: int

    @staticmethod
    def of(lengths: Sequence[int]) -> LengthShape:
        ordered = sorted(lengths)
        rank = {share: math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.95)}
        return LengthShape(ordered[rank[0.5]], ordered[rank[0.95]], ordered[-1])

    def __str__(self) -> str:
        ratios = f"1 : {self.p95 / self.p50:.2f} : {self.longest / self.p50:.2f}"
        return f"p50 {self.p50}, p95 {self.p95}, max {self.longest} ({ratios})"


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are submitted, each with the number of tokens its response has."""

    name: str
    model_hash: str
    """`content_hash` of the checkpoint's tensors as they are stored."""
    requests: tuple[Request, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def shape(self) -> LengthShape:
        return LengthShape.of(self.lengths)


def hash_model(path: Path) -> str:
    return content_hash(load_tensors(path, load_model_config(path)))


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────────


def target_ratios(num: int) -> list[float]:
    """The `num` lengths of the shape in ascending order, in units of the median: the quantiles (i + 1/2) /
    num of a log-normal up to p95; beyond it, log length grows linearly with the normal quantile and ends
    at the maximum."""
    if num < 20:
        raise UserError(f"longtail: {num} requests have no 95th percentile of their own; ask for at least 20")
    z95, z_last = (NormalDist().inv_cdf(share) for share in (0.95, 1 - 0.5 / num))
    below, above = math.log(P95) / z95, math.log(MAX / P95) / (z_last - z95)
    quantiles = (NormalDist().inv_cdf((i + 0.5) / num) for i in range(num))
    return [math.exp(below * min(z, z95) + above * max(z - z95, 0.0)) for z in quantiles]


def choose_requests(candidates: Mapping[Request, int], num: int) -> dict[Request, int]:
    """`num` of the candidates with lengths as close to the shape as they allow, in the order of `candidates`.

    candidates: natural response lengths; those that reach their request's max_tokens were cut off and are
        left out. Among medians from 8 tokens to a tenth of the longest candidate, and among assignments of
        candidates to the wanted lengths, the least sum of squared differences in log length wins. A pure
        function of its arguments.
    """
    natural = sorted(
        ((request, length) for request, length in candidates.items() if length < request.params.max_tokens),
        key=lambda item: (item[1], item[0].problem_id, item[0].policy_step, item[0].sample_index),
    )
    ratios = np.log(target_ratios(num))
    if len(natural) < num:
        raise UserError(
            f"longtail: {len(natural)} candidates ended by themselves but {num} are wanted; measure more"
        )
    logs_M = np.log([length for _, length in natural])
    highest = max(natural[-1][1] / MAX, 8.0)
    medians = np.geomspace(highest, 8.0, num=max(int(math.log(highest / 8.0) / 0.04), 1))
    fits = [_assign(np.log(median) + ratios, logs_M) for median in medians]
    best = min(range(len(fits)), key=lambda i: fits[i][0])  # the longest of equals, since medians descend
    chosen = {natural[column][0] for column in fits[best][1]}
    return {request: length for request, length in candidates.items() if request in chosen}


def _assign(targets_N: np.ndarray[Any, Any], logs_M: np.ndarray[Any, Any]) -> tuple[float, list[int]]:
    """The least squared distance from the targets to distinct candidates, both ascending, and the candidates'
    columns.

    Sorted values are best matched in order, so D[i, j], the least cost of the first i targets within the
    first j candidates, is min(D[i, j-1], D[i-1, j-1] + cost[i, j]): a running minimum per target.
    """
    least_M = np.zeros(len(logs_M) + 1)
    taken_NM = []
    for target in targets_N:
        ending_M = least_M[:-1] + (logs_M - target) ** 2
        least_M = np.concatenate(([np.inf], np.minimum.accumulate(ending_M)))
        taken_NM.append(ending_M == least_M[1:])
    columns, end = [], len(logs_M)
    for taken_M in reversed(taken_NM):
        end = int(np.flatnonzero(taken_M[:end])[-1])
        columns.append(end)
    return float(least_M[-1]), columns[::-1]


def measure_lengths(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    params: SamplingParams,
    num_candidates: int,
    on_response: Callable[[int], None] | None = None,
) -> dict[Request, int]:
    """Natural lengths of `num_candidates` responses, the first samples of all problems before their second
    ones.

    on_response: receives the number of responses finished. Speculation changes the time this takes, not
        its result.
    """
    requests = [
        Request(problem.problem_id, index // len(problems), problem.prompt_ids, params, "rollout", 0)
        for index, problem in zip(range(num_candidates), _endless(problems), strict=False)
    ]
    lengths: dict[tuple[str, int], int] = {}
    for rollout in engine.generate(requests):
        lengths[rollout.problem_id, rollout.sample_index] = len(rollout.token_ids)
        if on_response is not None:
            on_response(len(lengths))
    return {request: lengths[request.problem_id, request.sample_index] for request in requests}


def _endless(problems: Sequence[Problem]) -> Any:
    while True:
        yield from problems


def make_longtail(lengths: Mapping[Request, int], num: int, model_hash: str) -> Workload:
    chosen = choose_requests(lengths, num)
    return Workload("longtail", model_hash, tuple(chosen), tuple(chosen.values()))


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────


def write_workload(path: Path, workload: Workload, made_by: str) -> None:
    """One request per line. `made_by`: the command, for whoever wants the same for another model."""
    (shared,) = {(r.params, r.purpose, r.policy_step) for r in workload.requests}
    params, purpose, policy_step = shared
    header = {
        "name": workload.name,
        "made_by": made_by,
        "lengths": str(workload.shape),
        "model_hash": workload.model_hash,
        "law_version": LAW_VERSION,
        "purpose": purpose,
        "policy_step": policy_step,
        "sampling": dataclasses.asdict(params),
    }
    lines = [
        {
            "problem_id": r.problem_id,
            "sample_index": r.sample_index,
            "length": length,
            "prompt_ids": list(r.prompt_ids),
        }
        for r, length in zip(workload.requests, workload.lengths, strict=True)
    ]
    with write_atomically(path) as file:
        file.write("{\n")
        file.writelines(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in header.items())
        file.write('"requests": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]\n}\n")


def read_workload(path: Path, model_hash: str | None = None) -> Workload:
    """The workload in `path`. Raises UserError unless it was made for the model with this hash (None:
    whatever model) and under today's sampling law; with other weights or another law the lengths would not
    be natural."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["law_version"] != LAW_VERSION:
            raise UserError(
                f"{path}: law_version is {raw['law_version']} but the law is now {LAW_VERSION}; make the "
                "file again"
            )
        listed = {key: tuple(raw["sampling"].get(key, ())) for key in ("stop_ids", "stop")}
        params = SamplingParams(**{**raw["sampling"], **listed})
        requests = tuple(
            Request(
                r["problem_id"],
                r["sample_index"],
                tuple(r["prompt_ids"]),
                params,
                raw["purpose"],
                raw["policy_step"],
            )
            for r in raw["requests"]
        )
        lengths = tuple(int(r["length"]) for r in raw["requests"])
        workload = Workload(raw["name"], raw["model_hash"], requests, lengths)
    except FileNotFoundError:
        raise UserError(
            f"{path}: does not exist; give a workload file such as recipes/countdown/longtail.json"
        ) from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path}: is no workload file ({type(error).__name__}: {error}); make it again"
        ) from None
    if not requests:
        raise UserError(f"{path}: holds no requests; make it again")
    if model_hash is not None and workload.model_hash != model_hash:
        made_for, given = workload.model_hash[:12], model_hash[:12]
        raise UserError(
            f"{path}: was made for a model with content hash {made_for}…, not {given}…; give that model, or "
            "make it again"
        )
    return workload
