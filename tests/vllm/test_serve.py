"""vLLM's server with the law as its plug-in gives the tokens of our own engine, whatever else runs, and
refuses what it cannot.

One server for all tests, made to be in trouble: it drafts, prompts do not fit into a step, and its cache
is too small for all.
"""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from tests.refused import refused
from tests.vllm.parts import served
from tests.vllm.serving import BASE, DRAFTER, LAW, ROOT, asks, client_of, export_eagle, serving
from tlt.base.types import Request, Rollout, SamplingParams, UserError
from tlt.engine.build.engine import load_engine
from tlt.engine.build.model import load_model
from tlt.engine.settings import EngineSettings

pytestmark = served

PROMPT = "".join(f"[2,3,{i}:21]" for i in range(10, 40))
"""Longer than two blocks of the cache, of which the first can then be shared where EAGLE drafts, and than
a step's tokens."""

MAX_TOKENS = 120
TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "extra_body": {"top_k": 6}}
WANTED = {"extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    drafting = export_eagle(folder, ROOT / DRAFTER, ROOT / BASE)
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    limits = {"max-num-seqs": 16, "max-num-batched-tokens": 64, "max-model-len": 512}
    cramped = [f"--{key}={value}" for key, value in {**limits, "num-gpu-blocks-override": 16}.items()]
    chat = ("--chat-template", str(folder / "chat.jinja"))
    with serving(folder, "server", *LAW, *cramped, *chat, *drafting) as address:
        yield address


@pytest.fixture
def ask(url: str) -> Callable[..., Any]:
    return asks(url)


@pytest.fixture(scope="module")
def ours() -> Callable[..., Rollout]:
    """Answers as our own engine does, without drafts and one request at a time."""
    engine = load_engine(load_model(ROOT / BASE), EngineSettings(max_batch_size=1))

    def answer(prompt_ids: Sequence[int], seed: int, **params: Any) -> Rollout:
        asked = SamplingParams(**{"max_tokens": MAX_TOKENS, "stop_ids": (2,), **params}, seed=seed % 2**63)
        (rollout,) = engine.generate([Request("served", 0, tuple(prompt_ids), asked, "generate")])
        return rollout

    return answer


def params_of(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a seed's parameters as the client names them and as we do: every third is truncated."""
    if seed % 3 < 2:
        return {"temperature": 1.0}, {"temperature": 1.0}
    return TRUNCATED, {"temperature": 0.7, "top_p": 0.9, "top_k": 6}


def tokens(ask: Callable[..., Any], seed: int, **asked: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the prompt's tokens and the response's."""
    params = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "seed": seed, **params_of(seed)[0], **asked}
    params["extra_body"] = {**params.get("extra_body", {}), "return_token_ids": True}
    (choice,) = ask(**params).choices
    return tuple(choice.prompt_token_ids), tuple(choice.token_ids)


def test_a_seed_gives_the_tokens_of_our_own_engine(
    ask: Callable[..., Any], ours: Callable[..., Rollout]
) -> None:
    found = {seed: tokens(ask, seed) for seed in (0, 1, 2, 5, -7, 2**62)}
    wanted = {seed: ours(prompt, seed, **params_of(seed)[1]).token_ids for seed, (prompt, _) in found.items()}
    assert {seed: response for seed, (_, response) in found.items()} == wanted
    assert len(set(wanted.values())) > 3


def test_company_preemption_and_unfinished_prompts_change_no_token(
    url: str, ask: Callable[..., Any], ours: Callable[..., Rollout]
) -> None:
    seeds = range(18)
    others = [
        {"prompt": f"[{i},3,7:20]" * 20, "max_tokens": 60 + 5 * i, "temperature": 1.3, "n": 1 + i % 2}
        for i in range(8)
    ]
    with ThreadPoolExecutor(32) as pool:
        running = [pool.submit(ask, **other) for other in others]
        found = list(pool.map(lambda seed: tokens(ask, seed), seeds))
        assert all(each.result().choices for each in running)
    assert [response for _, response in found] == [
        ours(found[0][0], seed, **params_of(seed)[1]).token_ids for seed in seeds
    ]
    assert counter(url, "vllm:num_preemptions_total") > 0
    assert counter(url, "vllm:prefix_cache_hits_total") > 0
    assert counter(url, "vllm:spec_decode_num_accepted_tokens_total") > 0


def test_each_of_n_responses_has_a_seed_of_its_own(
    ask: Callable[..., Any], ours: Callable[..., Rollout]
) -> None:
    choices = ask(prompt=PROMPT, max_tokens=MAX_TOKENS, seed=40, n=3, temperature=1.0, **WANTED).choices
    prompt = choices[0].prompt_token_ids
    assert [tuple(choice.token_ids) for choice in choices] == [
        ours(prompt, 40 + i).token_ids for i in range(3)
    ]


def test_without_a_seed_every_response_is_another_one(ask: Callable[..., Any]) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 2.0}
    texts = [choice.text for n in (1, 10) for choice in ask(**asked, n=n).choices]
    texts.append(ask(**asked, seed=-1).choices[0].text)  # vLLM's word for no seed, too
    assert len(set(texts)) > 4, (
        "one seed for each of the three calls would give three; some texts are likely enough to come twice"
    )


def test_a_stream_a_chat_and_a_stop_text_give_the_same_tokens(url: str, ours: Callable[..., Rollout]) -> None:
    client = client_of(url)
    asked: dict[str, Any] = {"model": "m", "max_tokens": MAX_TOKENS, "seed": 3, "temperature": 1.0}
    whole = client.completions.create(prompt=PROMPT, **asked).choices[0].text
    stream = client.completions.create(prompt=PROMPT, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole
    stopped = client.completions.create(prompt=PROMPT, stop=["*"], **asked).choices[0].text
    assert stopped == whole.split("*")[0]
    scores: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], **asked, **scores, **WANTED
    )
    wanted = ours(chat.prompt_token_ids, 3)
    assert tuple(chat.choices[0].token_ids) == wanted.token_ids
    told = chat.choices[0].logprobs.content
    assert [one.logprob for one in told] == pytest.approx(wanted.logprobs, abs=1e-3)
    assert all(len(one.top_logprobs) == 2 for one in told)


def test_log_probabilities_are_those_of_the_requests_temperature(
    ask: Callable[..., Any], ours: Callable[..., Rollout]
) -> None:
    (choice,) = ask(
        prompt=PROMPT, max_tokens=MAX_TOKENS, seed=2, logprobs=5, temperature=0.7, **WANTED
    ).choices
    wanted = ours(choice.prompt_token_ids, 2, temperature=0.7)
    assert tuple(choice.token_ids) == wanted.token_ids
    assert choice.logprobs.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
    for text, logprob, likeliest in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert likeliest[text] == logprob
        assert len(likeliest) in (5, 6)


def test_greedy_decoding_takes_the_likeliest_tokens(
    ask: Callable[..., Any], ours: Callable[..., Rollout]
) -> None:
    prompt, response = tokens(ask, 1, temperature=0)
    assert response == ours(prompt, 0, temperature=0.0).token_ids


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.6, "frequency_penalty": 0.4, "extra_body": {"repetition_penalty": 1.2}},
        {"extra_body": {"bad_words": ["+", "*"]}},
        {"extra_body": {"min_tokens": 110}, "temperature": 1.5},
        {"extra_body": {"structured_outputs": {"regex": "[0-9+*() -]{40,60}"}}},
        {"extra_body": {"allowed_token_ids": [2, 4, 5, 6, 7, 8, 14, 15]}},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_what_comes_before_the_law_does_not_depend_on_company(
    asked: dict[str, Any], ask: Callable[..., Any]
) -> None:
    params = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 1.0, **asked}
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda seed: ask(seed=seed, **params).choices[0].text, range(6)))
    assert together == [ask(seed=seed, **params).choices[0].text for seed in range(6)]
    plain = [
        ask(seed=seed, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=1.0).choices[0].text
        for seed in range(6)
    ]
    assert together != plain


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"extra_body": {"vllm_xargs": {"tlt": "x"}}}, "vllm_xargs: tlt is what engines of tlt send"),
        (
            {"extra_body": {"vllm_xargs": {"tlt": [1, 2, 3, 4]}}},
            "vllm_xargs: tlt is what engines of tlt send",
        ),
        ({"extra_body": {"min_p": 0.1}}, "not yet supported with speculative decoding"),
        ({"logit_bias": {"5": 1.0}}, "not yet supported with speculative decoding"),
        ({"seed": 2**63 - 1, "n": 2}, "seed: 9223372036854775807 leaves no seeds for 2 responses"),
    ],
)
def test_what_cannot_be_right_is_refused_and_the_server_goes_on(
    asked: dict[str, Any], sentence: str, ask: Callable[..., Any]
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=sentence):
        ask(prompt=PROMPT, max_tokens=4, **asked)
    assert ask(prompt=PROMPT, max_tokens=4).choices


def counter(url: str, name: str) -> float:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


# ── before it starts ────────────────────────────────────────────────────────────────────────────────────────


def configured(**arguments: Any) -> Any:
    """Returns vLLM's configuration for these arguments, checked as a server's is."""
    from vllm.engine.arg_utils import EngineArgs

    from tlt.engine.vllm.inside.plugin import register

    register()
    given = {
        "model": str(ROOT / BASE),
        "additional_config": {"tlt": {}},
        "kv_cache_memory_bytes": 2**28,
        **arguments,
    }
    return EngineArgs(**given).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"logprobs_mode": "raw_logits"}, "--logprobs-mode: raw_logits"),
        ({"logprobs_mode": "processed_logits"}, "--logprobs-mode: processed_logits"),
        ({"logits_processors": ["some.module:Processor"]}, "--logits-processors: "),
        ({"additional_config": {"tlt": {"taau": 1}}}, "additional_config: tlt is {'taau': 1}"),
        ({"additional_config": {"tlt": True}}, "additional_config: tlt is True"),
        ({"additional_config": {"tlt": {"tau": 0}}}, "additional_config: tlt.tau is 0"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [0.5, 0.25],
                }
            },
            "rejection_sample_method 'synthetic'",
        ),
    ],
)
def test_a_server_that_could_not_keep_the_law_does_not_start(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as raised:
        configured(**arguments)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_asynchronous_scheduling_is_refused_in_the_first_model_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tlt.engine.vllm.inside.admission import check_server

    config = configured()
    config.scheduler_config.async_scheduling = (
        True  # vLLM's default on GPUs; its CPU platform switches it off
    )
    with refused("--no-async-scheduling"):
        check_server(config)
    monkeypatch.setattr(
        type(config), "use_v2_model_runner", True
    )  # a running vLLM no longer reads its environment
    check_server(config)


def test_whoever_did_not_ask_for_the_law_is_not_checked() -> None:
    configured(additional_config={}, logprobs_mode="raw_logits")


def test_a_process_that_has_loaded_numba_can_start_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law loads Numba; its library stands in a module and has whatever attribute it is asked for."""
    from vllm.platforms import current_platform

    from tlt.engine.vllm.inside.plugin import register

    class Library:
        __slots__ = ()

        def __getattr__(self, name: str) -> object:
            return object()

    module = ModuleType("llvmlite.binding.ffi")
    module.lib = Library()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register()
    current_platform.register_triton_kernel_overrides()
    assert isinstance(module.lib, Library)
