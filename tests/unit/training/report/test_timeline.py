"""Spans, their files and picture."""

import itertools
import json
from pathlib import Path

import pytest

from tlt.base.spans import Span
from tlt.training.report.timeline import (
    Epoch,
    Timeline,
    merge_timelines,
    rank_path,
    shared_epoch,
)


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
        (0, "decode", 1001e6, 1e6),
        (1, "decode", 1009e6, 0.0),
        (1, "update", 1105e6, 1e6),
    ]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rank 0", "rank 1"}


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
    assert [event["ts"] for event in events if event["ph"] == "X"] == [1e6, 2e6]
    assert [*said, *missing] == ([f"{path}: {told}; {tmp_path / 'timeline.json'} lacks them"] if told else [])


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
        "what this rank did"
    ]
    (tmp_path / "timeline.json").unlink()
    (tmp_path / "timeline.json").mkdir()
    assert merge_timelines(tmp_path, tmp_path / "timeline.json")[0].endswith(
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
