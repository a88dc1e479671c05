"""`tlt train`; apps/run/start.py starts the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from tlt.apps.cli.engine import show_busy
from tlt.apps.cli.options import WithOverrides, Written
from tlt.apps.cli.own import print_choices
from tlt.base.clock import Moment
from tlt.base.config.load import is_own, load_config, read_overrides
from tlt.base.config.schema import DEFAULT_OUT_DIR, Config, RunSection
from tlt.base.io.hub import Repository
from tlt.base.io.streams import forgiving_output
from tlt.base.types import UserError
from tlt.training.launch.place import Place, check_num_ranks, find_place
from tlt.training.launch.signals import say
from tlt.training.saved.inputs import find_change
from tlt.training.saved.run_folder import can_go_on, forget_journal, refuse_begun


class Train(WithOverrides):
    """Train a policy with RL.

    A new run: tlt train CONFIG [--section.key VALUE ...]

    The same without a configuration: tlt train --model.path MODEL --task.data DATA [--section.key VALUE ...],
    or --task.name TASK; every other key is chosen by model, data and machine, and printed.

    A continued run: tlt train --resume DIR [--run.num_steps N]

    Either of the two, for schedulers: tlt train CONFIG --resume auto

    Every key of the configuration is listed below; `none` unsets an optional one.
    """

    config: Annotated[Path | None, Written("[CONFIG]", is_alone=True)] = None
    """TOML configuration, or the name of a recipe such as countdown; may be left out with --resume, and with
    --model.path and --task.data or --task.name."""
    resume: Annotated[Literal["auto"] | Path | None, Written("DIR|auto")] = None
    """Continues the run in this folder with its own configuration; only [tracking], the run's length and its
    machine may change. With a checkpoint, DIR/checkpoints/step-N, the run goes back to that one, and newer
    checkpoints are renamed. auto: continues the run in run.out_dir if there is one, else begins it."""


def run(options: Train) -> int:
    with forgiving_output():
        return _run(options, Moment.now())


def _run(options: Train, began: Moment) -> int:
    place, overrides = find_place(), options.overrides
    if place is None:
        _refuse_mistakes(options, overrides)
    with show_busy():
        from tlt.apps.run.start import go_back, launch_ranks, prepare, run_started_rank
        from tlt.training.saved.run_identity import read_begun

    def resolve(goes_on: bool) -> Config:
        config = resolve_config(options.config, overrides, options.resume, place, goes_on)
        back_to = options.resume if is_checkpoint(options.resume) and not goes_on else None
        is_new = options.resume is None and not goes_on
        begun = None if is_new else read_begun(config.run.out_dir, back_to)
        continues = not is_new and (isinstance(options.resume, Path) or can_go_on(config.run.out_dir))
        config = prepare(config, begun, goes_on=continues)
        if back_to is not None:
            go_back(back_to)
        if is_new and forget_journal(config.run.out_dir):
            what = "the journal of an earlier attempt is removed; --resume would have gone on with it"
            say(f"{config.run.out_dir}: {what}")
        return config

    if place is not None:
        return run_started_rank(place, resolve, began, patience_of(options, overrides))
    return launch_ranks(resolve(False), began)


def _refuse_mistakes(options: Train, overrides: Sequence[str]) -> None:
    """Runs before torch is imported."""
    if options.config is not None or isinstance(options.resume, Path):
        resolve_config(options.config, overrides, options.resume)
    elif options.resume is None:
        refuse_begun(_out_dir(overrides))
        _refuse_unconfigured(overrides)


def _refuse_unconfigured(overrides: Sequence[str]) -> None:
    if not is_own(overrides):
        needed = "--model.path and --task.data or --task.name"
        remedy = f"write tlt train CONFIG.toml, --resume DIR to continue a run, or {needed}"
        raise UserError(f"train: no configuration given; {remedy}")


def patience_of(options: Train, overrides: Sequence[str]) -> float:
    """Seconds that a rank waits for the others at the start. Without the configuration, which only rank 0
    needs, run.timeout_seconds has its default."""
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
    """Raises UserError for a new run in another run's folder.

    place: None: no launcher.
    goes_on: whether this command began the run, in an earlier attempt.
    """
    if isinstance(resume, Path):
        folder = resume.parents[1] if is_checkpoint(resume) else resume
        return continued_config(path, overrides, folder, place)
    out_dir = _out_dir(overrides) if path is None else load_config(path, overrides).run.out_dir
    if (goes_on or resume == "auto") and can_go_on(out_dir):
        return continued_config(path, overrides, out_dir, place)
    refuse_begun(out_dir)
    config = _chosen_config(overrides) if path is None else load_config(path, overrides)
    return _with_num_ranks(config, place, is_asked="num_ranks" in config.run.model_fields_set)


def _out_dir(overrides: Sequence[str]) -> Path:
    given = {override.keys: override.value for override in read_overrides(overrides)}
    return Path(given.get(("run", "out_dir")) or DEFAULT_OUT_DIR).absolute()


def _chosen_config(overrides: Sequence[str]) -> Config:
    from tlt.apps.run.own import choose_own

    _refuse_unconfigured(overrides)
    own = choose_own(overrides)
    print_choices(own.choices.chosen)
    return own.config


def is_checkpoint(resume: Path | str | None) -> TypeGuard[Path]:
    return isinstance(resume, Path) and resume.match("checkpoints/step-*")


def continued_config(
    path: Path | None, overrides: Sequence[str], resume: Path, place: Place | None = None
) -> Config:
    """Raises UserError for an override of a key that must not change."""
    written = resume / "config.json"
    if not written.is_file():
        remedy = "give the folder that the run wrote"
        raise UserError(f"--resume: {resume} holds no run (no config.json); {remedy}")
    config = load_config(path or written, [*overrides, "--run.out_dir", str(resume)])
    is_asked = path is not None and "num_ranks" in config.run.model_fields_set
    is_asked |= any(word.partition("=")[0] == "--run.num_ranks" for word in overrides)
    config = _with_num_ranks(config, place, is_asked)
    before = load_config(written)
    config = _keep_resolved(before, config)
    _refuse_changes(before, config, resume)
    return config


def _with_num_ranks(config: Config, place: Place | None, is_asked: bool) -> Config:
    if place is None:
        return config
    if is_asked and config.run.num_ranks != "auto":
        check_num_ranks(place, config.run.num_ranks)
    values = config.model_dump()
    values["run"]["num_ranks"] = place.world_size
    return Config.model_validate(values)


def _keep_resolved(before: Config, now: Config) -> Config:
    values = now.model_dump()
    if now.run.dtype == "auto":
        values["run"]["dtype"] = before.run.dtype
    models = ("model", "path"), ("model", "adapter"), ("drafter", "path")
    for section, key in (*models, ("task", "data"), ("evaluation", "data")):
        noted, named = getattr(getattr(before, section), key), values[section][key]
        old, new = (Repository.parse(name) if name is not None else None for name in (noted, named))
        if old is not None and new is not None and old.name == new.name and new.revision is None:
            values[section][key] = noted
    return Config.model_validate(values)


def _refuse_changes(before: Config, now: Config, folder: Path) -> None:
    if now.optimizer.depends_on_num_steps and now.run.num_steps != before.run.num_steps:
        what = f"run.num_steps is {now.run.num_steps} but the run in {folder} has {before.run.num_steps}"
        why = f"by which its learning rate ends (optimizer.schedule is {now.optimizer.schedule})"
        raise UserError(f"--resume: {what}, {why}: remove the change, or start a new run")
    if (change := find_change(before.model_dump(mode="json"), now)) is not None:
        key, old, new = change
        what = f"{key} is {new!r} but the run in {folder} has {old!r}"
        why = "a resumed run keeps its configuration"
        raise UserError(f"--resume: {what}; {why}: remove the change, or start a new run")
