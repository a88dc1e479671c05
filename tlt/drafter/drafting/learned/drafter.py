"""The learned drafter: chains and trees of ranked candidates (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv
2406.16858).

    committed tokens, read ─▶ logits of a level ─▶ scores of the candidates ─▶ the best
    (draft_cache.py)              ▲                                              │
                                  └──────────── drafted tokens ◀─────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tlt.base.strategy import Strategy
from tlt.base.types import DraftTree, Request, Rollout, Verdict
from tlt.base.uploads import upload
from tlt.drafter.block import PackedBlock
from tlt.drafter.drafting.learned.block_cache import BlockCache
from tlt.drafter.drafting.learned.calibration import Calibration, TauSearch, sent_to_host
from tlt.drafter.drafting.learned.draft_cache import DraftCache, Levels, ParkedDraft
from tlt.drafter.drafting.learned.pair_cache import CaughtUp, PairCache, PairLevels
from tlt.drafter.drafting.learned.vocabulary_choice import VocabularyChoice
from tlt.drafter.eagle import PackedEagle
from tlt.drafter.model import PackedDrafter
from tlt.drafter.protocol import DraftContext, Drafter, DraftNoise, Proposal
from tlt.drafter.shape import training_capture
from tlt.drafter.vocabulary import DraftVocabulary
from tlt.models.graphs import padded_length
from tlt.models.target import Target
from tlt.speculation.law.draw import noise_of_level
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.tree import chain

_MAX_LOG_CHANCE = -1e-4
"""Bounds log P(accepted | parent accepted): a child never outranks its parent."""


@dataclass(frozen=True)
class LearnedSettings:
    tau: float | None = None
    """Coupling temperature: candidates are ranked by log q / tau + the target's noise
    (tlt/speculation/__init__.py), q at the sequence's temperature; None: tuned while running."""
    window: int = 4096
    """Positions per sequence that the drafter sees."""
    calibrate: bool = True
    """Correct a tree's confidences by the acceptance so far."""
    keep_targets: bool = False
    """Also keep features for training (`training_capture` in shape.py)."""


@dataclass(frozen=True)
class LearnedProposal(Proposal):
    guesses_BK: Tensor | None = None
    """`TauSearch.guess`, on its way to the host; None: not judged."""
    noted_3BN: Tensor | None = None
    """`Calibration.note`, on its way to the host; None: a chain, or no calibration."""


@dataclass(frozen=True)
class _Start:
    params: BatchParams
    strategy: Strategy
    noise: DraftNoise
    discarded: Sequence[int]
    roots_B1: Tensor
    """The last committed tokens."""
    levels: Levels
    is_judged: bool
    """Whether `TauSearch` judges it."""


