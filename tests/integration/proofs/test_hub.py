"""The command line with a model of the hub, in processes of their own: the hub is a stand-in on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.standin import Hub, serve_hub
from tlt.base.io.files import write_jsonl

BASE = Path(__file__).parents[3] / "recipes" / "countdown" / "base"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        hub.add("me/base", BASE)
        yield hub


def environment(hub: Hub, folder: Path, **more: str) -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    return {**known, "PYTHONPATH": paths, "HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub.url, **more}


def command(folder: Path, name: str) -> list[str]:
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "[2,9,16:5]"}])
    words = ["--prompts", "prompts.jsonl", "--out", "out.jsonl", "--max-tokens", "4"]
    return [sys.executable, "-m", "tlt", "generate", name, *words]


def generate(hub: Hub, folder: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "out.jsonl").unlink(missing_ok=True)
    return subprocess.run(
        command(folder, name),
        cwd=folder,
        env=environment(hub, folder, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_a_model_is_downloaded_then_cached_then_offline_with_the_same_tokens(
    hub: Hub, tmp_path: Path
) -> None:
    shown = []
    for more in ({}, {}, {"HF_HUB_OFFLINE": "1"}):
        hub.requests.clear()
        done = generate(hub, tmp_path, "me/base", **more)
        assert done.returncode == 0, done.stderr
        shown.append(
            (sorted(set(hub.downloads)), done.stderr.splitlines()[:-1], (tmp_path / "out.jsonl").read_text())
        )
    files, said, text = shown[0]
    assert "model.safetensors" in files
    assert said == ["tlt: downloading me/base"]
    assert shown[1] == shown[2] == ([], [], text)
    local = generate(hub, tmp_path, str(BASE))
    assert (local.returncode, (tmp_path / "out.jsonl").read_text()) == (0, text)


@pytest.mark.slow
def test_ctrl_c_ends_a_download_soon_leaves_nothing_half_written_and_the_next_call_goes_on(
    hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    shutil.copytree(BASE, folder)
    hub.add("me/large", folder)
    hub.seconds_per_kib = 0.02  # minutes for the weights
    process = subprocess.Popen(
        command(tmp_path, "me/large"),
        cwd=tmp_path,
        env=environment(hub, tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    home, deadline = tmp_path / "home", time.monotonic() + 60
    while not ("model.safetensors" in hub.downloads and [*home.rglob("snapshots/*/config.json")]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines() == ["tlt: downloading me/large", "tlt: interrupted"]
    assert not [*home.rglob("*.incomplete"), *home.rglob("snapshots/*/model.safetensors")]
    whole = {path.name for path in home.rglob("snapshots/*/*")}
    hub.seconds_per_kib = 0.0
    hub.requests.clear()
    assert generate(hub, tmp_path, "me/large").returncode == 0
    assert "model.safetensors" in hub.downloads
    assert not whole & set(hub.downloads)
