"""Starts a run from the user's process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tlt.apps.plan.fit import refuse
from tlt.apps.plan.sizes import PlannedRun, short_count
from tlt.base.clock import Moment
from tlt.base.config.drafter import check_served
from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.schema import Config
from tlt.base.io.hub import Repository, pin_dataset, pin_model
from tlt.base.io.plugins import without_folder
from tlt.base.io.text import quoted
from tlt.base.speculation import Off
from tlt.base.types import UserError
from tlt.drafter.formats.folder import choose_preset, load_drafter
from tlt.drafter.shape import DrafterShape
from tlt.drafter.vocabulary import check_wanted
from tlt.engine.build.engine import check_hybrid
from tlt.engine.build.model import drafter_folder, model_folder, read_start
from tlt.engine.memory import machine_bytes
from tlt.engine.vllm.preflight import check_vllm
from tlt.engine.vllm.strategies import check_form, vllm_kinds
from tlt.models.decoder import ModelConfig
from tlt.models.equal_rows import check_equal_rows, multiplied_by
from tlt.models.hf.families import load_model_config
from tlt.models.hf.prompts import check_max_tokens, describe_template
from tlt.models.hf.tokenizer import load_tokenizer, writes_date
from tlt.models.hf.weights import count_parameters
from tlt.models.lora import count_adapters
from tlt.tasks.rewards.scoring import Scorer
from tlt.training.build.layout import device_of, engine_dtype, layout_of
from tlt.training.build.policy import reward_spec
from tlt.training.build.problems import chat_format
from tlt.training.build.ranks import RankChoice, all_ranks, choose_ranks, local_ranks
from tlt.training.build.run_data import RunData, read_run_data
from tlt.training.launch.failures import EXIT_USER_ERROR, Restarts
from tlt.training.launch.local import is_rank, launch, run_here
from tlt.training.launch.place import Place, find_place
from tlt.training.launch.ray_cluster import RankNeeds, launch_on_ray
from tlt.training.loop import describe_run, main
from tlt.training.ranks.store import ABSENT, read_now
from tlt.training.ranks.world import Rendezvous, meet_ranks
from tlt.training.report.console import Console
from tlt.training.report.log import LOG, logging_stderr
from tlt.training.report.trackers import check_trackers
from tlt.training.report.words import near
from tlt.training.saved.inputs import files_of
from tlt.training.saved.manifest import latest_checkpoint
from tlt.training.saved.retention import go_back_to
from tlt.training.saved.run_folder import FolderLock, claim
from tlt.training.saved.run_identity import Begun

WAIT_SECONDS = 0.1
SLOW_SAMPLING = (
    "by PyTorch, as attention is: Numba is not installed; "
    "with it (pip install numba) drawing takes a thirtieth"
)


@dataclass(frozen=True)
class Findings:
    """notes: warnings, such as held-out problems that are trained on."""

    model: ModelConfig
    data: RunData
    num_adapted: int | None
    notes: tuple[str, ...] = ()


def launch_ranks(config: Config, began: Moment) -> int:
    run, num_ranks, program = config.run, all_ranks(config), "tlt.training.loop:main"
    restarts = Restarts(run.max_restarts, lambda: describe_saved(run.out_dir), run.out_dir / "failures.log")
    on_ray = run.launcher == "ray" and find_place() is None
    if on_ray or not is_rank(num_ranks):
        with Console(log=run.out_dir / LOG) as console:
            console.note(f"starting {num_ranks} ranks …")  # they import torch before they can print
    threads, go_on = run.threads_per_rank, f"tlt train --resume {quoted(near(run.out_dir))}"
    with logging_stderr(run.out_dir / LOG):
        if on_ray:
            needs = RankNeeds(threads, num_gpus=int(device_of(config).name == "cuda"))
            describe = partial(describe_run, config, began)
            return launch_on_ray(describe, num_ranks, program, needs, run.timeout_seconds, restarts)
        described = describe_run(config, began)
        return launch(described, num_ranks, program, threads, restarts=restarts, go_on=go_on)


def describe_saved(folder: Path) -> str:
    latest = latest_checkpoint(folder / "checkpoints")
    journal = " and the journal" if any(folder.glob("journal/step-*/*")) else ""
    return ("from the beginning" if latest is None else f"from {near(latest)}") + journal


def run_started_rank(place: Place, resolve: Callable[[bool], Config], began: Moment, patience: float) -> int:
    """Runs a rank that torchrun, srun or Kubernetes has started. Returns the exit code.

    patience: seconds that this rank waits for the others.
    """
    met = meet_ranks(place, patience)
    try:
        description = _share_description(met, lambda: describe_run(resolve(met.is_restart), began))
    except LeaderRefused:
        return EXIT_USER_ERROR
    if not place.is_leader:
        pin(Config.from_json(json.loads(description)["config"]))  # downloads to this machine's cache
    return run_here(description, partial(main, met=met))


class LeaderRefused(Exception):
    """Rank 0 has found a user's mistake, and prints it."""


