"""A run's folder as `tlt train` leaves it, made of few numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.unit.apps.cli.parts import save_tokenizer
from tlt.base.io.files import Record, dumps, write_jsonl
from tlt.base.records import (
    DrafterCheck,
    IdleRecord,
    LengthStats,
    RewardSummary,
    RolloutRecord,
    TurnsRecord,
    UpdateMetrics,
)
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.training.report.step_record import StepRecord
from tlt.training.saved.evaluations import Evaluation

BEGAN = 1_700_000_000.0
STEP_SECONDS = 10.0


def step_record(step: int, **rollout: object) -> StepRecord:
    """The record of a step that ended 10 s after the one before."""
    values: dict[str, object] = {
        "seconds": 6.0,
        "num_responses": 4,
        "num_tokens": 400,
        "response_tokens": LengthStats(100.0, 90.0, 180.0, 200 + step),
        "truncated_share": 0.25,
        "tokens_per_second": 400 / 6,
        "accept_length": 2.0 + step / 8,
        "draft_acceptance_rate_pos": (0.9, 0.8, 0.5),
        "strategy_seconds": {"off": 1.0, "learned:4x1x4": 3.0},
        "strategy_speed": {"off": 50.0, "learned:4x1x4": 100.0},
    }
    return StepRecord(
        step=step,
        policy_version=step - 1,
        step_seconds=STEP_SECONDS,
        cpu_seconds=8.0,
        finished_at=BEGAN + STEP_SECONDS * step,
        rollout=RolloutRecord(**(values | rollout)),  # type: ignore[arg-type]  # fields of several types, by name
        rewards=RewardSummary(0.1 * (step % 7), 0.05 * (step % 5)),
        update=UpdateMetrics(-0.01, 0.3 + step / 100, 0.7, 0.0, float("nan"), 1e-5, 1e-6, 1, 3.0, 1e-4),
        drafter=DrafterCheck(version=step // 2),
        idle=IdleRecord(2.0, 0.5, (0.01,), {"train": 1.0, "rest": 1.0}),
        algorithm="grpo",
    )


def span_rows(step: int) -> list[list[object]]:
    """One rank's spans of a step, as its file holds them: prefill, decode, drafts, waiting, update."""
    start = BEGAN + STEP_SECONDS * (step - 1)
    return [
        ["prefill", start + 0.5, start + 1, 0.5, 1],
        ["decode", start + 1, start + 3, 2.0, 20, "off", 4, 80],
        ["speculate", start + 3, start + 6, 3.0, 30, "learned:4x1x4", 1, 120],
        ["wait", start + 6, start + 6.5, 0.5, 1],
        ["update", start + 6.5, start + 9.5, 3.0, 1],
        ["step", start, start + STEP_SECONDS, STEP_SECONDS, 1],
    ]


def response(step: int, sample: int, text: str, problem: str = "p-1") -> dict[str, object]:
    return {
        "problem_id": problem,
        "sample_index": sample,
        "prompt_ids": [1, 2, 3],
        "token_ids": [4] * (sample + 1),
        "text": text,
        "finish_reason": "stop",
        "purpose": "rollout",
        "policy_step": step - 1,
        "policy_version": step - 1,
        "reward": float(sample % 2),
        "is_solved": bool(sample % 2),
    }


