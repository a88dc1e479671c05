"""Checkpoints of a run: what they hold, which of them stay, and what resuming refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.saved.saved_parts import (
    ALONE,
    assert_holds,
    load,
    make_checkpoint,
    make_tensors,
    make_worlds,
    names_in,
    refusal,
    save,
)
from tlt.base.types import LAW_VERSION, UserError
from tlt.training.saved import checkpoint, manifest, shards
from tlt.training.saved.checkpoint import CheckpointWriter, find_checkpoint, load_checkpoint
from tlt.training.saved.manifest import latest_checkpoint, read_manifest
from tlt.training.saved.retention import go_back_to
from tlt.training.saved.shards import digest_of

# ── what they hold ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_holds_what_was_when_it_was_saved(tmp_path: Path) -> None:
    writer, given = CheckpointWriter(tmp_path / "c", ALONE), make_checkpoint(3)
    writer.save(given)
    for tensor in given.tensors.values():
        tensor.fill_(9.0)  # training goes on while the thread writes
    given.counters["value"] = 9
    writer.wait()
    assert_holds(tmp_path / "c", 3)
    assert load(tmp_path / "c")[2] == [{"rank": 0, "step": 3}]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 40])
def test_any_number_of_ranks_reads_what_any_number_has_written(num_ranks: int, tmp_path: Path) -> None:
    save(tmp_path, 3, num_ranks=num_ranks)
    for world in (ALONE, *make_worlds(2), *make_worlds(3)):
        assert_holds(tmp_path, 3, world=world)
    owners = [known["rank"] for world in make_worlds(2) for known in load(tmp_path, world)[2]]
    assert sorted({*owners}) == list(range(num_ranks))
    assert [load(tmp_path, world)[2][0]["rank"] for world in make_worlds(4)] == [
        rank % num_ranks for rank in range(4)
    ]


def test_files_are_safetensors_that_others_read_and_their_digests_those_of_their_bytes(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3, num_ranks=2)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    manifest = read_manifest(path)
    assert names_in(path) == ["manifest.json", *sorted(manifest.files)]
    assert all(digest_of(path / name) == digest for name, digest in manifest.files.items())
    pieces = [load_file(path / f"rank-0000{rank}.safetensors") for rank in range(2)]
    for name, tensor in make_tensors().items():
        found = torch.cat([piece[name].reshape(-1) for piece in pieces if name in piece])
        assert torch.equal(found, tensor.reshape(-1))
    assert (manifest.step, manifest.num_ranks, manifest.law, manifest.run) == (3, 2, LAW_VERSION, "run")


# ── which of them stay ──────────────────────────────────────────────────────────────────────────────────────


def test_the_newest_ones_stay_and_what_killed_writers_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.new").mkdir()
    for step in (1, 2, 10):
        save(tmp_path, step, step)
    assert names_in(tmp_path) == ["step-00000002", "step-00000010"]
    for step in (11, 12, 13):
        save(tmp_path, step, keep=4)
    assert names_in(tmp_path) == ["step-00000010", "step-00000011", "step-00000012", "step-00000013"]


def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_files_of_an_attempt_with_more_ranks_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    partial = tmp_path / ".step-00000004.new"
    partial.mkdir()
    (partial / "rank-00003.safetensors").write_text("half")
    (partial / "rank-00000.json").write_text("half, and longer than what will be written in its place" * 9)
    save(tmp_path, 4, num_ranks=2)
    assert_holds(tmp_path, 4)
    assert "rank-00003.safetensors" not in names_in(tmp_path / "step-00000004")


# ── what cannot be written ──────────────────────────────────────────────────────────────────────────────────


def test_a_writer_that_fails_says_so_at_the_next_checkpoint_and_leaves_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.save(make_checkpoint(1))
    writer.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_chunk", full)
        writer.save(make_checkpoint(2))
        with pytest.raises(
            UserError,
            match=r"checkpoint of step 2 .*No space left.*the one before, .*step-00000001, is whole",
        ):
            writer.save(make_checkpoint(3))
    assert names_in(tmp_path) == ["step-00000001"]
    writer.save(make_checkpoint(3))
    writer.wait()
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_rank_that_cannot_write_is_named_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = shards.write_chunk

    def full(file: object, chunk: memoryview) -> None:
        if "rank-00001" in file.name:
            raise OSError(28, "No space left on device")
        write(file, chunk)

    monkeypatch.setattr(shards, "write_chunk", full)
    writers = [CheckpointWriter(tmp_path, world) for world in make_worlds(2)]
    for rank, writer in enumerate(writers):
        writer.save(make_checkpoint(1, rank=rank))
    for writer in writers:
        message = refusal(writer.wait)
        fault = "the checkpoint of step 1 is not written (rank 1: No space left on device)"
        assert message.startswith(f"{fault}; there is none before it;")
    assert names_in(tmp_path) == []


def test_a_rank_that_never_writes_is_awaited_for_so_long_and_named(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, make_worlds(2)[0], patience=0.2)
    writer.save(make_checkpoint(1))
    assert "(rank 1 has been awaited for 0.2 s)" in refusal(writer.wait)


def test_a_run_that_ends_by_an_error_waits_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_GRACE_SECONDS", 0.1)
    writer = CheckpointWriter(tmp_path, make_worlds(2)[0])
    writer.save(make_checkpoint(1))
    writer.close()
    assert "still awaited when this process ended" in refusal(writer.wait)


# ── what resuming refuses ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("other", [2, "a\nb"])
def test_a_checkpoint_of_another_format_is_refused_in_one_line(other: Any, tmp_path: Path) -> None:
    with patch.object(manifest, "FORMAT", other), patch.object(checkpoint, "FORMAT", other):
        save(tmp_path, 3)
    expected = f"has format {other!r}, not {manifest.FORMAT}; go on with the version of TLT that wrote it"
    assert refusal(find_checkpoint, tmp_path, ALONE).endswith(expected)


def test_a_checkpoint_of_another_law_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "LAW_VERSION", LAW_VERSION + 1)
        save(tmp_path, 1)
    assert f"was sampled by version {LAW_VERSION + 1} of the law" in refusal(find_checkpoint, tmp_path, ALONE)


CHANGES = {
    "no drafter": {"drafter.fc": None},
    "another drafter (drafter.fc: F32 [4, 2, 3], here F32 [2])": {"drafter.fc": torch.zeros(2)},
    "another drafter (drafter.x: absent, here F32 [1])": {"drafter.x": torch.zeros(1)},
    "another policy (policy.norm: F64 [5], here F32 [5])": {"policy.norm": torch.zeros(5)},
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_run_never_goes_on_with_tensors_that_its_checkpoint_does_not_hold(
    said: str, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path, ALONE)
    assert found is not None
    tensors = {name: torch.full_like(tensor, -1) for name, tensor in make_tensors().items()}
    if said == "no drafter":
        (tmp_path / "2").mkdir()
        without = make_checkpoint(1)
        writer = CheckpointWriter(tmp_path / "2", ALONE)
        del without.tensors["drafter.fc"]
        writer.save(without)
        writer.wait()
        found = find_checkpoint(tmp_path / "2", ALONE)
        assert found is not None
    else:
        tensors |= CHANGES[said]
    message = refusal(load_checkpoint, *found, tensors, ALONE)
    assert message.startswith(f"{found[0]}: holds {said}, not what this run trains; start a new run")
    assert all((tensor == -1).all() or name in CHANGES[said] for name, tensor in tensors.items())


# ── going back ──────────────────────────────────────────────────────────────────────────────────────────────


def test_going_back_is_an_explicit_choice_and_keeps_what_is_newer(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, step, keep=3)
    shard = tmp_path / "step-00000003" / "rank-00000.safetensors"
    os.truncate(shard, 100)
    message = refusal(load, tmp_path)
    assert message.startswith(f"{shard}: has 100 bytes, not the")
    assert message.endswith(
        f"go on from the checkpoint before it: tlt train --resume {tmp_path / 'step-00000002'}"
    )
    go_back_to(tmp_path / "step-00000001")
    assert_holds(tmp_path, 1, 1)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002.aside", "step-00000003.aside"]
    save(tmp_path, 2, 5.0)
    go_back_to(tmp_path / "step-00000001")
    assert "step-00000002.aside-2" in names_in(tmp_path)
