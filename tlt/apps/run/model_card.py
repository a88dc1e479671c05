"""Model cards of a run's policy and drafter. A card names no path of this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt import __version__
from tlt.base.config.schema import Config
from tlt.base.io.hub import Repository
from tlt.base.io.hub_upload import CARD, read_card
from tlt.base.io.plugins import without_folder
from tlt.base.io.text import quoted
from tlt.base.types import UserError
from tlt.drafter.formats.export import FORMATS
from tlt.drafter.formats.folder import ARCHITECTURE
from tlt.drafter.formats.layouts import NUM_DRAFT_TOKENS
from tlt.drafter.shape import Method
from tlt.training.report.outcome import Gain, written_p_value
from tlt.training.report.step_record import read_metrics
from tlt.training.saved.evaluations import Evaluations, is_judged_by_reward

_VLLM_FORMAT: Mapping[Method, str] = {
    "eagle": "vllm-eagle",
    "eagle3": "vllm-eagle3",
    "dflash": "vllm-dflash",
    "dspark": "deepspec-dspark",
}
"""Drafter's form → format that vLLM loads. EAGLE's and DFlash's are our own."""

_TLT = "[TLT](https://arxiv.org/abs/2511.16665)"


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    config: Config

    @staticmethod
    def read(folder: Path) -> FinishedRun:
        """Raises UserError for a folder without a run, or a run without a policy yet."""
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{folder}: holds no run; give the folder of one (run.out_dir)")
        run = FinishedRun(folder, Config.from_json(file.read_text(encoding="utf-8"), str(file)))
        if not (folder / "policy" / "config.json").is_file():
            remedy = f"finish it first: tlt train --resume {quoted(folder)}"
            raise UserError(f"{folder}: the run has written no policy yet; {remedy}")
        return run

    @property
    def has_drafter(self) -> bool:
        return (self.folder / "drafter" / "config.json").is_file()

    @property
    def base(self) -> str | Path:
        path = self.config.model.path
        return str(path) if not path.exists() and Repository.parse(path) is not None else path

    @property
    def gain(self) -> Gain | None:
        by_reward = is_judged_by_reward(self.config.rewards.functions)
        file = self.folder / "evaluations.jsonl"
        return Evaluations(file, self.num_steps, writes=False, by_reward=by_reward).progress()

    @property
    def num_steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        records = read_metrics(file) if file.is_file() else []
        return records[-1].step if records else 0

    @property
    def about_drafter(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads((self.folder / "drafter" / "config.json").read_text())
        return described


def policy_card(run: FinishedRun, name: str, drafter: str | None, licence: str | None) -> str:
    """licence: the base model's, which the policy keeps."""
    config = run.config
    data = _named(config.task.data)
    tags = [
        "tlt",
        "reinforcement-learning",
        config.algorithm.name,
        *(["lora"] if config.lora.is_used else []),
    ]
    head = _front_matter(
        base_model=_named_model(run),
        datasets=[data] if data and Repository.parse(data) else None,
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
    )
    use = [
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]
    parts = [
        f"# {name.partition('/')[2]}",
        f"A language model trained by reinforcement learning with {_TLT} {__version__}.",
        _table(_origin(run, data) | _scores(run)),
        "## Use",
        _code("python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "", *use),
    ]
    if drafter is not None:
        parts += [f"Its drafter, for faster decoding, is [{drafter}](https://huggingface.co/{drafter})."]
        parts += [_how_to_draft(run, name, drafter)]
    return "\n\n".join([head, *parts]) + "\n"


def drafter_card(run: FinishedRun, name: str, drafter: str, licence: str | None) -> str:
    about = run.about_drafter
    family = "eagle" if "Eagle" in about["architectures"][0] else _method(about)
    head = _front_matter(base_model=name, license=licence, tags=["tlt", "speculative-decoding", family])
    trained: Mapping[str, Any] = about.get("tlt") or {}
    acceptance = trained.get("acceptance")
    rows = {
        "drafts for": f"[{name}](https://huggingface.co/{name})",
        "form": f"{about['architectures'][0]}, {about.get('num_hidden_layers', 1)} decoder layer(s)",
        "trained in the run": "yes, in idle time" if run.config.drafter.train else "no",
        "acceptance measured last": None if acceptance is None else f"{acceptance:.1%}",
    }
    what = "A drafter for speculative decoding: it guesses tokens that the model then checks."
    parts = [f"# {drafter.partition('/')[2]}", f"{what} Made with {_TLT} {__version__}.", _table(rows)]
    return "\n\n".join([head, *parts, "## Use", _how_to_draft(run, name, drafter)]) + "\n"


def _how_to_draft(run: FinishedRun, name: str, drafter: str) -> str:
    options = f"--drafter {drafter} --speculation adaptive"
    here = f"tlt generate {name} --prompts prompts.jsonl --out responses.jsonl {options}"
    method = _method(run.about_drafter)
    form = _VLLM_FORMAT[method]
    is_exported = method in ("eagle3", "dspark")
    num = int(run.about_drafter.get("block_size", NUM_DRAFT_TOKENS)) - (method == "dflash")
    folder = "exported" if is_exported else drafter
    serve = FORMATS[form].launch.format(target=name, method=method, folder=folder, k=num, nodes=num + 1)
    export = f"tlt drafter export {drafter} --target {name} --format {form} --to {folder}"
    return _code("bash", here, *([export] if is_exported else []), serve)


def _method(about: Mapping[str, Any]) -> Method:
    (method,) = (one for one, name in ARCHITECTURE.items() if name == about["architectures"][0])
    return method


def _origin(run: FinishedRun, data: str | None) -> dict[str, str | None]:
    config = run.config
    problems, samples = config.rollout.problems_per_step, config.rollout.samples_per_problem
    kind = f"{config.lora.description}, merged" if config.lora.is_used else "all weights"
    rewards = [without_folder(name) for name in config.rewards.functions if name != "task"]
    return {
        "base model": _named_model(run) or Path(run.base).name,
        "task": without_folder(config.task.name) if config.task.name != "data" else None,
        "data": data,
        "reward functions": ", ".join(rewards) or None,
        "algorithm": f"{config.algorithm.name}, learning rate {config.optimizer.learning_rate:g}, {kind}",
        "steps": f"{run.num_steps}, of {problems} problems × {samples} responses",
    }


def _scores(run: FinishedRun) -> dict[str, str | None]:
    gain = run.gain
    if gain is None:
        return {}
    test = f" after {gain.steps[1]} steps; p {written_p_value(gain.p_value)}, paired sign-flip test"
    solved, rewards = gain.solve_rates, gain.rewards
    return {
        "solved, held out": f"{solved[0]:.1%} → {solved[1]:.1%}{'' if gain.by_reward else test}",
        "reward, held out": f"{rewards[0]:.3f} → {rewards[1]:.3f}{test if gain.by_reward else ''}",
    }


def _named_model(run: FinishedRun) -> str | None:
    if isinstance(run.base, str):
        return run.base.partition("@")[0]
    card = run.base / CARD
    if not card.is_file():
        return None
    found = read_card(card).get("base_model")
    return found if isinstance(found, str) else None


def _named(data: Path | None) -> str | None:
    if data is None:
        return None
    return data.name if data.exists() or data.is_absolute() else str(data).partition("@")[0]


def _front_matter(**about: Any) -> str:
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**{key: value for key, value in about.items() if value})}\n---"


def _table(rows: Mapping[str, str | None]) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "|---|---|", *lines])


def _code(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
