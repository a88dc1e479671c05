"""Compares the three ways, test by test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report import markdown, table
from benchmarks.vllm_own_tests.differences import reason_for
from benchmarks.vllm_own_tests.hub import DESCRIBED, STAND_INS

WAYS = ("without", "asleep", "awake")
Found = Mapping[tuple[str, str], Mapping[str, Any]]
"""By (file, test): outcome and, of a failure, its last line."""


def summarize(found: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns counts by file, and each test that went otherwise with the plug-in. found: by way, the lines
    that inside.py wrote."""
    ended = {way: {one["file"]: one for one in lines if "exit" in one} for way, lines in found.items()}
    by_way: dict[str, Found] = {
        way: {(one["file"], one["test"]): one for one in lines if "test" in one}
        for way, lines in found.items()
    }
    files = {}
    for file in ended["without"]:
        files[file] = {way: count(by_way, way, file, ended[way][file]) for way in WAYS}
    lost = [
        {"way": way, "file": file, "test": test, **told(by_way[way].get((file, test)), file, test, way)}
        for way in WAYS[1:]
        for file, test in sorted(passed(by_way["without"]))
        if (file, test) not in passed(by_way[way])
    ]
    return {"files": files, "lost": lost, "failed": failures(by_way["without"], passed(by_way["awake"]))}


def failures(without: Found, passed_awake: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """Returns what fails without the plug-in, by function, how often it passes awake, and one of its messages."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (file, test), one in without.items():
        if one["outcome"] == "failed":
            name = test.partition("[")[0]
            said = next(iter(one["why"].splitlines()), "")
            row = found.setdefault(
                (file, name), {"file": file, "test": name, "num": 0, "awake": 0, "said": said}
            )
            row["num"] += 1
            row["awake"] += (file, test) in passed_awake
    return list(found.values())


def passed(found: Found) -> set[tuple[str, str]]:
    return {key for key, one in found.items() if one["outcome"] == "passed"}


def count(by_way: Mapping[str, Found], way: str, file: str, ended: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's counts, and how its process ended."""
    outcomes = Counter(one["outcome"] for (name, _), one in by_way[way].items() if name == file)
    both = passed(by_way["without"]) & passed(by_way[way])
    return {
        **{name: outcomes[name] for name in ("passed", "failed", "skipped")},
        "passed_as_without": sum(name == file for name, _ in both),
        "exit": ended["exit"],
        "seconds": ended["seconds"],
    }


def told(one: Mapping[str, Any] | None, file: str, test: str, way: str) -> dict[str, Any]:
    said = one["why"] if one else "its process ended before"
    return {"said": said, "reason": reason_for(file, test) if way == "awake" else None}


def is_explained(report: Mapping[str, Any]) -> bool:
    """Returns whether every test that passed without the plug-in passed with it, or has a reason not to."""
    return all(one["reason"] for one in report["lost"])


def to_markdown(report: Mapping[str, Any]) -> str:
    rows, sums = [], Counter[str]()
    for file, ways in report["files"].items():
        counts = {
            "passed": ways["without"]["passed"],
            "failed": ways["without"]["failed"],
            "skipped": ways["without"]["skipped"],
            "asleep": ways["asleep"]["passed_as_without"],
            "awake": ways["awake"]["passed_as_without"],
            "more": ways["awake"]["passed"] - ways["awake"]["passed_as_without"],
        }
        sums.update(counts)
        rows.append([file.removeprefix("tests/"), *counts.values()])
    rows.append(["**all**", *(f"**{sums[name]}**" for name in counts)])
    columns = ["file", "passed", "failed", "skipped", "of these passed, asleep", "awake", "only awake"]
    lost = [one for one in report["lost"] if not one["reason"]]
    by_reason = Counter(one["reason"] for one in report["lost"] if one["reason"])
    blocks = [
        f"vLLM's tests, from its sources {report['sources']}. Passed, failed and skipped: without the plug-in. "
        "Asleep: vLLM loads the plug-in and nothing names it. Awake: every configuration names it, and in tests "
        "of samplers ours stand in for vLLM's.",
        table(columns, rows),
        "## What passed without the plug-in and does not awake, by design",
        table(["tests", "reason"], [[num, reason] for reason, num in by_reason.most_common()]),
        "## Other tests that passed without the plug-in and do not with it",
        "\n".join(f"- {one['way']}: `{one['file']}::{one['test']}`: {one['said']}" for one in lost)
        or "None.",
        "## What fails without the plug-in",
        table(
            ["test", "parameters", "of these pass awake", "one says"],
            [
                [
                    f"{one['file'].removeprefix('tests/')}::{one['test']}",
                    one["num"],
                    one["awake"],
                    one["said"].replace("|", " ")[:90],
                ]
                for one in report["failed"]
            ],
        ),
        "## What the models are",
        table(
            ["asked for", "is"],
            [[", ".join(names), DESCRIBED[local]] for local, names in STAND_INS.items()],
        ),
        "In all three ways engines run eagerly and in the tests' own process, what tests draw without a seed "
        "of their own is seeded, vLLM's replacements for Triton's kernels on CPUs are registered, as a worker "
        "does, and its clean-up after each test passes where no engine was started.",
    ]
    return markdown("vLLM's own tests, with and without the plug-in", report, *blocks)
