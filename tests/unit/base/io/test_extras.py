"""What is said of optional packages can be done: TLT is on no package index, so a hint names the packages, or
installs from TLT's source."""

from __future__ import annotations

import re
import resource
import tomllib
from pathlib import Path

import pytest

from tlt.base.io import extras
from tlt.base.io.extras import PURPOSES, how_to_install, loading_numba
from tlt.base.types import UserError
from tlt.training.report.trackers import EXTRAS as TRACKERS

ROOT = Path(__file__).parents[4]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [
    path
    for folder in ("tlt", "docs", "recipes", "examples", "benchmarks", "tests", ".")
    for ending in ("py", "md", "toml")
    for path in (ROOT / folder).glob(f"{'' if folder == '.' else '**/'}*.{ending}")
    if path.name not in ("CHANGELOG.md", "log.md", Path(__file__).name)
]


def test_nothing_says_to_install_a_package_that_no_index_has() -> None:
    assert len(TEXTS) > 100
    assert [str(path.relative_to(ROOT)) for path in TEXTS if "tlt-rl[" in path.read_text()] == []


def test_every_extra_but_the_developers_own_has_a_purpose_which_doctor_tells() -> None:
    assert set(PURPOSES) == set(EXTRAS) - {"dev"}


def test_every_extra_that_is_named_exists() -> None:
    named = set(TRACKERS)
    for path in TEXTS:
        text = path.read_text()
        named |= set(re.findall(r"how_to_install\(['\"]([\w-]+)['\"]\)", text))
        named |= {
            extra
            for extras in re.findall(r"pip install (?:-e )?'\.\[([\w,-]+)\]'", text)
            for extra in extras.split(",")
        }
    assert {"math", "data", "vllm", "trl", "ray", "verifiers", "reasoning-gym"} <= named <= set(EXTRAS)


def test_a_hint_names_the_packages_of_the_extra_or_the_source_where_tlt_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        "torch>=2",
        "datasets>=4; extra == 'data'",
        "gguf<1,>=0.17; extra == 'gguf'",
        "x; extra == 'data'",
    ]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    assert how_to_install("data") == "pip install 'datasets>=4' x"
    monkeypatch.setattr(extras, "requires", lambda name: None)
    assert how_to_install("data") == "pip install '.[data]' in the folder of TLT's source"


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            2 * 2**30,
            r"^numba: cannot be loaded within the limit of 2\.0 GiB of memory for a process; raise it",
        ),
        (resource.RLIM_INFINITY, r"^numba: cannot be loaded \(OSError: .*libllvmlite.*\); install it again"),
    ],
)
def test_why_an_installed_numba_cannot_be_loaded_is_one_line(
    limit: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(UserError, match=told), loading_numba():
        raise OSError("Could not find/load shared object file 'libllvmlite.so'")
