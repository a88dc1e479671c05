"""Trains the warm-up adapter of the recipe smollm2: LoRA on written-out arithmetic, before RL. Knows nothing
of rewards.

    tlt init smollm2 mine --from-pypi
    python -m recipes.smollm2.warm_up --base mine/base --out recipes/smollm2/warm-up

The problems are of the training split alone. Their solutions are running totals, again from each next number
until two totals agree; some have mistakes that are noticed, and that are not learned themselves:

    47 + 35 = 82           from left to right
    82 + 18 = 110          here a mistake
    Again:                 the same numbers, from the second one on
    35 + 18 = 53
    53 + 47 = 100
    Again:                 the totals differ, so once more, from the third one on
    18 + 47 = 65
    65 + 35 = 100
    #### 100
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.smollm2.arithmetic import CHECKED, Difficulty, Question, ask
from tlt.base.config.lora import LoraSection
from tlt.engine.build.model import Model, open_model
from tlt.models.attention import PackedCausal
from tlt.models.decoder import Transformer
from tlt.models.hf.peft import save_adapter
from tlt.models.hf.tokenizer import Tokenizer
from tlt.models.lora import add_adapters
from tlt.training.build.policy import build_policy

DIFFICULTY = Difficulty.of(["+"], digits=[1, 2], terms=[2, 8])
"""Sums as in reasoning.toml, and somewhat longer ones."""
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
IGNORED = -100
"""The label of what is not learned."""
MOST_ATTEMPTS = 5
"""Attempts of a solution at most; the last two have no mistake."""


@dataclass(frozen=True)
class Piece:
    """A part of a solution's text."""

    text: str
    is_learned: bool = True
    """False for a result that is wrong."""


def write_solution(
    question: Question, *, is_checked: bool, mistakes: float = 0.0, rng: random.Random
) -> list[Piece]:
    """Returns the solution of a question, piece by piece; its final answer is right.

    is_checked: whether it begins again until two totals agree.
    mistakes: share of the results that are wrong; only where is_checked.
    """
    pieces: list[Piece] = []
    totals: list[int] = []
    is_done = False
    while not is_done:
        may_err = is_checked and len(totals) < MOST_ATTEMPTS - 2
        numbers = question.numbers_from(len(totals))
        total = _add_steps(pieces, question, numbers, mistakes if may_err else 0.0, rng)
        is_done = total in totals or not is_checked
        totals.append(total)
        pieces.append(Piece(f"#### {question.answer}" if is_done else "Again:\n"))
    if total != question.answer:  # two mistakes that agree
        return write_solution(question, is_checked=is_checked, mistakes=mistakes, rng=rng)
    return pieces


def _add_steps(
    pieces: list[Piece], question: Question, numbers: Sequence[int], mistakes: float, rng: random.Random
) -> int:
    """Appends a line for each operation on the total so far, and returns the last total."""
    total = numbers[0]
    for number in numbers[1:]:
        line, result = question.step(total, number)
        is_wrong = rng.random() < mistakes
        total = _misread(result, rng) if is_wrong else result
        pieces += [Piece(f"{line} = "), Piece(str(total), not is_wrong), Piece("\n")]
    return total


def _misread(result: int, rng: random.Random) -> int:
    """Returns the number with one digit off by 1 or 2, as when a carry is forgotten."""
    digit: int = 10 ** rng.randrange(len(str(abs(result))))
    return result + rng.choice((-2, -1, 1, 2)) * digit


@dataclass(frozen=True)
class Document:
    """token_ids: of prompt and solution.
    labels: the ids again, or IGNORED for the prompt and for mistakes."""

    token_ids: list[int]
    labels: list[int]


