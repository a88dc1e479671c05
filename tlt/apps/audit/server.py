"""Asks an OpenAI-compatible server (vLLM, SGLang, …) for responses as token ids.

    answer        token ids of the model ─▶ a response     else ─▶ UserError
    busy or gone  asked again, after Retry-After or 1, 2, 4 … seconds; at last the answers that came are kept

Ids come in `token_ids` (vLLM ≥ 0.10.2). Text is never used: encoding it again need not give the sampled
tokens.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tlt.base.io.files import parse_json
from tlt.base.io.text import one_line
from tlt.base.types import FinishReason, Request, Rollout, UserError
from tlt.base.value_types import shorten

_IDS = {"return_token_ids": True}
_LOGPROBS = {"logprobs": 1}
_TIMEOUT_SECONDS = 600
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_LONGEST_WAIT = 120.0
_SUCH_AS = "give an OpenAI-compatible server such as http://host:8000/v1"


@dataclass(frozen=True)
class Endpoint:
    url: str
    model: str
    """The server's name for it."""
    vocab_size: int
    window: int
    api_key: str | None = field(default=None, repr=False)
    with_logprobs: bool = False
    """Whether responses carry log-probabilities."""
    states_off: bool = True
    """Whether options that are off are sent: vLLM takes those that are not from generation_config.json."""


@dataclass(frozen=True)
class Answers:
    rollouts: tuple[Rollout, ...]
    num_missing: int = 0
    why: str = ""
    states_off: bool = True
    """As `Endpoint.states_off`, of the server as it wanted to be asked."""


class Refused(UserError):
    """The server does not take such a request."""


class Unavailable(UserError):
    """is_busy: the server says so; seconds: its Retry-After."""

    def __init__(self, message: str, is_busy: bool = False, seconds: float | None = None) -> None:
        super().__init__(message)
        self.is_busy, self.seconds = is_busy, seconds


def read_api_key(variable: str) -> str:
    if not (key := os.environ.get(variable, "").strip()):
        remedy = "export the server's API key by that name"
        raise UserError(f"--api-key-variable: {variable} is not set, or is empty; {remedy}")
    return key


def complete(server: Endpoint, requests: Sequence[Request], num_parallel: int = 32) -> Answers:
    """Raises UserError for an answer that is no response, and for a server that answers no request."""
    server = _check_form(server, requests[0])
    gives_up = threading.Event()

    def answer(request: Request) -> Rollout | Unavailable:
        try:
            return _complete_one(server, request, gives_up)
        except Unavailable as error:
            gives_up.set()
            return error
        except UserError:
            gives_up.set()
            raise

    with ThreadPoolExecutor(num_parallel) as pool:
        found = list(pool.map(answer, requests))
    missing = [one for one in found if isinstance(one, Unavailable)]
    rollouts = tuple(one for one in found if isinstance(one, Rollout))
    if not rollouts:
        raise missing[0]
    return Answers(rollouts, len(missing), str(missing[0]) if missing else "", server.states_off)


def _check_form(server: Endpoint, request: Request) -> Endpoint:
    """Returns the server as it wants to be asked."""
    try:
        choice = _ask(server, request, 1, None)
    except Refused:
        server = replace(server, states_off=False)
        choice = _ask(server, request, 1, None)
    if (ids := read_token_ids(choice, server.url)) is None:
        what = f"{server.url} returns no token ids (return_token_ids, vLLM 0.10.2 or later)"
        remedy = "use a server that does, or write its responses to a file for tlt audit responses"
        raise UserError(f"--url: {what}; {remedy}")
    if server.with_logprobs:
        read_logprobs(choice, server.url, range(len(ids)))
    return server


def _complete_one(server: Endpoint, request: Request, gives_up: threading.Event) -> Rollout:
    choice = _ask(server, request, request.params.max_tokens, gives_up)
    place = f"--url: {server.url}: problem {request.problem_id!r}"
    token_ids = tuple(read_token_ids(choice, server.url) or ())
    if not token_ids:
        raise UserError(f"{place}: no token ids were returned; look at the server's log")
    if (length := len(request.prompt_ids) + len(token_ids)) > server.window:
        what = f"{length} tokens with the prompt, and the model's window is {server.window}"
        remedy = "serve the model that is audited"
        raise UserError(f"{place}: {what}; {remedy}")
    if (bad := next((token for token in token_ids if not 0 <= token < server.vocab_size), None)) is not None:
        what = f"token id {shorten(bad)} is outside the vocabulary of {server.vocab_size}"
        remedy = "serve the model that is audited"
        raise UserError(f"{place}: {what}; {remedy}")
    finish_reason: FinishReason = "stop" if choice.get("finish_reason") == "stop" else "length"
    places = range(len(token_ids))
    return Rollout(
        request.problem_id,
        request.sample_index,
        request.prompt_ids,
        token_ids,
        read_logprobs(choice, server.url, places) if server.with_logprobs else (),
        finish_reason,
        policy_version=0,
    )


