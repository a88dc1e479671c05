"""TRL trains, TLT generates. From the repository's root, after pip install '.[trl]':

python examples/trl_countdown.py
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/trl_countdown.py --max_steps 20
"""

from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from tlt.apps.integrations.trl import TLTRollout
from tlt.tasks.countdown import TASK


def solves(completions, numbers, target, **_):
    puzzles = [{"numbers": n, "target": t} for n, t in zip(numbers, target, strict=True)]
    return [TASK.score(puzzle, text)["reward"] for puzzle, text in zip(puzzles, completions, strict=True)]


if __name__ == "__main__":
    parser = HfArgumentParser(GRPOConfig)  # every argument of GRPOConfig, with other defaults
    parser.set_defaults(
        output_dir="runs/trl", max_steps=10, learning_rate=1e-4, use_cpu=True, bf16=False, logging_steps=1
    )
    parser.set_defaults(
        per_device_train_batch_size=16, num_generations=8, max_completion_length=512, report_to="none"
    )
    (config,) = parser.parse_args_into_dataclasses()
    trainer = GRPOTrainer(
        model="recipes/countdown/base",
        reward_funcs=solves,
        args=config,
        train_dataset=Dataset.from_list(TASK.problems(256, seed=0, mix={2: 0.2, 3: 0.8}, max_number=15)),
        rollout_func=TLTRollout(drafter="recipes/countdown/drafter", speculation="adaptive"),
    )
    trainer.train()
