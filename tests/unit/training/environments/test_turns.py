"""A run with turns is the same with speculation on and off, on one rank and two, and after a stop; the update
learns from the policy's tokens alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models.hf.checkpoint_parts import hash_of
from tests.unit.training.environments import parts, tools
from tlt.apps.api import train
from tlt.base.config.load import load_config
from tlt.base.types import Rollout, Turns
from tlt.models.decoder import Transformer
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import load_tensors
from tlt.training.update.logprobs import response_logprobs
from tlt.training.update.micro_batches import Experience

TOOLS = tools.__name__
KINDS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [f"{TOOLS}:add", f"{TOOLS}:look_up"]},
    "game": {"factory": f"{TOOLS}:Game"},
    "echo": {"respond": f"{TOOLS}:echo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.write_model(tmp_path_factory.mktemp("turns") / "model")


def configure(model: Path, folder: Path, kind: str, **more: dict[str, Any]) -> Any:
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + {n}?"}) + "\n" for n in range(4)))
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"name": "data", "data": str(rows)},
        "run": {"num_ranks": 1, "num_steps": 2, "out_dir": str(folder), "device": "cpu", "dtype": "float64"},
        "rollout": {"problems_per_step": 2, "samples_per_problem": 4},
        "sampling": {"max_tokens": 400, "stop": ["</tool_call>"]},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"num_problems": 0},
        "rewards": {"num_workers": 1, "functions": [f"{TOOLS}:score"]},
        "environment": {"max_turns": 4, **KINDS[kind]},
    }
    for section, values in more.items():
        sections[section] = {**sections.get(section, {}), **values}
    return load_config(sections)


def responses(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "responses").glob("**/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def tokens_of(folder: Path) -> list[Any]:
    return [(one["problem_id"], one["sample_index"], one["token_ids"]) for one in responses(folder)]


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_nothing(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it change what the environment is asked."""
    told, asked = [], []
    for speculation in ("off", "ngram:3x2x6"):
        folder, calls = tmp_path / speculation.replace(":", "-"), tmp_path / f"{speculation}.calls"
        calls.touch()
        monkeypatch.setenv("TLT_TEST_CALLS", str(calls))
        config = configure(model, folder, kind, rollout={"speculation": speculation})
        assert train(config).is_finished
        told.append((hash_of(folder / "policy"), tokens_of(folder)))
        asked.append(Counter(calls.read_text().splitlines()))
    assert told[0] == told[1]
    assert asked[0] == asked[1]
    assert told[0][0] != hash_of(model)
    turns = [one["turns"] for one in responses(tmp_path / "off")]
    assert sum(len(one["given"]) for one in turns) > 4
    for one in responses(tmp_path / "off"):
        results = [message for message in one["turns"]["messages"] if message["role"] == "tool"]
        assert one["turns"]["num_calls"] == len(results) or one["finish_reason"] == "length"
    if kind == "tools":
        assert sum(one["num_errors"] for one in turns) > 0
        assert sum(one["num_calls"] for one in turns) > sum(one["num_errors"] for one in turns)
        assert sum(asked[0].values()) <= sum(one["num_calls"] for one in turns)


@pytest.mark.parametrize("speculation", ["off", "ngram:3x1x3"])
def test_the_update_replays_the_experts_of_all_turns(tmp_path: Path, speculation: str) -> None:
    model = parts.write_model(tmp_path / "model", has_experts=True)
    rollout = {"router_replay": True, "speculation": speculation}
    assert train(configure(model, tmp_path / "run", "tools", rollout=rollout)).is_finished
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["update"]["router_gap"] for step in metrics] == [0.0, 0.0]  # NaN: nothing was compared
    assert sum(len(one["turns"]["given"]) for one in responses(tmp_path / "run")) > 4


