"""The draft vocabulary at work: an engine alone renews it from what it samples, a run at the beginning of its
steps.

    Engine, tlt generate    the prompts that run, what was sampled since the last look ─▶ a look when much is new
    a run                   the step's prompts, what all ranks sampled before ─▶ `begin` and `end`; every rank chooses alike

Changes the speed alone. Knows neither ranks nor how tokens are chosen (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tlt.drafter.model import PackedDrafter
from tlt.drafter.vocabulary import KEEP, DraftVocabulary
from tlt.speculative.protocol import DraftContext
from tlt.types import Rollout

SECOND_LOOK, GROWTH = 128, 1.5
"""Response tokens before the second look, and the factor between two later ones."""


class VocabularyChoice:
    """Keeps the model at what the vocabulary holds. is_led: somebody else says when to choose; nothing is
    looked at here."""

    def __init__(self, model: PackedDrafter, vocabulary: DraftVocabulary) -> None:
        self.model, self.vocabulary, self.is_led = model, vocabulary, False
        self._num_finished, self._next_look, self._num_new = 0, 0.0, 0
        self._finished_V = vocabulary.count(())
        self._seen_V = vocabulary.count(())
        model.choose(vocabulary.token_ids)

    # ── an engine alone ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _looks(self) -> bool:
        return not self.is_led and bool(self.vocabulary.sizes)

    def admit(self) -> None:
        """A sequence has come."""
        self._num_new += 1

    def finish(self, rollout: Rollout) -> None:
        """A response has ended here."""
        if self._looks:
            self._finished_V += self.vocabulary.count(rollout.token_ids)
            self._num_finished += len(rollout.token_ids)

    def look(self, context: DraftContext) -> None:
        """Chooses again, if half of the sequences are new, or half as much again was sampled, since the
        last look."""
        if not self._looks:
            return
        rows = list(zip(context.tokens, context.requests, strict=True))
        num_sampled = self._num_finished + sum(
            len(tokens) - len(request.prompt_ids) for tokens, request in rows
        )
        if num_sampled < self._next_look and 2 * self._num_new < len(rows):
            return
        self._next_look, self._num_new = max(GROWTH * num_sampled, SECOND_LOOK), 0
        running_V = self.vocabulary.count(
            token for tokens, r in rows for token in tokens[len(r.prompt_ids) :]
        )
        sampled_V = self._finished_V + running_V
        self.vocabulary.observe((sampled_V - self._seen_V).clamp_min(0))
        self._seen_V = sampled_V
        self.vocabulary.foresee({request.prompt_ids for _, request in rows})
        self._renew()

    # ── a run ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, prompts: Iterable[Sequence[int]]) -> None:
        """Chooses for the prompts that are answered next."""
        self.is_led = True
        self.vocabulary.foresee(prompts)
        self._renew()

    def end(self, rollouts: Sequence[Rollout]) -> None:
        """Counts a step's responses."""
        self.is_led = True
        self.vocabulary.observe(
            self.vocabulary.count(token for rollout in rollouts for token in rollout.token_ids), KEEP
        )

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what the vocabulary's `counters` returned."""
        self.vocabulary.restore(counters)
        self.model.choose(self.vocabulary.token_ids)

    def _renew(self) -> None:
        if self.vocabulary.renew():
            self.model.choose(self.vocabulary.token_ids)
