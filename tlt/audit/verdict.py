"""Is an engine's sampling lossless? Its tokens are judged one by one against the target's exact probabilities.

    response ──▶ referee: logits at every prefix ──▶ law p_t ──▶ bets q_t(y) / p_t(y) ──▶ wealth ──▶ verdict

The judge is a game of betting (Shafer 2021; Ville 1939). Before each token y_t a gambler names distributions q_t, functions
of the prefix alone, and his wealth is multiplied by q_t(y_t) / p_t(y_t). If every token is drawn from p_t, no strategy
gains on average, and the average of K such wealths, e_t, starting at 1, obeys at every moment at once

    P(sup_t e_t ≥ 1 / alpha) ≤ alpha .

So e ≥ 1 / alpha convicts the engine with false-positive rate alpha, after however many tokens. An engine in finite
precision draws from some p̃_t with |log p̃_t(v) − log p_t(v)| ≤ tolerance instead; its expected factor is at most
1 + 2 (exp(tolerance) − 1) TV(q_t, p_t), and each factor is divided by that, so the bound covers such engines too.

The referee is transformers' own model and the truncation is written anew here: nothing of the engine judges itself.
This file knows no files and no servers; who made the responses is the caller's business.

Axes beyond those of types.py: K bets · S tokens judged per step (the engine's, then one per reference fault).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tlt.speculative.sampling import BatchParams
from tlt.speculative.verify import verify
from tlt.types import DraftTree, Rollout, SamplingParams, UserError, Verdict

IMPOSSIBLE = 1e-12
"""A token among the least likely ones, of this mass together, convicts by itself. Adds 1e-12 per token to alpha."""

TILTS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)
"""q ∝ p^λ: the engine's temperature is off by the factor 1 / λ."""
ODDS = (0.5, 0.8, 1.25, 2.0)
"""q ∝ p · c^[y in A]: a set of tokens A has its odds multiplied by c."""
EVENTS = ("stop", "argmax", "match")
SHARES = (0.001, 0.01, 0.1)
"""q = (1 − ε) p + ε r: the share ε of the tokens comes from elsewhere."""
SOURCES = ("flattened", "uniform", "n-gram model", "previous token", "match")
"""r: p at twice its temperature; any token; a model that learns online from the responses judged before; the token just
said; what followed the last tokens when they last occurred in this context (what n-gram drafting proposes)."""

BETS = (
    *(f"temperature {1 / tilt:.3g} times" for tilt in TILTS),
    *(f"odds of {event} {odds:g} times" for event in EVENTS for odds in ODDS),
    *(f"{share:g} from {source}" for source in SOURCES for share in SHARES),
)

REFERENCE_FAULT = 0.01
REFERENCE_SOURCES = ("flattened", "uniform")
"""Power is stated for these: with probability 0.01 a token is drawn from this source instead."""

_COPY_LOGPROB = -40.0
_NUM_OFFENDERS = 10
_CHUNK_LOGITS = 2**24
_POWER_TRIALS = 200
_POWER_MAX_TOKENS = 5_000_000


# --------------------------------------------------------------------------------------------------------------------
# The referee


