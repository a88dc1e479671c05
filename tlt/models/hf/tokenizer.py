"""A checkpoint's tokenizer, read from its folder alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers

from tlt.base.io.text import one_line
from tlt.base.thoughts import OPENING_TAGS, TAGS, ends_in_thought
from tlt.base.types import SamplingParams, UserError
from tlt.base.value_types import shorten
from tlt.models.hf.chat import Chat, read_messages
from tlt.models.hf.files import existing_directory, read_json
from tlt.models.hf.limited import LimitExceeded, call_limited
from tlt.models.hf.limits import read_limits
from tlt.models.hf.template import DATE_FUNCTION, ChatTemplate, Message, TemplateRefusal

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Tokenizer:
    """hf: transformers' tokenizer, for names and templates.
    backend: encodes and decodes: tokenizer.json itself if the folder has it.
    """

    hf: Any
    backend: tokenizers.Tokenizer
    path: Path
    vocab_size: int
    """Rows of the model's embedding; every id is smaller."""
    stop_ids: tuple[int, ...]
    unknown_end: str = ""
    """Why stop_ids lack the token that ends an answer in the chat template, if they do."""

    def encode_text(self, text: str, place: str = "prompt") -> tuple[int, ...]:
        """Adds the tokenizer's special tokens at the beginning, such as <bos>, unless the text has them; none
        at the end."""
        ids = self._encode(text, place)
        begins = ids[: len(self.beginning)] == self.beginning
        return self._begun_once(ids if begins else (*self.beginning, *ids), place)

    def encode_chat(
        self,
        messages: Any,
        place: str = "messages",
        variables: Mapping[str, Any] | None = None,
        day: date | None = None,
        key: str = "messages",
    ) -> tuple[int, ...]:
        """Encodes up to where the assistant goes on: in a new turn, or in its own last message. Raises
        UserError as `write_prompt`.

        variables, day: see `Chat`. key: the row's column, for errors.
        """
        chat = Chat(read_messages(messages, key, place), variables or {}, day)
        if not self.has_template:
            remedy = "give prompt (text) or prompt_ids instead"
            raise UserError(f"{place}: {self.path} has no chat template; {remedy}")
        template = self.template
        for number, message in enumerate(chat.messages, start=1):
            if (found := self._control.search(str(message.get("content")))) is not None:
                what = f"message {number} holds {found[0]}, which the chat template writes itself"
                remedy = "remove it, or give the whole prompt as text without the template"
                raise UserError(f"{place}: {what}; {remedy}")
        text = self._limited(
            "tlt.models.hf.chat:write_prompt", template, chat, place, str(self.path), place=place
        )
        return self._begun_once(self._encode(text, place), place)

    def check_variables(self, variables: Mapping[str, Any], place: str) -> None:
        if not self.has_template:
            raise UserError(f"{place}: {self.path} has no chat template; remove {', '.join(variables)}")
        self._limited("tlt.models.hf.chat:check_variables", self.template, variables, place, place=place)

    @property
    def has_template(self) -> bool:
        return bool(self.hf.chat_template)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """Raises UserError if the template is unreadable."""
        try:
            return self.read_template()
        except TemplateRefusal as refusal:
            reason = f"the chat template cannot be read ({refusal})"
            raise UserError(f"{self.path}: {reason}; copy the model's files there again") from None

    def read_template(self) -> ChatTemplate:
        """Raises TemplateRefusal."""
        try:
            text = self.hf.get_chat_template()
        except ValueError as error:  # several templates, no default
            raise TemplateRefusal(one_line(error, 160)) from None
        self._limited("tlt.models.hf.template:find_variables", text)  # finds syntax errors
        return ChatTemplate(text, dict(self.hf.special_tokens_map))

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        day: date | None = None,
        opens_turn: bool = False,
    ) -> str:
        """Raises TemplateRefusal. See `ChatTemplate.render`."""
        function = "tlt.models.hf.template:ChatTemplate.render"
        template = self.read_template()
        return str(self._limited(function, template, messages, variables or {}, day, opens_turn=opens_turn))

    def without_control(self, text: str) -> str:
        """A space breaks special tokens of the template: an environment cannot end a turn or begin one."""
        return self._control.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)

    def encode_as_it_is(self, text: str) -> tuple[int, ...]:
        """Adds no special tokens. What the tokenizer has no token for is left out."""
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def _limited(self, function: str, *arguments: Any, place: str = "", **options: Any) -> Any:
        try:
            return call_limited(function, *arguments, **options)
        except LimitExceeded as limit:
            what = f"the chat template of {self.path} {limit}"
            raise UserError(f"{place}{': ' if place else ''}{what}; put another in its place") from None

    @functools.cached_property
    def beginning(self) -> tuple[int, ...]:
        file = self.path / "tokenizer_config.json"
        explicit = read_json(file).get("add_bos_token") if file.is_file() else None
        if explicit is False:
            return ()
        alone, whole = self.backend.encode("0", add_special_tokens=False).ids, self.backend.encode("0").ids
        num = next((n for n in range(len(whole)) if whole[n : n + len(alone)] == alone), 0)
        begins_by_name = explicit and self.hf.bos_token is not None and not num
        bos = self.backend.token_to_id(self.hf.bos_token) if begins_by_name else None
        return tuple(whole[:num]) if bos is None else (bos,)

    @functools.cached_property
    def _control(self) -> re.Pattern[str]:
        names = [self.name_of(token_id) for token_id in sorted(self.hidden_ids)]
        own = self.hf.special_tokens_map.values()
        return _any_of(name for name in names if name in self.template.text or name in own)

    @functools.cached_property
    def _added(self) -> re.Pattern[str]:
        return _any_of(token.content for token in self.backend.get_added_tokens_decoder().values())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Leaves out special tokens but the tags of thoughts."""
        return self.decode_all([token for token in token_ids if token not in self.hidden_ids])

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Keeps special tokens."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=False))

    @functools.cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens, except the tags of thoughts: a scorer must see them."""
        added = self.backend.get_added_tokens_decoder()
        names = {about.content for about in added.values() if about.special} | {*self.hf.all_special_tokens}
        ids = map(self.backend.token_to_id, names - TAGS)
        return frozenset(token for token in ids if token is not None)

    def is_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether template or assistant have opened a thought. A tag in the user's text does not count."""
        last = max((i for i, token in enumerate(prompt_ids) if token in self.hidden_ids), default=0)
        if not last:  # a text without turns
            return self.decode(prompt_ids[-32:]).rstrip().endswith(OPENING_TAGS)
        return ends_in_thought(self.decode(prompt_ids[last:]))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds, together `decode`'s; a character's last token adds it. []: not known
        token by token."""
        from tokenizers.decoders import DecodeStream

        if not token_ids:
            return []
        stream, hidden = DecodeStream(skip_special_tokens=False), self.hidden_ids
        try:
            pieces = [
                "" if token in hidden else stream.step(self.backend, token) or "" for token in token_ids
            ]
        except Exception:  # tokenizers raises a bare one for bytes that are no text
            return []
        text, joined = self.decode(token_ids), "".join(pieces)
        if not text.startswith(joined):
            return []
        return [*pieces[:-1], pieces[-1] + text[len(joined) :]]  # the rest is an incomplete character

    def name_of(self, token_id: int) -> str:
        return self.decode_all([token_id])

    def with_ends(self, params: SamplingParams, place: str = "stop") -> SamplingParams:
        """Replaces stop texts that are special tokens by their ids. Raises UserError for a special token
        within a stop text, and for ids outside the vocabulary."""
        check_stop_ids(params, self.vocab_size, place)
        special = {self.name_of(token_id): token_id for token_id in sorted(self.hidden_ids)}
        ids = {special[text] for text in params.stop if text in special}
        texts = tuple(text for text in params.stop if text not in special)
        if texts and "cleanup=True" in repr(self.backend.decoder):  # "do", "n" and "'t" become "don't"
            what = f"{texts[0]!r} cannot be sought, for this tokenizer's decoder takes back what it wrote"
            raise UserError(f"{place}: {what}; give ids of tokens, as stop_ids")
        for text in texts:
            if (inner := next((name for name in special if name in text), None)) is not None:
                what = f"{text!r} holds the special token {inner}, which is no part of a response's text"
                raise UserError(f"{place}: {what}; give {inner} alone")
        return replace(params, stop=texts, stop_ids=tuple(sorted({*params.stop_ids, *ids})))

    def _begun_once(self, ids: tuple[int, ...], place: str) -> tuple[int, ...]:
        if self.beginning and ids[:2] == 2 * self.beginning[:1]:
            raise UserError(f"{place}: the prompt begins twice with {self.name_of(ids[0])}; remove one")
        return ids

    def _encode(self, text: str, place: str) -> tuple[int, ...]:
        """Raises UserError unless the ids cover the text."""
        if (bad := _HALF_A_CHARACTER.search(text)) is not None:
            where = f"{bad[0]!r}, column {bad.start() + 1}"
            raise UserError(f"{place}: holds half a character ({where}); remove it")
        for character in set(self._added.sub("", text)) - self._known_characters:
            if not self._has_token_for(character):
                column = text.index(character) + 1
                lacks = f"the tokenizer of {self.path} has no token for {character!r} (column {column})"
                raise UserError(f"{place}: {lacks}; remove it")
            self._known_characters.add(character)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not ids:
            raise UserError(f"{place}: is empty; give at least one token")
        return tuple(ids)

    @functools.cached_property
    def _known_characters(self) -> set[str]:
        return set()

    def _has_token_for(self, character: str) -> bool:
        """Without an unknown token, tokenizers drop characters in silence."""
        return character.isspace() or bool(
            self.decode_all(self.backend.encode(character, add_special_tokens=False).ids).strip()
        )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Raises UserError if the tokenizer is missing or broken, or has more tokens than the model's embedding
    has rows."""
    path = Path(path)
    vocab_size = _vocab_size(path)
    if not has_tokenizer(path):
        raise UserError(
            f"{path}: has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy the model's files there"
        )
    try:
        hf, backend = _read(path)
        backend.encode("")  # wrong settings raise at the first text
    except Exception as error:  # broken files raise anything, down to a bare Exception of tokenizers
        reason = f"the tokenizer cannot be loaded ({one_line(error, 160)})"
        raise UserError(f"{path}: {reason}; copy the model's files there again") from None
    # added tokens may leave gaps, so the largest id counts, not the number of tokens. Special ones beyond the
    # rows, such as Gemma 3's image token, are refused where a prompt has them
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    num_tokens = max({*backend.get_vocab().values()} - special, default=-1) + 1
    if num_tokens > vocab_size:
        raise UserError(
            f"{path}: the tokenizer has {num_tokens} tokens but the model's embedding only {vocab_size} rows"
            " (config.json, vocab_size); use the tokenizer that belongs to this model"
        )
    tokenizer = Tokenizer(hf, backend, path, vocab_size, ())
    return _with_stop_ids(tokenizer)


