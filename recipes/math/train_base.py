r"""Pretrains the small model for word problems on their solutions, from nothing (`recipes/pretrain.py`).

    python -m recipes.math.train_base --out words --minutes 32 --threads 1
    python -m recipes.math.train_base --init words --out some --sums 0.5 --lr 1e-3 --minutes 12 --threads 1
    python -m recipes.math.train_base --init some --out recipes/math/base --sums 0.6 --lr 2e-3 --minutes 14 --threads 1

Documents `<|user|>Mia has 12 apples. …<|assistant|>12+7=19. 19-4=15. The answer is \boxed{15}.<|end|>` are
drawn from the train split. A share of the solutions is terse: the answer alone, which the model gets wrong
more often than after working it out. So there is something that reinforcement learning can find out by
itself. The others mix in sums of reasoning-gym's chain_sum, in its words, solved likewise (pip install
'.[reasoning-gym]').
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3Config

from recipes.math.make_tokenizer import make_tokenizer
from recipes.math.word_problems import ChainLimits, draw_chain, solve, tell_story
from recipes.pretrain import Document, Subject, main, make_parser, weights
from tlt.tasks.reasoning_gym import draw_entries


def difficulty_at(
    progress: float, steps: Mapping[int, float], max_number: int, max_result: int
) -> ChainLimits:
    """The curriculum: one operation on small numbers first; more operations and larger numbers as
    `progress` goes to 1."""
    count = 1 + int(progress * (max(steps) - 1))
    number = round(9 + (max_number - 9) * progress)
    return ChainLimits(
        {c: w for c, w in steps.items() if c <= count},
        number,
        max(number, round(max_result * (1 + progress) / 2)),
    )


def document(tokenizer: PreTrainedTokenizerFast, question: str, solution: str) -> Document:
    """Token ids of one problem with its solution, and the number of prompt tokens."""
    message = {"role": "user", "content": question}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    return [*prompt, *tokenizer(solution).input_ids, tokenizer.eos_token_id], len(prompt)


@cache
def sums(num: int = 40_000) -> list[str]:
    """Questions of chain_sum's train split: "State the final answer to …: 27 - 4 + 15 ="."""
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    return [drawn.question for drawn in draw_entries("chain_sum", num, 0, "train", options)]


def solve_sum(question: str, is_worked: bool) -> str:
    """Returns a solution: the result after every term written out, or alone."""
    first, *rest = re.findall(r"[+-]? ?\d+", question.rpartition(":")[2])
    value, work = int(first), []
    for term in rest:
        before, value = value, value + int(term.replace(" ", ""))
        work.append(f"{before}{term.replace(' ', '')}={value}.")
    return " ".join([*(work if is_worked else []), rf"The answer is \boxed{{{value}}}."])


def make_subject(tokenizer: PreTrainedTokenizerFast) -> Subject:
    def make_writer(args: argparse.Namespace, share: float) -> Callable[[random.Random], Document]:
        progress = 1.0 if args.init else min(1.0, share / max(args.curriculum, 1e-9))
        difficulty = difficulty_at(progress, args.steps, args.max_number, args.max_result)

        def write(rng: random.Random) -> Document:
            is_worked = rng.random() >= args.terse
            if rng.random() < args.sums:
                question = rng.choice(sums())
                return document(tokenizer, question, solve_sum(question, is_worked))
            chain = draw_chain(rng, "train", difficulty)
            return document(tokenizer, tell_story(chain, rng), solve(chain, is_worked))

        return write

    def make_config(args: argparse.Namespace) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=args.width,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=32,
            max_position_embeddings=tokenizer.model_max_length,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )

    return Subject("math", tokenizer, make_config, make_writer, max_new_tokens=256)


def run() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps", type=weights, default={1: 0.3, 2: 0.4, 3: 0.3}, help="1:0.3,2:0.4,3:0.3 operations"
    )
    parser.add_argument("--max-number", type=int, default=30, help="largest given number")
    parser.add_argument("--max-result", type=int, default=99)
    parser.add_argument(
        "--terse", type=float, default=0.5, help="share of solutions that are the answer alone"
    )
    parser.add_argument(
        "--sums",
        type=float,
        default=0.0,
        help="share of documents that are sums of reasoning-gym's chain_sum",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; made anew where none is given")
    parser.set_defaults(
        layers=8, width=192, heads=6, kv_heads=2, intermediate=512, curriculum=0.3, autocast=False
    )
    args = parser.parse_args()
    given = args.tokenizer and PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    main(make_subject(given or make_tokenizer()), args)


if __name__ == "__main__":
    run()
