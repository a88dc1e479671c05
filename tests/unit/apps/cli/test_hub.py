"""`tlt hub push`: what a run's repositories on the hub hold and say. The hub's client is a stand-in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from tests.unit.apps.cli.parts import fail, succeed
from tests.unit.training.report.records import record
from tlt.apps.cli import main as cli
from tlt.base.config.load import load_config
from tlt.training.saved.evaluations import Evaluation, Evaluations


def write_run(folder: Path, overrides: dict[str, Any], drafter: str | None = "EagleLlamaForCausalLM") -> None:
    """A finished run of 12 steps, with small files in the place of weights."""
    config = load_config("countdown", {"run.out_dir": str(folder), **overrides})
    (folder / "policy").mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    (folder / "metrics.jsonl").write_text(record(12).to_json() + "\n")
    evaluations = Evaluations(folder / "evaluations.jsonl", 0, writes=True)
    for step, solved in ((0, 0.25), (12, 0.75)):
        shares = {f"p{index}": float(index < 32 * solved) for index in range(32)}
        evaluations.add(Evaluation(step, solved, 1.0, shares, {}, solved, shares, 0))
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / "policy" / name).write_text("{}")
    if drafter is not None:
        (folder / "drafter").mkdir()
        about = {"architectures": [drafter], "tlt": {"acceptance": 0.913}}
        (folder / "drafter" / "config.json").write_text(json.dumps(about))


@dataclasses.dataclass
class Hub:
    """Remembers what was sent to it: repositories with their privacy, and files by repository."""

    repos: dict[str, bool | None] = dataclasses.field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    token: str | None = "hf_x"
    licence: str = "mit"
    fault: Exception | None = None

    def __call__(self, library_name: str) -> Hub:
        assert library_name == "tlt"
        return self

    def whoami(self) -> dict[str, str]:
        return {"name": "ada"}

    def model_info(self, name: str, revision: str | None) -> Any:
        card = huggingface_hub.ModelCardData(license=self.licence)
        return type("ModelInfo", (), {"card_data": card})

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> str:
        if self.fault is not None:
            raise self.fault
        assert exist_ok
        self.repos[name] = private
        return f"https://huggingface.co/{name}"

    def create_commit(self, name: str, operations: list[Any], commit_message: str) -> None:
        assert commit_message
        sent = {}
        for operation in operations:
            with operation.as_file() as file:
                sent[operation.path_in_repo] = file.read()
        self.files[name] = sent


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: hub.token)
    return hub


def test_policy_and_drafter_go_to_a_repository_each_with_a_card(
    here: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(here / "my-run", {"task.data": "openai/gsm8k", "model.path": "Qwen/Qwen2.5-0.5B"})
    summary = succeed(capsys, "hub", "push", "my-run", "--private")
    assert summary == {kind: f"https://huggingface.co/{name}" for kind, name in NAMES.items()}
    assert hub.repos == dict.fromkeys(NAMES.values(), True)
    assert hub.files["ada/my-run"].keys() == {"config.json", "model.safetensors", "README.md"}
    card = ModelCard(hub.files["ada/my-run"]["README.md"].decode())
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.license == "mit"
    assert "grpo" in card.data.tags
    assert "| steps | 12, of 8 problems × 8 responses |" in card.text
    assert (
        "| solved, held out | 25.0% → 75.0% after 12 steps; p < 0.0001, paired sign-flip test |" in card.text
    )
    assert "| reward, held out | 0.250 → 0.750 |" in card.text
    assert "tlt generate ada/my-run" in card.text
    assert """'{"method": "eagle", "model": "ada/my-run-drafter",""" in card.text
    drafter = ModelCard(hub.files["ada/my-run-drafter"]["README.md"].decode())
    assert drafter.data.base_model == "ada/my-run"
    assert "| acceptance measured last | 91.3% |" in drafter.text


NAMES = {"policy": "ada/my-run", "drafter": "ada/my-run-drafter"}


def test_a_dry_run_shows_files_and_card_without_network_or_path_of_this_machine(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    base = here / "secret place" / "base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nbase_model: lab/base\nlicense: apache-2.0\n---\n\nText.\n")
    rows = here / "secret place" / "rows.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    reward = f"{here / 'secret place' / 'mine.py'}:score"
    changes = {"model.path": str(base), "task.data": str(rows), "rewards.functions": [reward]}
    write_run(here / "run", changes, drafter=None)
    files = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert cli.main(["hub", "push", "run", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("OWNER/run:\n  config.json  2 bytes\n")
    assert json.loads(shown.splitlines()[-1]) == {"dry_run": True, "policy": "OWNER/run"}
    assert "base_model: lab/base\n" in shown
    assert "license: apache-2.0\n" in shown
    assert "| data | rows.jsonl |" in shown
    assert "| reward functions | mine.py:score |" in shown
    assert "secret place" not in shown
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == files


def test_every_refusal_is_one_line_with_the_remedy(
    here: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        return fail(capsys, "hub", "push", *words)

    assert refused("run") == "run: holds no run; give the folder of one (run.out_dir)"
    write_run(here / "run", {}, drafter=None)
    assert refused("run", "--repo", "solver") == "--repo: is solver; give OWNER/NAME"
    assert refused("run", "--what", "drafter") == "run: the run has no drafter; leave out --what drafter"
    hub.fault = ConnectionError("no route")
    message = refused("run", "--repo", "ada/b")
    assert message.startswith(
        "ada/b: cannot be uploaded to https://huggingface.co (ConnectionError: no route)"
    )
    hub.token = None
    assert refused("run") == (
        "tlt hub push: no token of the Hugging Face hub is here; log in with hf auth login, "
        "or set HF_TOKEN to one that writes"
    )
    (here / "run" / "policy" / "config.json").unlink()
    assert refused("run").endswith("no policy yet; finish it first: tlt train --resume run")


def test_only_the_files_of_a_run_are_uploaded_and_no_link_is_followed(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", {})
    policy, away = tmp_path / "run" / "policy", tmp_path / "away"
    (away / "keys").mkdir(parents=True)
    (away / "keys" / "one").write_text("secret")
    (away / ".env").write_text("secret")
    for name in (".env", "notes.txt", "cache/part.bin"):
        (policy / name).parent.mkdir(exist_ok=True)
        (policy / name).write_text("secret")
    (policy / "tokenizer.env").symlink_to(away / ".env")
    (policy / "additional_chat_templates").mkdir()
    (policy / "additional_chat_templates" / "tool.jinja").write_text("{}")
    (policy / "additional_chat_templates" / "keys").symlink_to(away / "keys")
    (policy / "gone").symlink_to(away / "nothing")
    assert cli.main(["hub", "push", str(tmp_path / "run"), "--what", "policy"]) == 0
    sent = hub.files["ada/run"]
    templates = "additional_chat_templates/tool.jinja"
    assert {*sent} == {"README.md", "config.json", "model.safetensors", templates}
    assert b"secret" not in b"".join(sent.values())
    said = capsys.readouterr().err
    assert "tlt hub push: 6 left out, '.env', 'additional_chat_templates/keys', 'cache/part.bin', " in said
    assert "files of a run's alone are uploaded, and no links" in said