def _read(path: Path) -> tuple[Any, tokenizers.Tokenizer]:
    """tokenizer.json encodes as it is: for some families transformers builds another tokenizer from its
    vocabulary."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = path / "tokenizer.json"
    if not file.is_file():
        hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend = tokenizers.Tokenizer.from_str(hf.backend_tokenizer.to_str())
    else:
        hf = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    return hf, backend


def _with_stop_ids(tokenizer: Tokenizer) -> Tokenizer:
    eos = tokenizer.hf.eos_token
    own = None if eos is None else tokenizer.backend.token_to_id(eos)
    end, unknown_end = None, ""
    try:
        end = _end_of_turn(tokenizer)
    except TemplateRefusal as refusal:  # only chats need it; `describe_template` reports it
        unknown_end = str(refusal)
    found = {*read_stop_ids(tokenizer.path), own, end}
    stop_ids = tuple(sorted(token_id for token_id in found if token_id is not None))
    return replace(tokenizer, stop_ids=stop_ids, unknown_end=unknown_end)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Raises TemplateRefusal."""
    if not tokenizer.has_template:
        return None
    answer = "0123456789"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    text = tokenizer.render(messages)
    rest = text.rpartition(answer)[2].lstrip()
    ids = tokenizer.backend.encode(rest, add_special_tokens=False).ids
    return ids[0] if ids and ids[0] in tokenizer.hidden_ids else None


