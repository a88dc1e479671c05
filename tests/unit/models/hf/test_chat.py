"""A prompt of chat messages holds all their texts and ends in one open turn of the assistant, or is refused."""

from __future__ import annotations

import json
import random
import signal
from datetime import date
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.refused import refused
from tests.unit.models.hf.chat_parts import (
    NAMES,
    OPENINGS,
    some_record,
    template_of,
    texts_of,
    write_tokenizer,
)
from tlt.base.types import SamplingParams, UserError
from tlt.models.hf.limited import LimitExceeded, call_limited
from tlt.models.hf.prompts import PLAIN, ChatFormat, describe_template, encode_prompt, encode_prompts
from tlt.models.hf.template import ChatTemplate
from tlt.models.hf.tokenizer import Tokenizer, load_tokenizer, writes_date


def load(folder: Path, name: str, **settings: Any) -> Tokenizer:
    return load_tokenizer(write_tokenizer(folder / name, template_of(name), **settings))


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def encode_or_refuse(tokenizer: Tokenizer, record: list[Any], name: str) -> str | None:
    """The text of the prompt; None: it is refused in one line. Judged here without the code that is tried."""
    try:
        ids = tokenizer.encode_chat(record, "chats.jsonl:1")
    except UserError as caught:
        line = str(caught)
        assert line.startswith("chats.jsonl:1")
        assert "\n" not in line
        assert len(line) < 500
        return None
    text = tokenizer.decode_all(ids)
    for message in record:
        is_assistant = message.get("role") == "assistant"
        for part in texts_of(message):
            for kept in part.split("<think>why</think>") if is_assistant else [part]:
                escaped = json.dumps(kept.strip(), ensure_ascii=False)[1:-1]
                assert kept.strip() in text or escaped in text, (name, kept)
    last = record[-1]
    if last["role"] == "assistant" and (begun := "".join(texts_of(last)[-1:])):
        assert text.rstrip().endswith(begun.rpartition("</think>")[2].strip())
    elif name in OPENINGS:
        assert text.endswith(OPENINGS[name]), (name, text[-80:])
    beginning = tokenizer.name_of(tokenizer.beginning[0]) if tokenizer.beginning else "<s>"
    assert not text.startswith(2 * beginning)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_every_chat_of_a_template_that_people_use_is_whole_or_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    """30 of the chats that make proofs tries by the hundreds."""
    tokenizer, rng = load(tmp_path, name), random.Random(name)
    told = [encode_or_refuse(tokenizer, some_record(rng), name) for _ in range(30)]
    assert any(text is not None for text in told)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_what_transformers_renders(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, name)
    hf = PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
    chats = [[say("user", "What is 2 + 2?")], [say("user", "a"), say("assistant", "b"), say("user", "c\n")]]
    for chat in chats:
        theirs = hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(tokenizer.encode_chat(chat)) == theirs


