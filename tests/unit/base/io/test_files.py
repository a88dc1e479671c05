"""Files appear whole or not at all, never in place of something that is no file, and hold strict JSON."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tlt.base.io import files
from tlt.base.io.files import (
    check_output_file,
    dumps,
    get_id,
    read_appended,
    replace_folder,
    write_atomically,
    write_jsonl,
)
from tlt.base.types import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ── a file ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_output_appears_whole_or_not_at_all(here: Path) -> None:
    out = here / "out.jsonl"
    out.write_text('{"old": 1}\n')

    def records() -> Iterator[dict[str, Any]]:
        yield {"new": 1}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_jsonl(out, records())
    assert out.read_text() == '{"old": 1}\n'
    assert names(here) == ["out.jsonl"]


def test_a_file_has_the_permissions_that_the_umask_gives(here: Path) -> None:
    before = os.umask(0o027)
    try:
        write_jsonl(here / "out.jsonl", [{}])
    finally:
        os.umask(before)
    assert (here / "out.jsonl").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_one_line_and_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError) as caught:
        write_jsonl(Path("out.jsonl"), [{}])
    told = "cannot be written (No space left on device); make room or give another path"
    assert str(caught.value) == f"out.jsonl: {told}"
    assert names(here) == []


def test_a_symlink_is_followed_and_stays(here: Path) -> None:
    (here / "data").mkdir()
    (here / "out.jsonl").symlink_to("data/real.jsonl")
    for _ in range(2):  # first to a file that is not there yet
        check_output_file(Path("out.jsonl"), "--out")
        write_jsonl(here / "out.jsonl", [{"a": 1}])
        assert (here / "out.jsonl").is_symlink()
        assert (here / "data" / "real.jsonl").read_text() == '{"a": 1}\n'
    assert names(here / "data") == ["real.jsonl"]


def test_what_is_no_regular_file_is_refused_and_stays(here: Path) -> None:
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    for path in (Path("pipe"), Path("link"), Path("/dev/null"), Path("/dev/stdout"), Path("/dev/fd/1")):
        with pytest.raises(UserError, match=f"--out: {path} is no regular file; give the name of a file"):
            check_output_file(path, "--out")
        with pytest.raises(UserError, match="is no regular file"), write_atomically(path):
            pass
    assert Path("pipe").is_fifo()


# ── a folder ────────────────────────────────────────────────────────────────────────────────────────────────


def fill(path: Path, text: str) -> None:
    with replace_folder(path, ["inner"]) as new:
        (new / "inner").mkdir()
        (new / "inner" / "file").write_text(text)


def test_a_folder_is_replaced_with_everything_in_it_flushed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(here / "out", "old")
    flushed: list[str] = []
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(path.name))
    fill(here / "out", "new")
    assert (here / "out" / "inner" / "file").read_text() == "new"
    assert set(flushed) == {"inner", "file", ".out.new", here.name}
    assert names(here) == ["out"]


def test_a_folder_that_could_not_be_filled_leaves_the_old_one_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(here / "out", "old")
    with pytest.raises(ZeroDivisionError), replace_folder(here / "out", ["inner", "half"]) as new:
        (new / "half").write_text(str(1 / 0))
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)"):
        fill(here / "out", "new")
    assert (here / "out" / "inner" / "file").read_text() == "old"
    assert names(here) == ["out"]


# ── JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_json_is_strict(here: Path) -> None:
    value = {"a": [float("nan"), float("-inf"), 1.5], "é": None}
    assert dumps(value) == '{"a": [null, null, 1.5], "é": null}'
    write_jsonl(here / "out.jsonl", [{"logprobs": (float("nan"),)}])
    assert (here / "out.jsonl").read_text() == '{"logprobs": [null]}\n'


@pytest.mark.parametrize(("value", "name"), [(7, "7"), ("x", "x")])
def test_a_record_is_named_by_text_or_a_whole_number(value: object, name: str) -> None:
    assert get_id("f:1", {"problem_id": value}) == name
    assert get_id("f:1", {}, default="1") == "1"
    with pytest.raises(UserError, match="f:1: problem_id is True; it must be text"):
        get_id("f:1", {"problem_id": True})


def test_a_device_in_the_place_of_a_file_is_not_read_without_end(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").symlink_to("/dev/full")  # which gives zeros for ever
    with pytest.raises(UserError, match=r"evaluations.jsonl: cannot be read \(.*is no file"):
        read_appended(tmp_path / "evaluations.jsonl", str, "evaluation")
