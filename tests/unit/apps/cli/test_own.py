"""A run of the user's own model and data: the folder that `tlt init own` writes, and training without it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from tests.standin import serve_hub
from tests.unit.apps.cli.parts import write_lines
from tlt.apps.cli.main import main
from tlt.apps.cli.train import resolve_config
from tlt.apps.run import own
from tlt.apps.run.start import preflight
from tlt.base.config.load import load_config
from tlt.base.io.data import DataSource
from tlt.base.types import UserError

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "recipes/math/base"
CITIES = [{"question": f"The capital of land {n}?", "solution": f"City {n}"} for n in range(16)]
SUMS = [{"messages": [{"role": "user", "content": f"{n} + 1?"}], "total": n + 1} for n in range(16)]
OPEN = [{"prompt": f"A story about {n} apples."} for n in range(6)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def begin(rows: list[dict[str, Any]], *more: str) -> dict[str, Any]:
    """The configuration that `tlt init own mine` writes for these rows."""
    write_lines("rows.jsonl", *rows)
    assert main(["init", "own", "mine", "--model", str(MODEL), "--data", "rows.jsonl", *more]) == 0
    return tomllib.loads(Path("mine/train.toml").read_text())


def run_test(*words: str) -> str:
    """What the test of the reward says, run by Python alone or by a module such as pytest."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = (sys.executable, *words, "test_reward.py")
    done = subprocess.run(command, cwd="mine", env=environ, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_rows_with_answers_get_a_reward_whose_test_passes_and_a_configuration_that_can_be_trained(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = begin(CITIES)
    assert written["task"]["columns"] == {"prompt": "question", "answer": "solution"}
    assert written["task"]["chat"]
    assert written["rewards"]["functions"] == ["reward:reward"]
    said = capsys.readouterr().out
    assert "question is text, and the tokenizer has a chat template" in " ".join(said.split()).replace(
        "  ", " "
    )
    assert said.splitlines()[-1] == "Next: cd mine && python test_reward.py && tlt train train.toml"
    assert len(Path("mine/rows.jsonl").read_text().splitlines()) == 5
    assert "1 passed" in run_test("-m", "pytest", "-p", "no:cacheprovider")
    monkeypatch.chdir(here / "mine")
    findings = preflight(load_config("train.toml", ["--run.num_ranks", "1"]))
    assert (len(findings.data.problems), len(findings.data.held_out)) == (14, 2)


def test_without_an_answer_the_reward_is_to_fill_in_and_its_test_says_so() -> None:
    written = begin(OPEN)
    assert written["evaluation"] == {"num_problems": 0}
    assert written["rollout"]["problems_per_step"] == 6
    assert "say in reward.py what a response is worth" in run_test()


CHOICES = [{"question": f"Which, {n}?", "answer": "ABCD"[n % 4]} for n in range(16)]
SAID = {
    "B": [
        (
            "B",
            "b.",
            "**B**",
            "Answer: B",
            "So the answer is (B).",
            "It is long.\n\nB",
            r"\boxed{B}",
            "#### B",
        ),
        (
            "I choose A, the B side",
            "A, B, C, D",
            "A or B",
            "Answer: A, B",
            "not B",
            "",
            "AB",
            "B\nor A",
            "B?A",
        ),
    ],
    "no": [("No.", "Thus, the answer is no"), ("Yes, there is no doubt", "no and yes", "yes", "know")],
    "5": [("5", "5.0", "Answer: 10/2", "Therefore: 5"), ("12.5", "5 or 6", "1,5", "15", "-5", "five")],
    "1,234": [("1234", "$1,234.00"), ("1", "234", "1,23,4", "12,34")],
    "So what": [("so what", "The answer is: so what!"), ("what", "so")],
    "Two\nlines": [("Here:\ntwo\nlines",), ("two", "lines", "lines\ntwo")],
    "see 3 + 4\n#### 7": [("Answer: 7", "7"), ("see 3 + 4", "4")],
    "True": [("true", "Answer: True"), ("untrue", "True or False")],
}


def test_the_reward_that_is_written_pays_the_right_answer_alone() -> None:
    begin(CHOICES)
    says = runpy.run_path("mine/reward.py")["says"]
    for answer, (right, wrong) in SAID.items():
        assert {said: says(said, answer) for said in (*right, *wrong)} == {
            **dict.fromkeys(right, True),
            **dict.fromkeys(wrong, False),
        }
    assert says("so it is</think>B", "B", in_thought=True)
    assert not any(says(text, "B", begun) for text, begun in (("<think>B", False), ("B", True)))
    with pytest.raises(ValueError, match="give one that can be said"):
        says("x", " . ")


def test_the_answers_of_verls_rows_are_found() -> None:
    model = [{"ground_truth": f"City {n}", "style": "rule"} for n in range(16)]
    written = begin([{"prompt": f"The capital of {n}?", "reward_model": one} for n, one in enumerate(model)])
    assert written["rewards"]["functions"] == ["reward:reward"]
    assert "row 5: 1 for 'Answer: City 4', 0 for 'Answer: City 0'" in run_test()


def test_a_function_of_ones_own_is_copied_and_tested_and_a_given_key_wins() -> None:
    Path("mine.py").write_text("async def close(completions, total):\n    return [0.5 for _ in total]\n")
    written = begin(
        SUMS, "--reward", "mine.py:close", "--lora.rank", "4", "--optimizer.learning_rate", "3e-5"
    )
    assert written["rewards"]["functions"] == ["mine:close"]
    assert written["lora"] == {"rank": 4}
    assert written["optimizer"]["learning_rate"] == 3e-5
    assert sorted(path.name for path in Path("mine").iterdir()) == [
        "mine.py",
        "rows.jsonl",
        "test_reward.py",
        "train.toml",
    ]
    assert "the right one is worth no more" in run_test()  # it is constant, and nobody has said what is right
    test, reward = Path("mine/test_reward.py"), Path("mine/mine.py")
    reward.write_text(
        "async def close(completions, total):\n"
        "    return [float(c[-1]['content'] == str(t)) for c, t in zip(completions, total)]\n"
    )
    test.write_text(test.read_text().replace('"write here what you want"', "str(row['total'])"))
    assert "passed on 5 rows" in run_test()


def test_a_run_without_a_configuration_is_chosen_in_the_same_way_and_prints_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_lines("rows.jsonl", *SUMS)
    words = ["--model.path", str(MODEL), "--task.data", "rows.jsonl", "--rewards.functions", "mine:close"]
    config = resolve_config(None, [*words, "--sampling.max_tokens", "9"], None)
    assert (config.sampling.max_tokens, config.task.split) == (9, "train[:-2]")
    said = capsys.readouterr().out
    assert "optimizer.learning_rate = 1e-05" in said
    assert "sampling.max_tokens" not in said
    assert max(map(len, said.splitlines())) <= 80
    with pytest.raises(UserError, match=r"^rewards\.functions: no column .*tlt init own write one"):
        resolve_config(None, words[:4], None)
    with pytest.raises(UserError, match=r"^train: no configuration given; .*--model\.path and --task\.data"):
        resolve_config(None, words[:2], None)


def test_a_model_and_data_of_the_hub_are_looked_at_and_trained_by_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(here / "datasets"))
    datasets.Dataset.from_list(CITIES).to_parquet("train-00000-of-00001.parquet")
    with serve_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        hub.add("me/base", MODEL)
        rows = Path("train-00000-of-00001.parquet").read_bytes()
        hub.add("me/cities", {"data/train-00000-of-00001.parquet": rows}, kind="datasets")
        assert main(["init", "own", "mine", "--model", "me/base", "--data", "me/cities"]) == 0
        assert "model.safetensors" not in hub.downloads
        monkeypatch.chdir("mine")
        findings = preflight(load_config("train.toml", ["--run.num_ranks", "1"]))
        assert "model.safetensors" in hub.downloads
        close_session()
    written = tomllib.loads(Path("train.toml").read_text())
    assert (written["model"]["path"], written["task"]["data"]) == ("me/base", "me/cities")
    assert (len(findings.data.problems), len(findings.data.held_out)) == (14, 2)


def test_what_is_given_is_written_as_toml_with_whole_paths() -> None:
    Path("rewards.py").write_text(
        "def close(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    Path("drafter").symlink_to(ROOT / "recipes/countdown/drafter")
    more = ("--drafter.path", "drafter", "--rollout.kv_gib", "none")
    more += ("--task.system_prompt", "Count 🍎 \x7f")
    written = begin(SUMS, "--reward", "rewards.py:close", *more)
    assert Path(written["drafter"]["path"]).is_absolute()
    assert written["task"]["system_prompt"] == "Count 🍎 \x7f"
    assert "kv_gib" not in written["rollout"]


@pytest.mark.parametrize(
    ("splits", "tests"), [(("test",), None), (("train", "test"), "test"), (("validation", "test"), "test")]
)
def test_a_split_that_is_trained_on_tests_nothing(
    splits: tuple[str, ...], tests: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "list_splits", lambda source: splits)
    write_lines("rows.jsonl", *SUMS)
    assert own._look_at_data(DataSource(Path("rows.jsonl"), "task.data")).test_split == tests
