"""One rollout of the long tail with an adaptive engine of whatever tree is imported; the seconds, as JSON.
Run by paired.py.

    PYTHONPATH=TREE python -P benchmarks/paired_longtail.py TREE/recipes/countdown

Trees from before and after names moved are run alike, so each name is looked for where it has been.
"""

import json
import pkgutil
import sys
from pathlib import Path
from typing import Any


def find(*places: str) -> Any:
    """The first of the places ("module:name") that exists in the tree."""
    for place in places[:-1]:
        try:
            return pkgutil.resolve_name(place)
        except (ImportError, AttributeError):
            continue
    return pkgutil.resolve_name(places[-1])


def main(recipe: Path) -> None:
    load_config = find("tlt.base.config.load:load_config", "tlt.config.load:load_config")
    read_workload = find("benchmarks.longtail:read_workload", "tlt.bench.longtail:read_workload")
    trace = find("benchmarks.rollout:trace", "benchmarks.traces:trace", "tlt.bench.measure:trace")
    subject_of = find("benchmarks.subject:Subject", "tlt.bench.subject:Subject")
    subject = subject_of(load_config(recipe / "quickstart.toml"))
    requests = read_workload(recipe / "longtail.json").requests
    trace(subject.engine("adaptive", len(requests)), requests[:8])  # what a fresh process is slow at
    rollouts, measured = trace(subject.engine("adaptive", len(requests)), requests)
    print(
        json.dumps(
            {"seconds": measured.seconds, "num_tokens": sum(len(rollout.token_ids) for rollout in rollouts)}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
