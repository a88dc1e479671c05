"""Our engine beside its peers: who competes, in which process, and what is made of the seconds. Needs no
peer."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.command import carry_out
from benchmarks.real_size import __main__ as command
from benchmarks.real_size.__main__ import choose, groups, items_of, main, parse
from benchmarks.real_size.competitors import (
    BASE,
    Competitor,
    PeerError,
    Plan,
    Process,
    bound_to_cores,
    environment_of,
    preloaded,
)
from benchmarks.real_size.report import Runs, describe_cell, to_markdown, verdicts
from benchmarks.real_size.serving import Took, Work
from benchmarks.real_size.vllm_alone import speculative_config
from benchmarks.real_size.with_law import prepare
from tests.lossless.helpers import CONFIG, make_policy
from tlt.hf.weights import save_model
from tlt.types import UserError

PROMPTS = [("a", [1, 2, 3]), ("b", [4]), ("c", [5, 6])]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("real") / "model"
    save_model(folder, CONFIG, dict(make_policy().state_dict()), dtype=torch.float32, source=None)
    return Plan(folder, None, None, None, "float32", 1, 4, 40, 0.5, {"tlt": Path(sys.executable)})


def took(seconds: float, tokens: str | None = None, length: float | None = None) -> Took:
    return Took(seconds, seconds / 4, 2 * seconds, 96, 4, length, tokens)


def runs(name: str, seconds: list[float], base: list[float], tokens: str | None = None) -> Runs:
    return Runs(name, [took(s, tokens) for s in seconds], [took(s, "same") for s in base])


# ── who competes ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_needs_other_speculation_of_vllm_has_a_process_of_its_own_and_our_engine_has_one_for_all() -> (
    None
):
    names = ("tlt-off", "tlt-cold", "tlt-4x1x4", "law-off", "law-cold", "law-warm", "law-4", "vllm-3")
    assert [Competitor.parse(name).process for name in names] == [
        "tlt", "tlt", "tlt", "law-off", "law-adaptive", "law-adaptive", "law-adaptive", "vllm-3",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["sglang-off", "vllm", "vllm-"])
def test_an_unknown_competitor_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="--competitors"):
        Competitor.parse(name)


def test_lookup_takes_one_sequence_alone() -> None:
    assert [Competitor.parse("llama-lookup").takes(num) for num in (1, 4)] == [True, False]
    assert Competitor.parse("llama-off").takes(4)


def test_who_lacks_an_interpreter_or_a_drafter_is_left_out_and_named() -> None:
    asked = ("vllm-off", "vllm-3", "llama-off", "tlt-cold")
    options = Namespace(competitors=asked, vllm=Path("python"), llama=None)
    chosen, (note,) = choose(options, has_drafter=False)
    assert [one.name for one in chosen] == [BASE, "vllm-off", "tlt-cold"]
    assert note.endswith("vllm-3, llama-off.")
    assert choose(Namespace(competitors=asked, vllm=Path("p"), llama=Path("p")), has_drafter=True)[1] == []


def test_no_more_processes_live_at_a_time_than_asked_for_and_the_base_is_in_every_group() -> None:
    names = ("tlt-off", "tlt-cold", "law-cold", "law-warm", "vllm-off", "llama-off", "llama-lookup")
    found = list(groups([Competitor.parse(name) for name in names], alive=3))
    assert [[one.name for one in group] for group in found] == [
        ["tlt-off", "tlt-cold", "law-cold", "law-warm", "vllm-off"],
        ["tlt-off", "llama-off", "llama-lookup"],
    ]
    (alone,) = groups([Competitor.parse("tlt-off")], alive=2)
    assert len(alone) == 1


def test_a_process_has_our_tree_and_its_threads_and_vllm_the_libraries_of_its_own_environment(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for file in ("vllm/libs/libtcmalloc_minimal.so.4", "torch/lib/libgomp.so.1"):
        (packages / file).parent.mkdir(parents=True)
        (packages / file).touch()
    python = tmp_path / "bin" / "python"
    given = {"PYTHONPATH": "/elsewhere", "LD_PRELOAD": "x.so", "PATH": "/bin"}
    ours = environment_of("tlt", python, 1, given)
    theirs = environment_of("vllm", python, 1, given, is_pinned=True)
    assert "GOMP_CPU_AFFINITY" not in ours
    assert ours["PYTHONPATH"] == theirs["PYTHONPATH"] != "/elsewhere"
    assert (ours["OMP_NUM_THREADS"], ours["PATH"], "LD_PRELOAD" in ours) == ("1", "/bin", False)
    assert theirs["LD_PRELOAD"] == ":".join(map(str, preloaded(python)))
    assert [path.name for path in preloaded(python)] == ["libtcmalloc_minimal.so.4", "libgomp.so.1"]
    assert theirs["GOMP_CPU_AFFINITY"] == bound_to_cores(1)["GOMP_CPU_AFFINITY"] != ""


def test_vllm_drafts_by_the_means_that_its_way_names() -> None:
    drafter = {"method": "eagle", "model": "folder"}
    assert speculative_config("off", drafter) is None
    assert speculative_config("3", drafter) == {**drafter, "num_speculative_tokens": 3}
    ngram, schedule = speculative_config("ngram", None), speculative_config("schedule", drafter)
    assert ngram is not None
    assert ngram["method"] == "ngram"
    assert schedule is not None
    assert "num_speculative_tokens_per_batch_size" in schedule


# ── what they do ────────────────────────────────────────────────────────────────────────────────────────────


def test_off_cold_warm_and_fixed_drafts_generate_the_same_tokens_of_the_wanted_number(plan: Plan) -> None:
    measure, _ = prepare(plan.job(Competitor.parse("tlt-off")))
    ways = ("off", "cold", "warm", "ngram:4x1x4", "cold")
    found = [measure(Work(way, PROMPTS, [12] * 3, 1.0, 1)) for way in ways]
    assert [one.num_tokens for one in found] == [36] * 5
    assert len({one.token_hash for one in found}) == 1
    assert found[0].accept_length is None
    assert found[3].accept_length is not None
    assert all(0 < one.first_seconds < one.seconds for one in found)
    other = measure(Work("off", PROMPTS, [12] * 3, 1.0, 2))
    assert other.token_hash != found[0].token_hash, "every round has keys of its own"


def test_a_workload_is_one_batch_whose_responses_have_their_own_lengths(plan: Plan) -> None:
    options, config = parse(["countdown", "--out", "x", "--workload", "recipes/countdown/longtail.json"])
    items = items_of(options, config)
    assert options.batches == (len(items),) == (128,)
    assert len({num_tokens for _, num_tokens in items}) > 50
    measure, _ = prepare(plan.job(Competitor.parse("tlt-off")))
    uneven, even = (measure(Work("off", PROMPTS, lengths, 1.0, 1)) for lengths in ([3, 9, 6], [9, 9, 9]))
    assert (uneven.num_tokens, even.num_tokens) == (18, 27)


def test_a_process_answers_until_its_pipe_is_closed(plan: Plan, tmp_path: Path) -> None:
    with Process(Competitor.parse("tlt-off"), plan, tmp_path) as process:
        answer = process.ask(Work("off", PROMPTS[:1], [5], 0.0, 0))
        assert (answer.num_tokens, answer.num_responses) == (5, 1)
        assert "torch" in process.versions
    assert process.process.returncode == 0


def test_a_process_that_dies_is_named_with_its_last_error(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    broken = Plan(**{**vars(plan), "model": tmp_path / "model"})
    with pytest.raises(PeerError, match=r"^tlt: its process ended with exit code 1 \(.*config.json"):
        Process(Competitor.parse("tlt-off"), broken, tmp_path)


# ── what is said of it ──────────────────────────────────────────────────────────────────────────────────────


def test_competitors_of_different_groups_are_compared_by_the_base_of_their_own_rounds() -> None:
    """The second group was measured while the machine was half as fast."""
    all_of_them = [
        runs(BASE, [2.0, 2.0], [2.0, 2.0], "same"),
        runs("tlt-cold", [1.0, 1.0], [2.0, 2.0], "same"),
        runs("vllm-off", [2.4, 2.4], [4.0, 4.0]),
        runs("vllm-3", [1.6, 1.6], [4.0, 4.0]),
    ]
    found = verdicts(all_of_them)
    assert found[BASE]["beside"] == "vllm-off"
    assert found[BASE]["ratio"]["mean"] == pytest.approx(0.6)
    assert found["tlt-cold"]["beside"] == "vllm-3"
    assert found["tlt-cold"]["ratio"]["mean"] == pytest.approx(0.8)
    assert found["same_tokens"]


def test_other_tokens_of_ours_are_noticed_and_those_of_peers_do_not_count() -> None:
    base, peer = runs(BASE, [1.0], [1.0], "same"), runs("vllm-off", [1.0], [1.0])
    assert verdicts([base, peer])["same_tokens"]
    assert not verdicts([base, peer, runs("law-off", [1.0], [1.0], "other")])["same_tokens"]
    assert BASE not in verdicts([base])


def test_the_report_has_speeds_verdicts_and_a_dash_where_nothing_was_measured() -> None:
    one = [runs(BASE, [2.0, 1.0], [2.0, 1.0], "same"), runs("llama-off", [1.0, 1.0], [2.0, 1.0])]
    cells = [describe_cell(1.0, 1, one), describe_cell(1.0, 4, one[:1])]
    figures = cells[0]["competitors"][BASE]
    assert figures["tokens_per_second"] == 72.0
    assert figures["decoded_per_second"] == pytest.approx((92 / 1.5 + 92 / 0.75) / 2)
    assert figures["cores"] == 2.0
    report = {
        "command": "c", "environment": {"cpu": "x"}, "subject": "s", "notes": ["Left out: nobody."],
        "versions": {"tlt": {"torch": "2"}},
        "setup": {"dtype": "float32", "num_tokens": 24, "threads": 2, "rounds": 2},
        "cells": json.loads(json.dumps(cells)),
    }  # fmt: skip
    text = to_markdown(report)
    assert "| tlt-off | 72.0 (48.0 – 96.0) · 1.00 (1.00 – 1.00) |" in text
    assert "| llama-off | 96.0 (96.0 – 96.0) · 1.41" in text
    assert "| – |\n" in text.split("Verdicts")[0]
    assert "| 1 | 0.71" in text.split("Verdicts")[1]
    assert "Left out: nobody." in text


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────


def test_quick_is_one_round_of_small_batches() -> None:
    options, config = parse(["countdown", "--out", "x", "--quick", "--sampling.temperature", "0.7"])
    assert (options.batches, options.rounds, options.temperatures) == ((1, 4), 1, (0.7,))
    assert config.sampling.temperature == 0.7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "give 1 or more"),
        (["--alive", "1"], "--alive: 2 or more"),
        (["--llama", sys.executable], "is no interpreter that has llama_cpp"),
        (["--vllm", "nowhere"], "--vllm: nowhere is no interpreter"),
        (["--competitors", "tgi-off"], "'tgi-off' is unknown"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert carry_out("real_size", lambda: main(["countdown", "--out", "x", *words])) == 2
    assert message in capsys.readouterr().err


def test_a_model_with_an_adapter_beside_it_is_refused_for_the_others_would_read_another_one(
    tmp_path: Path,
) -> None:
    options, config = parse(["smollm2/reasoning", "--out", "x", "--model.path", str(tmp_path)])
    with pytest.raises(
        UserError,
        match=r"^model.adapter: .*warm-up lies beside the model that all read; give a folder with it",
    ):
        command.prepare(options, config, tmp_path, 8)
