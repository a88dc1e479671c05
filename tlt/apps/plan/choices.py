"""Chooses a run's keys for a model and data of the user's own.

    the model: shape, window, chat template ─┐
    the data: columns, rows, splits          ├─ choose ──▶ Setting(key, value, why), …
    the machine: GPUs, cores, memory ────────┤
    the keys that the user gives, which win ─┘

The learning rate of all weights is TRL's and verl's default; ten times that for adapters follows "LoRA
Without Regret" (Schulman et al., 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tlt.apps.plan.fit import fits, judge
from tlt.apps.plan.sizes import GIB, PlannedRun, short_count
from tlt.base.config.mistakes import validate
from tlt.base.config.schema import Config
from tlt.base.io.files import Record
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig
from tlt.models.hf.weights import count_parameters
from tlt.tasks.answers import find_answer
from tlt.tasks.numbers import gold_text, to_number
from tlt.training.build.ranks import RankChoice, ranks_on_cpus, standing_bytes
from tlt.training.ranks.sharding import choose_layout

PROMPTS = ("prompt", "messages", "question", "problem", "query", "instruction", "input", "prompt_ids")
"""Column names of prompts, the likeliest first."""
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "expected_answer", "gold", "target", "label")
"""Column names of answers, the likeliest first."""

SMALL_MODEL = 10**9
RATES = {"all weights": (1e-5, 1e-6), "adapters": (1e-4, 1e-5)}
"""Learning rates below SMALL_MODEL parameters (recipes/smollm2 learns at these), and above."""
LORA = {"lora.rank": 16, "lora.alpha": 32.0}
MOST_TOKENS = {"cuda": 2048, "cpu": 512}
"""Response length where the window leaves more: a step then takes minutes, not hours."""
SHORT_ANSWERS, TOKENS_PER_CHARACTER = 4, 4
"""A response that is compared with the answer word for word gets 1/4 of MOST_TOKENS, to think, and 4 tokens
per character of the longest answer."""
MOST_EPOCHS = 3
"""Passes over the rows; TRL's default, too."""
MICRO_BATCH, MICRO_BATCHES = "algorithm.tokens_per_micro_batch", (8192, 4096, 2048)
FILLED = 0.85
"""Share of a device's memory that the plan may fill: plans fell short of measurements by up to a sixth."""
HELD_OUT = 64
"""Of data without a test split; at most an eighth of the rows."""


@dataclass(frozen=True)
class ModelFacts:
    """stored_as: the dtype of its files."""

    shape: ModelConfig
    has_chat_template: bool
    stored_as: str = "float32"


@dataclass(frozen=True)
class DataFacts:
    """rows: some of the first, with the data's own column names.
    train_split: None: rows cannot be held out of it.
    is_made: whether a task makes the rows, scores them, and makes test rows.
    """

    rows: Sequence[Record]
    num_rows: int
    test_split: str | None = None
    train_split: str | None = "train"
    can_verify: bool = True
    is_made: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """num_bytes: memory of a GPU, else of the machine."""

    num_gpus: int
    num_cores: int
    num_bytes: int

    @property
    def device(self) -> str:
        return "cuda" if self.num_gpus else "cpu"


@dataclass(frozen=True)
class RunFacts:
    """longest_prompt: in tokens.
    num_problems: None: unknown.
    """

    model: ModelFacts
    data: DataFacts
    machine: MachineFacts
    longest_prompt: int = 0
    num_problems: int | None = None


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Choices:
    """reward: how responses are scored where the user has no function: "task", "exact" (comparison with the
    answer), or "own" (the data does not say what is right).
    """

    chosen: tuple[Setting, ...]
    reward: str

    @property
    def values(self) -> dict[str, Any]:
        return {choice.key: choice.value for choice in self.chosen}


