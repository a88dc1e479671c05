"""Training on chat: messages go through the tokenizer's template, and everything after that is as for
token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.unit.models.hf.checkpoint_parts import SIZES, hash_of
from tlt.apps.api import train
from tlt.base.config.load import load_config
from tlt.tasks.base import get_task
from tlt.training.build.problems import load_problems

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = (
    *SPECIAL,
    *"ĊĠabcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,",
)  # bytes: a newline and a space first
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
CHATS = [
    [{"role": "system", "content": "answer with digits."}, {"role": "user", "content": f"{n} + {n}?"}]
    for n in range(3, 7)
]


class Digits:
    """Rewards a response for the digits in it, and remembers which problems it saw."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def problems(self, num: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
        return [{"problem_id": f"{split}-{n}", "messages": CHATS[n % len(CHATS)]} for n in range(num)]

    def score(self, problem: dict[str, Any], text: str) -> dict[str, Any]:
        self.seen.append(problem)
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        return {"reward": share, "solved": share > 0.5}


DIGITS = Digits()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of transformers' own, whose tokenizer has a template like Qwen's."""
    path = tmp_path_factory.mktemp("chat") / "model"
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(**{**SIZES, "eos_token_id": 2, "max_position_embeddings": 128})
    ).save_pretrained(path)
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(VOCABULARY)}, merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


def configure(model: Path, folder: Path, **task: Any) -> Any:
    return load_config(
        {
            "model": {"path": str(model)},
            "task": {"name": "countdown", **task},
            "run": {
                "num_ranks": 1,
                "num_steps": 2,
                "out_dir": str(folder),
                "device": "cpu",
                "dtype": "float64",
            },
            "rollout": {"problems_per_step": 2, "samples_per_problem": 4},
            "sampling": {"max_tokens": 12},
            "optimizer": {"learning_rate": 1e-2},
            "evaluation": {"num_problems": 2, "samples_per_problem": 1},
            "rewards": {"num_workers": 0},
        }
    )


def write_problems(path: Path, key: str, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    return path


def test_a_run_on_messages_is_the_run_on_the_ids_that_the_template_makes_of_them(
    model: Path, tmp_path: Path
) -> None:
    """The problems have no problem_id either: their lines name them."""
    hf = AutoTokenizer.from_pretrained(model)
    ids = [hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    assert hf.decode(ids[0]).endswith("<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n")
    hashes, tasks = [], []
    for key, values in (("messages", CHATS), ("prompt_ids", ids)):
        file = write_problems(tmp_path / f"{key}.jsonl", key, values)
        config = configure(model, tmp_path / key, name=f"{__name__}:DIGITS", data=str(file))
        assert [list(problem.prompt_ids) for problem in load_problems(config, "train")] == ids
        tasks.append(Digits())
        assert train(config, task=tasks[-1]).is_finished
        hashes.append(hash_of(tmp_path / key / "policy"))
    assert hashes[0] == hashes[1] != hash_of(model)
    trained = [problem for problem in tasks[0].seen if "-" not in problem["problem_id"]]
    assert {problem["problem_id"] for problem in trained} == {"1", "2", "3", "4"}
    assert all(problem["messages"] == CHATS[int(problem["problem_id"]) - 1] for problem in trained)


def test_rows_of_gsm8k_are_asked_in_the_template_and_a_response_is_scored_by_what_follows_the_mark(
    model: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": "tom has 3 + 4 pens. how many?", "answer": "tom has 3+4=<<3+4=7>>7 pens.\n#### 7"},
        {
            "question": "1000 hens, 250 are sold?",
            "answer": "1000-250=<<1000-250=750>>750 are left.\n#### 750",
        },
    ]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{question} end with the answer."
    config = configure(
        model, tmp_path / "run", name="math", data=str(file), chat=True, options={"template": template}
    )
    hf = AutoTokenizer.from_pretrained(model)
    for problem, row, answer in zip(load_problems(config, "train"), rows, ("7", "750"), strict=True):
        asked = [{"role": "user", "content": template.replace("{question}", row["question"])}]
        assert list(problem.prompt_ids) == hf.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=False
        )
        for text in (f"so it is\n#### {answer}", f"it is \\boxed{{{answer}}}.", f"Answer: {answer}.0"):
            assert get_task("math").score(problem.data, text) == {"reward": 1.0, "solved": True}
        for text in (f"#### {answer}0", f"it is {answer}"):
            assert get_task("math").score(problem.data, text)["reward"] == 0.0
