"""Tasksets of verifiers as tasks, where the library is installed: scored by their rewards, refused where
they want more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tlt.tasks.base import get_task, make_problems
from tlt.tasks.splits import split_of
from tlt.tasks.verifiers import Verifiers

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    {more}

    @vf.reward(weight=2.0)
    async def correct(self, task, trace) -> float:
        return 1.0 if trace.last_reply == task.answer else 0.0

    @vf.reward(weight=-0.5)
    async def long(self, trace) -> float:
        return float(len(trace.last_reply) > 5)

class Config(vf.TasksetConfig):
    count: int = 100
    system: str | None = None

class Sums(vf.Taskset[Task, Config]):
    def load(self):
        for i in range(self.config.count):
            data = Data(prompt=f"{{i}}+1", system_prompt=self.config.system, answer=str(i + 1))
            yield {made}

async def plugged(task, trace, runtime=None) -> float:
    return 1.0

async def ran(task, trace, runtime) -> float:
    return 1.0

class Other(Task):
    pass

__all__ = ["Sums"]
"""

WRONG = {
    "setup()": "async def setup(self, trace, runtime): pass",
    "a container": "NEEDS_CONTAINER = True",
    "a runtime in tested()": "@vf.reward\n    async def tested(self, runtime): return 1.0",
    "tools": "@classmethod\n    def toolsets(cls, config): return [object()]",
}


def draw_in_this_process(place: str, function: str, name: str, *arguments: Any) -> list[dict[str, Any]]:
    """The library takes seconds to import: only the test of other processes draws in one."""
    return Verifiers(name).draw_here(*arguments)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tlt.tasks.verifiers.draw_alike", draw_in_this_process)
    names = []

    def write(name: str, more: str = "pass", made: str = "Task(data, self.config.task)") -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(TASKSET.format(more=more, made=made))

    yield write
    for name in names:
        sys.modules.pop(name, None)


def draw(name: str, num: int, split: str = "train", seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    return make_problems(f"verifiers:{name}", num, seed, {"split": split, **options})


def test_a_taskset_gives_problems_and_its_weighted_rewards(write: Callable[..., None]) -> None:
    write("sums_a")
    train, test = draw("sums-a", 50), draw("sums-a", 5, "test")
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in test}
    assert train == draw("sums-a", 50) != draw("sums-a", 50, seed=1)
    (problem, *_) = json.loads(json.dumps(train))
    task = get_task("verifiers:sums-a")
    answer = str(int(problem["prompt"].partition("+")[0]) + 1)
    assert task.score(problem, answer) == {"reward": 2.0, "solved": True}
    assert task.score(problem, "not the answer") == {"reward": -0.5, "solved": False}


def test_a_system_message_makes_the_prompt_messages_that_are_scored_all_the_same(
    write: Callable[..., None],
) -> None:
    write("sums_b")
    (problem,) = draw("sums-b", 1, system="Add.", solved_at=1.5)
    assert [message["role"] for message in problem["messages"]] == ["system", "user"]
    found = get_task("verifiers:sums-b").score(problem, problem["data"]["answer"])
    assert found == {"reward": 2.0, "solved": True}


def test_a_prompt_of_several_messages_keeps_their_roles(write: Callable[..., None]) -> None:
    prompt = (
        "[vf.UserMessage(content='1+1'), vf.AssistantMessage(content='2'), vf.UserMessage(content=str(i))]"
    )
    write("sums_m", made=f"Task(Data(prompt={prompt}, answer=str(i)), self.config.task)")
    (problem,) = json.loads(json.dumps(draw("sums-m", 1)))
    assert [message["role"] for message in problem["messages"]] == ["user", "assistant", "user"]
    found = get_task("verifiers:sums-m").score(problem, problem["data"]["answer"])
    assert found == {"reward": 2.0, "solved": True}


@pytest.mark.parametrize("needs", WRONG)
def test_what_wants_more_than_a_conversation_is_refused(write: Callable[..., None], needs: str) -> None:
    name = f"sums_{sorted(WRONG).index(needs)}"
    write(name, WRONG[needs])
    with refused("which TLT does not have") as caught:
        draw(name, 1)
    assert f"needs {needs}," in str(caught.value)


