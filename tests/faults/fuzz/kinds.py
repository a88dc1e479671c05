"""All kinds of cases, and how many of each are played."""

from __future__ import annotations

from functools import partial

from tests.faults.fuzz import arguments, inputs, run_folders, surroundings, user_code
from tests.faults.fuzz.case import Kind

INPUTS: dict[str, tuple[Kind, int]] = {
    "configuration, values": (inputs.config_values, 90),
    "configuration, bytes": (inputs.config_bytes, 70),
    "overrides": (inputs.overrides, 90),
    "prompts, values": (inputs.prompt_values, 60),
    "prompts, bytes": (inputs.prompt_bytes, 60),
    "problems and options of tasks": (inputs.problems, 80),
    "responses": (inputs.responses, 60),
    "a model's config.json": (inputs.model_config, 60),
    "a model's weights": (inputs.model_weights, 60),
    "a model's tokenizer": (inputs.tokenizer, 60),
    "a drafter": (inputs.drafter, 60),
    "arguments": (arguments.commands, 200),
    "strange commands": (arguments.strange_commands, 60),
    "variables of launchers": (surroundings.started_by_others, 120),
    "environment": (surroundings.environments, 25),
    "standard streams": (surroundings.streams, 50),
}
"""Commands that end before ranks would start, or have none."""
RUNS: dict[str, tuple[Kind, int]] = {
    "settings of a run": (inputs.settings, 130),
    "settings of a run, two ranks": (partial(inputs.settings, ranks=2), 15),
    "the folder of a run": (run_folders.run_folders, 120),
    "the folder of a run, two ranks": (partial(run_folders.run_folders, ranks=2), 15),
    "reward functions": (user_code.rewards, 100),
    "reward functions, two ranks": (partial(user_code.rewards, ranks=2), 15),
    "tasks": (user_code.tasks, 60),
    "trackers": (user_code.trackers, 45),
    "environment of a run": (surroundings.runs_in_environments, 15),
    "environment of a run, two ranks": (partial(surroundings.runs_in_environments, ranks=2), 5),
    "standard streams of a run": (surroundings.runs_with_streams, 25),
}
"""Runs, whose ranks start where what is odd lets them."""
KINDS = {**INPUTS, **RUNS}


def all_cases() -> list[str]:
    """Returns the kind of every case, by its number: kinds take turns, so that the first cases are some of
    each."""
    turns = [(place / num, kind) for kind, (_, num) in KINDS.items() for place in range(num)]
    return [kind for _, kind in sorted(turns, key=lambda turn: turn[0])]
