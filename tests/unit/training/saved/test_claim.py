"""Nothing of the user's is overwritten, removed, or written to where a run reads it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.unit.training.saved.arrangements import arrange, scatter
from tlt.base.io.files import remove_own, replace_folder, write_atomically
from tlt.base.types import UserError
from tlt.training.saved.retention import clear_leftovers, remove_older
from tlt.training.saved.run_folder import PRODUCTS, FolderLock, claim, forget_journal, refuse_begun

APPENDED = ("metrics.jsonl", "evaluations.jsonl", "console.log", "timeline.rank0.jsonl")
REPLACED = ("config.json", "tracking.json", "timeline.json")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, files in (("model", ("config.json", "model.safetensors")), ("drafter", ("config.json",))):
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_text(f"{name}'s {file}")
    (folder / "data.jsonl").write_text("{}\n")
    return {
        "model.path": folder / "model",
        "drafter.path": folder / "drafter",
        "task.data": folder / "data.jsonl",
    }


def write_as_a_run(out: Path, step: int) -> None:
    """Writes and removes everything that a run of one step does."""
    lock = FolderLock(out)
    try:
        for name in APPENDED:
            with (out / name).open("a") as file:
                file.write("a run's line\n")
        for name in REPLACED:
            with write_atomically(out / name) as file:
                file.write("a run's")
        clear_leftovers(out / "checkpoints")
        for number in (step, step + 1):
            checkpoint = out / "checkpoints" / f"step-{number:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "manifest.json").write_text("a run's")
        remove_older(out / "checkpoints", step + 1, keep=0)
        for name, own in PRODUCTS.items():
            with replace_folder(out / name, own) as new:
                for file in own:
                    (new / file).write_text("a run's")
        forget_journal(out)
    finally:
        lock.release()


def attempt(out: Path, inputs: dict[str, Path], step: int, goes_on: bool) -> bool:
    """Returns whether a run was not refused."""
    try:
        if not goes_on:
            refuse_begun(out)
        claim(out, inputs, goes_on)
        write_as_a_run(out, step)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_in_any_arrangement_of_folders_the_users_files_stay_as_they_are(
    seed: int, sources: dict[str, Path], tmp_path: Path
) -> None:
    draw, num_run = random.Random(seed), 0
    for number in range(60):
        made = arrange(tmp_path / str(number), sources, draw)
        before = made.digest()
        if attempt(made.out, made.inputs, 0, goes_on=False):
            num_run += 1
            scatter(made.out, draw, 2, ("policy", "best", "drafter", "adapter", "journal", "checkpoints"))
            (made.out / "notes.txt").write_text("mine")
            mine = {path: text for path, text in made.digest().items() if text_is_mine(path)}
            before |= mine
            attempt(made.out, made.inputs, 1, goes_on=True)
        after = set(made.digest().values())
        assert set(before.values()) <= after, number
        kept = {
            path for path in before if "checkpoints" not in path
        }  # a checkpoint that goes leaves notes aside
        assert {path: made.digest().get(path) for path in kept} == {path: before[path] for path in kept}, (
            number
        )
    assert num_run >= 10, "the others are refused"


def text_is_mine(path: str) -> bool:
    return not Path(path).is_symlink() and Path(path).read_text().startswith("mine")


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


def test_a_models_folder_with_metrics_is_no_run_to_continue(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    refuse_begun(tmp_path)
    with pytest.raises(UserError, match=r"holds config.json, which a run would write over"):
        claim(tmp_path, {}, goes_on=False)


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
