"""This machine's fitness for TLT.

read_facts ──▶ Facts ── diagnose ──▶ Findings: fine, slower or missing, broken; each with its remedy
"""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from tlt.base.io.extras import PURPOSES, how_to_install, needed_by, version_of

State = Literal["ok", "note", "missing", "broken"]
COMPILERS = ("cc", "gcc", "clang", "g++", "nvcc")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """torch_cuda: PyTorch's CUDA version; None: a build for CPUs.
    torch_error: why PyTorch cannot be imported; empty: it can.
    compilers: name → path.
    packages: of TLT and its extras, name → version; None: not installed.
    """

    python: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    torch_error: str = ""
    has_driver: bool = False
    compilers: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    text: str
    remedy: str = ""


def read_facts(cpu_cores: int, memory_bytes: int) -> Facts:
    """cpu_cores, memory_bytes: the container's limits."""
    gpus: tuple[Gpu, ...] = ()
    cuda, fault = None, ""
    try:
        import torch

        cuda = torch.version.cuda
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        gpus = tuple(Gpu(one.name, one.total_memory) for one in found)
    except Exception as error:  # a broken installation may raise anything
        fault = f"{type(error).__name__}: {error}"
    names = {one.name for extra in ("", *PURPOSES) for one in needed_by(extra)} | {"triton"}
    return Facts(
        python=platform.python_version(),
        cpu_cores=cpu_cores,
        memory_bytes=memory_bytes,
        gpus=gpus,
        torch_cuda=cuda,
        torch_error=fault,
        has_driver=_DRIVER.exists(),
        compilers={name: path for name in COMPILERS if (path := _find_compiler(name))},
        packages={name: version_of(name) for name in sorted(names)},
    )


def _find_compiler(name: str) -> str | None:
    return shutil.which(os.environ.get("CC") or name) if name == "cc" else shutil.which(name)


def diagnose(facts: Facts) -> list[Finding]:
    return [*_needed(facts), *_gpu(facts), *_compiler(facts), *_optional(facts)]


def _needed(facts: Facts) -> Iterator[Finding]:
    for requirement in needed_by(""):
        name, found = requirement.name, facts.packages.get(requirement.name)
        install = f"pip install '{requirement}'"
        if found is not None and requirement.specifier.contains(found, prereleases=True):
            if name == "torch" and facts.torch_error:
                yield Finding(name, "broken", f"{found}, cannot be imported: {facts.torch_error}", install)
            else:
                yield Finding(name, "ok", found)
        elif found is not None:
            yield Finding(name, "broken", f"{found}, and TLT needs {requirement.specifier}", install)
        elif name == "numba":
            yield Finding(name, "missing", "CPUs sample thirty times slower without it", install)
        else:
            yield Finding(name, "broken", "not installed", install)


def _gpu(facts: Facts) -> Iterator[Finding]:
    counts = Counter(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in facts.gpus)
    listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
    built = f"PyTorch is built for {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'CPUs'}"
    if facts.gpus:
        yield Finding("GPUs", "ok", f"{listed}; {built}")
        if triton := facts.packages.get("triton"):
            yield Finding("triton", "ok", triton)
        else:
            what = "not installed, and sampling on a GPU needs it"
            yield Finding("triton", "broken", what, "pip install triton")
    elif facts.has_driver and facts.torch_cuda is None:
        remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("GPUs", "note", f"NVIDIA's driver is here, but {built}", remedy)
    elif facts.has_driver:
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", "note", "NVIDIA's driver is here, but PyTorch sees no GPU", remedy)
    else:
        yield Finding("GPUs", "ok", f"none; {built}")


def _compiler(facts: Facts) -> Iterator[Finding]:
    names = [name for name in ("cc", "gcc", "clang") if name in facts.compilers]
    listed = ", ".join(f"{name} ({path})" for name, path in facts.compilers.items())
    if names:
        yield Finding("compilers", "ok", listed)
    elif facts.gpus:
        yield Finding("compilers", "broken", "none, and Triton needs one on GPUs", "install gcc")
    else:
        what = "none; GPUs, vLLM and the extra reasoning-gym need one"
        yield Finding("compilers", "note", what, "install gcc")


def _optional(facts: Facts) -> Iterator[Finding]:
    for extra, purpose in PURPOSES.items():
        wanted = needed_by(extra)
        lacking = [one for one in wanted if facts.packages.get(one.name) is None]
        other = [one for one in wanted if one not in lacking and not _fits(one, facts)]
        if lacking or other:
            found = ", ".join(f"{one.name} is {facts.packages[one.name]}" for one in other)
            text = f"{purpose} ({found})" if found else purpose
            yield Finding(extra, "missing", text, how_to_install(extra))
        else:
            yield Finding(extra, "ok", purpose)


def _fits(requirement: Requirement, facts: Facts) -> bool:
    return requirement.specifier.contains(facts.packages[requirement.name] or "", prereleases=True)
