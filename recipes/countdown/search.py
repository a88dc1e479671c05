"""The search that the base model is trained to write: depth first, as a response. The rules are
tlt.tasks.countdown's."""

import random

from tlt.tasks.countdown import MAX_INTERMEDIATE, Puzzle, moves, reachable


def write_search(
    puzzle: Puzzle, rng: random.Random, skip: float = 0.0, max_chars: int | None = None
) -> str | None:
    """Returns a depth-first search written out as a response; None when it grows beyond `max_chars`.

    Moves are tried in the order of `moves`, each left out with probability `skip` (never in a state of two
    numbers). A fixed order makes the text predictable, hence cheap to speculate on; the skipping is what
    reinforcement learning can improve, by learning which moves deserve to be skipped. When a pass over the
    first state fails, the next begins.
    """
    if puzzle.target not in reachable(puzzle.numbers):
        raise ValueError(
            f"puzzle {puzzle} has no solution with results up to {MAX_INTERMEDIATE}: change the target"
        )
    assert 0 <= skip < 1
    pieces: list[str] = []
    length = 0

    def write(text: str) -> None:
        nonlocal length
        length += len(text)
        pieces.append(text)

    def search(numbers: tuple[int, ...]) -> list[str] | None:
        for step, state in moves(numbers):
            if len(numbers) > 2 and rng.random() < skip:
                continue
            if max_chars is not None and length > max_chars:
                return None
            write(step)
            if len(state) == 1:
                if state[0] == puzzle.target:
                    return [step]
                write("x")
                continue
            write(str(Puzzle(state, puzzle.target)))
            if (steps := search(state)) is not None:
                return [step, *steps]
            write(str(Puzzle(numbers, puzzle.target)))
        return None

    while (steps := search(puzzle.numbers)) is None:
        if max_chars is not None and length > max_chars:
            return None
    text = f"{''.join(pieces)}!{','.join(steps)}"
    return text if max_chars is None or len(text) <= max_chars else None
