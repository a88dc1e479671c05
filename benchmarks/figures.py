"""The figures that README.md and docs/results.md cite: which command measures each, and where it stands on the pages.

    MEASUREMENTS   a command, minutes, the paths that it measures ─▶ report ─ at ─▶ figures, 25 at most
    TABLES         rows of figures, between the markers <!-- evidence: NAME --> of a page

evidence.py runs the commands and writes the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENGINE = ("tlt/base", "tlt/engine", "tlt/models", "tlt/speculation", "tlt/drafter")
STEP = (*ENGINE, "tlt/training", "tlt/tasks")
QWEN_BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Figure:
    """A value of a measurement's report.

    at, base: where the value and what it is compared with stand: keys, indices, and KEY=VALUE for the entry of a list
        that has this value, such as `measurements.batch_size=4.ratios.adaptive`. An empty base: there is none.
    unit: speedup (a ratio of paired turns, above 1 is faster) or solved (a share of problems).
    """

    says: str
    at: str
    base: str = ""
    base_unit: str = "tokens/s"
    unit: str = "speedup"


@dataclass(frozen=True)
class Measurement:
    """A benchmark, run once for several figures.

    command: after `python -m`. {out}: the report without its ending; {smollm2}, {qwen}: folders of `tlt init
        --from-pypi`; {gsm8k}, {drafter}: made beforehand (evidence.MADE); {vllm}: an interpreter with vLLM.
    minutes: how long it is expected to take on two cores.
    paths: what it measures: a figure is of an earlier tree once they compute something else (evidence.has_changed).
    report: the file to read; JSON lines are a list.
    needs: a package that this interpreter must have.
    """

    command: str
    minutes: float
    paths: tuple[str, ...]
    figures: Mapping[str, Figure]
    report: str = "{out}.json"
    needs: str | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """What git looks at: the paths, and the program's own files."""
        package, _, program = self.command.split()[0].partition(".")
        return self.paths if package == "tlt" else (*self.paths, f"{package}/{program}*")


@dataclass(frozen=True)
class Table:
    """A table of a page. Each row: its words, then cells of figures by name; NAME.base: what the figure is compared with. A
    last column tells the commit."""

    page: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1
    """Leading cells of a row that are text."""


def _solved(name: str, says: str) -> dict[str, Figure]:
    return {name: Figure(says, "-1.solve_rate", base="0.solve_rate", base_unit="solved", unit="solved")}


def _constant(batch: int) -> Figure:
    at = f"measurements.batch_size={batch}"
    says = f"rollouts of the Countdown model at a constant batch of {batch}"
    return Figure(says, f"{at}.ratios.adaptive", base=f"{at}.tokens_per_second.off")


def _qwen(batch: int) -> dict[str, Figure]:
    cell, says = f"cells.batch_size={batch}", f"rollouts of Qwen2.5-0.5B in bfloat16 at batch {batch}"
    return {
        f"qwen-drafts-{batch}": Figure(
            f"{says}: adaptive, with its drafter, over off",
            f"{cell}.competitors.tlt-warm.over_base",
            base=f"{cell}.competitors.tlt-off.tokens_per_second",
        ),
        f"qwen-vllm-{batch}": Figure(
            f"{says} without drafts, beside vLLM without drafts",
            f"{cell}.verdicts.tlt-off.ratio",
            base=f"{cell}.competitors.vllm-off.tokens_per_second",
        ),
    }


TRAIN = " --out {out} --run.out_dir {out}-run"
EVALUATIONS = "{out}/evaluations.jsonl"

