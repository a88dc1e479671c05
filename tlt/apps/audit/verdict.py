"""The verdict on an engine's sampling: every token is judged against the target's exact probabilities.

    response ──▶ referee: logits at every prefix ──▶ law p_t ──▶ bets q_t(y) / p_t(y) ──▶ wealth ──▶ verdict

The test is a betting game (Shafer 2021; Ville 1939; docs/audit.md). The mean e_t of K bets' wealths starts at
1 and, if every token is drawn from p_t, obeys for all t at once

    P(sup_t e_t ≥ 1 / alpha) ≤ alpha .

An engine in finite precision draws from some p̃_t with |log p̃_t(v) − log p_t(v)| ≤ tolerance instead. A
bet's expected factor is then at most 1 + 2 (exp(tolerance) − 1) TV(q_t, p_t), by which each factor is
divided.

Axes beyond those of types.py: K bets · S tokens judged per step (the engine's, then one per reference fault).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tlt.apps.audit.bets import BETS, OnlineNgrams, growth, suffix_matches
from tlt.apps.audit.estimates import mean_with_interval, most_likely_share, tokens_for_power
from tlt.apps.audit.referee import Referee, law
from tlt.apps.audit.report import AuditReport, Offender
from tlt.base.types import Rollout, SamplingParams, UserError

IMPOSSIBLE = 1e-12
"""If a token and all less likely tokens have less mass than this, the token alone convicts; adds 1e-12 per
token to alpha."""

REFERENCE_FAULT = 0.01
REFERENCE_SOURCES = ("flattened", "uniform")
"""Reference faults for the stated power: a token comes from this source with probability 0.01."""

_COPY_LOGPROB = -40.0
"""Chance does not repeat a response of a lower log-probability."""
_NUM_OFFENDERS = 10


class Auditor:
    """Give it all responses in the order of the requests: the order must not depend on their tokens.

    tolerance: nats, as in the bound above.
    limit: token limit of a response; None: the length of the longest response that did not stop.
    seed: of the reference faults' draws.
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
        """logits: the referee's, in pieces of [T, V]. A copy of an earlier, unlikely response is no new
        evidence."""
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
        gaps_T = _of_tokens(logp_TV, tokens_T) - torch.tensor(logprobs, dtype=torch.float64)
        self.logprob_gap = max(self.logprob_gap or 0.0, float(gaps_T.abs().max()))

    def _observe_greedy(self, response: Rollout, begin: int, logits_TV: Tensor, tokens_T: Tensor) -> None:
        best_T = logits_TV.argmax(-1)
        margin_T = logits_TV.amax(-1) - _of_tokens(logits_TV, tokens_T)
        is_wrong_T = margin_T > self.tolerance
        self.num_wrong += int(is_wrong_T.sum())
        self.num_near_ties += int(((tokens_T != best_T) & ~is_wrong_T).sum())
        logp_TV = logits_TV.log_softmax(-1)
        self._note_offenders(response, begin, logp_TV, tokens_T, (-margin_T).exp(), is_wrong_T)

    def _observe_sampled(
        self, response: Rollout, begin: int, logits_TV: Tensor, tokens_T: Tensor, matches_T: Tensor
    ) -> tuple[Tensor, float]:
        """Returns each bet's log-growth, [S, K], and the tokens' log-probability."""
        judged = law(logits_TV, self.params, self.tolerance)
        logp_TV, p_TV = judged.logp_TV, judged.logp_TV.exp()
        logp_T, is_border_T = _of_tokens(logp_TV, tokens_T), _of_tokens(judged.border_TV, tokens_T)
        tail_T = (p_TV * (logp_TV <= logp_T[:, None] + 1e-9)).sum(-1)
        is_impossible_T = (tail_T <= IMPOSSIBLE) & ~is_border_T
        self.num_border += int(is_border_T.sum())
        self.num_impossible += int(is_impossible_T.sum())
        self._note_offenders(response, begin, logp_TV, tokens_T, tail_T, ~is_border_T)

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
        found = []
        for source in REFERENCE_SOURCES:
            weights_TV = flat_TV if source == "flattened" else torch.ones_like(flat_TV)
            drawn_T = torch.multinomial(weights_TV, 1, generator=self.generator)[:, 0]
            is_faulty_T = torch.rand(len(tokens_T), generator=self.generator) < REFERENCE_FAULT
            found.append(torch.where(is_faulty_T, drawn_T, tokens_T))
        return found

    def _sources(
        self, response: Rollout, begin: int, tokens_ST: Tensor, flat_TV: Tensor, matches_T: Tensor
    ) -> Tensor:
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
        repeats_ST, matches_ST = ((tokens_ST == said_T).double() for said_T in (previous_T, matches_T))
        return torch.stack([flat_ST, uniform_ST, ngram_ST, repeats_ST, matches_ST])

    def _play(self, growth_KT: Tensor) -> None:
        wealth_KT = self.wealth_K[:, None] + growth_KT.cumsum(-1)
        log_e_T = wealth_KT.logsumexp(0) - math.log(len(BETS))
        self.wealth_K = wealth_KT[:, -1]
        is_over_T = log_e_T >= self.log_threshold
        if self.detected_at is None and bool(is_over_T.any()):
            self.detected_at = int(is_over_T.nonzero()[0]) + sum(self.lengths) + 1
        self.max_log_e = max(self.max_log_e, float(log_e_T.max()))

    def _note_offenders(
        self,
        response: Rollout,
        begin: int,
        logp_TV: Tensor,
        tokens_T: Tensor,
        tail_T: Tensor,
        may_offend_T: Tensor,
    ) -> None:
        for t in tail_T.masked_fill(~may_offend_T, math.inf).argsort()[:_NUM_OFFENDERS].tolist():
            tail, is_full = float(tail_T[t]), len(self.offenders) == _NUM_OFFENDERS
            if not may_offend_T[t] or (is_full and -tail <= self.offenders[0][0]):
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

    def judge(self, mode: str, rollouts: Iterable[Rollout], referee: Referee) -> AuditReport:
        """Raises UserError for a response with finish_reason stop that does not end with a stop token."""
        for rollout in rollouts:
            if rollout.finish_reason == "stop" and rollout.token_ids[-1] not in self.params.stop_ids:
                place = f"{mode}: problem {rollout.problem_id!r}, sample {rollout.sample_index}"
                raise UserError(
                    f"{place} has finish_reason stop but does not end with a stop token "
                    f"{self.params.stop_ids}; keep the token that ended it"
                )
            self.observe(rollout, referee.logits(rollout.prompt_ids, rollout.token_ids))
        return self.report(mode)

    # ── the report ──────────────────────────────────────────────────────────────────────────────────────────

    def report(self, mode: str) -> AuditReport:
        """Raises UserError where copies are the only fault."""
        assert self.lengths, "at least one response was judged"
        is_greedy = self.params.temperature == 0
        limit = self.limit if self.limit is not None else max(self.unstopped, default=0)
        num_cut_short = sum(length < limit for length in self.unstopped)
        log10_e, margin = self.max_log_e / math.log(10), f"{self.tolerance:g} nats"
        counted = {
            "tokens that the target never says there": self.num_impossible,
            f"tokens that are not the most likely one, by more than {margin}": self.num_wrong,
            f"responses end without a stop token before {limit} tokens": num_cut_short,
            "responses go on past a stop token": self.num_past_stop,
        }
        is_other_law = self.max_log_e >= self.log_threshold
        reasons = [f"the tokens follow another law (e-value 10^{log10_e:.1f})"] if is_other_law else []
        reasons += [f"{count} {fault}" for fault, count in counted.items() if count]
        if self.num_copies and not reasons:
            counts = f"{self.num_copies} of {len(self.lengths) + self.num_copies}"
            what = f"{counts} responses repeat another token for token, which chance does not do"
            remedy = "give every response a seed of its own and every line once"
            raise UserError(f"{mode}: {what}; {remedy}")
        report = AuditReport(
            mode=mode,
            reasons=tuple(reasons),
            num_responses=len(self.lengths),
            num_tokens=self.num_tokens,
            alpha=self.alpha,
            tolerance=self.tolerance,
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
        source, share = most_likely_share(torch.cat(self.ratios_RT, dim=1), self.alpha)
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
            surprise=mean_with_interval(torch.cat(self.surprises), self.alpha),
            elsewhere=share,
            elsewhere_source=source,
            tokens_for_power=self._tokens_for_power(report.is_convicted),
        )

    def _tokens_for_power(self, is_convicted: bool) -> dict[str, int | None]:
        sums_SRK = torch.stack(self.responses_SK, dim=1)
        if not is_convicted:
            names = [f"{REFERENCE_FAULT:g} {source}" for source in REFERENCE_SOURCES]
            return {
                name: tokens_for_power(sums_RK, self.lengths, self.log_threshold)
                for name, sums_RK in zip(names, sums_SRK[1:], strict=True)
            }
        return {"as observed": tokens_for_power(sums_SRK[0], self.lengths, self.log_threshold)}


def _of_tokens(values_TV: Tensor, tokens_T: Tensor) -> Tensor:
    return values_TV.gather(-1, tokens_T[:, None])[:, 0]
