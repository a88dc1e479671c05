"""Holds what vLLM drafts with an exported DFlash drafter against what our own model drafts, token by token.

    vLLM's responses, with every draft ─┬─ the block at the same place of the same text, by our engine's copy
                                        └─ of both: how often the text goes on so

Counters hardly show a drafter that is read wrongly. vLLM's CPU kernel scales the context's keys of all layers
by the first layer's k_norm; `has_fault` computes it so.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.vllm.blocks import blocks_at, randomize
from tlt.drafter.block import PackedBlock
from tlt.drafter.formats.folder import StoredDrafter, load_drafter, save_drafter
from tlt.drafter.forms import new_model, pack_drafter
from tlt.drafter.shape import BlockOptions, drafter_shape
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import load_tensors
from tlt.models.packed import PackedTransformer

NEAR_TIE = 1e-4
"""Difference of two logits up to which rounding may have decided between them."""


@dataclass(frozen=True)
class Drafts:
    """What was compared. by_position: share of the judged blocks whose first 1, 2, … tokens the text goes on
    with."""

    blocks: int
    equal: int
    """Blocks that are ours token for token."""
    near_ties: int
    """Blocks that part from ours at a near-tie of our logits."""
    judged: int
    """Blocks that end within the text."""
    theirs_by_position: tuple[float, ...]
    ours_by_position: tuple[float, ...]

    @property
    def largest_gap(self) -> float:
        pairs = zip(self.theirs_by_position, self.ours_by_position, strict=True)
        return max(abs(a - b) for a, b in pairs)


def compare_drafts(
    base: Path, drafter: Path, responses: Sequence[Mapping[str, Any]], has_fault: bool
) -> Drafts:
    """Returns how far vLLM's drafts are ours. responses: as audit_vllm.py writes them, with drafts."""
    config = load_model_config(base)
    tensors = load_tensors(base, config)
    target = PackedTransformer(config, torch.float32)
    target.load(tensors, version=0)
    packed = pack_block(load_drafter(drafter, config, tensors), has_fault)
    blocks = equal = near_ties = 0
    hits: list[list[list[bool]]] = []
    for response in responses:
        tokens = [*response["prompt_ids"], *response["token_ids"]]
        found = [row for row in response["drafts"] if row[0] < len(tokens) and row[1] == tokens[row[0]]]
        for (place, _, theirs), logits_KV in zip(
            found, blocks_at(packed, target, tokens, found), strict=True
        ):
            ours = logits_KV.argmax(-1).tolist()[: len(theirs)]
            parts = [k for k in range(len(theirs)) if ours[k] != theirs[k]]
            equal += not parts
            if parts:
                best, other = logits_KV[parts[0], ours[parts[0]]], logits_KV[parts[0], theirs[parts[0]]]
                near_ties += bool(best - other < NEAR_TIE)
            said = tokens[place + 1 : place + 1 + len(theirs)]
            if len(said) == len(theirs):
                hits.append([_hits(draft, said) for draft in (theirs, ours)])
            blocks += 1
    theirs_at, ours_at = (
        tuple(sum(column) / len(hits) for column in zip(*rows, strict=True))
        for rows in zip(*hits, strict=True)
    )
    return Drafts(blocks, equal, near_ties, len(hits), theirs_at, ours_at)


def _hits(draft: Sequence[int], said: Sequence[int]) -> list[bool]:
    return [list(draft[:k]) == list(said[:k]) for k in range(1, len(draft) + 1)]


def pack_block(stored: StoredDrafter, has_fault: bool) -> PackedBlock:
    packed = pack_drafter(stored.config, stored.tensors, torch.float32)
    assert isinstance(packed, PackedBlock)
    if has_fault:
        packed.key_norm_L1D[:] = packed.key_norm_L1D[:1].clone()
    return packed


def make_random(base: Path, head_dim: int, folder: Path) -> tuple[Path, Path]:
    """Returns the folders of a random target and a random DFlash drafter with heads of this size, with the
    tokenizer of `base`."""
    import transformers

    model_path, drafter_path = folder / f"target-{head_dim}", folder / f"drafter-{head_dim}"
    generator = torch.Generator().manual_seed(head_dim)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 2,
        "head_dim": head_dim,
    }
    made = transformers.Qwen3Config(
        vocab_size=load_model_config(base).vocab_size, num_hidden_layers=6, num_key_value_heads=1,
        max_position_embeddings=512, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(made).float()
    randomize(model, generator)
    model.save_pretrained(model_path)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, model_path)
    shape = drafter_shape(load_model_config(model_path), "dflash", block=BlockOptions(num_drafted=5))
    drafter = new_model(shape).initialize(head_dim)
    randomize(drafter, generator)
    save_drafter(drafter_path, drafter, torch.float32)
    return model_path, drafter_path
