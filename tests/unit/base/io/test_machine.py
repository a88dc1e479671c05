"""What is said of a machine, from faked facts: GPUs without a GPU, a missing compiler, broken packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tlt.base.io import extras
from tlt.base.io.extras import PURPOSES, how_to_install, needed_by
from tlt.base.io.machine import Facts, Finding, Gpu, diagnose, read_facts

EVERYTHING = {one.name: "1000" for extra in PURPOSES for one in needed_by(extra)} | {
    one.name: next(part.version for part in one.specifier if part.operator == ">=") for one in needed_by("")
}
PLAIN = Facts("3.11", 2, 2**34, compilers={"gcc": "/usr/bin/gcc"}, packages=EVERYTHING)
GPUS = replace(
    PLAIN,
    gpus=(Gpu("NVIDIA H100", 80 * 2**30),) * 2,
    torch_cuda="13.0",
    has_driver=True,
    packages={**EVERYTHING, "triton": "3.5"},
)


def found(facts: Facts) -> dict[str, Finding]:
    return {one.name: one for one in diagnose(facts)}


def broken(facts: Facts) -> list[str]:
    return [one.name for one in diagnose(facts) if one.state == "broken"]


def test_a_machine_with_gpus_is_fine_and_lists_them() -> None:
    assert broken(GPUS) == []
    assert found(GPUS)["GPUs"].text == "2 × NVIDIA H100 (80 GiB); PyTorch is built for CUDA 13.0"


def test_on_gpus_triton_and_a_compiler_are_needed_and_on_cpus_neither_is() -> None:
    bare = replace(GPUS, compilers={}, packages=EVERYTHING)
    assert broken(bare) == ["triton", "compilers"]
    assert broken(replace(PLAIN, compilers={})) == []
    assert found(replace(PLAIN, compilers={}))["compilers"].state == "note"


def test_needed_packages_are_there_and_of_a_version_that_fits() -> None:
    packages = {**EVERYTHING, "torch": "2.3.0", "pydantic": None, "numba": None}
    facts = replace(PLAIN, packages=packages)
    assert broken(facts) == ["pydantic", "torch"]
    assert found(facts)["torch"].text.startswith("2.3.0, and TLT needs ")
    assert found(facts)["numba"].state == "missing"
    assert broken(replace(PLAIN, torch_error="OSError: libcudart.so")) == ["torch"]


def test_this_machine_can_be_read_even_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = read_facts(cpu_cores=2, memory_bytes=2**34)
    assert facts.compilers == {}
    assert facts.torch_error == ""
    assert broken(replace(facts, gpus=())) == []


def test_every_extra_for_users_has_a_purpose_and_packages_also_in_a_bare_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hint = how_to_install("ray")
    for distribution in (extras.DISTRIBUTION, "no-such-distribution"):
        monkeypatch.setattr(extras, "DISTRIBUTION", distribution)
        assert [extra for extra in ("", *PURPOSES) if not needed_by(extra)] == []
        assert how_to_install("ray") == hint
