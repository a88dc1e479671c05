"""Uploads folders to the Hugging Face hub as models with their cards, one commit each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.base.io.files import matches
from tlt.base.io.hub import Repository, quiet
from tlt.base.io.text import one_line
from tlt.base.types import UserError

CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    name: str
    files: Mapping[str, Path]
    """Path in the repository → local path."""
    card: str
    left_out: Sequence[str] = ()


def files_of(folder: Path, own: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Returns the files that match `own` by relative path, and the names of all other entries: links may lead
    anywhere, and the card replaces README.md."""
    files: dict[str, Path] = {}
    others = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_linked = any((folder / part).is_symlink() for part in (name, *name.parents) if part != Path())
        if not path.is_dir() or is_linked:
            is_own = matches(name.parts[0], own) and path.is_file() and not is_linked
            if is_own:
                files[str(name)] = path
            elif str(name) != CARD:
                others.append(str(name))
    return files, others


def own_name(name: str) -> str:
    """The owner is the token's account."""
    with _refusals(name):
        return f"{_api().whoami()['name']}/{name}"


def upload(upload: Upload, private: bool) -> str:
    """Returns the repository's address. private: ignored for an existing repository."""
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(name, str(path)) for name, path in upload.files.items()]
    operations.append(CommitOperationAdd(CARD, upload.card.encode()))
    with _refusals(upload.name), quiet():
        api = _api()
        address = api.create_repo(upload.name, private=private or None, exist_ok=True)
        api.create_commit(upload.name, operations, commit_message="Upload with tlt hub push")
    return str(address)


def licence_of(base: str | Path, asks_hub: bool) -> str | None:
    """base: a folder, or OWNER/NAME on the hub."""
    card = Path(base) / CARD
    if card.is_file():
        return _licence(read_card(card))
    if not asks_hub or Path(base).exists() or (repository := Repository.parse(base)) is None:
        return None
    with _refusals(repository.name):
        found = _api().model_info(repository.name, revision=repository.revision).card_data
    return None if found is None else _licence(found)


def _licence(card: Any) -> str | None:
    found = card.get("license")
    return found if isinstance(found, str) else None


def read_card(path: Path) -> Any:
    """Returns the card's YAML head, or empty data."""
    from huggingface_hub import ModelCard

    return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data


def _api() -> Any:
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        what = "no token of the Hugging Face hub is here"
        raise UserError(
            f"tlt hub push: {what}; log in with hf auth login, or set HF_TOKEN to one that writes"
        )
    return HfApi(library_name="tlt")


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except HFValidationError as error:
        what = f"is no name of a repository ({one_line(error, 120)})"
        raise UserError(f"--repo: {name} {what}; give OWNER/NAME") from None
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            remedy = "give a token that may write there, or another --repo"
            raise UserError(f"{name}: {constants.ENDPOINT} refuses it ({status}); {remedy}") from None
        raise UserError(
            f"{name}: {constants.ENDPOINT} answers {status or one_line(error, 120)}; try again"
        ) from None
    except Exception as error:  # the HTTP client's own, when the hub cannot be reached
        if not isinstance(error, OSError) and not type(error).__module__.startswith("http"):
            raise
        what = f"cannot be uploaded to {constants.ENDPOINT} ({one_line(error, 120)})"
        raise UserError(f"{name}: {what}; check the network and try again") from None
