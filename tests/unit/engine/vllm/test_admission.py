"""A vLLM that does not name the plug-in stays as it is, and no request that the law cannot serve reaches a
worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.refused import refused
from tests.unit.engine.vllm.test_law import Asked
from tlt.base.types import UserError
from tlt.engine.vllm.inside.admission import admit, law_config
from tlt.engine.vllm.inside.law import RowLaw


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(),
        SimpleNamespace(additional_config=None),
        SimpleNamespace(additional_config={"other": 1}),
        SimpleNamespace(additional_config=object()),
    ],
    ids=["none", "empty", "another's", "a platform's own object"],
)
def test_a_configuration_without_the_key_is_vllms_alone(config: SimpleNamespace) -> None:
    assert law_config(config) is None


def test_the_laws_part_of_a_configuration_is_found() -> None:
    assert law_config(SimpleNamespace(additional_config={"tlt": {"tau": 0.7}})) == {"tau": 0.7}


# ── a request, before it is admitted ────────────────────────────────────────────────────────────────────────

V1 = SimpleNamespace(use_v2_model_runner=False)
KEY, HUGE = [1, 2, 3, 4], 10**400
WRONG: dict[str, list[Any]] = {
    "temperature": [True, "1", None, float("nan"), float("inf"), -1, HUGE, [1.0]],
    "top_k": [True, 2.0, "5", None, [3], float("nan")],
    "top_p": [True, 0, 1.5, "1", None, float("nan"), HUGE],
    "min_p": [True, -0.1, 2, "0", None, float("nan")],
    "seed": [True, 1.5, "7", 2**63, -(2**63) - 1, HUGE, float("nan"), [1]],
    "extra_args": [[1], "tlt", 7, {1: 2}]
    + [
        {"tlt": given}
        for given in (0, "x", [], KEY, {}, {"key": KEY}, {"params": {}}, {"key": 5, "params": {}})
    ]
    + [
        {"tlt": {"key": key, "params": {}}}
        for key in ([1, 2, 3], [1, 2, 3, 2**32], [1, 2, 3, -1], [1, 2, 3, True])
    ]
    + [
        {"tlt": {"key": KEY, "params": given}} for given in ([], {"top_k": True}, {"topk": 1}, {"top_p": "1"})
    ],
}


def admitted(**given: Any) -> RowLaw:
    """Returns the law that a worker gives to a request that was admitted."""
    asked = SimpleNamespace(**vars(Asked(**given)))
    admit(V1, asked)
    assert -(2**63) <= asked.top_k < 2**63 > asked.seed
    return RowLaw.of(asked)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str
)
def test_what_would_raise_in_a_worker_is_refused_in_one_line_before_a_request_is_admitted(
    name: str, value: Any
) -> None:
    place = "vllm_xargs: tlt" if isinstance(value, dict) and "tlt" in value else f"{name}: is "
    with pytest.raises(UserError) as refusal:
        admitted(**{name: value})
    assert str(refusal.value).startswith(place) or isinstance(value, dict)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**63, HUGE, -1, 0])
def test_a_top_k_beyond_any_vocabulary_keeps_all_tokens(top_k: int) -> None:
    found = admitted(top_k=top_k, seed=3).params.top_k
    assert found == (0 if top_k < 1 else 2**31 - 1)


def test_each_of_n_responses_finds_a_seed() -> None:
    assert admitted(seed=2**63 - 2, n=2)
    with refused("seed: 9223372036854775807 leaves no seeds for 2 responses; give a sm"):
        admitted(seed=2**63 - 1, n=2)


def test_a_request_without_a_seed_is_given_one_that_all_ranks_share() -> None:
    asked = [SimpleNamespace(**vars(Asked())) for _ in range(9)]
    for each in asked:
        admit(V1, each)
    assert len({RowLaw.of(each).key for each in asked}) == 9
    assert all(RowLaw.of(each) == RowLaw.of(each) for each in asked)
