"""Pretrains a small model on generated documents, from nothing. Knows neither what they say nor reinforcement
learning.

A recipe's own script says what is learned (a `Subject`) and calls `main`:

    python -m recipes.countdown.train_base --out DIR --minutes 35
    torchrun --nproc-per-node 2 -m recipes.math.train_base ...         # one process for each core or GPU

Documents are drawn fresh, never repeated. Documents of like length share a batch, one to a row, so that no
time goes into padding or into attention across documents; positions start at 0 as they do when the model
generates. The loss skips the prompt, which is random.

The learning rate follows the share of the wall-clock (or token) budget that is spent, so a run ends on
time on any machine. On a CPU, single-threaded processes that meet once a step are far faster than threads
that meet in every operation, above all on a shared machine. Matrices are trained by Muon, the rest by
AdamW.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

#: Labels the loss skips.
IGNORE = -100
#: Queries in a block of attention.
BLOCK = 128

Document = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@dataclass(frozen=True)
class Subject:
    """What a recipe's model learns."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    make_config: Callable[[argparse.Namespace], PretrainedConfig]
    make_writer: Callable[[argparse.Namespace, float], Callable[[random.Random], Document]]
    """Given the options and the share of the budget that is spent (the curriculum), returns what draws a
    document."""
    max_new_tokens: int
    """Longest response, for the checkpoint's generation_config.json."""


# ------------------------------------------------------------------------------------------------------------
# Data


