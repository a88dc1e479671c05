"""vLLM's server with this tree's plug-in, and clients that ask it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tlt.apps.cli.drafter import DrafterExport, export
from tlt.base.io.files import dumps
from tlt.tasks.base import make_problems

ROOT = Path(__file__).resolve().parents[2]
BASE, DRAFTER = Path("recipes/countdown/base"), Path("recipes/countdown/drafter")
LAW = ("--additional-config", '{"tlt": {}}')


@contextmanager
def serving(
    folder: Path, name: str, *arguments: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Starts vLLM's server with this tree's plug-in; yields its address. Its log is FOLDER/NAME.log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": BASE, "served-model-name": "m", "host": "127.0.0.1", "port": port, "dtype": "float32"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [f"--{key}={value}" for key, value in options.items()]
    command += ["--enforce-eager", *arguments]
    inherited = {**os.environ, **serving_environment(folder), **(environ or {})}
    log = folder / f"{name}.log"
    with log.open("w") as said:
        child = subprocess.Popen(command, cwd=ROOT, env=inherited, stdout=said, stderr=said, process_group=0)
    try:
        wait_until_healthy(child, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end_server(child)


def serving_environment(folder: Path) -> dict[str, str]:
    """Returns the variables with which vLLM finds this tree's plug-in, installed or not."""
    site = folder / "site"
    (info := site / "tlt_rl_of_this_tree-0.dist-info").mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tlt-rl-of-this-tree\nVersion: 0\n")
    plugin = "tlt_law = tlt.engine.vllm.inside.plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin}\n")
    return {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(site))),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def wait_until_healthy(child: subprocess.Popen[bytes], health: str, log: Path, seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        try:
            urllib.request.urlopen(health, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def end_server(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with its engine and workers
    child.wait()


Ask = Callable[..., Any]


def client_of(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)


def asks(url: str) -> Ask:
    """Returns the function that asks a server for a completion, by the client's keywords."""
    client = client_of(url)
    return lambda **asked: client.completions.create(model="m", **{"temperature": 1.0, **asked})


def prompts(num: int) -> list[str]:
    return [str(problem["prompt"]) for problem in make_problems("countdown", num, 0, {"split": "test"})]


def export_eagle(folder: Path, drafter: Path, target: Path) -> tuple[str, str]:
    """Exports the drafter into the folder; returns the arguments with which vLLM drafts by it."""
    asked = {"drafter": drafter, "target": target, "to": folder / "eagle", "format": "vllm-eagle"}
    export(DrafterExport.model_validate(asked))
    drafting = {"method": "eagle", "model": str(folder / "eagle"), "num_speculative_tokens": 3}
    return "--speculative-config", dumps(drafting)
