"""Asks an OpenAI-compatible server (vLLM, SGLang, …) for responses as token ids.

Prompts go out as token ids. Token ids come back in `token_ids` (option `return_token_ids`, vLLM ≥ 0.10.2), or
as tokens written "token_id:17" among the log-probabilities (`return_tokens_as_token_ids`, older vLLM). Text
is never
used: encoding it again need not give the sampled tokens.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tlt.types import FinishReason, Request, Rollout, UserError

_FORMS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
)
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks OpenAI's completions API."""

    url: str
    model: str
    """The name by which it serves the model."""
    api_key: str | None = field(default=None, repr=False)
    """None: it asks for none."""


def read_api_key(variable: str) -> str:
    """Returns the key in an environment variable. Raises UserError where there is none."""
    if not (key := os.environ.get(variable, "").strip()):
        raise UserError(
            f"--api-key-variable: {variable} is not set, or is empty; export the server's API key by that "
            "name"
        )
    return key


def complete(server: Endpoint, requests: Sequence[Request], num_parallel: int = 32) -> Iterator[Rollout]:
    """Yields one response per request, in order. Every request has a seed of its own."""
    form = _find_form(server, requests[0])
    with ThreadPoolExecutor(num_parallel) as pool:
        yield from pool.map(lambda request: _complete_one(server, request, form), requests)


def _find_form(server: Endpoint, request: Request) -> dict[str, Any]:
    """Returns the options by which this server returns token ids, found by asking it for one token."""
    for form in _FORMS:
        if read_token_ids(_ask(server, request, form, max_tokens=1)) is not None:
            return form
    raise UserError(
        f"--url: {server.url} returns no token ids (neither return_token_ids nor return_tokens_as_token_ids);"
        " use a server that does, or write its responses to a file for --responses"
    )


def _complete_one(server: Endpoint, request: Request, form: dict[str, Any]) -> Rollout:
    choice = _ask(server, request, form, request.params.max_tokens)
    token_ids = read_token_ids(choice)
    if not token_ids:
        raise UserError(
            f"--url: {server.url} returned no token ids for problem {request.problem_id!r}; look at the "
            "server's log"
        )
    finish_reason: FinishReason = "stop" if choice.get("finish_reason") == "stop" else "length"
    return Rollout(
        request.problem_id,
        request.sample_index,
        request.prompt_ids,
        tuple(token_ids),
        (),
        finish_reason,
        policy_version=0,
    )


def read_token_ids(choice: dict[str, Any]) -> list[int] | None:
    """Returns the sampled ids of one choice, in either form; None where it has none."""
    if isinstance(ids := choice.get("token_ids"), list):
        return [int(token) for token in ids]
    tokens = (choice.get("logprobs") or {}).get("tokens")
    if isinstance(tokens, list) and all(str(token).startswith("token_id:") for token in tokens):
        return [int(str(token).removeprefix("token_id:")) for token in tokens]
    return None


def _ask(server: Endpoint, request: Request, form: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Returns the server's one choice. Options that are off are left out: not every server knows them."""
    params = request.params
    optional = {"top_k": (params.top_k, 0), "top_p": (params.top_p, 1.0), "min_p": (params.min_p, 0.0)}
    payload = {
        "model": server.model,
        "prompt": list(request.prompt_ids),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "seed": request.noise_key[0] >> 1,  # a hash of seed, problem and sample, below 2³¹
        **({"stop_token_ids": list(params.stop_ids)} if params.stop_ids else {}),
        **{name: value for name, (value, off) in optional.items() if value != off},
        **form,
    }
    match _post(server, payload).get("choices"):
        case [dict() as choice]:
            return choice
    raise UserError(
        f"--url: {server.url} answered without one choice; give an OpenAI-compatible server such as "
        "http://host:8000/v1"
    )


def _post(server: Endpoint, payload: dict[str, Any]) -> dict[str, Any]:
    url, key = server.url, server.api_key
    address, body = f"{url.rstrip('/')}/completions", json.dumps(payload).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        if key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # a redirect does not get it
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            said = " ".join(error.read().decode(errors="replace").split())[:200]
        raise _refused(server, f"refuses ({error.code}: {said}); {_remedy(error.code, key)}") from None
    except json.JSONDecodeError:
        raise UserError(
            f"--url: {url} answers no JSON; give an OpenAI-compatible server such as http://host:8000/v1"
        ) from None
    except (OSError, ValueError) as error:  # no server, no such host, no valid address
        why = f"cannot be reached ({error}); start the server or correct the address"
        raise _refused(server, why) from None
    return found if isinstance(found, dict) else {}


def _refused(server: Endpoint, why: str) -> UserError:
    """Returns the error, without the key, which a server may repeat."""
    return UserError(f"--url: {server.url} {why.replace(server.api_key, '***') if server.api_key else why}")


def _remedy(status: int, key: str | None) -> str:
    """Returns the remedy for an answer with this HTTP status."""
    if status not in (401, 403):
        return "correct --engine-model and options"
    if key is not None:
        return "correct the key that --api-key-variable names"
    return "export its API key, and give --api-key-variable the variable's name"
