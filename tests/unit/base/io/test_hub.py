"""Names of the hub: a folder goes first, what is whole in the cache is not asked for again, and every
refusal is one line. The hub is a stand-in on loopback."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session, enable_progress_bars

from tests.standin import Hub, serve_hub
from tlt.base.io.hub import Repository, pin_model, resolve_description, resolve_model
from tlt.base.types import UserError

FILES = {
    "config.json": b'{"vocab_size": 3}',
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"weights",
    "model.fp16.safetensors": b"weights",
    "onnx/model.onnx": b"weights",
    "README.md": b"# model",
}
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tools.jinja", "model.safetensors"}


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does to a new process."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    enable_progress_bars()  # transformers, told so by another test, switches off those of the hub, too
    with serve_hub() as hub:
        point_at(monkeypatch, hub.url)
        yield hub
        close_session()


def refusal(name: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def half_written(folder: Path) -> list[Path]:
    return [*folder.rglob("*.incomplete"), *folder.rglob("*.tmp")]


@pytest.mark.parametrize("name", ["a/b", "Qwen/Qwen2.5-0.5B-Instruct", "a_b/c.d@v1.0", "a/b@refs/pr/3"])
def test_a_name_of_the_hub_is_owner_and_name(name: str) -> None:
    found = Repository.parse(name)
    assert found is not None
    assert str(found) == name


@pytest.mark.parametrize(
    "name",
    [
        "base",
        "./a/b",
        "/a/b",
        "~/a",
        "a/b/c",
        "../b",
        "a/b/",
        "a/.b",
        "a b/c",
        "runs/x.",
        "a/b@",
        "data/rows.jsonl",
    ],
)
def test_what_looks_like_a_path_is_one(name: str) -> None:
    assert Repository.parse(name) is None
    assert resolve_model(name) == Path(name)


def test_a_folder_goes_before_a_repository_of_the_same_name(hub: Hub) -> None:
    hub.add("me/model", FILES)
    Path("me/model").mkdir(parents=True)
    assert resolve_model("me/model") == Path("me/model")
    assert hub.requests == []


def test_only_the_files_of_a_model_are_downloaded_and_the_second_time_none(
    hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    repo = hub.add("me/model", FILES, revisions=("main", "v1"))
    folder = resolve_model("me/model")
    assert folder.name == repo.commit
    assert set(hub.downloads) == NEEDED
    assert {path.name for path in folder.rglob("*") if path.is_file()} == NEEDED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert capfd.readouterr().err == "tlt: downloading me/model\n"
    hub.requests.clear()
    assert resolve_model("me/model") == resolve_model("me/model@v1") == folder
    assert hub.downloads == []
    assert capfd.readouterr().err == ""


def test_a_commit_that_is_in_the_cache_needs_no_network_and_stays_when_the_branch_moves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hub.add("me/model", FILES)
    pinned = pin_model(Path("me/model"))
    assert pinned == Repository("me/model", before.commit)
    hub.add("me/model", {**FILES, "config.json": b"{}"})
    assert resolve_model("me/model").name != before.commit
    hub.requests.clear()
    assert resolve_model(str(pinned)).name == before.commit
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(str(pinned)).name == before.commit


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "me/none": (
        {},
        "is no folder or file here, and URL has no such model, or a private one; correct the name, or log in",
    ),
    "me/gated": (
        {"refusal": (403, "GatedRepo")},
        "is gated; ask for access at URL/me/gated, then log in with hf auth login",
    ),
    "me/closed": (
        {"refusal": (401, "")},
        "URL refuses it (401); log in with hf auth login, or correct HF_TOKEN",
    ),
    "me/banned": (
        {"refusal": (403, "")},
        "URL refuses it (403); log in with hf auth login, or correct HF_TOKEN",
    ),
    "me/broken": ({"refusal": (500, "")}, "URL answers 500; try again later"),
    "me/model@v9": ({}, "there is no revision 'v9' of this model; give a branch, a tag or a commit"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses_is_one_line(name: str, hub: Hub) -> None:
    options, expected = REFUSALS[name]
    hub.add(name.partition("@")[0] if "none" not in name else "me/other", FILES, **options)
    assert refusal(name).startswith(f"{name}: {expected.replace('URL', hub.url)}")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sm/bse", "is not in the folder sm, which is here (did you mean sm/base?), and "),
        ("sm/base@v1", "is not in the folder sm, which is here (did you mean sm/base?), and "),
        ("empty/base", "is not in the folder empty, which is here, and "),
        ("ms/base", "is no folder or file here, and "),
    ],
)
@pytest.mark.parametrize("answers", ["hub", "nobody", "offline"])
def test_a_typo_within_a_folder_that_is_here_is_told_the_nearest_name_in_it(
    name: str, told: str, answers: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("sm/base", "sm/drafter", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file").touch()
    if answers == "nobody":
        point_at(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", answers == "offline")
    assert refusal(name).startswith(f"{name}: {told}")


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    hub.add("me/pickled", {name: FILES[name] for name in ("config.json", "pytorch_model.bin")})
    assert refusal("me/pickled").startswith(
        "me/pickled: no safetensors are in its files config.json; only safetensors are read"
    )
    assert "pytorch_model.bin" not in hub.downloads


def test_offline_a_model_comes_from_the_cache_or_says_how_it_gets_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/model", FILES)
    folder = resolve_model("me/model")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("me/model") == folder
    message = refusal("me/other@v1")
    assert (
        f"and not (or not whole) in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is set" in message
    )
    assert message.endswith("bring it into the cache with hf download me/other --revision v1")
    assert hub.requests == []


def test_where_no_hub_answers_the_line_has_the_download_command(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/model", FILES)
    folder = resolve_model("me/model")
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve_model("me/model") == folder
    message = refusal("me/other")
    assert message.startswith(
        "me/other: is no folder or file here, and cannot be downloaded from http://127.0.0.1:9 (Connect"
    )
    assert message.endswith("bring it into the cache with hf download me/other")


def test_a_download_that_fails_leaves_nothing_half_written_and_the_next_fetches_only_what_is_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repo = hub.add("me/model", {**FILES, "model.safetensors": os.urandom(100_000)})
    hub.cuts["model.safetensors"] = 99
    message = refusal("me/model")
    assert "cannot be downloaded" in message
    assert "try again" in message
    assert half_written(Path(constants.HF_HUB_CACHE)) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not (or not whole) in the cache" in refusal("me/model")
    assert "not (or not whole) in the cache" in refusal(f"me/model@{repo.commit}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.cuts.clear()
    kept = {path.name for path in Path(constants.HF_HUB_CACHE).rglob("snapshots/*/*") if path.is_file()}
    hub.requests.clear()
    folder = resolve_model("me/model")
    assert (folder / "model.safetensors").stat().st_size == 100_000
    assert "model.safetensors" in hub.downloads
    assert not kept & set(hub.downloads)


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.ENOSPC, "me/model: no room in PLACE; make room, or set HF_HUB_CACHE to another disk"),
        (
            errno.EACCES,
            "me/model: PLACE/x cannot be written (Permission denied); set HF_HUB_CACHE to a folder that can",
        ),
    ],
)
def test_a_full_or_forbidden_disk_is_one_line(
    number: int, part: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/model", FILES)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), f"{constants.HF_HUB_CACHE}/x")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    assert refusal("me/model").startswith(part.replace("PLACE", constants.HF_HUB_CACHE))


def test_a_description_is_the_configuration_and_if_asked_the_tokenizer_but_never_weights(hub: Hub) -> None:
    hub.add("owner/model", FILES)
    described = resolve_description("owner/model")
    assert {path.name for path in described.rglob("*") if path.is_file()} == {"config.json"}
    with_tokenizer = resolve_description("owner/model", with_tokenizer=True)
    assert {path.name for path in with_tokenizer.rglob("*") if path.is_file()} == NEEDED - {
        "model.safetensors"
    }
