"""Keys that other sections or other trainers have: what is told is ours, and can be followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.apps.cli.parts import fail
from tlt.base.config.elsewhere import TRAINERS, known_keys
from tlt.base.config.load import load_config
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.types import UserError

ROOT = Path(__file__).parents[4]
NAMES = [
    (name, known.ours)
    for known in known_keys()
    for column in TRAINERS
    for name in getattr(known, column).split()
]


def has(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in Config.model_fields and name in section_of(Config, section).model_fields


def as_table() -> str:
    """The names as the page's table."""
    heads = ["TLT", *TRAINERS.values(), ""]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for known in known_keys():
        cells = [known.ours, *(getattr(known, column) for column in TRAINERS)]
        code = [", ".join(f"`{word}`" for word in cell.split()) for cell in cells]
        lines.append("| " + " | ".join([*code, known.note]) + " |")
    return "\n".join(lines) + "\n"


def test_every_entry_is_a_key_of_ours_and_the_page_shows_them_all() -> None:
    assert all(has(known.ours) for known in known_keys())
    assert as_table() in (ROOT / "docs/coming-from.md").read_text()


def test_no_name_of_another_trainer_is_a_key_of_ours_with_another_meaning() -> None:
    assert {name for name, ours in NAMES if has(name) and name != ours} == set()


@pytest.mark.parametrize(("name", "ours"), sorted(dict(NAMES).items()))
def test_another_trainers_name_is_told_ours(name: str, ours: str) -> None:
    """Some names are those of several trainers, or ends of a name that means another key."""
    if has(name):
        return
    with pytest.raises(UserError) as error:
        load_config("countdown", {name: "1"})
    told = re.search(r"(?:is|mean) (\w+\.\w+)", str(error.value))
    assert told is not None, error.value
    meant = {
        known.ours for known in known_keys() if name in " ".join(getattr(known, c) for c in TRAINERS).split()
    }
    assert told[1] in meant | {ours}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--learning_rate 1e-5", "did you mean --optimizer.learning_rate or --drafter.learning_rate?"),
        ("--temperature 1", "did you mean --sampling.temperature or --evaluation.temperature?"),
        ("--num-generations 8", "TRL's num_generations is --rollout.samples_per_problem here"),
        ("--beta 0.1", "TRL's beta is --algorithm.kl_coefficient here"),
        ("--per_device_train_batch_size 8", "is --rollout.problems_per_step here (problems, on all"),
        ("--rollout.n 8", "rollout.n is unknown; verl's actor_rollout_ref.rollout.n is rollout.samples_per"),
        ("--trainer.optim.lr 1e-5", "prime-rl's trainer.optim.lr is --optimizer.learning_rate here"),
        ("--n_samples_per_prompt 8", "OpenRLHF's n_samples_per_prompt is --rollout.samples_per_problem here"),
        ("--rollout.batch_size 8", "OpenRLHF's rollout.batch_size is --rollout.problems_per_step here"),
        (
            "--orchestrator.group_size 8",
            "prime-rl's orchestrator.group_size is --rollout.samples_per_problem",
        ),
        ("--run.max_steps 8", "TRL's max_steps is run.num_steps here"),
        ("--rollout.learning_rate 1", "did you mean optimizer.learning_rate or drafter.learning_rate?"),
        ("--optimizer.beta 0.9", "did you mean optimizer.beta1, or TRL's beta: algorithm.kl_coefficient?"),
    ],
)
def test_an_unknown_key_is_told_all_sections_that_have_it(
    words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in fail(capsys, "train", "countdown", *words.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--max_new_tokens 8", "OpenRLHF's rollout.max_new_tokens is --max-tokens here"),
        ("--n-samples-per-prompt 8", "OpenRLHF's n_samples_per_prompt is --samples here"),
        ("--sampling.top_p 1", "did you mean --top-p?"),
    ],
)
def test_a_command_without_a_configuration_is_told_its_own_option(
    words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in fail(capsys, "generate", "m", "--prompts", "p", "--out", "o", *words.split())
