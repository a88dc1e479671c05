"""Writes what a small run takes: a random policy, its drafter, and a task."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.unit.training.environments.parts import write_model
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import save_model

Sizes = tuple[int, int, int, int, int, int]
ROOT = Path(__file__).parents[2]
BASE = ROOT / "recipes" / "countdown" / "base"
TASK = """
class Digits:
    def problems(self, num, seed, split="train", first=1):
        prompts = [f"[{i % 9 + 1},{i % 7 + first}:{i % 50 + 1}]" for i in range(num)]
        return [{"problem_id": f"{split}-{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]

    def score(self, problem, text):
        share = sum(c.isdigit() for c in text) / max(len(text), 1)
        return {"reward": share, "solved": share > 0.5}

TASK = Digits()
"""
"""A response is rewarded for the digits in it, which a random policy can learn to write."""
PASSING_TASK = (
    TASK
    + """
from tests.faults.left import command_line
from tests.faults.once import WORKER, passes
import os

IS_WORKER = WORKER in command_line(os.getpid())
if IS_WORKER:
    passes("start of a worker")

class Passing(Digits):
    def score(self, problem, text):
        if IS_WORKER:
            passes("score " + problem["problem_id"].partition("-")[0])
        return super().score(problem, text)

TASK = Passing()
"""
)
"""Its workers pass the places of once.py."""


def make_models(
    folder: Path, sizes: Sizes = (32, 64, 2, 4, 2, 8), max_positions: int = 256, std: float = 0.15
) -> None:
    """Writes a random policy with Countdown's tokenizer, its random drafter, and a task.

    sizes: hidden, MLP, layers, heads, heads of keys and values, of a head.
    """
    tokens = load_model_config(BASE).vocab_size
    shape = ModelConfig("llama", tokens, *sizes, tie_embeddings=True, max_positions=max_positions)
    policy = Transformer(shape).initialize(0, std=std)
    save_model(folder / "model", shape, policy.state_dict(), dtype=torch.float32, source=BASE)
    save_drafter(folder / "drafter", new_model(drafter_shape(shape)).initialize(0), torch.float32)
    (folder / "digits.py").write_text(TASK)


def make_chat_models(folder: Path) -> None:
    """Writes a random policy that calls tools, and its random drafter."""
    model = write_model(folder / "model")
    shape = drafter_shape(load_model_config(model))
    save_drafter(folder / "drafter", new_model(shape).initialize(0), torch.float32)
