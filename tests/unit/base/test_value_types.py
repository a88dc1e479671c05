"""Value types: every number has bounds, and one declaration speaks for file, command and Python call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.engine import SamplingOptions
from tlt.apps.cli.options import parse_options
from tlt.apps.plan.fit import judge, refuse
from tlt.apps.plan.sizes import PlannedRun
from tlt.base.config.load import load_config
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.io.recipes import find_recipe
from tlt.base.types import SamplingParams, UserError
from tlt.models.hf.families import load_model_config

BASE = find_recipe("countdown").parent / "base"
ABSURD = 1e300


class Sample(SamplingOptions):
    """Nothing but the sampling."""


def numbers(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields what a JSON schema says of each number that a value may be or hold."""
    if schema.get("type") in ("integer", "number"):
        yield schema
    for part in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])):
        yield from numbers(part)


def declared() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every number of the configuration and of all commands' options, by the name that a user gives
    it."""
    for section in Config.model_fields:
        for key, schema in section_of(Config, section).model_json_schema()["properties"].items():
            yield from ((f"{section}.{key}", number) for number in numbers(schema))
    for name, command in COMMANDS.items():
        schema = command.options.model_json_schema()
        for model in (schema, *schema.get("$defs", {}).values()):
            for key, part in model.get("properties", {}).items():
                yield from ((f"tlt {name} --{key}", number) for number in numbers(part))


NUMBERS = list(declared())


def test_every_number_of_the_configuration_and_of_the_commands_has_two_bounds() -> None:
    assert len(NUMBERS) > 120
    bounds = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    assert {name for name, schema in NUMBERS if not all(kind & schema.keys() for kind in bounds)} == set()
    assert all(abs(schema.get(bound, 0)) < 2**63 for _, schema in NUMBERS for bound in ("minimum", "maximum"))


@pytest.mark.parametrize("name", sorted({name for name, _ in NUMBERS if not name.startswith("tlt ")}))
def test_a_value_beyond_all_sense_is_one_line_and_the_bounds_themselves_can_be_planned(name: str) -> None:
    schema = next(schema for known, schema in NUMBERS if known == name)
    absurd = int(ABSURD) if schema["type"] == "integer" else ABSURD
    others = {"lora.rank": 8} if name.startswith("lora.") else {}
    is_list = name in ("rewards.weights", "sampling.stop_ids")
    with pytest.raises(
        UserError, match=rf"^overrides\['{name}'\]: {name} is .*; it must be less than"
    ) as caught:
        load_config("countdown", {**others, name: [absurd] if is_list else absurd})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    model = load_model_config(BASE)
    for bound in (schema.get("minimum"), schema.get("maximum")):
        if bound is None or is_list:
            continue
        try:
            config = load_config("countdown", {**others, name: bound})
        except UserError:
            continue  # it contradicts another key of the recipe
        run = PlannedRun(config, model, None, 2, False, 2**33, 1024)
        with suppress(UserError):  # some do not fit
            assert judge(run).line
            refuse(run)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("temperature", "warm", "it must be a valid number"),
        ("top_k", 10**30, "it must be less than or equal to 2147483647"),
        ("top_p", 0.0, "it must be greater than 0"),
        ("min_p", 1.5, "it must be less than or equal to 1"),
    ],
)
def test_file_command_and_python_call_say_the_same_of_the_same_value(
    tmp_path: Path, key: str, value: Any, remedy: str
) -> None:
    file, option = tmp_path / "run.toml", key.replace("_", "-")
    text = f'"{value}"' if isinstance(value, str) else value
    file.write_text(f'[model]\npath = "{BASE}"\n[task]\nname = "countdown"\n[sampling]\n{key} = {text}\n')
    calls = {
        rf"{file}: sampling.{key} is {value!r}; {remedy}": lambda: load_config(file),
        rf"--sampling.{key}: sampling.{key} is {value!r}; {remedy}": lambda: load_config(
            "countdown", [f"--sampling.{key}", str(value)]
        ),
        rf"--{option}: is {value}; {remedy}": lambda: parse_options(
            "generate", Sample, [f"--{option}", str(value)]
        ),
        rf"{key}: is {value!r}; {remedy}": lambda: SamplingParams(**{key: value}),
    }
    for line, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == line
