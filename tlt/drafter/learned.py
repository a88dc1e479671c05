"""The learned drafter at work: its cache, its memory of the target's features, chains and trees of candidates.

    committed tokens   0 1 2 ... n-2 | n-1 (root)
    pairs (t+1, t)     0 1 2 ... n-2                the last pair's output ranks the candidates for position n
                       └ caught up ┘  then one pair per drafted token, the predicted feature standing in for the true one

Every proposal first catches up with what was committed since the last one: a few pairs while speculating, up to the
window of features remembered when speculation is switched on late. The target is never run for this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.drafter.calibration import DEFAULT_CONFIDENCE_THRESHOLD, Calibration, TauSearch
from tlt.drafter.history import FeatureHistory
from tlt.drafter.model import TOKEN_AHEAD, PackedDrafter, training_capture
from tlt.models.attention import Cached, StoringPrefill, padding_mask
from tlt.models.kv_cache import Cache
from tlt.models.packed import PackedTransformer
from tlt.speculative.protocol import DraftContext, Proposal
from tlt.speculative.tree import chain, chain_mask
from tlt.types import DraftTree, Request, Rollout, Strategy, Verdict

_CATCH_UP_TOKENS = 256
"""Pairs per sequence in one catch-up forward; bounds the mask after a late switch on."""

_PREFILL_TOKENS = 8192
"""Pairs per forward when sequences enter the drafter's cache."""

_MAX_LOG_CONFIDENCE = -1e-4
"""Of one candidate, so that a child never outranks its parent, not even at confidence 1."""

DEFAULT_WINDOW = 4096
"""Positions whose features are remembered per sequence."""


@dataclass(frozen=True)
class LearnedProposal(Proposal):
    """A learned draft, and what is to be learned from the target's answer to it.

    guesses_KB: see `TauSearch.guess`; None: not asked this time.
    drafted:    the tree with all that was looked at, also where the proposed one stops before it, and the calibration's cells
                of its nodes; None without a calibration.
    """

    guesses_KB: Tensor | None = None
    drafted: Drafted | None = None


@dataclass(frozen=True)
class Drafted:
    """A tree with the calibration cell of each node, the root left out."""

    tree: DraftTree
    cells_BN: Tensor


@dataclass(frozen=True)
class _Level:
    """Candidates for the nodes of one level, over the draft vocabulary: the logits at the sequences' temperatures, and the
    law's noise of the position."""

    scaled_BTV: Tensor
    noise_B1V: Tensor


@dataclass(frozen=True)
class _Front:
    """Where a proposal starts from. Row b has `num_pairs[b]` pairs in columns 0 .. of the drafter's cache, the first of them
    at rotary position `offsets[b]`; `hidden_BE` is the output of the last. `unwanted` rows draft otherwise."""

    params_scale: Callable[[Tensor], Tensor]
    strategy: Strategy
    noise_BDV: Tensor
    roots_B1: Tensor
    num_pairs: list[int]
    offsets_B1: Tensor | None
    hidden_BE: Tensor
    unwanted: Sequence[int]


