"""The engine of whatever tree is imported, which generates as often as it is asked: a line in, JSON out. Run by
paired.py.

    PYTHONPATH=TREE python -P benchmarks/paired_engine.py FOLDER SPECULATION BATCH     FOLDER/base, FOLDER/drafter
"""

import json
import sys
import time
from pathlib import Path

import torch

import tlt

PROMPTS = ["[2,9,16:5]", "[3,7,8:12]", "[25,4,6:19]", "[11,2,30:4]"]


def main(folder: Path, speculation: str, batch: int) -> None:
    torch.set_num_threads(1)
    drafter = None if speculation == "off" else str(folder / "drafter")
    engine = tlt.Engine.from_pretrained(
        str(folder / "base"), drafter=drafter, speculation=speculation, max_batch_size=batch
    )
    num_prompts = min(batch, len(PROMPTS))
    for seed, _ in enumerate(sys.stdin):
        prompts = [PROMPTS[(seed + i) % len(PROMPTS)] for i in range(num_prompts)]
        start = time.perf_counter()
        responses = engine.generate(
            prompts, samples=batch // num_prompts, temperature=1.0, max_tokens=64, seed=seed
        )
        seconds = time.perf_counter() - start
        num_tokens = sum(len(response.token_ids) for response in responses)
        print(json.dumps({"seconds": seconds, "num_tokens": num_tokens}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
