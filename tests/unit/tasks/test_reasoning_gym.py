"""The tasks of reasoning-gym: splits that share nothing, scores of the generator's own, and mistakes in one
line.

A stand-in of two generators shows the rules wherever the tests run; the library itself is asked where it
is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tlt.base.types import Reward
from tlt.tasks.base import get_task, make_problems
from tlt.tasks.reasoning_gym import ReasoningGym, _extract, _make_dataset, _make_entry
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec

FACTORY = '''
import sys
import random
from dataclasses import dataclass

@dataclass
class Config:
    largest: int = 50
    operators: tuple = ("+",)
    sets: bool = False
    seed: int | None = None
    size: int = 500

class Sums:
    """Entry i depends on seed + i, metadata do not survive JSON, and the scorer raises at words."""

    def __init__(self, config):
        assert config.largest > 0, "largest must be positive"
        assert isinstance(config.operators, tuple)
        self.config = config

    def __getitem__(self, index):
        sys.stdout.write("a generator that prints")
        assert index < self.config.size
        rng = random.Random(self.config.seed + index)
        a, b = rng.randint(1, self.config.largest), rng.randint(1, self.config.largest)
        name = rng.choice(list({"Ada", "Bea", "Cia", "Dot", "Eve", "Fay"})) + ": " if self.config.sets else ""
        return {"question": f"{name}{a} + {b} =", "answer": str(a + b), "metadata": {"terms": (a, b)}}

    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["terms"], tuple)
        return {0: 1.0, 1: 0.5, 2: 7.0, 3: float("nan")}.get(abs(int(answer) - int(entry["answer"])), 0.0)

DATASETS = {"sums": (Sums, Config), "chain_sum": (Sums, Config), "composite": (Sums, Config)}
'''


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReasoningGym]:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").touch()
    (tmp_path / "reasoning_gym" / "factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    task = get_task("reasoning-gym:sums")
    assert isinstance(task, ReasoningGym)
    yield task
    forget()


def forget() -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[module]
    for cache in (_make_dataset, _make_entry):
        cache.cache_clear()


def draw(
    num: int, split: str = "train", seed: int = 0, name: str = "sums", **options: Any
) -> list[dict[str, Any]]:
    return make_problems(f"reasoning-gym:{name}", num, seed, {"split": split, **options})


def test_no_test_question_is_a_training_question_under_any_seed(sums: ReasoningGym) -> None:
    train = [problem["question"] for seed in range(3) for problem in draw(1500, seed=seed)]
    test = draw(200, "test", seed=0)
    assert len({problem["question"] for problem in test}) == 200
    assert not {problem["question"] for problem in test} & set(train)


def test_equal_arguments_give_equal_problems_and_an_id_is_of_the_question(sums: ReasoningGym) -> None:
    first, other = draw(300), draw(300, seed=1)
    assert first == draw(300) != other
    assert json.loads(json.dumps(first)) == first
    id_of = {problem["question"]: problem["problem_id"] for problem in first}
    both = [problem for problem in other if problem["question"] in id_of]
    assert both
    assert all(problem["problem_id"] == id_of[problem["question"]] for problem in both)
    assert len(both) < 100, "seeds 0 and 1 are no shifts of each other"


def test_the_parent_and_its_workers_draw_alike_where_a_generator_walks_through_sets(
    sums: ReasoningGym,
) -> None:
    problems = draw(40, sets=True, answer_in="whole")
    with RewardPool(RewardSpec("reasoning-gym:sums"), 2, timeout_seconds=30) as pool:
        for problem in problems:
            pool.submit((problem["problem_id"], 0), problem, problem["answer"])
        rewards = pool.drain()
    assert [rewards[p["problem_id"], 0] for p in problems] == [Reward(1.0, True)] * 40


@pytest.mark.parametrize(("off", "reward"), [(0, 1.0), (1, 0.5), (2, 1.0), (3, 0.0), (9, 0.0)])
def test_the_generator_scores_within_0_and_1_what_went_through_json(
    sums: ReasoningGym, off: int, reward: float
) -> None:
    (problem,) = json.loads(json.dumps(draw(1, answer_in="whole")))
    assert problem["prompt"] == problem["question"]
    found = sums.score(problem, f" {int(problem['answer']) + off}\n")
    assert found == {"reward": reward, "solved": reward == 1.0}


def test_an_answer_that_is_missing_or_unreadable_is_worth_nothing(sums: ReasoningGym) -> None:
    (problem,) = draw(1)
    for text in ("", problem["answer"], "<answer>nonsense</answer>", f"<answer>{problem['answer']}"):
        assert sums.score(problem, text) == {"reward": 0.0, "solved": False}
    assert sums.score(problem, f"<answer>1</answer> no, <answer> {problem['answer']} </answer>")["solved"]
    (easy,) = draw(1, solved_at=0.5)
    assert sums.score(easy, f"<answer>{int(easy['answer']) + 1}</answer>") == {"reward": 0.5, "solved": True}


def test_where_the_answer_is_sought() -> None:
    text = r"<answer>1</answer> \boxed{2} then <answer>3</answer> and \boxed{4}"
    assert [_extract(text, where) for where in ("tag", "boxed", "whole")] == ["3", "4", text]
    assert [_extract("5", where) for where in ("tag", "boxed", "whole")] == [None, None, "5"]


def test_the_prompt_asks_for_the_answer_where_it_is_sought(sums: ReasoningGym) -> None:
    assert draw(1)[0]["prompt"].endswith("Give the final answer between <answer> and </answer>.")
    assert draw(1, answer_in="boxed")[0]["prompt"].endswith("Put the final answer into \\boxed{}.")
    own = draw(1, template="Q: {question} {braces} A:")[0]
    assert own["prompt"] == f"Q: {own['question']} {{braces}} A:"


def test_options_reach_the_generator_with_lists_as_its_tuples(sums: ReasoningGym) -> None:
    assert max(int(problem["answer"]) for problem in draw(20, largest=5, operators=["+"])) <= 10


def test_problems_that_were_drawn_otherwise_are_refused(sums: ReasoningGym) -> None:
    (problem,) = draw(1)
    with refused("was drawn otherwise; draw it again"):
        sums.score({**problem, "question": "1 + 1 ="}, "2")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, r"reasoning-gym:chain_sums: no such generator; did you mean chain_sum\?"),
        ("composite", {}, "reasoning-gym:composite: no such generator"),
        ("puzzle24", {}, "reasoning-gym:puzzle24: the library's own score pays wrong answers in full"),
        (
            "sums",
            {"largst": 3},
            r"option 'largst'; did you mean largest\? known are largest, operators, sets, answer_in",
        ),
        ("sums", {"size": 3}, "unknown option 'size'"),
        ("sums", {"largest": -1}, r"refuses the options .*largest must be positive"),
        ("sums", {"answer_in": "box"}, "answer_in is 'box'; it must be one of tag, boxed, whole"),
        ("sums", {"template": "x"}, r"template is 'x'; it must contain \{question\}"),
        ("sums", {"largest": 3}, "gives only [1-8] different train questions"),
    ],
)
def test_a_mistake_is_one_line(sums: ReasoningGym, name: str, options: dict[str, Any], message: str) -> None:
    with refused(message):
        draw(100, name=name, **options)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(r"pip install 'reasoning-gym"):
        get_task("reasoning-gym:chain_sum")


# ── the library itself ──────────────────────────────────────────────────────────────────────────────────────

ALL = """
import json, sys
from reasoning_gym.factory import DATASETS
from tlt.tasks.rewards.pool import RewardPool
from tlt.tasks.rewards.scoring import RewardSpec
from tlt.tasks.base import get_task, make_problems
from tlt.tasks.reasoning_gym import WRONGLY_SCORED

