"""Metrics, statistics, the timeline and the console: what a run says of itself."""

import dataclasses
import io
import itertools
import json
import math
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import rich.console
import torch

from tlt.accounts import (
    DrafterCheck,
    IdleRecord,
    LengthStats,
    RewardSummary,
    RolloutRecord,
    UpdateMetrics,
    percentile,
)
from tlt.io.files import dumps, write_jsonl
from tlt.report.console import WIDTH, Console, duration
from tlt.report.outcome import Gain, Outcome, summary_rows
from tlt.report.record import MetricsWriter, StepRecord, paired_sign_flip_test, read_metrics
from tlt.report.timeline import (
    Epoch,
    Timeline,
    critical_path_share,
    merge_timelines,
    rank_path,
    read_spans,
    shared_epoch,
)
from tlt.spans import Span
from tlt.types import UserError

PARTS = {name: kind for name, kind in get_type_hints(StepRecord).items() if dataclasses.is_dataclass(kind)}


def record(step: int, **changes: Any) -> StepRecord:
    """A record in which every field says something. changes: of its own fields, and by part: {field:
    value}."""
    given: dict[str, dict[str, object]] = {
        "rollout": {
            "response_tokens": LengthStats.of([5, 9, 700]), "accept_by_depth": (0.8, 0.6), "strategy_seconds": {"off": 1.5},
            "strategy_speed": {"off": 200.0}, "strategy_predicted": {}, "draft_acceptance_rate_pos": (0.8, 0.5),
            "followed_by_age": {"1": 40},
        },
        "rewards": {
            "parts": {"task": 0.5, "brief": -0.5}, "metrics": {}, "reward_by_task": {"sums": 0.5},
            "solve_rate_by_task": {"sums": 0.25},
        },
        "update": {},
        "drafter": {"version": step},
        "idle": {"preemption_seconds": (0.01, 0.002), "seconds_by_use": {"rest": 0.5}, "gain": {}, "cost": {"train": 0.1}},
    }  # fmt: skip
    parts = {
        name: kind(**{**plain(kind), **given[name], **changes.pop(name, {})}) for name, kind in PARTS.items()
    }
    return StepRecord(**{**plain(StepRecord), "step": step, "policy_version": step, **parts, **changes})


def plain(kind: type) -> dict[str, object]:
    return {
        field.name: {"int": 3, "str": "off", "bool": False}.get(field.type, 0.5)
        for field in dataclasses.fields(kind)
    }


# -- metrics -------------------------------------------------------------------------------------------------


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl", 0) as writer:
        writer.write(record(0))
    assert read_metrics(writer.path) == [record(0)]
    line = json.loads(writer.path.read_text())
    assert line["rollout"]["response_tokens"].keys() == {"mean", "p50", "p95", "max"}


def test_what_does_not_exist_is_null_in_the_file_and_nan_in_the_record(tmp_path: Path) -> None:
    empty = {"accept_length": math.nan, "accept_by_depth": ()}
    nothing = record(
        0, update={"grad_norm": math.inf}, rollout=dict(empty, response_tokens=LengthStats.of([]))
    )
    with MetricsWriter(tmp_path / "metrics.jsonl", 0) as writer:
        writer.write(nothing)
    text = writer.path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (back,) = read_metrics(writer.path)
    assert math.isnan(back.rollout.accept_length)
    assert math.isnan(back.rollout.response_tokens.mean)
    assert json.loads(dumps({"a": np.float32("nan"), "b": torch.tensor(2.5), "c": np.int64(3)})) == {
        "a": None,
        "b": 2.5,
        "c": 3,
    }


NOT_THERE: Any = pytest.approx(math.nan, nan_ok=True)