def choose(facts: RunFacts, given: Mapping[str, Any]) -> Choices:
    """given: the user's values by key, which are left out, such as {"lora.rank": 8}."""
    about_data = choose_data(facts.model, facts.data, given)
    found = [*about_data.chosen, *_choose_lengths(facts, about_data.reward, given)]
    for choose_more in (_choose_steps, _choose_weights, _choose_rates, _choose_ranks):
        values = {choice.key: choice.value for choice in found} | dict(given)
        found += choose_more(facts, values)
    return Choices(tuple(choice for choice in found if choice.key not in given), about_data.reward)


# ── the data ────────────────────────────────────────────────────────────────────────────────────────────────


def choose_data(model: ModelFacts, data: DataFacts, given: Mapping[str, Any]) -> Choices:
    """Raises UserError for rows without a prompt."""
    if data.is_made:
        chosen = _choose_chat(model, data, next(name for name in PROMPTS if name in data.rows[0]))
        return Choices(tuple(choice for choice in chosen if choice.key not in given), "task")
    columns = given.get("task.columns", {})
    prompt = columns.get("prompt") or columns.get("messages") or _column(data, PROMPTS)
    if prompt is None:
        known = ", ".join(name for name in data.rows[0] if name != "problem_id")
        remedy = "name it, as in --task.columns '{prompt = \"text\"}'"
        raise UserError(f"task.data: none of its columns {known} has a prompt's usual name; {remedy}")
    answer = columns.get("answer") or _answer_column(data)
    reward = "task" if "task.name" in given or given.get("rewards.functions") else _scoring(data, answer)
    found: list[Setting] = []
    if reward == "task" and "task.name" not in given and not given.get("rewards.functions"):
        found.append(
            Setting("task.name", "math", f"{answer} holds numbers or formulas: math-verify compares")
        )
    renamed = {"prompt": prompt} if prompt not in ("prompt", "messages", "prompt_ids") else {}
    if answer not in (None, "answer", _VERL):
        renamed["answer"] = str(answer)
    if renamed:
        why = ", ".join(f"{theirs} holds the {ours}" for ours, theirs in renamed.items())
        found.append(Setting("task.columns", renamed, why))
    found += _choose_chat(model, data, prompt)
    found += _choose_held_out(data, given)
    if data.num_rows < 8:
        found.append(Setting("rollout.problems_per_step", data.num_rows, "there are no more rows"))
    return Choices(tuple(choice for choice in found if choice.key not in given), reward)


_VERL = "reward_model.ground_truth"


def _column(data: DataFacts, names: Sequence[str]) -> str | None:
    return next((name for name in names if all(row.get(name) is not None for row in data.rows)), None)


def _answer_column(data: DataFacts) -> str | None:
    is_verl = all(isinstance(row.get("reward_model"), Mapping) for row in data.rows)
    return _VERL if is_verl else _column(data, ANSWERS)


def _scoring(data: DataFacts, answer: str | None) -> str:
    if answer is None:
        return "own"
    answers = _answers(data, answer)
    if not all(text and any(map(str.isalnum, text)) for text in answers):
        return "own"  # a list, say, or nothing that a response can say
    return "task" if data.can_verify and all(_is_mathematics(str(text)) for text in answers) else "exact"


def _answers(data: DataFacts, answer: str) -> list[str | None]:
    found = [row["reward_model"].get("ground_truth") if answer == _VERL else row[answer] for row in data.rows]
    return [str(value) if isinstance(value, bool) else gold_text(value) for value in found]


def _is_mathematics(text: str) -> bool:
    return to_number(text) is not None or find_answer(text, "marked") is not None or "\\" in text


def _choose_chat(model: ModelFacts, data: DataFacts, prompt: str) -> Iterator[Setting]:
    first = data.rows[0][prompt]
    if isinstance(first, str) and model.has_chat_template:
        yield Setting("task.chat", True, f"{prompt} is text, and the tokenizer has a chat template")
    if prompt == "prompt_ids" or isinstance(first, str):
        return
    if not model.has_chat_template:
        what = f"{prompt} holds chat messages, but the model's tokenizer has no chat template"
        raise UserError(f"task.data: {what}; give text, or an instruct model")
    ends = [row[prompt][-1] for row in data.rows if isinstance(row.get(prompt), list) and row[prompt]]
    if any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in ends):
        what = f"{prompt} ends with the assistant's message, which the model shall write"
        raise UserError(f"task.data: {what}; leave that message out of the rows")


