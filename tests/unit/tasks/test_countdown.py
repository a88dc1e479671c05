"""The Countdown game against a brute-force referee that shares no code with it."""

import itertools
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.countdown.search import write_search
from tests.refused import refused
from tlt.base.types import UserError
from tlt.tasks.countdown import MAX_INTERMEDIATE, TASK, Puzzle, is_correct, moves, reachable

Steps = tuple[tuple[int, str, int, int], ...]


def referee(numbers: tuple[int, ...]) -> dict[Steps, int]:
    """Every legal sequence of steps that uses all the numbers, and where it ends. Slow and plain."""
    if len(numbers) == 1:
        return {(): numbers[0]}
    found: dict[Steps, int] = {}
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        for operator, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", Fraction(a, b))):
            if value > 0 and Fraction(value).denominator == 1:
                step = (a, operator, b, int(value))
                for later, end in referee((*rest, int(value))).items():
                    found[step, *later] = end
    return found


def text(steps: Steps) -> str:
    return ",".join(f"{a}{operator}{b}={value}" for a, operator, b, value in steps)


def problem(numbers: tuple[int, ...], target: int) -> dict[str, Any]:
    return {"numbers": list(numbers), "target": target}


few_numbers = st.lists(st.integers(1, 10), min_size=2, max_size=3).map(lambda n: tuple(sorted(n)))


@settings(max_examples=40, deadline=None)
@given(few_numbers)
def test_every_solution_of_the_referee_scores_one_and_a_planted_error_scores_zero(
    numbers: tuple[int, ...],
) -> None:
    for steps, end in referee(numbers).items():
        assert TASK.score(problem(numbers, end), "!" + text(steps)) == {"reward": 1.0, "solved": True}
        assert not is_correct(Puzzle(numbers, end + 1), text(steps))
        *before, (a, operator, b, value) = steps
        assert not is_correct(Puzzle(numbers, end + 1), text((*before, (a, operator, b, value + 1))))


@settings(max_examples=300, deadline=None)
@given(few_numbers, st.integers(1, 60), st.data())
def test_scorer_agrees_with_the_referee_on_any_steps(
    numbers: tuple[int, ...], target: int, data: st.DataObject
) -> None:
    number = st.sampled_from((*numbers, *range(1, 12)))
    step = st.tuples(number, st.sampled_from("+-*/"), number).flatmap(
        lambda s: st.just(
            (*s, int({"+": s[0] + s[2], "-": s[0] - s[2], "*": s[0] * s[2], "/": s[0] / s[2]}[s[1]]))
        )
    )
    steps = tuple(data.draw(st.lists(step, min_size=1, max_size=3)))
    assert is_correct(Puzzle(numbers, target), text(steps)) == (referee(numbers).get(steps) == target)


MALFORMED = [
    *(
        "",
        "16-9=7,7-2=5",
        "!",
        "!16-9=7,7-2=5,",
        "!16-9=7",
        "!16-9=7,7-2=6",
        "!16-9=8,8-2=6",
        "!9-2=7,16-7=9",
    ),
    *("!16-9=7,9-2=7,7-2=5", "!016-9=7,7-2=5", "!16-9=7, 7-2=5", "!16-9=7,7-2=5<eos>", "!16-9=7,7-2=5!"),
    *("!١٦-9=7,7-2=5", "!2-9=-7,16+-7=9"),
]


@pytest.mark.parametrize("response", MALFORMED)
def test_wrong_or_malformed_answers_score_zero(response: str) -> None:
    assert TASK.score(problem((2, 9, 16), 5), response) == {"reward": 0.0, "solved": False}


def test_only_what_follows_the_last_mark_is_judged() -> None:
    assert TASK.score(problem((2, 9, 16), 5), "1+1=3[x!9+9=9!16-9=7,7-2=5")["solved"]
    assert not TASK.score(problem((2, 9, 16), 5), "!16-9=7,7-2=5!1+1=2")["solved"]


