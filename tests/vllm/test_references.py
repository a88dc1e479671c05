"""vLLM that drafts from references: whatever they say, the tokens are those of our own engine; right ones
are followed far."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.side_by_side import answers
from tests.reference_kinds import KINDS, reference_of
from tests.unit.cli.parts import read_lines, succeed, write_lines
from tests.vllm.parts import BASE, DRAFTER, assert_equal, in_vllm
from tlt.assembly.engine import EngineSettings, load_engine
from tlt.assembly.model import load_model, load_model_for
from tlt.config.drafter import DrafterSection
from tlt.config.vllm import VllmSection
from tlt.drafter.drafting.references import References
from tlt.types import Request, Rollout, SamplingParams

pytestmark = in_vllm

MODEL = load_model(BASE, torch.float32)
VOCAB = MODEL.config.vocab_size
WINDOW = 240
PARAMS = (SamplingParams(1.0), SamplingParams(0.0), SamplingParams(0.8, top_k=9, top_p=0.95, min_p=0.02))
ARMS: dict[str, tuple[str, Path | None, dict[str, Any]]] = {
    "nothing else": ("ahead:256x1x256", None, {}),
    "EAGLE beside": ("ahead+learned:64x1x64", DRAFTER, {"max_draft_tokens": 4}),
    "adaptive, EAGLE": ("adaptive", DRAFTER, {"max_draft_tokens": 4}),
    "a worker of its own": ("ahead:64x1x64", None, {"own_process": True}),
    "retrieval beside": ("ahead+ngram:64x1x64", None, {"own_process": True}),
}


def requests_for(num: int = 9, max_tokens: int = 90) -> list[Request]:
    assert MODEL.tokenizer is not None
    prompts = [tuple(MODEL.tokenizer.encode_text(f"[{i + 1},{i + 3},7:{20 + i}]")) for i in range(num)]
    params = [
        replace(one, max_tokens=max_tokens, seed=6) for one in PARAMS
    ]  # without stop tokens: long responses
    return [Request(f"f{i}", 0, prompt, params[i % 3]) for i, prompt in enumerate(prompts)]


REQUESTS = requests_for()


def engine_with(arm: str, references: References, batch: int = 6, **vllm: Any) -> Any:
    speculation, drafter, section = ARMS[arm]
    settings = EngineSettings(
        speculation,
        engine="vllm",
        max_batch_size=batch,
        drafting=DrafterSection(train=False),
        kv_gib=0.25,
        vllm=VllmSection(**{"compile": False} | section | vllm),
        window=WINDOW,
    )
    return load_engine(load_model_for(BASE, "vllm"), settings, drafter, references=references)


@pytest.fixture(scope="module")
def right(own: Any) -> dict[tuple[str, int], Rollout]:
    found: dict[tuple[str, int], Rollout] = answers(own, REQUESTS)
    return found


@pytest.fixture(scope="module", params=ARMS)
def followed(request: pytest.FixtureRequest) -> Iterator[Any]:
    """vLLM with references that a test fills in."""
    engine = engine_with(request.param, References(None))
    yield engine
    engine.close()


def fill(engine: Any, right: dict[tuple[str, int], Rollout], kinds: Sequence[str]) -> None:
    """Gives the engine references of these kinds, in turn."""
    references, rng = engine.references.kept, random.Random(2)
    engine.stats = type(engine.stats)()
    for index, request in enumerate(REQUESTS):
        references.drop(request.noise_key)
        tokens = right[request.problem_id, request.sample_index].token_ids
        if (
            reference := reference_of(kinds[index % len(kinds)], tokens, tokens[::-1], rng, range(3, VOCAB))
        ) is not None:
            references.keep(request.noise_key, reference)


@pytest.mark.parametrize("turn", [0, 1])
def test_no_reference_changes_a_token(
    followed: Any, own: Any, right: dict[tuple[str, int], Rollout], turn: int
) -> None:
    """Nine kinds over three ways to draw: two turns of them have every kind at temperature 0 and above."""
    fill(followed, right, KINDS[turn:] + KINDS[:turn])
    found = answers(followed, REQUESTS)
    assert_equal(REQUESTS, own, found, BASE)
    assert followed.stats.followed_by_age["0"] > 100


def test_right_references_are_followed_far(
    followed: Any, own: Any, right: dict[tuple[str, int], Rollout]
) -> None:
    fill(followed, right, ["right"])
    assert_equal(REQUESTS, own, answers(followed, REQUESTS), BASE)
    assert followed.stats.accept_length > 10
    assert followed.stats.followed_by_age["0"] > 0.6 * 90 * len(REQUESTS)


def test_a_response_that_fills_the_window_is_followed_to_its_end(followed: Any, own: Any) -> None:
    (request,) = requests_for(1, max_tokens=WINDOW)
    room = WINDOW - len(request.prompt_ids)
    short = replace(request, params=replace(request.params, max_tokens=room))
    (want,) = own.generate([short])
    followed.references.kept.keep(request.noise_key, [*want.token_ids, *range(3, 20)])
    (found,) = followed.generate([request])
    assert (found.token_ids, found.finish_reason) == (want.token_ids, "length")
    followed.references.kept.drop(request.noise_key)


def test_requests_that_are_handed_over_take_up_their_references(
    followed: Any, own: Any, right: dict[tuple[str, int], Rollout]
) -> None:
    fill(followed, right, ["right"])
    own.add(REQUESTS)
    for _ in range(7):
        own.step()
    moved = own.withdraw(range(len(own.running)))
    own.abort()
    found = answers(followed, moved)
    assert len(found) == len(REQUESTS)
    assert {key: rollout.token_ids for key, rollout in found.items()} == {
        key: right[key].token_ids for key in found
    }
    assert followed.stats.accept_length > 10


@pytest.fixture
def cramped() -> Iterator[Any]:
    """vLLM with room for the keys and values of two whole sequences and a half, and prefixes that it
    keeps."""
    engine = engine_with("nothing else", References(None), batch=8)
    scheduler = engine.link._scheduler
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 2 * -(-WINDOW // scheduler.block_size) - 1)
    yield engine
    pool.free_blocks(held)
    engine.close()


def test_with_few_blocks_and_prefixes_in_the_cache_nothing_changes(cramped: Any, own: Any) -> None:
    """Some prompts begin with a whole block that they share, the others grow into their second block."""
    prompts = [(r.prompt_ids * 14)[: 140 if i % 3 else 110] for i, r in enumerate(REQUESTS)]
    shared = [(*prompts[1][:130], *prompt[130:]) if len(prompt) > 130 else prompt for prompt in prompts]
    requests = [replace(r, prompt_ids=prompt) for r, prompt in zip(REQUESTS, shared, strict=True)]
    expected, rng = answers(own, requests), random.Random(3)
    for index, request in enumerate(requests):
        right = expected[request.problem_id, 0].token_ids
        reference = reference_of(KINDS[index % 4], right, right[::-1], rng, range(3, VOCAB))
        cramped.references.kept.keep(request.noise_key, reference or [])
    for _ in range(2):
        assert_equal(requests, own, answers(cramped, requests), BASE)
    assert cramped.stats.num_preemptions > 0
    assert cramped.stats.followed_by_age["0"] > 100


def test_the_command_takes_references_as_it_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = BASE.resolve(), DRAFTER.resolve()
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", *({"prompt": f"[{i + 1},{i + 3},7:{20 + i}]"} for i in range(4)))
    asked = (
        "--prompts",
        "prompts.jsonl",
        "--max-tokens",
        "80",
        "--engine",
        "vllm",
        "--compile",
        "false",
        "--own-process",
        "true",
    )
    plain = succeed(capsys, "generate", str(model), *asked, "--speculation", "off", "--out", "old.jsonl")
    assert plain["accept_length"] is None
    also = ("--references", "old.jsonl", "--out", "new.jsonl")
    for speculation in (("ahead:64x1x64",), ("adaptive", "--drafter", str(drafter))):
        summary = succeed(capsys, "generate", str(model), *asked, *also, "--speculation", *speculation)
        assert [one["token_ids"] for one in read_lines("new.jsonl")] == [
            one["token_ids"] for one in read_lines("old.jsonl")
        ]
        assert any(name.startswith("ahead") for name in summary["strategy_seconds"])
    assert summary["accept_length"] > 6
