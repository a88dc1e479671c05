"""Verdicts on Markov chains, with stated error rates; single tokens and endings that convict at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binom

from tests.unit.apps.audit.chain import PARAMS, STOP, V, judge, make_table, run_audit, sample_chain
from tlt.apps.audit.estimates import Estimate, most_likely_share
from tlt.apps.audit.report import AuditReport
from tlt.apps.audit.verdict import Auditor
from tlt.base.types import Rollout, SamplingParams, UserError


def test_false_positives_stay_below_alpha() -> None:
    """100 lossless engines at alpha 0.05: at most 5 expected; more than 18 has probability below 1e-6."""
    table_VV = make_table()
    p_VV = table_VV.softmax(-1)
    convicted = sum(
        run_audit(table_VV, p_VV, 200, seed, alpha=0.05).detected_at is not None for seed in range(100)
    )
    assert convicted <= binom.ppf(1 - 1e-6, 100, 0.05)


def report_of(num_tokens: int, tokens_for_power: dict[str, int | None], **found: Any) -> AuditReport:
    counts = dict.fromkeys(("num_impossible", "num_border", "num_wrong", "num_near_ties"), 0)
    counts |= dict.fromkeys(("num_cut_short", "num_past_stop", "num_copies"), 0)
    about: dict[str, Any] = {"mode": "off", "num_responses": 4, "alpha": 1e-4, "tolerance": 1e-3}
    about |= {"logprob_gap": None, "reasons": (), "offenders": (), "log10_e": 0.0, "max_log10_e": 0.0}
    about |= {"surprise": Estimate(0.0, -0.1, 0.1), "elsewhere": Estimate(0.0, 0.0, 0.1)}
    about |= {"elsewhere_source": "flattened", **found}
    return AuditReport(num_tokens=num_tokens, tokens_for_power=tokens_for_power, **about, **counts)


POWER: dict[str, int | None] = {"flattened": 10_788, "uniform": 850}
FEW = "undecided: no evidence against; needs "
DOUBT = "undecided: an estimate speaks against it, and the bets do not convict it; judge more; "


@pytest.mark.parametrize(
    ("report", "begins"),
    [
        (report_of(1_020, POWER), f"{FEW}10,788 tokens, and has 1,020; 1020 tokens"),
        (report_of(10_787, POWER), f"{FEW}10,788 tokens, and has 10,787; "),
        (report_of(10_788, POWER), "lossless; "),
        (
            report_of(10_788, {**POWER, "flattened": None}),
            f"{FEW}over 5 million tokens, and has 10,788; ",
        ),
        (report_of(10_788, POWER, elsewhere=Estimate(0.2, 0.0315, 0.5576)), DOUBT),
        (report_of(10_788, POWER, surprise=Estimate(0.2, 0.1, 0.3)), DOUBT),
        (
            report_of(5, {"as observed": 900}, reasons=("one is wrong",)),
            "NOT lossless: one is wrong; 5 tokens",
        ),
    ],
)
def test_the_verdict_is_lossless_only_where_its_own_power_and_estimates_say_so(
    report: AuditReport, begins: str
) -> None:
    assert report.sentence.startswith(begins)
    assert report.is_lossless is {"l": True, "u": None, "N": False}[begins[0]]


def test_a_planted_fault_is_caught_within_the_stated_tokens() -> None:
    """16 engines that say any token with probability 0.01, judged for as many tokens as the clean audit
    states for power 0.95. Fewer than `least` catches have probability below 1e-4."""
    table_VV = make_table()
    p_VV = table_VV.softmax(-1)
    clean = run_audit(table_VV, p_VV, 10_000, seed=1).report("clean")
    stated = clean.tokens_for_power["0.01 uniform"]
    assert stated is not None
    assert stated < 5_000
    runs = [run_audit(table_VV, 0.99 * p_VV + 0.01 / V, stated, seed) for seed in range(100, 116)]
    least = binom.ppf(1e-4, 16, 0.95)
    assert sum(run.detected_at is not None for run in runs) >= least
    ratios_RT = torch.cat([ratios_RT for run in runs for ratios_RT in run.ratios_RT], dim=1)
    source, share = most_likely_share(ratios_RT, 1e-4)
    assert source == "uniform"
    assert share.value == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize(("factor", "sign"), [(0.9, 1), (1.1, -1)])
def test_a_wrong_temperature_is_caught_and_its_direction_told(factor: float, sign: int) -> None:
    table_VV = make_table()
    report = run_audit(table_VV, (table_VV / factor).softmax(-1), 10_000, seed=3).report("wrong")
    assert report.is_convicted
    assert report.surprise is not None
    assert report.surprise.low * sign > 0 or report.surprise.high * sign > 0
    assert report.surprise.value * sign > 0
    assert report.best_bet is not None
    assert report.best_bet.startswith("temperature")
    assert report.tokens_for_power["as observed"] is not None


def test_a_suppressed_stop_token_is_caught_by_the_bet_on_it() -> None:
    table_VV = make_table()
    table_VV[:, STOP] = 0.5
    engine_VV = table_VV.clone()
    engine_VV[:, STOP] -= 0.5
    report = run_audit(table_VV, engine_VV.softmax(-1), 10_000, seed=4).report("wrong")
    assert report.is_convicted
    assert report.best_bet is not None
    assert report.best_bet.startswith("odds of stop 0.")


def test_a_token_outside_the_support_convicts_at_once() -> None:
    table_VV = make_table()
    params = replace(PARAMS, top_k=3)
    order = table_VV[0].argsort(descending=True).tolist()
    clean = Rollout("p", 0, (0,), (order[0],), (), "length", 0)
    wrong = Rollout("q", 4, (0,), (order[5],), (), "length", 0)
    auditor = Auditor(params, V, 100, limit=1)
    judge(auditor, table_VV, clean)
    judge(auditor, table_VV, wrong)
    report = auditor.report("wrong")
    assert report.is_convicted
    assert report.num_impossible == 1
    assert report.p_value is not None
    assert report.p_value < 1e-11
    worst = report.offenders[0]
    assert (worst.response, worst.problem_id, worst.sample_index, worst.position) == (1, "q", 4, 0)
    assert (worst.token_id, worst.p, worst.expected_id) == (order[5], 0.0, order[0])


def test_greedy_tokens_must_be_the_most_likely_up_to_the_tolerance() -> None:
    logits_TV = torch.tensor([[1.0, 2.0, 2.0 - 5e-4, 0.0]])
    for token, wrong, ties in ((1, 0, 0), (2, 0, 1), (3, 1, 0)):
        auditor = Auditor(SamplingParams(temperature=0), 4, 100, limit=1)
        auditor.observe(Rollout("p", 0, (0,), (token,), (), "length", 0), [logits_TV])
        report = auditor.report("greedy")
        assert (report.num_wrong, report.num_near_ties) == (wrong, ties)
        assert report.verdict == ("not lossless" if wrong else "lossless")  # no number of tokens is too few
        assert report.log10_e is None
        assert len(report.offenders) == wrong


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [((1, 2), "end without a stop token before 4 tokens"), ((1, STOP, 2, 2), "go on past a stop token")],
)
def test_endings_that_no_token_shows_are_faults_too(tokens: tuple[int, ...], reason: str) -> None:
    table_VV = torch.zeros(V, V, dtype=torch.float64)
    auditor = Auditor(PARAMS, V, 100)
    judge(auditor, table_VV, Rollout("p", 0, (0,), (1, 1, 1, 1), (), "length", 0))
    judge(auditor, table_VV, Rollout("p", 1, (0,), tokens, (), "length", 0))
    report = auditor.report("wrong")
    assert report.is_convicted
    assert reason in report.reasons[0]


def test_copies_of_a_response_are_refused() -> None:
    table_VV = make_table()
    rollout = sample_chain(table_VV.softmax(-1), 300, seed=0)
    auditor = Auditor(PARAMS, V, 10**6, limit=len(rollout.token_ids))
    judge(auditor, table_VV, rollout)
    judge(auditor, table_VV, rollout)
    with pytest.raises(UserError, match="1 of 2 responses repeat another"):
        auditor.report("seeded")


def test_the_engine_s_own_logprobs_are_compared() -> None:
    table_VV = make_table()
    logp = float((table_VV[0] / 0.5).log_softmax(-1)[1])
    auditor = Auditor(replace(PARAMS, temperature=0.5), V, 100, limit=1)
    judge(auditor, table_VV, Rollout("p", 0, (0,), (1,), (logp + 0.25,), "length", 0))
    assert auditor.report("gap").logprob_gap == pytest.approx(0.25)
