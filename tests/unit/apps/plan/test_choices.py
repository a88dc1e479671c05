"""What is chosen for a model and data of the user's own, and that every choice can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlt.apps.plan.choices import Choices, DataFacts, MachineFacts, ModelFacts, RunFacts, _plan, choose
from tlt.apps.plan.memory import plan_memory
from tlt.base.config.load import load_config
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig
from tlt.models.hf.families import load_model_config

HERE = Path(__file__).parents[2]
GIB = 2**30
CPUS = MachineFacts(0, 8, 32 * GIB)
ONE_GPU, EIGHT_GPUS = MachineFacts(1, 8, 80 * GIB), MachineFacts(8, 64, 80 * GIB)
CHAT = [{"role": "user", "content": "Why?"}]


def model(name: str = "Qwen2.5-7B", **facts: Any) -> ModelFacts:
    return ModelFacts(SHAPES[name], **{"has_chat_template": True, "stored_as": "bfloat16", **facts})


@pytest.fixture(scope="module", autouse=True)
def _shapes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "config.json").write_bytes((HERE / "published_configs" / "Qwen2.5-7B.json").read_bytes())
    SHAPES["Qwen2.5-7B"] = load_model_config(folder)
    SHAPES["small"] = load_model_config(HERE.parents[1] / "recipes/math/base")


SHAPES: dict[str, Any] = {}


def chosen(
    machine: MachineFacts = CPUS,
    row: dict[str, Any] | None = None,
    of: ModelFacts | None = None,
    num_rows: int = 1000,
    longest_prompt: int = 100,
    given: dict[str, Any] | None = None,
    **data: Any,
) -> Choices:
    rows = [row or {"question": "1 + 1?", "answer": "2"}]
    facts = RunFacts(of or model("small"), DataFacts(rows, num_rows, **data), machine, longest_prompt)
    return choose(facts, given or {})


# ── the data ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "columns", "chat", "task", "reward"),
    [
        ({"question": "1 + 1?", "answer": 2}, {"prompt": "question"}, True, "math", "task"),
        (
            {"problem": "1 + 1?", "solution": "so \\boxed{2}"},
            {"prompt": "problem", "answer": "solution"},
            True,
            "math",
            "task",
        ),
        ({"prompt": "Capital?", "ground_truth": "Paris"}, {"answer": "ground_truth"}, True, None, "exact"),
        ({"messages": CHAT}, None, None, None, "own"),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "2"}}, None, None, "math", "task"),
        ({"prompt_ids": [1, 2], "label": "yes"}, {"answer": "label"}, None, None, "exact"),
    ],
)
def test_columns_chat_and_scoring_follow_from_a_row(
    row: dict[str, Any], columns: Any, chat: Any, task: Any, reward: str
) -> None:
    found = chosen(row=row)
    values = found.values
    assert (values.get("task.columns"), values.get("task.chat"), values.get("task.name")) == (
        columns,
        chat,
        task,
    )
    assert found.reward == reward


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"body": "1 + 1?", "n": 1}, r"none of its columns body, n has a prompt's usual name; name it"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "So."}]}, "ends with the assistant's message"),
    ],
)
def test_rows_that_cannot_be_asked_are_refused_with_the_remedy(row: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        chosen(row=row)


@pytest.mark.parametrize(
    ("num_rows", "data", "split", "held_out", "num"),
    [
        (1000, {}, "train[:-64]", "train[-64:]", 64),
        (40, {}, "train[:-5]", "train[-5:]", 5),
        (5, {}, None, None, 0),
        (1000, {"test_split": "test"}, None, "test", None),
        (1000, {"train_split": None}, None, None, 0),
    ],
)
def test_rows_are_held_out_where_the_data_has_no_split_to_test_on(
    num_rows: int, data: dict[str, Any], split: Any, held_out: Any, num: Any
) -> None:
    values = chosen(num_rows=num_rows, **data).values
    keys = ("task.split", "evaluation.split", "evaluation.num_problems")
    assert tuple(map(values.get, keys)) == (split, held_out, num)
    assert values.get("rollout.problems_per_step") == (num_rows if num_rows < 8 else None)


# ── the training ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "machine", "rank", "rate"),
    [
        ("small", CPUS, 0, 1e-5),
        ("Qwen2.5-7B", ONE_GPU, 16, 1e-5),
        ("Qwen2.5-7B", EIGHT_GPUS, 0, 1e-6),
        ("Qwen2.5-7B", CPUS, 16, 1e-5),
    ],
)
def test_all_weights_are_trained_where_they_fit_else_adapters_at_ten_times_the_rate(
    name: str, machine: MachineFacts, rank: int, rate: float
) -> None:
    values = chosen(machine, of=model(name)).values
    assert values["lora.rank"] == rank
    assert values["optimizer.learning_rate"] == pytest.approx(rate)
    assert ("lora.base_dtype" in values) == (rank > 0 and machine.num_gpus > 0)
    assert ("parallel.param_dtype" in values) == (machine.num_gpus > 1)


def test_what_fits_nowhere_is_said_with_the_remedy() -> None:
    found = chosen(MachineFacts(0, 2, 8 * GIB), of=model())
    (why,) = [choice.why for choice in found.chosen if choice.key == "lora.rank"]
    assert "do not fit 8 GiB of memory: does not fit" in why
    assert "no key makes it fit: take a smaller model or larger devices" in why


def test_a_key_that_the_user_gives_wins_and_the_others_follow_it() -> None:
    given = {
        "lora.rank": 8,
        "sampling.max_tokens": 99,
        "evaluation.num_problems": 0,
        "task.name": "mine:TASK",
    }
    found = chosen(given=given)
    assert not given.keys() & found.values.keys()
    assert found.reward == "task"
    assert found.values["optimizer.learning_rate"] == pytest.approx(1e-4), "that of adapters"
    assert "task.split" not in found.values
    assert chosen(of=model(), given={"lora.rank": 0}).values["optimizer.learning_rate"] == 1e-6
    assert "task.chat" not in chosen(given={"task.chat": False}).values


@pytest.mark.parametrize("machine", [CPUS, ONE_GPU, EIGHT_GPUS])
def test_every_choice_is_a_key_with_a_reason_that_the_configuration_takes(machine: MachineFacts) -> None:
    found = chosen(machine, of=model())
    base = {"model": {"path": str(HERE)}, "task": {"data": str(HERE)}}
    load_config(base, found.values)
    assert all(choice.why for choice in found.chosen)


# ── the table of docs/memory.md ─────────────────────────────────────────────────────────────────────────────


QWENS = {
    "0.5B": ModelConfig("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, tie_embeddings=True),
    "1.5B": ModelConfig("qwen2", 151_936, 1536, 8960, 28, 12, 2, 128, tie_embeddings=True),
    "7B": ModelConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128),
}


def told(size: str, machine: MachineFacts) -> str:
    """Returns a row of the table: what is chosen for a Qwen2.5, and what the plan of memory says of it."""
    shape = replace(QWENS[size], max_positions=32_768)
    facts = RunFacts(
        ModelFacts(shape, True, "bfloat16"),
        DataFacts([{"question": "1?", "answer": "2"}], 1000),
        machine,
        100,
    )
    values = choose(facts, {}).values
    kind = f"LoRA of rank {values['lora.rank']}" if values["lora.rank"] else "all weights"
    kind += ", base in bfloat16" if "lora.base_dtype" in values else ""
    kind += ", FSDP in bfloat16" if "parallel.param_dtype" in values else ""
    kind += ", checkpointed" if "parallel.checkpoint_activations" in values else ""
    plan = plan_memory(_plan(facts, values))
    gib = max(plan.needed, plan.peak[1]) / GIB
    cells = (
        size,
        f"{machine.num_gpus} × {machine.num_bytes // GIB}",
        kind if gib * GIB <= machine.num_bytes else f"does not fit; {kind} takes least",
        f"{values.get('algorithm.tokens_per_micro_batch', 8192):,}",
        f"{values['optimizer.learning_rate']:.0e}",
        f"{gib:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def test_the_page_on_memory_shows_what_is_chosen_for_three_models_on_three_machines() -> None:
    machines = (MachineFacts(1, 8, 24 * GIB), ONE_GPU, EIGHT_GPUS)
    rows = [told(size, machine) for size in ("0.5B", "1.5B", "7B") for machine in machines]
    assert "\n".join(rows) in (HERE.parents[1] / "docs/memory.md").read_text()
