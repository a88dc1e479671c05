"""A model to run commands on, and an empty folder to run them in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.apps.cli.parts import WINDOW, save_tokenizer
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a character tokenizer; its vocabulary is larger than the
    tokenizer's."""
    path = tmp_path_factory.mktemp("cli") / "model"
    config = ModelConfig("llama", 61, 16, 32, 2, 2, 1, 8, max_positions=WINDOW)
    tensors = Transformer(config).initialize(seed=0).state_dict()
    save_model(path, config, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    save_tokenizer(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
