"""Decides when the draft vocabulary is chosen again (vocabulary.py says how).

Engine, tlt generate    from the running prompts and new samples, once much is new     `look`
a run                   from the step's prompts and all ranks' samples, once a step    `begin`, `end`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tlt.base.types import Rollout
from tlt.drafter.model import PackedDrafter
from tlt.drafter.protocol import DraftContext
from tlt.drafter.vocabulary import KEEP, DraftVocabulary

SECOND_LOOK, GROWTH = 128, 1.5
"""Response tokens before the second look; growth between later looks."""


class VocabularyChoice:
    def __init__(self, model: PackedDrafter, vocabulary: DraftVocabulary) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.is_led = False
        """A run calls `begin` and `end`, so `look` does nothing."""
        self._num_finished, self._next_look, self._num_new = 0, 0.0, 0
        self._finished_V = vocabulary.count(())
        self._seen_V = vocabulary.count(())
        model.choose(vocabulary.token_ids)

    # ── an engine alone ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _looks(self) -> bool:
        return not self.is_led and bool(self.vocabulary.sizes)

    def admit(self) -> None:
        self._num_new += 1

    def finish(self, rollout: Rollout) -> None:
        if self._looks:
            self._finished_V += self.vocabulary.count(rollout.token_ids)
            self._num_finished += len(rollout.token_ids)

    def look(self, context: DraftContext) -> None:
        """Chooses again if half of the sequences are new or sampled tokens grew by half."""
        if not self._looks:
            return
        rows = list(zip(context.tokens, context.requests, strict=True))
        num_running = sum(len(tokens) - len(request.prompt_ids) for tokens, request in rows)
        num_sampled = self._num_finished + num_running
        if num_sampled < self._next_look and 2 * self._num_new < len(rows):
            return
        self._next_look, self._num_new = max(GROWTH * num_sampled, SECOND_LOOK), 0
        responses = [tokens[len(request.prompt_ids) :] for tokens, request in rows]
        sampled_V = self._finished_V + self.vocabulary.count(chain.from_iterable(responses))
        self.vocabulary.observe((sampled_V - self._seen_V).clamp_min(0))
        self._seen_V = sampled_V
        self.vocabulary.foresee({request.prompt_ids for _, request in rows})
        self._renew()

    # ── a run ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, prompts: Iterable[Sequence[int]]) -> None:
        self.is_led = True
        self.vocabulary.foresee(prompts)
        self._renew()

    def end(self, rollouts: Sequence[Rollout]) -> None:
        self.is_led = True
        self.vocabulary.observe(self.vocabulary.count_responses(rollouts), KEEP)

    def restore(self, counters: Mapping[str, Any]) -> None:
        self.vocabulary.restore(counters)
        self.model.choose(self.vocabulary.token_ids)

    def _renew(self) -> None:
        if self.vocabulary.renew():
            self.model.choose(self.vocabulary.token_ids)
