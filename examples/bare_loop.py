"""GRPO in a loop of one's own, around TLT's engine, drafter and work queue. From the repository's root:

python examples/bare_loop.py
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bare_loop.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import tlt
from tlt.tasks.countdown import TASK

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="recipes/countdown/base")
parser.add_argument("--drafter", default="recipes/countdown/drafter")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--group", type=int, default=8)
parser.add_argument("--max-tokens", type=int, default=512)
args = parser.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rollouts = tlt.LiveRollouts(model, tlt.LiveSettings(drafter=args.drafter, speculation="adaptive"))
params = tlt.SamplingParams(
    temperature=1.0, max_tokens=args.max_tokens, stop_ids=(tokenizer.eos_token_id,), seed=0
)

for step in range(args.steps):
    problems = [
        p for p in TASK.problems(4 * num_ranks, seed=step)[rank::num_ranks] for _ in range(args.group)
    ]
    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    responses = rollouts.generate(prompts, params, step)  # with the model's weights of this moment
    texts = tokenizer.batch_decode([response.token_ids for response in responses], skip_special_tokens=True)
    rewards = torch.tensor([TASK.score(p, text)["reward"] for p, text in zip(problems, texts, strict=True)])
    groups = rewards.view(-1, args.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    num_tokens = sum(len(response.token_ids) for response in responses)
    for response, advantage in zip(responses, advantages, strict=True):
        ids = torch.tensor([response.prompt_ids + response.token_ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        (-advantage * logprobs[len(response.prompt_ids) - 1 :].sum() / num_tokens / num_ranks).backward()
    if num_ranks > 1:
        [dist.all_reduce(parameter.grad) for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step} rank {rank}: reward {rewards.mean():.3f}, accept length {rollouts.stats.accept_length}",
        flush=True,
    )

rollouts.close()
if num_ranks > 1:
    dist.destroy_process_group()
