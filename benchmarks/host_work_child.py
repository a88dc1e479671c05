"""One round of host work of whatever tree is imported, as JSON. Run by host_work.py.

    PYTHONPATH=TREE python -P benchmarks/host_work_child.py ARMS BATCHES

Seconds are those of the processor that this thread had (`time.thread_time`), so that a busy machine spoils
little.
"""

import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tlt.assembly.engine import EngineSettings, build_engine
from tlt.config.drafter import DrafterSection
from tlt.drafter.drafting.ngram import NgramDrafter
from tlt.drafter.formats.folder import StoredDrafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.decoder import ModelConfig, Transformer
from tlt.speculative.params import BatchParams
from tlt.speculative.protocol import DraftContext
from tlt.speculative.strategy import Strategy
from tlt.tuning.tuner import Fixed
from tlt.types import Request, SamplingParams

TOY = ModelConfig("llama", 64, 32, 64, 1, 4, 2, 8, max_positions=2048, tie_embeddings=True)
"""So small that a step is hardly anything but the host's work."""
WARM, STEPS = 12, 40
"""Engine steps before the clock is read, and steps of which the median is taken."""
VOCAB = 152_000
GROUP = 16
"""Responses of a problem."""


def engine_of(arm: str, batch_size: int) -> Any:
    """Returns an engine whose batch stays full. "off": without a drafter; "off+drafter": decoding plainly
    beside one."""
    # a threshold that never stops a chain: every arm drafts as deep as it may
    settings = EngineSettings(
        arm, max_batch_size=batch_size, drafting=DrafterSection(confidence_threshold=1e-12)
    )
    stored, tuner = None, None
    if arm != "off":
        model = DraftModel(drafter_shape(TOY)).initialize(2)
        stored = StoredDrafter(model.config, model.state_dict(), {})
    if arm == "off+drafter":
        tuner, settings = Fixed(Strategy.OFF), EngineSettings("adaptive", max_batch_size=batch_size)
    policy = dict(Transformer(TOY).initialize(1, 0.3).named_parameters())
    engine = build_engine(TOY, policy, settings, stored, tuner=tuner)
    rng = random.Random(0)
    prompts = [
        tuple(rng.randrange(TOY.vocab_size) for _ in range(16)) for _ in range(-(-batch_size // GROUP))
    ]
    params = SamplingParams(max_tokens=1024)
    engine.add(Request(f"p{i // GROUP}", i % GROUP, prompts[i // GROUP], params) for i in range(batch_size))
    return engine


def step_milliseconds(arm: str, batch_size: int) -> float:
    engine, seconds = engine_of(arm, batch_size), []
    for _ in range(WARM):
        engine.step()
    gc.collect()
    for _ in range(STEPS):
        start = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - start)
    return 1e3 * statistics.median(seconds)


def text(rng: random.Random, phrases: list[list[int]], length: int) -> list[int]:
    """Returns a text of phrases that the responses of a problem share, some said far more often than
    others."""
    tokens: list[int] = []
    while len(tokens) < length:
        phrase = phrases[int(len(phrases) * rng.random() ** 3)]
        tokens += phrase if rng.random() < 0.7 else [rng.randrange(VOCAB) for _ in phrase]
    return tokens[:length]


HAS_LAZY_NOISE = "vocab_size" in DraftContext.__dataclass_fields__
"""Whether a drafter of this tree asks for the noise that it reads; before, it was given all of it."""


def context_of(*batch: Any) -> DraftContext:
    also: tuple[Any, ...] = (VOCAB, torch.device("cpu")) if HAS_LAZY_NOISE else ()
    return DraftContext(*batch, *also)


def silence(num_rows: int, depth: int) -> Any:
    """Returns noise that is 0 everywhere, as this tree's drafters want it."""
    if HAS_LAZY_NOISE:
        return SimpleNamespace(of_tokens=lambda places: [0.0] * len(places))
    return torch.zeros(num_rows, depth, VOCAB)


def retrieval(strategy: Strategy, length: int, num_rows: int = 16, num_steps: int = 30) -> dict[str, float]:
    """Returns µs a row of proposing and observing, and bytes a token of the index, where the responses
    have `length` tokens."""
    rng = random.Random(1)
    phrases = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 30))] for _ in range(300)]
    texts = [text(rng, phrases, length + 10 * num_steps) for _ in range(num_rows)]
    params = SamplingParams(max_tokens=length * 2)
    requests = [Request("p", i, tuple(texts[0][:16]), params) for i in range(num_rows)]
    gc.collect()
    tracemalloc.start()
    drafter = NgramDrafter(num_rows, max_tokens=10**9)
    for slot, request in enumerate(requests):
        drafter.admit(slot, request)
    noise, batch = silence(num_rows, strategy.depth), BatchParams([params] * num_rows)
    seconds, bytes_per_token = [], 0.0
    for step in range(num_steps):
        context = context_of([tokens[: length + 3 * step] for tokens in texts], requests, batch)
        start = time.thread_time()
        drafter.propose(context, strategy, noise)
        seconds.append(time.thread_time() - start)
        if step == 0:
            del context
            gc.collect()
            bytes_per_token = tracemalloc.get_traced_memory()[0] / drafter.num_tokens
            tracemalloc.stop()
    return {"µs a row": 1e6 * statistics.median(seconds[1:]) / num_rows, "bytes a token": bytes_per_token}


def cells(arms: list[str], batches: list[int]) -> Iterator[tuple[str, Callable[[], object]]]:
    for arm in arms:
        for batch_size in batches:
            yield f"{arm} {batch_size}", partial(step_milliseconds, arm, batch_size)
    for shape, length in (("4x1x4", 2048), ("15x1x15", 2048), ("15x1x15", 8192), ("4x3x12", 2048)):
        strategy = Strategy.parse(f"ngram:{shape}")
        yield f"retrieval {shape} {length}", partial(retrieval, strategy, length)


def main(arms: str, batches: str) -> None:
    torch.set_num_threads(1)
    found = {
        name: measure() for name, measure in cells(arms.split(), [int(size) for size in batches.split()])
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