class LearnedDrafter:
    """Drafts with a one-layer model that shares the target's embedding and head.

    ranking: "coupled" ranks candidates by log q / tau + the target's own noise, q being the draft distribution at the
        sequence's own temperature (DESIGN §2); "top-k" by log q alone (EAGLE-2, arXiv 2406.16858).
    confidence_threshold: a sequence's chain stops before the token with which the chance that all of it is accepted falls below
        this (SpecDec++, arXiv 2405.19715, stops so by a trained head); its first token is always drafted. Reads one number
        back per level. 0: never; trees never stop.
    window: positions whose features are remembered per sequence; what lies further back when speculation is switched on
        is not seen by the drafter.
    keep_targets: also remember what training matches (models/drafter.py, training_capture).
    """

    kinds = ("learned",)

    def __init__(
        self,
        model: PackedDrafter,
        target: PackedTransformer,
        max_slots: int,
        *,
        ranking: str = "coupled",
        tau: float | None = None,
        confidence_threshold: float = DEFAULT_CONFIDENCE_THRESHOLD,
        window: int = DEFAULT_WINDOW,
        calibrate: bool = True,
        keep_targets: bool = False,
    ) -> None:
        assert ranking in ("coupled", "top-k"), ranking
        self.model, self.target = model, target
        self.is_coupled = ranking == "coupled"
        self.tau_search = TauSearch(tau)
        self.confidence_threshold = confidence_threshold
        self.calibration = Calibration(model.device) if calibrate else None
        self.capture = training_capture(model.config, target.config.num_layers) if keep_targets else model.config.capture
        self.cache = Cache(model.config.layer, 1, model.dtype, model.device, max_slots)
        size = len(self.capture) * target.config.hidden_size
        self.history = FeatureHistory(size, window, max_slots, model.dtype, model.device)
        self.firsts = [0] * max_slots  # position of the pair in column 0
        self.counts = [0] * max_slots  # pairs in the cache

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def tau(self) -> float:
        return self.tau_search.tau

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        """New weights, also for sequences that run: what the old ones left in the cache is computed again from the remembered
        features. What was learned about the old ones' confidence counts for less from here on."""
        self.model.load(tensors, version)
        self.counts = [0] * len(self.counts)
        if self.calibration is not None:
            self.calibration.age()

    def admit(self, slot: int, request: Request) -> None:
        self.firsts[slot] = self.counts[slot] = 0

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        self.history.write(slots, starts, features_BTF)

    def move(self, source: int, target: int) -> None:
        self.firsts[target], self.counts[target] = self.firsts[source], self.counts[source]
        self.history.move(source, target)
        if self.counts[source]:
            self.cache.move(source, target, self.counts[source])

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        """Returns [T, F], or None where the window no longer holds the first position."""
        is_whole = self.history.first_known(num_positions) == 0
        return self.history.read([slot], [0], num_positions)[0] if is_whole else None

    def finish(self, slot: int, rollout: Rollout) -> None:
        """Nothing to do: the slot's next sequence starts anew."""

    def withdraw(self, slot: int) -> None:
        """Nothing to do: the slot's next sequence starts anew."""

    def release(self) -> None:
        self.cache.release()
        self.history.release()

    def observe(self, proposal: LearnedProposal, verdicts: Sequence[Verdict]) -> None:
        if proposal.guesses_KB is not None:
            self.tau_search.observe(proposal.guesses_KB, [verdict.tokens[0] for verdict in verdicts])
        if self.calibration is not None and proposal.drafted is not None:
            self.calibration.observe(proposal.drafted.tree, proposal.drafted.cells_BN, verdicts)

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def propose(
        self,
        context: DraftContext,
        strategy: Strategy,
        noise_BDV: Tensor,
        unwanted: Sequence[int] = (),
    ) -> LearnedProposal:
        """unwanted: rows that will draft otherwise; what they hold here is of no use, and nothing is learned from it."""
        num_rows = len(context.tokens)
        starts = self._enter(context)
        num_pairs = [len(tokens) - TOKEN_AHEAD - first for tokens, first in zip(context.tokens, self.firsts, strict=False)]
        room = strategy.depth if strategy.width == 1 else strategy.depth * strategy.width
        self.cache.reserve(num_rows, max(num_pairs) + room + _CATCH_UP_TOKENS)
        firsts = self.firsts[:num_rows]
        offsets_B1 = torch.tensor(firsts, device=self.model.device)[:, None] if any(firsts) else None
        hidden_BE = self._catch_up(context, starts, num_pairs, offsets_B1)
        self.counts[:num_rows] = num_pairs
        roots_B1 = torch.tensor([[tokens[-1]] for tokens in context.tokens], device=self.model.device)
        front = _Front(context.params.scale, strategy, noise_BDV, roots_B1, num_pairs, offsets_B1, hidden_BE, unwanted)
        return self._chain(front) if strategy.width == 1 else self._branch(front)

    def _enter(self, context: DraftContext) -> list[int]:
        """Brings sequences that the cache knows nothing of (or too little, after a long stretch without speculation) in by
        packed forwards without padding, all pairs but the last; samples of one prompt share the work. Returns the number
        of pairs in the cache by row."""
        entering: list[int] = []
        copies: list[tuple[int, int]] = []
        leader_of: dict[tuple[int, ...], int] = {}
        for slot, (tokens, request) in enumerate(zip(context.tokens, context.requests, strict=True)):
            known = len(tokens) - 1
            if self.firsts[slot] + self.counts[slot] < self.history.first_known(known):
                self.firsts[slot], self.counts[slot] = self.history.first_known(known), 0
            if self.counts[slot] or known - self.firsts[slot] < 2:
                continue
            is_prompt = len(tokens) == len(request.prompt_ids)
            if is_prompt and (leader := leader_of.setdefault(request.prompt_ids, slot)) != slot:
                copies.append((leader, slot))
            else:
                entering.append(slot)
        while entering:
            group: list[int] = []
            total = 0
            while entering and (not group or total + len(context.tokens[entering[0]]) <= _PREFILL_TOKENS):
                group.append(entering.pop(0))
                total += len(context.tokens[group[-1]])
            self._prefill(context, group)
        for leader, slot in copies:
            self.cache.move(leader, slot, self.counts[leader])
            self.firsts[slot], self.counts[slot] = self.firsts[leader], self.counts[leader]
        return self.counts[: len(context.tokens)]

    def _prefill(self, context: DraftContext, slots: list[int]) -> None:
        device = self.model.device
        firsts = [self.firsts[slot] for slot in slots]
        lengths = [len(context.tokens[slot]) - 1 - TOKEN_AHEAD - first for slot, first in zip(slots, firsts, strict=True)]
        self.cache.reserve(len(context.tokens), max(lengths))
        attend = StoringPrefill(self.model.config.layer, lengths, self.cache.layers, slots)
        pairs = list(zip(slots, firsts, lengths, strict=True))
        tokens = [t for s, f, n in pairs for t in context.tokens[s][f + TOKEN_AHEAD : f + TOKEN_AHEAD + n]]
        hidden_NE = self.model.fuse(torch.cat([self.history.read([s], [f], n)[0] for s, f, n in pairs]))
        positions_N = torch.cat([torch.arange(f, f + n, device=device) for _, f, n in pairs])
        self.model.forward(self.target.embed(torch.tensor(tokens, device=device)), hidden_NE, positions_N, attend)
        for slot, _, length in pairs:
            self.counts[slot] = length

    def _catch_up(self, context: DraftContext, starts: list[int], num_pairs: list[int], offsets_B1: Tensor | None) -> Tensor:
        """Runs every pair that is not in the drafter's cache yet; returns the output of each sequence's last one.
        Rows with fewer missing pairs repeat garbage beyond their end, in columns that drafting overwrites."""
        device = self.model.device
        missing = [count - start for count, start in zip(num_pairs, starts, strict=True)]
        slots, firsts = range(len(missing)), self.firsts[: len(missing)]
        outputs, done = [], 0
        while done < max(missing):
            width = min(max(missing) - done, _CATCH_UP_TOKENS)
            columns = [min(start + done, count) for start, count in zip(starts, num_pairs, strict=True)]
            begins = [first + column for first, column in zip(firsts, columns, strict=True)]
            rows = [tokens[b + TOKEN_AHEAD : b + TOKEN_AHEAD + width] for tokens, b in zip(context.tokens, begins, strict=True)]
            tokens_BT = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=device)
            hidden_BTE = self.model.fuse(self.history.read(slots, begins, width).flatten(0, 1)).view(len(rows), width, -1)
            first_B = torch.tensor(columns, device=device)
            columns_BT = first_B[:, None] + torch.arange(width, device=device)
            length = max(columns) + width
            is_plain = width == 1 and len(rows) == 1
            mask = None if is_plain else chain_mask(width, first_B, length, self.model.dtype)
            outputs.append(self._forward(tokens_BT, hidden_BTE, columns_BT, columns_BT, offsets_B1, length, mask))
            done += width
        output_BTE = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if len(missing) == 1:
            return output_BTE[:, missing[0] - 1]
        last_B = torch.tensor(missing, device=device) - 1
        return output_BTE[torch.arange(len(missing), device=device), last_B]

    def _forward(
        self,
        tokens_BT: Tensor,
        hidden_BTE: Tensor,
        depths_BT: Tensor,
        columns_BT: Tensor,
        offsets_B1: Tensor | None,
        length: int,
        mask: Tensor | None,
    ) -> Tensor:
        """`depths_BT` counts pairs from the first in the cache; with the offset it is the rotary position."""
        attend = Cached(self.model.config.layer, self.cache.layers, columns_BT, length, mask)
        embeddings = self.target.embed(tokens_BT.flatten())
        positions_BT = depths_BT if offsets_B1 is None else depths_BT + offsets_B1
        positions = positions_BT.flatten().clamp_max(self.model.config.layer.max_positions - 1)
        output_NE = self.model.forward(embeddings, hidden_BTE.flatten(0, 1), positions, attend)
        return output_NE.view(*tokens_BT.shape, -1)

    def _level(self, front: _Front, hidden_BTE: Tensor, depth: int) -> _Level:
        scaled_BTV = front.params_scale(self.model.logits(hidden_BTE, self.target))
        noise_B1V = front.noise_BDV[:, depth, None]
        if self.model.token_ids is not None:
            noise_B1V = noise_B1V[..., self.model.token_ids]
        return _Level(scaled_BTV, noise_B1V)

    def _guess(self, roots: _Level) -> Tensor | None:
        if not self.is_coupled:
            return None
        return self.tau_search.guess(roots.scaled_BTV[:, 0], roots.noise_B1V[:, 0], self.model.token_ids)

    def _scores(self, level: _Level) -> Tensor:
        """Returns log q / tau + noise, up to a constant per node: the order in which the target is likely to agree. Plain
        ranking: log q."""
        return torch.add(level.noise_B1V, level.scaled_BTV, alpha=1 / self.tau) if self.is_coupled else level.scaled_BTV

    def _to_count(self, tree: DraftTree, cells_BN: Tensor, unwanted: Sequence[int]) -> Drafted:
        """Rows that draft otherwise are not counted."""
        if unwanted:
            cells_BN[list(unwanted)] = Calibration.UNUSED
        return Drafted(tree, cells_BN)

    def _token_ids(self, drafted: Tensor) -> Tensor:
        """The target's ids of tokens of the draft vocabulary."""
        return drafted if self.model.token_ids is None else self.model.token_ids[drafted]

    def _chain(self, front: _Front) -> LearnedProposal:
        hidden_B1E, tokens, cells = front.hidden_BE[:, None], [front.roots_B1], []
        guesses_KB: Tensor | None = None
        ends_B = torch.tensor(front.num_pairs, device=self.model.device)
        is_even = min(front.num_pairs) == max(front.num_pairs)
        survival_B = torch.zeros(len(front.num_pairs), device=self.model.device)  # logarithm
        survival_B[list(front.unwanted)] = -torch.inf
        likely = []
        for depth in range(front.strategy.depth):
            if depth:
                columns_B1 = ends_B[:, None] + depth - 1
                length = max(front.num_pairs) + depth
                mask = None if is_even else padding_mask(ends_B + depth, length, self.model.dtype)
                hidden_B1E = self._forward(tokens[-1], hidden_B1E, columns_B1, columns_B1, front.offsets_B1, length, mask)
            level = self._level(front, hidden_B1E, depth)
            guesses_KB = guesses_KB if depth else self._guess(level)
            scores_B1V = self._scores(level)
            best_B1, token_B1 = scores_B1V.max(dim=-1)
            tokens.append(self._token_ids(token_B1))
            if self.confidence_threshold:
                logprob_B1 = (best_B1 - scores_B1V.logsumexp(dim=-1)).float()
                if self.calibration is not None:
                    cells_B1, logprob_B1 = self.calibration(depth, logprob_B1)
                    cells.append(cells_B1)
                survival_B = survival_B + logprob_B1[:, 0]
                likely.append(survival_B >= math.log(self.confidence_threshold))
                if not likely[-1].any():
                    break
        whole = chain(torch.cat(tokens, dim=1))
        drafted = self._to_count(whole, torch.cat(cells, dim=1), front.unwanted) if cells else None
        if not likely:
            return LearnedProposal(whole, guesses_KB, drafted)
        num_likely = torch.stack(likely).sum(0).tolist()
        tree = chain(whole.tokens_BN, [1 + max(num, 1) for num in num_likely])  # one token at least
        return LearnedProposal(tree, guesses_KB, drafted)

    def _branch(self, front: _Front) -> LearnedProposal:
        """Grows a pool level by level (EAGLE-2, arXiv 2406.16858): the `width` most confident nodes of a level are
        expanded by `width` candidates each; the `budget` most confident nodes of the pool become the tree. A node's
        confidence is the product, from the root on, of how likely each candidate is to be accepted."""
        strategy, device, B = front.strategy, self.model.device, len(front.num_pairs)
        width = min(strategy.width, self.model.config.draft_vocab_size)
        ends_B = torch.tensor(front.num_pairs, device=device)
        rows_B1 = torch.arange(B, device=device)[:, None]
        confidence_BF = torch.zeros(B, 1, dtype=torch.float32, device=device)
        pool_index_BF = torch.zeros(B, 1, dtype=torch.int64, device=device)  # 0 is the root
        hidden_BFE = front.hidden_BE[:, None]
        seen_BFC = torch.zeros(B, 1, 0, dtype=torch.bool, device=device)  # draft columns each frontier node may see
        pool_tokens, pool_parents, pool_size = [front.roots_B1], [front.roots_B1 * 0 - 1], 1
        pool_confidence, pool_cells = [], []
        guesses_KB: Tensor | None = None
        for depth in range(strategy.depth):
            level = self._level(front, hidden_BFE, depth)
            guesses_KB = guesses_KB if depth else self._guess(level)
            scores_BFV = self._scores(level).float()
            logprob_BFW, token_BFW = scores_BFV.log_softmax(dim=-1).topk(width, dim=-1)
            if self.calibration is not None:
                cells_BFW, logprob_BFW = self.calibration(depth, logprob_BFW)
                pool_cells.append(cells_BFW.flatten(1))
            frontier = confidence_BF.shape[1]
            confidence_BC = (confidence_BF[:, :, None] + logprob_BFW.clamp_max(_MAX_LOG_CONFIDENCE)).flatten(1)
            token_BC = self._token_ids(token_BFW.flatten(1))
            pool_tokens.append(token_BC)
            pool_parents.append(pool_index_BF.repeat_interleave(width, dim=1))
            pool_confidence.append(confidence_BC)
            if depth + 1 < strategy.depth:
                num_next = min(strategy.width, confidence_BC.shape[1])
                confidence_BF, chosen_BF = confidence_BC.topk(num_next, dim=-1)
                pool_index_BF = chosen_BF + pool_size
                parent_BF = chosen_BF // width
                tokens_BF = token_BC.gather(1, chosen_BF)
                start = seen_BFC.shape[2]
                own = torch.eye(num_next, dtype=torch.bool, device=device).expand(B, -1, -1)
                seen_BFC = torch.cat([seen_BFC[rows_B1, parent_BF], own], dim=2)
                columns_BF = ends_B[:, None] + start + torch.arange(num_next, device=device)
                depths_BF = (ends_B + depth)[:, None].expand(-1, num_next)
                length = max(front.num_pairs) + start + num_next
                mask = _branch_mask(seen_BFC, ends_B, length, self.model.dtype)
                inputs = hidden_BFE[rows_B1, parent_BF]
                hidden_BFE = self._forward(tokens_BF, inputs, depths_BF, columns_BF, front.offsets_B1, length, mask)
            pool_size += frontier * width
        chosen_BN = _best_nodes(torch.cat(pool_confidence, 1), strategy.budget)
        tree = _select(torch.cat(pool_tokens, 1), torch.cat(pool_parents, 1), chosen_BN)
        if not pool_cells:
            return LearnedProposal(tree, guesses_KB)
        cells_BN = torch.cat(pool_cells, 1).gather(1, chosen_BN[:, 1:] - 1)
        return LearnedProposal(tree, guesses_KB, self._to_count(tree, cells_BN, front.unwanted))


