"""Countdown: reach a target, using every number exactly once.

A step replaces two numbers by their sum, difference, product or quotient, a positive integer. The text a
model reads and writes:

    prompt     [2,9,16:5]                                              numbers in order, then the target
    response   16-9=7[2,7:5]7-2=5!16-9=7,7-2=5                         search, `!`, the answer's steps
    response   16+9=25[2,25:5]25-2=23x25+2=27x25*2=50x[2,9,16:5]16-9=7[2,7:5]7-2=5!16-9=7,7-2=5

`x` marks a last step that missed the target. When every move of a state has failed, its parent is written
again. Each state restates numbers left *and* target, so that the next step depends on nearby text only.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tlt.base.io.files import Record
from tlt.base.types import UserError
from tlt.base.value_types import shorten
from tlt.tasks.exact import MAX_DRAWS, ExactTask, apply, draw_count, read_weights
from tlt.tasks.splits import Split, split_of

MAX_INTERMEDIATE = 99
"""Bound of generated puzzles; the scorer accepts any positive integer."""
DEFAULT_MIX: Mapping[int, float] = {2: 0.05, 3: 0.5, 4: 0.45}

_STEP = re.compile(r"([1-9][0-9]{0,5})([-+*/])([1-9][0-9]{0,5})=([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Puzzle:
    numbers: tuple[int, ...]
    target: int

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.numbers))}:{self.target}]"

    @property
    def split(self) -> Split:
        return split_of(str(self))


# ------------------------------------------------------------------------------------------------------------
# The rules


@lru_cache(maxsize=1 << 16)
def moves(numbers: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns (step, next state), larger numbers first, each next state once."""
    found: dict[tuple[int, ...], str] = {}
    for i in range(len(numbers) - 1, 0, -1):
        for j in range(i - 1, -1, -1):
            a, b = numbers[i], numbers[j]
            rest = numbers[:j] + numbers[j + 1 : i] + numbers[i + 1 :]
            for operator in "-+/*":
                result = apply(a, operator, b)
                if result is not None and result <= MAX_INTERMEDIATE:
                    found.setdefault(tuple(sorted((*rest, result))), f"{a}{operator}{b}={result}")
    return tuple((step, state) for state, step in found.items())


@lru_cache(maxsize=1 << 16)
def reachable(numbers: tuple[int, ...]) -> frozenset[int]:
    if len(numbers) == 1:
        return frozenset(numbers)
    return frozenset().union(*(reachable(state) for _, state in moves(numbers)))


def is_correct(puzzle: Puzzle, answer: str) -> bool:
    """Whether `answer` (`16-9=7,7-2=5`) is exact, uses every number once and ends at the target."""
    remaining = list(puzzle.numbers)
    for text in answer.split(","):
        step = _STEP.fullmatch(text)
        if step is None:
            return False
        a, operator, b, result = int(step[1]), step[2], int(step[3]), int(step[4])
        for operand in (a, b):
            if operand not in remaining:
                return False
            remaining.remove(operand)
        if apply(a, operator, b) != result:
            return False
        remaining.append(result)
    return remaining == [puzzle.target]


# ------------------------------------------------------------------------------------------------------------
# The task


def draw_puzzle(
    rng: random.Random, split: Split, mix: Mapping[int, float], max_number: int, max_target: int
) -> Puzzle:
    """Raises UserError if MAX_DRAWS draws give no puzzle of the split."""
    count = draw_count(rng, mix)
    for _ in range(MAX_DRAWS):
        numbers = tuple(sorted(rng.randint(1, max_number) for _ in range(count)))
        puzzles = [Puzzle(numbers, target) for target in sorted(reachable(numbers)) if target <= max_target]
        puzzles = [puzzle for puzzle in puzzles if puzzle.split == split]
        if puzzles:
            return rng.choice(puzzles)
    raise UserError(
        f"task countdown: options max_number {max_number}, max_target {max_target}: none of {MAX_DRAWS:,} "
        f"draws of {count} numbers is a {split} puzzle; raise max_target, change max_number, or leave "
        f"{count} out of mix"
    )


class Countdown(ExactTask):
    name = "countdown"

    def problems(
        self,
        num: int,
        seed: int,
        *,
        split: str = "train",
        mix: Mapping[int, float] | Mapping[str, float] | None = None,
        max_number: int = 10,
        max_target: int = 60,
    ) -> list[Record]:
        """The i-th puzzle depends on (seed, i) and the options only.

        mix          weight of puzzles with 2, 3, 4 and 5 numbers; keys may be strings (TOML)
        max_number   the given numbers are 1..max_number
        max_target   targets are 1..max_target
        """
        weights = read_weights("task countdown: mix", mix or DEFAULT_MIX, range(2, 6))
        if max_number < 2 or max_target < 2:
            raise UserError(
                f"task countdown: max_number is {max_number}, max_target {max_target}; give both at least 2"
            )

        def draw(rng: random.Random, split: Split) -> Record:
            puzzle = draw_puzzle(rng, split, weights, max_number, max_target)
            return {"prompt": str(puzzle), "numbers": list(puzzle.numbers), "target": puzzle.target}

        return self.draw_each(num, seed, split, draw)

    def find(self, problem: Record, response_text: str) -> str | None:
        _, mark, answer = response_text.rpartition("!")
        return answer if mark else None

    def check(self, problem: Record) -> None:
        numbers, target = problem.get("numbers"), problem.get("target")
        if (
            not isinstance(numbers, list)
            or not numbers
            or any(type(n) is not int for n in (*numbers, target))
        ):
            remedy = "give numbers, a list of whole ones, and target, a whole number"
            raise UserError(f"numbers is {shorten(numbers)} and target {shorten(target)}; {remedy}")

    def is_right(self, problem: Record, answer: str) -> bool:
        return is_correct(Puzzle(tuple(problem["numbers"]), problem["target"]), answer)


TASK = Countdown()
