"""Runs the ranks as actors on an existing Ray cluster.

    driver ── placement group ─┬─ actor on node a: rank 0: entry(argument, stop)
       ▲                       ├─ actor on node a: rank 1
       │                       └─ actor on node b: rank 2
       └─ waits for the first that ends; one has died ─▶ ends the others ─▶ next attempt, in a new group

Ray Train has its own checkpoints and restarts.
"""

from __future__ import annotations

import os
import pkgutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlt.base.io.extras import how_to_install
from tlt.base.types import UserError
from tlt.training.launch.failures import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USER_ERROR,
    AttemptFailure,
    RankFailure,
    Restarts,
    find_cause,
)
from tlt.training.launch.place import SECRET
from tlt.training.launch.signals import StopRequest, handling_stop_signals, say

_POLL_SECONDS = 0.2
_SETTLE_SECONDS = 3.0
"""After the first failure the driver waits for the death that may have caused it."""

_REACH_SECONDS = 10.0


@dataclass(frozen=True)
class RankNeeds:
    num_threads: int
    num_gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        needs = {"CPU": float(self.num_threads), "GPU": float(self.num_gpus)}
        return {name: number for name, number in needs.items() if number}


def connect() -> Any:
    """The module `ray`, connected to RAY_ADDRESS or this machine's cluster. Raises UserError."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # print every line of the ranks
    try:
        import ray
    except ImportError:
        raise UserError(f"run.launcher: ray is not installed; {how_to_install('ray')}") from None
    if not ray.is_initialized():
        try:
            _reach(os.environ.get("RAY_ADDRESS", ""))
            ray.init(address="auto", logging_level="error", log_to_driver=True)
        except ConnectionError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"run.launcher: ray, but no Ray cluster was found ({reason}); "
                "run ray start --head, or set RAY_ADDRESS"
            ) from None
    return ray


def _reach(address: str) -> None:
    """Raises ConnectionError if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _REACH_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"RAY_ADDRESS {address}: {error.strerror or error}") from None


def num_cluster_gpus() -> int:
    return int(connect().cluster_resources().get("GPU", 0))


def launch_on_ray(
    describe: Callable[[], str],
    num_ranks: int,
    entry: str,
    needs: RankNeeds,
    patience: float,
    restarts: Restarts,
    grace_seconds: float = 120.0,
) -> int:
    """As `local.launch`.

    describe: returns the argument for an attempt that begins now; machines do not share a clock.
    patience: seconds to wait for room on the cluster.
    """
    ray = connect()
    stop = StopRequest()
    with handling_stop_signals(stop):
        while True:
            with _actors(ray, num_ranks, needs, patience) as actors:
                attempt = RayAttempt(ray, actors, needs.num_gpus > 0)
                failure = attempt.run(entry, describe(), stop, grace_seconds)
            if stop.signal is not None:
                return 128 + stop.signal
            if failure is None:
                return EXIT_OK
            if not restarts.follows(failure):
                return EXIT_USER_ERROR if failure.is_user_error else EXIT_FAILURE


