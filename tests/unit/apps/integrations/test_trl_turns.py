"""TRL's examples of tools and environments with our rollout function: what is learned is what TRL learns from the
same turns."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.training.environments import parts
from tests.unit.training.environments import trl_examples as examples
from tlt.base.types import Rollout, Turns, UserError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tlt.apps.integrations import trl_turns  # noqa: E402  # after the skips
from tlt.apps.integrations.trl import TLTRollout  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TRL's and transformers' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROOT = Path(__file__).parents[4]
CALLS = (
    *(parts.a_call("multiply", a=a, b=7) for a in range(4)),
    *(parts.a_call("async_add", a=a, b=9) for a in range(4)),
    *(parts.a_call("increment", step=step) for step in range(1, 6)),
    *(parts.a_call("run_code", code="print(1)"), parts.a_call("move", action="up")),
    parts.a_call("async_add", a=1, b=2) + parts.a_call("multiply", a=2, b=3),
    parts.a_call("async_add", a=1) + parts.a_call("multiply", a=2, b=3),
    parts.a_call("failing"),
    parts.a_call("cancelled"),
    parts.a_call("absent"),
    parts.a_call("multiply", a=1),
    '<tool_call>{"name": "multiply", </tool_call>',
)


def failing() -> str:
    """Always fails."""
    raise ValueError("never")


async def cancelled() -> str:
    """Is cancelled."""
    raise asyncio.CancelledError


def lists() -> list[tuple[str, int]]:
    """Returns a list, which TRL leaves to the template."""
    return [("a", 1)]


def a_row(content: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], **columns}


KINDS: dict[str, dict[str, Any]] = {
    "tools": {
        "tools": [examples.multiply, examples.async_add, failing, cancelled],
        "train_dataset": [a_row(f"{n} + {n}?") for n in range(4)],
    },
    "environment": {"environment_factory": examples.IncrementEnv},
    "both": {
        "tools": [examples.multiply, examples.async_add],
        "environment_factory": examples.IncrementEnv,
        "train_dataset": [a_row("Now.", row=n) for n in range(4)],
    },
    "several": {
        "environment_factory": {"coding": examples.CodingEnv, "game": examples.GameEnv},
        "train_dataset": [{"environment": name} for name in ("coding", "game") * 2],
    },
}


class Counted(examples.IncrementEnv):
    """Its target is its row's."""

    def reset(self, row: int, **columns: Any) -> str:
        self.counter, self.target = 0, row
        return f" {row}"


PROGRAM = """
import json, os, sys
import torch
from pathlib import Path
from tests.unit.apps.integrations import test_trl_turns as test
from tlt.apps.integrations.trl import TLTRollout

torch.set_num_threads(1)
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
rows = [test.a_row("Now.", row=row) for row in range(4)]
kind = {"environment_factory": test.Counted, "tools": [test.examples.async_add], "train_dataset": rows}
rollout = TLTRollout(max_batch_size=2)
folder = Path(sys.argv[1])
trainer, heard = test.make_trainer(folder / "model", folder / "run", kind, rollout, per_device_train_batch_size=8 // size)
trainer.train()
(folder / f"of-{size}.rank{rank}").write_text(json.dumps(heard.calls))
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a template that TRL knows and replaces, for it rewrites thoughts."""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return parts.write_model(tmp_path_factory.mktemp("trl") / "model", 0, CALLS, template)


class Heard:
    """A reward function; keeps what it is given."""

    __name__ = "heard"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, completions: list[Any], completion_ids: Any, **columns: Any) -> list[float]:
        environments = [(type(one).__name__, vars(one)) for one in columns.get("environments") or ()]
        told = {"completions": completions, "ids": completion_ids, "environments": environments}
        self.calls.append(copy.deepcopy(told))
        return [len(json.dumps(completion)) % 17 / 16 for completion in completions]


