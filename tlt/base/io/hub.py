"""Models and datasets of the Hugging Face hub, at one commit, from the cache or by download.

    "OWNER/NAME"[@REVISION] ── resolve_model ──▶ …/snapshots/COMMIT/  config.json · tokenizer · safetensors

A local folder of that name goes first.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlt.base.io.packaged import how_to_package
from tlt.base.io.text import one_line
from tlt.base.types import UserError

COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "*processor_config.json",
)

_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILES = (
    "config.json",
    *_WEIGHTS,
    *_ADAPTER,
    *COMPANIONS,
    "additional_chat_templates/*",
    "token_counts.json",
)
_DATASET_FILES = ("README.md", ".gitattributes")  # enough to learn the commit; `datasets` downloads the rest

_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_REPOSITORY = re.compile(rf"(?P<name>{_NAME}/{_NAME})(?:@(?P<revision>[\w./+-]+))?", re.ASCII)
_FILES = (".csv", ".json", ".jsonl", ".parquet", ".toml", ".txt")
"""File endings, which no repository's name has."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class Repository:
    name: str
    revision: str | None = None
    """None: the main branch."""

    @staticmethod
    def parse(text: str | Path) -> Repository | None:
        """`owner/name[@revision]`; None: the text is a path."""
        found = _REPOSITORY.fullmatch(str(text))
        if found is None or found["name"].endswith(_FILES):
            return None
        return Repository(found["name"], found["revision"])

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, folder: Path) -> Repository:
        return Repository(self.name, folder.name)


def resolve_model(name: str | Path) -> Path:
    """Returns `name` if it is a path, which need not exist, else the hub's snapshot. Raises UserError where
    the hub refuses, and for a repository without safetensors."""
    repository = _find(name)
    if repository is None:
        return Path(name)
    folder = _snapshot(repository, "model", _MODEL_FILES)
    if not any(folder.glob("*.safetensors")):
        files = ", ".join(sorted(path.name for path in folder.iterdir()))[:120]
        what = f"no safetensors are in its files {files}; only safetensors are read"
        remedy = "give another repository or revision, or convert the weights once with transformers"
        raise UserError(f"{repository}: {what}: {remedy}")
    return folder


def resolve_description(name: str | Path, with_tokenizer: bool = False) -> Path:
    """As `resolve_model`, without weights."""
    repository, files = _find(name), ["config.json"]
    if with_tokenizer:
        files += [*COMPANIONS, "additional_chat_templates/*"]
    return Path(name) if repository is None else _snapshot(repository, "model", files)


def pin_model(name: Path) -> Repository | None:
    """The repository at its present commit; None: `name` is a path."""
    folder, repository = resolve_model(name), _find(name)
    return None if repository is None else repository.at(folder)


def pin_dataset(name: str | Path) -> Repository | None:
    repository = _find(name)
    if repository is None or repository.is_pinned:
        return repository
    return repository.at(_snapshot(repository, "dataset", _DATASET_FILES))


def _find(name: str | Path) -> Repository | None:
    return None if Path(name).exists() else Repository.parse(name)