def _share_description(met: Rendezvous, describe: Callable[[], str]) -> str:
    """The others wait however long the leader downloads. A user's mistake raises LeaderRefused on them."""
    if met.place.is_leader:
        try:
            description = describe()
        except UserError:
            met.store.set("description", "")
            _wait_until_read(met)
            raise
        met.store.set("description", description)
        return description
    while (shared := read_now(met.store, "description")) == ABSENT:
        time.sleep(WAIT_SECONDS)
    if not shared:
        met.store.add("read", 1)
        raise LeaderRefused
    return shared.decode()


def _wait_until_read(met: Rendezvous) -> None:
    """The leader may host the store: it stays until the other ranks know that they must end, but not
    forever."""
    deadline = time.monotonic() + 100 * WAIT_SECONDS
    while met.store.add("read", 0) < met.place.world_size - 1 and time.monotonic() < deadline:
        time.sleep(WAIT_SECONDS)


def go_back(checkpoint: Path) -> None:
    """Newer checkpoints are renamed, not removed."""
    lock = FolderLock(checkpoint.parents[1])
    try:
        aside = go_back_to(checkpoint)
    finally:
        lock.release()
    with Console(log=checkpoint.parents[1] / LOG) as console:
        for path in aside:
            console.note(f"a newer checkpoint is kept as {near(path)}")


def prepare(config: Config, begun: Begun | None = None, goes_on: bool = False) -> Config:
    """begun: None: a new run, or nothing is known of the old one.
    goes_on: whether the run in the folder goes on, known or not.
    """
    claim(config.run.out_dir, files_of(config), goes_on)
    ranks = choose_ranks(config)
    config = pin(config)
    place = find_place()
    is_first = place is None or place.is_leader
    with Console(enabled=is_first) as console:
        with console.status("reading model and problems") if console.is_live else nullcontext():
            findings = preflight(config, begun, trains=config.run.num_steps > 0)
        if is_first:
            FolderLock(config.run.out_dir).release()
            findings.data.write_prompts(config.run.out_dir)
            console.begin_log(config.run.out_dir / LOG, f"── {datetime.now():%Y-%m-%d %H:%M:%S} ──")
        console.header(header_rows(config, findings, ranks))
        if place is None and (num_idle := device_of(config).num_idle):
            num = all_ranks(config)
            console.note(
                f"{num_idle} GPU(s) stay idle, for run.num_ranks is {num}; --run.num_ranks {num + num_idle} "
                "takes all"
            )
        for note in findings.notes:
            console.note(note)
    return config


def pin(config: Config) -> Config:
    """Fills in number of ranks, dtype, prompts' date and hub commits, which it downloads: ranks need no
    network."""
    values = config.model_dump()
    values["run"]["num_ranks"] = all_ranks(config)
    values["run"]["dtype"] = str(engine_dtype(config)).removeprefix("torch.")
    for section, key, name in (
        ("model", "path", config.model.path),
        ("model", "adapter", config.model.adapter),
        ("drafter", "path", config.drafter.path),
    ):
        if name is not None and (repository := pin_model(name)) is not None:
            values[section][key] = str(repository)
    for section, data in (("task", config.task.data), ("evaluation", config.evaluation.data)):
        if data is not None and (dataset := pin_dataset(data)) is not None:
            values[section]["data"] = str(dataset)
    if config.task.date is None and writes_date(model_folder(config)):
        values["task"]["date"] = date.today().isoformat()
    return Config.model_validate(values)