MEASUREMENTS: Mapping[str, Measurement] = {
    "train-headline": Measurement(
        "benchmarks.train recipes/countdown/headline.toml --variants tlt,ahead,frozen --steps 12 --minutes 25"
        + TRAIN,
        minutes=12,
        paths=(*STEP, "recipes/countdown"),
        figures={
            "headline-step": Figure(
                "long-tailed Countdown, 32 responses a step: a whole step",
                "runs.tlt.ratios.off",
                base="runs.off.step_seconds",
                base_unit="s",
            ),
            "headline-rollout": Figure("the same: the rollout alone", "runs.tlt.rollout_speedup"),
            "headline-ahead": Figure("the same with `rollout.ahead`: a whole step", "runs.ahead.ratios.off"),
            "headline-online": Figure(
                "the drafter trained in idle time, over left as it is: a whole step", "runs.tlt.ratios.frozen"
            ),
        },
    ),
    "ahead-tail": Measurement(
        "benchmarks.train recipes/countdown/headline.toml --variants tlt,ahead --steps 16 --minutes 15"
        " --rollout.problems_per_step 2 --rollout.samples_per_problem 4 --sampling.max_tokens 3600" + TRAIN,
        minutes=8,
        paths=(*STEP, "recipes/countdown"),
        figures={
            "tail-ahead": Figure(
                "8 long responses a step, with `rollout.ahead`: a whole step",
                "runs.ahead.ratios.off",
                base="runs.off.step_seconds",
                base_unit="s",
            )
        },
    ),
    "smollm2-reasoning": Measurement(
        "benchmarks.train {smollm2}/reasoning.toml --variants tlt --steps 5 --minutes 25" + TRAIN,
        minutes=10,
        paths=(*STEP, "recipes/smollm2"),
        figures={
            "smollm2-step": Figure(
                "SmolLM2-135M writes sums out, 64 responses a step: a whole step",
                "runs.tlt.ratios.off",
                base="runs.off.step_seconds",
                base_unit="s",
            ),
            "smollm2-rollout": Figure("the same: the rollout alone", "runs.tlt.rollout_speedup"),
        },
    ),
    "rollout-constant": Measurement(
        "benchmarks.constant countdown --batches 1,4,16,64 --rounds 8 --seconds 2 --out {out}",
        minutes=4,
        paths=(*ENGINE, "recipes/countdown"),
        figures={f"constant-{batch}": _constant(batch) for batch in (1, 16, 64)},
    ),
    "rollout-longtail": Measurement(
        "benchmarks.rollout recipes/countdown/quickstart.toml --rounds 5 --rollout.max_batch_size 128 --out {out}",
        minutes=3,
        paths=(*ENGINE, "recipes/countdown"),
        figures={
            "longtail": Figure(
                "a rollout of 128 responses, median length 186, longest 1,881",
                "measurements.kind=longtail.ratios.adaptive",
                base="measurements.kind=longtail.tokens_per_second.off",
            )
        },
    ),
    "qwen": Measurement(
        "benchmarks.real_size {qwen}/gpu.toml --task.data {gsm8k} --task.subset none --split test"
        " --model.adapter none --drafter.path {drafter} --competitors tlt-off,tlt-cold,tlt-warm,vllm-off,vllm-3"
        " --batches 1,4,16,64 --tokens 128 --rounds 3 --cell-minutes 9 --pinned tlt,vllm --vllm {vllm} --out {out}",
        minutes=25,
        paths=(*ENGINE, "benchmarks/real_size"),
        figures={name: figure for batch in QWEN_BATCHES for name, figure in _qwen(batch).items()},
    ),
    "trl": Measurement(
        "benchmarks.trl --responses 64 --max-tokens 1024 --steps 1 --rounds 3 --ranks 2 --out {out}",
        minutes=17,
        paths=(*STEP, "tlt/apps/integrations", "recipes/countdown"),
        needs="trl",
        figures={
            "trl-step": Figure(
                "`tlt train` beside TRL's GRPOTrainer, which generates by transformers: a whole step",
                "rows.arm=tlt.step_speedup",
                base="rows.arm=trl.step_seconds",
                base_unit="s",
            ),
            "trl-rollout": Figure("the same: the rollout alone", "rows.arm=tlt.rollout_speedup"),
        },
    ),
    "quickstart": Measurement(
        "tlt train countdown --run.out_dir {out}",
        minutes=10,
        paths=(*STEP, "recipes/countdown"),
        figures=_solved("solved-quickstart", "`make train`: Countdown, 256 held-out puzzles"),
        report=EVALUATIONS,
    ),
    "math": Measurement(
        "tlt train math --run.out_dir {out}",
        minutes=8,
        paths=(*STEP, "recipes/math"),
        figures=_solved("solved-math", "`tlt train math`: word problems, 256 held out"),
        report=EVALUATIONS,
    ),
    "smollm2-additions": Measurement(
        "tlt train {smollm2}/quickstart.toml --run.out_dir {out}",
        minutes=10,
        paths=(*STEP, "recipes/smollm2"),
        figures=_solved("solved-additions", "`tlt train smollm2`: two-digit additions, 128 held out"),
        report=EVALUATIONS,
    ),
    "smollm2-sums": Measurement(
        "tlt train {smollm2}/reasoning.toml --run.out_dir {out}",
        minutes=26,
        paths=(*STEP, "recipes/smollm2"),
        figures=_solved("solved-sums", "`tlt train smollm2/reasoning`: sums written out, 192 held out"),
        report=EVALUATIONS,
    ),
}