@contextmanager
def _actors(ray: Any, num_ranks: int, needs: RankNeeds, patience: float) -> Iterator[list[Any]]:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([needs.bundle] * num_ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not group.wait(timeout_seconds=patience):
            free = {name: num for name, num in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise UserError(
                f"run.num_ranks: the Ray cluster had no room for {num_ranks} × {needs.bundle} within "
                f"{patience:g} s, free are {free}; give fewer, or add nodes"
            )
        environ = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": str(needs.num_threads)}
        if "PYTHONPATH" in os.environ:
            environ["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for index in range(num_ranks):
            kind = ray.remote(RankActor).options(
                num_cpus=needs.num_threads,
                num_gpus=needs.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
                max_restarts=0,
                max_concurrency=2,
                runtime_env={"env_vars": environ},
            )
            actors.append(kind.remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(group)


class RankActor:
    """Two threads: `stop` is heard while `run` runs."""

    def __init__(self) -> None:
        self._stop = StopRequest()

    def place(self) -> tuple[str, str, str, int]:
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return node, address, socket.gethostname(), port

    def run(self, environ: Mapping[str, str], folder: str, entry: str, argument: str) -> RankFailure | None:
        os.environ.update(environ)
        try:
            if not Path(folder).is_dir():
                raise UserError(
                    f"working directory: {folder} is not on {socket.gethostname()}; "
                    "start in one that all nodes share"
                )
            os.chdir(folder)
            pkgutil.resolve_name(entry)(argument, self._stop)
        except Exception as error:  # whatever it is, the driver has to hear of it in words
            return RankFailure.of(error, int(environ["RANK"]))
        return None

    def stop(self, number: int) -> None:
        from signal import Signals

        self._stop.signal = Signals(number)


class RayAttempt:
    def __init__(self, ray: Any, actors: list[Any], has_own_gpu: bool) -> None:
        self._ray = ray
        self.reports: list[RankFailure] = []
        self.ended: dict[int, str] = {}
        try:
            places = ray.get([actor.place.remote() for actor in actors])
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            places, self.ended = [], {0: _died(error, "a node")}
        nodes = list(dict.fromkeys(node for node, *_ in places))  # ranks of a node follow each other
        order = sorted(range(len(places)), key=lambda index: nodes.index(places[index][0]))
        self.actors = [actors[index] for index in order]
        self.hosts = [places[index][2] for index in order]
        self.environs = _environs([places[index] for index in order], has_own_gpu)

    def run(
        self, entry: str, argument: str, stop: StopRequest, grace_seconds: float
    ) -> AttemptFailure | None:
        jobs = {
            actor.run.remote(environ, os.getcwd(), entry, argument): rank
            for rank, (actor, environ) in enumerate(zip(self.actors, self.environs, strict=True))
        }
        deadline = float("inf")
        while time.monotonic() < deadline:
            if self.ended:
                return self._cause(jobs)
            if not jobs:
                return None
            if stop.signal is not None and deadline == float("inf"):
                deadline = time.monotonic() + grace_seconds
                for actor in self.actors:
                    actor.stop.remote(int(stop.signal))
            self._collect(jobs, _POLL_SECONDS)
        say(f"not finished after {grace_seconds:g} s: the ranks were killed; the step under way is lost")
        return None

    def _cause(self, jobs: dict[Any, int]) -> AttemptFailure:
        until = time.monotonic() + _SETTLE_SECONDS
        while jobs and len(self.reports) == len(self.ended) and time.monotonic() < until:
            self._collect(jobs, _POLL_SECONDS)
        return find_cause(self.reports, list(self.ended), lambda rank: self.ended[rank])

    def _collect(self, jobs: dict[Any, int], seconds: float) -> None:
        done, _ = self._ray.wait(list(jobs), num_returns=1, timeout=seconds)
        for job in done:
            rank, errors = jobs.pop(job), self._ray.exceptions
            try:
                report = self._ray.get(job)
            except (errors.RayActorError, errors.OutOfMemoryError) as error:
                self.ended[rank] = _died(error, self.hosts[rank])
                continue
            if report is not None:  # hosts' clocks may differ
                self.reports.append(replace(report, time=time.monotonic()))
                self.ended[rank] = "failed"


def _environs(places: list[tuple[str, str, str, int]], has_own_gpu: bool) -> list[dict[str, str]]:
    per_node = Counter(node for node, *_ in places)
    seen: Counter[str] = Counter()
    environs, secret = [], uuid.uuid4().hex
    for rank, (node, *_) in enumerate(places):
        environs.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(per_node[node]),
                "MASTER_ADDR": places[0][1],
                "MASTER_PORT": str(places[0][3]),
                "TLT_OWN_GPU": str(int(has_own_gpu)),
                SECRET: secret,
            }
        )
        seen[node] += 1
    return environs


def _died(error: Exception, host: str) -> str:
    if "its node has died" in str(error):
        return f"its node, {host}, has died"
    return f"killed on {host} (out of memory?)"
