"""The self-check of an engine that is vLLM, when it starts: a prompt, answered under the eyes of the law.

    every row that vLLM draws from is kept ─▶ drawn again here, from the request's own key and parameters ─▶ the same tokens?

once without drafts, once with as many as vLLM drafts; and where references are followed, once along what was
said before.

A vLLM that has changed where the law is put into it would otherwise sample by another law, and nobody
would see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt.drafter.drafting.references import References
from tlt.engine.stats import EngineStats
from tlt.speculative.params import BatchParams
from tlt.speculative.sampling import gumbel_noise, keys_tensor, sample
from tlt.speculative.strategy import Strategy
from tlt.tuning.tuner import Fixed
from tlt.types import Request, Rollout, SamplingParams, UserError
from tlt.vllm.engine import VllmEngine
from tlt.vllm.references import RunningReferences

NUM_TOKENS = 12
NUM_PROMPT = 4


def check_law(engine: VllmEngine, vocab_size: int) -> None:
    """Raises UserError unless the engine draws by the law, without drafts and with them. It leaves nothing
    behind."""
    (tuner, engine.tuner), (references, engine.references) = (engine.tuner, None), (engine.references, None)
    requests = probes(vocab_size, min(engine.max_batch_size, 2), engine.window)
    try:
        for depth in {0, engine.link.max_depth}:
            engine.link.draft(depth)
            rollouts = _check(engine, requests)
        if references is not None:
            engine.tuner = Fixed(Strategy("ahead", NUM_TOKENS, 1, NUM_TOKENS))
            engine.references = RunningReferences(References(), vocab_size)
            for request, rollout in zip(requests, rollouts, strict=True):
                engine.references.kept.keep(request.key, rollout.token_ids)
            _check(engine, requests)
            if requests[0].params.max_tokens > 2 and not engine.stats.followed_by_age.total():
                raise _drifted("drafts that its scheduler was given were not verified")
    finally:
        engine.abort()
        engine.link.draft(0)
        engine.tuner, engine.references, engine.stats = tuner, references, EngineStats()


def _check(engine: VllmEngine, requests: Sequence[Request]) -> list[Rollout]:
    engine.link.record(True)
    rollouts = sorted(engine.generate(requests), key=lambda rollout: rollout.sample_index)
    _compare_with_the_law(engine.link.record(False), requests, rollouts)
    return rollouts


def probes(vocab_size: int, num: int, window: int) -> list[Request]:
    """Returns requests that no run makes, at two temperatures, so that a wrong row or parameter is seen."""
    num_prompt = min(NUM_PROMPT, window - 1)
    num_tokens = min(NUM_TOKENS, window - num_prompt)
    params = [
        SamplingParams(1.0, max_tokens=num_tokens, seed=1),
        SamplingParams(0.7, top_k=50, max_tokens=num_tokens, seed=2),
    ]
    prompt = tuple((i * 7 + 3) % vocab_size for i in range(num_prompt))
    return [Request("self-check", index, prompt, params[index], "generate") for index in range(num)]


def _compare_with_the_law(
    drawn: Sequence[tuple[Tensor, Tensor, Tensor]], requests: Sequence[Request], rollouts: Sequence[Rollout]
) -> None:
    """Draws again what vLLM drew, row by row, with keys and positions as this process knows them."""
    rows = {}
    for (
        logits_RV,
        positions_R,
        keys_R4,
    ) in drawn:  # of a position that was drawn behind a rejected draft the later row counts
        for logits_V, position, key in zip(logits_RV, positions_R.tolist(), keys_R4.tolist(), strict=True):
            rows[position, tuple(key)] = logits_V
    for request, rollout in zip(requests, rollouts, strict=True):
        for index, token in enumerate(rollout.token_ids):
            position = len(request.prompt_ids) + index
            logits_V = rows.get((position, request.key))
            if logits_V is None:
                raise _drifted(f"position {position} was not drawn by the law")
            noise_11V = gumbel_noise(keys_tensor([request.key]), torch.tensor([[position]]), len(logits_V))
            expected, logprob = sample(logits_V.cpu()[None, None], noise_11V, BatchParams([request.params]))
            if int(expected) != token or abs(float(logprob) - rollout.logprobs[index]) > 1e-3:
                raise _drifted(f"position {position} has token {token}, the law's is {int(expected)}")


def _drifted(what: str) -> UserError:
    return UserError(
        f"engine: vllm does not sample by the law here ({what}); install a release that docs/vllm.md names"
    )