def _choose_held_out(data: DataFacts, given: Mapping[str, Any]) -> Iterator[Setting]:
    if {"evaluation.data", "evaluation.split", "task.split"} & given.keys():
        return
    if given.get("evaluation.num_problems") == 0:
        return
    if data.test_split is not None:
        yield Setting("evaluation.split", data.test_split, "the data's own split to test on")
        return
    num, split = min(HELD_OUT, data.num_rows // 8), data.train_split
    if not num or split is None:
        why = (
            f"{data.num_rows} rows are too few to hold some out"
            if split
            else "the data has no split to test on"
        )
        yield Setting("evaluation.num_problems", 0, why)
        return
    yield Setting("task.split", f"{split}[:-{num}]", f"of {data.num_rows:,} rows, all but those held out")
    yield Setting("evaluation.split", f"{split}[-{num}:]", "the last rows are held out: nothing else tests")
    yield Setting("evaluation.num_problems", num, "all of these")


# ── the training ────────────────────────────────────────────────────────────────────────────────────────────


def _choose_lengths(facts: RunFacts, reward: str, given: Mapping[str, Any]) -> Iterator[Setting]:
    window, most = facts.model.shape.max_positions, MOST_TOKENS[facts.machine.device]
    room = window - facts.longest_prompt
    why = f"raise it where answers are longer: the window leaves {room:,}"
    if reward == "exact":
        columns = given.get("task.columns", {})
        answers = _answers(facts.data, columns.get("answer") or _answer_column(facts.data) or "")
        longest = max(len(text or "") for text in answers)
        most = min(most, most // SHORT_ANSWERS + TOKENS_PER_CHARACTER * longest)
        why = f"answers have up to {longest} characters: the rest is to think; the window leaves {room:,}"
    if room < most:
        why = f"all that the window of {window:,} leaves after the longest prompt"
    yield Setting("sampling.max_tokens", min(room, most), why)


def _choose_steps(facts: RunFacts, values: Mapping[str, Any]) -> Iterator[Setting]:
    config, num = _config(values), facts.num_problems
    if num is None:
        return
    most = MOST_EPOCHS * (num // config.rollout.problems_per_step)
    if 0 < most < config.run.num_steps:
        rows = f"{MOST_EPOCHS} times through {num:,} rows"
        yield Setting("run.num_steps", most, f"policy updates: {rows}; raise it while evaluations improve")


def _choose_weights(facts: RunFacts, values: Mapping[str, Any]) -> Iterator[Setting]:
    ways = list(_ways(facts, values))
    tries = [(keys, _plan(facts, dict(values) | keys)) for keys in ways]
    roomy = (keys for keys, run in tries if fits(replace(run, rank_bytes=_filled(run))))
    keys = next(roomy, next((keys for keys, run in tries if fits(run)), ways[-1]))
    run, machine = _plan(facts, dict(values) | keys), facts.machine
    memory = f"{machine.num_bytes / GIB:.0f} GiB"
    where = f"{machine.num_gpus} GPU(s) of {memory}" if machine.num_gpus else f"{memory} of memory"
    size = f"{short_count(count_parameters(facts.model.shape))} parameters"
    told = f"fit {where}" if fits(run) else f"do not fit {where}: {judge(run).line}"
    kind = "adapters beside" if run.config.lora.is_used else "all weights of"
    whys = {"lora.rank": f"{kind} {size} {told}"} | _WHYS
    for key, value in keys.items():
        if key != MICRO_BATCH or value != MICRO_BATCHES[0]:
            yield Setting(key, value, whys[key])


def _filled(run: PlannedRun) -> int:
    assert run.rank_bytes is not None, "the machine's memory is known"
    return int(run.rank_bytes * FILLED)


_WHYS = {
    "lora.alpha": "twice the rank, as in TRL",
    "lora.base_dtype": "the model is stored in it",
    "parallel.param_dtype": "the update computes in it; what is trained stays in float32",
    "parallel.checkpoint_activations": "saves memory, for a third more time of the update",
    "algorithm.tokens_per_micro_batch": "as many at a time as the memory holds",
}


def _ways(facts: RunFacts, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    is_stored_in_half = facts.model.stored_as == "bfloat16" and facts.machine.num_gpus > 0
    half = {"lora.base_dtype": "bfloat16"} if is_stored_in_half else {}
    kinds: list[dict[str, Any]] = [{"lora.rank": 0}, LORA | half]
    if "lora.rank" in values:
        kinds = [half if values["lora.rank"] else {}]
    sharded = {"parallel.param_dtype": "bfloat16"} if _is_sharded(facts.machine, values) else {}
    for kind, saves, tokens in product(kinds, (False, True), MICRO_BATCHES):
        keys = kind | sharded | {MICRO_BATCH: tokens}
        keys |= {"parallel.checkpoint_activations": True} if saves else {}
        yield {key: value for key, value in keys.items() if key not in values}


def _is_sharded(machine: MachineFacts, values: Mapping[str, Any]) -> bool:
    num = values.get("run.num_ranks", "auto")
    num_ranks = max(machine.num_gpus, 1) if num == "auto" else num
    return choose_layout(values.get("parallel.policy", "auto"), num_ranks, machine.device).is_sharded


def _plan(facts: RunFacts, values: Mapping[str, Any]) -> PlannedRun:
    config, machine = _config(values), facts.machine
    num, is_gpu = _ranks(facts, config).number, machine.num_gpus > 0
    sharing = 1 if is_gpu else num
    each = machine.num_bytes // sharing
    return PlannedRun(config, facts.model.shape, None, num, is_gpu, each, facts.longest_prompt, sharing)


def _config(values: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {"model": {"path": Path()}, "task": {"name": "countdown"}}
    for key, value in values.items():
        section, name = key.split(".", 1)
        if section in _WEIGHING or key in _WEIGHING:
            sections.setdefault(section, {})[name] = value
    return validate(Config, sections, "command line", {tuple(key.split(".")): f"--{key}" for key in values})


_WEIGHING = {"run", "parallel", "lora", "rollout", "sampling", "algorithm"} | {
    "evaluation.num_problems",
    "evaluation.samples_per_problem",
    "evaluation.temperature",
}


def _ranks(facts: RunFacts, config: Config) -> RankChoice:
    machine, wanted = facts.machine, config.run.num_ranks
    if wanted != "auto" or machine.num_gpus:
        return RankChoice(machine.num_gpus if wanted == "auto" else wanted, "one for each GPU")
    by_cores, each = (
        machine.num_cores // config.run.threads_per_rank,
        standing_bytes(config, facts.model.shape),
    )
    return ranks_on_cpus(by_cores, machine.num_bytes, each, config.rollout.problems_per_step)


def _choose_rates(facts: RunFacts, values: Mapping[str, Any]) -> Iterator[Setting]:
    is_large = count_parameters(facts.model.shape) >= SMALL_MODEL
    kind = "adapters" if values.get("lora.rank") else "all weights"
    size = f"a model {'from' if is_large else 'below'} a billion parameters"
    ten_times = ", ten times that of all weights (LoRA Without Regret)" if kind == "adapters" else ""
    yield Setting("optimizer.learning_rate", RATES[kind][is_large], f"for {kind} of {size}{ten_times}")


def _choose_ranks(facts: RunFacts, values: Mapping[str, Any]) -> Iterator[Setting]:
    ranks, is_gpu = _ranks(facts, _config(values)), facts.machine.num_gpus > 0
    sharded = ", the policy in slices (FSDP2)" if _is_sharded(facts.machine, values) else ""
    yield Setting("run.num_ranks", "auto", f"here {ranks.number}: {ranks.reason}{sharded}")
    yield Setting("run.dtype", "auto", "here bfloat16, on GPUs" if is_gpu else "here float32, on CPUs")
