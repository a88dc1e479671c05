"""Makes the long-tail workload of the base model: 128 of many sampled responses, chosen for their lengths.

How they are chosen is benchmarks/longtail.py's. Run from the repository, whose benchmarks it needs:

    PYTHONPATH=. python recipes/countdown/make_longtail.py --out recipes/countdown/longtail.json
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.longtail import hash_model, make_longtail, measure_lengths, write_workload
from tlt.base.speculation import Adaptive
from tlt.base.types import Problem, SamplingParams
from tlt.drafter.formats.folder import load_drafter
from tlt.engine.build.engine import build_engine
from tlt.engine.build.model import load_model
from tlt.engine.settings import EngineSettings
from tlt.tasks.base import get_task

HERE = Path(__file__).parent
OPTIONS = {"mix": {"2": 0.2, "3": 0.8}, "max_number": 15, "max_target": 60}  # the quickstart's puzzles
BATCH_SIZE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--candidates", type=int, default=640)
    parser.add_argument("--num", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = load_model(HERE / "base")
    assert model.tokenizer is not None, "the recipe ships one"
    drafter = load_drafter(HERE / "drafter", model.config, model.tensors)
    settings = EngineSettings(Adaptive(), max_batch_size=BATCH_SIZE)
    engine = build_engine(model.config, model.tensors, settings, drafter)
    records = get_task("countdown").problems(options.candidates, 1, split="train", **OPTIONS)
    problems = [
        Problem(record["problem_id"], model.tokenizer.encode_text(record["prompt"])) for record in records
    ]
    params = SamplingParams(max_tokens=options.max_tokens, stop_ids=model.stop_ids)

    def show(num_finished: int) -> None:
        if num_finished % 64 == 0:
            print(
                f"{num_finished} of {options.candidates} responses, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )

    begin = time.perf_counter()
    lengths = measure_lengths(engine, problems, params, options.candidates, show)
    workload = make_longtail(lengths, options.num, hash_model(model.path))
    command = f"make_longtail.py --candidates {options.candidates} --num {options.num} --max-tokens {options.max_tokens}"
    write_workload(options.out, workload, command)
    num_cut = sum(length == options.max_tokens for length in lengths.values())
    print(
        f"{sum(lengths.values())} tokens, {num_cut} responses cut off; chosen {workload.shape}, "
        f"{workload.num_tokens} tokens"
    )


if __name__ == "__main__":
    main()
