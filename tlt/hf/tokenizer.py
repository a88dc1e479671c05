"""A checkpoint's tokenizer: encodes text and chat messages, decodes responses, and knows the stop ids.

The only place that imports transformers' tokenizers. Everything is read from the checkpoint folder, never
from a network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tlt.hf.files import existing_directory, read_json
from tlt.io.text import one_line
from tlt.kinds import shorten
from tlt.tasks.thoughts import OPENING_TAGS, TAGS, ends_in_thought
from tlt.types import UserError

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer, checked against its model."""

    hf: Any
    """transformers' PreTrainedTokenizerBase (untyped there)."""
    path: Path
    vocab_size: int
    """Rows of the model's embedding; every id is smaller."""
    stop_ids: tuple[int, ...]

    def encode_text(self, text: str, place: str = "prompt") -> tuple[int, ...]:
        """Returns the ids of a text prompt, with the special tokens that the tokenizer adds (such as
        <bos>)."""
        if (bad := _HALF_A_CHARACTER.search(text)) is not None:
            where = f"{bad[0]!r}, column {bad.start() + 1}"
            raise UserError(f"{place}: holds half a character ({where}); remove it")
        # not verbose: it would warn of a length that is checked here
        encoded = self.hf(text, return_offsets_mapping=self.hf.is_fast, verbose=False)
        if self.hf.is_fast:
            _check_coverage(self.hf, text, encoded["offset_mapping"], place, self.path)
        return self._checked(encoded["input_ids"], place)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str = "messages",
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Returns the ids of chat messages in the tokenizer's template, up to the assistant's turn.

        variables: further variables of the template, such as enable_thinking.
        """
        if not self.has_template:
            remedy = "give prompt (text) or prompt_ids instead"
            raise UserError(f"{place}: {self.path} has no chat template; {remedy}")
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            ids = self.hf.apply_chat_template(list(messages), **options, **(variables or {}))
        except Exception as error:  # templates refuse roles and shapes by jinja2's exceptions
            reason = f"the chat template of {self.path} refuses them ({one_line(error, 160)})"
            raise UserError(f"{place}: {reason}; correct them") from None
        return self._checked(ids, place)

    @property
    def has_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return bool(self.hf.chat_template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a response, without special tokens but the tags of its thoughts."""
        ids = [token for token in token_ids if token not in self.hidden_ids]
        text: str = self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """The special tokens, without those that begin or end a thought: a scorer must see them."""
        added = self.hf.added_tokens_decoder
        special = {token for token, about in added.items() if about.special} | set(self.hf.all_special_ids)
        return frozenset(token for token in special if str(added.get(token, "")) not in TAGS)

    def is_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the response to a prompt begins within a thought: the chat template or the assistant's turn
        has opened one. A tag that the user's text mentions opens none."""
        last = max((i for i, token in enumerate(prompt_ids) if token in self.hidden_ids), default=0)
        if not last:  # a text without turns
            return self.decode(prompt_ids[-32:]).rstrip().endswith(OPENING_TAGS)
        return ends_in_thought(self.decode(prompt_ids[last:]))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, together that of `decode`; the last token of a character
        adds it. []: it is not known token by token."""
        from tokenizers.decoders import DecodeStream

        if not (self.hf.is_fast and token_ids):
            return []
        stream, backend = DecodeStream(skip_special_tokens=False), self.hf.backend_tokenizer
        hidden = self.hidden_ids
        try:
            pieces = ["" if token in hidden else stream.step(backend, token) or "" for token in token_ids]
        except Exception:  # a bare one of tokenizers, for bytes that are no text
            return []
        text, joined = self.decode(token_ids), "".join(pieces)
        if not text.startswith(joined):
            return []
        return [*pieces[:-1], pieces[-1] + text[len(joined) :]]  # what is left is half a character

    def name_of(self, token_id: int) -> str:
        """Returns the text of one token, also of a special one."""
        return str(self.hf.decode([token_id], clean_up_tokenization_spaces=False))

    def _checked(self, ids: Sequence[int], place: str) -> tuple[int, ...]:
        if not ids:
            raise UserError(f"{place}: is empty; give at least one token")
        return tuple(ids)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of the checkpoint folder `path`. Raises UserError where folder or tokenizer is
    missing or broken, and where the tokenizer has more tokens than the model's embedding has rows."""
    from transformers import AutoTokenizer

    path = Path(path)
    vocab_size = _vocab_size(path)
    if not has_tokenizer(path):
        raise UserError(
            f"{path}: has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy the model's files there"
        )
    try:
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        hf("")  # wrong settings raise at the first text
    except Exception as error:  # broken files raise anything, down to a bare Exception of tokenizers
        reason = f"the tokenizer cannot be loaded ({one_line(error, 160)})"
        raise UserError(f"{path}: {reason}; copy the model's files there again") from None
    # added tokens may leave gaps, so the largest id counts, not the number of tokens
    num_tokens = max(hf.get_vocab().values(), default=-1) + 1
    if num_tokens > vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {num_tokens} tokens but the model's embedding only {vocab_size} rows"
            " (config.json, vocab_size); use the tokenizer that belongs to this model"
        )
    eos = hf.eos_token_id
    return Tokenizer(hf, path, vocab_size, read_stop_ids(path) or (() if eos is None else (int(eos),)))


def has_tokenizer(path: str | Path) -> bool:
    return any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)


def read_stop_ids(path: str | Path) -> tuple[int, ...]:
    """Returns the ids that end a response, from generation_config.json, else from config.json; () where
    neither has any."""
    path = Path(path)
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        vocab_size = _vocab_size(path)
        for stop_id in ids:
            if not isinstance(stop_id, int) or isinstance(stop_id, bool) or not 0 <= stop_id < vocab_size:
                remedy = f"ids must be below the vocabulary size {vocab_size}"
                raise UserError(f"{path / name}: eos_token_id is {value!r}; {remedy}")
        return tuple(sorted(set(ids)))
    return ()


def check_prompt(prompt_ids: Sequence[int], place: str, *, vocab_size: int, window: int) -> None:
    """Raises UserError for ids without an embedding, and for a prompt that leaves no room for a response
    token."""
    if not prompt_ids:
        raise UserError(f"{place}: the prompt is empty; give at least one token")
    if bad := next((token for token in prompt_ids if not 0 <= token < vocab_size), None):
        where = f"outside the vocabulary of {vocab_size}"
        raise UserError(f"{place}: token id {shorten(bad)} is {where}; encode with the model's own tokenizer")
    if len(prompt_ids) > window - 1:
        raise UserError(
            f"{place}: the prompt has {len(prompt_ids)} tokens but the model's window is {window}, one of "
            f"them for the response; shorten it to {window - 1}"
        )


def _check_coverage(hf: Any, text: str, offsets: Sequence[tuple[int, int]], place: str, path: Path) -> None:
    """Raises UserError where the tokenizer drops a character, which it does silently without an unknown
    token. The offsets show cheaply that something may be missing; then every character is tried alone."""
    if sum(end - start for start, end in offsets) >= len(text):
        return
    for index, character in enumerate(text):
        if not character.isspace() and not hf(character, add_special_tokens=False)["input_ids"]:
            lacks = f"the tokenizer of {path} has no token for {character!r} (column {index + 1})"
            raise UserError(f"{place}: {lacks}; remove it")


def _vocab_size(path: Path) -> int:
    file = existing_directory(path) / "config.json"
    vocab_size = read_json(file).get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        remedy = "it must be the number of rows of the embedding"
        raise UserError(f"{file}: vocab_size is {vocab_size!r}; {remedy}")
    return vocab_size
