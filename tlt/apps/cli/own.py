"""`tlt init own`."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tlt.apps.cli.engine import show_busy
from tlt.apps.cli.init import print_folder
from tlt.apps.cli.options import WithOverrides, Written
from tlt.apps.cli.own_reward import EXACT, RIGHT_ANSWERS, RIGHT_TEXTS, TEST_HEAD, TO_FILL_IN
from tlt.apps.cli.own_reward import TEST as TEST_END
from tlt.base.config.schema import Config
from tlt.base.io.files import write_jsonl
from tlt.base.io.recipes import check_free
from tlt.base.types import UserError

if TYPE_CHECKING:
    from tlt.apps.plan.choices import Setting
    from tlt.apps.run.own import OwnRun

CONFIG, REWARD, TEST, ROWS = "train.toml", "reward.py", "test_reward.py", "rows.jsonl"


class InitOwn(WithOverrides):
    """Begin with a model and data of your own: looks at both and at this machine, and writes what follows.

    tlt init own DIR --model MODEL --data DATA [--reward FILE.py:FUNCTION] [--section.key VALUE ...]

    DIR gets a short configuration, a reward to fill in unless the data says what is right, a test of the
    reward, and five rows of the data.
    """

    folder: Annotated[Path, Written("DIR", is_alone=True)]
    """Folder to write to, new or empty."""
    model: Annotated[Path, Written("MODEL")]
    """Hugging Face checkpoint folder, or OWNER/NAME or OWNER/NAME@REVISION on the hub."""
    data: Annotated[Path, Written("DATA")]
    """JSONL or Parquet file, a folder of them, or a dataset of the Hugging Face hub."""
    reward: Annotated[str | None, Written("FILE.py:FUNCTION")] = None
    """Reward function in TRL's signature, which is copied to DIR."""


def run(options: InitOwn) -> int:
    check_free(options.folder)
    source = None if options.reward is None else find_function(options.reward)
    words = [f"--model.path={options.model}", f"--task.data={options.data}", *options.overrides]
    words.append(f"--run.out_dir={options.folder / 'runs' / 'own'}")
    if source is not None:
        words.append(f"--rewards.functions={source[0].stem}:{source[1]}")
    with show_busy("looking at model and data"):
        from tlt.apps.run.own import choose_own

        own = choose_own(words, writes_reward=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / CONFIG).write_text(to_toml(own), encoding="utf-8")
    write_jsonl(options.folder / ROWS, own.rows)
    if source is not None:
        shutil.copyfile(source[0], options.folder / source[0].name)
    functions = own.config.rewards.functions
    if functions:
        _write_reward(options.folder, own, writes_function=source is None)
    print_choices(own.choices.chosen)
    print_folder(options.folder, sorted(options.folder.iterdir()))
    test = f"python {TEST} && " if functions else ""
    print(f"Next: cd {shlex.quote(str(options.folder))} && {test}tlt train {CONFIG}")
    return 0


def find_function(text: str) -> tuple[Path, str]:
    """Raises UserError."""
    name, _, function = text.rpartition(":")
    file = Path(name)
    if not function.isidentifier() or not file.stem.isidentifier() or file.suffix != ".py":
        raise UserError(f"--reward: is {text}; write FILE.py:FUNCTION, such as my_rewards.py:accuracy")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"--reward: {file} cannot be read ({error}); correct it") from None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = [node.name for node in tree.body if isinstance(node, kinds)]
    if function not in defined:
        raise UserError(f"--reward: {file} defines no {function}, only {', '.join(defined)}; correct it")
    return file, function


def print_choices(choices: Iterable[Setting]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", ratio=1)
    table.add_column(style="dim", ratio=1)
    for choice in choices:
        table.add_row(f"{choice.key} = {to_value(choice.value)}", choice.why)
    console = Console(highlight=False, emoji=False, markup=False)
    console.print("chosen for this model, this data and this machine:")
    console.print(table)


# ── the configuration ───────────────────────────────────────────────────────────────────────────────────────


def to_toml(own: OwnRun) -> str:
    about = _BEGINNING | {choice.key: choice.why for choice in own.choices.chosen}
    given = _values(own.config, [key for key in own.given if key not in _BEGINNING])
    values = _beginning(own.config) | own.choices.values | given
    if own.config.rewards.functions:
        values["rewards.functions"] = list(own.config.rewards.functions)
        about["rewards.functions"] = f"{REWARD}, to fill in" if "rewards.functions" not in given else "yours"
    about |= {key: "given" for key in given if key not in about}
    lines = [
        "# RL of your model on your data: tlt train train.toml, in this folder. Written by tlt init own."
    ]
    lines += ["# Every value can be overridden: --section.key value; tlt train --help explains every key."]
    for section in Config.model_fields:
        own_keys = [key for key in values if key.partition(".")[0] == section]
        keys = {key: values[key] for key in own_keys if values[key] is not None}
        if keys:
            lines += ["", f"[{section}]"]
        for key, value in keys.items():
            written = f"{key.partition('.')[2]} = {to_value(value)}"
            lines.append(f"{written:<40}  # {about[key]}" if about[key] else written)
    return "\n".join(lines) + "\n"


_BEGINNING = {
    "run.out_dir": "everything the run writes",
    "run.num_steps": "policy updates",
    "model.path": "",
    "task.data": "",
    "rollout.problems_per_step": "rows that each step answers",
    "rollout.samples_per_problem": "responses to each",
    "rollout.speculation": "changes the time alone",
}


def _beginning(config: Config) -> dict[str, Any]:
    return _values(config, _BEGINNING) | {"run.out_dir": "runs/own"}


def _values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """As the configuration has them: with whole paths, since the file lies elsewhere."""
    dumped = config.model_dump(mode="json")
    return {key: dumped[key.partition(".")[0]][key.partition(".")[2]] for key in keys}


def to_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_bare(key)} = {to_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_value, value))}]"
    written = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return written.replace("\x7f", "\\u007F")


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


# ── the reward ──────────────────────────────────────────────────────────────────────────────────────────────


_ANSWERS_OF_VERL = 'answers = [model["ground_truth"] for model in reward_model]'


def _write_reward(folder: Path, own: OwnRun, writes_function: bool) -> None:
    in_verl = all("reward_model" in row and "answer" not in row for row in own.rows)
    has_answer = in_verl or all("answer" in row for row in own.rows)
    if writes_function:
        text = EXACT if own.choices.reward == "exact" else TO_FILL_IN
        if in_verl:
            text = text.replace("(completions, answer, in", "(completions, reward_model, in")
            text = text.replace("zip(completions, answer,", "zip(completions, answers,")
            text = text.replace("    began =", f"    {_ANSWERS_OF_VERL}\n    began =")
        (folder / REWARD).write_text(text, encoding="utf-8")
    responses = RIGHT_ANSWERS if has_answer else RIGHT_TEXTS
    if in_verl:
        responses = responses.replace("row['answer']", "row['reward_model']['ground_truth']")
    head = TEST_HEAD.replace("reward:reward", own.config.rewards.functions[-1])
    (folder / TEST).write_text(head + responses + TEST_END, encoding="utf-8")
