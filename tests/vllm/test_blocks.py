"""vLLM with a DFlash drafter under the law: its tokens are our own engine's, and its drafts are those of our own
copy of the drafter at the same places, ranked with the same noise."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.side_by_side import answers, random_lengths, step_by_step
from tests.vllm.asleep import of_blocks
from tests.vllm.blocks import blocks_at, randomize
from tests.vllm.children import in_child
from tests.vllm.parts import BASE, assert_equal, in_vllm, make_checkpoint, own_engine, vllm_engine
from tests.vllm.test_live import WINDOW, countdown
from tests.vllm.test_unread import pattern
from tlt.base.speculation import Adaptive
from tlt.base.types import Request, SamplingParams
from tlt.drafter.block import PackedBlock
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.shape import BlockOptions, BlockShape, drafter_shape, training_capture
from tlt.engine.build.model import load_model
from tlt.engine.build.vllm import for_server
from tlt.engine.vllm.inside.law import LawTable, RowLaw
from tlt.engine.vllm.server import Installed, Served, options
from tlt.models.attention import PackedCausal
from tlt.models.hf.families import load_model_config
from tlt.models.packed import PackedTransformer

pytestmark = in_vllm

BLOCK = 5
NEAR = 1e-3
"""Difference of two scores that rounding may decide."""


@dataclass(frozen=True)
class Live:
    """vLLM with a random block drafter, and our own copies of both models."""

    engine: Any
    shape: BlockShape
    target: PackedTransformer
    drafter: PackedBlock


def random_weights(shape: BlockShape, seed: int) -> dict[str, Tensor]:
    """Weights with which no two layers, norms included, are alike."""
    model = new_model(shape)
    randomize(model, torch.Generator().manual_seed(seed))
    if shape.is_reduced:
        model.set_vocabulary(torch.arange(2, shape.draft_vocab_size + 2))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def start(model: Path, folder: Path, speculation: str | None, draft_vocab: int | None = None) -> Live:
    """Writes the drafter to the folder. speculation: None starts no vLLM."""
    config = load_model_config(model)
    shape = drafter_shape(config, "dflash", draft_vocab, BlockOptions(num_drafted=BLOCK))
    assert isinstance(shape, BlockShape)
    tensors = random_weights(shape, 2)
    trained = new_model(shape)
    trained.load_state_dict(tensors)
    save_drafter(folder, trained, torch.float32, {})
    target = PackedTransformer(config, torch.float32)
    target.load(load_model(model, torch.float32).tensors, version=0)
    packed = pack_drafter(shape, tensors, torch.float32)
    assert isinstance(packed, PackedBlock)
    engine = None if speculation is None else vllm_engine(model, speculation, folder)
    return Live(engine, shape, target, packed)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    found = start(BASE, tmp_path_factory.mktemp("dflash"), f"{BLOCK}x1x{BLOCK}")
    yield found
    found.engine.close()


def drafts_of(live: Live, requests: Sequence[Request], lengths: Iterator[int]) -> list[tuple[Any, ...]]:
    """Returns (request, tokens so far, draft) of every draft, where each step has the next of these lengths
    drafted."""
    engine, found = live.engine, list[tuple[Any, ...]]()
    tuner, engine.tuner = engine.tuner, None
    engine.add(requests)
    while not engine.is_idle:
        for name, sequence in engine._running.items():
            draft = engine.link._scheduler.requests[engine.link._internal_ids[name]].spec_token_ids
            if draft:
                found.append((sequence.request, tuple(sequence.tokens), tuple(draft)))
        engine.link.draft(next(lengths))
        engine.step()
    engine.tuner = tuner
    return found


def assert_ours(live: Live, drafts: Sequence[tuple[Any, ...]], num_drafted: int | None = None) -> None:
    """Every draft is that of our own block behind the same tokens. num_drafted: by every block, of which the
    draft has the first; None: no more than the draft has."""
    assert len(drafts) > 20
    num_near, drafter = 0, copy.copy(live.drafter)
    for request, tokens, draft in drafts:
        drafter.config = dataclasses.replace(live.shape, block_size=1 + (num_drafted or len(draft)))
        (logits_KV,) = blocks_at(drafter, live.target, tokens, [(len(tokens) - 1, 0, ())])
        table = LawTable(1, live.shape.layer.vocab_size, torch.device("cpu"), 0.7)
        table.put(0, RowLaw(request.noise_key, request.params))
        table.flush()
        for k, token in enumerate(draft):
            slot, position = torch.tensor([0]), torch.tensor([len(tokens) + k])
            expected = int(table.rank(logits_KV[k][None], slot, position))
            if expected != token:
                where = request.problem_id, len(tokens), k, draft
                assert _gap(table, logits_KV[k], position, token) < NEAR, where
                num_near += 1
                break
    assert num_near <= 1


def _gap(table: LawTable, logits_V: Tensor, position: Tensor, token: int) -> float:
    """The logit, a power of ten, that the token lacks to be ranked first."""
    for exponent in range(-8, 3):
        raised_V = logits_V.clone()
        raised_V[token] += 10.0**exponent
        if int(table.rank(raised_V[None], torch.tensor([0]), position)) == token:
            return 10.0**exponent
    return float("inf")


LENGTHS: dict[str, Callable[[], Iterator[int]]] = {
    "always whole": lambda: repeat(BLOCK),
    "always two": lambda: repeat(2),
    "off at first": lambda: (length and BLOCK for length in pattern(30, 10**6)),
    "off for nine steps of twelve": lambda: (length and BLOCK for length in pattern(9, 3)),
    "another length in every step": lambda: random_lengths(BLOCK, 3),
}


@pytest.mark.parametrize("when", LENGTHS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_our_own_whatever_is_drafted_when(block: Live, when: str, temperature: float) -> None:
    """More requests than run at a time: some read their prompts while the drafter is behind others."""
    drafts = drafts_of(block, countdown(14, 40, temperature), LENGTHS[when]())
    assert_ours(block, drafts)


def test_tokens_are_our_own_engine_s_and_those_without_drafts(block: Live, own: Any) -> None:
    for temperature in (0.0, 0.7, 1.0):
        requests = countdown(8, 40, temperature)
        found = answers(block.engine, requests)
        assert_equal(requests, own, found, BASE)
        off = step_by_step(block.engine, requests, repeat(0))
        assert {k: r.token_ids for k, r in off.items()} == {k: r.token_ids for k, r in found.items()}


def test_a_drafter_that_is_pushed_drafts_at_once_with_its_new_weights(block: Live, own: Any) -> None:
    requests, before = countdown(8, 30), random_weights(block.shape, 2)
    for version, weights in ((1, random_weights(block.shape, 9)), (2, before)):
        block.engine.drafter.load(dict(weights), version)
        other = pack_drafter(block.shape, weights, torch.float32)
        assert isinstance(other, PackedBlock)
        drafts = drafts_of(block, requests, repeat(BLOCK))
        assert_ours(dataclasses.replace(block, drafter=other), drafts)
    assert_equal(requests, own, answers(block.engine, requests), BASE)


def test_a_response_ends_where_the_window_does_and_others_still_draft_right(block: Live, own: Any) -> None:
    """While no whole block fits behind the longest, all draft shorter ones or none, and the context is read
    all the same."""
    (one,) = countdown(1, 1000)
    params = dataclasses.replace(one.params, stop_ids=())
    long = dataclasses.replace(one, prompt_ids=(one.prompt_ids * 60)[: WINDOW - 9], params=params)
    others = countdown(3, 40)[1:]
    drafts = drafts_of(block, [long, *others], repeat(BLOCK))
    last = max(number for number, row in enumerate(drafts) if row[0] is long)
    assert_ours(block, drafts[last + 1 + 2 * len(others) :])
    assert_equal([*others], own, answers(block.engine, [*others]), BASE)
    (found,) = block.engine.generate([long])
    assert (len(found.token_ids), found.finish_reason) == (9, "length")


@pytest.mark.parametrize(("family", "vocab"), [("qwen3-norm", 20), ("llama", None)])
def test_a_new_policy_s_head_is_the_drafter_s_too(family: str, vocab: int | None, tmp_path: Path) -> None:
    """The rows of a smaller vocabulary are pushed; a whole head is the target's own."""
    model = make_checkpoint(family, tmp_path / "model")
    live = start(model, tmp_path / "drafter", "3x1x3", vocab)
    assert (live.engine.link.max_depth, live.engine.link._scheduler.num_spec_tokens) == (3, BLOCK)
    own = own_engine(model)
    tensors = load_model(model, torch.float32).tensors
    requests = [
        dataclasses.replace(one, prompt_ids=tuple(i % 50 + 8 for i in one.prompt_ids))
        for one in countdown(6, 20)
    ]
    for scale in (0.0, 0.5):
        policy = {
            name: tensor.roll(1, 0) if scale and tensor.ndim == 2 else tensor
            for name, tensor in tensors.items()
        }
        live.engine.load_policy(policy, int(scale > 0))
        own.load_policy(policy, int(scale > 0))
        live.target.load(policy, version=1 + int(scale > 0))
        assert_ours(live, drafts_of(live, requests, repeat(3)))
        assert {k: r.token_ids for k, r in answers(live.engine, requests).items()} == {
            k: r.token_ids for k, r in answers(own, requests).items()
        }
    live.engine.close()