def read_token_ids(choice: dict[str, Any], url: str) -> list[int] | None:
    """Returns the sampled ids of a choice, or None. Raises UserError for non-integers."""
    if (ids := choice.get("token_ids")) is None:
        return None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UserError(f"--url: {url} answers token_ids {shorten(ids)}, no list of ids; {_SUCH_AS}")
    return ids


def read_again(server: Endpoint, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the responses with their log-probabilities as tokens of a prompt (`echo`). Raises UserError
    where the server does not give them."""
    found = []
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.token_ids]
        asked = {"model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True}
        choice = _choice(server, asked | _LOGPROBS, None)
        places = range(len(rollout.prompt_ids), len(ids))
        found.append(replace(rollout, logprobs=read_logprobs(choice, server.url, places)))
    return found


def read_logprobs(choice: dict[str, Any], url: str, places: range) -> tuple[float, ...]:
    """Raises UserError where there are none."""
    logprobs = choice.get("logprobs")
    found = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    values = found[places.start : places.stop] if isinstance(found, list) else []
    if len(values) < len(places) or not all(type(one) in (int, float) for one in values):
        what = f"{url} returns no log-probability of each token (option logprobs, list token_logprobs)"
        remedy = "audit a server that does, or --test law"
        raise UserError(f"--url: {what}; {remedy}")
    return tuple(map(float, values))


def _ask(
    server: Endpoint, request: Request, max_tokens: int, gives_up: threading.Event | None
) -> dict[str, Any]:
    params = request.params
    optional = {"top_k": (params.top_k, 0), "top_p": (params.top_p, 1.0), "min_p": (params.min_p, 0.0)}
    optional["repetition_penalty"] = (1.0, 1.0)
    payload = {
        "model": server.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "seed": request.noise_key[0] >> 1,  # a hash of seed, problem and sample, below 2³¹
        **({"stop_token_ids": list(params.stop_ids)} if params.stop_ids else {}),
        **{name: value for name, (value, off) in optional.items() if server.states_off or value != off},
        **_IDS,
        **(_LOGPROBS if server.with_logprobs else {}),
    }
    return _choice(server, payload, gives_up)


def _choice(server: Endpoint, payload: dict[str, Any], gives_up: threading.Event | None) -> dict[str, Any]:
    match _post_patiently(server, payload, gives_up):
        case {"choices": [dict() as choice]}:
            return choice
        case {"error": error}:
            said = " ".join(json.dumps(error).split())[:200]
            raise UserError(_hidden(server, f"answers with an error ({said}); look at its log"))
    raise UserError(f"--url: {server.url} answered without one choice; {_SUCH_AS}")


def _post_patiently(server: Endpoint, payload: dict[str, Any], gives_up: threading.Event | None) -> Any:
    """gives_up: another request has given the server up; None: first contact, where a connection error is a
    wrong address."""
    pause = gives_up or threading.Event()
    last = Unavailable(f"--url: {server.url} was not asked")
    for wait in (*_WAITS, 0.0):
        if pause.is_set():
            break
        try:
            return _post(server, payload)
        except Unavailable as error:
            last = error
            if gives_up is None and not error.is_busy:
                break
            pause.wait(wait if error.seconds is None else min(error.seconds, _LONGEST_WAIT))
    raise last


def _post(server: Endpoint, payload: dict[str, Any]) -> Any:
    url, key = server.url, server.api_key
    address, body = f"{url.rstrip('/')}/completions", json.dumps(payload).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        if key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # a redirect does not get it
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            read = answer.read()
    except urllib.error.HTTPError as error:
        raise _refusal(server, error) from None
    except (http.client.IncompleteRead, http.client.BadStatusLine) as error:
        why = f"gives no whole answer of HTTP ({one_line(error, 80)}); look at its log"
        raise Unavailable(_hidden(server, why)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # no server, host or valid address
        why = f"cannot be reached ({error}); start the server or correct the address"
        raise Unavailable(_hidden(server, why)) from None
    try:
        return parse_json(read.decode())
    except ValueError as error:
        raise Unavailable(_hidden(server, f"answers no JSON ({one_line(error, 80)}); {_SUCH_AS}")) from None


def _refusal(server: Endpoint, error: urllib.error.HTTPError) -> UserError:
    with error:
        try:
            text = error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            text = ""
    said = " ".join(text.split())[:200]
    if error.code in _BUSY:
        why = f"is busy ({error.code}: {said}); look at its log, or lower --max-batch-size"
        return Unavailable(_hidden(server, why), True, _seconds(error.headers.get("Retry-After")))
    why = f"refuses ({error.code}: {said}); {_remedy(error.code, server.api_key)}"
    return (Refused if error.code in (400, 422) else UserError)(_hidden(server, why))


def _seconds(retry_after: str | None) -> float | None:
    if re.fullmatch("[0-9]{1,9}", text := (retry_after or "").strip()):
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def _hidden(server: Endpoint, why: str) -> str:
    return f"--url: {server.url} {why.replace(server.api_key, '***') if server.api_key else why}"


def _remedy(status: int, key: str | None) -> str:
    if status not in (401, 403):
        return "correct --engine-model and options"
    if key is not None:
        return "correct the key that --api-key-variable names"
    return "export its API key, and give --api-key-variable the variable's name"
