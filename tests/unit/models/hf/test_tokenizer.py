"""A tokenizer belongs to its model: its size, its stop ids, its chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.refused import refused
from tests.unit.apps.cli.parts import VOCABULARY, save_tokenizer
from tlt.models.hf.tokenizer import load_tokenizer


def write_model_config(path: Path, **values: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 61, **values}))


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write_model_config(tmp_path, vocab_size=9)
    save_tokenizer(tmp_path)
    with refused(f"has {len(VOCABULARY)} tokens but the model's embedding only 9 rows"):
        load_tokenizer(tmp_path)


def test_a_special_token_beyond_the_embedding_is_no_mistake(tmp_path: Path) -> None:
    """As the image token of Gemma 3's text models."""
    write_model_config(tmp_path, vocab_size=len(VOCABULARY))
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.hf.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.hf.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode_text("<image>") == (len(VOCABULARY),)
    tokenizer.hf.add_tokens([AddedToken("word", special=False)])
    tokenizer.hf.save_pretrained(tmp_path)
    with refused(f"has {len(VOCABULARY) + 2} tokens"):
        load_tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with refused("is no directory"):
        load_tokenizer(tmp_path / "no")
    with refused(r"config\.json: is missing"):
        load_tokenizer(tmp_path)
    write_model_config(tmp_path)
    with refused("has no tokenizer"):
        load_tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_stop_ids_are_the_tokenizers_end_and_those_of_the_first_file_that_names_any(tmp_path: Path) -> None:
    write_model_config(tmp_path)
    save_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).stop_ids == (VOCABULARY.index("<eos>"),)
    write_model_config(tmp_path, eos_token_id=5)
    assert load_tokenizer(tmp_path).stop_ids == (1, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 6]}))
    assert load_tokenizer(tmp_path).stop_ids == (1, 6, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 61}))
    with refused("eos_token_id is 61; ids must be below the vocabulary size 61"):
        load_tokenizer(tmp_path)


def test_chat_messages_go_through_the_template_and_decoding_drops_special_tokens(tmp_path: Path) -> None:
    write_model_config(tmp_path)
    check = "{% if m.role != 'user' %}{{ raise_exception('who?') }}{% endif %}"
    template = f"{{% for m in messages %}}{check}[{{{{ m.content }}}}]{{% endfor %}}!"
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "12"}]) == tokenizer.encode_text("[12]!")
    assert tokenizer.decode([*tokenizer.encode_text("[12]!"), 1]) == "[12]!"
    with refused(r"the chat template .* refuses them \(TemplateError: who\?\)"):
        tokenizer.encode_chat([{"role": "judge", "content": "12"}])


def test_pieces_of_tokens_are_the_text_and_a_character_belongs_to_its_last_token(tmp_path: Path) -> None:
    write_model_config(tmp_path, vocab_size=300)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode_text("aé🙂 b")
    assert tokenizer.pieces([*ids, 256]) == ["a", "", "é", "", "", "", "🙂", " ", "b", ""]
    assert tokenizer.pieces(ids[:5]) == ["a", "", "é", "", "\ufffd"]
    assert tokenizer.pieces([]) == []
    assert tokenizer.name_of(256) == "<eos>"
    for seed in range(200):  # bytes that are no text, too: then the pieces are the text, or unknown
        drawn = random.Random(seed).choices(range(257), k=30)
        assert "".join(tokenizer.pieces(drawn)) in ("", tokenizer.decode(drawn))