def test_a_reward_of_the_options_counts_and_is_refused_where_it_needs_a_runtime(
    write: Callable[..., None],
) -> None:
    write("sums_r", "@vf.reward\n    async def offline(self, runtime=None): return 0.25")
    (problem,) = draw("sums-r", 1, task={"rewards": {"plugged": {"fn": "sums_r:plugged", "weight": 4.0}}})
    assert get_task("verifiers:sums-r").score(problem, problem["data"]["answer"])["reward"] == 6.25
    (lighter,) = draw("sums-r", 1, task={"rewards": {"correct": {"weight": 1.0}}})
    assert get_task("verifiers:sums-r").score(lighter, lighter["data"]["answer"])["reward"] == 1.25
    for rewards, message in (
        ({"ran": {"fn": "sums_r:ran"}}, r"needs a runtime in ran\(\), which TLT does not have"),
        ({"correct": {"fn": "sums_r:ran"}}, r"needs a runtime in correct\(\), which TLT does not have"),
        ({"other": {"fn": "sums_r:nothing"}}, "option task.rewards: cannot be loaded"),
        ({"other": {"weight": 1.0}}, "option task.rewards: cannot be loaded"),
    ):
        with refused(message):
            draw("sums-r", 1, task={"rewards": rewards})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Other(data, self.config.task)", "is a Other"),
        (
            "Task(data, vf.TaskConfig(rewards={'p': {'fn': 'x:y'}}))",
            "has a configuration of its own",
        ),
    ],
)
def test_a_task_with_other_rewards_than_its_tasksets_is_refused(
    write: Callable[..., None], made: str, message: str
) -> None:
    write("sums_o", made=made)
    with refused(rf"task \d+: {message}; give all tasks as Task\("):
        draw("sums-o", 1)


def test_a_taskset_that_walks_through_sets_gives_the_same_problems_in_every_process(
    write: Callable[..., None], tmp_path: Path
) -> None:
    names = '[f"{word} of {i}" for i in range(9) for word in {"red", "blue", "green", "black", "white"}]'
    write(
        "sums_s",
        made=f"Task(Data(prompt=sorted({names}, key=len)[i % 45] + f' {{i}}', answer=''), self.config.task)",
    )
    asked = "import json; from tlt.tasks.base import make_problems as m; "
    asked += "print(json.dumps(m('verifiers:sums-s', 20, 0, {'split': 'train', 'count': 45})))"
    drawn = []
    for seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        drawn.append(json.loads(done.stdout))
    assert drawn[0] == drawn[1]


def test_a_mistake_is_one_line(write: Callable[..., None]) -> None:
    write("sums_c")
    for name, options, message in (
        ("nowhere", {}, "verifiers:nowhere: cannot be loaded"),
        ("sums-c", {"cuont": 3}, "option cuont: Extra inputs are not permitted"),
        ("sums-c", {"count": 20}, r"has \d+ train problems; ask for no more"),
    ):
        with refused(message):
            draw(name, 50, **options)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verifiers", "verifiers.v1.utils.loaders"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(r"pip install 'verifiers"):
        get_task("verifiers:sums")


def test_an_endless_taskset_that_repeats_itself_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library need not be installed: the taskset is a stand-in. Its only prompt belongs to one of the
    two splits."""

    def endless() -> Iterator[int]:
        yield from range(100_000)
        raise AssertionError("it is read for ever")

    class Endless:
        bounded = False

        def __iter__(self) -> Iterator[int]:
            return endless()

    task = object.__new__(Verifiers)
    task.name = "endless"
    monkeypatch.setattr(task, "_make", lambda options: Endless(), raising=False)
    monkeypatch.setattr(task, "_check", lambda taskset, task: task, raising=False)
    monkeypatch.setattr(task, "_prompt", lambda task: {"prompt": "1+1"}, raising=False)
    other = "test" if split_of(str({"prompt": "1+1"})) == "train" else "train"
    with refused(f"task verifiers:endless: has 0 {other} problems; ask for no more"):
        task.draw_here(8, 0, other, 1.0, {})
