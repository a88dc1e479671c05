"""The learned drafter at work: its cache, its memory of the target's features, chains and trees of candidates.

    committed tokens   0 1 2 ... n-2 | n-1 (root)
    pairs (t+1, t)     0 1 2 ... n-2                the last pair's output ranks the candidates for position n
                       └ caught up ┘  then one pair per drafted token, the predicted feature standing in for the true one

Every proposal first catches up with what was committed since the last one: a few pairs while speculating, the whole
response when speculation is switched on after a stretch without it. The target is never run for this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tlt.models.attention import Cached, padding_mask
from tlt.models.drafter import TOKEN_AHEAD, PackedDrafter
from tlt.models.transformer import PackedTransformer
from tlt.rollout.cache import Cache
from tlt.speculative.protocol import DraftContext
from tlt.speculative.tree import chain, chain_mask
from tlt.types import DraftTree, Request, Rollout, Strategy

_CATCH_UP_TOKENS = 256
"""Pairs per sequence in one catch-up forward; bounds the mask after a late switch on."""

_DEPTH_PENALTY = 1e-4
"""Taken from a node's log-confidence per level, so that a child never outranks its parent, not even at confidence 1."""


class LearnedDrafter:
    """Drafts with a one-layer model that shares the target's embedding and head.

    coupling_temperature: tau in top-k of (log q / tau + noise), q being the draft distribution at the sequence's own
    temperature. on_finish receives each response with the features remembered of it, [len(prompt) + len(response) - 1, E].
    """

    def __init__(
        self,
        model: PackedDrafter,
        target: PackedTransformer,
        max_slots: int,
        coupling_temperature: float = 0.7,
        on_finish: Callable[[Rollout, Tensor], None] | None = None,
    ) -> None:
        self.model, self.target = model, target
        self.tau = coupling_temperature
        self.on_finish = on_finish
        self.max_slots = max_slots
        self.cache = Cache(model.config, 1, model.dtype, model.device, max_slots)
        self.features_SPE = torch.zeros(0, 128, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.num_pairs = [0] * max_slots

    @property
    def version(self) -> int:
        return self.model.version

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, slot: int, request: Request) -> None:
        self.num_pairs[slot] = 0
        self._reserve(slot + 1, len(request.prompt_ids))

    def remember(self, slots_B: Tensor, positions_BT: Tensor, features_BTE: Tensor, end: int) -> None:
        self._reserve(0, end)
        self.features_SPE[slots_B[:, None], positions_BT] = features_BTE

    def move(self, source: int, target: int) -> None:
        self.num_pairs[target] = self.num_pairs[source]
        self.features_SPE[target] = self.features_SPE[source]
        if self.num_pairs[source]:
            self.cache.move(source, target, self.num_pairs[source])

    def finish(self, slot: int, rollout: Rollout) -> None:
        if self.on_finish is not None:
            known = len(rollout.prompt_ids) + len(rollout.token_ids) - 1
            self.on_finish(rollout, self.features_SPE[slot, :known].clone())

    def release(self) -> None:
        """Gives all memory back between rollouts."""
        self.cache.release()
        self.features_SPE = self.features_SPE[:0].clone()

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        slots, capacity, size = self.features_SPE.shape
        if num_slots > slots or num_positions > capacity:
            slots_wanted = slots if num_slots <= slots else min(max(num_slots, 2 * slots), self.max_slots)
            grown = self.features_SPE.new_zeros(
                slots_wanted, capacity if num_positions <= capacity else 2 * num_positions, size
            )
            grown[:slots, :capacity] = self.features_SPE
            self.features_SPE = grown

    # ── drafting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def propose(self, context: DraftContext, strategy: Strategy, noise_BDV: Tensor) -> DraftTree:
        lengths = [len(tokens) for tokens in context.tokens]
        room = strategy.depth if strategy.width == 1 else strategy.depth * strategy.width
        self.cache.reserve(len(lengths), max(lengths) + room + _CATCH_UP_TOKENS)
        hidden_BE = self._catch_up(context, lengths)
        roots_B1 = torch.tensor([[tokens[-1]] for tokens in context.tokens], device=self.model.device)
        draft = self._chain if strategy.width == 1 else self._tree
        return draft(context, lengths, strategy, roots_B1, hidden_BE, noise_BDV)

    def _catch_up(self, context: DraftContext, lengths: list[int]) -> Tensor:
        """Runs every pair that is not in the drafter's cache yet; returns the output of each sequence's last one.
        Rows with fewer missing pairs repeat garbage beyond their end, in columns that drafting overwrites."""
        device = self.model.device
        starts = self.num_pairs[: len(lengths)]
        missing = [length - TOKEN_AHEAD - start for length, start in zip(lengths, starts, strict=True)]
        outputs, done = [], 0
        while done < max(missing):
            width = min(max(missing) - done, _CATCH_UP_TOKENS)
            first = [min(start + done, length - TOKEN_AHEAD) for start, length in zip(starts, lengths, strict=True)]
            rows = [tokens[f + TOKEN_AHEAD : f + TOKEN_AHEAD + width] for tokens, f in zip(context.tokens, first, strict=True)]
            tokens_BT = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=device)
            first_B = torch.tensor(first, device=device)
            columns_BT = first_B[:, None] + torch.arange(width, device=device)
            self._reserve(0, max(first) + width)
            features_BTE = self.features_SPE[torch.arange(len(rows), device=device)[:, None], columns_BT]
            length = max(first) + width
            is_plain = width == 1 and len(rows) == 1
            mask = None if is_plain else chain_mask(width, first_B, length, self.model.dtype)
            outputs.append(self._forward(tokens_BT, features_BTE, columns_BT, columns_BT, length, mask))
            done += width
        self.num_pairs[: len(lengths)] = [length - TOKEN_AHEAD for length in lengths]
        output_BTE = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if len(missing) == 1:
            return output_BTE[:, missing[0] - 1]
        last_B = torch.tensor(missing, device=device) - 1
        return output_BTE[torch.arange(len(missing), device=device), last_B]

    def _forward(
        self,
        tokens_BT: Tensor,
        features_BTE: Tensor,
        positions_BT: Tensor,
        columns_BT: Tensor,
        length: int,
        mask: Tensor | None,
    ) -> Tensor:
        attend = Cached(self.model.config, self.cache.layers, columns_BT, length, mask)
        embeddings = self.target.embed(tokens_BT.flatten())
        positions = positions_BT.flatten().clamp_max(self.model.config.max_positions - 1)
        output_NE = self.model.forward(embeddings, features_BTE.flatten(0, 1), positions, attend)
        return output_NE.view(*tokens_BT.shape, -1)

    def _scores(self, context: DraftContext, hidden_BTE: Tensor, noise_B1V: Tensor) -> Tensor:
        """log q / tau + noise, up to a constant per node: the order in which the target is likely to agree."""
        return torch.add(noise_B1V, context.params.scale(self.target.logits(hidden_BTE)), alpha=1 / self.tau)

    def _chain(
        self,
        context: DraftContext,
        lengths: list[int],
        strategy: Strategy,
        roots_B1: Tensor,
        hidden_BE: Tensor,
        noise_BDV: Tensor,
    ) -> DraftTree:
        device = self.model.device
        hidden_B1E, tokens = hidden_BE[:, None], [roots_B1]
        ends_B = torch.tensor(lengths, device=device)
        for depth in range(strategy.depth):
            tokens.append(self._scores(context, hidden_B1E, noise_BDV[:, depth, None]).argmax(dim=-1))
            if depth + 1 < strategy.depth:
                columns_B1 = ends_B[:, None] + (depth - 1)
                length = max(lengths) + depth
                mask = None if min(lengths) == max(lengths) else padding_mask(ends_B + depth, length, self.model.dtype)
                hidden_B1E = self._forward(tokens[-1], hidden_B1E, columns_B1, columns_B1, length, mask)
        return chain(torch.cat(tokens, dim=1))

    def _tree(
        self,
        context: DraftContext,
        lengths: list[int],
        strategy: Strategy,
        roots_B1: Tensor,
        hidden_BE: Tensor,
        noise_BDV: Tensor,
    ) -> DraftTree:
        """Grows a pool level by level (EAGLE-2, arXiv 2406.16858): the `width` most confident nodes of a level are
        expanded by `width` candidates each; the `budget` most confident nodes of the pool become the tree."""
        device, B, W = self.model.device, len(lengths), strategy.width
        width = min(W, self.target.config.vocab_size)
        prefix_B = torch.tensor(lengths, device=device) - TOKEN_AHEAD
        rows_B1 = torch.arange(B, device=device)[:, None]
        confidence_BF = torch.zeros(B, 1, dtype=torch.float32, device=device)
        pool_index_BF = torch.zeros(B, 1, dtype=torch.int64, device=device)  # 0 is the root
        hidden_BFE = hidden_BE[:, None]
        seen_BFC = torch.zeros(B, 1, 0, dtype=torch.bool, device=device)  # draft columns each frontier node may see
        pool_tokens, pool_parents, pool_confidence, pool_size = [roots_B1], [roots_B1 * 0 - 1], [], 1
        for depth in range(strategy.depth):
            scores_BFV = self._scores(context, hidden_BFE, noise_BDV[:, depth, None]).float()
            logprob_BFW, token_BFW = scores_BFV.log_softmax(dim=-1).topk(width, dim=-1)
            frontier = confidence_BF.shape[1]
            confidence_BC = (confidence_BF[:, :, None] + logprob_BFW - _DEPTH_PENALTY).flatten(1)
            token_BC = token_BFW.flatten(1)
            pool_tokens.append(token_BC)
            pool_parents.append(pool_index_BF.repeat_interleave(width, dim=1))
            pool_confidence.append(confidence_BC)
            if depth + 1 < strategy.depth:
                num_next = min(W, confidence_BC.shape[1])
                confidence_BF, chosen_BF = confidence_BC.topk(num_next, dim=-1)
                pool_index_BF = chosen_BF + pool_size
                parent_BF = chosen_BF // width
                tokens_BF = token_BC.gather(1, chosen_BF)
                start = seen_BFC.shape[2]
                own = torch.eye(num_next, dtype=torch.bool, device=device).expand(B, -1, -1)
                seen_BFC = torch.cat([seen_BFC[rows_B1, parent_BF], own], dim=2)
                columns_BF = prefix_B[:, None] + start + torch.arange(num_next, device=device)
                positions_BF = (prefix_B + depth)[:, None].expand(-1, num_next)
                length = max(lengths) - TOKEN_AHEAD + start + num_next
                mask = _branch_mask(seen_BFC, prefix_B, length, self.model.dtype)
                hidden_BFE = self._forward(tokens_BF, hidden_BFE[rows_B1, parent_BF], positions_BF, columns_BF, length, mask)
            pool_size += frontier * width
        return _best_nodes(
            torch.cat(pool_tokens, 1), torch.cat(pool_parents, 1), torch.cat(pool_confidence, 1), strategy.budget
        )


