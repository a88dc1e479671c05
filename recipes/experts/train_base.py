"""Cuts the Countdown base's MLPs into experts, and trains the result until it solves puzzles again.

    python -m recipes.experts.train_base --out recipes/experts/base --minutes 20 --threads 1

    MLP, 384 neurons ── neurons that are active together (MoEfication, arXiv 2110.01786) ──▶ 8 experts of 48
    router ── mean gate row of an expert's neurons ──▶ 2 experts a token        attention, embedding: as they are

An expert's output is scaled by the number of experts that a token takes: where it takes all, by a router of
zeros, the model computes what the base computes.

Axes: T tokens · N neurons of an MLP · X experts · E hidden size
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from recipes.countdown import train_base as countdown
from recipes.countdown.make_tokenizer import make_tokenizer
from recipes.pretrain import Document, Subject, main, make_parser, save

DENSE = Path(__file__).parents[1] / "countdown" / "base"
MIX = {2: 0.05, 3: 0.5, 4: 0.45}


def write(rng: random.Random, max_chars: int = 1900) -> Document:
    return countdown.document(rng, MIX, skip=0.2, max_chars=max_chars)


def make_writer(args: argparse.Namespace, share: float) -> Callable[[random.Random], Document]:
    return write


def make_config(num_experts: int, top_k: int) -> MixtralConfig:
    """Of the dense model's shape."""
    dense = AutoModelForCausalLM.from_pretrained(DENSE).config
    shared = dense.to_dict() | {"intermediate_size": dense.intermediate_size // num_experts}
    for key in ("architectures", "model_type", "dtype", "transformers_version"):
        shared.pop(key)
    config = MixtralConfig(**shared, num_local_experts=num_experts, num_experts_per_tok=top_k)
    config._experts_implementation = "eager"  # on a CPU faster than grouped products
    return config


# ── from neurons to experts ─────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def upcycle(num_experts: int, top_k: int, num_documents: int = 24) -> PreTrainedModel:
    """Returns the dense model as a mixture of experts, before any training."""
    dense = AutoModelForCausalLM.from_pretrained(DENSE, dtype=torch.float32)
    tensors = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    for layer, activity_TN in enumerate(measure_activity(dense, num_documents)):
        mlp, path = dense.model.layers[layer].mlp, f"model.layers.{layer}.mlp"
        neurons_XN = partition(activity_TN.T, num_experts)
        gate_XNE, up_XNE = mlp.gate_proj.weight[neurons_XN], mlp.up_proj.weight[neurons_XN]
        tensors[f"{path}.experts.gate_up_proj"] = torch.cat([gate_XNE, up_XNE], dim=1)
        tensors[f"{path}.experts.down_proj"] = top_k * mlp.down_proj.weight.T[neurons_XN].transpose(1, 2)
        tensors[f"{path}.gate.weight"] = gate_XNE.mean(1) if top_k < num_experts else 0 * gate_XNE[:, 0]
    model = AutoModelForCausalLM.from_config(make_config(num_experts, top_k))
    model.load_state_dict(tensors)
    return model


def measure_activity(dense: PreTrainedModel, num_documents: int) -> list[Tensor]:
    """Each layer's neurons' contributions to its output, absolute, [T, N]."""
    found: list[list[Tensor]] = [[] for _ in dense.model.layers]
    for kept, layer in zip(found, dense.model.layers, strict=True):
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda down, inputs, kept=kept: kept.append((inputs[0][0] * down.weight.norm(dim=0)).abs())
        )
    rng = random.Random("activity")
    for _ in range(num_documents):
        dense(torch.tensor([write(rng, max_chars=500)[0]]), use_cache=False)
    return [torch.cat(kept) for kept in found]


def partition(rows_NT: Tensor, num_groups: int, num_rounds: int = 20) -> Tensor:
    """Spherical k-means with groups of equal size: the closest pairs of row and centre first. Returns
    [groups, rows of a group]."""
    rows_NT = F.normalize(rows_NT, dim=1)
    num_rows, room = len(rows_NT), len(rows_NT) // num_groups
    centres_XT = rows_NT[torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[:num_groups]]
    for _ in range(num_rounds):
        groups: list[list[int]] = [[] for _ in range(num_groups)]
        taken: set[int] = set()
        for pair in (rows_NT @ centres_XT.T).flatten().argsort(descending=True).tolist():
            row, group = divmod(pair, num_groups)
            if row not in taken and len(groups[group]) < room:
                groups[group].append(row)
                taken.add(row)
        centres_XT = F.normalize(torch.stack([rows_NT[group].mean(0) for group in groups]), dim=1)
    return torch.tensor([sorted(group) for group in groups])


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--experts", type=int, default=8, help="of a layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token takes")
    parser.set_defaults(optimizer="adamw", lr=1e-3, balance=0.01)
    args = parser.parse_args()
    subject = Subject(
        "experts",
        make_tokenizer(),
        lambda args: make_config(args.experts, args.top_k),
        make_writer,
        max_new_tokens=2048,
    )
    if args.init is None:
        args.init = args.out.with_name(f"{args.out.name}-untrained")
        save(upcycle(args.experts, args.top_k), subject, args.init)
    main(subject, args)
