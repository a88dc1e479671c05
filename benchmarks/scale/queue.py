"""How do the shared queue and the store bear many replicas? These sleep instead of generating; the store is the real one.

    python -m benchmarks.scale.queue --replicas 8,64,512 --out benchmarks/results/scale-queue

Each replica is a thread with a connection of its own, in one of a few processes. It does what a replica does in a phase: takes
units, shows signs of life, asks who offers help, and when it has run dry waits for news. Units last 0.2 to 1 s, and in every
phase one lasts as long as eight: the long tail, in which all others wait.

"before" is how it was until November 2026: who waits asks all it can ask every 2 ms, everybody watches everybody once a second,
and who loses a race tries again at once. Client and server share this machine's cores: the store would bear more than is shown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore

from tlt.bench.report import environment, number, provenance, table, write_report
from tlt.distributed.work_queue import POLL_SECONDS, Coordinator, connect_coordinator

STEP_SECONDS = 0.02
"""An engine step."""
PROCESSES = 4
TIMEOUT = 900.0


class Before(Coordinator):
    """Waits as replicas did before they learnt to back off."""

    def has_news(self, offers_help: bool = False) -> bool:
        for _ in range(2):  # once to look, once to ask whether to wait
            if self.all_done() or self.has_work():
                return True
        if offers_help:
            self.offer_help()
        self.pause = POLL_SECONDS
        return False

    def _let_others_go_first(self) -> None: ...

    def _next_to_watch(self) -> list[int]:
        return list(range(self.num_replicas))


@dataclass
class Seen:
    """What one replica saw: seconds on the machine's clock."""

    num_operations: int = 0
    latencies: list[float] = field(default_factory=list)
    units: list[int] = field(default_factory=list)  # of each phase
    begun: list[float] = field(default_factory=list)
    first_taken: list[float] = field(default_factory=list)
    last_finished: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)


class Timed:
    """A store that counts its operations; every 16th is measured."""

    def __init__(self, store: Store, seen: Seen) -> None:
        self.store, self.seen = store, seen

    def __getattr__(self, name: str) -> Any:
        operation, seen = getattr(self.store, name), self.seen

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return operation(*arguments)
            finally:
                seen.num_operations += 1
                if seen.num_operations % 16 == 0:
                    seen.latencies.append(time.perf_counter() - start)

        return timed


def phases_of(num_replicas: int) -> int:
    """Returns the number of phases: of many replicas one tells enough."""
    return 3 if num_replicas <= 64 else 1


def seconds_of(unit: int, phase: int, num_units: int) -> float:
    if unit == num_units // 2:
        return 5.0
    return random.Random(f"{unit}/{phase}").uniform(0.2, 1.0)


def simulate(coordinator: Coordinator, num_units: int, seen: Seen) -> None:
    """Plays one replica through the phases."""
    for phase in range(phases_of(coordinator.num_replicas)):
        coordinator.begin(f"rollout {phase}", num_units)
        store: Any = Timed(coordinator.store, seen)
        coordinator.store = store
        seen.begun.append(time.perf_counter())
        num, last, taken_at, is_empty = 0, seen.begun[-1], 0.0, False
        running: list[tuple[float, int]] = []
        while True:
            if not running and not is_empty:
                taken = coordinator.take(1)
                now, is_empty = time.perf_counter(), not taken
                taken_at = taken_at or now
                running = [(now + seconds_of(unit, phase, num_units), unit) for unit in taken]
                num += len(taken)
            if running:
                time.sleep(STEP_SECONDS)
                for end, unit in list(running):
                    if time.perf_counter() >= end:
                        coordinator.finish(unit)
                        running.remove((end, unit))
                        last = time.perf_counter()
                coordinator.heartbeat()
                coordinator.num_offers()
            elif coordinator.has_news(offers_help=True):
                if coordinator.all_done():
                    break
                is_empty = False
            else:
                time.sleep(coordinator.pause)
        seen.noticed.append(time.perf_counter())
        seen.last_finished.append(last)
        seen.units.append(num)
        seen.first_taken.append(taken_at or seen.noticed[-1])