class Recorder:
    """Keeps each batch's responses."""

    def __init__(self, function: TLTRollout) -> None:
        self.function = function
        self.batches: list[list[Rollout]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = self.function(prompts, trainer)
        turns = self.function._attached.turns
        assert turns is not None
        self.batches.append([*turns._played])
        return output


class Replay:
    """TRL's own turns, with the tokens of recorded responses in place of new ones."""

    def __init__(self, trainer: Any, batches: Sequence[Sequence[Rollout]]) -> None:
        self.batches = iter(batches)
        trainer._generate_single_turn = self

    def __call__(
        self, begun: list[list[int]], images: Any, fields: Any, num_generations: int, **more: Any
    ) -> tuple[list[list[int]], None]:
        if num_generations > 1:  # a first turn
            self.batch = next(self.batches)
        left = [*self.batch]
        return [self.next_turn(ids, left) for ids in begun], None

    def next_turn(self, begun: list[int], left: list[Rollout]) -> list[int]:
        for rollout in left:
            given = () if rollout.turns is None else rollout.turns.given
            starts, ends = [0, *(end for _, end in given)], [*(first for first, _ in given), None]
            for start, end in zip(starts, ends, strict=True):
                if [*rollout.prompt_ids, *rollout.token_ids[:start]] == begun:
                    left.remove(rollout)
                    return [*rollout.token_ids[start:end]]
        raise AssertionError("TRL would have gone on from other tokens")


def make_trainer(
    model: Path, folder: Path, kind: dict[str, Any], rollout: Any = None, **changes: Any
) -> tuple[Any, Heard]:
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 240,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    off = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }
    rows, heard = kind.get("train_dataset"), Heard()
    given = {**kind, "train_dataset": None if rows is None else datasets.Dataset.from_list(rows)}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=heard,
        args=trl.GRPOConfig(output_dir=str(folder), **(settings | off | changes)),
        rollout_func=rollout,
        **given,
    )
    return trainer, heard


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def figures(trainer: Any) -> list[dict[str, float]]:
    names = ("tools/", "completions/", "reward", "loss", "grad_norm")
    return [
        {name: value for name, value in line.items() if name.startswith(names)}
        for line in trainer.state.log_history
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_trl_learns_from_our_turns_what_it_learns_from_its_own(
    model: Path, tmp_path: Path, kind: str
) -> None:
    """Its own loop, fed with the same turns, makes the same calls and has the same tokens, masks, messages,
    rewards and weights."""
    recorder = Recorder(TLTRollout(speculation="3x2x6"))
    limit = {"max_tool_calling_iterations": 1 if kind == "both" else None}
    ours, told = make_trainer(model, tmp_path / "ours", KINDS[kind], recorder, **limit)
    ours.train()
    theirs, known = make_trainer(model, tmp_path / "theirs", KINDS[kind], **limit)
    Replay(theirs, recorder.batches)
    theirs.train()
    assert told.calls == known.calls
    assert figures(ours) == figures(theirs)
    for name, tensor in weights(theirs).items():
        assert torch.equal(weights(ours)[name], tensor), name
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(ours).items())
    played = [rollout for batch in recorder.batches for rollout in batch]
    assert sum(len(rollout.turns.given) for rollout in played if rollout.turns) > 2
    assert any(rollout.finish_reason == "turns" for rollout in played) == (kind == "both")


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_speculation_changes_no_turn(model: Path, tmp_path: Path, kind: str) -> None:
    told, learned = [], []
    for speculation in ("off", "3x1x3"):
        trainer, heard = make_trainer(
            model, tmp_path / speculation, KINDS[kind], TLTRollout(speculation=speculation)
        )
        trainer.train()
        told.append(heard.calls)
        learned.append(weights(trainer))
    assert told[0] == told[1]
    for name, tensor in learned[0].items():
        assert torch.equal(learned[1][name], tensor), name


def test_the_environment_alone_rewards_as_in_trls_example(model: Path, tmp_path: Path) -> None:
    trainer, _ = make_trainer(model, tmp_path, KINDS["environment"], TLTRollout())
    trainer.train()
    logged = [line for line in trainer.state.log_history if "rewards/IncrementEnv/mean" in line]
    assert len(logged) == 2


def test_a_list_is_left_to_the_template(model: Path, tmp_path: Path) -> None:
    trainer, _ = make_trainer(model, tmp_path, {**KINDS["tools"], "tools": [lists]}, TLTRollout())
    calls = trl_turns.Calls(trl_turns.Instances(trainer))
    call = {"type": "function", "function": {"name": "lists", "arguments": {}}}
    calls.ask(("1", 0), trl_turns.Ask("call", {}, name="lists", arguments=call))
    (told,) = calls.collect()
    assert told.answer.text == "[('a', 1)]"
    assert calls.contents["1", 0] == [("a", 1)]