class LearnedDrafter(Drafter[LearnedProposal]):
    """Shares the target's embedding and head.

    vocabulary: the tokens to propose; None: all, or those that the drafter's folder fixes.
    """

    kinds = ("learned",)

    def __init__(
        self,
        model: PackedDrafter,
        target: Target,
        max_slots: int,
        settings: LearnedSettings = LearnedSettings(),
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.model, self.target, self.settings = model, target, settings
        self.vocabulary_choice = None if vocabulary is None else VocabularyChoice(model, vocabulary)
        self.tau_search = TauSearch(settings.tau)
        self.calibration = Calibration(model.device) if settings.calibrate else None
        trained = training_capture(model.config, target.config.num_layers)
        self._capture = trained if settings.keep_targets else model.config.capture
        size = len(self._capture) * target.config.hidden_size
        self.draft_cache = make_cache(model, target, size, settings.window, max_slots)

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def capture(self) -> tuple[int, ...]:
        return self._capture

    @property
    def tau(self) -> float:
        return self.tau_search.tau

    # ── bookkeeping ─────────────────────────────────────────────────────────────────────────────────────────

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        """Sequences may be running. Evidence about the old weights counts for less."""
        self.model.load(tensors, version)
        self.draft_cache.forget()
        if self.calibration is not None:
            self.calibration.age()

    def admit(self, slot: int, request: Request) -> None:
        self.draft_cache.admit(slot)
        if self.vocabulary_choice is not None:
            self.vocabulary_choice.admit()

    def remember(self, slots: Sequence[int], starts: Sequence[int], features_BTF: Tensor) -> None:
        self.draft_cache.history.write(slots, starts, features_BTF)

    def move(self, source: int, target: int) -> None:
        self.draft_cache.move(source, target)

    def park(self, slot: int, num_positions: int) -> ParkedDraft:
        return self.draft_cache.park(slot, num_positions)

    def unpark(self, slot: int, request: Request, parked: ParkedDraft) -> None:
        self.draft_cache.unpark(slot, parked)

    def recall(self, slot: int, num_positions: int) -> Tensor | None:
        history = self.draft_cache.history
        if history.first_known(num_positions) > 0:
            return None
        return history.read([slot], [0], num_positions)[0]

    def finish(self, slot: int, rollout: Rollout) -> None:
        if self.vocabulary_choice is not None:
            self.vocabulary_choice.finish(rollout)

    def slot_bytes(self, length: int) -> int:
        return self.draft_cache.slot_bytes(length)

    def reserve(self, num_slots: int, length: int) -> None:
        self.draft_cache.reserve(num_slots, length)

    def release(self) -> None:
        self.draft_cache.release()

    def observe(self, proposal: LearnedProposal, verdicts: Sequence[Verdict]) -> None:
        if proposal.guesses_BK is not None:
            self.tau_search.observe(proposal.guesses_BK, [verdict.tokens[0] for verdict in verdicts])
        if self.calibration is not None and proposal.noted_3BN is not None:
            self.calibration.observe(proposal.noted_3BN, verdicts)

    def counters(self) -> dict[str, Any]:
        calibration = None if self.calibration is None else self.calibration.counters()
        return {"calibration": calibration, "tau": self.tau_search.counters()}

    def restore(self, counters: Sequence[Mapping[str, Any]]) -> None:
        if self.calibration is not None:
            self.calibration.restore(counters[0]["calibration"])
        self.tau_search.restore(counters[0]["tau"])

    # ── drafting ────────────────────────────────────────────────────────────────────────────────────────────

    def propose(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, discarded: Sequence[int] = ()
    ) -> LearnedProposal:
        """Drafts a chain in one call of compiled loops (CPU), else as one recorded graph (GPU), else level by
        level, as every tree."""
        if self.vocabulary_choice is not None:
            self.vocabulary_choice.look(context)
        is_judged = self.tau_search.judges_next()
        if (drafted := self._chain_in_one_call(context, strategy, noise, is_judged)) is not None:
            return drafted
        roots_B1 = upload([[tokens[-1]] for tokens in context.tokens], self.model.device)
        levels = self.draft_cache.begin(context, strategy, roots_B1)
        start = _Start(context.params, strategy, noise, discarded, roots_B1, levels, is_judged)
        return self._chain(start) if strategy.width == 1 else self._tree(start)

    def _depth(self, strategy: Strategy) -> int:
        return min(strategy.depth, self.model.config.max_depth)

    def _rank(self, scaled_BTV: Tensor, noise_BV: Tensor) -> Tensor:
        """Returns log q / tau + noise, up to a constant per node: with noise no log-probability, which
        `Calibration.estimate` corrects."""
        return torch.add(noise_BV[:, None], scaled_BTV, alpha=1 / self.tau)

    def _note(self, tree: DraftTree, cells_BN: Tensor | None, discarded: Sequence[int]) -> Tensor | None:
        if self.calibration is None or cells_BN is None:
            return None
        if discarded:
            cells_BN[upload(discarded, cells_BN.device)] = Calibration.UNUSED
        return self.calibration.note(tree, cells_BN)

    def _token_ids(self, drafted: Tensor) -> Tensor:
        return drafted if self.model.token_ids is None else self.model.token_ids[drafted]

    def _chain_in_one_call(
        self, context: DraftContext, strategy: Strategy, noise: DraftNoise, is_judged: bool
    ) -> LearnedProposal | None:
        if strategy.width > 1 or noise.law is None:
            return None
        drafted = self.draft_cache.draft_chain(context, noise.law, self.tau, self._depth(strategy))
        if drafted is None:
            return None
        tokens_BN, logits_BV = drafted
        guesses_BK: Tensor | None = None
        if is_judged:
            scaled_B1V = context.params.scale(logits_BV[:, None])
            noise_BV = noise.of_level(0, self.model.token_ids)
            guesses_BK = self.tau_search.guess(scaled_B1V[:, 0], noise_BV, self.model.token_ids)
        return LearnedProposal(chain(tokens_BN), guesses_BK)

    def _chain(self, start: _Start) -> LearnedProposal:
        depth = self._depth(start.strategy)
        if (drafted := self._replay_chain(start, depth)) is None:
            drafted = self._chain_by_level(
                start.levels, start.roots_B1, start.noise.of_level, start.params, depth, start.is_judged
            )
        tokens_BN, *guesses = drafted
        return LearnedProposal(chain(tokens_BN), sent_to_host(guesses[0]) if guesses else None)

    def _chain_by_level(
        self,
        levels: Levels,
        roots_B1: Tensor,
        noise_of: Callable[[int, Tensor | None], Tensor],
        params: BatchParams,
        depth: int,
        is_judged: bool,
    ) -> tuple[Tensor, ...]:
        """Returns tokens [B, depth + 1]; if judged, `TauSearch.guess`, too."""
        tokens, guesses = [roots_B1], list[Tensor]()
        for level in range(depth):
            logits_B1V = levels.next(tokens[-1], None) if level else levels.first()
            scaled_B1V = params.scale(logits_B1V)
            noise_BV = noise_of(level, self.model.token_ids)
            if is_judged and level == 0:
                guesses = [self.tau_search.guess(scaled_B1V[:, 0], noise_BV, self.model.token_ids)]
            token_B1 = self._rank(scaled_B1V, noise_BV).argmax(dim=-1)
            tokens.append(self._token_ids(token_B1))
        return torch.cat(tokens, dim=1), *guesses

    def _replay_chain(self, start: _Start, depth: int) -> tuple[Tensor, ...] | None:
        levels, law, pairs = start.levels, start.noise.law, self.draft_cache
        if not pairs.graphs.is_on or not isinstance(levels, PairLevels) or law is None:
            return None
        read = levels.read
        length = min(padded_length(max(read.num_pairs) + depth), pairs.cache.capacity)
        possible = {
            "hidden_BE": read.hidden_BE, "ends_B": read.ends_B, "offsets_B1": read.offsets_B1,
            "roots_B1": start.roots_B1, "keys_B4": law.keys_R4, "starts_B": law.positions_R,
            "scale_B11": start.params.noise_scale_B11,
            "inverse_temperature_B11": start.params.inverse_temperature_B11,
        }  # fmt: skip
        is_judged, vocab_size = start.is_judged, self.target.config.vocab_size

        def draft(
            hidden_BE: Tensor,
            ends_B: Tensor,
            roots_B1: Tensor,
            keys_B4: Tensor,
            starts_B: Tensor,
            offsets_B1: Tensor | None = None,
            scale_B11: Tensor | None = None,
            inverse_temperature_B11: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            own = PairLevels(levels.pairs, CaughtUp([], ends_B, offsets_B1, hidden_BE), length)
            params = BatchParams(inverse_temperature_B11, scale_B11)
            noise_of = partial(noise_of_level, Law(keys_B4, starts_B, params), vocab_size)
            return self._chain_by_level(own, roots_B1, noise_of, params, depth, is_judged)

        inputs = {name: tensor for name, tensor in possible.items() if tensor is not None}
        return pairs.record(("draft", depth, length, is_judged, self.tau), draft, inputs)

    def _tree(self, start: _Start) -> LearnedProposal:
        """EAGLE-2: a level's `width` most confident nodes get `width` candidates each; the `budget` most
        confident of all nodes stay. Confidence is the product of acceptance chances from the root on."""
        strategy, device, B = start.strategy, self.model.device, len(start.roots_B1)
        width, depth = min(strategy.width, self.model.num_proposed), self._depth(strategy)
        confidence_BF = torch.zeros(B, 1, dtype=torch.float32, device=device)
        pool_index_BF = torch.zeros(B, 1, dtype=torch.int64, device=device)  # 0 is the root
        logits_BFV = start.levels.first()
        pool_tokens, pool_parents, pool_size = [start.roots_B1], [start.roots_B1 * 0 - 1], 1
        pool_confidence, pool_cells = [], []
        guesses_BK: Tensor | None = None
        for level in range(depth):
            scaled_BFV = start.params.scale(logits_BFV)
            noise_BV = start.noise.of_level(level, self.model.token_ids)
            if start.is_judged and level == 0:
                guessed_BK = self.tau_search.guess(scaled_BFV[:, 0], noise_BV, self.model.token_ids)
                guesses_BK = sent_to_host(guessed_BK)
            scores_BFV = self._rank(scaled_BFV, noise_BV)
            raw_confidence_BFW, token_BFW = scores_BFV.float().log_softmax(dim=-1).topk(width, dim=-1)
            log_chance_BFW = raw_confidence_BFW
            if self.calibration is not None:
                cells_BFW, log_chance_BFW = self.calibration.estimate(level, raw_confidence_BFW)
                pool_cells.append(cells_BFW.flatten(1))
            frontier = confidence_BF.shape[1]
            log_chance_BFW = log_chance_BFW.clamp_max(_MAX_LOG_CHANCE)
            confidence_BC = (confidence_BF[:, :, None] + log_chance_BFW).flatten(1)
            token_BC = self._token_ids(token_BFW.flatten(1))
            pool_tokens.append(token_BC)
            pool_parents.append(pool_index_BF.repeat_interleave(width, dim=1))
            pool_confidence.append(confidence_BC)
            if level + 1 < depth:
                num_next = min(strategy.width, confidence_BC.shape[1])
                confidence_BF, chosen_BF = confidence_BC.topk(num_next, dim=-1)
                pool_index_BF = chosen_BF + pool_size
                logits_BFV = start.levels.next(token_BC.gather(1, chosen_BF), chosen_BF // width)
            pool_size += frontier * width
        chosen_BN = _best_nodes(torch.cat(pool_confidence, 1), strategy.budget)
        tree = _select(torch.cat(pool_tokens, 1), torch.cat(pool_parents, 1), chosen_BN)
        cells_BN = torch.cat(pool_cells, 1).gather(1, chosen_BN[:, 1:] - 1) if pool_cells else None
        return LearnedProposal(tree, guesses_BK, self._note(tree, cells_BN, start.discarded))


def make_cache(
    model: PackedDrafter, target: Target, captured_size: int, window: int, max_slots: int
) -> DraftCache:
    if isinstance(model, PackedBlock):
        return BlockCache(model, target, captured_size, window, max_slots)
    assert isinstance(model, PackedEagle), model
    return PairCache(model, target, captured_size, window, max_slots)


def _best_nodes(confidence_BC: Tensor, budget: int) -> Tensor:
    """Pool indices of the root (0) and the `budget` most confident candidates, in pool order (EAGLE-2). A
    child is never more confident than its parent, so a chosen node's parent is chosen."""
    best_BN = confidence_BC.topk(min(budget, confidence_BC.shape[1]), dim=-1).indices
    chosen_BN = best_BN.sort(dim=-1).values + 1
    return torch.cat([torch.zeros_like(chosen_BN[:, :1]), chosen_BN], dim=1)


def _select(tokens_BP: Tensor, parents_BP: Tensor, chosen_BN: Tensor) -> DraftTree:
    new_index_BP = torch.full_like(tokens_BP, -1)
    columns_N = torch.arange(chosen_BN.shape[1], device=tokens_BP.device)
    new_index_BP.scatter_(1, chosen_BN, columns_N.expand_as(chosen_BN))
    parents_BN = parents_BP.gather(1, chosen_BN)
    parents_BN[:, 1:] = new_index_BP.gather(1, parents_BN[:, 1:])
    return DraftTree(tokens_BP.gather(1, chosen_BN), parents_BN)