@settings(max_examples=25, deadline=None)
@given(few_numbers)
def test_solver_reaches_what_the_referee_reaches_within_the_bound(numbers: tuple[int, ...]) -> None:
    bounded = {
        end for steps, end in referee(numbers).items() if all(step[3] <= MAX_INTERMEDIATE for step in steps)
    }
    assert reachable(numbers) == bounded


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.6))
def test_search_restates_every_state_and_ends_in_a_correct_answer(seed: int, skip: float) -> None:
    (item,) = TASK.problems(1, seed, mix={2: 1, 3: 2, 4: 1})
    puzzle = Puzzle(tuple(item["numbers"]), item["target"])
    response = write_search(puzzle, random.Random(seed), skip)
    assert response is not None
    assert TASK.score(item, response)["solved"]
    search, _, _ = response.partition("!")
    states = [puzzle.numbers]  # the path from the puzzle to the state written last
    for piece in search.replace("x", "x ").replace("]", "] ").replace("[", " [").split():
        if piece.startswith("["):
            numbers = tuple(int(n) for n in piece[1:].split(":")[0].split(","))
            assert piece == str(Puzzle(numbers, puzzle.target))
            states = [*(s for s in states if len(s) > len(numbers)), numbers]
        else:
            assert piece.rstrip("x") in dict(moves(states[-1]))


def test_search_beyond_the_limit_is_none_and_an_unsolvable_puzzle_is_an_error() -> None:
    puzzle = Puzzle((3, 7, 8, 9), 51)
    full = write_search(puzzle, random.Random(0))
    assert full is not None
    assert write_search(puzzle, random.Random(0), max_chars=len(full)) == full
    assert write_search(puzzle, random.Random(0), max_chars=len(full) - 1) is None
    with pytest.raises(ValueError, match=r"\[1,1:50\] has no solution"):
        write_search(Puzzle((1, 1), 50), random.Random(0))


def test_problems_are_solvable_and_within_the_options() -> None:
    problems = TASK.problems(50, 7, mix={"2": 1, "3": 1, "4": 1}, max_number=12, max_target=40)
    assert {len(p["numbers"]) for p in problems} == {2, 3, 4}
    for p in problems:
        assert p["target"] in reachable(tuple(p["numbers"]))
        assert p["target"] <= 40
        assert max(p["numbers"]) <= 12
        assert p["prompt"] == f"[{','.join(map(str, p['numbers']))}:{p['target']}]"


def test_no_puzzle_is_in_both_splits() -> None:
    train = {p["prompt"] for p in TASK.problems(2000, 1, split="train")}
    test = {p["prompt"] for p in TASK.problems(1000, 2, split="test")}
    assert len(test) > 100
    assert not train & test


@pytest.mark.parametrize("options", [{"mix": {7: 1}}, {"mix": {3: 0}}, {"max_target": 0}])
def test_options_out_of_range_are_errors(options: dict[str, Any]) -> None:
    with refused(r"^task countdown: .*; give "):
        TASK.problems(1, 0, **options)


@pytest.fixture
def one_million_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends what would draw for ever."""
    calls, draw = itertools.count(), random.Random.randint

    def counted(self: random.Random, low: int, high: int) -> int:
        assert next(calls) < 1_000_000, "it draws for ever"
        return draw(self, low, high)

    monkeypatch.setattr(random.Random, "randint", counted)


@pytest.mark.usefixtures("one_million_draws")
@pytest.mark.parametrize(
    ("options", "place"),
    [
        (
            {"max_number": 10**8, "max_target": 3},
            "max_number 100000000, max_target 3: none of 10,000 draws of",
        ),
        (
            {"mix": {2: 1}, "max_number": 2, "max_target": 2, "split": "test"},
            "of 2 numbers is a test puzzle; raise max_target",
        ),
        ({"mix": {"5": 1}, "max_number": 10**5, "max_target": 2}, "change max_number, or leave 5 out of mix"),
    ],
)
def test_options_that_no_puzzle_fulfils_end_in_one_line(options: dict[str, Any], place: str) -> None:
    with pytest.raises(UserError) as refused:
        TASK.problems(64, 0, **options)
    assert str(refused.value).startswith("task countdown: options ")
    assert place in str(refused.value)


@pytest.mark.usefixtures("one_million_draws")
def test_options_that_few_puzzles_fulfil_repeat_these() -> None:
    options: dict[str, Any] = {"mix": {2: 1}, "max_number": 2, "max_target": 2}
    problems = TASK.problems(64, 0, **options)
    assert len(problems) == 64
    assert len({problem["prompt"] for problem in problems}) < 10