def preflight(config: Config, begun: Begun | None = None, trains: bool = True) -> Findings:
    """Raises UserError for every mistake that can be found before a process is started.

    trains: False: only an engine's memory is needed.
    """
    layout = layout_of(config)
    if config.rollout.engine == "vllm":
        check_served(config.drafter.vocabulary, "drafter.vocabulary")
        has_learned, dtype = config.drafter.path is not None, engine_dtype(config)
        is_in_group = layout.is_sharded or all_ranks(config) > 1
        place = device_of(config).name, config.vllm, local_ranks(config), is_in_group
        check_vllm(config.rollout.speculation, has_learned, dtype, *place, equal_rows=config.run.equal_rows)
    check_trackers(config.tracking.use)
    model = load_model_config(model_folder(config), config.model.implementation)
    check_hybrid(model, config.rollout.engine, config.rollout.speculation)
    if config.run.equal_rows and config.rollout.engine == "tlt":
        check_equal_rows(model, engine_dtype(config), device_of(config).name)
    if config.rollout.router_replay and not model.num_experts:
        what = f"rollout.router_replay: is true, but {config.model.path} has no experts to route to"
        raise UserError(f"{what}; set it to false")
    num_adapted = count_adapters(model, config.lora) if config.lora.is_used else None
    read_start(config, model)
    stored = None
    if (drafter := drafter_folder(config)) is not None:
        stored = load_drafter(drafter, model)
        choose_preset(None, stored)
        check_wanted(config.drafter.vocabulary, stored.config)
        if config.rollout.engine == "vllm" and vllm_kinds(config.rollout.speculation, True) == ("learned",):
            check_form(stored.config.method)
    data = read_run_data(config, load_tokenizer(model_folder(config)), model)
    check_max_tokens(
        data.all_problems, config.sampling.max_tokens, model.max_positions, "sampling.max_tokens"
    )
    if trains:
        refuse(plan_run(config, model, None if stored is None else stored.config, data.longest_prompt))
    Scorer(reward_spec(config)).check(data.problems[0].data)
    if begun is not None:
        data.inputs().refuse_other(begun.inputs, config, begun.when)
    rows = [problem.data for problem in data.all_problems]
    chats = describe_template(rows, data.tokenizer, chat_format(config), "task.chat = true")
    part = [f"{config.model.path} is trained as a text model: weights that read images stay as they are"]
    notes = (
        *part[: model.is_text_part],
        *data.notes,
        *chats,
        *([stored.note] if stored is not None and stored.note else []),
    )
    return Findings(model, data, num_adapted, notes)


