"""Part `equality`: the recipe's responses with speculation and without, on this device, in each number type.

float64    equal token for token, or the part fails; those of the CPU beside them
float32    a difference may only begin at a near-tie: its margin in float64 is told
bfloat16   the law holds over the computed logits, which depend on the batch: differences are counted
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.harness import Record
from benchmarks.gpu.subjects import recipe
from benchmarks.subject import Subject
from tests.side_by_side import NEAR_TIE, Responses, answers, compare
from tlt.base.config.schema import Config
from tlt.engine.build.model import model_folder


def responses_of(subject: Subject, variant: str, settings: dict[str, Any]) -> Responses:
    """Returns the variant's responses to the same problems; fewer at a time than there are."""
    engine = subject.engine(variant, settings["batch"])
    return answers(engine, subject.requests(0, settings["num_requests"]))


def judge(subject: Subject, config: Config, off: Responses, on: Responses, variant: str) -> dict[str, Any]:
    """Returns how two sets of responses compare."""
    requests = subject.requests(0, len(off))
    found = compare(requests, off, on, model_folder(config))
    margins = [difference.margin for difference in found.differences]
    return {
        "variant": variant,
        "responses": found.num_responses,
        "equal": found.num_equal,
        "tokens": found.num_tokens,
        "logprob_gap": found.logprob_gap,
        "near_ties": sum(margin < NEAR_TIE for margin in margins),
        "largest_margin": max(margins, default=None),
        "first_difference": min((d.position for d in found.differences), default=None),
    }


def measure(record: Record, dtype: str) -> None:
    settings = record.settings
    config = recipe(settings, run__dtype=dtype, sampling__max_tokens=settings["max_tokens"])
    subject = Subject(config)
    off = responses_of(subject, "off", settings)
    for variant in settings["variants"]:
        judged = judge(subject, config, off, responses_of(subject, variant, settings), variant)
        record.append("compared", {"dtype": dtype, **judged})
    if dtype == "float64":
        on_cpu = Subject(
            recipe(
                {**settings, "device": "cpu"}, run__dtype=dtype, sampling__max_tokens=settings["max_tokens"]
            )
        )
        num = {**settings, "num_requests": settings["num_on_cpu"]}
        theirs = responses_of(on_cpu, "off", num)
        mine = {key: off[key] for key in theirs}
        record.append("compared", {"dtype": dtype, **judge(on_cpu, config, mine, theirs, "off, on the CPU")})


def main() -> None:
    record = Record.of_arguments()
    for dtype in record.settings["dtypes"]:
        measure(record, dtype)
    wrong = [dict(one) for one in record.values["compared"] if not is_as_promised(one)]
    assert not wrong, f"not as promised: {wrong}"


def is_as_promised(one: dict[str, Any]) -> bool:
    """float64: all equal; float32: no difference but near-ties; bfloat16: nothing is promised of two runs."""
    if one["dtype"] == "float64":
        return bool(one["equal"] == one["responses"])
    return bool(one["dtype"] == "bfloat16" or one["near_ties"] == one["responses"] - one["equal"])


if __name__ == "__main__":
    main()
