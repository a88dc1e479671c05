"""The law draws the truncated softmax and nothing else, and verification walks the tree exactly as it says.

References here are brute force in plain Python, written from docs/promise.md;
test_warpers.py holds the law to transformers'. Error rate: 10 chi-square tests with fixed seeds, each failing a correct law with
probability ALPHA = 1e-6; together 1e-5.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lossless.helpers import fit, law_probabilities
from tlt.base.types import DraftTree, Request, SamplingParams
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample
from tlt.speculation.law.tree import ancestors, chain, chain_mask, layout, tree_mask
from tlt.speculation.law.verify import verify

ALPHA = 1e-6
VOCAB = 12
LOGITS = [2.1, -0.3, 1.7, 0.0, -2.5, 1.1, 0.4, -1.2, 0.9, 1.65, -4.0, 0.2]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.75),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.4, top_k=6, top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.15),
    SamplingParams(temperature=1.2, top_k=9, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=0.0, top_k=3),
]


# ── references ──────────────────────────────────────────────────────────────────────────────────────────────


def probabilities(logits: list[float], params: SamplingParams) -> np.ndarray:
    """temperature → top-k → top-p → min-p → softmax, one token at a time."""
    found = np.zeros(len(logits))
    best_first = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if params.temperature == 0:
        found[best_first[0]] = 1.0
        return found
    weight = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    kept = best_first[: params.top_k] if params.top_k else best_first
    if params.top_p < 1:
        total, mass, nucleus = math.fsum(weight[v] for v in kept), 0.0, []
        for v in kept:
            if mass >= params.top_p * total:
                break
            nucleus.append(v)
            mass += weight[v]
        kept = nucleus
    kept = [v for v in kept if weight[v] >= params.min_p * weight[best_first[0]]]
    for v in kept:
        found[v] = weight[v] / math.fsum(weight[u] for u in kept)
    return found


def brute_force_walk(
    tokens: list[int], parents: list[int], chosen: list[int], node: int = 0
) -> tuple[list[int], list[int]]:
    """(columns visited, tokens committed) by recursion from the root."""
    for child, parent in enumerate(parents):
        if child > 0 and parent == node and tokens[child] == chosen[node]:
            path, committed = brute_force_walk(tokens, parents, chosen, child)
            return [node, *path], [chosen[node], *committed]
    return [node], [chosen[node]]


def brute_force_ancestors(parents: list[int], node: int) -> list[int]:
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


# ── the draw ────────────────────────────────────────────────────────────────────────────────────────────────

NUM_DRAWS = 1 << 15


def draw(params: list[SamplingParams], dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, draws] tokens: one position each, every row with a key of its own, as one mixed batch."""
    keys = keys_tensor([Request("law", i, (0,), p).noise_key for i, p in enumerate(params)])
    noise = gumbel_noise(keys, torch.arange(NUM_DRAWS).expand(len(params), -1), VOCAB)
    return sample(
        torch.tensor(LOGITS, dtype=dtype).expand(len(params), NUM_DRAWS, -1), noise, BatchParams.of(params)
    )[0]


def test_tokens_of_a_mixed_batch_have_each_rows_exact_probabilities() -> None:
    tokens = draw(PARAMS)
    assert all(fit(row, probabilities(LOGITS, p)) > ALPHA for row, p in zip(tokens, PARAMS, strict=True))


@pytest.mark.parametrize(
    ("actual", "claimed"),
    [
        (SamplingParams(temperature=1.05), SamplingParams()),
        (SamplingParams(), SamplingParams(temperature=0.95)),
        (SamplingParams(top_k=5), SamplingParams(top_k=4)),
        (SamplingParams(top_k=4), SamplingParams(top_k=5)),
        (SamplingParams(top_p=0.85), SamplingParams(top_p=0.75)),
        (SamplingParams(temperature=1.4, top_p=0.75), SamplingParams(temperature=1.4, top_p=0.6)),
        (SamplingParams(min_p=0.2), SamplingParams(min_p=0.4)),
    ],
)
def test_the_chi_square_sees_a_law_that_is_slightly_another(
    actual: SamplingParams, claimed: SamplingParams
) -> None:
    assert fit(draw([actual])[0], probabilities(LOGITS, claimed)) < ALPHA


def test_the_chi_square_sees_noise_that_is_not_gumbel() -> None:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor(LOGITS).expand(1, NUM_DRAWS, -1)
    uniform = torch.rand(1, NUM_DRAWS, VOCAB, generator=generator)
    for wrong in (uniform, uniform.log(), torch.randn(uniform.shape, generator=generator)):
        tokens = sample(logits, wrong, BatchParams.of([SamplingParams()]))[0][0]
        assert fit(tokens, probabilities(LOGITS, SamplingParams())) < ALPHA