def _snapshot(repository: Repository, kind: Kind, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled

    def download() -> str:
        has_bars = sys.stderr.isatty() or are_progress_bars_disabled()
        found: str = snapshot_download(
            repository.name,
            repo_type=kind,
            revision=repository.revision,
            allow_patterns=list(patterns),
            tqdm_class=None if has_bars else _progress_lines(str(repository)),
            library_name="tlt",
        )
        return found

    with _refusals(repository, kind), quiet():
        return Path(_interruptible(download))


def _interruptible(download: Callable[[], str]) -> str:
    """On Ctrl-C huggingface_hub would finish its downloads first: close its connections."""
    from huggingface_hub.utils import close_session

    pool = ThreadPoolExecutor(1, thread_name_prefix="hub")
    result = pool.submit(download)
    try:
        return result.result()
    except KeyboardInterrupt:
        with contextlib.suppress(ImportError):  # the hub's newer storage has connections of its own
            from huggingface_hub.utils._xet import abort_xet_session

            abort_xet_session()
        while not wait([result], timeout=0.2).done:
            close_session()
        raise
    finally:
        pool.shutdown(wait=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides huggingface_hub's warnings of retries."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _progress_lines(name: str, seconds: float = 10.0) -> type[Any]:
    from huggingface_hub.utils import tqdm

    class Lines(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            is_repeat = str(kwargs.get("desc")).startswith("Reconstructing")
            self.shows = kwargs.get("unit") == "B" and not is_repeat
            self.said = -math.inf
            # tqdm has no types
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.shows and (now := time.monotonic()) - self.said >= seconds:
                is_first, self.said = self.said < 0, now
                sizes = " of ".join(tqdm.format_sizeof(size, "B") for size in (self.n, self.total or self.n))
                sys.stderr.write(f"tlt: downloading {name}{'' if is_first else f': {sizes}'}\n")
                sys.stderr.flush()

    return Lines


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _refusals(repository: Repository, kind: Kind) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError as HttpError
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError as error:
        what = f"is no name of a repository ({one_line(error, 120)})"
        raise UserError(f"{repository}: {what}; correct it") from None
    except (OSError, HttpError) as error:  # HttpError is an OSError today; it need not stay one
        raise UserError(f"{repository}: {_describe(error, repository, kind)}") from None
    except Exception as error:  # the HTTP client's own, when a connection breaks off
        if not type(error).__module__.startswith("http"):
            raise
        raise UserError(f"{repository}: {_unreachable(error, repository, kind)}") from None


def _describe(error: Exception, repository: Repository, kind: Kind) -> str:
    from huggingface_hub import constants, errors

    # The cause of a LocalEntryNotFoundError says why the hub was not asked, or did not answer.
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.is_offline_mode():
            place = f"{_not_here(repository)}, and not (or not whole) in the cache {constants.HF_HUB_CACHE}"
            return f"{place} while HF_HUB_OFFLINE is set; unset it, or {_another_way(repository, kind)}"
        if not isinstance(error.__cause__, errors.HfHubHTTPError):
            return _unreachable(error.__cause__ or error, repository, kind)
        error = error.__cause__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    match error:
        case errors.GatedRepoError():
            page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository.name}"
            return f"is gated; ask for access at {page}, then log in with hf auth login, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            what = f"there is no revision {repository.revision!r} of this {kind}"
            return f"{what}; give a branch, a tag or a commit"
        case errors.RepositoryNotFoundError():
            what = f"{_not_here(repository)}, and {constants.ENDPOINT} has no such {kind}, or a private one"
            return f"{what}; correct the name, or log in with hf auth login, or set HF_TOKEN"
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses it ({status}); log in with hf auth login, or correct HF_TOKEN"
    if status is not None:
        return f"{constants.ENDPOINT} answers {status}; try again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room, or set HF_HUB_CACHE to another disk: files that are whole stay"
        return f"no room in {constants.HF_HUB_CACHE}; {remedy}"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.filename} cannot be written ({error.strerror}); set HF_HUB_CACHE to a folder that can"
    return _unreachable(error, repository, kind)


def _not_here(repository: Repository) -> str:
    folder, _, name = str(repository).partition("/")
    if not Path(folder).is_dir():
        return "is no folder or file here"
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f" (did you mean {folder}/{near[0]}?)" if near else ""
    return f"is not in the folder {folder}, which is here{meant}"


def _unreachable(error: BaseException, repository: Repository, kind: Kind) -> str:
    from huggingface_hub import constants

    what = f"{_not_here(repository)}, and cannot be downloaded from {constants.ENDPOINT}"
    remedy = f"check the network and try again, or {_another_way(repository, kind)}"
    return f"{what} ({one_line(error, 120)}); {remedy}"


def _another_way(repository: Repository, kind: Kind) -> str:
    if kind == "model" and (command := how_to_package(repository.name)) is not None:
        return f"make this model without the hub: {command}"
    revision = f" --revision {repository.revision}" if repository.revision is not None else ""
    of_kind = " --repo-type dataset" if kind == "dataset" else ""
    return f"bring it into the cache with hf download {repository.name}{revision}{of_kind}"
