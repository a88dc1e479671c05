"""The Python API: an engine and a training run for a script or a notebook.

    Engine.from_pretrained(folder) ── generate(prompts) ──▶ [Response]
    load_config(file, overrides) ──── train(config, task) ──▶ TrainingResult

Both give the tokens of `tlt generate` and `tlt train`. A caller's mistake is a UserError, a ValueError.
The number of threads is torch.set_num_threads.
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

from tlt.apps.run.start import launch_ranks, prepare, run_started_rank
from tlt.base.clock import Moment
from tlt.base.config.drafter import DrafterSection, check_served
from tlt.base.config.engine import Implementation
from tlt.base.config.load import load_config
from tlt.base.config.mistakes import find_nearest, validate
from tlt.base.config.schema import Config
from tlt.base.io.files import Record
from tlt.base.io.hub import Repository, resolve_model
from tlt.base.speculation import parse_speculation
from tlt.base.strategy import Strategy
from tlt.base.types import Request, Response, SamplingParams, UserError, checked, id_of, resolve_dtype
from tlt.base.value_types import BatchSize, Gib, Samples, shorten
from tlt.engine.backend import RolloutBackend
from tlt.engine.build.engine import load_engine
from tlt.engine.build.model import ModelFolder, load_model_for, resolve_device
from tlt.engine.settings import EngineSettings
from tlt.engine.stats import EngineStats
from tlt.models.hf.prompts import check_max_tokens, encode_prompts, make_requests
from tlt.tasks.base import Task
from tlt.training.build.ranks import all_ranks
from tlt.training.launch.failures import EXIT_OK, EXIT_USER_ERROR
from tlt.training.launch.local import is_rank
from tlt.training.launch.place import find_place
from tlt.training.launch.signals import StopRequest, handling_stop_signals
from tlt.training.loop import describe_run, main
from tlt.training.saved.evaluations import Evaluation, read_evaluations
from tlt.training.saved.run_folder import can_go_on, forget_journal, refuse_begun

# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids (also a NumPy or torch array), chat messages, or a record of a prompts file: {"prompt": …,
"problem_id": …}."""


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate`, with the meanings and defaults of SamplingParams.

    stop_ids: default: the model's own.
    max_tokens: default: 2048, or as many as the model's window leaves. A given value must fit the window.
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
    """A model ready to generate. Its tokens depend on the seed, the problem ids and the sampling alone, not
    on drafting or earlier calls."""

    def __init__(self, model: ModelFolder, rollout_engine: RolloutBackend) -> None:
        """Use `from_pretrained`."""
        self._model = model
        self.config, self.tokenizer, self.stop_ids = model.config, model.tokenizer, model.stop_ids
        self._engine, self._decode = rollout_engine, model.decode

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        drafter: str | Path | None = None,
        speculation: str | Strategy = "adaptive",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_batch_size: int = 64,
        engine: Literal["tlt", "vllm"] = "tlt",
        **drafting: Any,
    ) -> Engine:
        """Loads a model, a Hugging Face checkpoint folder or OWNER/NAME[@REVISION] on the hub, and its
        drafter unless speculation is off.

        drafter: a drafter's folder or its name on the hub; None: drafts are retrieved from earlier responses
            to the same problem.
        speculation: "adaptive" (measured while running), "off", or a strategy such as "4x1x4": depth, width,
            budget.
        dtype: of weights and activations: float32, float64, bfloat16, or "auto": bfloat16 on a GPU, else
            float32.
        device: "auto" is a GPU where there is one.
        max_batch_size: sequences decoded at a time.
        engine: TLT's own, or an installed vLLM with the same sampling law inside, which also takes models
            that TLT does not train (docs/vllm.md).
        drafting: keys of the configuration section [drafter], such as vocabulary=4096; implementation, the
            code that computes the model ("own", "transformers" or "auto", docs/models.md); kv_gib, of all
            caches (docs/memory.md).
        """
        checked("max_batch_size", max_batch_size, BatchSize)
        for name, value in {"path": path, **({} if drafter is None else {"drafter": drafter})}.items():
            if not (isinstance(value, str | Path) and str(value).strip()):
                hub = "give a folder, or a name on the Hugging Face hub"
                raise UserError(f"{name}: is {shorten(value)}; {hub}")
        implementation = checked("implementation", drafting.pop("implementation", "auto"), Implementation)
        kv_gib = checked("kv_gib", drafting.pop("kv_gib", None), Gib | None)
        section = validate(DrafterSection, drafting, "drafter")
        if engine not in ("tlt", "vllm"):
            raise UserError(f"engine: is {shorten(engine)}; give tlt or vllm")
        if drafter is not None and not Path(drafter).is_dir() and Repository.parse(drafter) is None:
            hub = "give a drafter's folder, or its name on the Hugging Face hub"
            raise UserError(f"drafter: {drafter} does not exist; {hub}")
        if engine == "vllm":
            check_served(section.vocabulary, "vocabulary")
        on = resolve_device(device)
        settings = EngineSettings(
            parse_speculation(str(speculation)),
            dtype=resolve_dtype(str(dtype).removeprefix("torch."), on.type),
            device=on,
            max_batch_size=max_batch_size,
            engine=engine,
            drafting=section,
            kv_gib=kv_gib,
        )
        model = load_model_for(resolve_model(path), engine, None, implementation)
        return cls(model, load_engine(model, settings, None if drafter is None else resolve_model(drafter)))

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def stats(self) -> EngineStats:
        """Tokens, steps, strategies and accept_length (tokens per verification) of the latest generate or
        stream."""
        return self._engine.stats

    def generate(
        self, prompts: Iterable[Prompt], samples: int = 1, **sampling: Unpack[Sampling]
    ) -> list[Response]:
        """Returns `samples` responses to every prompt, in the order of the prompts."""
        requests = self._requests(prompts, samples, sampling)
        order = {id_of(request): place for place, request in enumerate(requests)}
        return sorted(self._run(requests), key=lambda response: order[id_of(response)])

    def stream(
        self, prompts: Iterable[Prompt], samples: int = 1, **sampling: Unpack[Sampling]
    ) -> Iterator[Response]:
        """Yields the same responses as they finish. One stream at a time; closing it drops the rest."""
        return self._run(self._requests(prompts, samples, sampling))

    def _requests(self, prompts: Iterable[Prompt], samples: int, sampling: Sampling) -> list[Request]:
        if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts: is {shorten(prompts)}; give a list of prompts")
        samples = checked("samples", samples, Samples)
        if unknown := next(iter(sampling.keys() - Sampling.__annotations__.keys()), None):
            names = Sampling.__annotations__
            known = find_nearest(unknown, names) or f"one of {', '.join(names)}"
            raise UserError(f"{unknown}: is no argument of generate and stream; give {known}")
        given: Sampling = {"stop_ids": self.stop_ids, **sampling}
        params = self._model.with_ends(SamplingParams(**given))
        records = [(f"prompts:{n}", _to_record(n, prompt)) for n, prompt in enumerate(prompts, start=1)]
        vocab_size, window = self.config.vocab_size, self.config.max_positions
        encoded = encode_prompts(records, self.tokenizer, vocab_size=vocab_size, window=window)
        if "max_tokens" in sampling:
            check_max_tokens(encoded, params.max_tokens, window, "max_tokens")
        return make_requests(encoded, params, samples)

    def _run(self, requests: Sequence[Request]) -> Iterator[Response]:
        if not self._engine.is_idle:
            raise UserError("engine: a stream of it is still open; exhaust or close that first")
        self._engine.stats = EngineStats()
        try:
            for rollout in self._engine.generate(requests):
                yield Response.of(rollout, self._decode)
        finally:
            self._engine.abort()  # unfinished responses, if the caller broke off


def _to_record(number: int, prompt: Any) -> Record:
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
    """The results of a run.

    folder: holds policy/ (and best/, drafter/) as checkpoint folders, metrics.jsonl and evaluations.jsonl.
    evaluations: the lines of evaluations.jsonl (`tlt.training.saved.evaluations.Evaluation`).
    is_finished: False: Ctrl-C or SIGTERM ended it; `tlt train --resume FOLDER` goes on.
    """

    folder: Path
    evaluations: tuple[Evaluation, ...]
    is_finished: bool


def train(config: Config | str | Path | Mapping[str, Any], task: Task | None = None) -> TrainingResult:
    """Trains a policy, as `tlt train` does.

    config: a Config, a configuration file, the name of a recipe, or the sections as a dict.
    task: replaces config.task.name. Ranks and reward workers are processes that import the task by name, so
        it must be an attribute of a module (`from mytask import TASK`), unless the run stays in this process:
        run.num_ranks = 1 and rewards.num_workers = 0.

    With several ranks a script must start under `if __name__ == "__main__":`, as multiprocessing requires. A
    process started by torchrun or srun is a rank of the run, and resumes it after a restart.
    """
    config = config if isinstance(config, Config) else load_config(config)
    with _named(task, config) if task is not None else nullcontext(config.task.name) as name:
        config = load_config(config.model_dump(mode="json"), {"task.name": name})
        folder, began = config.run.out_dir, Moment.now()
        begin = partial(_begin, config)
        if (place := find_place()) is not None:
            code = run_started_rank(place, begin, began, config.run.timeout_seconds)
            is_finished = _is_finished(code, folder)
        elif all_ranks(config) == 1 and config.run.launcher == "local":
            is_finished = _run_here(begin(), began)
        else:
            is_finished = _is_finished(launch_ranks(begin(), began), folder)
    return TrainingResult(folder, tuple(read_evaluations(folder / "evaluations.jsonl")), is_finished)


def _begin(config: Config, goes_on: bool = False) -> Config:
    """goes_on: a launcher has restarted these ranks, so the run in the folder is resumed."""
    folder = config.run.out_dir
    if not (goes_on and can_go_on(folder)):
        refuse_begun(folder)
        config = prepare(config)
        forget_journal(folder)
        return config
    return prepare(config, goes_on=True)


def _run_here(config: Config, began: Moment) -> bool:
    stop, threads = StopRequest(), torch.get_num_threads()
    hears_signals = threading.current_thread() is threading.main_thread()
    try:
        with handling_stop_signals(stop) if hears_signals else nullcontext():
            main(describe_run(config, began), stop)
    finally:
        torch.set_num_threads(threads)
    return not stop.is_set()


def _is_finished(code: int, folder: Path) -> bool:
    """Raises an error for ranks that failed."""
    if code == EXIT_USER_ERROR:
        raise UserError(f"{folder}: a rank has stopped; the line on stderr says what to correct")
    if 0 < code < 128:
        raise RuntimeError(f"{folder}: a rank has failed; its traceback is on stderr")
    return code == EXIT_OK


@contextmanager
def _named(task: Task, config: Config) -> Iterator[str]:
    """Yields a name by which `get_task` finds the object."""
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
            "run.num_ranks = 1 and rewards.num_workers = 0, or put it into a module and give its name, "
            "module:object"
        )
    module = ModuleType("in_this_process")
    vars(module)[type(task).__name__] = task
    sys.modules[module.__name__] = module
    try:
        yield f"{module.__name__}:{type(task).__name__}"
    finally:
        del sys.modules[module.__name__]


def _importable_name(task: Task) -> str | None:
    name = type(task).__module__
    attributes = vars(sys.modules[name]) if name != "__main__" and name in sys.modules else {}
    return next((f"{name}:{attribute}" for attribute, value in attributes.items() if value is task), None)
