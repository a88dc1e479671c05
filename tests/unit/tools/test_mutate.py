"""Mutation testing: which changes are made."""

from __future__ import annotations

import pytest

from tools.mutate import ROOMS, mutants, sample


@pytest.mark.parametrize(
    ("source", "mutated"),
    [
        ("x = é <= b", ["x = (é < b)"]),
        ("x = a and not b", ["x = (a or not b)", "x = a and (b)"]),
        ("x = a - 3", ["x = (a + 3)", "x = a - (2)"]),
        ("if a:\n    b.c = f(d)", ["if (not (a)):\n    b.c = f(d)", "if a:\n    pass"]),
        ("f(a, b)", ["pass", "(f(b, a))"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("def f(a: Literal[1] = True): ...", ["def f(a: Literal[1] = False): ..."]),
        ("n += m", ["pass", "n -= m"]),
        ("raise E(f'{1 + n}')", []),
        ("f(a, a)", ["pass"]),
    ],
)
def test_a_mutant_differs_in_one_place(source: str, mutated: list[str]) -> None:
    assert [mutant.source.decode() for mutant in mutants("f.py", source.encode())] == mutated


def test_every_room_has_its_share_of_a_sample_which_a_larger_one_begins_with() -> None:
    few, many = sample(100), sample(200)
    assert 95 <= sum(map(len, few.values())) <= 105
    assert all(few[room] and many[room][: len(few[room])] == few[room] for room in ROOMS)
    for mutant in (mutant for found in many.values() for mutant in found):
        compile(mutant.source, mutant.path, "exec")
