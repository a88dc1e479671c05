"""Starts a run from the user's own process: everything that can be refused is refused in one line, a
header says what will be trained, and then the ranks begin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tlt.assembly.drafter import preset_changes
from tlt.assembly.model import adapter_folder, drafter_folder, model_folder, read_start
from tlt.assembly.policy import reward_spec
from tlt.assembly.ranks import all_ranks, local_ranks
from tlt.assembly.world import device_of, layout_of
from tlt.clock import Moment
from tlt.config.drafter import check_served
from tlt.config.schema import Config
from tlt.drafter.formats.folder import choose_preset, load_drafter
from tlt.drafter.model import DrafterShape
from tlt.drafter.vocabulary import check_wanted
from tlt.engine.memory import machine_bytes
from tlt.hf.config import load_model_config
from tlt.hf.prompts import check_room
from tlt.hf.weights import expected_shapes
from tlt.io.hub import Repository, pin_dataset, pin_model
from tlt.launch.failures import EXIT_USER_ERROR, Restarts
from tlt.launch.local import is_rank, launch, run_here
from tlt.launch.place import Place, find_place
from tlt.launch.ray_cluster import RankNeeds, launch_on_ray
from tlt.models.decoder import ModelConfig
from tlt.models.lora import count_adapters
from tlt.plan.fit import refuse
from tlt.plan.sizes import PlannedRun
from tlt.ranks.store import ABSENT, read_now
from tlt.ranks.world import Rendezvous, meet_ranks
from tlt.report.console import Console, near
from tlt.report.trackers import check_trackers
from tlt.rewards.scoring import Scorer
from tlt.saved.checkpoint import go_back_to
from tlt.saved.inputs import Inputs
from tlt.saved.manifest import latest_checkpoint
from tlt.saved.replay import check_replay
from tlt.saved.run_folder import FolderLock
from tlt.saved.run_identity import Begun
from tlt.training.loop import describe_run, main
from tlt.training.problems import describe_overlap, load_problems
from tlt.types import UserError, resolve_dtype
from tlt.vllm.preflight import check_vllm

WAIT_SECONDS = 0.1
"""How often a rank asks whether the leader has read the configuration."""


SLOW_SAMPLING = "by PyTorch, as attention is: Numba is not installed; with it (pip install numba) drawing takes a thirtieth"


@dataclass(frozen=True)
class Findings:
    """Holds what `preflight` read; the header shows it. num_adapted: parameters of LoRA's adapters; None:
    it is off.  overlap: one line about problems that are held out and trained on; None: there are none."""

    model: ModelConfig
    num_problems: int
    num_held_out: int
    num_adapted: int | None
    overlap: str | None


def launch_ranks(config: Config, began: Moment) -> int:
    """Trains on ranks of their own; returns the exit code. began: the user's command."""
    run, num_ranks = config.run, all_ranks(config)
    restarts = Restarts(run.max_restarts, lambda: describe_saved(run.out_dir), run.out_dir / "failures.log")
    on_ray = run.launcher == "ray" and find_place() is None
    if on_ray or not is_rank(num_ranks):
        with Console() as console:
            console.note(
                f"starting {num_ranks} ranks …"
            )  # which import torch, and are silent until they have
    if on_ray:
        needs = RankNeeds(run.threads_per_rank, num_gpus=int(device_of(config).name == "cuda"))
        describe = partial(describe_run, config, began)
        return launch_on_ray(
            describe, num_ranks, "tlt.training.loop:main", needs, run.timeout_seconds, restarts
        )
    return launch(
        describe_run(config, began),
        num_ranks,
        "tlt.training.loop:main",
        run.threads_per_rank,
        restarts=restarts,
    )


def describe_saved(folder: Path) -> str:
    """Says where the run in a folder would go on."""
    latest = latest_checkpoint(folder / "checkpoints")
    journal = " and the journal" if any(folder.glob("journal/step-*/*")) else ""
    return ("from the beginning" if latest is None else f"from {near(latest)}") + journal


def run_started_rank(place: Place, resolve: Callable[[bool], Config], began: Moment, patience: float) -> int:
    """Runs one of the ranks that torchrun, srun or Kubernetes has started, with the configuration that the
    leader resolves, for it has the files; returns the exit code.

    resolve: checks and returns the configuration, given whether these ranks have been started before.
    patience: seconds for which this rank waits for the others to come; they agree on nothing before.
    """
    met = meet_ranks(place, patience)
    try:
        description = _tell_description(met, lambda: describe_run(resolve(met.is_restart), began))
    except LeaderRefused:
        return EXIT_USER_ERROR
    if not place.is_leader:
        pin(
            Config.from_json(json.loads(description)["config"])
        )  # brings what this machine lacks into its cache
    return run_here(description, partial(main, met=met))


class LeaderRefused(Exception):
    """Rank 0 has found a user's mistake, and says it."""


