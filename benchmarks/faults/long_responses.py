"""Do the tokens of responses of 4,000 tokens depend on who drafts them, and in what company? In float64, float32 and bfloat16.

    python -m benchmarks.faults.long_responses --out benchmarks/results/faults/long-responses

    requests ─▶ engine (dtype, batch, speculation), its verification watched ─▶ tokens, and the logits they were drawn from
                 ├─ against the law: numpy draws again from those very logits                   every token, in every dtype
                 ├─ against other runs: off at the same batch, off at batch 8, float64      the first token that differs
                 └─ against float64: margins of the two best candidates, and what rounding does to them

A difference is a near-tie where the margin, as transformers' model computes it in float64 over the same tokens, is small. Few
differences are seen, so their rate is estimated as well: of a signed margin m between float64's two best candidates rounding
makes m + a in one run and m + b in another, and the two draw different tokens where 0 lies between these. The density of m at 0
being f, that happens at a rate of f · E|a - b|. Both are taken from the tokens with |m| < NEAR.

The recipe's model, its end-of-response token ignored: each response fills its 4,000 tokens, and most of them are text that the
model goes on to write after its answer. Four responses are compared, at batch 1 the first of them; short responses take the
other slots, one after the other. Half an hour of one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.longtail import read_workload
from tlt.bench.report import environment, number, provenance, table, write_report
from tlt.build.engine import EngineSettings, build_engine, load_stored
from tlt.build.model import Model, load_model
from tlt.drafter.formats.folder import StoredDrafter
from tlt.engine.engine import RolloutEngine
from tlt.speculative.params import BatchParams
from tlt.speculative.verify import Noise, verify
from tlt.types import DraftTree, Request, Verdict

Array = NDArray[Any]
Name = tuple[str, int, str]
"""Of a run: dtype, batch, speculation."""
RECIPE = Path("recipes/countdown")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ALL = ("off", "learned:4x1x4", "learned:3x2x6", "ngram:8x1x8", "hybrid:6x1x6", "adaptive")
SOME = ("off", "learned:3x2x6", "adaptive")
RUNS = (
    ("float64", 8, ("off", "adaptive")),
    ("float32", 8, ALL),
    ("bfloat16", 8, SOME),
    ("float32", 1, ALL),
    ("bfloat16", 1, SOME),
    ("float64", 1, SOME),
    ("float32", 32, ("off", "adaptive")),
    ("bfloat16", 32, ("off", "adaptive")),
)
"""Ways to speculate by dtype and batch; what others are compared with comes first."""
COMMON = 8
"""The batch that others are compared with."""
NUM_COMPARED = 4
"""Long responses; short ones keep them company."""
COMPANION_TOKENS = 256
NEAR = 0.25
"""Margins below this stand for those near 0. The scores of the law change over whole units."""
NEAR_TIE = 1e-3


# ── the law, once more ───────────────────────────────────────────────────────────────────────────────────────────────


def noise_of(key: Sequence[int], positions_T: Array, vocab_size: int) -> Array:
    """Gumbel noise as float32[T, V], by the design's words and numpy's integers (tlt/speculative/sampling.py is not asked)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    shape = (len(positions_T), len(blocks))
    counter = [np.broadcast_to(np.uint64(word), shape) for word in (0, 0, key[2], key[3])]
    counter[:2] = [np.broadcast_to(blocks, shape), np.broadcast_to(positions_T.astype(np.uint64)[:, None], shape)]
    keys = [int(key[0]), int(key[1])]
    for _ in range(10):
        products = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (products[1] >> shift) ^ counter[1] ^ np.uint64(keys[0]),
            products[1] & low,
            (products[0] >> shift) ^ counter[3] ^ np.uint64(keys[1]),
            products[0] & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    uniform = (np.stack(counter, axis=-1).reshape(len(positions_T), -1)[:, :vocab_size] + 0.5) * 2.0**-32
    noise_TV: Array = (-np.log(-np.log1p(-uniform))).astype(np.float32)
    return noise_TV


