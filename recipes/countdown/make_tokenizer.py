"""The Countdown tokenizer: one token for each character, and `<bos>` before every prompt. Knows no model.

python -m recipes.countdown.make_tokenizer --out recipes/countdown/base
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-*/=,:[]x!"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """24 tokens: a byte-pair model without merges, so text falls into single characters."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    bos = ("<bos>", vocabulary["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=4096,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    make_tokenizer().save_pretrained(parser.parse_args().out)