OLD = {
    "step": 4, "policy_version": 3, "algorithm": "grpo", "step_seconds": 3.5, "cpu_seconds": 5.5, "finished_at": 9.0,
    "rollout_seconds": 1.5, "num_responses": 8, "num_tokens": 80, "truncated_share": 0.125, "tokens_per_second": 53.0,
    "response_tokens": {"mean": 10.0, "p50": 9.0, "p95": None, "max": 12}, "num_migrated": 2, "accept_length": None,
    "accept_by_depth": [0.5, None], "strategy_seconds": {"off": 1.0}, "strategy_speed": {}, "strategy_predicted": {},
    "reward_mean": 0.25, "solve_rate": 0.375, "reward_errors": 1, "first_reward_error": "why", "reward_parts": {"a": 0.5},
    "solve_rate_by_task": {"sums": 0.5}, "zero_variance_groups": 2, "loss": -0.5, "grad_norm": 0.75, "entropy": 0.2,
    "clip_fraction": 0.0, "kl": None, "lr": 1e-4, "engine_trainer_logprob_gap": 1e-7, "update_seconds": 1.25,
    "drafter_version": 7, "drafter_acceptance": 0.7, "retrieval_acceptance": 0.3, "drafter_training": "trained",
    "drafter_set_aside": "", "drafter_loss": 2.5, "drafter_tokens": 40, "drafter_captured_tokens": 30,
    "drafter_recomputed_tokens": 10, "drafter_train_seconds": 0.5, "drafter_refreshes": 2, "idle_seconds": 0.75,
    "harvested_share": 0.5, "preemption_seconds": [0.01], "idle_seconds_by_use": {"rest": 0.25}, "idle_gain": {"train": 0.1},
    "ahead_tokens": 5,
}  # fmt: skip
"""A line as it was written while all fields stood side by side, and some did not exist."""


def test_a_line_of_an_older_tlt_reads_as_the_records_of_today() -> None:
    found = StepRecord.from_json(json.dumps(OLD))
    assert (found.step, found.policy_version, found.algorithm, found.step_seconds) == (4, 3, "grpo", 3.5)
    assert found.rollout == RolloutRecord(
        1.5, 8, 80, found.rollout.response_tokens, 0.125, 53.0, NOT_THERE,
        (0.5, NOT_THERE), {"off": 1.0}, {}, {}, num_migrated=2,
        draft_acceptance_rate=NOT_THERE, draft_mean_acceptance_length=NOT_THERE,
    )  # fmt: skip
    assert found.rollout.response_tokens == LengthStats(10.0, 9.0, NOT_THERE, 12)
    assert found.rewards == RewardSummary(0.25, 0.375, 1, "why", {"a": 0.5}, solve_rate_by_task={"sums": 0.5})
    gaps = {"engine_trainer_logprob_gap": 1e-7, "engine_trainer_logprob_gap_max": NOT_THERE}
    losses = {
        "loss": -0.5,
        "grad_norm": 0.75,
        "entropy": 0.2,
        "clip_fraction": 0.0,
        "kl": NOT_THERE,
        "lr": 1e-4,
    }
    assert found.update == UpdateMetrics(**losses, **gaps, zero_variance_groups=2, seconds=1.25)
    measured = DrafterCheck(7, 0.7, 0.3, "trained", before=NOT_THERE, coverage=NOT_THERE)
    assert found.drafter == dataclasses.replace(
        measured, tokens=40, loss=2.5, captured_tokens=30, recomputed_tokens=10, train_seconds=0.5
    )
    assert found.idle == IdleRecord(0.75, 0.5, (0.01,), {"rest": 0.25}, {"train": 0.1}, ahead_tokens=5)
    assert dumps(json.loads(StepRecord.from_json(found.to_json()).to_json())) == found.to_json(), (
        "written, it is one of today"
    )


@pytest.mark.parametrize("path", sorted(Path("benchmarks/results").glob("*/metrics.jsonl")), ids=str)
def test_the_records_of_the_published_runs_still_read(path: Path) -> None:
    records, lines = read_metrics(path), [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r.rewards.mean, r.update.loss, r.idle.seconds) for r in records] == [
        (line["reward_mean"], line["loss"], line["idle_seconds"]) for line in lines
    ]


def test_generated_logprobs_that_are_not_finite_are_null_in_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    write_jsonl(path, [{"text": "naïve", "logprobs": [-0.5, math.nan, -math.inf]}])
    assert path.read_text(encoding="utf-8") == '{"text": "naïve", "logprobs": [-0.5, null, null]}\n'