def test_a_tuner_chooses_among_the_block_s_lengths(own: Any, tmp_path: Path) -> None:
    live = start(BASE, tmp_path, "adaptive")
    assert live.engine.link.max_depth <= BLOCK == live.engine.link._scheduler.num_spec_tokens
    requests = countdown(10, 60)
    assert_equal(requests, own, answers(live.engine, requests), BASE)
    live.engine.close()


def test_the_model_runner_of_gpus_drafts_our_blocks(own: Any, tmp_path: Path) -> None:
    """Triton's interpreter runs it here. Its drafter fills whole blocks in every step, drafts or not."""
    live = start(BASE, tmp_path / "drafter", None)
    requests = {one.problem_id: one for one in countdown(4, 20)}
    drafts, tokens = in_child(tmp_path, of_blocks, [*requests.values()], tmp_path / "drafter", BLOCK)
    rows = [(requests[name], tokens[name][:length], draft) for (name, length), draft in drafts.items()]
    assert_ours(live, [row for row in rows if len(row[1]) < len(tokens[row[0].problem_id])], BLOCK)
    expected = answers(own, [*requests.values()])
    assert tokens == {r.problem_id: (*r.prompt_ids, *r.token_ids) for r in expected.values()}


@pytest.mark.slow
def test_a_server_that_drafts_blocks_gives_our_own_engine_s_tokens(own: Any, tmp_path: Path) -> None:
    """Prompts do not fit into a step, the cache is too small for all, and the tuner chooses."""
    pytest.importorskip("openai")
    from tests.vllm.serving import asks, serving

    start(BASE, tmp_path / "drafter", None)
    drafting = for_server(BASE, tmp_path / "drafter", tmp_path / "out")
    served = Served(BASE, "m", "float32", Adaptive(), ("learned",), drafting, BLOCK)
    told = [
        word if value is None else f"{word}={value}"
        for word, value in options(Installed((), True), served).items()
        if word in ("--additional-config", "--speculative-config", "--scheduler-cls", "--no-async-scheduling")
    ]
    limits = {"max-num-seqs": 16, "max-num-batched-tokens": 64, "max-model-len": 512}
    cramped = [f"--{key}={value}" for key, value in {**limits, "num-gpu-blocks-override": 16}.items()]
    with serving(tmp_path, "blocks", *told, *cramped) as url, ThreadPoolExecutor(8) as pool:
        asked = {"prompt": "[2,3,7:21]" * 8, "temperature": 1.0, "max_tokens": 80}
        extra = {"extra_body": {"return_token_ids": True}}
        found = [pool.submit(asks(url), seed=seed, **asked, **extra) for seed in range(16)]
        choices = [one.result().choices[0] for one in found]
    params = SamplingParams(1.0, max_tokens=80, stop_ids=(2,))
    requests = [
        Request(
            "served", 0, tuple(choice.prompt_token_ids), dataclasses.replace(params, seed=seed), "generate"
        )
        for seed, choice in enumerate(choices)
    ]
    expected = [next(iter(own.generate([one]))).token_ids for one in requests]
    assert [tuple(choice.token_ids) for choice in choices] == expected


def test_what_was_captured_is_what_the_drafter_trains_on(block: Live) -> None:
    """The layers that it reads, and the target's features; rows of rejected drafts have been written over."""
    if not block.engine.link.captures:
        pytest.skip("vLLM's worker has a process of its own; run this file alone")
    block.engine.add(countdown(4, 30))
    ended = []
    while not block.engine.is_idle:
        ended += block.engine.step(captures=True)
    capture = training_capture(block.shape, block.target.config.num_layers)
    for finished in ended:
        tokens = (*finished.rollout.prompt_ids, *finished.rollout.token_ids)[:-1]
        attend = PackedCausal(block.target.config, [len(tokens)])
        _, expected_TF = block.target.forward_capturing(
            torch.tensor(tokens), attend.positions(), attend, capture
        )
        torch.testing.assert_close(finished.captured_TF, expected_TF, rtol=1e-3, atol=2e-3)