def _tell_description(met: Rendezvous, describe: Callable[[], str]) -> str:
    """Returns the leader's description of the run on every rank, however long it takes to come about:
    reading models and data, downloading them. Raises LeaderRefused where there is none."""
    if met.place.is_leader:
        try:
            description = describe()
        except UserError:
            met.store.set("description", "")
            _wait_until_heard(met)
            raise
        met.store.set("description", description)
        return description
    while (told := read_now(met.store, "description")) == ABSENT:
        time.sleep(WAIT_SECONDS)
    if not told:
        met.store.add("heard", 1)
        raise LeaderRefused
    return told.decode()


def _wait_until_heard(met: Rendezvous) -> None:
    """Keeps the leader, whose store it may be, until the others know that they are to end. One that has
    died cannot."""
    deadline = time.monotonic() + 100 * WAIT_SECONDS
    while met.store.add("heard", 0) < met.place.world_size - 1 and time.monotonic() < deadline:
        time.sleep(WAIT_SECONDS)


def go_back(checkpoint: Path) -> None:
    """Lets the run go on from this checkpoint of it, which is checked first; newer ones stay, under
    another name."""
    lock = FolderLock(checkpoint.parents[1])
    try:
        aside = go_back_to(checkpoint)
    finally:
        lock.release()
    with Console() as console:
        for path in aside:
            console.note(f"a newer checkpoint is kept as {near(path)}")


def prepare(config: Config, begun: Begun | None = None) -> Config:
    """Refuses what can be refused now, and prints the header. Returns the configuration with its names
    pinned. begun: the run that is gone on with; None: a new one begins, or nothing is known of it."""
    config = pin(config)
    place = find_place()
    is_first = place is None or place.is_leader
    with Console(enabled=is_first) as console:
        with console.status("reading model and problems") if console.is_live else nullcontext():
            findings = preflight(config, begun, trains=config.run.num_steps > 0)
        if is_first:
            FolderLock(config.run.out_dir).release()
        console.header(describe(config, findings))
        if place is None and (num_idle := device_of(config).num_idle):
            num = all_ranks(config)
            console.note(
                f"{num_idle} GPU(s) stay idle, for run.num_ranks is {num}; --run.num_ranks {num + num_idle} "
                "takes all"
            )
        if findings.overlap is not None:
            console.note(findings.overlap)
    return config


def pin(config: Config) -> Config:
    """Returns the configuration with what it leaves to this moment: the number of ranks, and the commit of
    whatever it names on the hub, downloaded where it is not in the cache: ranks and a resumed run take the
    same, without a network."""
    values = config.model_dump()
    values["run"]["num_ranks"] = all_ranks(config)
    if (model := pin_model(config.model.path, config.model.revision)) is not None:
        values["model"] |= {"path": model.name, "revision": model.revision}
    for section, key, name in (
        ("model", "adapter", config.model.adapter),
        ("drafter", "path", config.drafter.path),
    ):
        if name is not None and (repository := pin_model(name)) is not None:
            values[section][key] = str(repository)
    for section, data in (("task", config.task.data), ("evaluation", config.evaluation.data)):
        if data is not None and (dataset := pin_dataset(data)) is not None:
            values[section]["data"] = str(dataset)
    return Config.model_validate(values)


def preflight(config: Config, begun: Begun | None = None, trains: bool = True) -> Findings:
    """Raises UserError for everything that can be refused before a process is started. begun: see
    `prepare`. trains: the policy will be, which takes several times the memory of an engine."""
    layout = layout_of(config)
    if config.rollout.engine == "vllm":
        check_served(config.drafter.vocabulary, "drafter.vocabulary")
        has_learned, dtype = config.drafter.path is not None, resolve_dtype(config.run.dtype)
        is_in_group = layout.is_sharded or all_ranks(config) > 1
        place = device_of(config).name, config.vllm, local_ranks(config), is_in_group
        check_vllm(
            config.rollout.speculation, has_learned, dtype, *place, follows=config.rollout.asks_for_references
        )
    check_trackers(config.tracking.use)
    model = load_model_config(model_folder(config))
    num_adapted = count_adapters(model, config.lora) if config.lora.rank else None
    read_start(config, model)
    if (drafter := drafter_folder(config)) is not None:
        stored = load_drafter(drafter, model)
        choose_preset(config.drafter.preset, stored, preset_changes(config.drafter))
        check_wanted(config.drafter.vocabulary, stored.config)
    problems = load_problems(config, "train")
    held_out = load_problems(config, "test") if config.evaluation.num_problems else []
    check_room([*problems, *held_out], config.sampling.max_tokens, model.max_positions, "sampling.max_tokens")
    longest_prompt = max(len(problem.prompt_ids) for problem in problems)
    if trains:
        refuse(plan_run(config, model, None if drafter is None else stored.config, longest_prompt))
    check_replay(config, problems, model)
    Scorer(reward_spec(config)).check(problems[0].data)
    if begun is not None:
        inputs = Inputs.of(
            config,
            {"train": problems, "test": held_out},
            model_folder(config),
            adapter=adapter_folder(config),
        )
        inputs.refuse_other(begun.inputs, config, begun.when)
    return Findings(model, len(problems), len(held_out), num_adapted, describe_overlap(problems, held_out))