def test_resuming_drops_later_records_and_a_torn_line_and_never_repeats_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, 0) as writer:
        for step in range(5):
            writer.write(record(step, update={"loss": 1.0}))
    with path.open("a") as file:
        file.write('{"step": 5, "reward_m')
    with MetricsWriter(path, 3) as writer:
        assert [r.step for r in read_metrics(path)] == [0, 1, 2]
        with pytest.raises(AssertionError):
            writer.write(record(2))
        writer.write(record(3, update={"loss": 2.0}))
        assert [(r.step, r.update.loss) for r in read_metrics(path)] == [
            (0, 1.0),
            (1, 1.0),
            (2, 1.0),
            (3, 2.0),
        ], "not flushed"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line", ['{"step": 1}', "nonsense", "[]", "3", dumps(dataclasses.asdict(record(1)) | {"surplus": 1})]
)
def test_a_line_that_is_no_record_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(record(0).to_json() + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(UserError, match=r"no such file"):
        read_metrics(tmp_path / "other.jsonl")


def test_percentiles_are_interpolated_and_nan_of_nothing() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert math.isnan(percentile([], 50))
    assert LengthStats.of([7]) == LengthStats(7.0, 7.0, 7.0, 7)


# -- the paired test -----------------------------------------------------------------------------------------


def brute_force_p(before: list[float], after: list[float]) -> float:
    differences = [b - a for a, b in zip(before, after, strict=True)]
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in patterns]
    return sum(value >= sum(differences) - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_sign_flip_test_equals_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    before, after = (generator.integers(0, 5, 9) / 4 for _ in range(2))
    assert paired_sign_flip_test(before.tolist(), after.tolist()) == brute_force_p(
        before.tolist(), after.tolist()
    )


def test_the_sampled_sign_flip_test_agrees_with_the_exact_one() -> None:
    generator = np.random.default_rng(1)
    before = generator.random(14)
    after = before + generator.normal(0.15, 0.4, 14)
    exact = paired_sign_flip_test(before, after)
    sampled = paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)
    assert 0.01 < exact < 0.9
    assert abs(sampled - exact) < 5 * math.sqrt(
        exact * (1 - exact) / 16_000
    )  # wrong once in 10^6; the seed is fixed
    assert sampled == paired_sign_flip_test(before, after, num_permutations=16_000, seed=3)


def test_the_sign_flip_test_knows_its_extremes() -> None:
    assert paired_sign_flip_test([0.0] * 10, [1.0] * 10) == 2**-10
    assert paired_sign_flip_test([1.0] * 10, [0.0] * 10) == 1.0
    assert paired_sign_flip_test([0.5] * 300, [0.5] * 300) == 1.0
    assert paired_sign_flip_test([0.0] * 256, [1.0] * 256, num_permutations=999) == 1 / 1000
    with pytest.raises(ValueError, match="2 scores before and 1 after"):
        paired_sign_flip_test([1, 2], [1])
    with pytest.raises(ValueError, match="not finite"):
        paired_sign_flip_test([1.0], [math.nan])


def test_the_sign_flip_test_keeps_its_error_rate() -> None:
    """Where nothing changed, p <= 0.05 in at most 5 % of cases (here of 400; more than 9 % has a chance
    below 0.001)."""
    generator = np.random.default_rng(5)
    num_rejected = 0
    for _ in range(400):
        scores = generator.binomial(4, generator.random(64)[:, None], size=(64, 2)) / 4
        num_rejected += (
            paired_sign_flip_test(scores[:, 0], scores[:, 1], num_permutations=400, seed=1) <= 0.05
        )
    assert 0.02 < num_rejected / 400 < 0.09


# -- timeline ------------------------------------------------------------------------------------------------