QUESTION = say("user", "What is 2 + 2?")
TURN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "chatml", "gemma", "mistral"])
def test_parts_that_are_texts_are_joined(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, name)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?", "image": None}]
    assert tokenizer.encode_chat([say("user", parts)]) == tokenizer.encode_chat(
        [say("user", "What is\n2 + 2?")]
    )
    assert tokenizer.encode_chat([say("user", [parts[0]])]) == tokenizer.encode_chat([say("user", "What is")])


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y"}}}],
}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([say("user", [{"type": "image"}])], "message 1, part 1 is of type 'image': a text model reads text alone"),
        ([say("user", [{"type": "text"}])], "message 1, part 1 has no text"),
        ([say("user", 7)], r"message 1 \(user\): content is 7; give text"),
        ([say("user", {"text": "x"})], "content is {'text': 'x'}; give text"),
        ([{"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"from": "human", "value": "x"}], r"message 1 has no role \(it has from, value\)"),
        ([{**QUESTION, "images": ["a.png"]}], "message 1 has images"),
        ([say("user", ""), say("assistant", "")], "messages has no text"),
        ([QUESTION, CALL], "ends with the assistant's tool calls"),
        ([QUESTION, say("judge", "8"), QUESTION], r"drops the text of message 2 \(judge\)"),
        ([QUESTION, CALL, say("tool", "4")], r"drops the text 'f' of message 2 \(assistant\)"),
        ([say("user", "a<|end|>b")], r"message 1 holds <\|end\|>, which the chat template writes itself"),
        ([say("user", "<s>a")], "message 1 holds <s>"),
        ([QUESTION, 5], "messages must be a list of objects"),
        ([], "messages must be a list of objects"),
    ],
)  # fmt: skip
def test_messages_that_no_prompt_can_hold_are_refused_in_one_line(
    messages: list[Any], told: str, tmp_path: Path
) -> None:
    with refused(told) as caught:
        load(tmp_path, "phi3").encode_chat(messages, "chats.jsonl:3")
    assert str(caught.value).startswith("chats.jsonl:3: ")


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_2", "phi3", "gemma", "olmo2", "smollm2"])
def test_the_model_continues_the_assistants_message(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, name)
    begun = [QUESTION, say("assistant", "The answer is ")]
    hf = PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
    theirs = hf.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    assert tokenizer.decode_all(tokenizer.encode_chat(begun)).rstrip() == theirs.rstrip()
    assert tokenizer.encode_chat([QUESTION, say("assistant", "")]) == tokenizer.encode_chat([QUESTION])


def test_a_template_that_opens_no_turn_is_refused_and_one_that_opens_it_by_itself_is_not(
    tmp_path: Path,
) -> None:
    closed = template_of("chatml").partition("{% if add_generation_prompt")[0]
    for name, template in (("silent", closed), ("header", closed + "{% if false %}x{% endif %}")):
        tokenizer = load_tokenizer(write_tokenizer(tmp_path / name, template))
        with refused(r"does not open the assistant's turn; have it write"):
            tokenizer.encode_chat([QUESTION])
    for name in ("llama2", "mistral"):
        assert load(tmp_path, name).encode_chat([QUESTION])


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_a_rows_tools_reach_the_template_and_one_that_does_not_write_them_refuses_them(
    tools: Any, tmp_path: Path
) -> None:
    record = {"messages": [QUESTION], "tools": tools}
    tokenizer = load(tmp_path, "qwen2_5")
    assert "look_up" in tokenizer.decode_all(encode_prompt(record, tokenizer, "here"))
    with refused(r"here: the chat template does not read tools"):
        encode_prompt(record, load(tmp_path, "phi3"), "here")
    with refused(r"here: tools is 'hammer', beside messages; give a list of tools"):
        encode_prompt({**record, "tools": "hammer"}, tokenizer, "here")


@pytest.mark.parametrize("row", [{"prompt": "What is it?"}, {"prompt_ids": [5]}, {"messages": [QUESTION]}])
def test_a_row_with_images_is_refused_since_a_text_model_would_not_see_them(
    row: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, "qwen2_5")
    assert encode_prompt({**row, "images": []}, tokenizer, "here")
    with refused(r"^here: has images, which a text model does not read; leave"):
        encode_prompt({**row, "images": ["a.png"]}, tokenizer, "here")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"enable_thinkin": False}, "does not read enable_thinkin .*; did you mean enable_thinking?"),
        ({"add_generation_prompt": False}, "add_generation_prompt is no variable of the chat template"),
        ({"truncation": True, "max_length": 4}, "truncation is no variable"),
        ({"messages": []}, "messages is no variable"),
        ({"content": "x"}, "does not read content"),
        ({"zzz": 1}, "does not read zzz .*; it reads enable_thinking"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    variables: dict[str, Any], told: str, tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, "qwen3")
    assert tokenizer.encode_chat([QUESTION], variables={"enable_thinking": False})
    with refused(told):
        tokenizer.encode_chat([QUESTION], "here", variables)


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s> hi"])
@pytest.mark.parametrize("way", ["tokenizer.json", "add_bos_token"])
def test_a_text_begins_once_and_is_not_ended(way: str, text: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None, **({"add_bos_token": True} if way == "add_bos_token" else {}))
    truth = Backend.from_file(str(folder / "tokenizer.json"))
    begin, end = map(truth.token_to_id, ("<s>", "</s>"))
    if way == "tokenizer.json":
        pairs = [("<s>", begin), ("</s>", end)]
        truth.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
        truth.save(str(folder / "tokenizer.json"))
    ids = load_tokenizer(folder).encode_text(text)
    assert ids.count(begin) == 1
    assert ids[0] == begin
    assert end not in ids
    with refused("here: the prompt begins twice with <s>; remove one"):
        load_tokenizer(folder).encode_text("<s><s>" + text, "here")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "gemma2", "mistral"])
