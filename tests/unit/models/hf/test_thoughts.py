"""Thoughts are no answers: the prompt says whether one is open, and decoding keeps the tags that close it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.golds import SUMS
from tests.unit.apps.cli.parts import write_lines
from tlt.apps.cli.main import main
from tlt.models.hf.tokenizer import Tokenizer as OurTokenizer
from tlt.models.hf.tokenizer import load_tokenizer
from tlt.tasks.base import get_task
from tlt.tasks.rewards.scoring import Completion, RewardSpec, Scorer

R1 = "{{ '<bos>' }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|><think>\n"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN_THINKING = QWEN + "<think>\n"
SPECIAL = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>")
ANSWER = r"\boxed{15}"
ASKED = "Think within <think> and </think>, open <think>. 7 + 8?"


def tokenizer(
    folder: Path, template: str, tags_are_special: bool, tags: str = "<think> </think>"
) -> OurTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL])
    backend.add_tokens([AddedToken(tag, special=tags_are_special, normalized=False) for tag in tags.split()])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    hf.chat_template = template
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return load_tokenizer(folder)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    ("template", "variables", "is_open"),
    [
        (R1, {}, True),
        (QWEN_THINKING, {}, True),
        (QWEN, {}, False),
        (QWEN, {"enable_thinking": False}, False),
    ],
)
def test_a_template_that_opens_a_thought_is_known_by_its_prompt(
    tmp_path: Path, template: str, variables: dict[str, Any], is_open: bool, is_special: bool
) -> None:
    ours = tokenizer(tmp_path, template, is_special)
    for text in ("7 + 8?", ASKED):
        prompt = ours.encode_chat([{"role": "user", "content": text}], variables=variables)
        assert ours.is_in_thought(prompt) == is_open


def test_a_text_opens_a_thought_by_its_last_word_alone(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, QWEN, tags_are_special=False)
    for text, is_open in ((ASKED, False), (f"{ASKED} Let me see.\n<think>\n", True), ("7 + 8?", False)):
        assert ours.is_in_thought(ours.encode_text(text)) == is_open
    opened = "<|im_start|>assistant\n<think> 7 and 8"  # the assistant's turn goes on
    assert ours.is_in_thought(ours.encode_text(f"<|im_start|>user\n7 + 8?<|im_end|>\n{opened}"))
    assert not ours.is_in_thought(ours.encode_text(f"<|im_start|>user\n7 + 8?<|im_end|>\n{opened}</think>"))


@pytest.mark.parametrize("tags", ["<think> </think>", "[THINK] [/THINK]"])
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("task", [SUMS, "math"])
@pytest.mark.parametrize("is_open", [False, True])
def test_no_box_within_a_thought_counts_whoever_opened_it_and_whatever_its_tags_are(
    tmp_path: Path, tags: str, is_special: bool, task: str, is_open: bool
) -> None:
    if task == "math":
        pytest.importorskip("math_verify")
    ours, (begin, end) = tokenizer(tmp_path, QWEN, is_special, tags), tags.split()
    responses = {
        f"{ANSWER} and on": not is_open,
        f"{begin}so {ANSWER}": False,
        f"Well. {begin}so {ANSWER}": False,
        f"{begin}so{end}{ANSWER}": True,
        f"so{end}{ANSWER}": True,
        f"{begin}{ANSWER}{end}It is 14: \\boxed{{14}}": False,
        f"{begin}so{end}\\boxed{{14}}{begin}or rather {ANSWER}": False,
        f"{ANSWER}{end}": False,
    }
    problem = {"prompt": "7 + 8?", "answer": "15", "search": "boxed"} | (
        {"in_thought": True} if is_open else {}
    )
    for text, is_solved in responses.items():
        seen = ours.decode([*ours.encode_text(text), ours.stop_ids[0]])
        assert seen == text
        assert get_task(task).score(problem, seen)["solved"] == is_solved, text


def test_the_pieces_of_a_response_are_its_text_with_the_tags(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, R1, tags_are_special=True)
    ids = ours.encode_text("é <think>a</think> é<|im_end|>")
    assert ours.pieces(ids) == ["", "é", " ", "<think>", "a", "</think>", " ", "", "é", ""]
    assert "".join(ours.pieces(ids)) == ours.decode(ids)


def test_a_reward_function_is_told_that_the_response_begins_within_a_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thought_rewards.py").write_text(
        "def is_told(completions, in_thought=(False,)):\n    return [float(in_thought[0])]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scorer = Scorer(RewardSpec("data", ["thought_rewards:is_told"]))
    told = [scorer.score([Completion(problem, "")])[0].value for problem in ({"in_thought": True}, {})]
    assert told == [1.0, 0.0]


def test_tlt_score_takes_from_a_response_that_its_prompt_has_opened_a_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines("problems.jsonl", {"problem_id": "a", "prompt": "7 + 8?", "answer": "15"})
    cut = {"problem_id": "a", "text": f"so {ANSWER}"}
    write_lines("responses.jsonl", cut, {**cut, "in_thought": True}, {**cut, "in_thought": False})
    words = ["score", SUMS, "--problems", "problems.jsonl", "--responses", "responses.jsonl"]
    assert main([*words, "--out", "scored.jsonl"]) == 0
    scored = map(json.loads, Path("scored.jsonl").read_text().splitlines())
    assert [line["solved"] for line in scored] == [True, False, True]
