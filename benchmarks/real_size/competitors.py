"""Who competes, and the processes in which they live: started once, asked for one batch after the other.

    tlt-off, tlt-cold, tlt-warm, tlt-4x1x4     our engine: all in one process               with_law.py
    law-off, law-cold, law-warm, law-4         vLLM with our law inside                     with_law.py
    vllm-off, vllm-3, vllm-schedule, vllm-ngram   vLLM as it comes                          vllm_alone.py
    llama-off, llama-lookup                    llama.cpp; lookup for one sequence alone     llama_alone.py

Only one of them works at a time. The others wait in a read of their pipe, which takes no core: no process
has a helper that spins, since vLLM's scheduler and worker run in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers import PeerError, _reason
from benchmarks.real_size.serving import Job, Took, Work
from tlt.types import UserError

ROOT = Path(__file__).parents[2]
MODULES = {"tlt": "with_law", "law": "with_law", "vllm": "vllm_alone", "llama": "llama_alone"}
DEFAULT = (
    "tlt-off", "tlt-cold", "tlt-warm", "law-off", "law-cold",
    "vllm-off", "vllm-3", "vllm-ngram", "llama-off", "llama-lookup",
)  # fmt: skip
BASE = "tlt-off"


@dataclass(frozen=True)
class Competitor:
    """engine: one of MODULES.  way: how it generates."""

    engine: str
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
        """Those of the same name share one."""
        if self.engine == "tlt":
            return "tlt"
        return f"{self.engine}-{self.speculation}"

    @property
    def speculation(self) -> str:
        """What a process is started for."""
        if self.engine != "law":
            return self.way
        if self.way in ("cold", "warm"):
            return "adaptive"
        return f"{self.way}x1x{self.way}" if self.way.isdigit() else self.way

    @property
    def is_off(self) -> bool:
        return self.way == "off"

    @property
    def is_ours(self) -> bool:
        """Whether the law decides its tokens."""
        return self.engine in ("tlt", "law")

    def needs_drafter(self) -> bool:
        return self.engine == "vllm" and self.way not in ("off", "ngram")

    def takes(self, batch_size: int) -> bool:
        return self.way != "lookup" or batch_size == 1


@dataclass(frozen=True)
class Plan:
    """What all processes are started with. Of each: folders and files of the same model, and the
    interpreters.

    drafter: ours.
    exported: method and folder of the same drafter as vLLM reads it; None: there is no drafter.
    window: positions of the longest sequence.
    kv_gib: GiB that vLLM's keys and values take.
    pinned: engines whose OpenMP threads are bound to cores.
    """

    model: Path
    gguf: Path | None
    drafter: Path | None
    exported: Mapping[str, str] | None
    dtype: str
    threads: int
    max_batch_size: int
    window: int
    kv_gib: float
    pythons: Mapping[str, Path]
    pinned: tuple[str, ...] = ()

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
        }


def environment_of(engine: str, plan: Plan, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process: its threads, and our packages from this tree. vLLM is given
    the libraries that it preloads for its workers, but where our law is inside: there it is as a user of
    TLT has it."""
    threads, python = plan.threads, plan.pythons[engine]
    kept = {
        key: value for key, value in given.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
    }
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine in ("vllm", "law"):
        kept |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it binds workers of their own process alone; see above
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    if engine == "vllm":
        kept["LD_PRELOAD"] = ":".join(map(str, preloaded(python)))
    if engine in plan.pinned:
        kept |= bound_to_cores(threads)
    return kept


def bound_to_cores(threads: int) -> dict[str, str]:
    """Returns what binds GNU OpenMP's threads to cores, as vLLM does for its workers."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {"GOMP_CPU_AFFINITY": " ".join(map(str, cores))}


def preloaded(python: Path) -> list[Path]:
    """Returns the libraries of its environment that vLLM preloads for its workers: the allocator, and
    torch's OpenMP."""
    packages = python.absolute().parent.parent / "lib"
    found = [*packages.glob("python3*/site-packages/vllm/libs/libtcmalloc*.so*")][:1]
    return found + [*packages.glob("python3*/site-packages/torch*/lib/libgomp*.so*")][:1]


class Process:
    """A competitor's process. Ends with the `with` statement."""

    def __init__(self, competitor: Competitor, plan: Plan, folder: Path) -> None:
        self.name = competitor.process
        python = plan.pythons[competitor.engine]
        job, self.log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        job.write_text(json.dumps(plan.job(competitor)), encoding="utf-8")
        module = f"benchmarks.real_size.{MODULES[competitor.engine]}"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), "-P", "-m", module, str(job)],
                env=environment_of(competitor.engine, plan, os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
            )
        self.versions: dict[str, str] = self._read()["versions"]

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, which goes when its pipe is closed."""
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
        """Lets it generate a batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(vars(work)) + "\n")
        self.process.stdin.flush()
        took = Took(**self._read())
        if took.num_tokens != (wanted := work.num_tokens * len(work.prompts)):
            raise PeerError(f"{self.name}: generated {took.num_tokens} tokens, where {wanted} were asked for")
        return took

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            said, code = self.log.read_text(encoding="utf-8", errors="replace"), self.process.returncode
            raise PeerError(f"{self.name}: its process ended with exit code {code} ({_reason(said)})")
        found: dict[str, Any] = json.loads(line)
        return found


def python_of(option: str, path: Path | None, package: str) -> Path:
    """Returns the interpreter that is to have a package. Raises UserError where it has not."""
    if path is None:
        return Path(sys.executable)
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    if not path.is_file() or subprocess.run([str(path), "-P", "-c", code], check=False).returncode:
        raise UserError(
            f"{option}: {path} is no interpreter that has {package}; give one of an environment with it"
        )
    return path