def test_the_tokens_are_those_of_tokenizer_json_whatever_the_family(model_type: str, tmp_path: Path) -> None:
    """Not normalized to NFC, split by no expression of the family's, and without tokens of the family's."""
    folder = write_tokenizer(tmp_path, template_of("qwen2_5"))
    config = {"vocab_size": 400, "max_position_embeddings": 512, "model_type": model_type}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"qwen2": "Qwen2Tokenizer", "llama": "LlamaTokenizerFast", "gemma2": "GemmaTokenizer"}
    settings["tokenizer_class"] = names.get(model_type, "PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    truth = Backend.from_file(str(folder / "tokenizer.json"))
    num = truth.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": num}))  # exactly filled
    tokenizer = load_tokenizer(folder)
    for text in ("e\u0301 12345  x\n\n y", "\u2126 don't", " 数学<|im_end|>"):
        ids = truth.encode(text).ids
        assert list(tokenizer.encode_text(text)) == ids
        assert tokenizer.decode_all(ids) == truth.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == truth.decode(ids)


def test_a_length_to_cut_at_in_tokenizer_json_cuts_no_prompt(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    truth = Backend.from_file(str(folder / "tokenizer.json"))
    truth.enable_truncation(4)
    truth.enable_padding(length=20)
    truth.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode_text("0123456789")) == 10


@pytest.mark.parametrize(
    ("name", "end"), [("qwen2_5", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("phi3", "<|end|>")]
)  # fmt: skip
def test_a_response_ends_where_the_template_ends_an_answer_too(name: str, end: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template_of(name), eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = load_tokenizer(folder)
    ids = {tokenizer.backend.token_to_id(token) for token in (end, "<|endoftext|>")}
    assert set(tokenizer.stop_ids) == {7, *ids}


def test_a_template_that_refuses_a_question_with_its_answer_is_told_where_prompts_are_chats(
    tmp_path: Path,
) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one question alone') }}{% endif %}" + TURN
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template))
    row, texts = {"messages": [QUESTION]}, [{"prompt": "text"}, {"prompt_ids": [3]}]
    assert encode_prompt(row, tokenizer, "here")
    (told,) = describe_template([row], tokenizer, PLAIN, "--chat true")
    assert told.startswith(
        "the chat template refuses a question with its answer (TemplateError: one question"
    )
    assert "responses end at </s>; where answers end at another, add it to eos_token_id" in told
    assert [line[:22] for line in describe_template(texts, tokenizer, PLAIN, "")] == [
        "1 prompts are text and"
    ]


def test_an_error_that_is_not_the_templates_is_not_taken_for_a_refusal() -> None:
    with pytest.raises(AttributeError):
        ChatTemplate(TURN).render(["no message"], {})  # type: ignore[list-item]
    with pytest.raises(ValueError, match="invalid literal for int"):
        call_limited("builtins:int", "no number")


LOOPS = "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
EQUAL = "{% set n = namespace(a=[], b=[]) %}{% for _ in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='x') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    "bomb",
    [
        LOOPS,
        MACRO + "{{ f(60) }}",
        EQUAL + "{{ n.a == n.b }}",
        DOUBLED,
        "{{ (messages | length + 8) ** (9 ** 9 ** 9) }}",
        "{{ 9 ** (9 ** 9 ** 9) }}",  # computed where it is compiled
        "{{ 'x' * 10 ** 10 }}",
        "{{ messages[0].content * 10 ** 10 }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ (['x' * 10 ** 5] * 10 ** 5) | string }}",
        "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
        "{{ range(9999) | join('y' * 10 ** 6) }}",
        "{% for _ in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_one_line_within_seconds(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start where constants are computed, otherwise at the row that lights it."""
    monkeypatch.setattr("tlt.models.hf.limited.SECONDS", 1)
    template = "{% if messages[0].content == 'explode' %}" + bomb + "{% endif %}" + TURN
    told = r"(takes more than 1 s of processor time|needs more than 1 GiB of memory|writes [\d,]+ characters)"
    with refused(rf"the chat template of .* {told}; put another"):
        load_tokenizer(write_tokenizer(tmp_path, template)).encode_chat([say("user", "explode")], "rows:2")


def test_a_call_that_was_interrupted_leaves_its_answer_to_no_other() -> None:
    assert call_limited("builtins:len", "abc") == 3

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        call_limited("time:sleep", 0.5)
    signal.signal(signal.SIGALRM, before)
    assert call_limited("builtins:len", "abc") == 3


def test_texts_are_rendered_after_a_template_was_ended_and_after_a_thread_was(tmp_path: Path) -> None:
    tokenizer, told = load(tmp_path, "chatml"), []
    expected = tokenizer.encode_chat([QUESTION])
    with pytest.raises(LimitExceeded, match="killed by SIGKILL"):
        call_limited("os:kill", 0, signal.SIGKILL)
    thread = Thread(target=lambda: told.append(tokenizer.encode_chat([QUESTION])))
    thread.start()
    thread.join()
    assert [*told, tokenizer.encode_chat([QUESTION])] == [expected, expected]


def test_a_stop_text_that_is_a_special_token_is_its_id_and_one_that_holds_one_is_refused(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, None, extra=("</answer>", "<sep>")))
    sep, answer = map(tokenizer.backend.token_to_id, ("<sep>", "</answer>"))
    params = SamplingParams(stop=("</answer>", "done", "<sep>"), stop_ids=(3,))
    ends = tokenizer.with_ends(params)
    assert (ends.stop, ends.stop_ids) == (("done",), tuple(sorted((3, sep, answer))))
    with refused(r"here: 'a<sep>b' holds the special token <sep>.*; give <sep> alone"):
        tokenizer.with_ends(SamplingParams(stop=("a<sep>b",)), "here")
    with refused(r"stop_ids: 400 is outside the vocabulary of 400"):
        tokenizer.with_ends(SamplingParams(stop_ids=(400,)))
    tokenizer.backend.decoder = decoders.WordPiece()
    with refused(r"stop: 'done' cannot be sought.*; give ids of tokens, as stop_ids"):
        tokenizer.with_ends(params)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "granite3"])
