"""The draft vocabulary at work: an engine alone renews it from what it samples, a run at the end of its steps.

    Engine, tlt generate    what runs and what has ended here ─▶ a look whenever that has grown by half
    a run                   what all ranks sampled in a step ─▶ `lead`, and every rank chooses alike

Changes the speed alone. Knows neither ranks nor how tokens are chosen (vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tlt.drafter.model import PackedDrafter
from tlt.drafter.vocabulary import DraftVocabulary
from tlt.speculative.protocol import DraftContext
from tlt.types import Rollout

FIRST_LOOK, NEXT_LOOK = 128, 1.5
"""Response tokens before the first choice, and the factor between two looks."""


class VocabularyChoice:
    """Keeps the model at what the vocabulary holds. is_led: somebody else calls `lead`; nothing is looked at here."""

    def __init__(self, model: PackedDrafter, vocabulary: DraftVocabulary) -> None:
        self.model, self.vocabulary, self.is_led = model, vocabulary, False
        self._num_finished, self._next_look = 0, float(FIRST_LOOK)
        model.choose(vocabulary.token_ids)

    def look(self, context: DraftContext) -> None:
        """Chooses again, if enough was sampled since the last look."""
        if self.is_led or not self.vocabulary.may_reduce:
            return
        rows = list(zip(context.tokens, context.requests, strict=True))
        num_sampled = self._num_finished + sum(len(tokens) - len(request.prompt_ids) for tokens, request in rows)
        if num_sampled < self._next_look:
            return
        self._next_look = NEXT_LOOK * num_sampled
        running_V = self.vocabulary.count(token for tokens, r in rows for token in tokens[len(r.prompt_ids) :])
        if self.vocabulary.renew(running_V):
            self.model.choose(self.vocabulary.token_ids)

    def finish(self, rollout: Rollout) -> None:
        """Counts a response that has ended here."""
        if not self.is_led:
            self.vocabulary.add(rollout.token_ids)
            self._num_finished += len(rollout.token_ids)

    def lead(self, rollouts: Sequence[Rollout]) -> None:
        """Counts a step's responses, and renews the choice by them."""
        self.is_led = True
        self.vocabulary.observe(rollouts)
        if self.vocabulary.renew():
            self.model.choose(self.vocabulary.token_ids)

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes up what the vocabulary's `counters` returned, and chooses again: the user may want another size now."""
        self.vocabulary.restore(counters)
        self.vocabulary.renew()
        self.model.choose(self.vocabulary.token_ids)
