"""Conversations of verifiers: `run` talks to the policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tests.unit.tasks.environments.played import begin, environments, library, reward, say
from tlt.tasks.verifiers import Verifiers

ENV = "verifiers:Env"
GUESS = """
import random
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class Task(vf.Task[Data]):
    {more}

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(len(trace.assistant_messages) <= 2)

class Config(vf.TasksetConfig):
    prompt: str | None = None
    system: str | None = None

class Guess(vf.Taskset[Task, Config]):
    def load(self):
        about = dict(prompt=self.config.prompt, system_prompt=self.config.system)
        return [Task(Data(number=n % 10, **about), self.config.task) for n in range(100)]

class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    {seats}

class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        {first}
        number = task.data.number
        async with agents.player.interaction(task) as talk:
            said = await (talk.turn("Guess a digit.") if task.data.prompt is None else talk.turn())
            for left in (2, 1):
                if said.terminated or said.last_reply == str(number):
                    break
                try:
                    said = await talk.turn(f"No. Is it {{{hint}}}? {{left}} left.")
                except Exception:
                    raise AssertionError("a wait is no error") from None
        talk.trace.record_reward("found", float(talk.trace.last_reply == str(number)), 1.0)

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("turns", episode.traces[0].num_turns, 0.01)

__all__ = ["Guess", "GuessEnv"]
"""


@pytest.fixture(scope="module", params=["stand-in", "library"], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """By module: the library takes seconds to import."""
    with pytest.MonkeyPatch.context() as patch, library("verifiers", request.param == "stand-in", patch):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [*sys.modules]:
        if name.startswith("guess_"):
            del sys.modules[name]


def rows(
    folder: Path,
    name: str,
    more: str = "pass",
    seats: str = "pass",
    hint: str = "random.randint(0, 9)",
    first: str = "pass",
    **options: Any,
) -> list[dict[str, Any]]:
    (folder / f"guess_{name}.py").write_text(GUESS.format(more=more, seats=seats, hint=hint, first=first))
    drawn = Verifiers(f"guess-{name}").draw_here(20, 0, "train", 1.0, options)
    read: list[dict[str, Any]] = json.loads(json.dumps(drawn))
    return read


def test_run_talks_to_the_policy_and_its_rewards_are_summed(folder: Path) -> None:
    row, *_ = rows(folder, "a")
    number = row["data"]["number"]
    asked = environments(ENV)
    assert "prompt" not in row
    assert "messages" not in row
    assert begin(asked, row) == "Guess a digit."
    first = say(asked, row, "<think>?</think>x", "")
    assert str(first.text).startswith("No. Is it ")
    second = say(asked, row, "y", first.state)
    assert str(second.text).endswith("1 left.")
    last = say(asked, row, f" {number}", second.state)
    assert last.text is None
    assert reward(asked, row, last.state) == pytest.approx(1.03)
    early = say(asked, row, str(number), "")
    assert early.text is None
    assert reward(asked, row, early.state) == pytest.approx(1.51)


def test_a_conversation_that_was_cut_off_is_rewarded_as_it_is(folder: Path) -> None:
    row, *_ = rows(folder, "b")
    first = say(environments(ENV), row, "x", "")
    assert reward(environments(ENV), row, first.state) == pytest.approx(0.51)
    assert reward(environments(ENV), row, "") == pytest.approx(0.5)


def test_the_tasks_prompt_comes_first(folder: Path) -> None:
    row, *_ = rows(folder, "c", prompt="Which digit?")
    assert row["prompt"] == "Which digit?"
    assert begin(environments(ENV), row) is None
    assert str(say(environments(ENV), row, "x", "").text).endswith("2 left.")
    row, *_ = rows(folder, "d", system="Be brief.")
    assert [message["role"] for message in row["messages"]] == ["system", "user"]
    assert begin(environments(ENV), row) == "Guess a digit."


def test_a_file_is_a_taskset_wherever_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "guess_k.py"
    file.write_text(GUESS.format(more="pass", seats="pass", hint="1", first="pass"))
    row, *_ = json.loads(json.dumps(Verifiers(str(file)).draw_here(20, 0, "train", 1.0, {})))
    assert row["problem_id"].startswith("guess_k-")
    assert begin(environments(ENV), row) == "Guess a digit."
    said = say(environments(ENV), row, str(row["data"]["number"]), "")
    assert reward(environments(ENV), row, said.state) == pytest.approx(1.51)


def test_what_cannot_be_played_is_refused(folder: Path) -> None:
    row, *_ = rows(folder, "e", seats="judge: vf.AgentConfig = vf.AgentConfig()")
    with refused("verifiers:guess-e: has agents player, judge; take one of a single agent"):
        begin(environments(ENV), row)
    row, *_ = rows(folder, "f", more="@vf.stop\n    async def over(self, trace): return True")
    with refused("verifiers:guess-f: has @stop, which TLT does not have"):
        begin(environments(ENV), row)
    row, *_ = rows(folder, "g", hint="__import__('os').urandom(8)")
    said = say(environments(ENV), row, "x", "")
    with refused("verifiers:guess-g says something else when it is told the same again"):
        say(environments(ENV), row, "y", said.state)


def test_an_environment_may_draw_from_numpy(folder: Path) -> None:
    row, *_ = rows(folder, "h", hint="__import__('numpy').random.randint(10**9)")
    first = say(environments(ENV), row, "x", "")
    assert str(say(environments(ENV), row, "y", first.state).text).endswith("1 left.")


def test_a_run_without_the_tasks_conversation_is_refused(folder: Path) -> None:
    row, *_ = rows(folder, "i", first="return")
    with refused(r"verifiers:guess-i: run\(\) begins no conversation"):
        begin(environments(ENV), row)
    hidden = "task = type(task)(task.data.model_copy(update={'prompt': None}), task.config)"
    row, *_ = rows(folder, "j", first=hidden, prompt="You are impatient.")
    with refused(r"verifiers:guess-j: run\(\) begins with another prompt than the task's"):
        begin(environments(ENV), row)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tlt.tasks.environments.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with refused(r"environment: no module 'verifiers.*'; pip install "):
        environments(ENV)
