"""Which engines sample by the law, give the same bits in whatever way, and the same tokens with drafts as without.

python -m benchmarks.invariance MODEL --name NAME --out OUT [--engines tlt,…] [--dtypes float32,…]

    tlt        `tlt audit engine`, by its own reports
    others     a process each, with drafts and without, in its own environment (*_ways.py) ─▶ files of responses
               ─▶ compared by tlt/apps/audit/relation.py, judged by `tlt audit responses`

Rows of OUT.json that are not made anew are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import carry_out, command_of, make_parser, run_child, words
from benchmarks.gguf_export import export_gguf
from benchmarks.invariance.ways import Asked, Job
from benchmarks.real_size.competitors import check_python, environment_of
from benchmarks.report import environment, table, write_report
from tlt.apps.audit.relation import Relation, compare
from tlt.apps.audit.responses import read_responses
from tlt.base.io.files import parse_json
from tlt.base.types import Request, Rollout, SamplingParams, UserError, resolve_dtype
from tlt.models.hf.limits import read_limits
from tlt.models.hf.prompts import encode_prompts, make_requests
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.tasks.base import make_problems

ENGINES = ("tlt", "transformers", "llama.cpp", "vllm", "vllm-repaired")
MODULES = {"transformers": "transformers_ways", "llama.cpp": "llama_ways"}
PACKAGES = {"vllm": "vllm", "vllm-repaired": "vllm", "llama.cpp": "llama_cpp", "transformers": "transformers"}
BATCHES = (4, 16)
TASK = "countdown"


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = make_parser("invariance", __doc__)
    parser.add_argument("model", type=Path, help="Hugging Face checkpoint folder")
    parser.add_argument("--name", required=True, help="the model's name in the table")
    parser.add_argument("--engines", type=words, default=ENGINES)
    parser.add_argument("--dtypes", type=words, default=("float32", "bfloat16"))
    parser.add_argument("--drafter", type=Path, help="of TLT; else it drafts by retrieval")
    parser.add_argument("--vllm", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--llama", type=Path, default=Path(sys.executable), help="… llama-cpp-python")
    parser.add_argument("--num", type=int, default=16, help="requests of the relation")
    parser.add_argument("--law", type=int, default=48, help="requests that are judged by the law; 0: none")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    return parser, parser.parse_args()


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────


def requests_of(options: argparse.Namespace, num: int, stop_ids: tuple[int, ...]) -> list[Request]:
    limits, tokenizer = read_limits(options.model), load_tokenizer(options.model)
    problems = make_problems(TASK, num, 0, {"split": "test"})
    records = [(f"task {TASK}", problem) for problem in problems]
    prompts = encode_prompts(records, tokenizer, vocab_size=limits.vocab_size, window=limits.max_positions)
    params = SamplingParams(max_tokens=options.max_tokens, stop_ids=stop_ids)
    return make_requests(prompts, params, 1)


def _asked(requests: Sequence[Request]) -> list[dict[str, Any]]:
    seeds = [request.noise_key[0] >> 1 for request in requests]
    return [
        dataclasses.asdict(Asked(r.problem_id, r.sample_index, list(r.prompt_ids), seed))
        for r, seed in zip(requests, seeds, strict=True)
    ]


def job_of(options: argparse.Namespace, dtype: str, folder: Path) -> Job:
    """Returns what all processes of a row are told; `drafts` and `repairs` differ."""
    stop_ids = load_tokenizer(options.model).stop_ids
    asked, law = (requests_of(options, num, stop_ids) if num else [] for num in (options.num, options.law))
    longest = max(len(request.prompt_ids) for request in (*asked, *law)) + options.max_tokens
    return {
        "model": str(options.model.absolute()),
        "gguf": str(folder.parent / f"{dtype}.gguf"),
        "dtype": dtype,
        "threads": options.threads,
        "stop_ids": list(stop_ids),
        "max_tokens": options.max_tokens,
        "window": min(longest + 1, read_limits(options.model).max_positions),
        "batch_sizes": BATCHES,
        "asked": _asked(asked),
        "law": _asked(law),
        "out": str(folder),
    }


# ── other engines ───────────────────────────────────────────────────────────────────────────────────────────


def measure_other(options: argparse.Namespace, engine: str, dtype: str, folder: Path) -> dict[str, Any]:
    job = job_of(options, dtype, folder)
    kind, module = ("vllm", "vllm_ways") if "vllm" in engine else (engine, MODULES[engine])
    pythons = {"vllm": options.vllm, "llama.cpp": options.llama}
    python = pythons.get(kind, Path(sys.executable))
    check_python(f"--{kind.partition('.')[0]}", python, PACKAGES[engine])
    if kind == "llama.cpp" and not Path(job["gguf"]).exists():
        export_gguf(options.model, Path(job["gguf"]), resolve_dtype(dtype))
    for drafts in (False, True):
        file = folder / "job.json"
        file.write_text(json.dumps({**job, "drafts": drafts, "repairs": engine == "vllm-repaired"}))
        environ = environment_of(kind, python, options.threads, os.environ)
        run_child([python, "-P", "-m", f"benchmarks.invariance.{module}", file], **environ)
    asked = {name: _read(options, folder / f"{name}.jsonl") for name in _names()}
    ways = [compare(f"batch of {n}", asked["alone"], asked[f"batch-{n}"], options.num) for n in BATCHES]
    ways += [
        compare("drafts", asked["greedy-off"], asked["greedy-on"], options.num),
        compare("prefilled", asked["alone"], asked["prefilled"], options.num),
    ]
    seeded = compare("seeded", asked["seeded-off"], asked["seeded-on"], options.num)
    return {
        "versions": json.loads((folder / "versions.json").read_text()),
        "law": {name: _judge(options, folder / f"law-{name}.jsonl") for name in ("off", "on") if options.law},
        "ways": {way.way: _counts(way) for way in ways},
        "on = off": {"seeded": _equal(seeded), "greedy": _equal(ways[-2])},
    }


def _names() -> list[str]:
    batches = [f"batch-{size}" for size in BATCHES]
    return [
        "alone",
        *batches,
        "prefilled",
        *(f"{w}-{d}" for w in ("seeded", "greedy") for d in ("off", "on")),
    ]


def _read(options: argparse.Namespace, path: Path) -> tuple[Rollout, ...]:
    limits = read_limits(options.model)
    return read_responses(path, vocab_size=limits.vocab_size, window=limits.max_positions)


def _judge(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    report = _audit(path.parent, "responses", options.model, path, "--threads", options.threads)
    return _verdict(report["modes"][0])


def _verdict(mode: Mapping[str, Any]) -> dict[str, Any]:
    return {key: mode[key] for key in ("verdict", "reasons", "num_tokens", "max_log10_e", "tokens_for_power")}


def _counts(one: Relation) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "is_invariant": one.is_invariant}


def _equal(one: Relation) -> list[int]:
    return [one.num_equal, one.num_responses]


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_tlt(options: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    drafts = ["4x1x4", "3x2x5"] if options.drafter else ["ngram:4x1x4"]
    drafter = ["--drafter", options.drafter] if options.drafter else []
    common = ["--speculation", ",".join(["off", *drafts]), *drafter, "--dtype", dtype]
    common += [
        "--max-tokens",
        options.max_tokens,
        "--threads",
        options.threads,
        "--task",
        TASK,
        "--samples",
        1,
    ]
    law = ["engine", options.model, *common, "--num", options.law]
    modes = _audit(folder, *law)["modes"] if options.law else []
    relation = ["engine", options.model, *common, "--num", options.num, "--test", "invariance"]
    sizes = ",".join(map(str, BATCHES))
    sampled = _ways(_audit(folder, *relation, "--batch-sizes", sizes))
    greedy = _ways(_audit(folder, *relation, "--batch-sizes", 1, "--temperature", 0))
    drafted = [way for way in sampled if way.partition(",")[0] in drafts and "batch" in way]
    worst = max((sampled[way] for way in drafted), key=lambda one: one["num_differing"])
    first = [f"{drafts[0]}, batch of 1", f"{drafts[-1]}, batch of 1"]
    return {
        "versions": {"tlt": environment()["tlt"]},
        "law": dict(zip(("off", "on"), map(_verdict, modes), strict=False)),
        "ways": {
            **{f"batch of {n}": sampled[f"off, batch of {min(n, options.num)}"] for n in BATCHES},
            "drafts": worst,
            "prefilled": sampled["off, prefilled"],
            "trainer": sampled["trainer"],
        },
        "all ways": sampled,
        "on = off": {
            name: [min(found[way][key] for way in first) for key in ("num_equal", "num_responses")]
            for name, found in (("seeded", sampled), ("greedy", greedy))
        },
    }


def _ways(report: Mapping[str, Any]) -> dict[str, Any]:
    return {one["way"]: one for one in report["ways"]}


def _audit(folder: Path, *arguments: object) -> dict[str, Any]:
    """Runs `tlt audit`, of which a verdict is no failure, and returns its report."""
    out = folder / "report.json"
    command = [sys.executable, "-c", AUDIT, "audit", *map(str, arguments), "--out", out]
    run_child(command)
    report: dict[str, Any] = parse_json(out.read_text())
    return report


AUDIT = "import sys; from tlt.apps.cli.main import main; sys.exit(main(sys.argv[1:]) not in (0, 1, 3))"


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────

HEAD = [
    "model", "engine", "type", "lawful, off", "lawful, with drafts", "batch of 4", "batch of 16", "drafts",
    "prefilled", "trainer", "on = off: seeded", "greedy",
]  # fmt: skip
SAID = (
    "Lawful: the audit's verdict and the tokens judged. Then log-probabilities that differ in any bit from those of one request at "
    "a time, of how many up to where tokens part, and the largest difference in nats; drafts: from those without drafts, where tokens are equal (TLT: its "
    "worst mode and batch, sampled; others: greedy). A batch of 16 holds all requests where they are fewer. On = off: responses whose tokens are equal with drafts and without, sampled "
    "with the same seed, and greedy. vLLM without prefix caching; vllm-repaired: with the one faulty function of its CPU build "
    "replaced (docs/audit.md). A dash: not measured, or the engine has no such way."
)


def cells(row: Mapping[str, Any]) -> list[str]:
    law = [_law_cell(row["law"].get(name)) for name in ("off", "on")]
    ways = [
        _way_cell(row["ways"].get(way))
        for way in ("batch of 4", "batch of 16", "drafts", "prefilled", "trainer")
    ]
    equal = ["{} of {}".format(*row["on = off"][name]) for name in ("seeded", "greedy")]
    said = ", ".join(f"{name} {number}" for name, number in row["versions"].items() if name != "torch")
    repaired = " (repaired)" if row["engine"].endswith("repaired") else ""
    return [row["model"], said + repaired, row["dtype"], *law, *ways, *equal]


def _law_cell(mode: Mapping[str, Any] | None) -> str:
    if mode is None:
        return "–"
    said = {"not lossless": "**no**", "lossless": "yes"}.get(mode["verdict"], "nothing against it")
    return f"{said}, {mode['num_tokens']:,}"


def _way_cell(way: Mapping[str, Any] | None) -> str:
    if way is None:
        return "–"
    gap = f", {way['largest']:.0e}" if way["num_differing"] else ""
    equal, num = way["num_equal"], way["num_responses"]
    parted = f"; tokens equal in {equal} of {num}" if equal < num else ""
    return f"{way['num_differing']:,} of {way['num_logprobs']:,}{gap}{parted}"


def to_markdown(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    commands = sorted({(row["environment"]["commit"], row["command"]) for row in rows})
    machines = sorted({f"{row['environment']['cpu']}, {row['environment']['instructions']}" for row in rows})
    made = "\n".join(f"    {command}    # {commit}" for commit, command in commands)
    machine = (
        f"{'; '.join(machines)}; {', '.join(sorted({str(row['threads']) for row in rows}))} thread a process."
    )
    blocks = ["# Lawful, invariant, on = off", SAID, machine, table(HEAD, map(cells, rows)), "Made by:", made]
    return "\n\n".join(blocks) + "\n"


def instructions() -> str:
    """Returns what a CPU has for wide and narrow numbers, from which kernels are chosen."""
    cpuinfo = Path("/proc/cpuinfo")
    found = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    wanted = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
    return ", ".join(name if flag in found else f"no {name}" for flag, name in wanted.items())


def main() -> None:
    parser, options = parse()
    if unknown := [name for name in options.engines if name not in ENGINES]:
        raise UserError(f"--engines: {unknown[0]!r} is unknown; give some of {', '.join(ENGINES)}")
    file = options.out.with_name(f"{options.out.name}.json")
    with tempfile.TemporaryDirectory(prefix="invariance-") as kept:
        for dtype, engine in ((d, e) for d in options.dtypes for e in options.engines):
            folder = Path(kept) / f"{engine}-{dtype}"
            folder.mkdir()
            start = time.monotonic()
            if engine == "tlt":
                found = measure_tlt(options, dtype, folder)
            else:
                found = measure_other(options, engine, dtype, folder)
            row = {
                "model": options.name,
                "engine": engine,
                "dtype": dtype,
                "threads": options.threads,
                **found,
            }
            machine = environment() | {"instructions": instructions()}
            row |= {
                "seconds": time.monotonic() - start,
                "command": command_of(parser),
                "environment": machine,
            }
            print(" | ".join(cells(row)), flush=True)
            others = parse_json(file.read_text())["rows"] if file.exists() else []
            rows = [row, *(other for other in others if _key(other) != _key(row))]
            ordered = {"rows": sorted(rows, key=_order)}
            write_report(options.out, ordered, to_markdown(ordered))


def _command(parser: argparse.ArgumentParser) -> str:
    """Returns the command without this machine's folders."""
    return command_of(parser, [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]])


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["engine"], row["dtype"]


def _order(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["model"], ENGINES.index(row["engine"]), row["dtype"]


if __name__ == "__main__":
    sys.exit(carry_out("invariance", main))