def plan_run(
    config: Config, model: ModelConfig, drafter: DrafterShape | None, longest_prompt: int
) -> PlannedRun:
    is_gpu = device_of(config).name == "cuda"
    device_bytes = torch.cuda.get_device_properties(0).total_memory if is_gpu else machine_bytes()
    num, sharing = all_ranks(config), 1 if is_gpu else local_ranks(config)
    return PlannedRun(config, model, drafter, num, is_gpu, device_bytes // sharing, longest_prompt, sharing)


def header_rows(config: Config, findings: Findings, ranks: RankChoice) -> dict[str, str]:
    model, device = findings.model, device_of(config)
    run, rollout, drafter = config.run, config.rollout, config.drafter
    num_parameters = count_parameters(model)
    speculation = str(rollout.speculation)
    if not isinstance(rollout.speculation, Off):
        speculation += ", by retrieval alone" if drafter.path is None else f", drafter {_named(drafter.path)}"
        speculation += ", trained in idle time" if drafter.train else ""
    num_problems, num_held_out = len(findings.data.problems), len(findings.data.held_out)
    held_out = f"{num_held_out:,} held out" if num_held_out else "none held out"
    name = _named(config.model.path)
    start = f", with adapter {_named(config.model.adapter)}" if config.model.adapter else ""
    task = without_folder(config.task.name)
    why = [device.reason, *([ranks.reason] if ranks.reason else [])]
    responses = "evaluated alone, for run.num_steps is 0"
    if run.num_steps:
        per_step = f"{rollout.problems_per_step} × {rollout.samples_per_problem}"
        responses = f"{per_step} responses a step, {run.num_steps} steps"
    return {
        "model": f"{name}: {model.architecture}, {short_count(num_parameters)} parameters" + start,
        "task": f"{task}: {num_problems:,} problems, {held_out}; {responses}",
        "algorithm": describe_algorithm(config),
        **({"environment": describe_environment(config.environment)} if config.environment.is_used else {}),
        **({"rewards": _weighted(config)} if config.rewards.functions else {}),
        "ranks": f"{ranks.number} on {device.name} ({'; '.join(why)}), {run.dtype}",
        "update": describe_update(config) + describe_lora(config, findings.num_adapted, num_parameters),
        **({"engine": "vLLM, with TLT's sampling law inside"} if rollout.engine == "vllm" else {}),
        **({"rows": describe_rows(config)} if run.equal_rows else {}),
        **({"sampling": SLOW_SAMPLING} if device.name == "cpu" and find_spec("numba") is None else {}),
        "speculation": speculation,
        "folder": near(Path(run.out_dir)),
    }


def describe_environment(section: EnvironmentSection) -> str:
    factories = [section.factory] if section.factory else section.factories.values()
    names = [*section.tools, *factories, *([section.respond] if section.respond else [])]
    called = ", ".join(map(without_folder, names))
    parts = "" if section.deterministic else "; not deterministic, so another run with this seed may part"
    return f"{called}; at most {section.max_turns} turns, {section.tool_timeout_seconds:g} s a call{parts}"


def describe_rows(config: Config) -> str:
    if config.rollout.engine == "vllm":
        return "equal in any batch, by vLLM's batch-invariant mode; the update computes its own"
    drafted = "equal: a token has the same numbers in any batch, drafted or not"
    if device_of(config).name == "cuda":
        return f"{drafted}; the update computes its own"
    return f"{drafted}, and in the update; {multiplied_by(engine_dtype(config))}"


def describe_update(config: Config) -> str:
    layout, parallel = layout_of(config), config.parallel
    parts = [f"policy {'sharded (FSDP2)' if layout.is_sharded else 'replicated'} ({layout.reason})"]
    if layout.is_sharded and parallel.param_dtype is not None:
        parts.append(f"computed in {parallel.param_dtype}")
    if parallel.checkpoint_activations:
        parts.append("activations checkpointed")
    return ", ".join(parts)


def describe_lora(config: Config, num_adapted: int | None, num_parameters: int) -> str:
    if num_adapted is None:
        return ""
    share = f"{short_count(num_adapted)} parameters beside {short_count(num_parameters)} frozen ones"
    return f", {config.lora.description}: {share}"


def describe_algorithm(config: Config) -> str:
    settings, chosen = config.algorithm, config.algorithm.resolve(config.sampling.max_tokens)
    clip = f"{chosen.loss} at [{1 - chosen.clip_low:g}, {1 + chosen.clip_high:g}]"
    parts = [f"advantage {chosen.advantage}", f"{chosen.ratio} ratio {clip}", f"{chosen.aggregation} mean"]
    if settings.kl_coefficient:
        parts.append(f"{settings.kl_coefficient:g} × KL ({chosen.kl_estimator}) in the {chosen.kl_in}")
    if chosen.overlong_buffer_tokens and settings.overlong_penalty:
        parts.append(f"penalty in the last {chosen.overlong_buffer_tokens:,} tokens")
    if settings.mask_truncated:
        parts.append("truncated responses masked")
    if chosen.dynamic_sampling:
        parts.append("dynamic sampling")
    return f"{chosen.name}: {', '.join(parts)}"


def _named(path: Path) -> str:
    repository = None if path.exists() else Repository.parse(path)
    return near(path) if repository is None else f"{repository.name}@{(repository.revision or 'main')[:8]}"


def _weighted(config: Config) -> str:
    """1 × task + 0.2 × my_rewards:length_penalty"""
    functions, weights = config.rewards.functions, config.rewards.weights
    terms = zip(weights or (1,) * len(functions), functions, strict=True)
    return " + ".join(f"{weight:g} × {function}" for weight, function in terms)