class Referee:
    """The target, as transformers runs it: logits at every position of a response, in one plain causal forward."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: holds no model (no config.json); give a Hugging Face checkpoint folder")
        try:
            self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
        except Exception as error:  # transformers refuses by exceptions of many kinds
            message = " ".join(str(error).split())[:200]
            raise UserError(f"{folder}: transformers cannot load it ({message}); give a complete checkpoint folder") from None
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.window = int(getattr(config, "max_position_embeddings", None) or 2**31)

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Logits that each response token was drawn from, [T, V], in pieces of at most 128 MiB."""
        ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]])
        first, cache = len(prompt_ids) - 1, None
        step = max(_CHUNK_LOGITS // self.vocab_size, 16)
        begin = 0
        while begin < ids.shape[1]:
            end = min(begin + step, ids.shape[1])
            out = self.model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            if end > first:
                yield out.logits[0, max(first - begin, 0) :]
            begin = end


@dataclass(frozen=True)
class Law:
    """What the engine should draw from. logp_TV: float64, -inf for tokens that truncation removes.
    border_TV: removed, but so narrowly that an engine's rounding may keep them."""

    logp_TV: Tensor
    border_TV: Tensor


def law(logits_TV: Tensor, params: SamplingParams, tolerance: float = 0.0) -> Law:
    """logits → temperature → top-k → top-p → min-p → softmax, in float64. Temperature must be above 0."""
    scaled_TV = logits_TV.double() / params.temperature
    kept_TV = torch.ones_like(scaled_TV, dtype=torch.bool)
    if not params.truncates:
        return Law(scaled_TV.log_softmax(-1), ~kept_TV)
    wide_TV = kept_TV.clone()
    order_TV = (-scaled_TV).argsort(dim=-1, stable=True)
    ranks_TV = order_TV.argsort(dim=-1)
    if 0 < params.top_k < scaled_TV.shape[-1]:
        last_T1 = scaled_TV.topk(params.top_k).values[:, -1:]
        kept_TV = ranks_TV < params.top_k
        wide_TV = scaled_TV >= last_T1 - tolerance
    p_TV = scaled_TV.masked_fill(~kept_TV, -math.inf).softmax(-1)
    ranked_TV = p_TV.gather(-1, order_TV)
    ahead_TV = (ranked_TV.cumsum(-1) - ranked_TV).gather(-1, ranks_TV)
    if params.top_p < 1:
        kept_TV = kept_TV & (ahead_TV < params.top_p)
        wide_TV = wide_TV & (ahead_TV < params.top_p + tolerance)
    floor_T1 = scaled_TV.amax(-1, keepdim=True) + (math.log(params.min_p) if params.min_p > 0 else -math.inf)
    kept_TV = kept_TV & (scaled_TV >= floor_T1)
    wide_TV = wide_TV & (scaled_TV >= floor_T1 - tolerance)
    kept_TV = kept_TV | (ranks_TV == 0)
    return Law(scaled_TV.masked_fill(~kept_TV, -math.inf).log_softmax(-1), wide_TV & ~kept_TV)


# --------------------------------------------------------------------------------------------------------------------
# What the bets know of the prefix


class OnlineNgrams:
    """P(token | up to three before it), learned from what was judged so far; each order smoothed by the one below."""

    ORDERS = 3
    STRENGTH = 2.0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.totals: dict[tuple[int, ...], int] = {}

    def probabilities(self, prefix: Sequence[int], tokens: Sequence[int]) -> list[float]:
        found = [1.0 / self.vocab_size] * len(tokens)
        for context in self._contexts(prefix):
            counts = self.counts.get(context)
            if counts is None:
                break
            scale = 1.0 / (self.totals[context] + self.STRENGTH)
            found = [(counts.get(t, 0) + self.STRENGTH * p) * scale for t, p in zip(tokens, found, strict=True)]
        return found

    def learn(self, prefix: Sequence[int], token: int) -> None:
        for context in self._contexts(prefix):
            counts = self.counts.setdefault(context, {})
            counts[token] = counts.get(token, 0) + 1
            self.totals[context] = self.totals.get(context, 0) + 1

    def _contexts(self, prefix: Sequence[int]) -> list[tuple[int, ...]]:
        last = tuple(prefix[-self.ORDERS :])
        return [last[len(last) - order :] for order in range(len(last) + 1)]


def suffix_matches(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """For each response token what followed when the longest of the last 4, 3 or 2 tokens last occurred; -1 for none."""
    tokens = [*prompt_ids, *token_ids]
    followers: dict[tuple[int, ...], int] = {}
    found = []
    for position in range(1, len(tokens)):
        suffixes = [tuple(tokens[position - n : position]) for n in (4, 3, 2) if n <= position]
        if position >= len(prompt_ids):
            found.append(next((followers[suffix] for suffix in suffixes if suffix in followers), -1))
        for suffix in suffixes:
            followers[suffix] = tokens[position]
    return found


# --------------------------------------------------------------------------------------------------------------------
# The bets


def growth(
    logp_TV: Tensor,
    tokens_ST: Tensor,
    sources_RST: Tensor,
    events_TV: Sequence[Tensor],
    tolerance: float,
) -> Tensor:
    """log q(y) / p(y) of every bet, the tolerance paid, as [K, S, T] in the order of BETS.

    sources_RST: r(y) of each of SOURCES. events_TV: the sets of EVENTS as masks. A token with p(y) = 0 is not bet on (0);
    it is counted elsewhere.
    """
    p_TV = logp_TV.exp()
    logp_ST = logp_TV.gather(-1, tokens_ST.T).T
    is_bet_ST = logp_ST > -math.inf
    logp_ST = logp_ST.masked_fill(~is_bet_ST, 0.0)
    excess = 2.0 * math.expm1(tolerance)
    rows: list[Tensor] = []
    for tilt in TILTS:
        tilted_TV = logp_TV * tilt
        norm_T = tilted_TV.logsumexp(-1)
        distance_T = ((tilted_TV - norm_T[:, None]).exp() - p_TV).abs().sum(-1) / 2
        rows.append((tilt - 1) * logp_ST - norm_T - torch.log1p(excess * distance_T))
    for event_TV in events_TV:
        mass_T = (p_TV * event_TV).sum(-1)
        is_in_ST = event_TV.gather(-1, tokens_ST.T).T.double()
        for odds in ODDS:
            norm_T = 1 + (odds - 1) * mass_T
            distance_T = (odds * mass_T / norm_T - mass_T).abs()
            rows.append(is_in_ST * math.log(odds) - norm_T.log() - torch.log1p(excess * distance_T))
    for ratio_ST in sources_RST / logp_ST.exp():
        rows += [torch.log1p(share * (ratio_ST - 1)) - math.log1p(excess * share) for share in SHARES]
    return torch.stack(rows) * is_bet_ST


# --------------------------------------------------------------------------------------------------------------------
# The verdict


@dataclass(frozen=True)
class Offender:
    """A token the target hardly or never says here. tail: the target's mass on tokens as unlikely as this one, or more."""

    response: int
    problem_id: str
    sample_index: int
    position: int
    token_id: int
    p: float
    tail: float
    expected_id: int
    expected_p: float
    text: str = ""
    expected_text: str = ""


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class AuditReport:
    """What the audit of one mode found. Fields of the betting game are None at temperature 0, where the argmax is checked."""

    mode: str
    is_lossless: bool
    reasons: tuple[str, ...]
    """Why not; empty when lossless."""
    num_responses: int
    num_tokens: int
    alpha: float
    tolerance: float
    log10_e: float | None
    max_log10_e: float | None
    p_value: float | None
    """At most this likely for a lossless engine: min(1, 1 / max e)."""
    detected_at_token: int | None
    best_bet: str | None
    nats_per_token: float | None
    """What the best single bet gained per token."""
    surprise: Estimate | None
    """Mean of log p(y) + entropy of p, in nats; 0 for a lossless engine, above it too sharp, below it too flat."""
    elsewhere: Estimate | None
    """Share of the tokens from another source than the target, by maximum likelihood (95 %: likelihood ratio)."""
    elsewhere_source: str | None
    tokens_for_power: dict[str, int | None]
    """Tokens for 95 % power: against the reference faults, or if not lossless against what was observed. None: more than
    five million, or no growth at all."""
    num_impossible: int
    num_border: int
    num_wrong: int
    num_near_ties: int
    num_cut_short: int
    num_past_stop: int
    num_copies: int
    """Responses that repeat a long one; not judged, and not counted above."""
    logprob_gap: float | None
    """Largest difference between the engine's reported log-probabilities and the referee's; None when it reports none."""
    offenders: tuple[Offender, ...]

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_responses


class Auditor:
    """Judges responses one after another. The order must not depend on their tokens: all that were asked for, as asked for.

    limit: how many tokens a response may have; None takes the longest that did not stop. seed: of the reference faults.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        window: int,
        *,
        alpha: float = 1e-4,
        tolerance: float = 1e-3,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self.params, self.window, self.limit = params, window, limit
        self.alpha, self.tolerance = alpha, tolerance
        self.ngrams = OnlineNgrams(vocab_size)
        self.generator = torch.Generator().manual_seed(seed)
        self.is_stop_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.is_stop_V[list(params.stop_ids)] = True
        self.wealth_K = torch.zeros(len(BETS), dtype=torch.float64)
        self.max_log_e = 0.0
        self.detected_at: int | None = None
        self.num_tokens = self.num_impossible = self.num_border = self.num_wrong = self.num_near_ties = 0
        self.lengths: list[int] = []
        self.responses_SK: list[Tensor] = []
        self.surprises: list[Tensor] = []
        self.ratios_RT: list[Tensor] = []
        self.offenders: list[tuple[float, int, Offender]] = []
        self.logprob_gap: float | None = None
        self.unstopped: list[int] = []
        self.num_past_stop = self.num_copies = 0
        self._logprobs: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    @property
    def log_threshold(self) -> float:
        return -math.log(self.alpha)

    @property
    def log_e(self) -> float:
        return float(self.wealth_K.logsumexp(0)) - math.log(len(BETS))

    def observe(self, response: Rollout, logits: Iterable[Tensor]) -> None:
        """One response and the referee's logits of its tokens, [T, V] in pieces. A long response that was judged before,
        which chance does not repeat, is counted as a copy and not judged again: it is no new evidence."""
        assert response.token_ids, "a response has at least one token"
        key = (response.prompt_ids, response.token_ids)
        if self._logprobs.get(key, 0.0) < _COPY_LOGPROB:
            self.num_copies += 1
            return
        self._note_ending(response)
        matches = torch.tensor(suffix_matches(response.prompt_ids, response.token_ids))
        sums_SK = torch.zeros(1 + len(REFERENCE_SOURCES), len(BETS), dtype=torch.float64)
        logprob, begin = 0.0, 0
        for logits_TV in logits:
            end = begin + len(logits_TV)
            tokens_T = torch.tensor(response.token_ids[begin:end])
            if response.logprobs:
                self._compare_logprobs(logits_TV, tokens_T, response.logprobs[begin:end])
            if self.params.temperature == 0:
                self._observe_greedy(response, begin, logits_TV.double(), tokens_T)
            else:
                sums, logp = self._observe_sampled(response, begin, logits_TV, tokens_T, matches[begin:end])
                sums_SK, logprob = sums_SK + sums, logprob + logp
            begin = end
        assert begin == len(response.token_ids), "the referee judges every token"
        self.num_tokens += begin
        self.lengths.append(begin)
        self.responses_SK.append(sums_SK)
        self._logprobs[key] = logprob

    def _note_ending(self, response: Rollout) -> None:
        stops = [index for index, token in enumerate(response.token_ids) if self.is_stop_V[token]]
        if stops and stops[0] < len(response.token_ids) - 1:
            self.num_past_stop += 1
        if not stops and len(response.prompt_ids) + len(response.token_ids) < self.window:
            self.unstopped.append(len(response.token_ids))

    def _compare_logprobs(self, logits_TV: Tensor, tokens_T: Tensor, logprobs: Sequence[float]) -> None:
        logp_TV = (logits_TV.double() / (self.params.temperature or 1.0)).log_softmax(-1)
        gaps_T = (logp_TV.gather(-1, tokens_T[:, None])[:, 0] - torch.tensor(logprobs, dtype=torch.float64)).abs()
        self.logprob_gap = max(self.logprob_gap or 0.0, float(gaps_T.max()))

    def _observe_greedy(self, response: Rollout, begin: int, logits_TV: Tensor, tokens_T: Tensor) -> None:
        best_T = logits_TV.argmax(-1)
        margin_T = logits_TV.amax(-1) - logits_TV.gather(-1, tokens_T[:, None])[:, 0]
        is_wrong_T = margin_T > self.tolerance
        self.num_wrong += int(is_wrong_T.sum())
        self.num_near_ties += int(((tokens_T != best_T) & ~is_wrong_T).sum())
        logp_TV = logits_TV.log_softmax(-1)
        self._note_offenders(response, begin, logp_TV, tokens_T, (-margin_T).exp(), is_wrong_T)

    def _observe_sampled(
        self, response: Rollout, begin: int, logits_TV: Tensor, tokens_T: Tensor, matches_T: Tensor
    ) -> tuple[Tensor, float]:
        """Plays every bet on every token; returns each bet's log-growth, [S, K], and the response's log-probability."""
        judged = law(logits_TV, self.params, self.tolerance)
        logp_TV, p_TV = judged.logp_TV, judged.logp_TV.exp()
        logp_T = logp_TV.gather(-1, tokens_T[:, None])[:, 0]
        is_border_T = judged.border_TV.gather(-1, tokens_T[:, None])[:, 0]
        tail_T = (p_TV * (logp_TV <= logp_T[:, None] + 1e-9)).sum(-1)
        is_impossible_T = (tail_T <= IMPOSSIBLE) & ~is_border_T
        self.num_border += int(is_border_T.sum())
        self.num_impossible += int(is_impossible_T.sum())
        self._note_offenders(response, begin, logp_TV, tokens_T, tail_T, torch.ones_like(is_border_T) & ~is_border_T)

        flat_TV = (logp_TV / 2).softmax(-1)
        tokens_ST = torch.stack([tokens_T, *self._reference_faults(tokens_T, flat_TV)])
        sources_RST = self._sources(response, begin, tokens_ST, flat_TV, matches_T)
        ids_V = torch.arange(logp_TV.shape[-1])
        argmax_TV = ids_V == logp_TV.argmax(-1)[:, None]
        events_TV = [self.is_stop_V.expand_as(logp_TV), argmax_TV, ids_V == matches_T[:, None]]
        growth_KST = growth(logp_TV, tokens_ST, sources_RST, events_TV, self.tolerance)
        self._play(growth_KST[:, 0])

        is_bet_T = logp_T > -math.inf
        entropy_T = -(p_TV * logp_TV.masked_fill(p_TV == 0, 0.0)).sum(-1)
        self.surprises.append((logp_T + entropy_T)[is_bet_T])
        ratios_RT = sources_RST[:, 0] / logp_T.exp()
        self.ratios_RT.append(ratios_RT.nan_to_num(nan=1.0, posinf=1e12).clamp_max(1e12)[:, ~is_border_T])
        is_caught_ST = logp_TV.gather(-1, tokens_ST.T).T.isneginf() & ~is_border_T
        is_caught_ST[0] = False  # the engine's own are counted, not bet on
        sums_SK = (growth_KST + is_caught_ST * self.log_threshold * 2).sum(-1).T
        return sums_SK, float(logp_T[is_bet_T].sum())

    def _reference_faults(self, tokens_T: Tensor, flat_TV: Tensor) -> list[Tensor]:
        """What faulty engines would have said at the same prefixes."""
        found = []
        for source in REFERENCE_SOURCES:
            weights_TV = flat_TV if source == "flattened" else torch.ones_like(flat_TV)
            drawn_T = torch.multinomial(weights_TV, 1, generator=self.generator)[:, 0]
            is_faulty_T = torch.rand(len(tokens_T), generator=self.generator) < REFERENCE_FAULT
            found.append(torch.where(is_faulty_T, drawn_T, tokens_T))
        return found

    def _sources(self, response: Rollout, begin: int, tokens_ST: Tensor, flat_TV: Tensor, matches_T: Tensor) -> Tensor:
        """r(y) of every source, [R, S, T] in the order of SOURCES."""
        flat_ST = flat_TV.gather(-1, tokens_ST.T).T
        uniform_ST = torch.full_like(flat_ST, 1.0 / flat_TV.shape[-1])
        known = [*response.prompt_ids, *response.token_ids]
        at = len(response.prompt_ids) + begin
        columns = []
        for offset, tokens in enumerate(tokens_ST.T.tolist()):
            prefix = known[max(at + offset - OnlineNgrams.ORDERS, 0) : at + offset]
            columns.append(self.ngrams.probabilities(prefix, tokens))
            self.ngrams.learn(prefix, tokens[0])
        ngram_ST = torch.tensor(columns, dtype=torch.float64).T
        previous_T = torch.tensor(known[at - 1 : at - 1 + tokens_ST.shape[1]])
        return torch.stack(
            [flat_ST, uniform_ST, ngram_ST, (tokens_ST == previous_T).double(), (tokens_ST == matches_T).double()]
        )

    def _play(self, growth_KT: Tensor) -> None:
        wealth_KT = self.wealth_K[:, None] + growth_KT.cumsum(-1)
        log_e_T = wealth_KT.logsumexp(0) - math.log(len(BETS))
        self.wealth_K = wealth_KT[:, -1]
        if self.detected_at is None and bool((log_e_T >= self.log_threshold).any()):
            self.detected_at = int((log_e_T >= self.log_threshold).nonzero()[0]) + sum(self.lengths) + 1
        self.max_log_e = max(self.max_log_e, float(log_e_T.max()))

    def _note_offenders(
        self, response: Rollout, begin: int, logp_TV: Tensor, tokens_T: Tensor, tail_T: Tensor, is_offered_T: Tensor
    ) -> None:
        """Keeps the few least likely tokens of all."""
        for t in tail_T.masked_fill(~is_offered_T, math.inf).argsort()[:_NUM_OFFENDERS].tolist():
            tail = float(tail_T[t])
            if not is_offered_T[t] or (len(self.offenders) == _NUM_OFFENDERS and -tail <= self.offenders[0][0]):
                break
            token, expected = int(tokens_T[t]), int(logp_TV[t].argmax())
            offender = Offender(
                response=len(self.lengths) + self.num_copies,
                problem_id=response.problem_id,
                sample_index=response.sample_index,
                position=begin + t,
                token_id=token,
                p=float(logp_TV[t, token].exp()),
                tail=tail,
                expected_id=expected,
                expected_p=float(logp_TV[t, expected].exp()),
            )
            heapq.heappush(self.offenders, (-tail, -(sum(self.lengths) + begin + t), offender))
            if len(self.offenders) > _NUM_OFFENDERS:
                heapq.heappop(self.offenders)

    # ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────

    def report(self, mode: str) -> AuditReport:
        assert self.lengths, "at least one response was judged"
        is_greedy = self.params.temperature == 0
        limit = self.limit if self.limit is not None else max(self.unstopped, default=0)
        num_cut_short = sum(length < limit for length in self.unstopped)
        findings = (
            (
                self.max_log_e >= self.log_threshold,
                f"the tokens follow another law (e-value 10^{self.max_log_e / math.log(10):.1f})",
            ),
            (self.num_impossible > 0, f"{self.num_impossible} tokens that the target never says there"),
            (
                self.num_wrong > 0,
                f"{self.num_wrong} tokens that are not the most likely one, by more than {self.tolerance:g} nats",
            ),
            (num_cut_short > 0, f"{num_cut_short} responses end without a stop token before {limit} tokens"),
            (self.num_past_stop > 0, f"{self.num_past_stop} responses go on past a stop token"),
        )
        reasons = tuple(reason for is_found, reason in findings if is_found)
        if self.num_copies and not reasons:
            raise UserError(
                f"{mode}: {self.num_copies} of {len(self.lengths) + self.num_copies} responses repeat another token for token,"
                " which chance does not do; give every response a seed of its own and every line once"
            )
        report = AuditReport(
            mode=mode,
            is_lossless=not reasons,
            reasons=reasons,
            num_responses=len(self.lengths),
            num_tokens=self.num_tokens,
            alpha=self.alpha,
            tolerance=self.tolerance,
            log10_e=None,
            max_log10_e=None,
            p_value=None,
            detected_at_token=None,
            best_bet=None,
            nats_per_token=None,
            surprise=None,
            elsewhere=None,
            elsewhere_source=None,
            tokens_for_power={},
            num_impossible=self.num_impossible,
            num_border=self.num_border,
            num_wrong=self.num_wrong,
            num_near_ties=self.num_near_ties,
            num_cut_short=num_cut_short,
            num_past_stop=self.num_past_stop,
            num_copies=self.num_copies,
            logprob_gap=self.logprob_gap,
            offenders=tuple(offender for _, _, offender in sorted(self.offenders, reverse=True)),
        )
        return report if is_greedy else self._with_statistics(report)

    def _with_statistics(self, report: AuditReport) -> AuditReport:
        best = int(self.wealth_K.argmax())
        source, share = most_likely_share(torch.cat(self.ratios_RT, dim=1))
        p_value = min(1.0, math.exp(-self.max_log_e))
        if self.num_impossible:
            p_value = min(p_value, self.num_tokens * IMPOSSIBLE)
        return replace(
            report,
            log10_e=self.log_e / math.log(10),
            max_log10_e=self.max_log_e / math.log(10),
            p_value=p_value,
            detected_at_token=self.detected_at,
            best_bet=BETS[best],
            nats_per_token=float(self.wealth_K[best]) / self.num_tokens,
            surprise=mean_with_interval(torch.cat(self.surprises)),
            elsewhere=share,
            elsewhere_source=source,
            tokens_for_power=self._tokens_for_power(report.is_lossless),
        )

    def _tokens_for_power(self, is_lossless: bool) -> dict[str, int | None]:
        """Of the reference faults where the engine has none of its own; else of what was seen of it."""
        sums_SRK = torch.stack(self.responses_SK, dim=1)
        if is_lossless:
            names = [f"{REFERENCE_FAULT:g} {source}" for source in REFERENCE_SOURCES]
            return {
                name: tokens_for_power(sums_RK, self.lengths, self.log_threshold)
                for name, sums_RK in zip(names, sums_SRK[1:], strict=True)
            }
        return {"as observed": tokens_for_power(sums_SRK[0], self.lengths, self.log_threshold)}


def mean_with_interval(values_T: Tensor) -> Estimate:
    if not len(values_T):
        return Estimate(0.0, 0.0, 0.0)
    mean = float(values_T.mean())
    half = 1.96 * float(values_T.std(correction=0)) / math.sqrt(len(values_T))
    return Estimate(mean, mean - half, mean + half)


def most_likely_share(ratios_RT: Tensor) -> tuple[str, Estimate]:
    """The source and the share ε that make (1 − ε) p + ε r likeliest, given r(y) / p(y) of every token.

    Where no source makes them likelier by more than chance does, the one that could hide the largest share.
    """
    found = [_share_of(ratios_T - 1) for ratios_T in ratios_RT]
    is_seen = max(gained for gained, _ in found) > 1.92
    best = max(range(len(found)), key=lambda source: found[source][0] if is_seen else found[source][1].high)
    return SOURCES[best], found[best][1]


def _share_of(gains_T: Tensor) -> tuple[float, Estimate]:
    """The likelihood gained, and its argument with the interval that loses at most 1.92 of it (chi-square, 95 %)."""

    def likelihood(share: float) -> float:
        return float(torch.log1p(share * gains_T).sum())

    top = 1 - 1e-9
    share = _bisect(lambda s: float((gains_T / (1 + s * gains_T)).sum()) > 0, 0.0, top)  # the likelihood is concave
    share = share if share > 1e-8 else 0.0
    gained = likelihood(share)
    low = _bisect(lambda s: likelihood(s) < gained - 1.92, 0.0, share) if gained > 1.92 else 0.0
    return gained, Estimate(share, low, _bisect(lambda s: likelihood(s) >= gained - 1.92, share, top))


def _bisect(is_below: Callable[[float], bool], low: float, high: float) -> float:
    """Where `is_below` turns from true to false."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def tokens_for_power(sums_RK: Tensor, lengths: Sequence[int], log_threshold: float, power: float = 0.95) -> int | None:
    """Tokens after which the e-process has crossed in `power` of bootstrap runs, which draw whole responses again.

    None when that takes more than five million tokens, or when no bet grows at all.
    """
    if float(sums_RK.sum(0).max()) <= 0:
        return None
    generator = torch.Generator().manual_seed(0)
    lengths_R = torch.tensor(lengths)
    needed = []
    for _ in range(_POWER_TRIALS):
        wealth_K, num_tokens = torch.zeros(sums_RK.shape[1], dtype=torch.float64), 0
        while num_tokens < _POWER_MAX_TOKENS:
            drawn = torch.randint(len(lengths), (256,), generator=generator)
            wealth_NK = wealth_K + sums_RK[drawn].cumsum(0)
            is_over_N = wealth_NK.logsumexp(-1) - math.log(sums_RK.shape[1]) >= log_threshold
            if bool(is_over_N.any()):
                num_tokens += int(lengths_R[drawn][: int(is_over_N.nonzero()[0]) + 1].sum())
                break
            wealth_K, num_tokens = wealth_NK[-1], num_tokens + int(lengths_R[drawn].sum())
        needed.append(num_tokens)
        if sum(n >= _POWER_MAX_TOKENS for n in needed) > (1 - power) * _POWER_TRIALS:
            return None
    return sorted(needed)[math.ceil(power * _POWER_TRIALS) - 1]


# --------------------------------------------------------------------------------------------------------------------
# A fault to find


class PlantedFault:
    """An engine's `verify` that is wrong on purpose: with `probability` a draft the target rejected is accepted instead.

    The walk then goes on from that draft, as it would in an engine with this mistake.
    """

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability, self.random = probability, random.Random(seed)
        self.num_planted = 0

    def __call__(self, tree: DraftTree, logits_BNV: Tensor, noise_BNV: Tensor, params: BatchParams) -> list[Verdict]:
        tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
        verdicts = verify(tree, logits_BNV, noise_BNV, params)
        logits_BNV = logits_BNV.clone()
        decided: set[tuple[int, int]] = set()
        while True:
            before = self.num_planted
            for row, verdict in enumerate(verdicts):
                node = verdict.path[-1]
                drafts = [tokens[row][child] for child in range(1, tree.num_nodes) if parents[row][child] == node]
                if not drafts or (row, node) in decided:
                    continue
                decided.add((row, node))
                if self.random.random() < self.probability:
                    logits_BNV[row, node] = -math.inf
                    logits_BNV[row, node, drafts[0]] = 0.0
                    self.num_planted += 1
            if self.num_planted == before:
                return verdicts
            verdicts = verify(tree, logits_BNV, noise_BNV, params)