def _branch_mask(seen_BFC: Tensor, prefix_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, F, length]: every node sees the prefix and those draft columns that lead to it."""
    num_columns = seen_BFC.shape[2]
    offset_BL = torch.arange(length, device=prefix_B.device) - prefix_B[:, None]
    is_draft_BL = (offset_BL >= 0) & (offset_BL < num_columns)
    index = offset_BL.clamp(0, num_columns - 1)[:, None].expand(-1, seen_BFC.shape[1], -1)
    visible = (offset_BL < 0)[:, None] | (is_draft_BL[:, None] & seen_BFC.gather(2, index))
    return torch.zeros(visible.shape, dtype=dtype, device=prefix_B.device).masked_fill_(~visible, float("-inf"))


def _best_nodes(tokens_BP: Tensor, parents_BP: Tensor, confidence_BC: Tensor, budget: int) -> DraftTree:
    """The root and the `budget` most confident nodes. The pool lists parents before children, and so does the result;
    a child is never more confident than its parent, so the choice is closed under taking parents."""
    B, pool = tokens_BP.shape
    chosen_BN = confidence_BC.topk(min(budget, pool - 1), dim=-1).indices.sort(dim=-1).values + 1
    chosen_BN = torch.cat([torch.zeros_like(chosen_BN[:, :1]), chosen_BN], dim=1)
    new_index_BP = torch.full_like(tokens_BP, -1)
    new_index_BP.scatter_(1, chosen_BN, torch.arange(chosen_BN.shape[1], device=tokens_BP.device).expand(B, -1))
    parents_BN = parents_BP.gather(1, chosen_BN)
    parents_BN[:, 1:] = new_index_BP.gather(1, parents_BN[:, 1:])
    return DraftTree(tokens_BP.gather(1, chosen_BN), parents_BN)
