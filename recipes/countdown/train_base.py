"""Pretrains the small Countdown model on searches written by the solver, from nothing
(`recipes/pretrain.py`).

    python -m recipes.countdown.train_base --out recipes/countdown/base --minutes 35

Documents `<bos>[2,9,16:5]16-9=7[2,7:5]7-2=5!16-9=7,7-2=5<eos>` are drawn from the train split.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from transformers import LlamaConfig

from recipes.countdown.make_tokenizer import CHARACTERS, SPECIAL, make_tokenizer
from recipes.countdown.search import write_search
from recipes.pretrain import Document, Subject, main, make_parser, weights
from tlt.tasks.countdown import draw_puzzle

IDS = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}


def document(rng: random.Random, mix: dict[int, float], skip: float, max_chars: int) -> Document:
    """Token ids of one document and the number of prompt tokens; searches beyond `max_chars` are drawn
    again."""
    while True:
        puzzle = draw_puzzle(rng, "train", mix, max_number=10, max_target=60)
        response = write_search(puzzle, rng, skip=skip, max_chars=max_chars)
        if response is not None:
            prompt = [IDS["<bos>"], *(IDS[c] for c in str(puzzle))]
            return [*prompt, *(IDS[c] for c in response), IDS["<eos>"]], len(prompt)


def longest_search(share: float, args: argparse.Namespace) -> int:
    """The curriculum: searches of up to 64 characters at first, then longer at a constant rate of growth.

    A success is one character among hundreds in a long search; the model learns to see one in short searches.
    """
    return int(args.max_chars * (64 / args.max_chars) ** max(0.0, 1 - share / max(args.curriculum, 1e-9)))


def make_writer(args: argparse.Namespace, share: float) -> Callable[[random.Random], Document]:
    max_chars = longest_search(share, args)
    return lambda rng: document(rng, args.mix, args.skip, max_chars)


def make_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=args.width,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        pad_token_id=IDS["<pad>"],
        bos_token_id=IDS["<bos>"],
        eos_token_id=IDS["<eos>"],
    )


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--mix", type=weights, default={2: 0.05, 3: 0.5, 4: 0.45}, help="2:0.05,3:0.5,4:0.45")
    parser.add_argument(
        "--skip", type=float, default=0.2, help="probability that the solver leaves a move out"
    )
    parser.add_argument("--max-chars", type=int, default=1900, help="longer searches are dropped")
    parser.set_defaults(layers=20, width=128, heads=4, intermediate=384)
    main(
        Subject("countdown", make_tokenizer(), make_config, make_writer, max_new_tokens=2048),
        parser.parse_args(),
    )