def parted(num_processes: int, *tools: Any, **more: Any) -> trl_turns.Calls:
    """Beside what of a trainer the calls need."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=num_processes),
        environments=None,
        _standalone_tools=tools,
        **more,
    )
    return trl_turns.Calls(trl_turns.Instances(trainer))


def ask(calls: trl_turns.Calls, name: str) -> None:
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    calls.ask(("1", 0), trl_turns.Ask("call", {}, name=name, arguments=call))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.timeout(30)
def test_a_cancelled_call_is_answered(loop: asyncio.AbstractEventLoop) -> None:
    calls = parted(1, cancelled, async_loop=loop)
    ask(calls, "cancelled")
    (told,) = calls.collect(timeout=20.0)
    assert (told.answer.text, told.answer.is_error) == ("", False)  # as in TRL


@pytest.mark.timeout(30)
def test_an_error_that_cannot_be_written_ends_the_run(loop: asyncio.AbstractEventLoop) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    async def silent() -> None:
        raise Silent

    calls = parted(1, silent, async_loop=loop)
    ask(calls, "silent")
    with pytest.raises(ZeroDivisionError):
        calls.collect(timeout=20.0)


@pytest.mark.timeout(30)
def test_a_late_result_is_no_answer_to_the_next_question(loop: asyncio.AbstractEventLoop) -> None:
    goes_on = asyncio.Event()

    async def late() -> str:
        await goes_on.wait()
        return "late"

    def new() -> str:
        return "new"

    calls = parted(1, late, new, async_loop=loop)
    ask(calls, "late")
    calls.abandon()
    loop.call_soon_threadsafe(goes_on.set)
    while not calls.has_news:
        time.sleep(0.01)
    ask(calls, "new")
    assert [told.answer.text for told in calls.collect()] == ["new"]


def test_only_a_call_that_can_be_made_is_awaited() -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "async_add", "arguments": arguments}}

    assert trl_turns._waits(examples.async_add, call(a=1, b=2))
    assert not trl_turns._waits(examples.async_add, call(a=1))
    assert not trl_turns._waits(examples.multiply, call(a=1, b=2))


def test_lists_that_json_changes_are_refused_between_processes() -> None:
    calls = parted(2, lists)
    ask(calls, "lists")
    with pytest.raises(UserError, match=r"tools: lists returned \[\('a', 1\)\], which JSON does not keep"):
        calls.collect()


def test_images_and_text_prompts_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tools: one returned an image"):
        trl_turns._check_text([{"type": "image", "image": None}])
    trainer, _ = make_trainer(model, tmp_path, KINDS["tools"], TLTRollout())
    with pytest.raises(UserError, match="tools: are called in conversations, but prompt is text"):
        TLTRollout()(["1 + 1?"], trainer)


def test_environments_travel_between_processes() -> None:
    """As pickles, and back to the trainer for its rewards; a class that cannot be pickled is refused."""

    class Local:
        pass

    instance = examples.IncrementEnv()
    instance.reset()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=2), environments=[instance], _standalone_tools=[]
    )
    instances = trl_turns.Instances(trainer)
    (state,) = instances.states()
    calls = trl_turns.Calls(instances)
    call = {"type": "function", "function": {"name": "increment", "arguments": {"step": 4}}}
    calls.ask(("1", 0), trl_turns.Ask("call", {}, state, "increment", call))
    (told,) = calls.collect()
    assert (told.answer.text, instance.counter) == ("4", 0)
    instances.take_back([told.answer.state])
    assert trainer.environments[0].counter == 4
    trainer.environments = [Local()]
    with pytest.raises(UserError, match=r"Local cannot be pickled .* give its class __getstate__"):
        instances.states()


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: [*chain.from_iterable(one[key] for one in ranks)] for key in ranks[0]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_play_the_turns_of_one(model: Path, tmp_path: Path) -> None:
    """They share the responses; each has its own environments back for its rewards."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "program.py").write_text(PROGRAM)
    told = []
    for ranks in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *(launcher if ranks > 1 else []), "program.py", str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        files = [json.loads((tmp_path / f"of-{ranks}.rank{rank}").read_text()) for rank in range(ranks)]
        told.append([joined(step) for step in zip(*files, strict=True)])
    assert told[0] == told[1]
    counters = [about["counter"] for step in told[0] for _, about in step["environments"]]
    assert len(set(counters)) > 1


def test_the_mask_leaves_out_what_was_given() -> None:
    rollout = Rollout("1", 0, (1,), (5, 6, 7, 8, 9), (0.0,) * 5, "stop", 0, turns=Turns(((2, 4),)))
    assert trl_turns.mask(rollout) == [1, 1, 0, 0, 1]
