"""A vLLM that does not name the plug-in stays as it is, whatever its configuration looks like."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tlt.vllm.inside.served import law_config


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