def _branch_mask(seen_BFC: Tensor, prefix_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, F, length]: every node sees the prefix and those draft columns that lead to it."""
    num_columns = seen_BFC.shape[2]
    offset_BL = torch.arange(length, device=prefix_B.device) - prefix_B[:, None]
    is_draft_BL = (offset_BL >= 0) & (offset_BL < num_columns)
    index = offset_BL.clamp(0, num_columns - 1)[:, None].expand(-1, seen_BFC.shape[1], -1)
    visible = (offset_BL < 0)[:, None] | (is_draft_BL[:, None] & seen_BFC.gather(2, index))
    return torch.zeros(visible.shape, dtype=dtype, device=prefix_B.device).masked_fill_(~visible, float("-inf"))


def _best_nodes(confidence_BC: Tensor, budget: int) -> Tensor:
    """Indices into the pool of the root (0) and the `budget` most confident candidates, in the pool's order. The pool lists
    parents before children; a child is never more confident than its parent, so the choice is closed under taking parents."""
    chosen_BN = confidence_BC.topk(min(budget, confidence_BC.shape[1]), dim=-1).indices.sort(dim=-1).values + 1
    return torch.cat([torch.zeros_like(chosen_BN[:, :1]), chosen_BN], dim=1)


def _select(tokens_BP: Tensor, parents_BP: Tensor, chosen_BN: Tensor) -> DraftTree:
    """The chosen nodes of the pool as a tree."""
    new_index_BP = torch.full_like(tokens_BP, -1)
    new_index_BP.scatter_(1, chosen_BN, torch.arange(chosen_BN.shape[1], device=tokens_BP.device).expand_as(chosen_BN))
    parents_BN = parents_BP.gather(1, chosen_BN)
    parents_BN[:, 1:] = new_index_BP.gather(1, parents_BN[:, 1:])
    return DraftTree(tokens_BP.gather(1, chosen_BN), parents_BN)