def batches(
    subject: Subject, args: argparse.Namespace, progress: Progress, rank: int, num_processes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels, each (rows, length), of about `micro_tokens` tokens; documents of like length
    together.

    All processes draw the same documents; each takes its own of every `num_processes` batches of like
    length, so that none waits long for another.
    """
    rng = random.Random(f"{subject.name} base {args.seed}")
    while True:
        write = subject.make_writer(args, progress.share)
        pool = [write(rng) for _ in range(args.pool)]
        pool.sort(key=lambda item: len(item[0]))
        groups: list[list[Document]] = [[]]
        for item in pool:
            if (len(groups[-1]) + 1) * len(item[0]) > args.micro_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(item)
        starts = list(range(0, len(groups) - num_processes + 1, num_processes))
        rng.shuffle(starts)
        for start in starts:
            yield to_tensors(groups[start + rank], subject.tokenizer.pad_token_id)


def to_tensors(group: list[Document], pad_id: int) -> tuple[Tensor, Tensor]:
    length = math.ceil(max(len(ids) - 1 for ids, _ in group) / 16) * 16
    inputs = torch.full((len(group), length), pad_id)
    labels = torch.full((len(group), length), IGNORE)
    for row, (ids, num_prompt) in enumerate(group):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, num_prompt - 1 : len(ids) - 1] = torch.tensor(ids[num_prompt:])
    return inputs, labels


# ------------------------------------------------------------------------------------------------------------
# Model and optimizers


def blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention by blocks of queries: on a CPU, in bf16, faster than PyTorch's own kernel at these
    sizes.

    query is (B, H, T, D), key and value are (B, K, T, D); returns (B, T, H, D). Right padding needs no
    mask: no token looks to its right.
    """
    B, H, T, D = query.shape
    K = key.shape[1]
    key, value = key.reshape(B * K, T, D), value.reshape(B * K, T, D)
    blocks = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        causal = (
            torch.full((stop - start, stop), -math.inf, dtype=query.dtype).triu(start + 1).repeat(H // K, 1)
        )
        block = query[:, :, start:stop].reshape(B * K, -1, D)
        scores = torch.baddbmm(causal, block, key[:, :stop].transpose(1, 2), alpha=scaling)
        blocks.append(torch.bmm(scores.softmax(-1), value[:, :stop]).reshape(B, H, stop - start, D))
    return torch.cat(blocks, 2).transpose(1, 2), None


def make_model(subject: Subject, args: argparse.Namespace) -> PreTrainedModel:
    AttentionInterface.register("blockwise", blockwise_attention)
    config = subject.make_config(args)
    config._attn_implementation = "blockwise" if args.device == "cpu" else "sdpa"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(args.device)
    if args.init is not None:
        model.load_state_dict(
            AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict()
        )
    return model


def make_optimizers(model: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if args.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)]
    return [
        torch.optim.Muon(
            matrices, lr=args.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save(model: PreTrainedModel, subject: Subject, out: Path) -> None:
    """A Hugging Face checkpoint in bf16; the weights are replaced last and at once, so a reader never sees
    half."""
    out.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(out.name + ".partial")
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    copy.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=subject.max_new_tokens,
        pad_token_id=subject.tokenizer.pad_token_id,
        bos_token_id=subject.tokenizer.bos_token_id,
        eos_token_id=subject.tokenizer.eos_token_id,
    )
    copy.save_pretrained(staging)
    subject.tokenizer.save_pretrained(staging)
    for file in sorted(staging.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        os.replace(file, out / file.name)
    staging.rmdir()


# ------------------------------------------------------------------------------------------------------------
# The run


class Progress:
    """How much of the budget is spent, in minutes of wall-clock or in tokens; all processes agree on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.minutes, self.max_tokens = args.minutes, args.tokens
        self.start = time.perf_counter()
        self.num_tokens, self.loss_sum, self.share = 0.0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def spend(self, num_tokens: float, loss_sum: float, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.loss_sum += loss_sum
        self.share = self.num_tokens / self.max_tokens if self.max_tokens else seconds / (60 * self.minutes)


def schedule(share: float) -> float:
    """Share of the peak learning rate: a linear warm-up over 2 % of the budget, then linear to nothing."""
    return max(0.0, min((share + 1e-4) / 0.02, (1 - share) / 0.98))


def sum_over_processes(model: nn.Module, counts: Tensor) -> Tensor:
    """Sums gradients in place, and `counts`, in one collective; nothing to do alone."""
    if dist.is_initialized():
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in gradients), counts])
        dist.all_reduce(flat)
        *pieces, counts = flat.split([*(g.numel() for g in gradients), counts.numel()])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
    return counts


def imbalance(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Switch's auxiliary loss (arXiv 2101.03961, eq. 4), a layer at a time: 1 where each expert has as many
    tokens as the others."""
    losses = []
    for logits_NX in router_logits:
        shares_NX = logits_NX.float().softmax(-1)
        taken = shares_NX.topk(top_k).indices.flatten().bincount(minlength=shares_NX.shape[1])
        losses.append(shares_NX.shape[1] * (shares_NX.mean(0) * taken / taken.sum()).sum())
    return torch.stack(losses).mean()


def train(subject: Subject, args: argparse.Namespace) -> None:
    rank, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(args.seed)
    model = make_model(subject, args)
    optimizers = make_optimizers(model, args)
    progress = Progress(args)
    stream = batches(subject, args, progress, rank, num_processes)
    if rank == 0:
        print(
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {vars(args)}", flush=True
        )
    step, saved_at, printed_at, loss_at, tokens_at = 0, 0.0, 0.0, 0.0, 0.0
    while progress.share < 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * schedule(progress.share)
        loss_sum, num_tokens = 0.0, 0
        for _ in range(args.accumulate):
            inputs, labels = (t.to(args.device) for t in next(stream))
            with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
                found = model(input_ids=inputs, use_cache=False, output_router_logits=bool(args.balance))
            total = F.cross_entropy(found.logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            loss = total / args.micro_tokens
            if args.balance:
                loss = loss + args.balance * imbalance(found.router_logits, model.config.num_experts_per_tok)
            (loss / (args.accumulate * num_processes)).backward()
            loss_sum += float(total.detach())
            num_tokens += int((labels != IGNORE).sum())
        counts = torch.tensor([num_tokens, loss_sum, progress.seconds], device=args.device)
        counts = sum_over_processes(model, counts)
        progress.spend(float(counts[0]), float(counts[1]), float(counts[2]) / num_processes)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if rank == 0 and step % args.print_every == 0:
            tokens = progress.num_tokens - tokens_at
            print(
                f"step {step:5d}  {progress.share:6.1%}  {progress.num_tokens / 1e6:6.2f} M tokens  "
                f"loss {(progress.loss_sum - loss_at) / tokens:.4f}  "
                f"{tokens / (progress.seconds - printed_at):6.0f} tokens/s",
                flush=True,
            )
            printed_at, loss_at, tokens_at = progress.seconds, progress.loss_sum, progress.num_tokens
        if rank == 0 and progress.seconds - saved_at > args.checkpoint_every:
            save(model, subject, args.out)
            saved_at = progress.seconds
    if rank == 0:
        save(model, subject, args.out)
        print(
            f"done: {step} steps, {progress.num_tokens / 1e6:.2f} M tokens, {progress.seconds / 60:.1f} "
            "minutes"
        )


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the options that all subjects share; a subject adds its own and sets its defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--init", type=Path, help="go on from this checkpoint (of the same shape)")
    parser.add_argument("--minutes", type=float, default=35, help="wall-clock budget")
    parser.add_argument(
        "--tokens", type=float, default=0, help="token budget; when given it replaces --minutes"
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument(
        "--curriculum", type=float, default=0.4, help="share of the budget until the hardest appear"
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--balance", type=float, default=0, help="weight of the loss that balances experts")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="padded tokens in a forward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes of a process in a step")
    parser.add_argument(
        "--pool", type=int, default=1000, help="documents drawn at a time and sorted by length"
    )
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=float, default=120, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for PyTorch's choice")
    parser.add_argument(
        "--autocast", action=argparse.BooleanOptionalAction, default=True, help="bf16 where it is safe"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(subject: Subject, args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
        if args.device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(subject, args)


def weights(text: str) -> dict[int, float]:
    """Reads `2:0.05,3:0.5,4:0.45`."""
    return {int(count): float(weight) for count, weight in (part.split(":") for part in text.split(","))}
