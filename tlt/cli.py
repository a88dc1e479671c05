"""The command line: parse, call, print. Knows no tensor; everything heavy is imported inside the command that needs it.

A user's mistake, in an argument or in a file, is one line on stderr, `tlt: error: place: value; remedy`, and exit code 2.
Ctrl-C is 130. Anything else is our fault and shows its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagConversionOff, OmitArgPrefixes, OmitSubcommandPrefixes, Positional, arg, subcommand

from tlt import __version__

# --------------------------------------------------------------------------------------------------------------------
# What can be said


@dataclass(frozen=True)
class Train:
    """Train a policy with RL: tlt train CONFIG [--section.key value ...] | tlt train --resume DIR.

    Every value of the configuration can be overridden by its name, such as --optimizer.learning_rate 1e-4.
    """

    config: Annotated[Positional[Path | None], arg(metavar="CONFIG")] = None
    """TOML configuration."""
    resume: Annotated[Path | None, arg(metavar="DIR")] = None
    """Continue the run in this folder, with its own configuration."""


@dataclass(frozen=True)
class Generate:
    """Generate responses to prompts; speculation changes nothing but the time."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder."""
    prompts: Path
    """JSONL: prompt (text), prompt_ids or messages (chat), and optionally problem_id."""
    out: Path
    """JSONL: one response a line."""
    samples: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    seed: int = 0
    """The same seed gives the same tokens, whatever the speculation."""
    max_tokens: int = 2048
    """Longest response."""
    speculation: Annotated[str, arg(metavar="off|adaptive|DEPTHxWIDTHxBUDGET")] = "off"
    """How to draft; other than off needs --drafter."""
    drafter: Annotated[Path | None, arg(metavar="DIR")] = None
    """Drafter folder."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    max_batch_size: int = 64
    """Sequences decoded at a time."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class Task:
    """Write problems of a task."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A registered task such as countdown, or package.module:object."""
    num: int
    """How many problems."""
    out: Path
    """JSONL: one problem a line."""
    seed: int = 0
    """The same seed gives the same problems."""
    split: Literal["train", "test"] = "train"
    """The two share no problem."""
    options: Annotated[str, arg(metavar="JSON")] = "{}"
    """The task's own options, as a JSON object."""


@dataclass(frozen=True)
class Score:
    """Score responses: mean reward, solve rate, and each problem's."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A registered task such as countdown, or package.module:object."""
    problems: Path
    """JSONL, as tlt task writes it."""
    responses: Path
    """JSONL with problem_id and text, as tlt generate writes it."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write the responses again, with reward and solved."""


@dataclass(frozen=True)
class DrafterTrain:
    """Train a drafter for a model on its own responses."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Hugging Face checkpoint folder of the target."""
    responses: Path
    """JSONL with prompt_ids and token_ids, as tlt generate writes it."""
    out: Path
    """Folder of the drafter; must not exist yet."""
    init: Annotated[Path | None, arg(metavar="DIR")] = None
    """Start from this drafter instead of a random one."""
    epochs: float = 1.0
    """Passes over the responses."""
    learning_rate: float = 1e-3
    """Peak, after a short warm-up."""
    tokens_per_micro_step: int = 4096
    """Tokens per optimizer step."""
    seed: int = 0
    """Of initialization and order."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True)
class Drafter:
    """Drafters: train one."""

    command: Annotated[DrafterTrain, subcommand("train")]


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Task, subcommand("task")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Drafter, subcommand("drafter")]
)