def plan_run(
    config: Config, model: ModelConfig, drafter: DrafterShape | None, longest_prompt: int
) -> PlannedRun:
    """Returns the run as a plan of its memory sees it, on the devices of this machine."""
    is_gpu, num_local = device_of(config).name == "cuda", local_ranks(config)
    device_bytes = torch.cuda.get_device_properties(0).total_memory if is_gpu else machine_bytes()
    rank_bytes = device_bytes if is_gpu else device_bytes // num_local
    return PlannedRun(config, model, drafter, all_ranks(config), is_gpu, rank_bytes, longest_prompt)


def describe(config: Config, findings: Findings) -> dict[str, str]:
    """Returns the header's lines, name → text."""
    model, run, rollout, drafter, device = (
        findings.model,
        config.run,
        config.rollout,
        config.drafter,
        device_of(config),
    )
    num_parameters = sum(shape.numel() for shape in expected_shapes(model).values())
    speculation = rollout.speculation
    if speculation != "off":
        speculation += ", by retrieval alone" if drafter.path is None else f", drafter {_named(drafter.path)}"
        speculation += ", trained in idle time" if drafter.train else ""
    held_out = f"{findings.num_held_out:,} held out" if findings.num_held_out else "none held out"
    name = _named(config.model.path, config.model.revision)
    start = f", with adapter {_named(config.model.adapter)}" if config.model.adapter else ""
    responses = (
        f"{rollout.problems_per_step} × {rollout.samples_per_problem} responses a step, {run.num_steps} steps"
    )
    responses = responses if run.num_steps else "evaluated alone, for run.num_steps is 0"
    return {
        "model": f"{name}: {model.architecture}, {_short(num_parameters)} parameters" + start,
        "task": f"{config.task.name}: {findings.num_problems:,} problems, {held_out}; {responses}",
        "algorithm": describe_algorithm(config),
        **({"rewards": _weighted(config)} if config.rewards.functions else {}),
        "ranks": f"{all_ranks(config)} on {device.name} ({device.reason}), {run.dtype}",
        "update": describe_update(config) + describe_lora(config, findings.num_adapted, num_parameters),
        **({"engine": "vLLM, with TLT's sampling law inside"} if rollout.engine == "vllm" else {}),
        **({"sampling": SLOW_SAMPLING} if device.name == "cpu" and find_spec("numba") is None else {}),
        "speculation": speculation,
        "folder": near(Path(run.out_dir)),
    }


def describe_update(config: Config) -> str:
    """Returns how the policy's training state lies on the ranks, why, and what its update does besides."""
    layout, parallel = layout_of(config), config.parallel
    parts = [f"policy {'sharded (FSDP2)' if layout.is_sharded else 'replicated'} ({layout.reason})"]
    if layout.is_sharded and parallel.param_dtype is not None:
        parts.append(f"computed in {parallel.param_dtype}")
    if parallel.checkpoint_activations:
        parts.append("activations checkpointed")
    return ", ".join(parts)


def describe_lora(config: Config, num_adapted: int | None, num_parameters: int) -> str:
    """Returns what LoRA trains, behind a comma; nothing where it is off."""
    if num_adapted is None:
        return ""
    share = f"{_short(num_adapted)} parameters beside {_short(num_parameters)} frozen ones"
    return f", LoRA of rank {config.lora.rank} on {', '.join(config.lora.targets)}: {share}"


def describe_algorithm(config: Config) -> str:
    """Returns the algorithm's name and its choices, those of the preset and those of the configuration
    alike."""
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
        parts.append(f"dynamic sampling, up to {settings.max_resamples} further rounds")
    return f"{chosen.name}: {', '.join(parts)}"


def _named(path: Path, revision: str | None = None) -> str:
    """Returns a path as one would type it, or a repository of the hub with the first digits of its commit."""
    repository = None if path.exists() else Repository.parse(path, revision)
    return near(path) if repository is None else f"{repository.name}@{(repository.revision or 'main')[:8]}"


def _weighted(config: Config) -> str:
    """Returns the sum of reward functions: 1 × task + 0.2 × my_rewards:length_penalty."""
    functions, weights = config.rewards.functions, config.rewards.weights
    terms = zip(weights or (1,) * len(functions), functions, strict=True)
    return " + ".join(f"{weight:g} × {function}" for weight, function in terms)


def _short(number: int) -> str:
    """Returns a count for people: 12 · 3.1 k · 1.6 M · 7.6 B."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
