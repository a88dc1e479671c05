"""The recipes that play in other libraries' environments: their rows anywhere, the rest where the library is
installed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.tasks.environments.played import begin, environments, reward, say
from tlt.base.config.load import load_config
from tlt.tasks.base import make_problems


def rows(name: str, num: int = 20, split: str = "train") -> list[dict[str, Any]]:
    config = load_config(name)
    return make_problems(config.task.name, num, 0, {"split": split, **config.task.options})


def test_the_largest_number_is_the_answer_and_splits_share_no_question() -> None:
    train, test = rows("smollm2/skyrl-gym", 300), rows("smollm2/skyrl-gym", 50, "test")
    asked = [[*map(int, re.findall(r"\d+", row["messages"][-1]["content"]))] for row in train + test]
    assert [row["reward_spec"]["ground_truth"] for row in train + test] == [str(max(one)) for one in asked]
    assert not {(*sorted(one),) for one in asked[:300]} & {(*sorted(one),) for one in asked[300:]}


def test_skyrl_gym_asks_once_more() -> None:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    row, env = rows("smollm2/skyrl-gym")[0], environments("skyrl_gym:Env")
    right = f"#### {row['reward_spec']['ground_truth']}"
    assert begin(env, row) is None
    wrong = say(env, row, "#### 1", "")
    assert "only the final numeric answer" in str(wrong.text)
    last = say(env, row, right, wrong.state)
    assert last.text is None
    assert reward(env, row, last.state) == pytest.approx(1.1)


def test_the_count_goes_on_until_a_wrong_number() -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    row, env = rows("smollm2/verifiers")[0], environments("verifiers:Env")
    start = row["data"]["start"]
    assert begin(env, row) is None
    first = say(env, row, f"{start + 1}", "")
    assert first.text == f"{start + 2}"
    assert reward(env, row, first.state) == 0.25
    wrong = say(env, row, f"{start + 4}", first.state)
    assert (wrong.text, reward(env, row, wrong.state)) == (None, 0.25)


def test_the_suitcase_wants_all_that_is_packed() -> None:
    pytest.importorskip("openenv", reason="OpenEnv is not installed")
    from recipes.smollm2.suitcase_server import NUM_TURNS, Reply, Suitcase

    server = Suitcase()
    packed, rewards = [server.reset(seed=3).text], []
    for turn in range(1, NUM_TURNS + 1):
        said = server.step(Reply(text=", ".join(text[len("I pack ") : -1] for text in packed)))
        assert said.done == (turn == NUM_TURNS)
        rewards.append(said.reward)
        packed.append(said.text)
    assert sum(rewards) == pytest.approx(1.0)
    thing = server.reset(seed=3).text[len("I pack ") : -1]
    assert server.step(Reply(text=f"{thing}, a whale")).reward == 0.0
    assert server.step(Reply(text=thing)).reward == 0.1
