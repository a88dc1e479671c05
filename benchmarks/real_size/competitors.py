"""The competitors and their processes, each started once and asked for one batch after the other.

    tlt-off, tlt-cold, tlt-warm, tlt-retrieval,   our engine: all in one process            with_law.py
    tlt-4x1x4
    any-off                                       our engine, the model by transformers'    with_law.py
                                                  own modules, in a process of its own
    law-off                                       vLLM with our law inside, no drafter      with_law.py
    law-asleep, law-cold, law-warm, law-4         the same with a drafter, in one process   with_law.py
    vllm-off, vllm-3, vllm-schedule, vllm-ngram   vLLM as it comes                          vllm_alone.py
    llama-off, llama-lookup                       llama.cpp; lookup for one sequence alone  llama_alone.py

One process works at a time. The others wait in a read of their pipe and use no core: vLLM's scheduler and
worker run in one process, so that no helper spins.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real_size.serving import Job, Took, Work
from tlt.base.types import UserError

ROOT = Path(__file__).parents[2]
MODULES = {
    "tlt": "with_law",
    "any": "with_law",
    "law": "with_law",
    "vllm": "vllm_alone",
    "llama": "llama_alone",
}
DEFAULT = (
    "tlt-off", "tlt-cold", "tlt-warm", "law-off", "law-cold",
    "vllm-off", "vllm-3", "vllm-ngram", "llama-off", "llama-lookup",
)  # fmt: skip
BASE = "tlt-off"


class PeerError(UserError):
    """A peer could not be run: its name, the reason and the remedy, in one line."""


@dataclass(frozen=True)
class Competitor:
    """An engine and how it generates."""

    engine: str
    """One of MODULES."""
    way: str

    @staticmethod
    def parse(name: str) -> Competitor:
        engine, _, way = name.partition("-")
        if engine not in MODULES or not way:
            raise UserError(f"--competitors: {name!r} is unknown; give some of {', '.join(DEFAULT)}")
        return Competitor(engine, way)

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.way}"

    @property
    def process(self) -> str:
        """Name of its process, which several competitors may share."""
        if self.engine == "tlt":
            return "tlt"
        return f"{self.engine}-{self.speculation}"

    @property
    def speculation(self) -> str:
        """The speculation that its process is started with."""
        if self.engine != "law" or self.way == "off":
            return self.way
        return "adaptive"

    @property
    def is_off(self) -> bool:
        return self.way == "off"

    @property
    def is_ours(self) -> bool:
        """Whether the law decides its tokens, over the same logits."""
        return self.engine in ("tlt", "law")

    def needs_drafter(self) -> bool:
        return self.engine == "vllm" and self.way not in ("off", "ngram")

    def takes(self, batch_size: int) -> bool:
        return self.way != "lookup" or batch_size == 1


@dataclass(frozen=True)
class Plan:
    """The settings of all processes."""

    model: Path
    gguf: Path | None
    """The same model for llama.cpp."""
    drafter: Path | None
    """Our drafter's folder."""
    exported: Mapping[str, str] | None
    """Method and folder of the same drafter for vLLM; None: there is no drafter."""
    dtype: str
    threads: int
    max_batch_size: int
    window: int
    """Positions of the longest sequence."""
    kv_gib: float
    """GiB of vLLM's keys and values."""
    pythons: Mapping[str, Path]
    """Interpreter of each engine."""
    pinned: tuple[str, ...] = ()
    """Engines whose OpenMP threads are bound to cores."""
    eager: bool = False
    """Whether vLLM does not compile."""

    def job(self, competitor: Competitor) -> Job:
        return {
            "engine": competitor.engine,
            "speculation": competitor.speculation,
            "model": str(self.model),
            "gguf": str(self.gguf),
            "drafter": None if self.drafter is None else str(self.drafter),
            "exported": self.exported,
            "dtype": self.dtype,
            "threads": self.threads,
            "max_batch_size": self.max_batch_size,
            "window": self.window,
            "kv_gib": self.kv_gib,
            "eager": self.eager,
        }


def environment_of(
    engine: str, python: Path, threads: int, given: Mapping[str, str], *, is_pinned: bool = False
) -> dict[str, str]:
    """Returns the environment of a process: its threads, and our packages from this tree. vLLM alone gets the
    libraries that it preloads for its workers; with our law inside it runs as for a user of TLT."""
    dropped = ("PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
    kept = {key: value for key, value in given.items() if key not in dropped}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine in ("vllm", "law"):
        kept |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind only workers in a process of their own
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    if engine == "vllm":
        kept["LD_PRELOAD"] = ":".join(map(str, preloaded(python)))
    if is_pinned:
        kept |= bound_to_cores(threads)
    return kept


def bound_to_cores(threads: int) -> dict[str, str]:
    """Returns the variable that binds GNU OpenMP's threads to cores, as vLLM does for its workers."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {"GOMP_CPU_AFFINITY": " ".join(map(str, cores))}


def preloaded(python: Path) -> list[Path]:
    """Returns the libraries that vLLM preloads for its workers: the allocator and torch's OpenMP."""
    packages = python.absolute().parent.parent / "lib"
    found = [*packages.glob("python3*/site-packages/vllm/libs/libtcmalloc*.so*")][:1]
    return found + [*packages.glob("python3*/site-packages/torch*/lib/libgomp*.so*")][:1]


class Process:
    """A competitor's process, as a context manager."""

    def __init__(self, competitor: Competitor, plan: Plan, folder: Path) -> None:
        self.name = competitor.process
        engine = competitor.engine
        python, is_pinned = plan.pythons[engine], engine in plan.pinned
        job, self.log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        job.write_text(json.dumps(plan.job(competitor)), encoding="utf-8")
        module = f"benchmarks.real_size.{MODULES[engine]}"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), "-P", "-m", module, str(job)],
                env=environment_of(engine, python, plan.threads, os.environ, is_pinned=is_pinned),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
            )
        self.versions: dict[str, str] = self._read()["versions"]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the pipe, at which the process ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def ask(self, work: Work) -> Took:
        """Generates a batch in the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(vars(work)) + "\n")
        self.process.stdin.flush()
        took = Took(**self._read())
        if took.num_tokens != (wanted := sum(work.lengths)):
            raise PeerError(f"{self.name}: generated {took.num_tokens} tokens, where {wanted} were asked for")
        return took

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            said, code = self.log.read_text(encoding="utf-8", errors="replace"), self.process.returncode
            raise PeerError(f"{self.name}: its process ended with exit code {code} ({last_error(said)})")
        found: dict[str, Any] = json.loads(line)
        return found


def last_error(log: str) -> str:
    """Returns the log's last line that names an error, else its last line; shortened."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line.lower()]
    line = (errors or lines or ["it said nothing"])[-1]
    return line if len(line) <= 200 else line[:197] + "..."


def has_packages(python: Path, *names: str) -> bool:
    """Returns whether an interpreter finds all of the packages."""
    code = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in {names!r}))"
    command = [str(python), "-P", "-c", code]
    return python.is_file() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def check_python(option: str, python: Path, package: str) -> None:
    """Raises UserError unless this is an interpreter that finds the package."""
    if not has_packages(python, package):
        remedy = "give one of an environment with it"
        raise UserError(f"{option}: {python} is no interpreter that has {package}; {remedy}")
