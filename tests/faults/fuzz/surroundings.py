"""What surrounds a command is odd: its environment, and its standard streams."""

from __future__ import annotations

import os
from random import Random

from tests.faults.commands import STREAMS
from tests.faults.fuzz.case import Case, Place
from tests.faults.mutations import to_toml

NUMBERS = ("0", "1", "2", "-1", "x", "", "²", "1.0", "99999999999999999999", " 1", "0x1", "1\n")
NODELISTS = (
    "", "a", "a[x-y]", "a[1-", "a]", "a[1-999999999]", "a[,]", "[", "a[3-1]", "a[01-03,7],b", ",", "²",
    "a[-]", "a[1-²]",
)  # fmt: skip
OF_TORCH = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
OF_SLURM = "PROCID NTASKS STEP_NUM_TASKS LOCALID JOB_ID NODEID"
RANKS = {
    **dict.fromkeys(OF_TORCH.split(), NUMBERS),
    **{f"SLURM_{name}": NUMBERS for name in OF_SLURM.split()},
    **dict.fromkeys(("SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), NODELISTS),
    "SLURM_TASKS_PER_NODE": ("1", "2", "1(x2)", "1(x", "x", "1(x99999999999)", "²"),
    "MASTER_ADDR": ("", "127.0.0.1", "no.such.host.invalid", "a b", "x" * 300, "é", "[::1"),
    "MASTER_PORT": ("0", "99999", "-1", "x", "", "²", "65536"),
}
NO_PORT = ("99999", "-1", "x", "", "²", "65536")
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "a"}
LAUNCHERS: tuple[dict[str, str | None], ...] = (
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, {**SLURM},
    {**SLURM, "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7"},
    {"OMPI_COMM_WORLD_RANK": "0", "LOCAL_RANK": "0"},
)  # fmt: skip
"""What launchers say."""
PLACES = {
    "TMPDIR": ("/no/such/folder", "", "/dev/null", "/proc", "."),
    "HOME": ("/no/such/folder", "", "/dev/null", None),
    "HF_HOME": ("/no/such/folder", "/dev/null", ""),
    "XDG_CACHE_HOME": ("/dev/null", ""),
    "PWD": ("/no/such/folder", "", None),
    "PATH": ("", "/no/such/folder", None),
    "USER": ("", None),
}
LOOKS = {
    "LANG": ("C", "POSIX", "xx_XX.nothing", "", None, "tr_TR.UTF-8"),
    "LC_ALL": ("C", "POSIX", "nothing", ""),
    "COLUMNS": ("0", "1", "x", "", "-5", "1000000"),
    "LINES": ("0", "x"),
    "NO_COLOR": ("", "1", None),
    "FORCE_COLOR": ("", "0"),
    "TERM": ("dumb", "", "nothing", "unknown", None),
    "TZ": ("", "nothing", "x" * 300),
}
PYTHON = {
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16", "ascii:strict"),
    "PYTHONUTF8": ("0", "1"),
    "PYTHONCOERCECLOCALE": ("0",),
    "PYTHONUNBUFFERED": ("1",),
    "PYTHONOPTIMIZE": ("1", "2"),
    "PYTHONHASHSEED": ("0", "12345"),
    "PYTHONDONTWRITEBYTECODE": ("1",),
    "PYTHONNOUSERSITE": ("1",),
    "PYTHONSAFEPATH": ("1",),
    "PYTHONFAULTHANDLER": ("1",),
    "PYTHONDEVMODE": ("0",),
    "PYTHONINTMAXSTRDIGITS": ("0", "640"),
}
THREADS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), ("0", "-1", "x", "", "1,2", "99999", "2")),
    "CUDA_VISIBLE_DEVICES": ("", "x", "-1", "0,1", "99"),
    "GLOO_SOCKET_IFNAME": ("lo",),
    "RES_OPTIONS": ("", "x"),
    "TLT_OWN_GPU": ("1", "x", ""),
    "WANDB_PROJECT": ("", "\x1b[31m", "x" * 5000),
}


def started_by_others(place: Place, rng: Random) -> Case:
    """The words of launchers contradict each other, or are none. Where they say that there is another
    rank, nobody waits: the port is none."""
    environ: dict[str, str | None] = dict.fromkeys(RANKS)
    environ |= rng.choice(LAUNCHERS)
    words = sorted(name for name, value in environ.items() if value is not None and name in RANKS)
    for name in (
        *rng.sample(words, rng.choice((0, 1, 1))),
        *rng.sample(sorted(RANKS), rng.choice((0, 1, 2))),
    ):
        environ[name] = rng.choice(RANKS[name])
    config = str(place.write("run.toml", to_toml(place.config())))
    if rng.random() < 0.4:
        return Case(("plan", "memory", config), environ=environ)
    environ["MASTER_PORT"] = rng.choice(NO_PORT)
    return Case(("train", config, "--run.out_dir", "run"), trains=True, environ=environ)


def _reading_words(place: Place) -> tuple[tuple[str, ...], ...]:
    """Returns the words of commands that only read."""
    config = str(place.write("run.toml", to_toml(place.config())))
    return (
        ("plan", "memory", config),
        ("--help",),
        ("train", "--help"),
        ("task", "countdown", "--num", "2", "--out", "o"),
    )


def environments(place: Place, rng: Random) -> Case:
    """A command that reads, in a new Python."""
    words = rng.choice(_reading_words(place))
    return Case(words, environ=_odd_environment(rng), is_fresh=True)


def runs_in_environments(place: Place, rng: Random, ranks: int = 1) -> Case:
    """A run, each of whose ranks is a new Python."""
    return place.train("--run.num_ranks", str(ranks), environ=_odd_environment(rng), is_fresh=True)


def _odd_environment(rng: Random) -> dict[str, str | None]:
    known = {**PLACES, **LOOKS, **PYTHON, **THREADS}
    environ = {name: rng.choice(known[name]) for name in rng.sample(sorted(known), rng.choice((1, 2, 4, 8)))}
    return {"PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd()), **environ}


def streams(place: Place, rng: Random) -> Case:
    """Nobody reads what a command prints, or there is no room for it, or no file."""
    chosen = _odd_streams(rng)
    words = rng.choice((*_reading_words(place), ("x",)))
    return Case(words, is_fresh="closed" in chosen, streams=chosen, codes=frozenset({0, 2, 128 + 13}))


def runs_with_streams(place: Place, rng: Random) -> Case:
    """The same of a run, which goes on without."""
    chosen = _odd_streams(rng)
    ranks = rng.choice(("1", "1", "2"))
    return place.train("--run.num_ranks", ranks, is_fresh="closed" in chosen, streams=chosen)


def _odd_streams(rng: Random) -> tuple[str, str, str]:
    stdin = rng.choice(("pipe", "pipe", "closed"))
    stdout = rng.choice(("gone", "gone", "full", "full", "closed", "pipe"))
    return stdin, stdout, rng.choice(("pipe", "pipe", "pipe", *STREAMS[1:]))
