"""All commands by name."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tlt.apps.cli import (
    audit,
    bench,
    completion,
    doctor,
    drafter,
    drafter_eval,
    generate,
    hub,
    init,
    own,
    plan,
    report,
    serve,
    status,
    task,
    train,
)
from tlt.apps.cli.options import Options
from tlt.apps.cli.summary import Ended, Summarize
from tlt.base.config.mistakes import find_nearest
from tlt.base.io.files import Record
from tlt.base.types import UserError


@dataclass(frozen=True)
class Command:
    options: type[Options]
    run: Callable[[Any], int | Record | Ended]
    """Options → exit code, or a record to print."""
    summarize: Summarize | None = None
    """The record for people; None: the command prints text alone."""
    lists_keys: bool = False

    @property
    def purpose(self) -> str:
        return (self.options.__doc__ or "").splitlines()[0]

    @property
    def has_record(self) -> bool:
        return self.summarize is not None

    def split_json(self, words: Sequence[str]) -> tuple[list[str], bool]:
        others = [word for word in words if word != "--json" or not self.has_record]
        return others, len(others) < len(words)


def complete(options: completion.ShellCompletion) -> int:
    known = {name: (one.options, one.has_record) for name, one in COMMANDS.items()}
    print(completion.script(options.shell, known), end="")
    return 0


COMMANDS = {
    "init": Command(init.Init, init.run),
    "init own": Command(own.InitOwn, own.run),
    "train": Command(train.Train, train.run, lists_keys=True),
    "doctor": Command(doctor.Doctor, doctor.run, doctor.summarize),
    "status": Command(status.Status, status.run, status.summarize),
    "report": Command(report.Report, report.run, report.summarize),
    "plan memory": Command(plan.PlanMemory, plan.memory, plan.summarize),
    "generate": Command(generate.Generate, generate.run, generate.summarize),
    "task": Command(task.WriteProblems, task.write_problems, task.summarize_problems),
    "score": Command(task.Score, task.score, task.summarize_scores),
    "audit engine": Command(audit.AuditEngine, audit.engine, audit.summarize),
    "audit server": Command(audit.AuditServer, audit.server, audit.summarize),
    "audit responses": Command(audit.AuditResponses, audit.responses, audit.summarize),
    "drafter train": Command(drafter.DrafterTrain, drafter.train, drafter.summarize_training),
    "drafter export": Command(drafter.DrafterExport, drafter.export, drafter.summarize_export),
    "drafter eval": Command(drafter_eval.DrafterEval, drafter_eval.evaluate, drafter_eval.summarize),
    "serve": Command(serve.Serve, serve.run),
    "hub push": Command(hub.HubPush, hub.run, hub.summarize),
    "bench": Command(bench.Bench, bench.run, bench.summarize),
    "completion": Command(completion.ShellCompletion, complete),
}
FAMILIES = {
    "audit": "Judge whether an engine samples from the model's own probabilities.",
    "drafter": "Train, export and measure the small model that drafts for a large one.",
    "plan": "Say what a run takes before it begins.",
    "hub": "Share what a run has made.",
}


def find_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Names have one word or two. Raises UserError for an unknown command."""
    for num_words in (2, 1):
        name = " ".join(arguments[:num_words])
        if name in COMMANDS:
            return name, list(arguments[num_words:])
    family = arguments[0] if arguments[0] in FAMILIES else ""
    name = " ".join(arguments[: 2 if family else 1])
    nearest = next((known for known in COMMANDS if known.startswith(name)), find_nearest(name, COMMANDS))
    listed = ", ".join(known for known in COMMANDS if known.startswith(family))
    remedy = f"did you mean tlt {nearest}?" if nearest else f"commands are {listed}"
    raise UserError(f"{name}: unknown command; {remedy}")


def overview(family: str = "") -> str:
    prefix = f"{family} " if family else ""
    listed = {name: command.purpose for name, command in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, listed))
    columns, indent = shutil.get_terminal_size().columns, " " * (width + 4)
    lines = "\n".join(
        textwrap.fill(purpose, columns, initial_indent=f"  {name:<{width}}  ", subsequent_indent=indent)
        for name, purpose in listed.items()
    )
    about = FAMILIES.get(
        family, "Train reasoning models with RL; speculative decoding speeds the rollout up."
    )
    end = "tlt COMMAND --help explains a command; tlt --version prints the version."
    return f"usage: tlt {family or 'COMMAND'} ...\n\n{about}\n\n{lines}\n\n{end}"
