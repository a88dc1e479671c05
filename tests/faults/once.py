"""Disturbs one process of a run once: when its processes have together passed a place in the code a given
number of times. Reward workers import this, so it imports nothing heavy.

    DISTURB={"place": "score test", "call": 3, "does": "SIGKILL", "whom": "worker", "marks": FOLDER}

Each pass leaves a file in FOLDER; the process that makes the last file acts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.left import children, command_line, parent

WORKER = "tlt.tasks.rewards.worker"


def passes(place: str) -> None:
    """Notes that this process is at a place, and disturbs the run where it is to be now."""
    plan = json.loads(os.environ.get("DISTURB", "{}"))
    if plan.get("place") != place:
        return
    for call in range(1, plan["call"] + 1):
        try:
            os.close(os.open(Path(plan["marks"], str(call)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if call == plan["call"]:
            disturb(plan["does"], plan["whom"])
        return


def disturb(does: str, whom: str) -> None:
    """Sends a signal, SIGCONT two seconds after "pause"; or, as the process itself, exits or forks."""
    if does == "exit":
        os._exit(3)
    elif does == "fork":
        os.fork()  # both go on, and answer
    elif does == "pause":
        (process,) = find(whom)
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {process}"], start_new_session=True)
        os.kill(process, signal.SIGSTOP)
    else:
        for process in find(whom):
            os.kill(process, signal.Signals[does])
        if whom == "launcher" and does == "SIGKILL":
            time.sleep(60)  # what this process did next might come before the launcher's death


def find(whom: str) -> list[int]:
    """Returns the processes meant, as this one sees them, a rank or one of its workers. A worker's keeper
    is the process between it and its rank."""
    lineage = [os.getpid()]
    while WORKER in command_line(lineage[-1]):
        lineage.append(parent(lineage[-1]))
    rank = lineage[-1]
    launcher = parent(rank)
    match whom:
        case "worker" if lineage[0] != rank:
            return lineage[:1]
        case "worker":
            worker = next(child for child in children(rank) if WORKER in command_line(child))
            return [(children(worker) or [worker])[0]]
        case "keeper":
            return [parent(lineage[0])]
        case "rank":
            return [rank]
        case "launcher":
            return [launcher]
        case _:  # whom a terminal's Ctrl-C reaches
            return [
                launcher,
                *(child for child in children(launcher) if command_line(child) == command_line(launcher)),
            ]
