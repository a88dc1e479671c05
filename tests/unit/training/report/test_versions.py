"""A run's folder says with which versions, from which commit and on which machine each attempt ran."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from tlt import __version__
from tlt.training.report.versions import append_environment, read_environments


def test_each_attempt_is_a_line(tmp_path: Path) -> None:
    assert read_environments(tmp_path) == []
    append_environment(tmp_path, 1.0, 2)
    append_environment(tmp_path, 5.0, 4)
    first, second = read_environments(tmp_path)
    assert (first["began"], first["ranks"], second["began"], second["ranks"]) == (1.0, 2, 5.0, 4)
    assert (first["tlt"], first["python"]) == (__version__, platform.python_version())
    assert first["torch"] == torch.__version__
    assert {"commit", "cpu", "memory", "system", "transformers", "numpy"} <= first.keys()
    assert platform.node() not in str(first.values())