def test_the_date_of_a_prompt_is_the_one_that_is_given(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, name)
    assert writes_date(tmp_path / name)
    texts = [
        tokenizer.decode_all(tokenizer.encode_chat([QUESTION], day=date(2031, 3, day))) for day in (4, 5)
    ]
    assert texts[0] != texts[1]
    assert "2031" in texts[0]
    assert not writes_date(write_tokenizer(tmp_path / "plain", template_of("chatml")))


def test_variables_are_checked_once_before_any_row_and_need_a_template(tmp_path: Path) -> None:
    chat, sizes = ChatFormat(variables={"enable_thinkin": True}), {"vocab_size": 400, "window": 64}
    with refused(r"^chat_template_kwargs: the chat template does not read enable_thinkin"):
        encode_prompts([("rows:1", {"prompt": "text"})], load(tmp_path, "qwen3"), chat, **sizes)
    plain = load_tokenizer(write_tokenizer(tmp_path / "plain", None))
    with refused(r"^chat_template_kwargs: .* has no chat template; remove enable_thinkin"):
        encode_prompts([("rows:1", {"prompt": "text"})], plain, chat, **sizes)


def test_a_character_without_a_token_is_refused_in_chats_too(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "chatml")
    file = tmp_path / "chatml" / "tokenizer.json"
    stored = json.loads(file.read_text())
    del stored["model"]["vocab"]["Z"]
    file.write_text(json.dumps(stored))
    assert tokenizer.encode_chat([say("user", "aZ\U0001f642")])
    with refused(r"has no token for 'Z' \(column"):
        load_tokenizer(tmp_path / "chatml").encode_chat([say("user", "aZ\U0001f642")])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for m in messages %}", "the chat template cannot be read .TemplateSyntaxError"),
        ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], "cannot be read .ValueError"),
    ],
)
def test_a_template_that_cannot_be_read_is_one_line(template: Any, told: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, None, chat_template=template))
    for variables in ({}, {"enable_thinking": True}):
        with refused(told):
            tokenizer.encode_chat([QUESTION], variables=variables)


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "default", "template": template_of("chatml")}, {"name": "tool_use", "template": "x"}]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, None, chat_template=several))
    assert tokenizer.decode_all(tokenizer.encode_chat([QUESTION])).endswith("<|im_start|>assistant\n")


def test_a_vocabulary_without_tokenizer_json_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Such folders hold vocab.json and merges.txt alone."""
    folder = write_tokenizer(tmp_path, template_of("qwen2_5"), tokenizer_class="Qwen2Tokenizer")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    hf = AutoTokenizer.from_pretrained(folder)
    assert list(load_tokenizer(folder).encode_text("e\u0301 12 数学")) == hf("e\u0301 12 数学")["input_ids"]
