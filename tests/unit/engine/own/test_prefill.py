"""What several texts begin with is read once: the cache and what was captured are those of texts that were
read alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import make_policy
from tlt.engine.own import prefill as module
from tlt.engine.own.prefill import MIN_SHARED, prefill, shared_beginnings
from tlt.engine.own.scheduler import Admission
from tlt.models.kv_cache import Cache
from tlt.models.packed import PackedTransformer

TEMPLATE, OTHER = tuple(range(1, 13)), tuple(range(20, 30))
POLICY = make_policy()


@pytest.mark.parametrize(
    ("texts", "families"),
    [
        ([(1, 2, 3)], [(3, [0])]),
        ([(*TEMPLATE, 5), (*TEMPLATE, 3, 4), (*TEMPLATE, 9)], [(12, [1, 0, 2])]),
        ([TEMPLATE, (*TEMPLATE, 3)], [(12, [0, 1])]),  # one is what the other begins with
        ([TEMPLATE[:7], (*TEMPLATE[:7], 9)], [(7, [0]), (8, [1])]),  # too little to be worth it
        ([(*OTHER, 1), (*TEMPLATE, 1), (*OTHER, 2), (*TEMPLATE, 2)], [(12, [1, 3]), (10, [0, 2])]),
        (
            [(*TEMPLATE[:9], 20), (*TEMPLATE, 2), (*TEMPLATE, 3)],
            [(9, [1, 2, 0])],
        ),  # 18 saved, 12 without the first
        (
            [(*TEMPLATE[:8], 20), (*TEMPLATE, *OTHER, 2), (*TEMPLATE, *OTHER, 3)],
            [(22, [1, 2]), (9, [0])],
        ),  # the first saves no more
    ],
)
def test_texts_that_begin_alike_are_families(
    texts: list[tuple[int, ...]], families: list[tuple[int, list[int]]]
) -> None:
    assert shared_beginnings(texts) == families


def num_common(texts: Sequence[tuple[int, ...]]) -> int:
    return max(n for n in range(min(map(len, texts)) + 1) if len({text[:n] for text in texts}) == 1)


def saved(families: Iterable[tuple[int, Sequence[int]]]) -> int:
    return sum(length * (len(members) - 1) for length, members in families)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_families_of_neighbours_save_more(seed: int) -> None:
    draw = Random(seed)
    texts = [
        (*TEMPLATE[: draw.choice((0, 8, 9, 12))], *OTHER[: draw.choice((0, 3, 9))], draw.randrange(40, 60))
        for _ in range(8)
    ]
    families, order = shared_beginnings(texts), sorted(range(8), key=texts.__getitem__)
    assert [i for _, members in families for i in members] == order
    for length, members in families:
        assert len({texts[i][:length] for i in members}) == 1
        assert len(members) == 1 or length >= MIN_SHARED
    for cuts in product((False, True), repeat=7):
        ends = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), 8]
        groups = [order[start:end] for start, end in pairwise(ends)]
        others = [(num_common([texts[i] for i in group]), group) for group in groups]
        if all(len(group) == 1 or length >= MIN_SHARED for length, group in others):
            assert saved(others) <= saved(families)


def read(texts: list[tuple[int, ...]], samples: int = 1) -> tuple[Cache, dict[int, Tensor], list[int]]:
    """Reads the texts, each into `samples` slots; returns the cache, what was captured by slot, and the tokens
    of each forward."""
    model = PackedTransformer(POLICY.config, torch.float64, torch.device("cpu"))
    model.load(dict(POLICY.state_dict()), 0)
    num_slots = len(texts) * samples
    cache = Cache(model.config, model.config.num_layers, torch.float64, torch.device("cpu"), num_slots)
    cache.reserve(num_slots, max(map(len, texts)))
    forward, num_tokens = model.forward_capturing, list[int]()

    def counted(tokens_N: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        num_tokens.append(len(tokens_N))
        return forward(tokens_N, *arguments)

    setattr(model, "forward_capturing", counted)  # noqa: B010  # mypy assigns no method
    captured: dict[int, list[Tensor]] = {slot: [] for slot in range(num_slots)}

    def on_read(slots: tuple[int, ...], first: int, captured_TF: Tensor) -> None:
        for slot in slots:
            assert first == sum(map(len, captured[slot]))
            captured[slot].append(captured_TF)

    admissions = [
        Admission(text, tuple(range(i * samples, (i + 1) * samples))) for i, text in enumerate(texts)
    ]
    prefill(model, cache, admissions, (0, 1), on_read)
    return cache, {slot: torch.cat(parts) for slot, parts in captured.items()}, num_tokens


@pytest.mark.parametrize("limit", [None, 14])
def test_the_cache_and_what_is_captured_are_those_of_texts_read_alone(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:  # the last text is read on in parts
        monkeypatch.setattr("tlt.models.kv_cache.PREFILL_TOKENS", limit)
        monkeypatch.setattr(module, "_PART_TOKENS", 3)
    texts = [(*TEMPLATE, 5), (*OTHER, 3, 1), (*TEMPLATE, 3, 4), TEMPLATE[:5], (*TEMPLATE, 9, *OTHER)]
    cache, captured, num_tokens = read(texts, samples=2)
    if limit is None:
        assert num_tokens == [12 + 1 + 11 + 4 + 10], "the last token of each text is not read here"
    for i, text in enumerate(texts):
        alone, captured_alone, _ = read([text])
        for slot in (2 * i, 2 * i + 1):
            torch.testing.assert_close(captured[slot], captured_alone[0], atol=1e-12, rtol=0)
            for layer, layer_alone in zip(cache.layers, alone.layers, strict=True):
                num_read = len(text) - 1
                torch.testing.assert_close(
                    layer[slot, :, :num_read], layer_alone[0, :, :num_read], atol=1e-12, rtol=0
                )
