"""The end of a run, on rank 0: the drafter, the timeline, and a summary with commands to try."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.base.config.schema import Config
from tlt.base.io.plugins import is_importable
from tlt.models.hf.weights import StoredTensors, content_hash
from tlt.training.build.problems import data_source
from tlt.training.report.log import LOG
from tlt.training.report.outcome import Outcome, evaluation_rows, speedup_of, summary_rows
from tlt.training.report.step_record import StepRecord, read_metrics
from tlt.training.report.timeline import merge_timelines
from tlt.training.report.words import near
from tlt.training.run import Run
from tlt.training.saved.kept_responses import FOLDER as RESPONSES
from tlt.training.saved.run_folder import forget_journal


def write_products(run: Run) -> None:
    folder = run.out_dir
    forget_journal(folder)  # the last checkpoint has all of it
    policy_hash = content_hash(StoredTensors(folder / "policy", run.policy.config))
    run.models.drafter_training.save(
        folder / "drafter", {"policy_hash": policy_hash, "policy_step": run.step}
    )
    for missing in merge_timelines(folder, folder / "timeline.json"):
        run.console.note(missing)
    written = "policy adapter best drafter evaluations.jsonl metrics.jsonl config.json timeline.json"
    products = {name: folder / name for name in written.split() + _texts(run) if (folder / name).exists()}
    evaluations = run.files.evaluations
    recorded = recorded_seconds(run) if run.first_step else None
    steps = read_metrics(folder / "metrics.jsonl")
    outcome = Outcome(
        evaluations.progress(),
        evaluations.left_out(),
        run.step,
        run.seconds,
        recorded,
        drafted_from(run, steps),
        speedup_of(steps),
    )
    done, asked = run.step, run.config.run.num_steps
    title = "training complete" if done >= asked else f"ended after {done} of {asked} steps"
    run.console.summary([*summary_rows(outcome, products)], next_commands(run.config, products), title)


def write_evaluation(run: Run) -> None:
    forget_journal(run.out_dir)
    names = ["evaluations.jsonl", "config.json", *_texts(run)]
    products = {name: run.out_dir / name for name in names}
    last = run.files.evaluations.all[-1]
    rows = evaluation_rows(last.by_problem, last.reward_by_problem, run.seconds, products)
    run.console.summary([*rows], [], "evaluated")


def _texts(run: Run) -> list[str]:
    return [LOG] if run.files.responses is None else [RESPONSES, LOG]


def drafted_from(run: Run, records: Sequence[StepRecord]) -> tuple[int, float] | None:
    """(draft vocabulary's size, share of tokens in it); None: not limited."""
    size = records[-1].drafter.vocabulary if records else 0
    return (size, records[-1].drafter.coverage) if 0 < size < run.policy.config.vocab_size else None


def recorded_seconds(run: Run) -> float:
    steps = (record.step_seconds for record in read_metrics(run.out_dir / "metrics.jsonl"))
    return sum(steps) + sum(evaluation.seconds for evaluation in run.files.evaluations.all)


def next_commands(config: Config, products: Mapping[str, Path]) -> list[str]:
    """Empty for a task that lives in this process alone."""
    if not is_importable(config.task.name):
        return []
    source = data_source(config, "test")
    if source is None and config.task.name == "data":
        source = data_source(config, "train")
    if source is not None:
        given = {
            "data": near(source.name) if source.name.exists() else str(source.name),
            "subset": source.subset,
            "split": source.split,
            "columns": dict(source.columns),
        }
    else:
        given = {"split": "test", "options": config.task.options}
    task = f"tlt task {shlex.quote(config.task.name)} --num 8 --out problems.jsonl{_options(given)}"
    asked = {
        "max-tokens": str(config.sampling.max_tokens),
        "chat": "true" if config.task.chat else None,
        "system-prompt": config.task.system_prompt,
        "chat-template-kwargs": config.model.chat_template_kwargs,
        "date": config.task.date,
        "max-prompt-tokens": config.task.max_prompt_tokens,
        "environment": near(Path(config.run.out_dir)) if config.environment.is_used else None,
    }
    if "drafter" in products:
        asked |= {"speculation": "adaptive", "drafter": near(products["drafter"])}
    policy = shlex.quote(near(products["policy"]))
    return [task, f"tlt generate {policy} --prompts problems.jsonl --out responses.jsonl{_options(asked)}"]


def _options(given: Mapping[str, Any]) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items() if value
    }
    return "".join(f" --{name} {shlex.quote(text)}" for name, text in texts.items())
