"""A workspace for whole runs: a tiny policy, its drafter, a task and a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tlt.cli import main as cli
from tlt.drafter.folder import save_drafter
from tlt.drafter.model import DraftModel, drafter_shape
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf_config import load_model_config
from tlt.models.hf_weights import save_model

Tlt = Callable[..., int]
"""Runs `tlt WORDS…`; returns the exit code."""
BASE = Path(__file__).parents[2] / "recipes" / "countdown" / "base"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with Countdown's tokenizer, and a random drafter."""
    folder = tmp_path_factory.mktemp("workspace")
    config = ModelConfig(
        "llama", load_model_config(BASE).vocab_size, 32, 64, 2, 4, 2, 8, tie_embeddings=True, max_positions=256
    )
    policy = Transformer(config).initialize(0, std=0.15)
    save_model(folder / "model", config, policy.state_dict(), dtype=torch.float32, source=BASE)
    save_drafter(folder / "drafter", DraftModel(drafter_shape(config)).initialize(0), torch.float32)
    # The prompt's own task: a response is rewarded for the digits it holds, so that a random policy has something to learn.
    (folder / "digits.py").write_text(
        "class Digits:\n"
        "    def problems(self, num, seed, split='train', first=1):\n"
        "        prompts = [f'[{i % 9 + 1},{i % 7 + first}:{i % 50 + 1}]' for i in range(num)]\n"
        "        return [{'problem_id': f'{split}-{i}', 'prompt': prompt} for i, prompt in enumerate(prompts)]\n"
        "    def score(self, problem, text):\n"
        "        share = sum(c.isdigit() for c in text) / max(len(text), 1)\n"
        "        return {'reward': share, 'solved': share > 0.5}\n"
        "TASK = Digits()\n"
    )
    (folder / "run.toml").write_text(
        """
        [run]
        num_steps = 5
        num_ranks = 2
        dtype = "float64"
        checkpoint_every = 2
        [model]
        path = "model"
        [task]
        name = "digits:TASK"
        num_problems = 12
        [rollout]
        problems_per_step = 4
        samples_per_problem = 4
        max_batch_size = 8
        speculation = "adaptive"
        [sampling]
        max_tokens = 48
        [drafter]
        path = "drafter"
        train = true
        tokens_per_micro_step = 256
        check_every = 2
        [optimizer]
        learning_rate = 3e-3
        [evaluation]
        num_problems = 6
        samples_per_problem = 2
        """
    )
    return folder


@pytest.fixture
def tlt_here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Tlt:
    """`tlt` in this process, as one rank is."""
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(workspace), os.environ.get("PYTHONPATH", "")]))
    return lambda *words: cli.main(words)