def make_run(folder: Path, num_steps: int = 6, num_ranks: int = 2, text: str = "an answer") -> Path:
    """Writes a run's folder and returns it."""
    (folder / "responses").mkdir(parents=True)
    config = {
        "model": {"path": "no/such/model"},
        "task": {"name": "countdown"},
        "run": {"num_steps": num_steps},
    }
    (folder / "config.json").write_text(json.dumps(config))
    records = [step_record(step) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    for rank in range(num_ranks):
        rows = [row for step in range(1, num_steps + 1) for row in span_rows(step)]
        lines = "".join(dumps(row) + "\n" for row in rows)
        (folder / f"timeline.rank{rank}.jsonl").write_text(lines)
    for step in range(1, num_steps + 1):
        path = folder / "responses" / f"rollout-{step:08d}.jsonl"
        write_jsonl(path, [response(step, sample, f"{text} {step}.{sample}") for sample in range(4)])
    rates = ((0, 0.0), (num_steps, 1.0))
    evaluations = [evaluation(step, rate, {"a": rate, "b": 1.0}) for step, rate in rates]
    write_jsonl(folder / "evaluations.jsonl", evaluations)
    return folder


def evaluation(
    step: int, rate: float, by_problem: dict[str, float], by_task: dict[str, float] | None = None
) -> Record:
    """A line of evaluations.jsonl whose rewards are the solve rates."""
    return vars(Evaluation(step, rate, 1.0, by_problem, by_task or {}, rate, by_problem, 0))


def make_hostile(folder: Path, text: str) -> Path:
    """Writes the folder of a run in whose files this text stands wherever a text may."""
    make_run(folder, num_steps=5, text=text)
    config = {
        "model": {"path": text},
        "task": {"name": text, "data": text},
        "run": {"num_steps": 5},
        text: {text: [text, {text: text}]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    seconds = {text: 2.0, f"{text}:4x1x4": 3.0, "off": 1.0}
    ages = {"1": 5, text: 7}
    records = [
        replace(
            step_record(step, strategy_seconds=seconds, strategy_speed=seconds, followed_by_age=ages),
            algorithm=text,
            rewards=RewardSummary(0.5, 0.5, 1, text, {text: 1.0}, {text: 2.0}, {text: 0.1}, {text: 0.2}, 0.3),
            drafter=DrafterCheck(training=text, version=step // 2),
            idle=IdleRecord(2.0, 0.5, (0.01,), {text: 1.0, "rest": 1.0}, {text: 0.5}),
        )
        for step in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    for path in folder.glob("timeline*"):
        rows = [row for step in range(1, 6) for row in span_rows(step)]
        rows = [[*row[:5], text, *row[6:]] if len(row) > 5 else row for row in rows]
        path.write_text("".join(dumps(row) + "\n" for row in rows))
    for step in range(1, 6):
        kept = [response(step, sample, text, problem=text) for sample in range(4)]
        drafts = [[0, text, 3, 1, None]]
        said = [{"role": "assistant", "content": text}, {"role": "tool", "name": text, "content": text}]
        turns = {"given": [[0, 0]], "messages": said, "last_turn": text}
        lines = [one | {"finish_reason": text, "reward_error": text, "drafts": drafts} for one in kept]
        lines[0]["turns"] = turns
        write_jsonl(folder / "responses" / f"rollout-{step:08d}.jsonl", lines)
    evaluations = [evaluation(step, 0.5, {text: 0.5}, {text: 0.5}) for step in (0, 5)]
    write_jsonl(folder / "evaluations.jsonl", evaluations)
    write_jsonl(folder / "environment.jsonl", [{"began": 1.0, "cpu": text, text: text}])
    (folder / "failures.log").write_text(f"2026-01-01 00:00:00 {text}\n")
    return folder


DRAFTS = ((0, "learned", 4, 2, 9), (3, "ahead", 2, 2, None), (7, "ngram", 5, 1, 12))
"""Verifications of the twelve tokens of `make_coloured`'s response."""


def make_coloured(folder: Path) -> Path:
    """Writes the folder of a run of one step, whose only response has recorded its drafts and whose tokenizer is
    at hand: `12+34=46` and so on, the last token a special one without text."""
    make_run(folder, num_steps=1)
    save_tokenizer(folder / "policy")
    (folder / "policy" / "config.json").write_text(json.dumps({"vocab_size": 61}))
    tokenizer = load_tokenizer(folder / "policy")
    token_ids = [*tokenizer.encode_text("12+34=46[7]")[:11], tokenizer.hf.eos_token_id]
    kept = response(1, 0, tokenizer.decode(token_ids))
    kept |= {"prompt_ids": token_ids[:3], "token_ids": token_ids, "drafts": DRAFTS}
    write_jsonl(folder / "responses" / "rollout-00000001.jsonl", [kept])
    return folder


TURNS = (("12+34=", "[46]"), ("7*8=", "x!"), ("56", ""))
"""The model's turns of `make_conversation`, and the tokens that were given after each."""
DRAFTS_OF_TURNS = (
    (0, "learned", 4, 3, 9),
    (4, "ahead", 4, 4, None),
    (10, "ngram", 3, 1, 12),
    (16, "ngram", 2, 2, None),
)
"""The second one was accepted beyond its turn's end."""


def make_conversation(folder: Path) -> Path:
    """Writes the folder of a run of two steps, the last with one response of three turns, which ends with a
    special token without text."""
    make_coloured(folder)
    turns = TurnsRecord(3.0, 6, 2, 1, 0, 1.2, 0.25, 5, 1.5, 2.0)
    records = [step_record(1, turns=turns), step_record(2, turns=turns)]
    (folder / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    tokenizer = load_tokenizer(folder / "policy")
    ids, given = list[int](), []
    for spoken, said in TURNS:
        ids += tokenizer.encode_text(spoken)
        if said:
            given.append([len(ids), len(ids) + len(said)])
            ids += tokenizer.encode_text(said)
    ids.append(tokenizer.hf.eos_token_id)
    messages = [
        {"role": "assistant", "content": "12+34="},
        {"role": "tool", "name": "add", "content": "46"},
        {"role": "assistant", "content": "7*8="},
        {"role": "tool", "name": "multiply", "content": '{"error": "no"}'},
    ]
    counts = {"num_calls": 2, "num_errors": 1, "num_timeouts": 0, "seconds": 0.25}
    turns_of = {
        "given": given,
        "messages": messages,
        **counts,
        "reward": None,
        "failure": "",
        "last_turn": "56",
    }
    kept = response(1, 0, tokenizer.decode(ids)) | {"token_ids": ids, "drafts": DRAFTS_OF_TURNS}
    write_jsonl(folder / "responses" / "rollout-00000001.jsonl", [kept | {"turns": turns_of}])
    return folder