def documents(tokenizer: Tokenizer, seed: int, mistakes: float) -> Iterator[Document]:
    """Yields documents on training problems, without end. mistakes: see `write_solution`."""
    rng = random.Random(f"smollm2 warm-up {seed}")
    while True:
        question = DIFFICULTY.draw(rng)
        if question.split == "train":
            pieces = write_solution(question, is_checked=True, mistakes=mistakes, rng=rng)
            prompt = list(tokenizer.encode_chat(ask(question, CHECKED)))
            solution, labels = encode(tokenizer, [(piece.text, piece.is_learned) for piece in pieces])
            yield Document(prompt + solution, [IGNORED] * len(prompt) + labels)


def encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Returns the ids of a solution with its end, and their labels."""
    is_learned = [learned for text, learned in pieces for _ in text]  # of each character
    encoded = tokenizer.hf("".join(text for text, _ in pieces), return_offsets_mapping=True)
    ids = [*encoded["input_ids"], tokenizer.stop_ids[0]]
    learned = [is_learned[end - 1] for _, end in encoded["offset_mapping"]] + [True]
    return ids, [token if counts else IGNORED for token, counts in zip(ids, learned, strict=True)]


def batch_loss(policy: Transformer, batch: list[Document]) -> tuple[Tensor, int]:
    """Returns the summed cross-entropy of what is learned, and how many tokens that is."""
    attend = PackedCausal(policy.config, [len(document.token_ids) - 1 for document in batch])
    tokens_N = torch.tensor([token for document in batch for token in document.token_ids[:-1]])
    labels_N = torch.tensor([label for document in batch for label in document.labels[1:]])
    counts_N = labels_N != IGNORED
    features_NE = policy(tokens_N, attend.positions(), attend)
    logits_TV = policy.logits(features_NE[counts_N]).float()
    return F.cross_entropy(logits_TV, labels_N[counts_N], reduction="sum"), int(counts_N.sum())


def adapted_policy(model: Model, lora: LoraSection, seed: int) -> Transformer:
    """Returns the model with weights frozen in bfloat16, whose products are twice as fast, and adapters in
    float32."""
    with torch.device("meta"):
        policy = Transformer(model.config).bfloat16()
    add_adapters(policy, lora, torch.float32)
    return build_policy(policy, model, torch.device("cpu"), seed)


def train(
    policy: Transformer, stream: Iterator[Document], args: argparse.Namespace, say: Callable[[str], None]
) -> None:
    """Trains the adapters; the learning rate rises for a twentieth of the steps, then falls to 0."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    num_steps, num_tokens, start = math.ceil(args.documents / args.batch), 0, time.perf_counter()
    for step in range(1, num_steps + 1):
        share = step / (num_steps + 1)
        optimizer.param_groups[0]["lr"] = args.learning_rate * min(share / 0.05, (1 - share) / 0.95)
        loss, count = batch_loss(policy, list(islice(stream, args.batch)))
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += count
        if step % 10 == 0 or step == num_steps:
            minutes = (time.perf_counter() - start) / 60
            say(
                f"{step} of {num_steps} steps, {num_tokens} tokens learned, loss {loss.item() / count:.4f}, "
                f"{minutes:.1f} min"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the model's folder")
    parser.add_argument("--out", type=Path, required=True, help="where the adapter goes")
    parser.add_argument("--documents", type=int, default=180)
    parser.add_argument("--batch", type=int, default=4, help="documents a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--mistakes",
        type=float,
        default=0.08,
        help="share of the results that are wrong, in all attempts but the last two",
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; alpha is twice as much")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lora = LoraSection(rank=args.rank, alpha=2.0 * args.rank)
    model = open_model(args.base, torch.float32)
    assert model.tokenizer is not None, "the recipe's model has one"
    policy = adapted_policy(model, lora, args.seed)
    train(
        policy,
        documents(model.tokenizer, args.seed, args.mistakes),
        args,
        lambda line: print(line, flush=True),
    )
    tensors = {name: p.detach().bfloat16() for name, p in policy.named_parameters() if p.requires_grad}
    save_adapter(args.out, lora, tensors, REPOSITORY, None)


if __name__ == "__main__":
    main()
