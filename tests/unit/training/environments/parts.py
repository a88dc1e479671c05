"""A tiny chat model whose tokenizer has tokens that are whole calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.models.hf.checkpoint_parts import SIZES

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %} by <tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""


def a_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    *(a_call("add", a=a, b=b) for a in range(4) for b in range(4)),
    a_call("add", a=1),
    a_call("absent"),
    '<tool_call>{"name": "add", </tool_call>',
    a_call("look_up", word="ham"),
    a_call("look_up", word="egg"),
)


def write_model(
    path: Path,
    seed: int = 0,
    calls: Sequence[str] = CALLS,
    template: str = TEMPLATE,
    has_experts: bool = False,
    **sizes: int,
) -> Path:
    """A random Qwen2 in float64, or Qwen3 with experts. Several letters end a turn, so that turns are short."""
    alphabet = [*"Ċ", *(chr(n) for n in range(33, 127)), "Ġ"]
    torch.manual_seed(seed)
    size = len(SPECIAL) + len(alphabet) + len(calls)
    ends = [2, *(len(SPECIAL) + alphabet.index(letter) for letter in "QXYZ")]
    shape = {**SIZES, "vocab_size": size, "max_position_embeddings": 2048, "eos_token_id": ends, **sizes}
    if has_experts:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).save_pretrained(path)
    else:
        Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
    )
    fast.add_tokens([AddedToken(call, special=False, normalized=False) for call in calls])
    fast.chat_template = template
    fast.save_pretrained(path)
    return path