def writes_date(path: str | Path) -> bool:
    names = ("chat_template*", "additional_chat_templates/*", "tokenizer_config.json")
    files = [file for name in names for file in Path(path).glob(name)]
    return any(DATE_FUNCTION in file.read_text(encoding="utf-8", errors="replace") for file in files)


def has_tokenizer(path: str | Path) -> bool:
    return any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)


def read_stop_ids(path: str | Path) -> tuple[int, ...]:
    """Reads generation_config.json, else config.json; () if neither has any."""
    path = Path(path)
    for name in ("generation_config.json", "config.json"):
        described = read_json(path / name) if (path / name).is_file() else {}
        value = described.get("eos_token_id", _text_config(described).get("eos_token_id"))
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


def check_stop_ids(params: SamplingParams, vocab_size: int, place: str = "stop") -> None:
    if (bad := max(params.stop_ids, default=0)) >= vocab_size:
        key = f"{place}{'-' if place.startswith('--') else '_'}ids"
        raise UserError(f"{key}: {bad} is outside the vocabulary of {vocab_size}; give ids below that")


def check_prompt(prompt_ids: Sequence[int], place: str, *, vocab_size: int, window: int) -> None:
    """Raises UserError for ids without an embedding, or a prompt that leaves no room for a response token."""
    if not prompt_ids:
        raise UserError(f"{place}: the prompt is empty; give at least one token")
    if bad := next((token for token in prompt_ids if not 0 <= token < vocab_size), None):
        where = f"outside the vocabulary of {vocab_size}"
        raise UserError(f"{place}: token id {shorten(bad)} is {where}; encode with the model's own tokenizer")
    if len(prompt_ids) > window - 1:
        raise UserError(
            f"{place}: the prompt has {len(prompt_ids)} tokens but the model's window is {window}, one of "
            f"them for the response; shorten it to {window - 1}, or leave such prompts out by "
            "max_prompt_tokens"
        )


def _vocab_size(path: Path) -> int:
    file = existing_directory(path) / "config.json"
    described = read_json(file)
    if _text_config(described):  # its sizes may be the family's defaults
        return read_limits(path).vocab_size
    vocab_size = described.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        remedy = "it must be the number of rows of the embedding"
        raise UserError(f"{file}: vocab_size is {vocab_size!r}; {remedy}")
    return vocab_size


def _text_config(described: Mapping[str, Any]) -> Mapping[str, Any]:
    part = described.get("text_config")
    return part if isinstance(part, Mapping) else {}
