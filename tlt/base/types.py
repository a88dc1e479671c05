"""The types that cross a boundary: frozen values, whose methods only derive from their fields.

This file imports no torch. Axes used throughout the package: N tokens of a flat batch · B sequences · T
tokens per sequence (in training/update/: response tokens) V vocabulary · E hidden size · H query heads · K
key/value heads · D head dimension · L cache length S cache slots · R rows of logits, one a draw · F features
that are captured for the drafter A file that gives a letter another meaning says so.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tlt.base.value_types import (
    MaxTokens,
    MinP,
    Seed,
    StopIds,
    StopTexts,
    Temperature,
    TopK,
    TopP,
    convert,
    types_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "turns"]
"""turns: the environment has no further turn (`environment.max_turns`)."""
Purpose = Literal["rollout", "evaluation", "generate"]
ResponseId = tuple[str, int]
"""(problem id, sample index): unique within a step."""
NoiseKey = tuple[int, int, int, int]

LAW_VERSION = 1
"""Version of the sampling law. Bump it whenever the same key would give another token."""


class UserError(ValueError):
    """A user's mistake, in one line: place, value and remedy (exit code 2)."""


def checked(place: str, value: object, kind: Any) -> Any:
    """Raises UserError, "PLACE: is VALUE; REMEDY"."""
    try:
        return convert(value, kind)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None


@dataclass(frozen=True)
class SamplingParams:
    """The sampling of one sequence.

    top_k, top_p, min_p: 0, 1 and 0 switch the truncation off.
    max_tokens: fewer where the model's window ends.
    stop: texts; a response ends at the first token that completes one of them.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    max_tokens: MaxTokens = 2048
    stop_ids: StopIds = ()
    seed: Seed = 0
    stop: StopTexts = ()

    def __post_init__(self) -> None:
        for name, kind in types_of(SamplingParams).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class DraftOutcome(NamedTuple):
    """One verification of one response. Undrafted tokens, and the bonus token after the accepted drafts, have
    no outcome."""

    place: int
    """Tokens of the response before the draft."""
    drafter: str
    """learned, ngram (retrieval) or ahead (a reference)."""
    num_drafted: int
    """All candidates of a tree included."""
    num_accepted: int
    """Also those beyond the response's end."""
    rejected: int | None
    """The drafted token where the target drew another; None: the whole path was accepted."""


Drafts = tuple[DraftOutcome, ...] | None
"""Outcomes of all drafts for a response, in order; None: the engine does not record them."""


def read_drafts(values: Sequence[Sequence[Any]] | None) -> Drafts:
    return None if values is None else tuple(DraftOutcome(*value) for value in values)


def write_routes(routes: bytes | None) -> str | None:
    return None if routes is None else b64encode(routes).decode()


def read_routes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