def play(port: int, replicas: list[int], num_replicas: int, is_before: bool, results: Any) -> None:
    """Plays some of the replicas, in a process of their own."""
    server: Store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    kind = Before if is_before else Coordinator
    roots = [connect_coordinator(server, replica, num_replicas, TIMEOUT)._root for replica in replicas]
    pairs = [(kind(root, r, num_replicas, TIMEOUT), Seen()) for root, r in zip(roots, replicas, strict=True)]
    server.add("ready", len(replicas))
    while server.add("ready", 0) < num_replicas:
        time.sleep(0.05)
    threads = [threading.Thread(target=simulate, args=(coordinator, 2 * num_replicas, seen)) for coordinator, seen in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put([seen for _, seen in pairs])


def measure(num_replicas: int, is_before: bool) -> dict[str, Any]:
    """Plays all phases with so many replicas."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shares = [list(range(num_replicas))[i::PROCESSES] for i in range(min(PROCESSES, num_replicas))]
    players = [context.Process(target=play, args=(server.port, share, num_replicas, is_before, results)) for share in shares]
    for player in players:
        player.start()
    everyone = [seen for _ in players for seen in results.get(timeout=TIMEOUT)]
    for player in players:
        player.join()
    return {"replicas": num_replicas, "arm": "before" if is_before else "now", **summary(everyone)}


def summary(everyone: list[Seen]) -> dict[str, Any]:
    phases = range(phases_of(len(everyone)))
    starts = [min(seen.begun[phase] for seen in everyone) for phase in phases]
    ends = [max(seen.noticed[phase] for seen in everyone) for phase in phases]
    last = [max(seen.last_finished[phase] for seen in everyone) for phase in phases]
    latencies = sorted(seconds for seen in everyone for seconds in seen.latencies)
    notices = sorted(seen.noticed[phase] - last[phase] for seen in everyone for phase in phases)
    units = [seen.units[phase] for seen in everyone for phase in phases]
    return {
        "seconds": sum(end - start for start, end in zip(starts, ends, strict=True)),
        "operations": sum(seen.num_operations for seen in everyone),
        "latency_ms": [1e3 * latencies[int(q * (len(latencies) - 1))] for q in (0.5, 0.99)],
        "first_units_seconds": statistics.mean(
            max(seen.first_taken[phase] for seen in everyone if seen.units[phase]) - starts[phase] for phase in phases
        ),
        "end_noticed_ms": [1e3 * notices[int(q * (len(notices) - 1))] for q in (0.5, 1.0)],
        "units": [min(units), max(units)],
        "jain": sum(units) ** 2 / (len(units) * sum(number**2 for number in units)),
    }


def report_text(report: dict[str, Any]) -> str:
    rows = [
        (
            m["replicas"],
            m["arm"],
            f"{m['operations'] / m['seconds']:,.0f}",
            " / ".join(number(value, ".2f") for value in m["latency_ms"]),
            number(m["first_units_seconds"], ".2f"),
            " / ".join(number(value, ".1f") for value in m["end_noticed_ms"]),
            " – ".join(map(str, m["units"])),
            number(m["jain"], ".3f"),
        )
        for m in report["measurements"]
    ]
    columns = (
        "replicas",
        "arm",
        "operations/s",
        "ms an operation, median / 99 %",
        "s until all have a unit",
        "ms until the end is noticed, median / last",
        "units of a replica",
        "Jain's index",
    )
    parts = ["# The shared queue with many replicas", *provenance(report), (__doc__ or "").partition("\n\n")[2].strip()]
    return "\n\n".join([*parts, table(columns, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="8,64,512")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measurements = []
    for num_replicas in map(int, options.replicas.split(",")):
        for is_before in (True, False):
            measurements.append(measure(num_replicas, is_before))
            print(measurements[-1], flush=True)
    command = f"python -m benchmarks.scale.queue --replicas {options.replicas}"
    report = {"command": command, "environment": environment(), "measurements": measurements}
    write_report(options.out, report, report_text(report))


if __name__ == "__main__":
    main()
