"""What a refused run is told, `tlt plan memory` accepts. tests/integration/proofs draws many more."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.apps.plan.remedies import Asked, check, draw_asked, write_run
from tlt.apps.plan.fit import judge, refuse
from tlt.base.types import UserError


def test_every_remedy_makes_the_run_fit(tmp_path: Path) -> None:
    chance = random.Random(2)
    write_run(tmp_path, chance)
    found = Counter(check(draw_asked(tmp_path, chance)) for _ in range(6))
    assert min(found["fits"], found["advised"], found["none"]) >= 1, found


MANY = {"run.device": "cpu", "sampling.max_tokens": "512", "rollout.max_batch_size": "1"}


@pytest.mark.parametrize(
    ("keys", "options", "remedy"),
    [
        ({}, {"device-gib": "24"}, r"take [0-9]+ ranks on [0-9]+ machines like this one \(tlt plan memory"),
        ({"run.num_ranks": "4"}, {"device-gib": "240"}, r"run.num_ranks = 1"),
        ({"run.num_ranks": "auto"}, {"device-gib": "50"}, r"run.dtype = bfloat16, run.num_ranks = [0-9]+"),
        ({"rollout.kv_gib": "0.001"}, {"device-gib": "400"}, r"give at least [0-9.]+, or lower sampling"),
        ({"run.num_ranks": "64"}, {"device-gib": "2"}, r"no key makes it fit"),
    ],
)
def test_ranks_on_cpus_share_one_machine(
    keys: dict[str, str], options: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    """A model of a few billion parameters."""
    write_run(tmp_path, SimpleNamespace(choice=lambda values: values[len(values) // 2], random=lambda: 0.0))
    asked = Asked(tmp_path, MANY | keys, options)
    assert check(asked) in ("advised", "none")
    assert re.search(remedy, judge(asked.run).line), judge(asked.run).line
    with pytest.raises(UserError, match=r"^memory: does not fit: |^rollout\.kv_gib: ") as error:
        refuse(asked.run)
    assert "\n" not in str(error.value)
