"""The self-check of a vLLM engine at its start: does vLLM still sample by the law?

vLLM's draws are recorded ─▶ drawn again here, from each request's key and parameters ─▶ the same tokens?
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlt.base.types import Request, Rollout, SamplingParams, UserError
from tlt.engine.stats import EngineStats
from tlt.engine.vllm.engine import VllmEngine
from tlt.engine.vllm.inside.law import Recorded
from tlt.speculation.law.params import BatchParams
from tlt.speculation.law.sampling import gumbel_noise, keys_tensor, sample

NUM_TOKENS = 12
NUM_PROMPT = 4


def check_law(engine: VllmEngine, vocab_size: int) -> None:
    """Raises UserError. Checks without drafts and with the longest; leaves the engine as it was."""
    tuner, engine.tuner = engine.tuner, None
    requests = probes(vocab_size, min(engine.max_batch_size, 2), engine.window)
    try:
        for depth in {0, engine.link.max_depth}:
            engine.link.draft(depth)
            engine.link.record(True)
            rollouts = sorted(engine.generate(requests), key=lambda rollout: rollout.sample_index)
            _compare_with_the_law(engine.link.record(False), requests, rollouts)
    finally:
        engine.abort()
        engine.link.draft(0)
        engine.tuner, engine.stats = tuner, EngineStats()


def probes(vocab_size: int, num: int, window: int) -> list[Request]:
    """No run makes these; two temperatures show a wrong row or parameter."""
    num_prompt = min(NUM_PROMPT, window - 1)
    num_tokens = min(NUM_TOKENS, window - num_prompt)
    params = [
        SamplingParams(1.0, max_tokens=num_tokens, seed=1),
        SamplingParams(0.7, top_k=50, max_tokens=num_tokens, seed=2),
    ]
    prompt = tuple((i * 7 + 3) % vocab_size for i in range(num_prompt))
    return [Request("self-check", index, prompt, params[index], "generate") for index in range(num)]


def _compare_with_the_law(
    recorded: Sequence[Recorded], requests: Sequence[Request], rollouts: Sequence[Rollout]
) -> None:
    rows = {}
    for (
        logits_RV,
        positions_R,
        keys_R4,
    ) in recorded:  # after a rejected draft the later row of a position counts
        for logits_V, position, key in zip(logits_RV, positions_R.tolist(), keys_R4.tolist(), strict=True):
            rows[position, tuple(key)] = logits_V
    for request, rollout in zip(requests, rollouts, strict=True):
        for index, token in enumerate(rollout.token_ids):
            position = len(request.prompt_ids) + index
            logits_V = rows.get((position, request.noise_key))
            if logits_V is None:
                raise _drifted(f"position {position} was not drawn by the law")
            noise_11V = gumbel_noise(
                keys_tensor([request.noise_key]), torch.tensor([[position]]), len(logits_V)
            )
            expected, logprob = sample(
                logits_V.cpu()[None, None], noise_11V, BatchParams.of([request.params])
            )
            if int(expected) != token or abs(float(logprob) - rollout.logprobs[index]) > 1e-3:
                raise _drifted(f"position {position} has token {token}, the law's is {int(expected)}")


def _drifted(finding: str) -> UserError:
    return UserError(
        f"engine: vllm does not sample by the law here ({finding}); install a release that docs/vllm.md names"
    )