def test_adjacent_spans_of_one_name_become_one_and_keep_their_busy_time(tmp_path: Path) -> None:
    timeline = Timeline(0, rank_path(tmp_path, 0))
    for start in (0.0, 0.0101, 0.0202):
        timeline.add(Span("decode", start, start + 0.01))
    timeline.add(Span("speculate", 0.0303, 0.04))
    timeline.add(Span("decode", 0.0401, 0.05))
    timeline.add(Span("decode", 0.06, 0.07))  # 10 ms later: not adjacent
    spans = timeline.spans
    assert [span.name for span in spans] == ["decode", "speculate", "decode", "decode"]
    assert (spans[0].start, spans[0].end) == (0.0, pytest.approx(0.0302))
    timeline.flush()
    merge_timelines(tmp_path, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    first = next(event for event in events if event["name"] == "decode")
    assert first["args"] == {"spans": 3, "busy_ms": 30.0}


def test_the_trace_has_a_row_per_rank_on_one_axis_and_survives_a_resume(tmp_path: Path) -> None:
    for rank, epoch in ((0, 1000.0), (1, 1007.0)):
        timeline = Timeline(rank, rank_path(tmp_path, rank), Epoch(to_unix=epoch))
        timeline.add(Span("decode", 1.0 + rank, 2.0))
        timeline.flush()
        timeline.flush()
    with rank_path(tmp_path, 1).open("a") as file:
        file.write('["update", 100')  # torn by a kill
    again = Timeline(1, rank_path(tmp_path, 1), Epoch(to_unix=1100.0))
    again.add(Span("update", 5.0, 6.0))
    again.flush()
    merge_timelines(tmp_path, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "decode", 0.0, 1e6),
        (1, "decode", 8e6, 0.0),
        (1, "update", 104e6, 1e6),
    ]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1"}
    assert read_spans(tmp_path)[1][-1] == Span("update", 1105.0, 1106.0)


