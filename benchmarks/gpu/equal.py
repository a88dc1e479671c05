"""Part `equal rows …`: a large model of random weights with equal rows (tlt/models/equal.py): its bits, and what
they cost.

ways        bytes of features that differ: a text's last tokens read one by one, as chains, along a tree and packed,
            in company, beside the same tokens of the text alone as a prompt
rows        bytes of log-probabilities that differ: so many rows beside all
responses   tokens and log-probabilities, off, and with chains and trees of which some are wrong, in another batch
ms          an engine step without drafts, with equal rows and without, recorded as CUDA graphs

A rehearsal runs a tiny model in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import gc
import random
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.constant import constant_batch
from benchmarks.geometry import GEOMETRIES
from benchmarks.gpu.harness import Record
from tests.vllm.equal_rows import Ways, num_differing, prepare
from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, ResponseId, SamplingParams, id_of, resolve_dtype
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal
from tlt.engine.own.engine import RolloutEngine
from tlt.models.decoder import ModelConfig
from tlt.models.equal import EqualTransformer
from tlt.models.hf.weights import expected_shapes
from tlt.models.packed import PackedTransformer, layer_by_layer
from tlt.speculation.tuner.tuner import FixedTuner

Answers = dict[ResponseId, tuple[tuple[int, ...], tuple[float, ...]]]


TINY = ModelConfig("qwen2", 61, 48, 96, 2, 6, 2, 8, tie_embeddings=True, max_positions=160)


class RandomTensors(Mapping[str, Tensor]):
    """A checkpoint whose tensors are made on the device when they are read, the same every time."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = expected_shapes(config), dtype, device

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        made = torch.randn(self.shapes[name], generator=generator, device=self.device, dtype=self.dtype)
        return 1 + 0.1 * made if name.endswith("norm.weight") else 0.03 * made

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class KnownDrafter(Drafter[Proposal]):
    """Proposes what `answers` say, one token in five wrong; of width 2, with a wrong sibling each."""

    kinds = ("known",)

    def __init__(self, answers: Answers, vocab_size: int, device: torch.device) -> None:
        self.answers, self.vocab_size, self.device = answers, vocab_size, device
        self.random = random.Random(0)

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> Proposal:
        tokens, parents = [], []
        for committed, request in zip(context.tokens, context.requests, strict=True):
            answer, _ = self.answers[id_of(request)]
            row, places, last = [committed[-1]], [-1], 0
            done = len(committed) - len(request.prompt_ids)
            for token in (*answer, *[0] * strategy.depth)[done : done + strategy.depth]:
                right = token if self.random.random() < 0.8 else self.random.randrange(self.vocab_size)
                guesses = [right, (right + 1) % self.vocab_size][: strategy.width]
                places += [last] * len(guesses)
                last = len(row)
                row += guesses
            tokens.append(row)
            parents.append(places)
        tokens_BN, parents_BN = (torch.tensor(rows, device=self.device) for rows in (tokens, parents))
        return Proposal(DraftTree(tokens_BN, parents_BN, is_chain=strategy.width == 1))


def requests_of(config: ModelConfig, num: int, max_tokens: int, first: int = 0) -> list[Request]:
    draw = random.Random(first)
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    prompts = [
        tuple(draw.randrange(config.vocab_size) for _ in range(draw.randint(5, 40))) for _ in range(num)
    ]
    return [Request(f"p{first + i}", 0, prompt, params) for i, prompt in enumerate(prompts)]


def answers_of(engine: RolloutEngine, requests: Sequence[Request]) -> Answers:
    return {id_of(one): (one.token_ids, one.logprobs) for one in engine.generate(requests)}


def ways(record: Record, model: EqualTransformer) -> None:
    """Bytes that differ, by way to read and number of sequences."""
    read = Ways(model, **record.settings["text"])
    for company in record.settings["companies"]:
        record.append("ways", {"company": company, **read.found(company=company)})
    from tlt.speculation.law.fused_logprobs import chosen_logprobs

    features_NE = torch.cat([read.read(1)[1]] * 11)[: record.settings["most_rows"]]
    chosen_N = torch.arange(len(features_NE), device=model.device)
    whole_N = chosen_logprobs(model.logits(features_NE), chosen_N)
    for num in (1, 2, 3, 4, 5, 8, 9, 16, 33, 64):
        if num <= len(features_NE):
            found_N = chosen_logprobs(model.logits(features_NE[:num]), chosen_N[:num])
            record.append("rows", {"rows": num, "logprobs": num_differing(found_N, whole_N[:num])})


def responses(record: Record, model: EqualTransformer) -> None:
    """Responses that differ, by strategy: off at the largest batch, drafts at a smaller one."""
    settings = record.settings
    requests = requests_of(model.config, settings["num_requests"], settings["max_tokens"])
    off = answers_of(RolloutEngine(model, max_batch_size=len(requests)), requests)
    for words in settings["strategies"]:
        tuner = FixedTuner(Strategy.parse(words))
        engine = RolloutEngine(model, max_batch_size=settings["batch"], tuner=tuner)
        engine.load_drafter(KnownDrafter(off, model.config.vocab_size, model.device))
        on = answers_of(engine, requests)
        record.append(
            "responses",
            {
                "strategy": words,
                "responses": len(off),
                "other tokens": sum(on[name][0] != off[name][0] for name in off),
                "other logprobs": sum(on[name] != off[name] for name in off),
                "accept length": engine.stats.accept_length,
            },
        )


def times(record: Record, models: Mapping[str, PackedTransformer]) -> None:
    for batch in record.settings["batches"]:
        engines = {name: RolloutEngine(model, max_batch_size=batch) for name, model in models.items()}
        config = next(iter(models.values())).config

        def supply(index: int, config: ModelConfig = config, batch: int = batch) -> list[Request]:
            return requests_of(config, batch, record.settings["longest"], 1000 * (index + 1))

        speeds = constant_batch(
            engines, supply, batch, record.settings["rounds"], record.settings["seconds_a_round"]
        )
        ms = {name: 1e3 * batch / statistics.median(found) for name, found in speeds.items()}
        record.append("times", {"batch": batch, "ms": ms, "cost": ms["equal rows"] / ms["usual"] - 1})
        del engines
        gc.collect()


def main() -> None:
    record = Record.of_arguments()
    settings, device = record.settings, torch.device(record.settings["device"])
    try:
        import triton
    except ImportError:
        record.skip("Triton is not installed")
    record.add(triton=triton.__version__)
    if device.type == "cpu":
        prepare()
    config, dtype = GEOMETRIES.get(settings["geometry"], TINY), resolve_dtype(settings["dtype"])
    tensors = RandomTensors(config, dtype, device)
    with torch.inference_mode():
        equal = EqualTransformer(config, dtype, device)
        equal.load_parts(layer_by_layer(tensors), 0)
        ways(record, equal)
        responses(record, equal)
        usual = PackedTransformer(config, dtype, device)
        usual.load_parts(layer_by_layer(tensors), 0)
        times(record, {"usual": usual, "equal rows": equal})
    found = [value for one in record.values["ways"] for key, value in one.items() if key != "company"]
    found += [one["logprobs"] for one in record.values["rows"]]
    found += [one["other logprobs"] for one in record.values["responses"]]
    assert not any(found), f"{sum(map(bool, found))} of {len(found)} comparisons differ"


if __name__ == "__main__":
    main()