def scores_of(logits_TV: Array, noise_TV: Array) -> Array:
    """The scores at temperature 1, added in the type of the logits, which is float32 where they are narrower."""
    scores_TV: Array = logits_TV + noise_TV.astype(logits_TV.dtype)
    return scores_TV


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Watched:
    """Verifies as the engine does, and keeps the logits that every committed token of the watched was drawn from."""

    watched: frozenset[Request]
    engine: RolloutEngine | None = None
    logits: dict[str, list[Array]] = field(default_factory=dict)

    def __call__(self, tree: DraftTree, logits_BNV: Tensor, noise_BNV: Noise, params: BatchParams) -> list[Verdict]:
        verdicts = verify(tree, logits_BNV, noise_BNV, params)
        assert self.engine is not None
        running = self.engine.running
        assert len(running) == len(verdicts), "no strategy here drafts so long that a chain is verified in pieces"
        wide_BNV = (logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()).numpy()
        for slot, (sequence, verdict) in enumerate(zip(running, verdicts, strict=True)):
            if sequence.request in self.watched:
                self.logits.setdefault(sequence.request.problem_id, []).append(wide_BNV[slot, list(verdict.path)])
        return verdicts


@dataclass(frozen=True)
class Run:
    """The responses of a run by problem: tokens, and scores_TV under the law as the engine computed them."""

    dtype: str
    batch: int
    mode: str
    tokens: Mapping[str, Array]
    scores: Mapping[str, Array]
    entropy: Mapping[str, Array]
    accept_length: float | None
    seconds: float
    num_against_law: int

    @property
    def name(self) -> Name:
        return self.dtype, self.batch, self.mode


