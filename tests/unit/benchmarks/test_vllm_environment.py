"""The environment with vLLM is made once, over nothing that was there, or not with one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import vllm_environment
from benchmarks.real_size.competitors import PeerError
from benchmarks.vllm_environment import setup_vllm, setup_vllm_tests


def test_a_folder_that_is_no_environment_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(PeerError, match="exists but holds no environment with vLLM"):
        setup_vllm(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_failed_installation_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: no matching distribution\\nnotice: pip is old"
    command = [sys.executable, "-c", f"import sys; sys.exit('{said}')"]
    monkeypatch.setattr(vllm_environment, "setup_commands", lambda folder: [command])
    with pytest.raises(PeerError, match=r"failed \(ERROR: no matching distribution\)") as caught:
        setup_vllm(tmp_path / "env")
    assert "\n" not in str(caught.value)


def test_an_environment_that_has_vllm_and_tlt_stays_as_it_is(tmp_path: Path) -> None:
    python, asked = tmp_path / "bin" / "python", tmp_path / "asked"
    python.parent.mkdir()
    pip, probe = f"*pip*) touch {asked}.done;;", f"*xdist*) test -e {asked}.done;;"
    python.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncase "$*" in {pip} {probe} esac\n')
    python.chmod(0o755)
    assert setup_vllm_tests(tmp_path) == python
    assert "pip install --quiet -e . pytest" in asked.read_text()
    asked.write_text("")
    assert setup_vllm_tests(tmp_path) == python
    assert "pip" not in asked.read_text()
