"""The verdict of `tlt audit`: its options, what is printed and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tlt.apps.audit.relation import Relation
from tlt.apps.audit.server import Answers
from tlt.apps.cli.engine import show_busy
from tlt.apps.cli.options import File, Options, StopNumbers, Switch
from tlt.apps.cli.summary import Ended, Summary, log
from tlt.base.config.sampling import LawSection
from tlt.base.io.files import Record, check_output_file, with_folder, write_json
from tlt.base.io.hub import resolve_model
from tlt.base.io.secrets import hide
from tlt.base.io.text import visible
from tlt.base.types import SamplingParams, resolve_dtype
from tlt.base.value_types import Share

if TYPE_CHECKING:
    from tlt.apps.audit.referee import Referee
    from tlt.apps.audit.report import AuditReport
    from tlt.models.hf.tokenizer import Tokenizer


Test = Literal["law", "invariance"]
EXIT_CODES = {"lossless": 0, "invariant": 0, "undecided": 3, "not lossless": 1, "not invariant": 1}
SEVERITY = tuple(EXIT_CODES)


class VerdictOptions(LawSection, Options):
    """The law that the engine was told to draw by, and the verdict:"""

    stop_ids: StopNumbers = SamplingParams.stop_ids
    """Token ids that end a response, beside the model's own."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Largest probability with which a lossless engine is judged not lossless."""
    tolerance: Share = 1e-3
    """Nats by which rounding may move a log-probability; at temperature 0, the gap up to which two tokens are
    tied."""
    referee_dtype: Literal["float32", "float64"] = "float32"
    """Number type of the model in transformers."""
    referee_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model in transformers. auto: the GPU where there is one; cpu where it does not fit there
    beside the engine."""
    few_tokens_pass: Switch = False
    """Exits with 0 also where nothing speaks against losslessness, but the tokens are too few to call it
    proven."""
    out: File = None
    """JSON to write, with the complete reports."""

    def params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        law = {name: getattr(self, name) for name in LawSection.model_fields}
        return SamplingParams(**law, stop_ids=tuple(sorted({*stop_ids, *self.stop_ids})))


@dataclass(frozen=True)
class Judge:
    """referee: None where nothing is judged by the law."""

    options: VerdictOptions
    tokenizer: Tokenizer | None
    params: SamplingParams
    """The law, with the model's own ends."""
    vocab_size: int
    window: int
    referee: Referee | None

    @staticmethod
    def load(options: VerdictOptions, model: Path, threads: int, test: Test = "law") -> Judge:
        check_output_file(options.out, "--out")
        folder = resolve_model(model)
        with show_busy():
            import torch

            from tlt.apps.audit.referee import Referee
            from tlt.engine.build.model import resolve_device
            from tlt.models.hf.limits import read_limits
            from tlt.models.hf.tokenizer import check_stop_ids, has_tokenizer, load_tokenizer, read_stop_ids

            torch.set_num_threads(threads)
            referee = None
            if test == "law":
                device = resolve_device(options.referee_device, "--referee-device")
                referee = Referee(folder, resolve_dtype(options.referee_dtype), device)
                sizes = referee.vocab_size, referee.window
            else:
                limits = read_limits(folder)
                sizes = limits.vocab_size, limits.max_positions
            tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        params = options.params(tokenizer.stop_ids if tokenizer is not None else read_stop_ids(folder))
        check_stop_ids(params, sizes[0], "--stop")
        return Judge(options, tokenizer, params, *sizes, referee)

    def judge(self, mode: str, answers: Answers, limit: int | None = None, seed: int = 0) -> AuditReport:
        """limit: token limit of the responses; None: unknown."""
        from tlt.apps.audit.verdict import Auditor

        assert self.referee is not None
        note_missing(answers)
        auditor = Auditor(
            self.params,
            self.vocab_size,
            self.window,
            alpha=self.options.alpha,
            tolerance=self.options.tolerance,
            limit=limit,
            seed=seed,
        )
        report = auditor.judge(mode, answers.rollouts, self.referee)
        log(f"{report.num_responses} responses judged, by the model on {self.referee.model.device}")
        report = replace(report, num_missing=answers.num_missing)
        if (tokenizer := self.tokenizer) is None:
            return report
        return report.with_texts(lambda token_id: str(tokenizer.hf.convert_ids_to_tokens(token_id)))


def note_missing(answers: Answers) -> None:
    if answers.num_missing:
        asked = len(answers.rollouts) + answers.num_missing
        said = f"{answers.num_missing} of {asked} responses are missing, the others are judged"
        log(f"{said}: {hide(visible(answers.why))}")


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────────────


def print_report(report: AuditReport) -> None:
    print(f"{report.mode}: {report.sentence}", flush=True)
    for one in report.offenders[:5] if report.is_convicted else ():
        said = f"{one.token_id} {one.text!r} with p = {one.p:.2g}"
        expected = f"{one.expected_id} {one.expected_text!r} with p = {one.expected_p:.2g}"
        where = f"response {one.response} ({one.problem_id}), token {one.position}"
        print(f"  {where}: {said}; expected {expected}")


def end(options: VerdictOptions, reports: Sequence[AuditReport], **facts: str) -> Ended:
    _write(options, "modes", reports, "verdict", "is_lossless", "mean_tokens")
    worst = _worst(reports)
    modes = {one.mode: {"lossless": one.is_lossless, "log10_e": one.max_log10_e} for one in reports}
    passes = options.few_tokens_pass and all(one.is_lossless or one.has_no_evidence for one in reports)
    summary: Record = {"lossless": worst.is_lossless, "modes": modes, **facts}
    return Ended(summary, 0 if passes else EXIT_CODES[worst.verdict])


def end_relations(options: VerdictOptions, relations: Sequence[Relation], **facts: str) -> Ended:
    _write(options, "ways", relations, "verdict", "is_invariant")
    worst = _worst(relations)
    ways = {one.way: {"invariant": one.is_invariant, **_counts(one)} for one in relations}
    return Ended({"invariant": worst.is_invariant, "ways": ways, **facts}, EXIT_CODES[worst.verdict])


def _counts(one: Relation) -> Record:
    names = ("num_differing", "num_logprobs", "largest", "num_equal", "num_responses")
    return {name.removeprefix("num_"): getattr(one, name) for name in names}


def _worst(judged: Sequence[Any]) -> Any:
    return max(judged, key=lambda one: SEVERITY.index(one.verdict))


def _write(options: VerdictOptions, name: str, judged: Sequence[Any], *derived: str) -> None:
    if options.out is None:
        return
    records = [{**asdict(one), **{key: getattr(one, key) for key in derived}} for one in judged]
    command, told = " ".join(["tlt", *sys.argv[1:]]), options.model_dump(mode="json")
    write_json(with_folder(options.out), {"command": command, "options": told, name: records})


def summarize(record: Record) -> Summary:
    name, entries = ("lossless", "modes") if "modes" in record else ("invariant", "ways")
    verdict = {True: name, False: f"NOT {name}", None: "undecided"}
    rows = {key: verdict[one[name]] for key, one in record[entries].items()}
    if (device := record.get("device")) is not None:
        rows["computed on"] = device
    return Summary(verdict[record[name]], rows)
