"""`tlt train`: a new run, or a continued one. Decides which configuration that is; the run itself is
tlt.training's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from tlt.cli.engine import show_busy
from tlt.cli.options import WithOverrides, Written
from tlt.clock import Moment
from tlt.config.load import load_config
from tlt.config.schema import Config, RunSection
from tlt.io.hub import Repository
from tlt.io.streams import forgiving_output
from tlt.launch.place import Place, check_num_ranks, find_place
from tlt.launch.signals import say
from tlt.saved.inputs import find_change
from tlt.saved.run_folder import can_go_on, forget_journal, refuse_begun
from tlt.types import UserError


class Train(WithOverrides):
    """Train a policy with RL.

    A new run: tlt train CONFIG [--section.key VALUE ...]

    A continued run: tlt train --resume DIR [--run.num_steps N]

    Either of the two, for schedulers: tlt train CONFIG --resume auto

    Every key of the configuration is listed below; `none` unsets an optional one.
    """

    config: Annotated[Path | None, Written("[CONFIG]", is_alone=True)] = None
    """TOML configuration, or the name of a recipe such as countdown; may be left out with --resume."""
    resume: Annotated[Literal["auto"] | Path | None, Written("DIR|auto")] = None
    """Continues the run in this folder with its own configuration; only [tracking] and the length and
    machine can change. A checkpoint in it, DIR/checkpoints/step-N, goes back to that one: newer ones get
    another name. `auto` continues the run in run.out_dir if one has begun there, else begins it."""
    replay: Annotated[Path | None, Written("RUN")] = None
    """Drafts from the responses of another run with the same seed, which has kept them
    (run.keep_responses): such as one with another learning rate, or this one before a change of code. No
    token is another. The same as --rollout.replay."""


def run(options: Train) -> int:
    """Checks everything that can be checked, starts the ranks, and returns the exit code of the run. Where
    this process is a rank that somebody else has started, rank 0 does that for all."""
    with forgiving_output():
        return _run(options, Moment.now())


def _run(options: Train, began: Moment) -> int:
    place = find_place()
    with show_busy():
        from tlt.saved.run_identity import read_begun
        from tlt.training.start import go_back, launch_ranks, prepare, run_started_rank

    overrides = (
        options.overrides
        if options.replay is None
        else (*options.overrides, f"--rollout.replay={options.replay}")
    )

    def resolve(goes_on: bool) -> Config:
        config = resolve_config(options.config, overrides, options.resume, place, goes_on)
        chosen = options.resume if is_checkpoint(options.resume) and not goes_on else None
        is_new = options.resume is None and not goes_on
        config = prepare(config, None if is_new else read_begun(config.run.out_dir, chosen))
        if chosen is not None:
            go_back(chosen)
        if is_new and forget_journal(config.run.out_dir):
            say(
                f"{config.run.out_dir}: the journal of an earlier attempt is removed; --resume would have "
                "gone on with it"
            )
        return config

    if place is not None:
        return run_started_rank(place, resolve, began, patience_of(options, overrides))
    return launch_ranks(resolve(False), began)


def patience_of(options: Train, overrides: Sequence[str]) -> float:
    """Returns the seconds for which a rank waits for the others to come: run.timeout_seconds, where this
    machine knows it. One without the configuration, which rank 0 alone has to have, waits by default; rank
    0 says what is wrong with it."""
    resumed = options.resume.parents[1] if is_checkpoint(options.resume) else Path(options.resume or "")
    try:
        return load_config(options.config or resumed / "config.json", overrides).run.timeout_seconds
    except UserError:
        return RunSection().timeout_seconds


def resolve_config(
    path: Path | None,
    overrides: Sequence[str],
    resume: Path | str | None,
    place: Place | None = None,
    goes_on: bool = False,
) -> Config:
    """Returns the configuration of a new run, or with `resume` of the run in that folder, refusing to mix the
    two up.

    place: this process's where somebody else has started the ranks; that says how many they are.
    goes_on: whether the same command has been here before, so that what it has begun is no mistake.
    """
    if isinstance(resume, Path):
        return continued_config(
            path, overrides, resume.parents[1] if is_checkpoint(resume) else resume, place
        )
    if path is None:
        how = "write tlt train CONFIG.toml, or --resume DIR to continue a run"
        raise UserError(f"train: no configuration given; {how}")
    config = load_config(path, overrides)
    if (goes_on or resume == "auto") and can_go_on(config.run.out_dir):
        return continued_config(path, overrides, config.run.out_dir, place)
    refuse_begun(config.run.out_dir)
    return _with_num_ranks(config, place, is_asked="num_ranks" in config.run.model_fields_set)


def is_checkpoint(resume: Path | str | None) -> TypeGuard[Path]:
    """Returns whether a checkpoint is named, not the folder of a run."""
    return (
        isinstance(resume, Path) and resume.parent.name == "checkpoints" and resume.name.startswith("step-")
    )


def continued_config(
    path: Path | None, overrides: Sequence[str], resume: Path, place: Place | None = None
) -> Config:
    """Returns the configuration of the run in this folder, with what may change of it."""
    written = resume / "config.json"
    if not written.is_file():
        raise UserError(
            f"--resume: {resume} holds no run (no config.json); give the folder that the run wrote"
        )
    config = load_config(path or written, [*overrides, "--run.out_dir", str(resume)])
    is_asked = path is not None and "num_ranks" in config.run.model_fields_set
    is_asked |= any(word.partition("=")[0] == "--run.num_ranks" for word in overrides)
    config = _with_num_ranks(config, place, is_asked)
    before = load_config(written)
    config = _keep_commits(before, config)
    _refuse_changes(before, config, resume)
    return config


def _with_num_ranks(config: Config, place: Place | None, is_asked: bool) -> Config:
    """Returns the configuration with the number of ranks that were started. is_asked: whether the user has
    given one."""
    if place is None:
        return config
    if is_asked and config.run.num_ranks is not None:
        check_num_ranks(place, config.run.num_ranks)
    values = config.model_dump()
    values["run"]["num_ranks"] = place.world_size
    return Config.model_validate(values)


def _keep_commits(before: Config, now: Config) -> Config:
    """Returns the configuration with the commits that the run has noted, where it names the same
    repositories of the hub."""
    values = now.model_dump()
    models = ("model", "path"), ("model", "adapter"), ("drafter", "path")
    for section, key in (*models, ("task", "data"), ("evaluation", "data")):
        noted, named = getattr(getattr(before, section), key), values[section][key]
        old, new = (Repository.parse(name) if name is not None else None for name in (noted, named))
        if old is not None and new is not None and old.name == new.name and new.revision is None:
            values[section][key] = noted
    if values["model"]["path"] == before.model.path and values["model"]["revision"] is None:
        values["model"]["revision"] = before.model.revision
    return Config.model_validate(values)


def _refuse_changes(before: Config, now: Config, folder: Path) -> None:
    if now.optimizer.depends_on_num_steps and now.run.num_steps != before.run.num_steps:
        raise UserError(
            f"--resume: run.num_steps is {now.run.num_steps} but the run in {folder} has "
            f"{before.run.num_steps}, by which"
            f" its learning rate ends (optimizer.schedule is {now.optimizer.schedule}): remove the change, "
            "or start a new run"
        )
    if (change := find_change(before.model_dump(mode="json"), now)) is not None:
        key, old, new = change
        raise UserError(
            f"--resume: {key} is {new!r} but the run in {folder} has {old!r};"
            " a resumed run keeps its configuration: remove the change, or start a new run"
        )
