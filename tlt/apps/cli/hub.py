"""`tlt hub push`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tlt.apps.cli.options import Options, Switch, Written
from tlt.apps.cli.summary import Summary, size
from tlt.base.io.files import Record
from tlt.base.types import UserError

if TYPE_CHECKING:
    from tlt.apps.run.model_card import FinishedRun
    from tlt.base.io.hub_upload import Upload


class HubPush(Options):
    """Upload a run's policy and drafter to the Hugging Face hub, each with a model card.

    The policy goes to OWNER/NAME, the drafter to OWNER/NAME-drafter. A card names the base model, the data,
    the algorithm, the held-out scores before and after, and the commands that use both in TLT and vLLM.
    """

    run: Annotated[Path, Written("RUN", is_alone=True)]
    """Folder of a finished run."""
    repo: Annotated[str | None, Written("OWNER/NAME")] = None
    """Repository of the policy; default: your account, and the name of the run's folder."""
    what: Literal["policy", "drafter"] | None = None
    """Upload this alone; default: both, or the policy where the run has no drafter."""
    private: Switch = False
    """Makes new repositories private."""
    licence: str | None = None
    """Licence of what is uploaded, such as apache-2.0; default: the base model's, if its card names one."""
    dry_run: Switch = False
    """Lists the files and prints the cards; uploads nothing and needs no network."""


def run(options: HubPush) -> Record:
    from tlt.apps.run.model_card import FinishedRun
    from tlt.base.io.hub import Repository
    from tlt.base.io.hub_upload import licence_of, own_name, upload

    finished = FinishedRun.read(options.run)
    if options.what == "drafter" and not finished.has_drafter:
        raise UserError(f"{options.run}: the run has no drafter; leave out --what drafter")
    if options.repo is not None and ((named := Repository.parse(options.repo)) is None or named.revision):
        raise UserError(f"--repo: is {options.repo}; give OWNER/NAME")
    folder = options.run.resolve().name
    repo = options.repo or (f"OWNER/{folder}" if options.dry_run else own_name(folder))
    licence = options.licence or licence_of(finished.base, asks_hub=not options.dry_run)
    uploads = _uploads(finished, repo, licence, options.what)
    for what, one in uploads.items():
        if one.left_out:
            names = ", ".join(map(repr, one.left_out[:5])) + (", …" if len(one.left_out) > 5 else "")
            which = f"{names} in {options.run / what}"
            why = "files of a run's alone are uploaded, and no links"
            print(f"tlt hub push: {len(one.left_out)} left out, {which}: {why}", file=sys.stderr)
    if options.dry_run:
        for one in uploads.values():
            print(f"{one.name}:")
            for name, path in one.files.items():
                print(f"  {name}  {size(path.stat().st_size)}")
            print(f"  README.md:\n\n{one.card}")
        return {"dry_run": True, **{what: one.name for what, one in uploads.items()}}
    return {what: upload(one, options.private) for what, one in uploads.items()}


def _uploads(run: FinishedRun, repo: str, licence: str | None, what: str | None) -> dict[str, Upload]:
    from tlt.apps.run.model_card import drafter_card, policy_card
    from tlt.base.io.hub_upload import Upload, files_of
    from tlt.models.hf.files import CHECKPOINT_FILES, DRAFTER_FILES

    drafter = f"{repo}-drafter"
    found = {}
    if what != "drafter":
        card = policy_card(run, repo, drafter if run.has_drafter and what is None else None, licence)
        files, others = files_of(run.folder / "policy", CHECKPOINT_FILES)
        found["policy"] = Upload(repo, files, card, others)
    if what != "policy" and run.has_drafter:
        card = drafter_card(run, repo, drafter, licence)
        files, others = files_of(run.folder / "drafter", DRAFTER_FILES)
        found["drafter"] = Upload(drafter, files, card, others)
    return found


def summarize(record: Record) -> Summary:
    places = {what: place for what, place in record.items() if what != "dry_run"}
    return Summary("a dry run: nothing was uploaded" if "dry_run" in record else "uploaded", places)
