"""The audit's statistics against enumeration and simulation, its refusals, and its exit codes. Error rates are stated.

Most tests judge a Markov chain: the next token's logits are a row of a table, so no model is needed.
"""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from tests.unit.test_cli import WINDOW, fail, save_tokenizer, write_lines
from tlt.audit.bets import BETS, EVENTS, SOURCES, OnlineNgrams, growth, suffix_matches
from tlt.audit.estimates import most_likely_share, tokens_for_power
from tlt.audit.fault import PlantedFault
from tlt.audit.referee import Referee, law
from tlt.audit.server import read_token_ids
from tlt.audit.verdict import Auditor
from tlt.cli import main as cli
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf_weights import save_checkpoint
from tlt.speculative.sampling import BatchParams, law_probabilities
from tlt.types import DraftTree, Rollout, SamplingParams, UserError

V, STOP = 13, 3
PARAMS = SamplingParams(stop_ids=(STOP,), max_tokens=300)


def make_table(seed: int = 0, scale: float = 4.0) -> Tensor:
    """Logits_VV after each token; the stop token is unlikely, so that responses are long."""
    table_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    table_VV[:, STOP] = -2.0
    return table_VV


def sample_chain(p_VV: Tensor, num_tokens: int, seed: int, index: int = 0) -> Rollout:
    """A response of exactly `num_tokens` or up to the stop token."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = p_VV.cumsum(-1).tolist()
    tokens = [0]
    for u in torch.rand(num_tokens, generator=generator, dtype=torch.float64).tolist():
        row = cumulative[tokens[-1]]
        tokens.append(next((v for v, c in enumerate(row) if u < c), V - 1))
        if tokens[-1] == STOP:
            break
    return Rollout("p", index, (0,), tuple(tokens[1:]), (), "length", 0)


def judge(auditor: Auditor, table_VV: Tensor, rollout: Rollout) -> None:
    previous = torch.tensor([*rollout.prompt_ids, *rollout.token_ids[:-1]])
    auditor.observe(rollout, [table_VV[previous]])


def run_audit(
    table_VV: Tensor, engine_VV: Tensor, num_tokens: int, seed: int, params: SamplingParams = PARAMS, **options: Any
) -> Auditor:
    """Judges responses of an engine that samples from `engine_VV` until `num_tokens` are judged."""
    auditor = Auditor(params, V, 10**6, limit=params.max_tokens, **options)
    while auditor.num_tokens < num_tokens:
        judge(auditor, table_VV, sample_chain(engine_VV, params.max_tokens, seed * 100_003 + len(auditor.lengths)))
    return auditor


# ── the law ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
        SamplingParams(top_k=1000),
        SamplingParams(top_k=1),
    ],
)
def test_the_audit_s_law_is_the_engine_s_law(params: SamplingParams) -> None:
    logits_TV = torch.randn(200, 40, generator=torch.Generator().manual_seed(1)) * 2
    logits_TV[:50] = logits_TV[:50].round()  # many ties
    found = law(logits_TV, params).logp_TV.exp()
    expected = torch.stack([law_probabilities(row, params) for row in logits_TV])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(found > 0, expected > 0)


# ── validity ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def all_growth(logp_V: Tensor, tolerance: float) -> Tensor:
    """growth[K, V]: of every bet for every next token, with sources and sets of all kinds."""
    size = len(logp_V)
    generator = torch.Generator().manual_seed(5)
    tokens_ST = torch.arange(size)[:, None]
    sources_RV = torch.rand(len(SOURCES), size, generator=generator, dtype=torch.float64)
    sources_RV[3:] = torch.eye(size, dtype=torch.float64)[[1, 2]]
    sources_RV /= sources_RV.sum(-1, keepdim=True)
    ids = torch.arange(size)
    events_TV = [(ids < 2)[None], (ids == int(logp_V.argmax()))[None], (ids == -1)[None]]
    assert len(events_TV) == len(EVENTS)
    return growth(logp_V[None], tokens_ST, sources_RV[:, :, None], events_TV, tolerance)[:, :, 0]


def random_law(seed: int, truncated: bool) -> Tensor:
    logits_V = torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    if truncated:
        logits_V[[2, 5]] = -math.inf
    return logits_V.log_softmax(-1)


@pytest.mark.parametrize("truncated", [False, True])
def test_no_bet_gains_on_average_when_tokens_follow_the_law(truncated: bool) -> None:
    """By enumeration: E_p[q/p] is 1, or below it by the mass that q has where p has none."""
    for seed in range(20):
        logp_V = random_law(seed, truncated)
        factors_K = (all_growth(logp_V, 0.0).exp() * logp_V.exp()).sum(-1)
        assert float(factors_K.max()) <= 1 + 1e-12
        if not truncated:
            torch.testing.assert_close(factors_K, torch.ones(len(BETS), dtype=torch.float64), rtol=0, atol=1e-12)


def test_no_bet_gains_on_average_from_an_engine_within_the_tolerance() -> None:
    """By enumeration over engines that move every log-probability by up to the tolerance, in random and in the worst signs."""
    for seed in range(20):
        logp_V = random_law(seed, truncated=False)
        growth_KV = all_growth(logp_V, tolerance := 0.01)
        generator = torch.Generator().manual_seed(seed)
        for trial in range(20):
            signs_V = torch.rand(9, generator=generator, dtype=torch.float64) * 2 - 1
            if trial < len(BETS):
                signs_V = growth_KV[trial].sign()
            moved_V = logp_V + tolerance / 2 * signs_V  # renormalizing moves by at most as much again
            moved_V = moved_V.log_softmax(-1)
            assert float((moved_V - logp_V).abs().max()) <= tolerance
            assert float((growth_KV.exp() * moved_V.exp()).sum(-1).max()) <= 1 + 1e-12


def test_false_positives_stay_below_alpha() -> None:
    """200 lossless engines at alpha 0.05: at most 10 expected; more than 27 has probability below 1e-6."""
    table_VV = make_table()
    p_VV = table_VV.softmax(-1)
    convicted = sum(run_audit(table_VV, p_VV, 200, seed, alpha=0.05).detected_at is not None for seed in range(200))
    assert convicted <= binom.ppf(1 - 1e-6, 200, 0.05)


def test_a_lossless_engine_passes() -> None:
    table_VV = make_table()
    report = run_audit(table_VV, table_VV.softmax(-1), 10_000, seed=7).report("chain")
    assert report.is_lossless
    assert report.reasons == ()
    assert report.log10_e is not None
    assert report.log10_e < 0  # bets lose when there is nothing to win
    assert report.p_value == pytest.approx(10**-report.max_log10_e)
    assert report.surprise is not None
    assert report.surprise.low < 0.01
    assert report.surprise.high > -0.01
    assert report.elsewhere is not None
    assert report.elsewhere.low == 0.0


# ── power ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_planted_fault_is_caught_within_the_stated_tokens() -> None:
    """40 engines that say any token with probability 0.01, judged for as many tokens as the clean audit states for
    power 0.95. Fewer than `least` catches have probability below 1e-4."""
    table_VV = make_table()
    p_VV = table_VV.softmax(-1)
    clean = run_audit(table_VV, p_VV, 10_000, seed=1).report("clean")
    stated = clean.tokens_for_power["0.01 uniform"]
    assert stated is not None
    assert stated < 5_000
    runs = [run_audit(table_VV, 0.99 * p_VV + 0.01 / V, stated, seed) for seed in range(100, 140)]
    least = binom.ppf(1e-4, 40, 0.95)
    assert sum(run.detected_at is not None for run in runs) >= least
    source, share = most_likely_share(torch.cat([torch.cat(run.ratios_RT, dim=1) for run in runs], dim=1))
    assert source == "uniform"
    assert share.value == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize(("factor", "sign"), [(0.9, 1), (1.1, -1)])
def test_a_wrong_temperature_is_caught_and_its_direction_told(factor: float, sign: int) -> None:
    table_VV = make_table()
    report = run_audit(table_VV, (table_VV / factor).softmax(-1), 10_000, seed=3).report("wrong")
    assert not report.is_lossless
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
    assert not report.is_lossless
    assert report.best_bet is not None
    assert report.best_bet.startswith("odds of stop 0.")


def test_tokens_copied_from_the_context_are_caught() -> None:
    table_VV = make_table()
    p_VV = table_VV.softmax(-1)
    engine_VV = 0.98 * p_VV + 0.02 * torch.eye(V, dtype=torch.float64)
    report = run_audit(table_VV, engine_VV, 10_000, seed=4).report("wrong")
    assert not report.is_lossless
    assert report.elsewhere_source == "previous token"
    assert report.elsewhere is not None
    assert report.elsewhere.value == pytest.approx(0.02, rel=0.3)


def test_power_is_none_when_no_bet_grows() -> None:
    assert tokens_for_power(torch.full((5, 3), -0.1, dtype=torch.float64), [10] * 5, 9.2) is None


def test_power_counts_tokens_until_the_threshold() -> None:
    """One bet of one that gains 1 nat per response of 10 tokens needs 10 responses for 9.2 nats."""
    assert tokens_for_power(torch.ones(5, 1, dtype=torch.float64), [10] * 5, 9.2) == 100


# ── single tokens and endings ────────────────────────────────────────────────────────────────────────────────────────


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
    assert not report.is_lossless
    assert report.num_impossible == 1
    assert report.p_value is not None
    assert report.p_value < 1e-11
    worst = report.offenders[0]
    assert (worst.response, worst.problem_id, worst.sample_index, worst.position) == (1, "q", 4, 0)
    assert (worst.token_id, worst.p, worst.expected_id) == (order[5], 0.0, order[0])


def test_a_token_at_the_border_of_the_support_is_left_to_rounding() -> None:
    logits_TV = torch.tensor([[3.0, 1.0, 1.0 - 5e-4, -2.0]])
    params = SamplingParams(top_k=2)
    for token, is_lossless in ((1, True), (2, True), (3, False)):
        auditor = Auditor(params, 4, 100, limit=1)
        auditor.observe(Rollout("p", 0, (0,), (token,), (), "length", 0), [logits_TV])
        report = auditor.report("border")
        assert report.is_lossless == is_lossless
        assert report.num_border == (token == 2)


def test_a_token_of_vanishing_probability_convicts_at_once() -> None:
    logits_TV = torch.tensor([[30.0, 0.0, -1.0]])
    auditor = Auditor(SamplingParams(), 3, 100, limit=1)
    auditor.observe(Rollout("p", 0, (0,), (1,), (), "length", 0), [logits_TV])
    assert auditor.report("wrong").num_impossible == 1


def test_greedy_tokens_must_be_the_most_likely_up_to_the_tolerance() -> None:
    logits_TV = torch.tensor([[1.0, 2.0, 2.0 - 5e-4, 0.0]])
    for token, wrong, ties in ((1, 0, 0), (2, 0, 1), (3, 1, 0)):
        auditor = Auditor(SamplingParams(temperature=0), 4, 100, limit=1)
        auditor.observe(Rollout("p", 0, (0,), (token,), (), "length", 0), [logits_TV])
        report = auditor.report("greedy")
        assert (report.num_wrong, report.num_near_ties) == (wrong, ties)
        assert report.is_lossless == (wrong == 0)
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
    assert not report.is_lossless
    assert reason in report.reasons[0]


def test_a_response_that_fills_the_window_is_not_cut_short() -> None:
    auditor = Auditor(PARAMS, V, window=3, limit=4)
    judge(auditor, torch.zeros(V, V), Rollout("p", 0, (0,), (1, 1), (), "length", 0))
    assert auditor.report("window").is_lossless


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


# ── what the bets know ───────────────────────────────────────────────────────────────────────────────────────────────


def test_suffix_matches_are_what_followed_the_longest_repeat_last() -> None:
    assert suffix_matches((1, 2, 3, 1), (2, 3, 1, 2, 9)) == [-1, 3, 1, 2, 3]


def test_the_online_model_is_a_distribution_and_learns() -> None:
    ngrams = OnlineNgrams(5)
    assert ngrams.probabilities([1, 2], [3]) == [0.2]
    for _ in range(50):
        ngrams.learn([1, 2], 3)
    found = ngrams.probabilities([1, 2], range(5))
    assert sum(found) == pytest.approx(1.0)
    assert found[3] > 0.9
    assert sum(ngrams.probabilities([4, 4, 2], range(5))) == pytest.approx(1.0)


# ── the planted fault ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_planted_fault_accepts_what_the_target_rejected_and_nothing_else() -> None:
    tree = DraftTree(torch.tensor([[0, 1, 2, 4]]), torch.tensor([[-1, 0, 1, 2]]), is_chain=True)
    logits_BNV = torch.zeros(1, 4, 6)
    for node, token in enumerate((1, 3, 4, 5)):  # the target says 1 as drafted, then 3 where 2 was drafted, then 4, 5
        logits_BNV[0, node, token] = 100.0
    noise, params = torch.zeros(1, 4, 6), BatchParams([SamplingParams()])
    (verdict,) = PlantedFault(0.0)(tree, logits_BNV, noise, params)
    assert verdict.tokens == (1, 3)
    faulty = PlantedFault(1.0)
    (verdict,) = faulty(tree, logits_BNV, noise, params)
    assert verdict.tokens == (1, 2, 4, 5)
    assert verdict.path == (0, 1, 2, 3)
    assert faulty.num_planted == 1


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "model"
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    config = ModelConfig("llama", vocab_size=23, max_positions=WINDOW, **shape)
    tensors = Transformer(config).initialize(0, std=0.3).state_dict()
    save_checkpoint(path, config, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    save_tokenizer(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", {"prompt": "1+2="}, {"prompt_ids": [5, 6]})
    return tmp_path


def test_the_referee_gives_the_same_logits_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    referee = Referee(model, torch.float64)
    prompt, tokens = (3, 4, 5), tuple(i % 23 for i in range(50))
    (whole,) = referee.logits(prompt, tokens)
    monkeypatch.setattr("tlt.audit.referee._CHUNK_LOGITS", 1)
    pieces = list(referee.logits(prompt, tokens))
    assert len(pieces) == 4
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-10)
    assert whole.shape == (50, 23)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = cli.main(("audit", *arguments))
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err
    return code, json.loads(captured.out.splitlines()[-1]), captured.out


def test_our_engine_is_lossless_with_exit_code_0(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(model), "--prompts", "prompts.jsonl", "--samples", "20", "--max-tokens", "30", "--out", "report.json")
    code, summary, text = run(capsys, *arguments)
    assert code == 0
    assert summary["lossless"] is True
    assert text.startswith("off: lossless; ")
    (mode,) = json.loads(Path("report.json").read_text())["modes"]
    assert mode["is_lossless"] is True
    assert mode["num_responses"] == 40
    assert mode["offenders"][0]["expected_text"]


def test_another_temperature_than_said_is_exit_code_1(model: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", str(model), "--prompts", "prompts.jsonl", "--samples", "60", "--max-tokens", "40"]
    assert cli.main([*generate, "--temperature", "0.7", "--out", "sharp.jsonl"]) == 0
    capsys.readouterr()
    code, summary, text = run(capsys, str(model), "--responses", "sharp.jsonl", "--temperature", "0.7")
    assert (code, summary["lossless"]) == (0, True)
    code, summary, text = run(capsys, str(model), "--responses", "sharp.jsonl")
    assert (code, summary["lossless"]) == (1, False)
    assert text.startswith("sharp.jsonl: NOT lossless: the tokens follow another law")
    assert "\n  response " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompts: give the prompts to answer"),
        (("--prompts", "prompts.jsonl", "--task", "countdown"), "--prompts: give the prompts to answer"),
        (("--responses", "no.jsonl"), "--responses: no.jsonl does not exist"),
        (("--responses", "no.jsonl", "--url", "http://localhost:1"), "name two engines"),
        (("--responses", "no.jsonl", "--speculation", "4x1x4"), "is another engine; leave --speculation"),
        (("--responses", "no.jsonl", "--prompts", "prompts.jsonl"), "holds its prompts itself"),
        (("--url", "http://localhost:1", "--prompts", "prompts.jsonl"), "--url and --engine-model belong together"),
        (("--prompts", "prompts.jsonl", "--speculation", "off,learned:4x1x4"), "'learned:4x1x4' needs a drafter"),
        (("--prompts", "prompts.jsonl", "--speculation", "off,off"), "must name every mode once"),
        (("--prompts", "prompts.jsonl", "--plant-fault", "0.1"), "is a fault of speculation"),
        (("--prompts", "prompts.jsonl", "--plant-fault", "1.1"), "--plant-fault: is 1.1"),
        (("--prompts", "prompts.jsonl", "--alpha", "0"), "--alpha: is 0.0"),
        (("--prompts", "prompts.jsonl", "--tolerance", "-1"), "--tolerance: is -1.0"),
        (("--prompts", "prompts.jsonl", "--samples", "0"), "--samples: is 0"),
        (("--prompts", "prompts.jsonl", "--temperature", "-1"), "temperature is -1.0"),
        (("--prompts", "prompts.jsonl", "--out", "no/report.json"), "--out: the folder"),
        (("--task", "countdown", "--num", "0"), "--num: is 0"),
        (("--task", "nonsense"), "unknown task 'nonsense'"),
        (("--url", "http://127.0.0.1:9", "--engine-model", "m", "--prompts", "prompts.jsonl"), "cannot be reached"),
        (("--url", "nonsense", "--engine-model", "m", "--prompts", "prompts.jsonl"), "cannot be reached"),
    ],
)
def test_every_mistake_is_one_line(
    arguments: tuple[str, ...], message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capsys, "audit", str(model), *arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [5]}, "r.jsonl:1: token_ids must be a list"),
        ({"prompt_ids": [5], "token_ids": []}, "need at least one token each"),
        ({"prompt_ids": [5], "token_ids": [99]}, "token id 99 is outside the vocabulary of 23"),
        ({"prompt_ids": [5], "token_ids": [6] * 99}, "has 100 tokens but the model's window is 64"),
        ({"prompt_ids": [5], "token_ids": [6], "logprobs": [0.0, 0.0]}, "1 token_ids but 2 logprobs"),
        ({"prompt_ids": [5], "token_ids": [6], "finish_reason": "stop"}, "keep the token that ended it"),
    ],
)
def test_every_mistake_in_a_file_of_responses_is_one_line(
    line: dict[str, Any], message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines("r.jsonl", line)
    assert message in fail(capsys, "audit", str(model), "--responses", "r.jsonl")


def test_a_folder_without_a_model_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no model" in fail(capsys, "audit", str(here), "--prompts", "prompts.jsonl")
    (here / "config.json").write_text("{}")
    assert "transformers cannot load it" in fail(capsys, "audit", str(here), "--prompts", "prompts.jsonl")


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_token_ids_are_read_in_both_forms() -> None:
    assert read_token_ids({"token_ids": [1, 2]}) == [1, 2]
    assert read_token_ids({"logprobs": {"tokens": ["token_id:7", "token_id:8"]}}) == [7, 8]
    assert read_token_ids({"text": "x", "logprobs": None}) is None
    assert read_token_ids({"logprobs": {"tokens": ["a"]}}) is None


Answer = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a completions endpoint that answers each payload by the function given; returns its address."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(answer(payload)).encode()
                self.send_response(200 if self.path == "/v1/completions" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128  # of connections not yet accepted; the default of 5 resets the others

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def sampler(model: Path, form: str, temperature: float = 1.0) -> Answer:
    """A server that samples the model itself, one forward per token."""
    referee = Referee(model)

    def answer(payload: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(payload["seed"])
        tokens: list[int] = []
        while len(tokens) < payload["max_tokens"] and not (tokens and tokens[-1] in payload["stop_token_ids"]):
            (logits,) = referee.logits([*payload["prompt"], *tokens], [0])
            p = (logits[0].double() / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(p, 1, generator=generator)))
        choice: dict[str, Any] = {"finish_reason": "stop" if tokens[-1] in payload["stop_token_ids"] else "length"}
        if form == "token_ids" and payload.get("return_token_ids"):
            choice["token_ids"] = tokens
        if form == "logprobs" and payload.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in tokens]}
        return {"choices": [choice]}

    return answer


@pytest.mark.parametrize(
    ("form", "temperature", "expected"), [("token_ids", 1.0, 0), ("logprobs", 1.0, 0), ("token_ids", 0.5, 1)]
)
def test_a_server_is_judged(
    form: str,
    temperature: float,
    expected: int,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(sampler(model, form, temperature))
    arguments = ("--url", url, "--engine-model", "m", "--prompts", "prompts.jsonl", "--samples", "25", "--max-tokens", "12")
    code, summary, _ = run(capsys, str(model), *arguments)
    assert code == expected
    assert list(summary["modes"]) == [url]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"text": "x"}]}, "returns no token ids"),
        ({"choices": []}, "answered without one choice"),
        ({}, "answered without one choice"),
    ],
)
def test_a_server_without_token_ids_is_one_line(
    answer: dict[str, Any],
    message: str,
    model: Path,
    here: Path,
    serve: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve(lambda payload: answer)
    line = fail(capsys, "audit", str(model), "--url", url, "--engine-model", "m", "--prompts", "prompts.jsonl")
    assert message in line


def test_a_server_that_refuses_is_quoted(
    model: Path, here: Path, serve: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(lambda payload: {"error": "no such path"}) + "/v2"
    line = fail(capsys, "audit", str(model), "--url", url, "--engine-model", "m", "--prompts", "prompts.jsonl")
    assert "refuses (404" in line
    assert "no such path" in line
