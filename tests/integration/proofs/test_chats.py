"""Chats of every shape in the templates that people use: a whole prompt, or one line."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.unit.models.hf.chat_parts import NAMES, some_record
from tests.unit.models.hf.test_chat import encode_or_refuse, load

NUM_CHATS = 400


def test_four_hundred_chats_in_each_template_are_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    records = [some_record(random.Random(seed)) for seed in range(NUM_CHATS)]
    whole = Counter[str]()
    for name in NAMES:
        tokenizer = load(tmp_path, name)
        whole[name] = sum(encode_or_refuse(tokenizer, record, name) is not None for record in records)
    assert len(NAMES) >= 15
    assert min(whole.values()) >= NUM_CHATS // 20, whole
