"""Our own engine, and vLLM with our law inside it, on the same requests: do the tokens agree? If not, how
near was a tie?

    requests ─┬─▶ our engine ──▶ responses ─┐
              └─▶ vLLM ────────▶ responses ─┴─▶ first difference ─▶ float64: by how much do the two tokens' scores differ?

The tests of tests/vllm and `make gpu` share it. Starts nothing itself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.apps.audit.referee import Referee, law
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Rollout
from tlt.engine.backend import RolloutBackend
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor
from tlt.speculation.tuner.protocol import BatchState, Choice, StrategyTuner

NEAR_TIE = 1e-3
"""Difference of two tokens' scores up to which rounding in float32 may have decided between them."""

Responses = dict[tuple[str, int], Rollout]


def interpret_triton() -> None:
    """Lets vLLM's second model runner work on a CPU, by Triton's interpreter: slowly, and for trying
    alone. It must come before vLLM is imported, and holds for this process only."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    backends = __import__("triton.backends", fromlist=["backends"]).backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver, compiler = Driver, None

    backends["cpu"] = Backend()


class RandomLengths(StrategyTuner):
    """Chooses a draft length from 0 to `max_depth` at random, at every step."""

    def __init__(self, kind: str, max_depth: int, seed: int) -> None:
        self.kind, self.max_depth, self.random = kind, max_depth, random.Random(seed)

    def choose(self, batch: BatchState) -> Choice:
        depth = self.random.randint(0, self.max_depth)
        return Choice(Strategy(self.kind, depth, 1, depth) if depth else Strategy.OFF)


def answers(engine: RolloutBackend, requests: Sequence[Request]) -> Responses:
    """Returns the responses by problem and sample."""
    return {(r.problem_id, r.sample_index): r for r in engine.generate(requests)}


def step_by_step(engine: Any, requests: Sequence[Request], lengths: Iterator[int]) -> Responses:
    """Returns the responses of an engine that is vLLM, with another draft length at every single step: its
    own choice keeps a length for two steps at least."""
    tuner, engine.tuner = engine.tuner, None
    found: Responses = {}
    engine.add(requests)
    while not engine.is_idle:
        engine.link.draft(next(lengths))
        found |= {(f.rollout.problem_id, f.rollout.sample_index): f.rollout for f in engine.step()}
    engine.tuner = tuner
    return found


def random_lengths(max_depth: int, seed: int) -> Iterator[int]:
    """Yields draft lengths, 0 among them."""
    rng = random.Random(seed)
    while True:
        yield rng.randint(0, max_depth)


@dataclass(frozen=True)
class Difference:
    """The first token in which two responses differ.

    margin: by how much the two tokens' scores under the law differ, in float64; 0 where one of them lies
        on the border of the truncation, from which rounding may remove it.
    """

    problem_id: str
    sample_index: int
    position: int
    ours: int
    theirs: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


@dataclass(frozen=True)
class Comparison:
    """Two engines' responses to the same requests. Tokens behind a first difference follow another prefix,
    and do not count.

    num_equal: responses equal token for token, with the same ending.
    num_tokens: compared, first differences included.
    logprob_gap: the largest difference of two log-probabilities of the same token.
    """

    num_responses: int
    num_equal: int
    num_tokens: int
    logprob_gap: float
    differences: tuple[Difference, ...]

    @property
    def share(self) -> float:
        """Share of the compared tokens that are equal."""
        return 1 - len(self.differences) / max(self.num_tokens, 1)


def compare(requests: Sequence[Request], ours: Responses, theirs: Responses, model: Path) -> Comparison:
    """Compares response by response. model: the checkpoint folder, which decides near-ties in float64."""
    assert ours.keys() == theirs.keys() == {(r.problem_id, r.sample_index) for r in requests}, (
        "an answer to every request"
    )
    referee: Referee | None = None
    num_equal, num_tokens, gap, differences = 0, 0, 0.0, []
    for request in requests:
        key = request.problem_id, request.sample_index
        a, b = ours[key], theirs[key]
        at = first_difference(a.token_ids, b.token_ids)
        is_equal = at is None and a.finish_reason == b.finish_reason
        num_equal += is_equal
        end = len(a.token_ids) if at is None else at
        num_tokens += end + (at is not None)
        gap = max([gap, *(abs(x - y) for x, y in zip(a.logprobs[:end], b.logprobs[:end], strict=True))])
        if at is not None:
            referee = referee or Referee(model, torch.float64)
            differences.append(describe(request, at, a, b, referee))
    return Comparison(len(requests), num_equal, num_tokens, gap, tuple(differences))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Returns the index of the first token that differs, an end counting as a token; None: they are equal."""
    if tuple(ours) == tuple(theirs):
        return None
    shared = min(len(ours), len(theirs))
    return next((i for i in range(shared) if ours[i] != theirs[i]), shared)


def describe(request: Request, at: int, ours: Rollout, theirs: Rollout, referee: Referee) -> Difference:
    """Returns the difference at response token `at`, with its margin in float64."""
    if at >= min(
        len(ours.token_ids), len(theirs.token_ids)
    ):  # one ended where the other went on: no rounding does that
        return Difference(request.problem_id, request.sample_index, at, -1, -1, float("inf"))
    pair = ours.token_ids[at], theirs.token_ids[at]
    logits_V = torch.cat(list(referee.logits(request.prompt_ids, ours.token_ids[: at + 1])))[at].double()
    margin = margin_of(logits_V, request, len(request.prompt_ids) + at, pair)
    return Difference(request.problem_id, request.sample_index, at, *pair, margin)


def margin_of(logits_V: Tensor, request: Request, position: int, pair: tuple[int, int]) -> float:
    """Returns by how much the law's scores of two tokens differ. logits_V: float64."""
    params = request.params
    noise_V = gumbel_noise(keys_tensor([request.noise_key]), torch.tensor([[position]]), len(logits_V))[
        0, 0
    ].double()
    batch = BatchParams.of([params])
    scaled_V = batch.scale(logits_V[None, None])[0, 0]
    if params.temperature == 0:
        noise_V = torch.zeros_like(noise_V)
    elif params.truncates:
        judged = law(logits_V[None], params, NEAR_TIE)
        is_out = [bool(judged.logp_TV[0, token].isneginf()) for token in pair]
        is_border = [bool(judged.border_TV[0, token]) for token in pair]
        if any(out and not border for out, border in zip(is_out, is_border, strict=True)):
            return float("inf")
        if any(is_border):
            return 0.0
    scores_V = scaled_V + noise_V
    others = scores_V[[token for token in range(len(scores_V)) if token not in pair]]
    gap = float((scores_V[pair[0]] - scores_V[pair[1]]).abs())
    rivals = 0.0 if params.truncates or not len(others) else float(others.max() - scores_V[list(pair)].max())
    return max(gap, rivals)