unscored, problems = [], {}
for name in json.loads(sys.argv[1]) or sorted(set(DATASETS) - {"composite", *WRONGLY_SCORED}):
    task = get_task(f"reasoning-gym:{name}")
    for split in ("train", "test"):
        made = make_problems(f"reasoning-gym:{name}", 3, 5, {"split": split, "answer_in": "whole"})
        problems[f"{name} {split}"] = [[problem["problem_id"], problem["prompt"]] for problem in made]
    for problem in json.loads(json.dumps(made)):
        if problem["answer"] is not None and not task.score(problem, str(problem["answer"]))["solved"]:
            unscored.append([name, problem["answer"], task.score(problem, str(problem["answer"]))])
        assert task.score(problem, "nonsense")["reward"] < 1, name
print(json.dumps([problems, unscored]))
"""


def ask_library(names: list[str], hash_seed: str) -> tuple[dict[str, Any], list[Any]]:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", ALL, json.dumps(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems, unscored = json.loads(done.stdout.splitlines()[-1])
    return problems, unscored


def test_the_librarys_own_answers_are_right_and_every_process_draws_the_same() -> None:
    names = ["basic_arithmetic", "number_sorting"]
    problems, unscored = ask_library(names, "1")
    assert unscored == []
    assert ask_library(names, "2")[0] == problems


@pytest.mark.slow
def test_every_generator_of_the_library_draws_the_same_in_every_process_and_accepts_its_own_answers() -> None:
    problems, unscored = ask_library([], "1")
    again, _ = ask_library([], "2")
    assert [name for name in problems if problems[name] != again[name]] == []
    assert unscored == []
    assert len(problems) >= 2 * 100
