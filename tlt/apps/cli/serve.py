"""`tlt serve`.

RUN ─▶ policy, drafter, exported where need be ─┬▶ vLLM's words ─▶ printed, or this process becomes them
MODEL, --drafter ───────────────────────────────┘
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tlt.apps.cli.engine import show_busy
from tlt.apps.cli.options import DrafterName, Folder, Switch, WithRest, Written
from tlt.apps.cli.summary import log
from tlt.base.config.rollout import SpeculationKey
from tlt.base.config.vllm import VllmSection
from tlt.base.io.hub import resolve_model
from tlt.base.speculation import Adaptive, Off
from tlt.base.types import UserError
from tlt.base.value_types import PositiveInt
from tlt.models.hf.files import read_json

if TYPE_CHECKING:
    from tlt.engine.vllm.server import Served


class Serve(WithRest):
    """Serve a run or a model with vLLM: becomes vllm serve with law, drafter, tuner and names set.

    Words after -- are vLLM's own options, and go before those that TLT sets: tlt serve RUN -- --port 8001

    The same seed then gives the same text, drafted or not, alone or in company (docs/endpoint.md).
    """

    source: Annotated[Path, Written("RUN|MODEL", is_alone=True)]
    """Folder of a run (run.out_dir), or a model: a checkpoint folder, or OWNER/NAME on the hub."""
    step: PositiveInt | None = None
    """Serve a run's policy after this many updates, from its checkpoint; default: the newest."""
    drafter: DrafterName = None
    """Drafter, a folder or OWNER/NAME on the hub; default: the run's own."""
    speculation: SpeculationKey | None = None
    """How tokens are drafted: off, adaptive (the tuner chooses a length at every step, 0 included), or fixed:
    4x1x4 drafts four tokens. DRAFTER is learned or ngram. Default: adaptive with a drafter, else off."""
    max_draft_tokens: Annotated[int, *VllmSection.model_fields["max_draft_tokens"].metadata] = 8
    """Most tokens that are drafted at a time with adaptive."""
    name: str | None = None
    """The model's name in requests; default: the folder's, or OWNER/NAME."""
    to: Folder = None
    """Folder for a drafter that vLLM needs in another form; default: served in the run's folder, or here."""
    print: Switch = False
    """Prints the command, ready to paste, and starts nothing."""


@dataclass(frozen=True)
class Source:
    model: Path
    drafter: Path | None
    name: str
    dtype: str
    to: Path
    template_variables: dict[str, Any]
    description: str


def run(options: Serve) -> int:
    from tlt.engine.vllm.server import (
        ELSEWHERE,
        command,
        environment_for,
        find_vllm,
        is_installed,
        replace_process,
        to_paste,
    )
    from tlt.engine.vllm.strategies import check_speculation

    is_elsewhere = options.print and not is_installed()
    if is_elsewhere:
        log("no vLLM is installed here; the command is for a place with vLLM for GPUs and tlt-rl")
    installed = ELSEWHERE if is_elsewhere else find_vllm()
    if options.speculation is not None:
        check_speculation(options.speculation, has_learned=True)  # before a policy is exported
    with show_busy():
        source = _run_source(options) if is_run(options.source) else _model_source(options)
        served = _served(options, source)
    words, variables = command(installed, served, options.rest), environment_for(os.environ)
    if options.print:
        print(to_paste(words, variables))
        return 0
    log(f"serving {source.description} as {served.name}, speculation {served.speculation}")
    replace_process(words, variables)
    return 0


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and "run" in read_json(folder / "config.json")


def _run_source(options: Serve) -> Source:
    import torch

    from tlt.apps.run.served import FOLDER, open_served, updates
    from tlt.base.types import resolve_dtype

    run = open_served(options.source, options.step, log)
    task = run.config.task
    if task.system_prompt:
        log(f"the run's system prompt is the client's to send: {task.system_prompt!r}")
    dtype = str(resolve_dtype(run.config.run.dtype, "cuda" if torch.cuda.is_available() else "cpu"))
    if "float64" in dtype:
        log("vLLM has no float64, in which the run computes; it is served in float32")
    return Source(
        model=run.policy,
        drafter=run.drafter if options.drafter is None else resolve_model(options.drafter),
        name=options.source.resolve().name,
        dtype=dtype.removeprefix("torch.").replace("float64", "float32"),
        to=options.to or options.source / FOLDER / "drafter",
        template_variables=run.config.model.chat_template_kwargs,
        description=f"{run.policy} after {updates(run.step)}",
    )


def _model_source(options: Serve) -> Source:
    if options.step is not None:
        raise UserError(f"--step: {options.source} is a model, not a run's folder; leave it out")
    model = resolve_model(options.source)
    if not (model / "config.json").is_file():
        raise UserError(
            f"{options.source}: holds neither a run nor a model (no config.json); give the folder of one"
        )
    name = options.source.resolve().name if options.source.is_dir() else str(options.source)
    drafter = None if options.drafter is None else resolve_model(options.drafter)
    return Source(model, drafter, name, "auto", options.to or Path("served-drafter"), {}, str(model))


def _served(options: Serve, source: Source) -> Served:
    from tlt.engine.vllm.server import Served
    from tlt.engine.vllm.strategies import vllm_kinds

    speculation = options.speculation or (Off() if source.drafter is None else Adaptive())
    kinds = vllm_kinds(speculation, source.drafter is not None)
    drafting = None
    if kinds == ("learned",):
        from tlt.engine.build.vllm import for_server

        assert source.drafter is not None, "it is learned"
        drafting = for_server(source.model, source.drafter, source.to)
    elif kinds:
        from tlt.engine.build.vllm import NGRAM

        drafting = NGRAM
    return Served(
        model=source.model,
        name=options.name or source.name,
        dtype=source.dtype,
        speculation=speculation,
        kinds=kinds,
        drafter=drafting,
        max_draft_tokens=options.max_draft_tokens,
        template_variables=source.template_variables,
    )