finite = st.floats(-6, 6, allow_nan=False, width=32)
logit_rows = st.lists(finite, min_size=2, max_size=20)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.01, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)


@settings(max_examples=100, deadline=None)
@given(logit_rows, any_params)
def test_the_laws_probabilities_are_those_of_brute_force(logits: list[float], params: SamplingParams) -> None:
    """Ties included: equal tokens are ranked by id. Nothing decided by the last bits is asserted."""
    expected = probabilities(logits, params)
    for top_p in (params.top_p * (1 - 1e-9), min(1.0, params.top_p * (1 + 1e-9))):
        nudged = SamplingParams(params.temperature, params.top_k, top_p, params.min_p)
        if not np.array_equal(probabilities(logits, nudged) > 0, expected > 0):
            return
    found = law_probabilities(torch.tensor(logits, dtype=torch.float64), params).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(logit_rows, any_params, st.integers(0, 1 << 30))
def test_a_token_that_truncation_removed_is_never_drawn_however_large_its_noise(
    logits: list[float], params: SamplingParams, seed: int
) -> None:
    logits_V = torch.tensor(logits, dtype=torch.float64)
    possible = law_probabilities(logits_V, params) > 0
    noise = torch.randn(1, 1, len(logits), generator=torch.Generator().manual_seed(seed)) + 1e6 * ~possible
    token = sample(logits_V[None, None], noise, BatchParams.of([params]))[0]
    assert possible[token.item()]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-39, 1e-20, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_a_tiny_temperature_draws_the_largest_logit_with_certainty(
    temperature: float, dtype: torch.dtype, truncation: dict[str, float]
) -> None:
    logits = torch.tensor([-30.0, 12.0, 0.0, 13.0, -1e4, 12.5], dtype=dtype)[None, None]
    noise = torch.tensor([22.9, 5.0, 0.0, -3.0, 22.9, 0.0])[None, None]
    tokens, logprobs = sample(
        logits, noise, BatchParams.of([SamplingParams(temperature=temperature, **truncation)])
    )
    assert (tokens.item(), logprobs.item()) == (3, 0.0)


