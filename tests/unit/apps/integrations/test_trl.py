"""TRL's GRPOTrainer with our rollout function, and what we rely on in TRL. Skipped where TRL is not
installed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.unit.training.test_live import make_model
from tlt.base.types import UserError
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.hf.module import module_config

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tlt.apps.integrations import trl as integration  # noqa: E402  # after the skips
from tlt.apps.integrations.trl import TLTRollout  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TRL's and transformers' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BASE = Path(__file__).parents[4] / "recipes" / "countdown" / "base"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[{% endif %}{{ tail }}"
METHODS = {
    "_tokenize_prompts": ["self", "prompts"],
    "_get_tool_suffix_ids": ["self", "tool_messages"],
    "_tool_call_loop": [
        "self",
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "logprobs",
        "images",
        "multimodal_fields",
    ],
}
"""Methods of GRPOTrainer that are called or replaced."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "drafter"
    config = module_config(make_model(vocab_size=24))
    save_drafter(folder, new_model(drafter_shape(config)).initialize(1), torch.float32)
    return folder


def rewards(completions: list[Any], **_: Any) -> list[float]:
    texts = [
        completion if isinstance(completion, str) else completion[0]["content"] for completion in completions
    ]
    return [float(sum(character.isdigit() for character in text)) for text in texts]


