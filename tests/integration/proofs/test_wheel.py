"""A user who has the wheel alone: built here, installed into a fresh environment elsewhere, and used there.

Building fetches hatchling from the package index, so without a network this is skipped; it is the only
such test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = """--run.num_steps 2 --run.num_ranks 1 --run.checkpoint_every 0 --task.num_problems 4 --rollout.problems_per_step 2
    --rollout.samples_per_problem 2 --sampling.max_tokens 16 --evaluation.num_problems 2 --evaluation.samples_per_problem 1
    --run.out_dir out"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = (
        f"{sys.executable} -m pip wheel --no-deps --disable-pip-version-check -w {folder} {ROOT}".split()
    )
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    if built.returncode and re.search(
        "No matching distribution|NewConnectionError|ConnectTimeout", built.stdout + built.stderr
    ):
        pytest.skip("no package index is reachable")
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which borrows what it depends on from the one that runs the
    tests."""
    path = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (site_packages,) = path.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # whose own .pth files are not read
    pip = f"{sys.executable} -m pip --python {path}/bin/python --disable-pip-version-check -q".split()
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return path


def run(environment: Path, folder: Path, program: str, *words: str) -> str:
    """What the program prints in an environment that knows nothing of the repository."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(environment / "bin" / program), *words]
    done = subprocess.run(
        command, cwd=folder, env=variables, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_carries_the_recipes_and_a_description_without_broken_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    parts = ("quickstart.toml", "base/model.safetensors", "base/tokenizer.json")
    assert {
        f"tlt/_recipes/{recipe}/{part}" for recipe in ("countdown", "experts", "math") for part in parts
    } <= set(names)
    assert {
        f"tlt/_recipes/countdown/{part}" for part in ("headline.toml", "drafter/model.safetensors")
    } <= set(names)
    assert "tlt/_recipes/math/base/chat_template.jinja" in names
    assert {name for name in names if name.startswith("tlt/_recipes/") and name.endswith((".py", ".md"))} == {
        "tlt/_recipes/math/word_problems.py",
        "tlt/_recipes/smollm2/arithmetic.py",
    }
    assert "# TLT" in metadata
    assert re.findall(r"\]\((?!https?://)[^)]*\)", metadata) == []


@pytest.mark.slow
def test_a_new_user_starts_from_the_wheel_alone(environment: Path, tmp_path: Path) -> None:
    assert "tlt train quickstart.toml" in run(environment, tmp_path, "tlt", "init", "countdown", "mine")
    script = (
        "import tlt\n"
        "print(tlt.__file__)\n"
        "engine = tlt.Engine.from_pretrained('mine/base', drafter='mine/drafter', speculation='adaptive')\n"
        "print(engine.generate(['[2,9,16:5]'], samples=2, max_tokens=32)[1])\n"
    )
    where, response = run(environment, tmp_path, "python", "-c", script).splitlines()
    assert where.startswith(str(environment))
    assert response.startswith("Response(problem_id='1', sample_index=1")
    run(environment, tmp_path, "tlt", "train", "countdown", *TINY.split())
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "policy" / "model.safetensors").is_file()
