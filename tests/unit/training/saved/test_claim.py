"""Nothing of the user's is overwritten, removed, or written to where a run reads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tlt.base.io.files import remove_own, replace_folder
from tlt.base.types import UserError
from tlt.training.saved.run_folder import FolderLock, claim


@pytest.mark.parametrize(
    "name", ["policy", "drafter", "adapter", "best", "journal", "metrics.jsonl", ".drafter.new"]
)
def test_a_folder_with_a_name_that_a_run_writes_is_refused_unless_a_run_has_marked_it(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(
        UserError, match=rf"run\.out_dir: .* holds {name}, which a run would write over; give an"
    ):
        claim(tmp_path, {}, goes_on=False)
    assert not (tmp_path / ".lock").exists()
    (tmp_path / "marked").mkdir()
    FolderLock(tmp_path / "marked").release()
    (tmp_path / "marked" / "journal").mkdir()
    claim(tmp_path / "marked", {}, goes_on=False)


@pytest.mark.parametrize(
    ("out", "given", "how"),
    [
        ("a/model", "a/model", "is model.path"),
        ("a", "a/model", "contains model.path"),
        ("a/model/runs/1", "a/model", "lies in model.path"),
        ("link", "a/model", "is model.path"),
        ("link/../model/run", "a/model", "lies in model.path"),
        ("a/model b", "a/model", None),
        ("b", "a/model", None),
    ],
)
def test_a_folder_that_is_or_contains_or_lies_in_what_the_run_reads_is_refused(
    out: str, given: str, how: str | None, tmp_path: Path
) -> None:
    (tmp_path / given).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/model")
    inputs = {"model.path": tmp_path / given}
    if how is None:
        claim(tmp_path / out, inputs, goes_on=False)
        return
    with pytest.raises(UserError, match=f"{how}, .*, which a run only reads; give another --run.out_dir"):
        claim(tmp_path / out, inputs, goes_on=False)


def test_a_run_that_goes_on_may_have_its_data_beside_its_products_but_not_under_their_names(
    tmp_path: Path,
) -> None:
    for name in ("data.jsonl", "policy"):
        (tmp_path / name).mkdir()
    claim(tmp_path, {"task.data": tmp_path / "data.jsonl"}, goes_on=True)
    with pytest.raises(
        UserError, match=r"policy is model.path, .*; begin a new run in another --run.out_dir"
    ):
        claim(tmp_path, {"model.path": tmp_path / "policy"}, goes_on=True)


def test_what_a_writer_does_not_know_stays_where_its_folder_is_replaced_or_removed(tmp_path: Path) -> None:
    for name in ("out", ".out.new", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
        with (
            pytest.raises(UserError, match=r"holds notes.txt, which replacing the folder would remove; move"),
            replace_folder(tmp_path / "out", ["config.json"]),
        ):
            raise AssertionError("it is refused before anything is written")
        assert (tmp_path / name / "notes.txt").read_text() == "mine"
        (tmp_path / name / "config.json").write_text("the writer's")
        assert not remove_own(tmp_path / name, ["config.json"])
        assert [path.name for path in (tmp_path / name).iterdir()] == ["notes.txt"]
        shutil.rmtree(tmp_path / name)
