"""Runs files of vLLM's tests in one of three ways; belongs to the interpreter that has vLLM.

    python -P -m benchmarks.vllm_own_tests.inside WAY SECONDS FILE …      the working directory holds tests/

vLLM is imported once. Then each file has a forked process of its own with SECONDS to live, which writes a
line of JSON to standard output for each test.

    without   vLLM loads its own plug-ins, and not ours
    asleep    vLLM loads our plug-in, too, and nothing names it
    awake     every configuration names it, and our samplers stand in for vLLM's in tests of samplers
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from importlib.metadata import entry_points
from typing import Any

OURS = "tlt_law"
"""Our plug-in's name among vLLM's (pyproject.toml)."""

TEST_SECONDS = 240
"""A single test's time."""


def prepare(way: str) -> None:
    """Makes this process, and those forked from it, what the way says."""
    names = {one.name for one in entry_points(group="vllm.general_plugins")}
    assert OURS in names, "tlt is not installed in this environment"
    if way == "without":
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(names - {OURS}))

    import vllm.entrypoints.llm
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from benchmarks.vllm_own_tests import stand_in

    current_platform.register_triton_kernel_overrides()  # as a worker does when it starts
    stand_in.run_eagerly()
    stand_in.clean_up_after_engines_only()
    load_general_plugins()
    if way == "awake":
        stand_in.name_the_plugin()
        stand_in.stand_in_for_samplers()


class Outcomes:
    """A pytest plug-in that writes each test's outcome, and of a failure its last line."""

    def __init__(self, file: str, descriptor: int) -> None:
        self.file, self.out = file, os.fdopen(descriptor, "w")
        self.worst: dict[str, tuple[str, str]] = {}

    def say(self, **said: Any) -> None:
        print(json.dumps({"file": self.file, **said}), file=self.out, flush=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keeps an engine that several tests share: here it runs in their process."""
        for item in items:
            if {"llm", "llm_v1", "vllm_model"} & set(item.fixturenames):
                item.add_marker("skip_global_cleanup")

    def pytest_runtest_setup(self) -> None:
        """Seeds what tests draw without a seed of their own, so that the ways see the same."""
        import numpy as np
        import torch

        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say(test="(collection)", outcome="failed", why=_last_line(report))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.worst or report.outcome != "passed":
            self.worst[report.nodeid] = (report.outcome, _last_line(report))
        if report.when == "teardown":
            outcome, why = self.worst.pop(report.nodeid)
            name = report.nodeid.partition("::")[2]
            self.say(test=name, outcome=outcome, why=why)


def _last_line(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skipped test: (file, line, reason)
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip()[:300]


def run_file(file: str, seconds: float) -> None:
    """Runs a file's tests in a forked process group, which is ended when its time is up."""
    out, started = os.dup(1), time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(2, 1)
        os._exit(_child(file, out))
    os.close(out)
    status: int | None = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() - started > seconds:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = -signal.SIGKILL
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers and engines that a test left
    took = round(time.monotonic() - started, 1)
    print(json.dumps({"file": file, "exit": status, "seconds": took}), flush=True)


def _child(file: str, out: int) -> int:
    import pytest

    words = [file, "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_SECONDS), "--tb", "short"]
    try:
        return int(pytest.main(words, plugins=[Outcomes(file, out)]))
    except BaseException as error:  # a forked process must not return into its parent's stack
        print(f"{file}: {error!r}", file=sys.stderr)
        return 70


def main() -> None:
    way, seconds, *files = sys.argv[1:]
    prepare(way)
    for file in files:
        run_file(file, float(seconds))


if __name__ == "__main__":
    main()
