"""The benchmarks of drafters beside each other and of the budget: they measure what they say, and notice tokens
that differ."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draft_budget, drafter_forms
from benchmarks.drafter_forms import Subject, said
from tests.lossless.helpers import VOCAB
from tests.unit.drafter.block_parts import DEEP, POLICY, make_block
from tlt.assembly.model import Model
from tlt.bench.report import number, ratio_text
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.shape import Method
from tlt.types import Problem

OPTIONS = Namespace(tokens=6, rounds=2, depth=3, threads=1, easy=0.6, hard=1.4)


@pytest.fixture(scope="module")
def subject() -> Subject:
    tensors = {name: tensor.float() for name, tensor in POLICY.state_dict().items()}
    drafters = {}
    methods: tuple[Method, ...] = ("dflash", "dspark")
    for method in methods:
        block = make_block(method)
        weights = {name: tensor.float() for name, tensor in block.state_dict().items()}
        facts = {"preset": method, "num_tokens": 12_345, "cpu_seconds": 67.8} if method == "dspark" else {}
        drafters[method] = StoredDrafter(block.config, weights, facts, None)
    model = Model(Path("tiny"), DEEP, None, (), tensors)
    problems = [Problem(f"p{i}", tuple((7 * i + j) % VOCAB for j in range(5))) for i in range(9)]
    return Subject(model, drafters, torch.float32, 32, problems)


def test_the_benchmark_of_forms_has_accept_length_draft_time_and_equal_tokens(subject: Subject) -> None:
    cell = drafter_forms.measure_cell(subject, OPTIONS, 1.0, 3)
    assert list(cell["competitors"]) == [
        "off", "dflash fixed", "dflash adaptive", "dspark fixed", "dspark adaptive",
    ]  # fmt: skip
    for name, known in cell["competitors"].items():
        assert known["equal_rounds"] == 2, name
        if name.endswith("fixed"):
            assert 1.0 <= known["accept_length"] <= 4.0
            assert known["draft_ms"] > 0.0
    off = cell["competitors"]["off"]
    assert off["draft_ms"] is None
    assert off["accept_length"] is None
    report = {"subject": "tiny", "setup": vars(OPTIONS), "cells": [cell], "command": "", "environment": {}}
    report["drafters"] = {name: drafter_forms.about(one) for name, one in subject.drafters.items()}
    shown = drafter_forms.to_markdown(report)
    assert "Batches whose tokens are those of off: 10 of 10." in shown
    fixed, tuned = (cell["competitors"][f"dspark {way}"] for way in ("fixed", "adaptive"))
    length, ratio = number(fixed["accept_length"]), ratio_text(fixed["times_off"])
    chains = f"{length} · {number(fixed['draft_ms'])} ms · {ratio}"
    assert f"| dspark | dspark | 12,345 | 68 | {chains} · tuner {ratio_text(tuned['times_off'])} |" in shown
    assert "| dflash | – | – | – |" in shown


def test_the_benchmark_of_the_budget_compares_its_ways_with_one_length(subject: Subject) -> None:
    cell = draft_budget.measure_cell(subject, OPTIONS, "dspark", 4)
    assert list(cell["ways"]) == ["one length", "budget", "fixed 0.4"]
    assert cell["ways"]["one length"]["over_one_length"]["mean"] == 1.0
    report = {"subject": "tiny", "setup": vars(OPTIONS), "cells": [cell], "command": "", "environment": {}}
    assert "| dspark | 4 |" in draft_budget.to_markdown(report)


def test_tokens_that_differ_are_noticed(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = draft_budget.generate, 0

    def other(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return generate(*arguments) | ({"digest": "another"} if calls == 8 else {})

    monkeypatch.setattr(draft_budget, "generate", other)
    with pytest.raises(AssertionError, match="other tokens"):
        draft_budget.measure_cell(subject, OPTIONS, "dflash", 2)


def test_a_drafter_that_does_not_exist_is_refused_and_commands_name_no_folder_of_this_machine() -> None:
    for benchmark in (drafter_forms, draft_budget):
        with pytest.raises(drafter_forms.UserError, match="names no folder"):
            benchmark.parse(["countdown", "--drafters", "a=nowhere", "--out", "x"])
    assert said("x", ["--drafters", "a=/b/c,d=/e/f", "--out", "/g/h"]).endswith("a=c,d=f --out h")
