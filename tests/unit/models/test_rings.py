"""Layers with a window keep only that of their keys and values: for sequences of any length, and with the
tokens of a cache that keeps all."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.cases import cases
from tests.lossless.helpers import ArtificialDrafter, by_id
from tests.unit.models.compared import config_of, make_engine
from tests.unit.models.families import VOCAB, families, logprobs, reference
from tests.unit.models.test_any import COMPUTED
from tlt.base.types import Request, SamplingParams, Turns, id_of
from tlt.engine.own import prefill
from tlt.models import kv_cache
from tlt.models.kv_cache import Cache, ring_length

WINDOWED = [name for name in COMPUTED if any(config_of(name).windows)]
WINDOW = 16


def make_requests() -> list[Request]:
    """Texts of up to 400 tokens; samples of one prompt, and prompts read in parts."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(4, VOCAB) for _ in range(length)) for length in (3, 130, 260)]
    lengths = (60, 60, 140)
    return [
        Request(f"p{i}", s, prompts[i], SamplingParams(temperature, max_tokens=lengths[i]))
        for i in range(3)
        for s, temperature in enumerate((0.0, 1.0))
    ]


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 columns; prompts are read in parts of 32 tokens."""
    monkeypatch.setattr(kv_cache, "MOST_WRITTEN", 32)
    monkeypatch.setattr(prefill, "_PART_TOKENS", 32)
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", 150)


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        product(WINDOWED, (torch.float64, torch.float32)),
        usual=[("gemma-2-2b", torch.float64)],
    ),
    ids=str,
)
def test_a_layer_that_keeps_its_window_alone_changes_no_token(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "MOST_WRITTEN", 2000)
        whole = by_id(make_engine(name, dtype).generate(make_requests()))
    engine = make_engine(name, dtype)
    engine.load_drafter(ArtificialDrafter("oracle", answers={k: r.token_ids for k, r in whole.items()}))
    rings, longest, found = [i for i, window in enumerate(engine.config.windows) if window], 0, {}
    engine.add(make_requests())
    while not engine.is_idle:
        found |= by_id(finished.rollout for finished in engine.step())
        longest = max(longest, engine.cache.capacity)
        assert max(engine.cache.layers[i].shape[2] for i in rings) <= 128
    assert longest >= 400
    assert {k: r.token_ids for k, r in found.items()} == {k: r.token_ids for k, r in whole.items()}
    assert engine.stats.accept_length > 1.5
    rollout = max(found.values(), key=lambda one: len(one.prompt_ids) + len(one.token_ids))
    text = [*rollout.prompt_ids, *rollout.token_ids]
    wanted_TV = logprobs(reference(name), text)[len(rollout.prompt_ids) - 1 : -1]
    wanted_T = wanted_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    found_T = torch.tensor(rollout.logprobs, dtype=torch.float64)
    assert torch.allclose(found_T, wanted_T, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-6)


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("name", families(WINDOWED, usual=["gemma-2-2b"]))
def test_a_response_goes_on_from_its_rings(name: str) -> None:
    """After a turn, in another slot, from what the engine kept of it; and as read from the start."""
    engine, said = make_engine(name, torch.float64), (5, 6, 7, 8)
    engine.parks = True
    asked = make_requests()
    stops = SamplingParams(max_tokens=60, stop_ids=tuple(range(VOCAB // 2)))
    ended = [*engine.generate(replace(request, params=stops) for request in asked)]
    ended = [one for one in ended if one.finish_reason == "stop"]
    further = [
        replace(
            next(request for request in asked if id_of(request) == id_of(one)),
            token_ids=(*one.token_ids, *said),
            logprobs=(*one.logprobs, *[0.0] * len(said)),
            turns=Turns(((len(one.token_ids), len(one.token_ids) + len(said)),)),
        )
        for one in reversed(ended)
    ]
    kept = by_id(engine.generate(further))
    assert len(kept) > 1
    assert engine.stats.num_kept_tokens == sum(len(r.prompt_ids) + len(r.token_ids) - 1 for r in ended)
    read = by_id(make_engine(name, torch.float64).generate(further))
    assert {k: r.token_ids for k, r in kept.items()} == {k: r.token_ids for k, r in read.items()}


def test_windows_are_those_that_layers_attend_with() -> None:
    """With a wrong one keys would be lost, and attention raises."""
    assert len(WINDOWED) >= 5
    for name in WINDOWED:
        windows = config_of(name).windows
        assert len(windows) == config_of(name).num_layers
        assert set(windows) <= {WINDOW, None}


def test_a_sequence_takes_the_memory_of_its_windows() -> None:
    config = config_of("gemma-3-1b")
    cache = Cache(config, config.num_layers, torch.float32, torch.device("cpu"), 4)
    per_token = 2 * config.num_kv_heads * config.head_dim * 4
    num_windowed = sum(window is not None for window in config.windows)
    num_whole = config.num_layers - num_windowed
    assert min(num_windowed, num_whole) > 0
    assert cache.slot_bytes(100_000) == per_token * (num_whole * 100_096 + num_windowed * ring_length(WINDOW))
    cache.reserve(2, 3000)
    assert sum(layer[0].nbytes for layer in cache.layers) == cache.slot_bytes(cache.capacity)


def test_entries_stay_while_a_layer_grows_to_its_ring() -> None:
    config = config_of("gemma-3-1b")
    cache = Cache(config, config.num_layers, torch.float32, torch.device("cpu"), 4)
    cache.reserve(2, 200)
    kept = [layer.normal_()[:, :, :200].clone() for layer in cache.layers]
    cache.reserve(2, 2000)
    for before, layer in zip(kept, cache.layers, strict=True):
        assert torch.equal(layer[:2, :, :200], before[:2])
