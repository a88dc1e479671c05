"""A run without a configuration: what is looked up for it, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from tests.standin import Hub, serve_hub
from tests.unit.apps.cli.parts import write_lines
from tests.unit.base.io.test_hub import point_at
from tlt.apps.run.own import choose_own
from tlt.base.config.load import is_own
from tlt.base.types import UserError

MODEL = Path(__file__).parents[4] / "recipes/math/base"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve_hub() as hub:
        point_at(monkeypatch, hub.url)
        yield hub
        close_session()


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("train.jsonl", "test.jsonl"), "test"), (("part-1.jsonl", "part-2.jsonl"), "train[-4:]")],
)
def test_a_folder_is_tested_on_its_own_split_or_on_its_last_rows(
    names: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    for name in names:
        rows = ({"prompt": f"{name} {n} + 1?", "answer": n + 1} for n in range(16))
        write_lines(str(tmp_path / name), *rows)
    own = choose_own([f"--model.path={MODEL}", f"--task.data={tmp_path}"])
    assert own.config.evaluation.split == expected


def test_a_task_that_makes_its_problems_needs_no_data(hub: Hub) -> None:
    hub.add("me/model", MODEL)
    words = ["--model.path=me/model", "--task.name=countdown", "--run.device=cpu"]
    own = choose_own([*words, "--task.options.max_number=9", "--sampling.max_tokens=16"])
    assert (own.config.task.chat, own.config.task.data, own.config.evaluation.split) == (True, None, None)
    assert own.config.optimizer.learning_rate == 1e-5
    assert own.choices.values.keys() >= {"task.chat", "optimizer.learning_rate", "run.num_ranks"}
    assert all(max(row["numbers"]) <= 9 for row in own.rows)
    with pytest.raises(UserError, match=r"^task countdown: .*nonsense"):
        choose_own([*words, "--task.options.nonsense=1"])


def test_a_run_without_a_file_needs_a_model_and_data_or_a_task() -> None:
    assert is_own(["--model.path", "m", "--task.data=d"])
    assert is_own(["--model.path", "m", "--task.name", "countdown"])
    assert not is_own(["--model.path", "m"])
    assert not is_own([])