def logits_and_noise(num_positions: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Returns both for a sequence of each of PARAMS."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(PARAMS), num_positions, VOCAB, dtype=torch.float64, generator=generator) * 2
    keys = keys_tensor([(i, 1, 2, 3) for i in range(len(PARAMS))])
    positions = torch.arange(num_positions).expand(len(PARAMS), -1)
    return logits.to(dtype), gumbel_noise(keys, positions, VOCAB)


def test_logprobs_are_those_of_the_scaled_logits_before_truncation() -> None:
    logits, noise = logits_and_noise(50)
    tokens, logprobs = sample(logits, noise, BatchParams.of(PARAMS))
    for row, params in enumerate(PARAMS):
        scaled = logits[row].numpy() / (params.temperature or 1.0)
        shifted = np.exp(scaled - scaled.max(-1, keepdims=True))
        expected = np.log(shifted / shifted.sum(-1, keepdims=True))[np.arange(50), tokens[row].numpy()]
        np.testing.assert_allclose(logprobs[row].numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mixed_batch_draws_what_each_row_draws_alone_bit_for_bit(dtype: torch.dtype) -> None:
    logits, noise = logits_and_noise(40, dtype)
    tokens, logprobs = sample(logits, noise, BatchParams.of(PARAMS))
    for row, params in enumerate(PARAMS):
        alone = sample(logits[row : row + 1], noise[row : row + 1], BatchParams.of([params]))
        assert torch.equal(alone[0][0], tokens[row])
        assert torch.equal(alone[1][0], logprobs[row])


@pytest.mark.parametrize("sequences_at_a_time", [1, 3, 100])
def test_many_logits_are_drawn_from_part_by_part_bit_for_bit(
    sequences_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, noise = logits_and_noise(6, torch.float32)
    expected = sample(logits, noise, BatchParams.of(PARAMS))
    monkeypatch.setattr("tlt.speculation.law.sampling.VALUES_PER_PART", sequences_at_a_time * 6 * VOCAB + 1)
    for part, whole in zip(sample(logits, noise, BatchParams.of(PARAMS)), expected, strict=True):
        assert torch.equal(part, whole)


def test_logits_in_bf16_are_drawn_from_in_float32() -> None:
    logits, noise = logits_and_noise(30, torch.bfloat16)
    drawn = [sample(values, noise, BatchParams.of(PARAMS)) for values in (logits, logits.float())]
    assert all(torch.equal(*pair) for pair in zip(*drawn, strict=True))


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def parent_rows(draw: st.DrawFn, num_nodes: int) -> list[int]:
    """Any tree with padding: a parent is an earlier column, or -1."""
    return [-1] + [draw(st.integers(-1, column - 1)) for column in range(1, num_nodes)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ancestors_depths_and_masks_are_those_of_brute_force(data: st.DataObject) -> None:
    num_nodes, batch = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 4))
    parents = [data.draw(parent_rows(num_nodes)) for _ in range(batch)]
    prefixes = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    length = max(prefixes) + num_nodes + data.draw(st.integers(0, 3))
    seen = ancestors(torch.tensor(parents))
    mask = tree_mask(seen, torch.tensor(prefixes), length, torch.float64)
    tree = DraftTree(torch.zeros(batch, num_nodes, dtype=torch.int64), torch.tensor(parents))
    positions_BN = layout(tree, prefixes, torch.float64).positions_BN
    for row in range(batch):
        for node in range(num_nodes):
            line = brute_force_ancestors(parents[row], node)
            assert set(seen[row, node].nonzero().flatten().tolist()) == set(line)
            assert positions_BN[row, node] == prefixes[row] + len(line) - 1
            visible = {*range(prefixes[row]), *(prefixes[row] + ancestor for ancestor in line)}
            assert mask[row, node].tolist() == [
                0.0 if column in visible else -math.inf for column in range(length)
            ]


def test_a_deep_tree_knows_all_its_ancestors() -> None:
    for num_nodes in (1, 2, 3, 33, 64, 65, 100):
        seen = ancestors(chain(torch.zeros(1, num_nodes, dtype=torch.int64)).parents_BN)
        assert torch.equal(seen[0], torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3))
def test_a_chains_mask_is_that_of_its_tree(num_nodes: int, prefixes: list[int], spare: int) -> None:
    length, prefix_B = max(prefixes) + num_nodes + spare, torch.tensor(prefixes)
    tree = chain(torch.zeros(len(prefixes), num_nodes, dtype=torch.int64))
    expected = tree_mask(ancestors(tree.parents_BN), prefix_B, length, torch.float32)
    assert torch.equal(
        chain_mask(prefix_B[:, None] + torch.arange(num_nodes), length, torch.float32), expected
    )


# ── verification ────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_verification_is_the_brute_force_walk_over_the_laws_own_tokens(data: st.DataObject) -> None:
    vocab, batch, num_nodes = 4, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    params = [data.draw(st.sampled_from(PARAMS)) for _ in range(batch)]
    tokens, parents = [], []
    for _ in range(batch):
        row_tokens, row_parents = [data.draw(st.integers(0, vocab - 1))], [-1]
        for column in range(1, num_nodes):
            parent = data.draw(st.integers(-1, column - 1))
            siblings = {t for t, p in zip(row_tokens, row_parents, strict=True) if p == parent}
            free = [t for t in range(vocab) if t not in siblings]
            row_parents.append(parent if parent >= 0 and free else -1)
            row_tokens.append(data.draw(st.sampled_from(free)) if row_parents[-1] >= 0 else 0)
        tokens.append(row_tokens)
        parents.append(row_parents)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    logits = torch.randn(batch, num_nodes, vocab, dtype=torch.float64, generator=generator) * 3
    keys = torch.randint(0, 1 << 32, (batch, 4), generator=generator)
    positions = torch.arange(num_nodes).expand(batch, -1)
    noise = gumbel_noise(keys, positions, vocab)
    law = Law(
        keys.repeat_interleave(num_nodes, dim=0),
        positions.flatten(),
        BatchParams.of(params).repeat(num_nodes),
    )
    verdicts = verify(DraftTree(torch.tensor(tokens), torch.tensor(parents)), logits, law)
    for row in range(batch):
        chosen = []
        for node in range(num_nodes):
            with np.errstate(divide="ignore"):
                score = (
                    np.log(probabilities(logits[row, node].tolist(), params[row]))
                    + noise[row, node].double().numpy()
                )
            chosen.append(int(score.argmax()))
        path, committed = brute_force_walk(tokens[row], parents[row], chosen)
        assert (list(verdicts[row].path), list(verdicts[row].tokens)) == (path, committed)
        assert verdicts[row].num_accepted == len(path) - 1
        scaled = logits[row, path] / (params[row].temperature or 1.0)
        expected = scaled.log_softmax(-1)[torch.arange(len(path)), torch.tensor(committed)]
        assert verdicts[row].logprobs == pytest.approx(expected.tolist(), abs=1e-12)
