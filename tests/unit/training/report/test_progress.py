"""The progress of a phase, in words and on the screen."""

import io
import re
from pathlib import Path

from tests.unit.training.report.records import record
from tests.unit.training.report.test_console import Terminal, drawn
from tlt.training.report.console import Console
from tlt.training.report.progress import Doing, PhaseProgress, ReplicaProgress

REPLICAS = [
    ReplicaProgress(12, 4100, 512, Doing.GENERATE),
    ReplicaProgress(20, 5200, 0, Doing.TRAIN),
]
PROGRESS = PhaseProgress.of(REPLICAS, 64, 1204.4)


def test_the_progress_says_responses_speed_the_longest_and_what_ranks_do() -> None:
    assert str(PROGRESS) == (
        "32 / 64 responses · 1,204 tok/s · longest 512 tokens · ranks: 1 generating, 1 training the drafter"
    )
    assert str(PhaseProgress.of(REPLICAS[:1], 64, None)) == "12 / 64 responses · longest 512 tokens"


def test_what_a_replica_tells_arrives_as_it_was_told() -> None:
    assert [ReplicaProgress.decode(one.encode()) for one in REPLICAS] == REPLICAS


def test_on_a_terminal_the_progress_stands_below_the_live_line_until_the_phase_ends() -> None:
    with Console(num_steps=2, stream=Terminal(), environ={"TERM": "xterm"}) as console:
        console.progress(PROGRESS)
        assert "32 / 64 responses" in drawn(console)
        console.progress(None)
        assert "responses" not in drawn(console)


def test_off_a_terminal_a_line_says_the_progress_once_a_minute_and_short_phases_say_nothing() -> None:
    now, stream = [0.0], io.StringIO()
    with Console(stream=stream, environ={}, clock=lambda: now[0]) as console:
        for second in range(150):
            now[0] = float(second)
            console.progress(PROGRESS)
        console.progress(None)
        now[0] += 100.0
        console.progress(PROGRESS)
    assert stream.getvalue().splitlines() == [f"  {PROGRESS}"] * 2


def test_the_log_has_the_plain_lines_of_the_screen_and_a_resumed_run_appends(tmp_path: Path) -> None:
    log, plain = tmp_path / "console.log", io.StringIO()
    for number in (1, 2):
        with Console(num_steps=2, stream=Terminal(), environ={"TERM": "xterm"}, log=log) as console:
            console.header({"model": "base", "folder": "runs/a"})
            with console.status("evaluating"):
                console.evaluation(0, 0.5, 1.0)
            console.step(record(number))
    with Console(stream=plain, environ={}) as console:
        console.header({"model": "base", "folder": "runs/a"})
        with console.status("evaluating"):
            console.evaluation(0, 0.5, 1.0)
        console.step(record(1))
    text = log.read_text()
    assert not re.search(r"\x1b", text)
    assert text.startswith(plain.getvalue())
    assert text.count("evaluating …") == 2
