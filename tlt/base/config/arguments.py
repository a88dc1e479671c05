"""The words of a command line."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tlt.base.types import UserError

Words = tuple[list[str], dict[str, str]]
"""The words that stand alone, and the values by their names without dashes; the last of a name counts."""


def read_words(arguments: Iterable[str], switches: Collection[str] = ()) -> Words:
    """Sorts `--name value` and `--name=value` pairs, switches, and words alone. A negative number is a value,
    and so is everything after `=`.

    A switch's name alone means true. Raises UserError for another name without a value.
    """
    alone: list[str] = []
    named: dict[str, str] = {}
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        if not word.startswith("--"):
            alone.append(word)
            continue
        name, has_equals, value = word.removeprefix("--").partition("=")
        if not all(name.split(".")):
            remedy = "an option is written --name value, an override --section.key value"
            raise UserError(f"{word}: unexpected argument; {remedy}")
        if not has_equals and name in switches:
            value = "true"
        elif not has_equals:
            if not pending or pending[0].startswith("--"):
                raise UserError(f"--{name}: has no value; write --{name} VALUE")
            value = pending.pop(0)
        named[name] = value
    return alone, named
