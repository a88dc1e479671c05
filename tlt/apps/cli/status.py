"""`tlt status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from tlt.apps.cli.options import Options, Written
from tlt.apps.cli.summary import Summary, seconds
from tlt.base.io.files import Record


class Status(Options):
    """Show where a run stands: step, rewards, speed, time left, failures.

    Reads the run's files alone, so it works while the run goes on, after its end, and after a crash.
    """

    run: Annotated[Path, Written("RUN", is_alone=True)]
    """Folder of the run (run.out_dir)."""


def run(options: Status) -> Record:
    from tlt.training.saved.run_status import read_status

    status = read_status(options.run)
    steps = [
        {
            "step": one.step,
            "reward": one.rewards.mean,
            "solve_rate": one.rewards.solve_rate,
            "tokens_per_second": one.rollout.tokens_per_second,
            "accept_length": one.rollout.accept_length,
            "step_seconds": one.step_seconds,
        }
        for one in status.recent
    ]
    held_out = [
        {"step": one.step, "solve_rate": one.solve_rate, "reward": one.reward} for one in status.evaluations
    ]
    ago = None if status.written_at is None else max(time.time() - status.written_at, 0.0)
    return {
        "run": str(status.folder),
        "state": status.state,
        "process": status.process,
        "step": status.step,
        "num_steps": status.num_steps,
        "left_seconds": status.seconds_left,
        "per_step_seconds": status.seconds_per_step,
        "since_last_write_seconds": ago,
        "checkpoint": status.checkpoint,
        "restarts": len(status.failures),
        "last_failure": " ".join(status.failures[-1]) if status.failures else None,
        "on_resume": status.on_resume,
        "last_steps": steps,
        "held_out": held_out,
    }


def summarize(record: Record) -> Summary:
    headline = f"{record['state']}: step {record['step']:,} of {record['num_steps']:,}"
    if record["left_seconds"] is not None:
        headline += f", {seconds(record['left_seconds'])} left"
    elif record["state"] == "running" and record["step"] >= record["num_steps"]:
        headline += ", evaluates or saves"
    rows: Record = {"folder": record["run"]}
    if record["process"] is not None:
        rows["process"] = str(record["process"])
    rows["last write"] = f"{seconds(round(record['since_last_write_seconds'] or 0))} ago"
    rows["time per step"] = seconds(record["per_step_seconds"]) if record["per_step_seconds"] else None
    rows["checkpoint"] = "none" if record["checkpoint"] is None else f"after step {record['checkpoint']:,}"
    rows["restarts"] = record["restarts"]
    if record["last_failure"] is not None:
        rows["last failure"] = f"{record['last_failure']} (failures.log)"
    rows["--resume"] = record["on_resume"]
    rows["last steps"] = [
        {
            "step": one["step"],
            "reward": one["reward"],
            "solved_share": one["solve_rate"],
            "tokens/s": one["tokens_per_second"],
            "accept length": one["accept_length"],
            "time_seconds": one["step_seconds"],
        }
        for one in record["last_steps"]
    ]
    rows["held-out problems"] = [
        {"after step": one["step"], "reward": one["reward"], "solved_share": one["solve_rate"]}
        for one in _ends(record["held_out"])
    ]
    return Summary(headline, {name: value for name, value in rows.items() if value != []})


def _ends(lines: list[Record]) -> list[Record]:
    return lines if len(lines) <= 4 else [lines[0], *lines[-3:]]
