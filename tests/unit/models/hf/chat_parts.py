"""Chat templates that people use, a byte-wise tokenizer with any of them, and random records of chats."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).parents[3] / "data" / "chat_templates"
NAMES = tuple(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
_CONTROL = re.compile(
    r"<\|[a-z_▁|]+?\|>|<｜[^｜']+｜>|</?[a-z_]*turn>|<[a-zA-Z_|]*(?:TOKEN|START|END)[A-Z_|]*>"
)
OPENINGS = {
    "chatml": "<|im_start|>assistant\n",
    "cohere": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek_r1_distill": "<｜Assistant｜><think>\n",
    "deepseekv3": "<｜Assistant｜><think>\n",
    "gemma": "<start_of_turn>model\n",
    "gemma3": "<start_of_turn>model\n",
    "gptoss": "<|start|>assistant",
    "granite3": "<|start_of_role|>assistant<|end_of_role|>",
    "llama2": "[/INST]",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_2": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[/INST]",
    "olmo2": "<|assistant|>\n",
    "phi3": "<|assistant|>\n",
    "phi3_5": "<|assistant|>\n",
    "phi4": "<|im_start|>assistant<|im_sep|>",
    "qwen2_5": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "qwen3_5_think": "<|im_start|>assistant\n<think>\n",
    "qwen3_instruct_2507": "<|im_start|>assistant\n",
    "smollm2": "<|im_start|>assistant\n",
    "zephyr": "<|assistant|>\n",
}
"""What opens the assistant's turn, where this file knows it."""


def template_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def write_tokenizer(folder: Path, template: str | None, extra: tuple[str, ...] = (), **settings: Any) -> Path:
    """A folder with config.json and a tokenizer of bytes and the template's special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    settings = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    named = {value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)}
    special = sorted({*_CONTROL.findall(template or ""), *extra, *named})
    bytewise.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bytewise.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    if template is not None:
        described["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400, "max_position_embeddings": 65536}))
    return folder


WORDS = (
    "2+2?", "a", "Wie heißt das?", "数学", "🙂👩‍👩‍👧", "line\nline", "  padded  ", '{"x": "y"}', "a < b > c",
    "\\frac{1}{2}", "tab\tend", "'quoted' \"twice\"", "é\u0301", "{{ messages }}", "<think>why</think>", "/no_think",
    "0", "The year is 1999.", "&amp;", "مرحبا", "x" * 300, "</answer>", "[INST]", "user", "assistant\n",
)  # fmt: skip


def some_text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))


def some_content(rng: random.Random) -> Any:
    """Mostly texts and parts that are texts; sometimes what is no text."""
    kind = rng.randrange(20)
    if kind < 9:
        return some_text(rng)
    if kind < 15:
        return [{"type": "text", "text": some_text(rng)} for _ in range(rng.randint(1, 3))]
    odd: tuple[Any, ...] = (
        [{"type": "image_url", "image_url": {"url": "x.png"}}, {"type": "text", "text": some_text(rng)}],
        [{"type": "image"}, {"type": "text", "text": some_text(rng)}],
        "", [], None, 7, {"text": "nested"}, [[{"type": "text", "text": "deep"}]], [{"type": "text"}],
        [some_text(rng), {"text": some_text(rng), "type": "text", "image": None}],
    )  # fmt: skip
    return rng.choice(odd)


def some_record(rng: random.Random) -> list[Any]:
    """A list of messages as exports have them, orderly or not."""
    messages: list[Any] = []
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2))):
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": some_content(rng)})
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": some_content(rng)})
        if turn and rng.random() < 0.15:
            call = {
                "type": "function",
                "id": "123456789",
                "function": {"name": "look_up", "arguments": {"q": "x y"}},
            }
            messages.append({"role": "assistant", "content": rng.choice(("", None)), "tool_calls": [call]})
            if rng.random() < 0.8:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": "123456789",
                        "name": "look_up",
                        "content": some_text(rng),
                    }
                )
        elif rng.random() < 0.6:
            messages.append({"role": "assistant", "content": some_content(rng)})
    if messages[-1].get("role") == "assistant" and rng.random() < 0.6:
        messages.pop()
    if rng.random() < 0.05:
        messages[rng.randrange(len(messages))] = rng.choice(
            (
                "text",
                {"from": "human", "value": "hi"},
                {"role": "judge", "content": "x"},
                {"role": None, "content": "x"},
            )
        )
    if rng.random() < 0.05:
        rng.shuffle(messages)
    return messages


def texts_of(message: Any) -> list[str]:
    """The texts that a person wrote into a message: all but thoughts of earlier answers."""
    if not isinstance(message, dict):
        return []
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else (part or {}).get("text") for part in parts]
    return [text.strip() for text in texts if isinstance(text, str)]