def test_a_turn_is_the_templates_text_and_the_drawn_tokens_stay(model: Path, tmp_path: Path) -> None:
    """transformers renders the conversation: it is the response's text, token by token."""
    config = configure(model, tmp_path / "run", "tools")
    assert train(config).is_finished
    hf = AutoTokenizer.from_pretrained(model)
    seen = 0
    for one in responses(tmp_path / "run"):
        for first, end in one["turns"]["given"]:
            said = hf.decode(one["token_ids"][first:end])
            ended = hf.decode(one["token_ids"][:first]).endswith("<|im_end|>")
            assert said.startswith("\n<|im_start|>tool\n" if ended else "<|im_end|>\n<|im_start|>tool\n")
            assert said.endswith("<|im_end|>\n<|im_start|>assistant\n")
            seen += 1
        results = [m["content"] for m in one["turns"]["messages"] if m["role"] == "tool"]
        assert all(result in hf.decode(one["token_ids"]) for result in results)
    assert seen > 4


def test_a_last_turn_is_told_to_the_environment_which_may_reward_it(model: Path, tmp_path: Path) -> None:
    listener = {"tools": [], "factory": f"{TOOLS}:Listener", "max_turns": 3}
    config = configure(model, tmp_path / "run", "tools", environment=listener, rewards={"functions": []})
    assert train(config).is_finished
    ended = [one for one in responses(tmp_path / "run") if one["finish_reason"] == "turns"]
    assert ended
    for one in ended:
        assert len(one["turns"]["given"]) == 2
        assert one["reward"] == pytest.approx(0.3)


def some_rollouts() -> list[Rollout]:
    """Of one to six turns."""
    torch.manual_seed(3)
    rollouts = []
    for num_turns in range(1, 7):
        lengths = torch.randint(1, 7, (2 * num_turns - 1,)).tolist()
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        given = tuple((ends[n - 1], ends[n]) for n in range(1, len(lengths), 2))
        ids = tuple(torch.randint(3, 90, (ends[-1],)).tolist())
        prompt = tuple(torch.randint(3, 90, (4,)).tolist())
        turns = Turns(given) if given else None
        rollouts.append(Rollout(str(num_turns), 0, prompt, ids, (0.0,) * len(ids), "stop", 0, turns=turns))
    return rollouts


def is_drawn(rollout: Rollout) -> list[bool]:
    given = rollout.turns.given if rollout.turns else ()
    return [not any(first <= n < end for first, end in given) for n in range(len(rollout.token_ids))]


def test_the_gradient_is_that_of_the_drawn_tokens(model: Path) -> None:
    """Against the same responses read as one turn each, the given tokens left out by hand, and against transformers,
    which takes norms in float32."""
    config, rollouts = load_model_config(model), some_rollouts()
    policy = Transformer(config).double()
    policy.load_state_dict(load_tensors(model, config, torch.float64))

    def gradients(of: torch.nn.Module) -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}
        of.zero_grad()
        return found

    batch = [Experience(rollout, (1.0,) * len(rollout.drawn), True) for rollout in rollouts]
    logprobs_T, _ = response_logprobs(policy, batch, 1.0)
    logprobs_T.sum().backward()
    masked = gradients(policy)
    mask = torch.tensor([one for rollout in rollouts for one in is_drawn(rollout)])
    plain = [replace(rollout, turns=None) for rollout in rollouts]
    whole_T, _ = response_logprobs(policy, [Experience(r, (), True) for r in plain], 1.0)
    assert torch.equal(logprobs_T, whole_T[mask])
    whole_T[mask].sum().backward()
    for name, gradient in gradients(policy).items():
        assert torch.allclose(masked[name], gradient, atol=1e-12), name
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        ids, start = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]]), len(rollout.prompt_ids)
        found_TV = reference(ids).logits[0].log_softmax(-1)[start - 1 : -1]
        found_T = found_TV.gather(1, ids[0, start:, None])[:, 0]
        total = total + found_T[torch.tensor(is_drawn(rollout))].sum()
    total.backward()
    for name, gradient in gradients(reference).items():
        assert torch.allclose(masked[name], gradient, atol=1e-5), name


def test_lengths_advantages_and_loss_weights_count_drawn_tokens() -> None:
    for rollout in some_rollouts():
        one = Experience(rollout, (), True)
        assert one.num_tokens == sum(is_drawn(rollout))
        assert one.num_own == len(rollout.token_ids) - 1
        assert [rollout.token_ids[n] for n in rollout.drawn] == [
            token for token, drawn in zip(rollout.token_ids, is_drawn(rollout), strict=True) if drawn
        ]
