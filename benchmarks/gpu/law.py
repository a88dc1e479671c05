"""Part `law`: the law's kernel on the GPU against the PyTorch reference on the CPU, and how long a row takes.

draws     tokens equal over vocabularies, types, temperatures, truncations and ties; log-probabilities within
          fused.py's bound
seconds   a row of each vocabulary, in batches; PyTorch's own argmax of the same logits beside it, which reads
          them once too

A rehearsal runs the kernel in Triton's interpreter on the CPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.harness import Record, seconds_of
from tlt.base.types import SamplingParams
from tlt.speculation.law.draw import draw_by_definition
from tlt.speculation.law.params import BatchParams, Law
from tlt.speculation.law.sampling import gumbel_noise

KINDS = {
    "T = 1": SamplingParams(),
    "T = 0.7": SamplingParams(temperature=0.7),
    "T = 0": SamplingParams(temperature=0),
    "T = 0.7, top-k 50, top-p 0.95, min-p 0.01": SamplingParams(
        temperature=0.7, top_k=50, top_p=0.95, min_p=0.01
    ),
    "T = 1.3": SamplingParams(temperature=1.3),
    "T = 1e-35": SamplingParams(temperature=1e-35),
    "min-p 0.1": SamplingParams(min_p=0.1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rows_of(num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits, keys and positions on the CPU. In every fourth row each token has a double: ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(dtype)
    half = vocab_size // 2
    logits[::4, half : 2 * half] = logits[::4, :half]
    keys = torch.randint(2**32, (num_rows, 4), generator=generator)
    return logits, keys, torch.randint(2**32, (num_rows,), generator=generator)


def compare(num_rows: int, vocab_size: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Draws rows of every law and type by both; returns how many differ."""
    from tlt.speculation.law import fused

    found, largest = Counter[str](), 0.0
    for index, (name, one) in enumerate(KINDS.items()):
        dtype = DTYPES[(index + seed) % len(DTYPES)]
        logits, keys, positions = rows_of(num_rows, vocab_size, seed + index, dtype)
        params = [one] * num_rows
        tokens_R, logprobs_R = draw_by_definition(logits, Law(keys, positions, BatchParams.of(params)))
        law = Law(keys.to(device), positions.to(device), BatchParams.of(params, device))
        drawn = fused.draw(logits.to(device), law)
        others_R, their_logprobs_R = drawn[0].cpu(), drawn[1].cpu()
        found["draws"] += num_rows
        found["other_tokens"] += int((tokens_R != others_R).sum())
        if one.temperature == 0 and not torch.equal(tokens_R, others_R):
            found["other_greedy_tokens"] += 1
        scaled_RV = BatchParams.of(params).scale(logits[:, None])[:, 0]
        sizes_R = scaled_RV.gather(1, tokens_R[:, None])[:, 0].abs() + scaled_RV.logsumexp(-1).abs()
        shares_R = (logprobs_R - their_logprobs_R).abs() / (2.0**-17 + 2.0**-22 * sizes_R)
        largest = max(largest, float(shares_R[tokens_R == others_R].max()))
        found[f"of {name}"] += int((tokens_R != others_R).sum())
    return {"vocab_size": vocab_size, "logprob_share": largest, **found}


def compare_noise(vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Returns how many noise values have other bits, and by how many units at most."""
    from tlt.speculation.law import fused

    _, keys, positions = rows_of(4, 4, vocab_size, torch.float32)
    plain = gumbel_noise(keys, positions[:, None], vocab_size)
    here = fused.gumbel_noise(keys.to(device), positions[:, None].to(device), vocab_size).cpu()
    units = (here.view(torch.int32).long() - plain.view(torch.int32).long()).abs()
    return {
        "values": units.numel(),
        "other_noise": int(units.count_nonzero()),
        "most_units": int(units.max()),
    }


def time_rows(num_rows: int, vocab_size: int, device: torch.device, num_calls: int) -> dict[str, Any]:
    """Returns milliseconds a call: of the kernel at two laws, of noise alone, of argmax."""
    from tlt.speculation.law import fused

    logits = 3 * torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16)
    keys = torch.randint(2**32, (num_rows, 4), device=device)
    positions = torch.randint(2**32, (num_rows,), device=device)
    plain, truncated = (
        Law(keys, positions, BatchParams.of([params] * num_rows, device))
        for params in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95))
    )
    calls = {
        "law": lambda: fused.draw(logits, plain),
        "law, top-p": lambda: fused.draw(logits, truncated),
        "noise": lambda: fused.gumbel_noise(keys, positions[:, None], vocab_size),
        "argmax": lambda: logits.argmax(-1),
    }
    times = {name: 1e3 * seconds_of(call, device, num_calls) for name, call in calls.items()}
    return {"rows": num_rows, "vocab_size": vocab_size, "ms": times}


def main() -> None:
    record = Record.of_arguments()
    settings, device = record.settings, torch.device(record.settings["device"])
    torch.set_num_threads(settings["threads"])  # of the reference
    try:
        import triton
    except ImportError:
        record.skip("Triton is not installed")
    record.add(triton=triton.__version__)
    num_draws = 0
    for vocab_size, num_rows in settings["draws"]:
        record.append("draws", compare(num_rows, vocab_size, vocab_size, device))
        num_draws += record.values["draws"][-1]["draws"]
    record.add(num_draws=num_draws, noise=compare_noise(settings["noise_vocab"], device))
    for vocab_size in settings["vocabularies"]:
        for num_rows in settings["rows"]:
            record.append("times", time_rows(num_rows, vocab_size, device, settings["calls"]))
    other = sum(one["other_tokens"] for one in record.values["draws"])
    assert other <= num_draws // 10**4, f"{other} of {num_draws} tokens differ"


if __name__ == "__main__":
    main()
