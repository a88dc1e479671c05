"""TLT in one file: reinforcement learning of a reasoning model, its rollout sped up by speculative decoding.

    python examples/one_file.py                      # a few steps on two CPU cores
    python examples/one_file.py --speculation off    # the same tokens: compare the digests, and tokens/s

A small base model writes searches for Countdown puzzles. RL makes it better at them. One step on two ranks:

    puzzles ─▶ shared queue of 48 requests: a rank takes the next one whenever it has room
                 │
    rank 0   ▏█████ decode, batch 16 ██████▇▇▆▅▄▃▂▂▁▁▁▁▁▁▁▁▁▁▕ update ▕
    rank 1   ▏█████ decode, batch 16 ████▇▇▅▄▂▁▕░░░░ idle ░░░░▕ update ▕
                                             └ the long tail: a few long responses set the time of all

Most of a step is decoding: each token of a response takes a forward of the model. In the tail the batch is
small, and a forward of eight tokens costs little more than one of a single token. So a drafter guesses
tokens, and one forward checks them all:

    tokens so far     [ 2 , 9 , 1 6 : 5 ] 1 6 - 9 =
    draft                                           7 [ 2 , 9     what followed such tokens the last time
    the model draws                                 7 [ 2 , 7     its own token at each place, in one forward
    committed                                       7 [ 2 , 7     four that agree, and the model's next one

The model draws every token itself, with noise that depends on the token's place alone (part 1). The draft
decides how many tokens a forward brings; it cannot decide which. Hence the promise: the same seed gives the
same tokens, rewards and weights with speculation on or off. In float64 they are equal. In float32 forwards of
one token and of eight round differently, so two runs may part where the two best tokens are almost equal,
which is rare.

The parts, in the order of the algorithm, and where the package `tlt` has them:

    1 the sampling law   tlt/speculation/law/sampling.py     6 the rollout         tlt/engine/own/
    2 model and cache    tlt/models/                         7 the puzzle          tlt/tasks/countdown.py
    3 the drafter        tlt/drafter/drafting/retrieval/     8 the policy update   tlt/training/update/
    4 verification       tlt/speculation/law/verify.py       9 ranks and loop      tlt/training/
    5 the tuner          tlt/speculation/tuner/

The package has more: a learned drafter, which idle ranks train; draft trees; running responses that move to
idle ranks; top-k, top-p and min-p; checkpoints; GPUs.

Sources: TLT, arXiv 2511.16665. Speculative decoding: Leviathan et al., 2211.17192. The law: Daliri, Musco and
Suresh, 2408.07978. GRPO: 2402.03300.

Tensors wear their axes:
    B sequences · N tokens of each in one forward · L cached positions · V vocabulary · E hidden size
    H query heads · K key/value heads · D head dimension · W positions of the window
    P problems · G responses to each · R responses
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

BASE = Path(__file__).parent.parent / "recipes" / "countdown" / "base"
NUM_RANKS = 2
PROBLEMS_PER_STEP, SAMPLES_PER_PROBLEM = 6, 8
MAX_BATCH_SIZE = 16  # sequences that a rank decodes at a time
TEMPERATURE = 1.0  # RL trains on the very distribution it samples from


# ── 1. The sampling law ───────────────────────────────────────────────────────────────────────────────────
#
#     y(n) = argmax_v [ log p_n(v) + Gumbel(key, n, v) ]
#
# The argmax of log-probabilities plus Gumbel noise is a sample of the distribution (the Gumbel-max trick).
# Most samplers take noise from a generator with a state, so a token depends on how many were drawn before it.
# Here the noise is a function of the response's key, the position n and the token id v. So it does not matter
# when a token is drawn, in which batch, or whether it was drafted.


def noise_key(seed: int, purpose: str, step: int, problem_id: str, sample_index: int) -> tuple[int, ...]:
    """Returns the key of a response: four words of a hash, so that no other response has the same noise."""
    law_version = 1
    fields = (law_version, seed, purpose, step, problem_id, sample_index)
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=16).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Maps a counter and a key to four random words: Philox4x32-10 (Salmon et al., SC'11). It has no state.

    Words are int64 tensors of values below 2³². A product may wrap; its two halves are right all the same.
    """
    mask = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & mask) ^ c1 ^ k0, product1 & mask
        c2, c3 = ((product0 >> 32) & mask) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def gumbel_noise(keys_B4: Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Returns Gumbel(key, n, v) as float32[B, N, V]. One Philox block gives the noise of four token ids.

    A word r becomes w = (r + ½) / 2³², in (0, 1); then -log(-log1p(-w)) has the Gumbel distribution.
    """
    blocks = torch.arange((vocab_size + 3) // 4)
    k0, k1, k2, k3 = (keys_B4[:, i, None, None] for i in range(4))
    words = philox((blocks, positions_BN[:, :, None], k2, k3), (k0, k1))
    words_BNV = torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size]
    uniform_BNV = (words_BNV.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform_BNV)).float()


def draw(logits_BNV: Tensor, noise_BNV: Tensor, temperature: float) -> Tensor:
    """Returns tokens_BN by the law. Logits stand for log p: they differ by the same for all tokens."""
    if temperature == 0:
        return logits_BNV.argmax(dim=-1)
    return (logits_BNV * (1 / temperature) + noise_BNV).argmax(dim=-1)


# ── 2. The model and its cache ────────────────────────────────────────────────────────────────────────────
#
# One decoder of the Llama family reads prompts, decodes tokens, verifies drafts, and is trained. The cache
# keeps what attention needs of earlier tokens, so that each of them is read once.


class Cache(NamedTuple):
    """Keys and values by layer, row and column: those of the token at position n of sequence b are at [b, n].

    A rejected draft need not be removed. Its columns lie behind the committed tokens, and the next forward
    overwrites them before any token looks there.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(model: Decoder, num_rows: int, num_columns: int) -> Cache:
        shape = (model.num_layers, num_rows, num_columns, model.num_kv_heads, model.head_dim)
        return Cache(*torch.zeros(2, *shape, dtype=model.dtype))

    def rows_from(self, first: int) -> Cache:
        return Cache(self.keys[:, first:], self.values[:, first:])

    def append(self, layer: int, positions_BN: Tensor, k_BNKD: Tensor, v_BNKD: Tensor) -> Cache:
        """Writes to the first B rows. Returns what a layer may see of them, up to the last position."""
        rows_B1 = torch.arange(len(positions_BN))[:, None]
        keys, values = self.keys[layer], self.values[layer]
        keys[rows_B1, positions_BN], values[rows_B1, positions_BN] = k_BNKD, v_BNKD
        seen = slice(len(positions_BN)), slice(int(positions_BN.max()) + 1)
        return Cache(keys[seen], values[seen])

    def move(self, source: int, target: int) -> None:
        self.keys[:, target], self.values[:, target] = self.keys[:, source], self.values[:, source]


class Decoder:
    """A Llama decoder. config, weights: those of a Hugging Face checkpoint."""

    def __init__(self, config: dict, weights: dict[str, Tensor]) -> None:
        self.weights = {name: weight.requires_grad_() for name, weight in weights.items()}
        self.vocab_size, self.num_layers = config["vocab_size"], config["num_hidden_layers"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)
        self.dtype = self.embedding.dtype
        # Rotary positions: at position n, dimensions i and i + D/2 are turned by n times their frequency.
        exponents = torch.arange(0, self.head_dim, 2).double() / self.head_dim
        frequencies = config["rope_parameters"]["rope_theta"] ** -exponents
        angles_WD = torch.outer(torch.arange(config["max_position_embeddings"]).double(), frequencies)
        self.cos_W1D = torch.cat([angles_WD.cos(), angles_WD.cos()], dim=-1)[:, None].to(self.dtype)
        self.sin_W1D = torch.cat([-angles_WD.sin(), angles_WD.sin()], dim=-1)[:, None].to(self.dtype)

    def __call__(self, tokens_BN: Tensor, positions_BN: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns logits_BNV. Without a cache, tokens attend to those before them in a row. With one, they
        are written to its first B rows, and attend to what is cached up to their own positions."""
        x_BNE = F.embedding(tokens_BN, self.embedding)
        rope, mask_B1NL = (self.cos_W1D[positions_BN], self.sin_W1D[positions_BN]), None
        if cache is not None:
            is_seen_B1NL = torch.arange(int(positions_BN.max()) + 1) <= positions_BN[:, None, :, None]
            mask_B1NL = torch.where(is_seen_B1NL, 0.0, float("-inf")).to(self.dtype)
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            q_BNHD, k_BLKD, v_BLKD = self._qkv(name, x_BNE, rope)
            if cache is not None:
                k_BLKD, v_BLKD = cache.append(layer, positions_BN, k_BLKD, v_BLKD)
            attended_BNE = attend(q_BNHD, k_BLKD, v_BLKD, mask_B1NL)
            x_BNE = x_BNE + self._linear(f"{name}.self_attn.o_proj", attended_BNE)
            h_BNE = self._norm(f"{name}.post_attention_layernorm", x_BNE)
            gate, up = (self._linear(f"{name}.mlp.{which}_proj", h_BNE) for which in ("gate", "up"))
            x_BNE = x_BNE + self._linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        return F.linear(self._norm("model.norm", x_BNE), self.head)

    def _qkv(self, name: str, x_BNE: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, the first two rotated to their positions."""
        h_BNE = self._norm(f"{name}.input_layernorm", x_BNE)
        projected = (self._linear(f"{name}.self_attn.{which}_proj", h_BNE) for which in "qkv")
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in projected)
        qk = torch.cat([q, k], dim=2)
        qk = qk * rope[0] + qk.roll(self.head_dim // 2, -1) * rope[1]
        return *qk.split([self.num_heads, self.num_kv_heads], dim=2), v

    def _norm(self, name: str, x_BNE: Tensor) -> Tensor:
        return F.rms_norm(x_BNE, x_BNE.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _linear(self, name: str, x_BNE: Tensor) -> Tensor:
        return F.linear(x_BNE, self.weights[f"{name}.weight"])


def attend(q_BNHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask_B1NL: Tensor | None) -> Tensor:
    """Returns the attention output [B, N, H·D], causal where no mask is given. H / K queries share a key."""
    q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BLKD, v_BLKD))
    out = F.scaled_dot_product_attention(q, k, v, mask_B1NL, is_causal=mask_B1NL is None, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def load_model(folder: Path, dtype: torch.dtype) -> Decoder:
    weights = {name: weight.to(dtype) for name, weight in load_file(folder / "model.safetensors").items()}
    return Decoder(json.loads((folder / "config.json").read_text()), weights)


# ── 3. The drafter ────────────────────────────────────────────────────────────────────────────────────────
#
# A drafter guesses the next tokens. A bad guess costs time and changes no token. The simplest drafter has no
# weights: it looks up what followed the last time the same few tokens were said.


class NgramDrafter:
    """Drafts what this response, or another one to the same problem, has said before."""

    LENGTHS = (8, 5, 3)  # of a match, in tokens; a longer one is the better guess

    def __init__(self) -> None:
        self.places: dict[tuple, tuple[list[int], int]] = {}
        """Maps (problem id, tokens before a place) to the latest text with such a place, and the place."""

    def remember(self, problem_id: str, tokens: list[int], num_new: int) -> None:
        """Takes note of the last `num_new` tokens of a text. The list itself is kept, and grows further."""
        for place in range(len(tokens) - num_new, len(tokens)):
            for length in self.LENGTHS:
                if place >= length:
                    self.places[problem_id, *tokens[place - length : place]] = tokens, place

    def propose(self, problem_id: str, tokens: list[int], depth: int) -> list[int]:
        """Returns at most `depth` tokens; none where nothing matches."""
        for length in self.LENGTHS:
            if found := self.places.get((problem_id, *tokens[-length:])):
                text, place = found
                return text[place : place + depth]
        return []


# ── 4. Verification ───────────────────────────────────────────────────────────────────────────────────────
#
# Leviathan et al. accept a drafted token at random, by its probabilities under target and drafter. That keeps
# the distribution, but another draft gives other tokens. Here the target (the model) draws its own token
# after every token of the draft. Its tokens count up to the first that differs from the draft: later ones
# follow a token that was not drawn.


def verify(draft: list[int], drawn: list[int]) -> list[int]:
    """Returns the tokens to commit: the drafts that agree, then the target's own next token.

    drawn: the target's token after the last committed token, and after each drafted one.
    """
    num_accepted = 0
    while num_accepted < len(draft) and draft[num_accepted] == drawn[num_accepted]:
        num_accepted += 1
    return drawn[: num_accepted + 1]


# ── 5. The tuner ──────────────────────────────────────────────────────────────────────────────────────────
#
# Whether a draft pays depends on the batch. With few sequences, a forward of eight tokens each costs little
# more than one of a single token each. With many, the processor has enough to do, and rejected tokens are
# wasted work. So the tuner measures: for each draft depth, 0 (off) included, and each range of batch sizes,
# the tokens that steps brought and the seconds that they took. TLT's BEG-MAB is such a bandit.


class StepRecord(NamedTuple):
    """A measured step of the rollout. num_tokens: committed by all sequences.  end: the time of day."""

    depth: int
    batch_size: int
    num_tokens: int
    seconds: float
    end: float


class Tuner:
    """Chooses the fastest draft depth, for each range of batch sizes: 1, 2, 3 to 4, 5 to 8, 9 to 16."""

    DEPTHS = (0, 2, 4, 8, 12)
    NUM_TRIALS = 3  # steps before a depth is judged
    EPSILON = 0.02  # share of the steps that try any depth
    KEEP = 0.98  # share of what was measured that outlives one more step

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.measured: dict[tuple[int, int], tuple[int, float, float]] = {}
        """Maps (range, depth) to steps, tokens and seconds. Old ones fade, for the policy changes."""

    def choose(self, batch_size: int) -> int:
        """Returns a depth that was hardly tried, seldom any at all, and else the fastest."""
        arms = {depth: self._measured(batch_size, depth) for depth in self.DEPTHS}
        untried = [depth for depth, (num_steps, _, _) in arms.items() if num_steps < self.NUM_TRIALS]
        if untried or self.rng.random() < self.EPSILON:
            return self.rng.choice(untried or self.DEPTHS)
        return max(arms, key=lambda depth: arms[depth][1] / arms[depth][2])

    def observe(self, step: StepRecord) -> None:
        num_steps, tokens, seconds = self._measured(step.batch_size, step.depth)
        tokens, seconds = self.KEEP * tokens + step.num_tokens, self.KEEP * seconds + step.seconds
        self.measured[(step.batch_size - 1).bit_length(), step.depth] = num_steps + 1, tokens, seconds

    def _measured(self, batch_size: int, depth: int) -> tuple[int, float, float]:
        return self.measured.get(((batch_size - 1).bit_length(), depth), (0, 0.0, 0.0))


# ── 6. The rollout ────────────────────────────────────────────────────────────────────────────────────────
#
# Continuous batching: the next request takes the row of the response that ends. Plain decoding is the same
# step with drafts of no tokens.


class Problem(NamedTuple):
    """A puzzle (part 7)."""

    problem_id: str
    numbers: list[int]
    target: int


@dataclass
class Rollout:
    """A response to a problem: asked for, in the making, or finished. tokens: the prompt's, then its own."""

    problem: Problem
    sample_index: int
    key: tuple[int, ...]
    num_prompt: int
    tokens: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Engine:
    """Generates responses. One ends with stop_id or after max_tokens. tuner: None: speculation is off."""

    def __init__(self, model: Decoder, stop_id: int, max_tokens: int, tuner: Tuner | None) -> None:
        self.model, self.stop_id, self.max_tokens, self.tuner = model, stop_id, max_tokens, tuner

    @torch.inference_mode()
    def generate(self, requests: Iterator[Rollout], records: list[StepRecord]) -> list[Rollout]:
        """Returns the finished responses. requests: the next one is taken only when there is room for it."""
        longest = 64 + self.max_tokens + max(Tuner.DEPTHS)  # prompt, response and draft
        self.cache, self.drafter = Cache.empty(self.model, MAX_BATCH_SIZE, longest), NgramDrafter()
        self.running: list[Rollout] = []
        finished = []
        while self._admit(requests) or self.running:
            start, batch_size = time.time(), len(self.running)
            depth = self.tuner.choose(batch_size) if self.tuner else 0
            num_tokens = self._step(depth)
            end = time.time()
            records.append(StepRecord(depth, batch_size, num_tokens, end - start, end))
            if self.tuner:
                self.tuner.observe(records[-1])
            finished += self._release()
        return finished

    def _step(self, depth: int) -> int:
        """Advances every sequence: propose, read, draw, verify, commit. Returns the number of new tokens."""
        drafts = [self.drafter.propose(r.problem.problem_id, r.tokens, depth) for r in self.running]
        drawn = self._read([[r.tokens[-1], *draft] for r, draft in zip(self.running, drafts, strict=True)])
        num_tokens = 0
        for rollout, draft, own in zip(self.running, drafts, drawn, strict=True):
            new = verify(draft, own)[: self.max_tokens - len(rollout.token_ids)]
            if self.stop_id in new:
                new = new[: new.index(self.stop_id) + 1]
            rollout.tokens += new
            self.drafter.remember(rollout.problem.problem_id, rollout.tokens, len(new))
            num_tokens += len(new)
        return num_tokens

    def _read(self, chains: list[list[int]]) -> list[list[int]]:
        """Returns the target's own token after each token of the sequences' chains, all read in one forward.

        A chain is the last committed token, which has not been read yet, and the draft that follows it.
        """
        tokens_BN, offsets_N = padded(chains)
        positions_BN = torch.tensor([[len(r.tokens) - 1] for r in self.running]) + offsets_N
        logits_BNV = self.model(tokens_BN, positions_BN, self.cache)
        keys_B4 = torch.tensor([r.key for r in self.running])
        noise_BNV = gumbel_noise(keys_B4, positions_BN + 1, self.model.vocab_size)  # of the next position
        return draw(logits_BNV, noise_BNV, TEMPERATURE).tolist()

    def _admit(self, requests: Iterator[Rollout]) -> bool:
        """Fills the free rows, and reads the new prompts but for their last tokens. Says whether any came."""
        first = len(self.running)
        while len(self.running) < MAX_BATCH_SIZE and (new := next(requests, None)):
            self.running.append(new)
            self.drafter.remember(new.problem.problem_id, new.tokens, new.num_prompt)
        if newcomers := self.running[first:]:
            tokens_BN, positions_N = padded([rollout.tokens[:-1] for rollout in newcomers])
            self.model(tokens_BN, positions_N.expand_as(tokens_BN), self.cache.rows_from(first))
        return bool(newcomers)

    def _release(self) -> Iterator[Rollout]:
        """Yields the responses that are over. The last row moves into the gap."""
        for row in reversed(range(len(self.running))):
            rollout = self.running[row]
            if rollout.tokens[-1] == self.stop_id or len(rollout.token_ids) == self.max_tokens:
                yield rollout
                self.running[row] = self.running[-1]
                self.running.pop()
                self.cache.move(len(self.running), row)


def padded(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns rows of tokens as tokens_BN, filled up with 0 behind their ends, and the offsets 0 … N - 1."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.arange(width)


# ── 7. The puzzle ─────────────────────────────────────────────────────────────────────────────────────────
#
# Countdown: reach a target from a few numbers, using each exactly once. A program verifies the answer, so the
# reward needs no model. The policy writes a search, then `!` and its answer:
#
#     prompt    [2,9,16:5]                        response    16-9=7[2,7:5]7+2=9x7-2=5!16-9=7,7-2=5


def combine(a: int, operator: str, b: int) -> int | None:
    """Returns the result of one step; None where it is not a positive integer."""
    if operator == "/":
        return a // b if a % b == 0 else None
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return result if result > 0 else None


def make_puzzle(rng: random.Random) -> tuple[list[int], int]:
    """Returns three numbers, and a target of at most 60 that can be made of them."""
    while True:
        numbers = sorted(rng.randint(1, 15) for _ in range(3))
        a, b, c = rng.sample(numbers, 3)
        between = combine(a, rng.choice("+-*/"), b)
        target = between and combine(between, rng.choice("+-*/"), c)
        if target and target <= 60:
            return numbers, target


def score(numbers: list[int], target: int, response: str) -> float:
    """Returns 1.0 where the text after the last `!` solves the puzzle, else 0.0. The search is not judged."""
    left = [*numbers]
    for step in response.rpartition("!")[2].split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})([-+*/])([1-9]\d{0,5})=([1-9]\d{0,5})", step, re.ASCII)
        if match is None or "!" not in response:
            return 0.0
        a, b, result = int(match[1]), int(match[3]), int(match[4])
        for operand in (a, b):
            if operand not in left:
                return 0.0
            left.remove(operand)
        if combine(a, match[2], b) != result:
            return 0.0
        left.append(result)
    return float(left == [target])


# ── 8. The policy update ──────────────────────────────────────────────────────────────────────────────────
#
# GRPO needs no value model: a response is judged by the others to the same problem. The update is a function
# of tokens, rewards and weights: it computes log-probabilities anew, in an order and in micro-batches that
# follow from tokens and rewards alone. So equal tokens give equal weights, however they were generated.


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Returns (r - mean) / std within each problem (GRPO, section 4.1.2); 0 where all rewards are equal."""
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-6)


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float = 0.8, high: float = 1.28) -> Tensor:
    """Returns -min(ρ A, clip(ρ) A) for every token: beyond its range, a ratio has nothing more to gain (GRPO,
    equation 3; the bounds are DAPO's, 2503.14476). ratio: ρ, the probability over the one at sampling."""
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def response_logprobs(model: Decoder, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Returns logprobs_BN of all tokens but each row's first, and is_response_BN: which count."""
    tokens_BN, positions_N = padded([rollout.tokens for rollout in rollouts])
    logits_BNV = model(tokens_BN[:, :-1], positions_N[:-1].expand(len(rollouts), -1))
    logprobs_BNV = (logits_BNV / TEMPERATURE).log_softmax(-1)
    starts_B1 = torch.tensor([[rollout.num_prompt] for rollout in rollouts])
    ends_B1 = torch.tensor([[len(rollout.tokens)] for rollout in rollouts])
    is_response_BN = (positions_N[1:] >= starts_B1) & (positions_N[1:] < ends_B1)
    return logprobs_BNV.gather(-1, tokens_BN[:, 1:, None])[..., 0], is_response_BN


def micro_batches(indices: list[int], rollouts: Sequence[Rollout], max_tokens: int = 4096) -> list[list[int]]:
    """Returns which responses go through the model together: of similar length, so that little is padding."""
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda i: len(rollouts[i].tokens)):
        if not batches or (len(batches[-1]) + 1) * len(rollouts[index].tokens) > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def policy_gradient(model: Decoder, rollouts: Sequence[Rollout], advantages_R: Tensor, share: slice) -> None:
    """Adds the gradient of a share of the micro-batches to that of the weights. The loss is the mean over the
    tokens of all responses. One with advantage 0 has no gradient, so it is not computed."""
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    for batch in micro_batches(advantages_R.nonzero()[:, 0].tolist(), rollouts)[share]:
        logprobs_BN, is_response_BN = response_logprobs(model, [rollouts[i] for i in batch])
        # Each response is used once, so the policy that is trained is still the one that sampled. The ratio
        # is 1 and its gradient that of the log-probability; the clip would act in further passes.
        ratio_BN = (logprobs_BN - logprobs_BN.detach()).exp()
        loss_BN = clipped_loss(ratio_BN, advantages_R[batch, None].to(model.dtype))
        ((loss_BN * is_response_BN).sum() / num_tokens).backward()


# ── 9. Ranks, and the loop ────────────────────────────────────────────────────────────────────────────────


def ask(problems: Sequence[Problem], seed: int, step: int, vocabulary: dict[str, int]) -> list[Rollout]:
    """Returns the requests of a step, G for each problem. The model reads a token per character."""
    requests = []
    for problem in problems:
        prompt = f"[{','.join(map(str, problem.numbers))}:{problem.target}]"
        prompt_ids = [vocabulary["<bos>"], *(vocabulary[character] for character in prompt)]
        for index in range(SAMPLES_PER_PROBLEM):
            key = noise_key(seed, "rollout", step, problem.problem_id, index)
            requests.append(Rollout(problem, index, key, len(prompt_ids), [*prompt_ids]))
    return requests


def shared_queue(store: dist.Store, step: int, requests: Sequence[Rollout]) -> Iterator[Rollout]:
    """Yields requests that no other rank gets. The queue is a counter: a rank adds 1 and owns that request.
    So no rank is idle while a request waits, whoever has the long responses. What remains is the tail."""
    while (index := store.add(f"next of step {step}", 1) - 1) < len(requests):
        yield requests[index]


def gather(mine: list) -> list[list]:
    """Returns what every rank gave, in the order of ranks."""
    of_ranks: list = [None] * NUM_RANKS
    dist.all_gather_object(of_ranks, mine)
    return of_ranks


def reward(rollout: Rollout, vocabulary: dict[str, int]) -> float:
    characters = {token: text for text, token in vocabulary.items() if len(text) == 1}  # <eos> is none
    text = "".join(characters.get(token, "") for token in rollout.token_ids)
    return score(rollout.problem.numbers, rollout.problem.target, text)


def take_step(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Adds up the ranks' gradients, clips the sum and moves the weights, equally on every rank."""
    for weight in model.weights.values():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(weight.grad)
    torch.nn.utils.clip_grad_norm_(model.weights.values(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, port: int, args: argparse.Namespace) -> None:
    """Trains as one of the ranks. All of them begin with the same weights and take the same steps."""
    torch.set_num_threads(1)  # a core for each rank
    model = load_model(BASE, getattr(torch, args.dtype))
    optimizer = torch.optim.Adam(model.weights.values(), lr=1e-4, betas=(0.9, 0.95))
    # The group comes after Adam: modules that Adam imports would hold on to it, and gloo might abort at exit.
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=NUM_RANKS)
    vocabulary = json.loads((BASE / "tokenizer.json").read_text())["model"]["vocab"]
    tuner = Tuner(random.Random(rank)) if args.speculation == "adaptive" else None
    engine = Engine(model, vocabulary["<eos>"], args.max_tokens, tuner)
    rng, digest = random.Random(args.seed), hashlib.sha256()
    for step in range(args.steps):
        problems = [Problem(f"{step}-{i}", *make_puzzle(rng)) for i in range(PROBLEMS_PER_STEP)]
        requests = ask(problems, args.seed, step, vocabulary)
        dist.barrier()
        start, records = time.time(), []
        finished = gather(engine.generate(shared_queue(store, step, requests), records))
        rollouts = [rollout for of_rank in finished for rollout in of_rank]
        rollouts.sort(key=lambda r: (r.problem.problem_id, r.sample_index))  # whoever generated them
        update_start = time.time()
        rewards_PG = torch.tensor([reward(r, vocabulary) for r in rollouts]).view(-1, SAMPLES_PER_PROBLEM)
        advantages_R = group_advantages(rewards_PG).flatten()
        policy_gradient(model, rollouts, advantages_R, share=slice(rank, None, NUM_RANKS))
        take_step(model, optimizer)
        seconds = time.time() - update_start
        digest.update(repr([rollout.token_ids for rollout in rollouts]).encode())
        of_ranks = gather(records)
        if rank == 0:
            print(f"step {step}: reward {rewards_PG.mean():.3f}, {describe(of_ranks, start)}")
            print(f"    update {seconds:.1f} s, digest of all tokens {digest.hexdigest()[:16]}\n", flush=True)
    dist.destroy_process_group()


def describe(of_ranks: Sequence[Sequence[StepRecord]], start: float) -> str:
    """Returns a rollout in numbers and each rank's batch size over time. A verification is one sequence's, in
    a step that was not off. A rank is idle from its last token to the last token of all."""
    ends = [records[-1].end if records else start for records in of_ranks]
    steps = [record for records in of_ranks for record in records]
    num_tokens, seconds = sum(step.num_tokens for step in steps), max(ends) - start
    num_verifications = sum(step.batch_size for step in steps if step.depth)
    num_verified = sum(step.num_tokens for step in steps if step.depth)
    accepted = f"{num_verified / num_verifications:.2f}" if num_verifications else "no"
    idle_share = sum(max(ends) - end for end in ends) / (len(ends) * seconds)
    bars = [f"\n    rank {i} ▕{timeline(records, start, max(ends))}▏" for i, records in enumerate(of_ranks)]
    speed = f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens/s"
    return f"{speed}, {accepted} tokens per verification, idle {idle_share:.1%}{''.join(bars)}"


def timeline(records: Sequence[StepRecord], start: float, end: float, width: int = 80) -> str:
    """Draws a rank's batch size over the time of the rollout; it is blank where nothing is left to do."""
    bars = ""
    for column in range(width):
        moment = start + (column + 0.5) / width * (end - start)
        batch_size = next((record.batch_size for record in records if record.end >= moment), 0)
        bars += " ▁▂▃▄▅▆▇█"[-(-batch_size * 8 // MAX_BATCH_SIZE)]
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model on Countdown puzzles.")
    parser.add_argument("--speculation", choices=["adaptive", "off"], default="adaptive")
    parser.add_argument("--steps", type=int, default=4, help="policy updates; default: 4")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest response; default: 1024")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same tokens; default: 0")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at any free port
    torch.multiprocessing.spawn(train, (store.port, args), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