class Recorder:
    """Passes calls on to a rollout function and keeps what went in and out, with the weights of that
    moment."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output: dict[str, Any] = self.function(prompts, trainer)
        logits = trainer.model(torch.tensor([[1, 5, 6]])).logits.detach()
        about = {"prompts": prompts, "step": trainer.state.global_step, "is_training": trainer.model.training}
        self.calls.append({**output, **about, "logits": logits})
        return output


def make_trainer(folder: Path, rollout_func: Any = None, conversational: bool = False, **changes: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = TEMPLATE
    texts = [f"[{i + 1},2,16:5]" for i in range(4)]
    prompts = [[{"role": "user", "content": text}] for text in texts] if conversational else texts
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 2}
    settings = {
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
    }
    off = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    dataset = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return trl.GRPOTrainer(
        model=make_model(vocab_size=24),
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=trl.GRPOConfig(output_dir=str(folder), **(sizes | settings | off | changes)),
        train_dataset=dataset,
        eval_dataset=dataset,
        rollout_func=rollout_func,
    )


def test_trl_is_as_this_integration_knows_it(tmp_path: Path) -> None:
    """The contract of 1.16: where its names are gone, the range in pyproject.toml must not be widened."""
    assert "rollout_func" in inspect.signature(trl.GRPOTrainer.__init__).parameters
    assert list(inspect.signature(trl.GRPOTrainer._log_metric).parameters) == ["self", "name", "value"]
    source = inspect.getsource(trl.GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in source
    assert '{"prompt_ids", "completion_ids", "logprobs"}' in source
    for method, parameters in METHODS.items():
        assert list(inspect.signature(getattr(trl.GRPOTrainer, method)).parameters) == parameters, method
    trainer = make_trainer(tmp_path)
    for name in (
        "use_vllm",
        "tools",
        "environments",
        "max_tool_calling_iterations",
        "eos_token_ids",
    ):
        assert name in vars(trainer), name
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "max_completion_length",
    ):
        assert name in vars(trainer.args), name
    fixed = {*integration.SAMPLING, *integration.NEUTRAL, *integration.HARMLESS, "eos_token_id"}
    assert set(trainer.generation_kwargs) <= fixed, "TRL's own generation has a setting that we overlook"


@pytest.mark.parametrize("conversational", [False, True])
def test_greedy_completions_are_those_of_trls_own_generation(tmp_path: Path, conversational: bool) -> None:
    trainer = make_trainer(tmp_path, conversational=conversational, generation_kwargs={"do_sample": False})
    prompts = [row["prompt"] for row in trainer.train_dataset]
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    known, _ = trainer._generate_single_turn(prompt_ids, None, {}, 1)
    assert TLTRollout()(prompts, trainer)["completion_ids"] == known


def test_training_uses_one_completion_per_prompt_and_the_weights_of_the_moment(
    tmp_path: Path, drafter: Path
) -> None:
    rollout = TLTRollout(drafter, "learned:3x1x3")
    recorder = Recorder(rollout)
    trainer = make_trainer(tmp_path, recorder)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert [call["step"] for call in recorder.calls] == [0, 1]
    for call in recorder.calls:
        assert len(call["prompts"]) == len(call["completion_ids"]) == 4
        assert call["prompts"][0] == call["prompts"][1]
        assert call["completion_ids"][0] != call["completion_ids"][1], (
            "the same prompt got the same sample twice"
        )
        assert all(len(c) == len(p) for c, p in zip(call["completion_ids"], call["logprobs"], strict=True))
    assert not torch.equal(recorder.calls[0]["logits"], recorder.calls[1]["logits"])
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    rollout(["[1,2,16:5]"], trainer)  # the second step's update is in the engine too
    assert rollout.rollouts is not None
    packed = rollout.rollouts.engine.target
    assert torch.equal(packed.embedding_VE, trainer.model.get_input_embeddings().weight)
    assert packed.version == 2


def test_the_logprobs_are_those_of_trls_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, temperature=0.7)
    output = TLTRollout()(["[1,2,16:5]"], trainer)
    prompt, completion = output["prompt_ids"][0], output["completion_ids"][0]
    ids = torch.tensor([prompt + completion])
    known, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), len(completion)
    )
    found = torch.tensor(output["logprobs"][0], dtype=torch.float64)
    torch.testing.assert_close(
        found, known[0].detach().double(), rtol=1e-5, atol=1e-5
    )  # transformers rotates in float32


def completions(folder: Path, rollout: Any, **changes: Any) -> list[list[list[int]]]:
    recorder = Recorder(rollout)
    make_trainer(folder, recorder, **changes).train()
    return [call["completion_ids"] for call in recorder.calls]


def test_speculation_changes_neither_completions_nor_what_is_learned(tmp_path: Path, drafter: Path) -> None:
    plain = completions(tmp_path / "off", TLTRollout(speculation="off"), max_steps=3)
    drafted = completions(tmp_path / "on", TLTRollout(drafter, "learned:3x2x6", idle_share=0.5), max_steps=3)
    assert drafted == plain
    assert len(plain) == 3


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(tmp_path: Path, drafter: Path) -> None:
    # in order, for TRL itself shuffles otherwise after a resume beyond the first epoch
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "shuffle_dataset": False}
    whole = completions(tmp_path / "run", TLTRollout(drafter), **changes)
    assert (tmp_path / "run" / "checkpoint-2" / "drafter" / "model.safetensors").exists()
    recorder = Recorder(TLTRollout(drafter))
    trainer = make_trainer(tmp_path / "run", recorder, **changes)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [call["step"] for call in recorder.calls] == [2, 3]
    assert [call["completion_ids"] for call in recorder.calls] == whole[2:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty: is 1.1, .* set it to 1.0"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams: is 4, .* set it to 1"),
        ({"generation_kwargs": {"typical_p": 0.9}}, "typical_p: is 0.9, .* remove it"),
    ],
)
def test_what_would_change_the_law_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        integration.sampling_params(make_trainer(tmp_path, **changes))


def test_the_law_is_that_of_the_trainers_arguments(tmp_path: Path) -> None:
    given = {
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 9,
        "generation_kwargs": {"top_p": 0.7},
    }
    params = integration.sampling_params(make_trainer(tmp_path, **given))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 5, 0.7, 0.1)
    assert (params.max_tokens, params.seed) == (12, 9)
    assert params.stop_ids == (2,)


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "version_of", lambda name: "1.17.2")
    with pytest.raises(UserError, match=r"trl: 1.17.2 is installed.*pip install 'trl"):
        TLTRollout()