DAMAGES = {
    "binary": (b"\xff\xfe\x00\n\x80" * 3, "3 of its 5 lines are no spans"),
    "a line of another kind": (b'{"a": 1}\n', "1 of its 3 lines are no spans"),
    "times that are none": (
        b'["decode", NaN, 1, 1, 1]\n["decode", 1, 1, 1, Infinity]\n',
        "2 of its 4 lines are no spans",
    ),
    "a line that is nested too deeply": (b"[" * 99_999 + b"\n", "1 of its 3 lines are no spans"),
    "one long line": (b"x" * 200_000, "1 of its 3 lines are no spans"),
    "a torn line": (b'["decode", 1', ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_timeline_ends_no_run_and_what_is_sound_is_drawn(damage: str, tmp_path: Path) -> None:
    data, told = DAMAGES[damage]
    said: list[str] = []
    path = rank_path(tmp_path, 0)
    for start in (1.0, 2.0):
        timeline = Timeline(0, path, say=said.append)
        timeline.add(Span("decode", start, start + 0.5))
        timeline.flush()
        if start == 1.0:
            path.write_bytes(path.read_bytes() + data)
    (tmp_path / "timeline.rankx.jsonl").write_text("no rank's\n")
    missing = merge_timelines(tmp_path, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event["ts"] for event in events if event["ph"] == "X"] == [0.0, 1e6]
    assert [*said, *missing] == ([f"{path}: {told}; {tmp_path / 'timeline.json'} lacks them"] if told else [])


def test_a_device_in_the_place_of_a_timeline_is_not_read_without_end(tmp_path: Path) -> None:
    rank_path(tmp_path, 0).symlink_to("/dev/full")  # which gives zeros for ever
    said: list[str] = []
    Timeline(0, rank_path(tmp_path, 0), say=said.append)
    assert "is no file" in " ".join(said)
    assert "is no file" in " ".join(merge_timelines(tmp_path, tmp_path / "timeline.json"))


def test_a_folder_in_the_place_of_a_timeline_or_its_picture_is_one_note_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    rank_path(tmp_path, 1).mkdir()
    said: list[str] = []
    timelines = [Timeline(rank, rank_path(tmp_path, rank), say=said.append) for rank in range(2)]
    for _ in range(2):
        for timeline in timelines:
            timeline.add(Span("decode", 1.0, 2.0))
            timeline.flush()
            assert timeline.spans == []
    assert said == [
        f"{rank_path(tmp_path, 1)}: cannot be written (Is a directory); timeline.json will lack what this "
        "rank does now"
    ]
    assert merge_timelines(tmp_path, tmp_path / "timeline.json") == [
        f"{rank_path(tmp_path, 1)}: cannot be read (Is a directory); {tmp_path / 'timeline.json'} lacks "
        "rank 1"
    ]
    (tmp_path / "timeline.json").unlink()
    (tmp_path / "timeline.json").mkdir()
    assert merge_timelines(tmp_path, tmp_path / "timeline.json")[1].endswith(
        "; there is no picture of the run's time"
    )


def test_a_span_measures_with_the_given_clock_and_nests() -> None:
    clock = itertools.count(0.0, 1.0).__next__
    timeline = Timeline(0, clock=clock)
    with timeline.span("step"), timeline.span("update"):
        pass
    assert timeline.spans == [Span("update", 1.0, 2.0), Span("step", 0.0, 3.0)]


def test_clocks_of_one_machine_need_no_offset_and_others_get_the_median() -> None:
    """Two ranks; rank 1's clock runs 40 s ahead of rank 0's, and rank 0's Unix time is 500 s ahead of its
    clock."""

    def epochs(boot_ids: tuple[str, str]) -> list[Epoch]:
        rounds = itertools.count()

        def gather_as(rank: int) -> object:
            def gather(mine: tuple[str, float, float] | None) -> list[object]:
                now = 10.0 + 0.1 * next(rounds)
                return [(boot_ids[0], now, now + 500.0), (boot_ids[1], now + 40.0, 0.0)]

            return gather

        return [shared_epoch(rank, gather_as(rank)) for rank in range(2)]

    first, second = epochs(("a", "b"))
    assert (first.to_rank_0, second.to_rank_0) == (0.0, pytest.approx(-40.0))
    assert (first.to_unix, second.to_unix) == (pytest.approx(500.0), pytest.approx(460.0))
    first, second = epochs(("a", "a"))
    assert (first.to_rank_0, second.to_rank_0) == (0.0, 0.0)
    assert first.to_unix == second.to_unix == pytest.approx(500.0)


def test_a_span_costs_about_a_microsecond() -> None:
    timeline = Timeline(0)
    best = math.inf
    for _ in range(5):
        start = time.process_time()  # not the wall clock: a busy machine makes nothing dearer
        for _ in range(4000):
            with timeline.span("decode"):
                pass
        best = min(best, (time.process_time() - start) / 4000)
    assert best < 5e-6  # about 1 µs


SYNTHETIC = {
    0: [
        Span("prefill", 0.0, 1.0),
        Span("decode", 1.0, 6.0),
        Span("update", 6.2, 9.9),
        Span("step", 0.0, 10.0),
    ],
    1: [Span("decode", 0.5, 3.0), Span("train drafter", 3.0, 6.2), Span("update", 6.2, 9.9)],
}


def test_the_critical_path_share_counts_only_training_after_the_last_response() -> None:
    assert critical_path_share(SYNTHETIC) == pytest.approx(0.2 / 10)
    in_time = {0: SYNTHETIC[0], 1: [Span("decode", 0.5, 3.0), Span("train drafter", 3.0, 6.0)]}
    assert critical_path_share(in_time) == 0.0


def test_of_several_replicas_the_one_that_trains_longest_counts_once() -> None:
    also = [Span("decode", 0.0, 2.0), Span("train drafter", 2.0, 6.1), Span("train drafter", 6.1, 6.3)]
    assert critical_path_share(SYNTHETIC | {2: also}) == pytest.approx(0.3 / 10)
    checked = {rank: [*spans, Span("check drafter", 6.1, 6.5)] for rank, spans in SYNTHETIC.items()}
    assert critical_path_share(checked) == pytest.approx(0.5 / 10)


def test_each_step_has_its_own_last_response_and_evaluation_is_none() -> None:
    later = {
        rank: [
            *spans,
            *(Span(s.name, s.start + 20, s.end + 20) for s in spans),
            Span("evaluate", 30, 40),
            Span("decode", 31, 39),
        ]
        for rank, spans in SYNTHETIC.items()
    }
    assert critical_path_share(later) == pytest.approx(0.4 / 20)
    inside = {0: [*SYNTHETIC[0], Span("evaluate", 9.0, 9.8), Span("decode", 9.1, 9.7)], 1: SYNTHETIC[1]}
    assert critical_path_share(inside) == pytest.approx(0.2 / 10)
    assert math.isnan(critical_path_share({}))


# -- console -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, environ: dict[str, str], **options: object) -> str:
    with Console(num_steps=3, stream=stream, environ=environ, **options) as console:
        with console.status("evaluating on 256 held-out problems"):
            console.evaluation(0, 0.402, 21.0)
        for step in range(3):
            extreme = {
                "response_tokens": LengthStats(1e4, 13141.0, 3e4, 131072),
                "tokens_per_second": 123456.7,
                "accept_length": math.nan,
            }
            console.step(record(step, rollout=extreme if step == 1 else {}))
        console.evaluation(3, 0.483, 21.0, is_best=True)
        products = {
            "policy": Path("/somewhere/far") / ("long-" * 30),
            "metrics.jsonl": Path.cwd() / "runs" / "metrics.jsonl",
        }
        outcome = Outcome(Gain((0, 3), (0.402, 0.483), None, 3e-5), [], 3, 561.0)
        console.summary([*summary_rows(outcome, products)], ["tlt generate runs/policy"])
    return stream.getvalue()


def rows_of(outcome: Outcome) -> dict[str, str]:
    """Values by name; lines without a name go on with the one before."""
    rows: dict[str, str] = {}
    for name, value in summary_rows(outcome, {}):
        rows[name or [*rows][-1]] = f"{rows.get(name or [*rows][-1], '')} {value.plain}".strip()
    return rows


def test_a_summary_says_reward_and_solve_rate_where_functions_alone_score_and_what_was_left_out() -> None:
    gain = Gain((0, 8), (0.008, 0.0), (0.585, 0.642), 0.013)
    rows = rows_of(
        Outcome(
            gain, ["the evaluation after 9 updates is left out: 2 of its responses have no score"], 9, 60.0
        )
    )
    assert (
        rows["reward"]
        == "0.585 → 0.642 on held-out problems, before → after paired sign-flip test, one-sided: p = 0.013"
    )
    assert rows["solved"].startswith("0.8% → 0.0% the evaluation after 9 updates is left out: 2 of its")
    later = rows_of(Outcome(Gain((4, 8), (0.5, 0.75), None, 0.25), [], 9, 60.0))
    assert later["solved"].startswith("50.0% → 75.0% of held-out problems, after 4 → 8 updates")


def test_the_time_of_a_resumed_run_is_that_of_all_steps_and_what_this_command_took_is_said_beside_it() -> (
    None
):
    assert rows_of(Outcome(None, [], 38, 560.0))["time"] == "9 min 20 s, 38 steps"
    resumed = Outcome(None, [], 38, 80.0, recorded_seconds=560.0)
    assert (
        rows_of(resumed)["time"]
        == "9 min 20 s for 38 steps and the evaluations; 1 min 20 s since this command began"
    )


def test_while_something_else_than_steps_goes_on_the_live_line_says_no_time_left() -> None:
    stream = Terminal()
    with Console(num_steps=2, stream=stream, environ={"TERM": "xterm"}) as console:
        for step in range(2):
            console.step(record(step, step_seconds=100.0))
            with console.status("evaluating on 256 held-out problems"):
                assert "left" not in drawn(console)
            assert ("1 min 40 s left" in drawn(console)) == (step == 0)


def drawn(console: Console) -> str:
    """The live line, as plain text."""
    paper = io.StringIO()
    rich.console.Console(file=paper, width=WIDTH).print(console._status_line())
    return paper.getvalue()


def test_an_evaluation_without_any_score_says_so() -> None:
    stream = io.StringIO()
    with Console(stream=stream, environ={}) as console:
        console.evaluation(4, None, 21.0)
        console.evaluation(5, 0.25, 21.0, reward=0.375)
    assert stream.getvalue().splitlines() == [
        "      ◆ held-out problems after 4 updates: no score  21 s",
        "      ◆ held-out problems after 5 updates: reward 0.375, 25.0% solved  21 s",
    ]


def test_in_a_notebook_the_lines_go_to_the_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich alone would show each of them as an output of its own."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "40.2% → 48.3%" in show(io.StringIO(), {})


@pytest.mark.parametrize(
    ("stream", "environ"),
    [(io.StringIO(), {}), (Terminal(), {"NO_COLOR": "1"}), (Terminal(), {"TERM": "dumb"})],
)
def test_without_a_terminal_or_color_there_are_plain_narrow_lines(
    stream: io.StringIO, environ: dict[str, str]
) -> None:
    text = show(stream, environ)
    assert "\x1b" not in text
    lines = text.splitlines()
    table = [line for line in lines if "/somewhere" not in line]
    assert max(map(len, table)) <= WIDTH
    heading = next(line for line in lines if "rollout" in line)
    rows = [line for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert len(rows) == 3
    assert {len(line) for line in [heading, *rows]} == {len(heading)}, "columns do not line up"
    assert "–" in rows[1]
    for said in (
        "40.2% → 48.3%",
        "p < 0.0001",
        "9 min 21 s",
        "tlt generate runs/policy",
        "runs/metrics.jsonl",
        "long-" * 30,
        "best so far",
    ):
        assert said in text


def test_on_a_terminal_there_are_colors_and_a_panel_within_100_columns() -> None:
    text = show(Terminal(), {"TERM": "xterm-256color", "COLUMNS": "100"})
    assert "\x1b[" in text
    assert "╭─ training complete" in re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_on_a_terminal_of_80_columns_nothing_breaks_within_a_row_or_a_word() -> None:
    stream = Terminal()
    with Console(num_steps=2, stream=stream, environ={"TERM": "xterm", "COLUMNS": "80"}) as console:
        console._rich.width = 80
        console.header({"task": "countdown: 4,096 problems, 16 held out; 8 × 8 responses a step, 60 steps"})
        console.step(record(0))
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()]
    assert any(line.endswith(" steps") for line in lines)
    table = [line for line in lines if "─" in line or "rollout" in line or line.split()[:1] == ["1"]]
    assert len(table) == 3
    assert len({len(line) for line in table}) == 1
    assert max(map(len, lines)) <= 80


def test_responses_that_could_not_be_scored_are_counted_below_the_row() -> None:
    stream = io.StringIO()
    with Console(stream=stream, environ={}) as console:
        console.step(record(0, rewards={"num_errors": 0, "first_error": ""}))
        console.step(record(1, rewards={"num_errors": 2, "first_error": "ZeroDivisionError: in score"}))
    said = [line for line in stream.getvalue().splitlines() if "could not be scored" in line]
    assert len(said) == 1
    assert said[0].strip().startswith("step 2: 2 of ")
    assert said[0].endswith("the first: ZeroDivisionError: in score")


def test_a_reason_that_would_steer_the_terminal_is_shown_as_it_is_written() -> None:
    stream = io.StringIO()
    Console(stream=stream).reward_errors(
        record(0, rewards={"num_errors": 1, "first_error": "\x1b[2J\x9b1m gone"})
    )
    assert r"\x1b[2J\x9b1m gone" in stream.getvalue()


def test_what_stood_in_the_journal_is_said_below_the_row() -> None:
    stream = io.StringIO()
    with Console(stream=stream, environ={}) as console:
        console.step(record(0, rollout={"recalled_tokens": 0}))
        console.step(record(1, rollout={"recalled_tokens": 1200, "num_tokens": 4800}))
    said = [line.strip() for line in stream.getvalue().splitlines() if "journal" in line]
    assert said == ["step 2: 1,200 of its 4,800 tokens stood in the journal"]


def test_the_header_names_everything_before_training() -> None:
    stream = io.StringIO()
    with Console(stream=stream, environ={}) as console:
        console.header({"model": "base: llama, 3.9 M parameters", "folder": "runs/x"})
    assert stream.getvalue().splitlines()[:2] == ["model   base: llama, 3.9 M parameters", "folder  runs/x"]


def test_ranks_that_are_not_enabled_say_nothing() -> None:
    assert show(Terminal(), {"TERM": "xterm"}, enabled=False) == ""


def test_durations_are_written_as_one_says_them() -> None:
    assert [duration(s) for s in (0.2, 41, 59.7, 561, 11_220)] == [
        "0 s",
        "41 s",
        "1 min 00 s",
        "9 min 21 s",
        "3 h 07 min",
    ]


def test_a_long_timeline_is_merged_without_being_held_in_memory(tmp_path: Path) -> None:
    num = 3_000
    with rank_path(tmp_path, 0).open("w") as file:
        for i in range(
            num
        ):  # a span that ends later is written later; where two start together the inner one is written first
            file.write(json.dumps(["decode", float(i), i + 0.25, 0.25, 1]) + "\n")
            file.write(json.dumps(["step", float(i), i + 1.0, 1.0, 1]) + "\n")
    tracemalloc.start()
    assert merge_timelines(tmp_path, tmp_path / "timeline.json") == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 * 2 * num, "bytes of a row"
    events = [
        event
        for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert [event["name"] for event in events] == ["step", "decode"] * num
    assert [event["ts"] for event in events[::2]] == [i * 1e6 for i in range(num)]
