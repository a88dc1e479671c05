"""The Python API: an engine and a training run for a script or a notebook. Knows no arguments of a command
line.

    Engine.from_pretrained(folder) ── generate(prompts) ──▶ [Response]
    load_config(file, overrides) ──── train(config, task) ──▶ TrainingResult

Both do what `tlt generate` and `tlt train` do, token for token. A mistake of the caller's is a UserError,
which is a ValueError. How many threads compute is torch's own setting and holds for the whole process:
torch.set_num_threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack

import torch

from tlt.assembly.engine import EngineSettings, load_engine
from tlt.assembly.model import ModelFolder, load_model_for, resolve_device
from tlt.assembly.ranks import all_ranks
from tlt.clock import Moment
from tlt.config.drafter import DrafterSection, check_served
from tlt.config.load import load_config
from tlt.config.mistakes import find_nearest, validate
from tlt.config.schema import Config
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.hf.prompts import check_room, encode_prompts, make_requests
from tlt.io.files import Record
from tlt.io.hub import Repository, resolve_model
from tlt.kinds import BatchSize, Samples, shorten
from tlt.launch.failures import EXIT_OK, EXIT_USER_ERROR
from tlt.launch.local import is_rank
from tlt.launch.place import find_place
from tlt.launch.signals import StopRequest, handling_stop_signals
from tlt.saved.run_folder import can_go_on, forget_journal, refuse_begun
from tlt.speculative.strategy import Strategy
from tlt.tasks.base import Task
from tlt.training.evaluations import Evaluation, read_evaluations
from tlt.training.loop import describe_run, main
from tlt.training.start import launch_ranks, prepare, run_started_rank
from tlt.types import Request, Response, SamplingParams, UserError, checked, resolve_dtype

# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids (also as an array of NumPy's or torch's), chat messages, or a record as in a prompts file:
{"prompt": …, "problem_id": …}."""


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate`, with the meanings and defaults of SamplingParams.

    stop_ids: else the model's own.
    max_tokens: refused where the model's window ends before; else 2048, or what it leaves.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    seed: int


class Engine:
    """A model ready to generate. Its tokens depend on the seed, the problem ids and the sampling, and
    never on how it drafts or what it generated before."""

    def __init__(self, model: ModelFolder, rollout_engine: RolloutBackend) -> None:
        """`from_pretrained` is the usual way to make one."""
        self.config, self.tokenizer, self.stop_ids = model.config, model.tokenizer, model.stop_ids
        self._engine, self._decode = rollout_engine, model.decode

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        drafter: str | Path | None = None,
        speculation: str | Strategy = "off",
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "auto",
        max_batch_size: int = 64,
        engine: Literal["tlt", "vllm"] = "tlt",
        **drafting: Any,
    ) -> Engine:
        """Loads a Hugging Face checkpoint folder, or a model of the hub, and where speculation is on, the
        drafter.

        revision: branch, tag or commit of a model of the hub; None: main.
        drafter: a drafter's folder or its name on the hub; None: what is drafted is retrieved from earlier
            responses to the same problem.
        speculation: "off", "adaptive" (measured while running), or a strategy such as "4x1x4": depth, width,
            budget.
        dtype: of weights and activations: float32, float64 or bfloat16.
        device: "auto" is a GPU where there is one.
        max_batch_size: sequences decoded at a time.
        engine: what generates, TLT's own engine or an installed vLLM with the same sampling law inside, which
            also takes models that TLT does not train (docs/vllm.md).
        drafting: keys of the section [drafter] of a run's configuration, such as vocabulary=4096, the
            number of tokens that the drafter may propose.
        """
        checked("max_batch_size", max_batch_size, BatchSize)
        for name, value in (("path", path), ("drafter", drafter)):
            if not (
                (isinstance(value, str | Path) and str(value).strip())
                or (value is None and name == "drafter")
            ):
                raise UserError(
                    f"{name}: is {shorten(value)}; give a folder, or a name on the Hugging Face hub"
                )
        checked("revision", revision, str | None)
        section = validate(DrafterSection, drafting, "drafter")
        if engine not in ("tlt", "vllm"):
            raise UserError(f"engine: is {shorten(engine)}; give tlt or vllm")
        if drafter is not None and not Path(drafter).is_dir() and Repository.parse(drafter) is None:
            raise UserError(
                f"drafter: {drafter} does not exist; give a drafter's folder, or its name on the Hugging "
                "Face hub"
            )
        if engine == "vllm":
            check_served(section.vocabulary, "vocabulary")
        settings = EngineSettings(
            str(speculation),
            dtype=resolve_dtype(str(dtype).removeprefix("torch.")),
            device=resolve_device(device),
            max_batch_size=max_batch_size,
            engine=engine,
            drafting=section,
        )
        model = load_model_for(resolve_model(path, revision), engine)
        return cls(model, load_engine(model, settings, None if drafter is None else resolve_model(drafter)))

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def stats(self) -> EngineStats:
        """Tokens, steps, strategies and accept_length (tokens per verification) of the latest call of
        generate or stream."""
        return self._engine.stats

    def generate(
        self, prompts: Iterable[Prompt], samples: int = 1, **sampling: Unpack[Sampling]
    ) -> list[Response]:
        """Returns `samples` responses to every prompt, in the order of the prompts."""
        requests = self._requests(prompts, samples, sampling)
        order = {(request.problem_id, request.sample_index): index for index, request in enumerate(requests)}
        return sorted(
            self._run(requests), key=lambda response: order[response.problem_id, response.sample_index]
        )

    def stream(
        self, prompts: Iterable[Prompt], samples: int = 1, **sampling: Unpack[Sampling]
    ) -> Iterator[Response]:
        """Yields the same responses as they finish. One stream at a time; closing it forgets what has not
        finished."""
        return self._run(self._requests(prompts, samples, sampling))

    def _requests(self, prompts: Iterable[Prompt], samples: int, sampling: Sampling) -> list[Request]:
        if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts: is {shorten(prompts)}; give a list of prompts")
        samples = checked("samples", samples, Samples)
        if unknown := next(iter(sampling.keys() - Sampling.__annotations__.keys()), None):
            known = (
                find_nearest(unknown, Sampling.__annotations__)
                or f"one of {', '.join(Sampling.__annotations__)}"
            )
            raise UserError(f"{unknown}: is no argument of generate and stream; give {known}")
        given: Sampling = {"stop_ids": self.stop_ids, **sampling}
        params = SamplingParams(**given)
        records = [
            (f"prompts:{number}", _to_record(number, prompt))
            for number, prompt in enumerate(prompts, start=1)
        ]
        vocab_size, window = self.config.vocab_size, self.config.max_positions
        encoded = encode_prompts(records, self.tokenizer, vocab_size=vocab_size, window=window)
        if "max_tokens" in sampling:
            check_room(encoded, params.max_tokens, window, "max_tokens")
        return make_requests(encoded, params, samples)

    def _run(self, requests: Sequence[Request]) -> Iterator[Response]:
        if not self._engine.is_idle:
            raise UserError("engine: a stream of it is still open; exhaust or close that first")
        self._engine.stats = EngineStats()
        try:
            for rollout in self._engine.generate(requests):
                yield Response.of(rollout, self._decode)
        finally:
            self._engine.abort()  # nothing is left to, unless the caller broke off


def _to_record(number: int, prompt: Any) -> Record:
    """Returns the prompt as a line of a prompts file would give it."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview) or not (
        isinstance(prompt, Sequence) or hasattr(prompt, "tolist")
    ):
        raise UserError(f"prompts:{number}: is {shorten(prompt)}; give text, token ids, messages or a record")
    if isinstance(prompt, Sequence) and prompt and all(isinstance(item, Mapping) for item in prompt):
        return {"messages": list(prompt)}
    return {"prompt_ids": prompt}


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TrainingResult:
    """Says what a run has left.

    folder: holds policy/ (and best/, drafter/) as checkpoint folders, metrics.jsonl and evaluations.jsonl.
    evaluations: the file's lines (`tlt.training.evaluations.Evaluation`); each has `step` (updates done),
        `solve_rate`, `reward`, `num_unscored`, `seconds`, `by_problem` and `reward_by_problem`.
    is_finished: False where Ctrl-C or SIGTERM ended it; `tlt train --resume FOLDER` goes on.
    """

    folder: Path
    evaluations: tuple[Evaluation, ...]
    is_finished: bool


def train(config: Config | str | Path | Mapping[str, Any], task: Task | None = None) -> TrainingResult:
    """Trains a policy, as `tlt train` does, and returns when the run has ended.

    config: a Config, or what `load_config` makes one of: a file, the name of a recipe, the sections as a
        dict.
    task: an object in place of the one that config.task.name names. Ranks and reward workers are processes
        that import the task by its name. An object that is a module's own (`from mytask import TASK`) has
        one; any other serves only a run in this process: run.num_ranks = 1 and rewards.num_workers = 0.

    With several ranks a script has to start under `if __name__ == "__main__":`, as for everything that
    multiprocessing spawns. Where torchrun or srun has started this process, it is a rank of the run, and
    goes on with what it began before a restart.
    """
    config = config if isinstance(config, Config) else load_config(config)
    with _named(task, config) if task is not None else nullcontext(config.task.name) as name:
        config = load_config(config.model_dump(mode="json"), {"task.name": name})
        folder, began = config.run.out_dir, Moment.now()
        begin = partial(_begin, config)
        if (place := find_place()) is not None:
            is_finished = _is_finished(
                run_started_rank(place, begin, began, config.run.timeout_seconds), folder
            )
        elif all_ranks(config) == 1 and config.run.launcher == "local":
            is_finished = _run_here(begin(), began)
        else:
            is_finished = _is_finished(launch_ranks(begin(), began), folder)
    return TrainingResult(folder, tuple(read_evaluations(folder / "evaluations.jsonl")), is_finished)


def _begin(config: Config, goes_on: bool = False) -> Config:
    """Checks what can be checked before a run begins. goes_on: whether ranks that somebody else has
    started were here before: what they have begun goes on, then."""
    folder = config.run.out_dir
    if not (goes_on and can_go_on(folder)):
        refuse_begun(folder)
        config = prepare(config)
        forget_journal(folder)
        return config
    return prepare(config)


def _run_here(config: Config, began: Moment) -> bool:
    """Runs this process's rank. Errors are the caller's, and torch's threads are again as they were."""
    stop, threads = StopRequest(), torch.get_num_threads()
    hears_signals = threading.current_thread() is threading.main_thread()
    try:
        with handling_stop_signals(stop) if hears_signals else nullcontext():
            main(describe_run(config, began), stop)
    finally:
        torch.set_num_threads(threads)
    return not stop.is_set()


def _is_finished(code: int, folder: Path) -> bool:
    """Returns whether ranks with this exit code have come to the run's end, and raises where they have
    failed."""
    if code == EXIT_USER_ERROR:
        raise UserError(f"{folder}: a rank has stopped; the line on stderr says what to correct")
    if 0 < code < 128:
        raise RuntimeError(f"{folder}: a rank has failed; its traceback is on stderr")
    return code == EXIT_OK


@contextmanager
def _named(task: Task, config: Config) -> Iterator[str]:
    """Yields a name under which `get_task` finds the object: its own, or one for this process and this run
    alone."""
    if isinstance(task, type) or not isinstance(task, Task):
        remedy = (
            "give an object with problems() and score(), or a task's name as the configuration's task.name"
        )
        raise UserError(f"task: {shorten(task)} is no task; {remedy}")
    if (name := _importable_name(task)) is not None:
        yield name
        return
    if not is_rank(all_ranks(config)) or config.rewards.num_workers > 0:
        raise UserError(
            f"task: a {type(task).__name__} that no module holds cannot reach other processes; set "
            "run.num_ranks = 1 and"
            " rewards.num_workers = 0, or put it into a module and give its name, module:object"
        )
    module = ModuleType("in_this_process")
    vars(module)[type(task).__name__] = task
    sys.modules[module.__name__] = module
    try:
        yield f"{module.__name__}:{type(task).__name__}"
    finally:
        del sys.modules[module.__name__]


def _importable_name(task: Task) -> str | None:
    """Returns "module:object" where the module of the object's class holds the object itself; None
    otherwise."""
    name = type(task).__module__
    attributes = vars(sys.modules[name]) if name != "__main__" and name in sys.modules else {}
    return next((f"{name}:{attribute}" for attribute, value in attributes.items() if value is task), None)
