"""A tiny model in a folder, and a folder with prompts for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.apps.cli.parts import WINDOW, save_tokenizer, write_lines
from tlt.models.decoder import ModelConfig, Transformer
from tlt.models.hf.weights import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "model"
    config = ModelConfig("llama", 23, 16, 32, 2, 2, 1, 8, max_positions=WINDOW)
    tensors = Transformer(config).initialize(0, std=0.3).state_dict()
    save_model(path, config, tensors, dtype=torch.float32, source=None, extra={"eos_token_id": 1})
    save_tokenizer(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", {"prompt": "1+2="}, {"prompt_ids": [5, 6]})
    return tmp_path