def companions(requests: Sequence[Request], batch: int) -> list[Request]:
    """Returns short requests that keep the slots busy which the long ones leave, for as long as they run."""
    length = requests[0].params.max_tokens
    num = max(batch - len(requests), 0) * -(-length // COMPANION_TOKENS)
    params = replace(requests[0].params, max_tokens=min(COMPANION_TOKENS, length))
    return [replace(requests[i % len(requests)], sample_index=1 + i, params=params) for i in range(num)]


def generate(
    model: Model, drafter: StoredDrafter | None, requests: Sequence[Request], name: Name, noise: Mapping[str, Array]
) -> Run:
    """Generates the responses, at most `batch` at a time, in company where there are fewer, and draws their tokens again."""
    dtype, batch, mode = name
    watched = Watched(frozenset(requests))
    rows = [*requests, *companions(requests, batch)]
    settings = EngineSettings(mode, dtype=DTYPES[dtype], max_batch_size=batch)
    engine = watched.engine = build_engine(model.config, model.tensors, settings, drafter, verify=watched)
    start = time.process_time()
    responses = {r.problem_id: np.array(r.token_ids) for r in engine.generate(rows) if not r.sample_index}
    seconds = time.process_time() - start
    scores, entropy, num_against_law = {}, {}, 0
    for problem, tokens_T in responses.items():
        logits_TV = np.concatenate(watched.logits[problem])[: len(tokens_T)]
        scores[problem] = scores_of(logits_TV, noise[problem])
        num_against_law += int((scores[problem].argmax(-1) != tokens_T).sum())  # numpy's argmax is the first, too
        log_p_TV = torch.from_numpy(logits_TV).double().log_softmax(-1).numpy()
        entropy[problem] = -(np.exp(log_p_TV) * log_p_TV).sum(-1)
    return Run(dtype, batch, mode, responses, scores, entropy, engine.stats.accept_length, seconds, num_against_law)


# ── runs beside each other ───────────────────────────────────────────────────────────────────────────────────────────


def first_differences(run: Run, other: Run) -> dict[str, int | None]:
    """Returns, for each response that both have, where they first differ; None: nowhere."""
    found = {}
    for problem in run.tokens.keys() & other.tokens.keys():
        differs_T = run.tokens[problem] != other.tokens[problem]
        found[problem] = int(differs_T.argmax()) if differs_T.any() else None
    return found


def compare(run: Run, other: Run, exact: Run) -> dict[str, Any]:
    """Returns where two runs differ, and how often they should by what rounding does to the margins of float64 (the module's
    words), over the tokens that all three share."""
    firsts = first_differences(run, other)
    gaps: list[Array] = []
    for problem, first in firsts.items():
        ends = [first, *(first_differences(one, exact)[problem] for one in (run, other))]
        end = min((end for end in ends if end is not None), default=len(run.tokens[problem]))
        exact_TV = exact.scores[problem][:end]
        run_T, other_T = (margins_of(one.scores[problem][:end], exact_TV) for one in (run, other))
        gaps.append(np.abs(run_T - other_T)[margins_of(exact_TV, exact_TV) < NEAR])
    length = len(next(iter(run.tokens.values())))
    gaps_N = np.concatenate(gaps)
    return {
        "num_sequences": len(firsts),
        "num_tokens": sum(length if first is None else first + 1 for first in firsts.values()),
        "firsts": {problem: first for problem, first in sorted(firsts.items()) if first is not None},
        "mean_gap": float(gaps_N.mean()) if len(gaps_N) else None,
        "rate": float(gaps_N.mean() * density_at_zero(exact)) if len(gaps_N) else None,
    }


def margins_of(scores_TV: Array, exact_TV: Array) -> Array:
    """Returns by how much these scores prefer float64's best candidate to its second best."""
    two_T2 = exact_TV.argpartition(-2, axis=-1)[:, -2:]
    is_ordered_T = np.take_along_axis(exact_TV, two_T2, -1)[:, 0] <= np.take_along_axis(exact_TV, two_T2, -1)[:, 1]
    pair_T2 = np.take_along_axis(scores_TV.astype(np.float64), two_T2, -1)
    margins_T: Array = np.where(is_ordered_T, pair_T2[:, 1] - pair_T2[:, 0], pair_T2[:, 0] - pair_T2[:, 1])
    return margins_T


def density_at_zero(exact: Run) -> float:
    """Returns the density at 0 of the signed margin between two candidates. Seen without its sign, which of the two is the
    better one, it is twice as much."""
    margins_N = np.concatenate([margins_of(scores, scores) for scores in exact.scores.values()])
    return float((margins_N < NEAR).mean() / NEAR / 2)


class Referee:
    """Transformers' own model in float64: margins over tokens as they stand, without an engine."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    @torch.inference_mode()
    def margin(self, request: Request, tokens_T: Array, first: int, pair: tuple[int, int], noise_TV: Array) -> float:
        """Returns |score of one token - score of the other| at response position `first`, behind the tokens before it."""
        ids = torch.tensor([[*request.prompt_ids, *tokens_T[:first].tolist()]])
        scores_V = self.model(ids, logits_to_keep=1).logits[0, -1].numpy() + noise_TV[first].astype(np.float64)
        return float(abs(scores_V[pair[0]] - scores_V[pair[1]]))


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Measurement:
    """Runs of all kinds, compared as they come; of each only what later ones are compared with is kept."""

    requests: Mapping[str, Request]
    noise: Mapping[str, Array]
    referee: Referee
    kept: dict[Name, Run] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, run: Run) -> None:
        if run.mode == "off":
            self.kept[run.name] = run
        exact = self.kept["float64", COMMON, "off"]
        others = {"off, same batch": self.kept[run.dtype, run.batch, "off"]}
        if run.batch != COMMON:
            others[f"off, batch {COMMON}"] = self.kept[run.dtype, COMMON, "off"]
        if run.dtype != "float64":
            others["float64"] = exact
        against = {
            name: compare(run, other, exact) | {"margins": self._margins(run, other)}
            for name, other in others.items()
            if other is not run
        }
        row = {
            "dtype": run.dtype, "batch": run.batch, "speculation": run.mode, "num_sequences": len(run.tokens),
            "num_tokens": sum(map(len, run.tokens.values())), "num_against_law": run.num_against_law,
            "accept_length": run.accept_length, "cpu_seconds": run.seconds, "against": against,
        }  # fmt: skip
        self.rows.append(row)
        firsts = {name: sorted(one["firsts"].values()) for name, one in against.items()}
        print(*run.name, f"{run.seconds:.0f} s, {run.num_against_law} against the law", firsts, flush=True)

    def _margins(self, run: Run, other: Run) -> dict[str, float]:
        """Returns the margin in float64 at first differences: by the referee, but for bfloat16, which has many, by the engine
        in float64, where that has said the same so far."""
        found = {}
        exact = self.kept["float64", COMMON, "off"]
        far = first_differences(other, exact)
        for problem, first in first_differences(run, other).items():
            if first is None:
                continue
            pair = int(run.tokens[problem][first]), int(other.tokens[problem][first])
            if run.dtype != "bfloat16":
                noise_TV = self.noise[problem]
                found[problem] = self.referee.margin(self.requests[problem], run.tokens[problem], first, pair, noise_TV)
            elif (end := far[problem]) is None or first <= end:
                one, two = exact.scores[problem][first, list(pair)]
                found[problem] = float(abs(one - two))
        return found

    def report(self, length: int) -> dict[str, Any]:
        exact = self.kept["float64", COMMON, "off"]
        margins = np.concatenate([margins_of(scores, scores) for scores in exact.scores.values()])
        quarters = np.array_split(np.mean(list(exact.entropy.values()), axis=0), 4)
        return {
            "command": f"python -m benchmarks.faults.long_responses --length {length}",
            "environment": environment(),
            "length": length,
            "entropy": [float(quarter.mean()) for quarter in quarters],
            "near": float((margins < NEAR_TIE).mean()),
            "density_at_zero": density_at_zero(exact),
            "comparisons": list(dict.fromkeys(name for row in self.rows for name in row["against"])),
            "summary": summarize(self.rows, length),
            "runs": self.rows,
        }


def summarize(rows: Sequence[Mapping[str, Any]], length: int) -> dict[str, Any]:
    """Returns, for each dtype and kind of comparison, sums over all runs; `rate` is the mean of theirs by tokens."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        for against in dict.fromkeys(name for row in rows for name in row["against"]):
            some = [row["against"][against] for row in rows if row["dtype"] == dtype and against in row["against"]]
            if not some:
                continue
            tokens = sum(one["num_tokens"] for one in some)
            rate = sum((one["rate"] or 0.0) * one["num_tokens"] for one in some) / tokens
            margins = [margin for one in some for margin in one["margins"].values()]
            found[f"{dtype} against {against}"] = {
                "num_sequences": sum(one["num_sequences"] for one in some),
                "num_different": sum(len(one["firsts"]) for one in some),
                "first": min((first for one in some for first in one["firsts"].values()), default=None),
                "num_tokens": tokens,
                "expected_differences": rate * tokens,
                "rate_per_token": rate,
                "rate_per_sequence": 1 - (1 - rate) ** length,
                "tokens_for_one_in_1000": round(1e-3 / rate) if rate else None,
                "largest_margin": max(margins, default=None),
            }
    return found


def to_markdown(report: Mapping[str, Any]) -> str:
    sums = [
        [
            name, f"{s['num_different']} of {s['num_sequences']}", number(s["first"], ",d"), f"{s['num_tokens']:,}",
            number(s["expected_differences"], ".2g"), f"{s['rate_per_token']:.1e}", f"{s['rate_per_sequence']:.2%}",
            number(s["tokens_for_one_in_1000"], ",d"), number(s["largest_margin"], ".1e"),
        ]
        for name, s in report["summary"].items()
    ]  # fmt: skip
    runs = [
        [
            row["dtype"], row["batch"], row["speculation"], f"{row['num_against_law']} of {row['num_tokens']:,}",
            number(row["accept_length"]),
            *(differences(row["against"].get(name)) for name in report["comparisons"]),
        ]
        for row in report["runs"]
    ]  # fmt: skip
    words = (
        f"Responses of {report['length']:,} tokens at temperature 1. Entropy of the model by quarters of a response, in nats:"
        f" {', '.join(f'{nats:.2f}' for nats in report['entropy'])}. {report['near']:.2%} of the tokens have a float64 margin"
        f" below {NEAR_TIE}. A rate is of a first difference at a token, by the margins and what rounding does to them; beside"
        " it stands what it gives for a whole response, and after how many tokens one response in 1,000 differs."
    )
    columns = (
        "", "differ", "first at token", "tokens compared", "differences expected", "rate a token", "rate a response",
        "one in 1,000 after", "largest margin",
    )  # fmt: skip
    law = "Against the law: tokens that are not its argmax over the logits that the engine itself computed, of all."
    each = ("dtype", "batch", "speculation", "against the law", "accept length", *report["comparisons"])
    blocks = ["# Responses of 4,000 tokens", *provenance(report), words, table(columns, sums), law, table(each, runs)]
    return "\n\n".join(blocks) + "\n"


def differences(against: Mapping[str, Any] | None) -> str:
    if against is None:
        return "–"
    firsts = sorted(against["firsts"].values())
    return f"{len(firsts)} of {against['num_sequences']}" + (f", from {firsts[0]:,} on" if firsts else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--out", type=Path, required=True, help="without its ending: .json and .md are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(RECIPE / "base")
    drafter = load_stored(RECIPE / "drafter", model)
    workload = {r.problem_id: r for r in read_workload(RECIPE / "longtail.json").requests}
    params = replace(next(iter(workload.values())).params, max_tokens=options.length, stop_ids=())
    requests = [replace(r, params=params, sample_index=0) for r in list(workload.values())[:NUM_COMPARED]]
    noise = {
        r.problem_id: noise_of(r.key, len(r.prompt_ids) + np.arange(options.length), model.config.vocab_size) for r in requests
    }
    measured = Measurement({r.problem_id: r for r in requests}, noise, Referee(RECIPE / "base"))
    for dtype, batch, modes in RUNS:
        for mode in modes:
            measured.add(generate(model, drafter, requests[:batch], (dtype, batch, mode), noise))
            report = measured.report(options.length)
            write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()