@dataclass(frozen=True)
class Turns:
    """An environment's part in a response.

    given: stretches [first, end) of the response's tokens that the environment said, in order; the policy
        drew the others.
    messages: the turns before the last one of the policy, as chat messages.
    state: the environment after them, opaque outside its workers.
    num_errors, num_timeouts: calls that failed, and those of them by time-out.
    seconds: time in which the response waited for its environment.
    reward: the environment's own; None: it gives none, or not yet.
    failure: why the environment could not go on, or give its reward; then the response has no score.
    """

    given: tuple[tuple[int, int], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    state: str = ""
    num_calls: int = 0
    num_errors: int = 0
    num_timeouts: int = 0
    seconds: float = 0.0
    reward: float | None = None
    failure: str = ""

    @property
    def num_given(self) -> int:
        return sum(end - first for first, end in self.given)

    @property
    def num_settled(self) -> int:
        """Tokens of the response before the policy's present turn."""
        return self.given[-1][1] if self.given else 0

    @staticmethod
    def read(value: Mapping[str, Any] | None) -> Turns | None:
        if value is None:
            return None
        given = tuple((first, end) for first, end in value["given"])
        known = {name: value[name] for name in Turns.__dataclass_fields__ if name in value}
        return Turns(**{**known, "given": given, "messages": tuple(value["messages"])})


@dataclass(frozen=True)
class Request:
    """A request for sample `sample_index` of a problem, with everything its tokens depend on.

    token_ids, logprobs, drafts: the response so far, if another engine with the same policy began it. It goes
        on as it would have there.
    routes: with which they were drawn, as in `Rollout`, the prompt's first on; None: not recorded.
    turns: None: a response of one turn.
    """

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    purpose: Purpose = "rollout"
    policy_step: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    drafts: Drafts = ()
    routes: bytes | None = None
    turns: Turns | None = None

    @cached_property
    def noise_key(self) -> NoiseKey:
        """128 bits (four 32-bit words) hashed from (run seed, purpose, policy step, problem id, sample
        index). Keys collide only if BLAKE2b does. NumPy's values count as the equal Python values."""
        numbers = (int(self.params.seed), int(self.policy_step), int(self.sample_index))
        fields = (LAW_VERSION, numbers[0], str(self.purpose), numbers[1], str(self.problem_id), numbers[2])
        digest = hashlib.blake2b(repr(fields).encode(), digest_size=16).digest()
        words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
        return words[0], words[1], words[2], words[3]


@dataclass(frozen=True)
class Rollout:
    """One finished response.

    logprobs: as in `Response`.
    routes: experts that the engine took, a byte each, [tokens, layers, experts of a token]: of the tokens
        from the prompt's first on, or from the response's (`EngineSettings.routes`). None: not recorded.
    """

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    drafts: Drafts = None
    routes: bytes | None = None
    turns: Turns | None = None

    @cached_property
    def drawn(self) -> Sequence[int]:
        """Places of the policy's own tokens in `token_ids`: it learns from these, and its length counts
        these."""
        places = range(len(self.token_ids))
        given = () if self.turns is None else self.turns.given
        if not given:
            return places
        said = {place for first, end in given for place in range(first, end)}
        return [place for place in places if place not in said]

    @property
    def last_turn(self) -> tuple[int, ...]:
        return self.token_ids[0 if self.turns is None else self.turns.num_settled :]


class HasTurns(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def turns(self) -> Turns | None: ...


def num_drawn(response: HasTurns) -> int:
    """Counts the policy's own tokens."""
    return len(response.token_ids) - (0 if response.turns is None else response.turns.num_given)


def id_of(response: Request | Rollout | Response) -> ResponseId:
    return response.problem_id, response.sample_index


@dataclass(frozen=True)
class Response:
    """One sample of the answer to a prompt, as the Python API returns it and `tlt generate` writes it.

    problem_id: the record's own, else the prompt's position in the call, counted from 1.
    text: without special tokens; None for a model without a tokenizer.
    logprobs: natural, one per token: log-softmax(logits / temperature) before truncation; temperature 0
        counts as 1.
    finish_reason: "stop" (token_ids ends with a stop token or with the end of a stop text) or "length".
    """

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

    @staticmethod
    def of(rollout: Rollout, decode: Callable[[list[int]], str] | None) -> Response:
        """decode: token ids → text; None: the model has no tokenizer."""
        return Response(
            rollout.problem_id,
            rollout.sample_index,
            rollout.prompt_ids,
            rollout.token_ids,
            None if decode is None else decode(list(rollout.token_ids)),
            rollout.logprobs,
            rollout.finish_reason,
        )


@dataclass(frozen=True)
class Finished:
    """captured_TF: the target's features at all tokens but the last; None: not asked for, or no longer
    held.
    """

    rollout: Rollout
    captured_TF: Tensor | None = None


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of B sequences as trees of one common shape bound.

    The root has depth 0; drafting level l, counted from 0, makes the nodes of depth l + 1.

    tokens_BN: int64. Column 0 is the root: the last committed token.
    parents_BN: int64. Column of each node's parent, smaller than the node's own; column 0 holds -1. Padding
        (in a sequence with fewer nodes) has parent -1 and is never visited. Siblings carry distinct tokens.
    is_chain: every row is a chain, column i following column i - 1.
    lengths: nodes of each row, the root included, if all padding follows them; None: padding is known by its
        parents alone.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    is_chain: bool = False
    lengths: tuple[int, ...] | None = None

    @property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Counts the columns that the target reads, padding between nodes included."""
        return self.lengths or (self.num_nodes,) * self.tokens_BN.shape[0]


class Verdict(NamedTuple):
    """tokens: the accepted drafts, then the target's own next token.
    path: columns of the visited nodes, the root first; their cache entries are kept.
    num_drafted: without padding.
    rejected: the first drafted candidate where the target drew another token; None: there is none.
    num_levels: depth of the deepest drafted token.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    path: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_drafted: int = 0
    rejected: int | None = None
    num_levels: int = 0


@dataclass(frozen=True)
class Problem:
    """A prompt. data: its scorer's, opaque to everything between."""

    problem_id: str
    prompt_ids: tuple[int, ...]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """error: why `value` means nothing (time-out, exception); empty: scored.
    parts: reward function → value before its weight, for functions that apply; empty: the task alone scores.
    metrics: figures logged by reward functions.
    task: the problem's column `task`, by which means are taken; empty: none.
    """

    value: float
    is_solved: bool
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    task: str = ""

    @property
    def is_scored(self) -> bool:
        return not self.error


def in_order(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> tuple[list[Rollout], list[Reward]]:
    """Sorts both by (problem id, sample index)."""
    pairs = sorted(zip(rollouts, rewards, strict=True), key=lambda pair: id_of(pair[0]))
    return [rollout for rollout, _ in pairs], [reward for _, reward in pairs]


def resolve_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """ "auto" is bfloat16 for "cuda", else float32."""
    import torch  # here alone, so that the command line starts without it

    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    dtypes["auto"] = torch.bfloat16 if device == "cuda" else torch.float32
    if name not in dtypes:
        raise UserError(f"dtype: {name!r} is unknown; use one of {', '.join(dtypes)}")
    return dtypes[name]
