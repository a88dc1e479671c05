"""Asks whether a run's servers answer: the Hugging Face hub and the trackers'."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from tlt.base.io.machine import Finding
from tlt.base.io.text import one_line

_TRACKERS = {
    "wandb": ("WANDB_BASE_URL", "https://api.wandb.ai"),
    "trackio": ("TRACKIO_SERVER_URL", ""),
    "mlflow": ("MLFLOW_TRACKING_URI", ""),
}
"""Tracker → (variable that names its server, default; empty: this machine)."""


def ask_servers(trackers: Sequence[str], seconds: float = 10.0) -> Iterator[Finding]:
    """Asks by huggingface_hub's HTTP client, with the environment's proxy and certificates."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        yield Finding("network", "note", "nothing was asked, since HF_HUB_OFFLINE is set", "unset it")
        return
    token = get_token()
    login = {"Authorization": f"Bearer {token}"} if token else {}
    answer = _ask(f"{constants.ENDPOINT}/api/whoami-v2", seconds, login)
    if token and answer == 401:
        what = f"{constants.ENDPOINT} refuses the token (401)"
        yield Finding("network", "broken", what, "log in with hf auth login, or correct HF_TOKEN")
    else:
        known = ", no token" if token is None else ", logged in" if answer == 200 else ""
        yield _judge("network", constants.ENDPOINT, answer, "HF_ENDPOINT", known)
    for name in trackers:
        variable, usual = _TRACKERS.get(name, ("", ""))
        url = os.environ.get(variable, usual)
        is_offline = name == "wandb" and os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if url.startswith("http") and not is_offline:
            yield _judge(f"network, {name}", url, _ask(url, seconds, {}), variable)


def _ask(url: str, seconds: float, headers: Mapping[str, str]) -> int | str:
    from huggingface_hub.utils import get_session

    try:
        return int(get_session().get(url, headers=headers, timeout=seconds).status_code)
    except Exception as error:  # whatever the HTTP client, or a proxy that the environment names, raises
        return one_line(error, 120)


def _judge(name: str, url: str, answer: int | str, variable: str, known: str = "") -> Finding:
    """Any answer is fine except refusals: 403, 407 and 5xx."""
    if isinstance(answer, int) and answer < 500 and answer not in (403, 407):
        return Finding(name, "ok", f"{url} answers{known}")
    what = f"answers {answer}" if isinstance(answer, int) else f"cannot be reached ({answer})"
    remedy = f"check the proxy (HTTPS_PROXY), or name another server in {variable}"
    return Finding(name, "broken", f"{url} {what}", remedy)