FIGURES: Mapping[str, Figure] = {
    name: figure for one in MEASUREMENTS.values() for name, figure in one.figures.items()
}

COUNTDOWN = "4M, Countdown"
SMOLLM2, QWEN = "SmolLM2-135M", "Qwen2.5-0.5B"
BATCHES = f"batch {' · '.join(map(str, QWEN_BATCHES))}"


def _cells(name: str) -> str:
    return " ".join(f"{name}-{batch}" for batch in QWEN_BATCHES)


TABLES: Mapping[str, Table] = {
    "first screen": Table(
        "README.md",
        ("compared with", "model and task", "whole step", "rollout"),
        (
            (f"TLT without speculation, {BATCHES}", f"{QWEN}, GSM8K", "", _cells("qwen-drafts")),
            ("TLT without speculation", f"{SMOLLM2}, stepwise sums", "smollm2-step", "smollm2-rollout"),
            ("TLT without speculation", f"{COUNTDOWN}, long tail", "headline-step", "headline-rollout"),
            (f"vLLM 0.32 on CPUs, both without drafts, {BATCHES}", f"{QWEN}, GSM8K", "", _cells("qwen-vllm")),
            ("TRL 1.16, generating by transformers", COUNTDOWN, "trl-step", "trl-rollout"),
        ),
        num_words=2,
    ),
    "solved": Table(
        "docs/results.md",
        ("recipe", "model", "held-out problems × samples", "solved before → after"),
        (
            ("`countdown` (`make train`), nine minutes", COUNTDOWN, "256 × 1", "solved-quickstart"),
            ("`math`, word problems, three minutes", "3M", "256 × 4", "solved-math"),
            ("`smollm2`, two-digit additions, eight minutes", SMOLLM2, "128 × 1", "solved-additions"),
            ("`smollm2/reasoning`, sums written out, 24 minutes", SMOLLM2, "192 × 1", "solved-sums"),
        ),
        num_words=3,
    ),
    "steps": Table(
        "docs/results.md",
        ("workload", "model", "without, s a step", "whole step", "rollout alone"),
        (
            (
                "long-tailed, 32 responses",
                COUNTDOWN,
                "headline-step.base",
                "headline-step",
                "headline-rollout",
            ),
            ("the same, with `rollout.ahead`", COUNTDOWN, "", "headline-ahead", ""),
            (
                "the same, a drafter trained in idle time over one left as it is",
                COUNTDOWN,
                "",
                "headline-online",
                "",
            ),
            ("8 long responses, with `rollout.ahead`", COUNTDOWN, "tail-ahead.base", "tail-ahead", ""),
            (
                "sums written out, 64 responses",
                SMOLLM2,
                "smollm2-step.base",
                "smollm2-step",
                "smollm2-rollout",
            ),
            ("`tlt train` over TRL 1.16's own step", COUNTDOWN, "trl-step.base", "trl-step", "trl-rollout"),
        ),
        num_words=2,
    ),
    "rollouts": Table(
        "docs/results.md",
        ("model", "batch", "without, tokens/s", "speedup of `adaptive`"),
        (
            *((COUNTDOWN, str(b), f"constant-{b}.base", f"constant-{b}") for b in (1, 16, 64)),
            (COUNTDOWN, "128, long tail", "longtail.base", "longtail"),
            *(
                (f"{QWEN}, bfloat16, GSM8K", str(b), f"qwen-drafts-{b}.base", f"qwen-drafts-{b}")
                for b in QWEN_BATCHES
            ),
        ),
        num_words=2,
    ),
    "beside vLLM": Table(
        "docs/results.md",
        ("model", "batch", "vLLM, tokens/s", "speedup over it"),
        (*((f"{QWEN}, bfloat16", str(b), f"qwen-vllm-{b}.base", f"qwen-vllm-{b}") for b in QWEN_BATCHES),),
        num_words=2,
    ),
}
