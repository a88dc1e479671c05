"""This process's place among the ranks, from the launcher's environment variables.

torchrun, Kubernetes, Ray, tlt train   RANK · WORLD_SIZE · LOCAL_RANK · LOCAL_WORLD_SIZE · MASTER_ADDR ·
                                       MASTER_PORT
srun, where RANK is absent             SLURM_PROCID · SLURM_NTASKS · SLURM_LOCALID · SLURM_NODELIST …
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tlt.base.types import UserError

ATTEMPTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which launchers count restarts of the same ranks."""
SECRET = "TLT_SECRET"
"""The variable for `Place.secret`."""
LISTENING = "TLT_LISTENING"
"""The variable for `Place.listening`."""


@dataclass(frozen=True)
class Place:
    """is_server: this process serves master_port; else the launcher does.
    listening: file descriptor of that port, if the launcher opened it.
    has_own_gpu: each rank sees one GPU, its own.
    is_restart: the launcher has started these ranks before.
    secret: prefix of the ranks' part of the store, unknown to other users; empty: none.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    is_server: bool = False
    listening: int | None = None
    has_own_gpu: bool = False
    is_restart: bool = False
    secret: str = ""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """None: no launcher has started this process as a rank. Raises UserError for contradictions."""
    source = "RANK, WORLD_SIZE, LOCAL_RANK"
    if "RANK" not in environ:
        if "SLURM_PROCID" not in environ or _slurm_num_tasks(environ, default=1) <= 1:
            return None
        source, environ = "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID", {**environ, **_as_torchrun(environ)}
    place = _place(environ)
    for name, value, limit_name, limit in (
        ("rank", place.rank, "ranks", place.world_size),
        ("local rank", place.local_rank, "ranks of its machine", place.local_world_size),
    ):
        if not 0 <= value < limit:
            raise UserError(
                f"{source}: {name} {value}, but there are {limit} {limit_name}; start all ranks alike"
            )
    if place.local_world_size > place.world_size:
        raise UserError(
            f"{source}: {place.local_world_size} ranks on this machine, but {place.world_size} in "
            "all; start all ranks alike"
        )
    return place


def check_num_ranks(place: Place | None, num_ranks: int) -> None:
    if place is not None and place.world_size != num_ranks:
        raise UserError(
            f"run.num_ranks: is {num_ranks}, but {place.world_size} ranks were started (WORLD_SIZE or "
            f"SLURM_NTASKS); remove it, or give --run.num_ranks {place.world_size}"
        )


def read_number(
    environ: Mapping[str, str], name: str, default: int | None = None, because: str = "RANK is"
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"{name}: {because} set, but this is not; set both, or neither")
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"{name}: {text!r} is no number; give one, or unset it")
    return int(text)


def _place(environ: Mapping[str, str]) -> Place:
    rank, world_size = read_number(environ, "RANK"), read_number(environ, "WORLD_SIZE")
    local_rank, local_world_size = 0, 1
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:  # Kubernetes sets neither: one per machine
        local_rank = read_number(environ, "LOCAL_RANK", because="LOCAL_WORLD_SIZE is")
        local_world_size = read_number(environ, "LOCAL_WORLD_SIZE", because="LOCAL_RANK is")
    address, port = "127.0.0.1", 0
    if world_size > 1:
        if not (address := environ.get("MASTER_ADDR", "")):
            raise UserError("MASTER_ADDR: RANK is set, but this is not; give the host of rank 0")
        if not 0 < (port := read_number(environ, "MASTER_PORT")) < 2**16:
            raise UserError(f"MASTER_PORT: {port} is no port; give one in [1, 65535]")
    return Place(
        rank,
        world_size,
        local_rank,
        local_world_size,
        address,
        port,
        is_server=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        listening=read_number(environ, LISTENING) if LISTENING in environ else None,
        has_own_gpu=environ.get("TLT_OWN_GPU") == "1",
        is_restart=any(environ.get(name, "0") not in ("", "0") for name in ATTEMPTS),
        secret=environ.get(SECRET, ""),
    )


# -- Slurm ---------------------------------------------------------------------------------------------------


def _slurm_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    return read_number(environ, name, default, because="SLURM_PROCID is")


def _slurm_num_tasks(environ: Mapping[str, str], default: int | None = None) -> int:
    of_step = "SLURM_STEP_NUM_TASKS"
    return _slurm_number(environ, of_step if of_step in environ else "SLURM_NTASKS", default)


def _as_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """A step's own variables take precedence over the job's."""
    num_tasks = _slurm_num_tasks(environ)
    nodes = (environ.get(f"SLURM_{which}NODELIST") for which in ("STEP_", "", "JOB_"))
    host = _first_host(next(filter(None, nodes), ""))
    step = sum(_slurm_number(environ, name, default=0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = 15000 + step % 10000  # below the ports that systems assign themselves
    return {
        "RANK": str(_slurm_number(environ, "SLURM_PROCID")),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": str(_slurm_number(environ, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_tasks_here(environ, num_tasks)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
        # srun --gpus-per-task=1
        "TLT_OWN_GPU": str(int("," not in environ.get("CUDA_VISIBLE_DEVICES", ","))),
    }


def _tasks_here(environ: Mapping[str, str], num_tasks: int) -> int:
    """ "4(x2),3" means 4, 4 and 3 tasks on three machines."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return -(-num_tasks // max(_slurm_number(environ, "SLURM_NNODES", default=1), 1))
    counts: list[int] = []
    for number, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        counts += [int(number)] * min(int(times or 1), num_tasks + 1)  # more machines than tasks cannot be
    node = _slurm_number(environ, "SLURM_NODEID", default=0)
    if sum(counts) != num_tasks or node >= len(counts):
        raise UserError(
            f"SLURM_TASKS_PER_NODE: {text} does not make SLURM_NTASKS = {num_tasks}; "
            "start the ranks with srun"
        )
    return counts[node]


def _first_host(nodelist: str) -> str:
    """ "gpu[01-03,7],login" gives gpu01."""
    first = re.match(r"((?:[^,\[\]\s]|\[[0-9]+[0-9,-]*\])+)(?:,|$)", nodelist)
    if first is None:
        raise UserError(f"SLURM_NODELIST: {nodelist!r} is no list of hosts; start the ranks with srun")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[1])
