"""Does `tlt plan memory` say what a run takes? Shapes whose memory lies in different parts, and small models
of families that transformers computes, each trained for two steps.

    python -m benchmarks.scale.memory --out benchmarks/results/plan-memory

A shape is a random model with the tokenizer of the recipe `math`; no token ends a response, so all have
the length that is planned for. Planned is the largest phase of one rank, measured the largest resident set
of its process.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_of, make_parser
from benchmarks.largest import largest_mib
from benchmarks.report import environment, markdown, number, table, write_report
from tlt.apps.cli.plan import PlanMemory, planned_run
from tlt.apps.plan.memory import plan_memory
from tlt.base.config.load import load_config
from tlt.base.io.recipes import find_recipe
from tlt.drafter.formats.folder import save_drafter
from tlt.drafter.forms import new_model
from tlt.drafter.shape import drafter_shape
from tlt.models.decoder import randomize_matrices
from tlt.models.hf.families import load_model_config
from tlt.models.hf.weights import save_model
from tlt.models.new import new_transformer
from tlt.training.build.problems import load_problems

GIB = 2**30
TOLERANCE = 0.15


@dataclass(frozen=True)
class Shape:
    """model: changes to config.json of the recipe's model.
    keys: of the run.
    drafter: whether one is trained."""

    name: str
    model: dict[str, Any]
    keys: dict[str, Any]
    drafter: bool = False


LONG = {"sampling.max_tokens": 440, "rollout.problems_per_step": 2, "rollout.samples_per_problem": 6}
LONG |= {"algorithm.tokens_per_micro_batch": 2048}

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

SHAPES = (
    Shape(
        "weights",
        {
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "head_dim": 64,
        },
        {"sampling.max_tokens": 128, "rollout.problems_per_step": 2, "rollout.samples_per_problem": 4},
    ),
    Shape(
        "activations",
        {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "head_dim": 32,
        },
        {"sampling.max_tokens": 440, "rollout.problems_per_step": 2, "rollout.samples_per_problem": 6},
    ),
    Shape(
        "vocabulary, drafter and caches",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "head_dim": 32,
        }
        | {"num_key_value_heads": 8, "vocab_size": 32768},
        {"sampling.max_tokens": 440, "rollout.problems_per_step": 4, "rollout.samples_per_problem": 8}
        | {
            "rollout.speculation": "adaptive",
            "drafter.train": True,
            "algorithm.tokens_per_micro_batch": 1024,
        },
        drafter=True,
    ),
    Shape("Qwen3-MoE", QWEN3_MOE, LONG),
    Shape("LoRA of Qwen3-MoE", QWEN3_MOE, LONG | {"lora.rank": 8, "lora.alpha": 16}),
    Shape(
        "Gemma 3",
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 64,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
            "rope_parameters": {
                kind: {"rope_theta": 10000.0, "rope_type": "default"}
                for kind in ("sliding_attention", "full_attention")
            },
        },
        LONG,
    ),
    Shape(
        "gpt-oss",
        {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        LONG,
    ),
)


def parity(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Rewards responses unlike, so that each has a gradient."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def endless_copy(model: Path, folder: Path, window: int) -> None:
    """Copies a checkpoint whose responses end at their limit alone: its stop token is the padding token,
    which no model is trained to write."""
    shutil.copytree(model, folder)
    stop = json.loads((folder / "config.json").read_text())["pad_token_id"]
    change_json(folder / "config.json", {"max_position_embeddings": window})
    change_json(folder / "generation_config.json", {"eos_token_id": stop})


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Changes values of a JSON file; one that does not exist is made."""
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def make_model(shape: Shape, folder: Path) -> Path:
    """Writes a random model of this shape, whose responses never end by themselves."""
    endless_copy(find_recipe("math").parent / "base", folder, 1024)
    path = folder / "config.json"
    change_json(path, shape.model)
    config = load_model_config(folder)
    extra = {key: value for key, value in json.loads(path.read_text()).items() if key.endswith("_token_id")}
    assert extra
    model = new_transformer(config)
    randomize_matrices(model, 0)
    save_model(folder / "random", config, model.state_dict(), dtype=torch.float32, source=folder)
    (folder / "random" / "generation_config.json").write_bytes(
        (folder / "generation_config.json").read_bytes()
    )
    return folder / "random"


def words(shape: Shape, folder: Path) -> list[str]:
    """Returns the overrides of a run of two steps."""
    model = make_model(shape, folder / "model")
    keys = {
        "model.path": model,
        "run.out_dir": folder / "run",
        "run.num_ranks": 1,
        "run.num_steps": 2,
        "run.checkpoint_every": 0,
        "run.device": "cpu",
        "rollout.speculation": "off",
        "evaluation.num_problems": 0,
        "optimizer.learning_rate": 1e-6,
        "rewards.functions": "benchmarks.scale.memory:parity",
        "rewards.num_workers": 0,
        **shape.keys,
    }
    if shape.drafter:
        drafter = new_model(drafter_shape(load_model_config(model))).initialize(0)
        save_drafter(folder / "drafter", drafter, torch.float32, {"preset": "hass"})
        keys["drafter.path"] = folder / "drafter"
    return [
        word
        for key, value in keys.items()
        for word in (f"--{key}", str(value).lower() if value is True else str(value))
    ]


def run_shape(shape: Shape, measured: float | None = None) -> dict[str, Any]:
    """Returns what was planned for a shape and what its rank took, in GiB. measured: by an earlier run;
    None: it is run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = words(shape, folder)
        problems = load_problems(load_config(find_recipe("math"), overrides), "train")
        longest = max(len(problem.prompt_ids) for problem in problems)
        options = PlanMemory(config=find_recipe("math"), overrides=tuple(overrides), prompt_tokens=longest)
        plan = plan_memory(planned_run(options))
        phase, planned = plan.peak
        measured = largest_mib("tlt", "train", "math", *overrides) / 1024 if measured is None else measured
    parts = {term.name: term.num_bytes / GIB for term in plan.terms if phase in term.phases}
    return {
        "shape": shape.name,
        "planned_gib": planned / GIB,
        "measured_gib": measured,
        "ratio": planned / GIB / measured,
        "phase": phase,
        "parts": parts,
    }


def to_markdown(report: dict[str, Any]) -> str:
    keys = ("planned_gib", "measured_gib", "ratio")
    rows = [[run["shape"], run["phase"], *(number(run[key]) for key in keys)] for run in report["runs"]]
    columns = ["memory lies in", "largest phase", "planned, GiB", "measured, GiB", "planned / measured"]
    return markdown("Memory, planned and measured", report, table(columns, rows))


def main() -> None:
    parser = make_parser("scale.memory", __doc__)
    parser.add_argument(
        "--shapes", default=",".join(shape.name for shape in SHAPES), help="which, by the first word"
    )
    parser.add_argument(
        "--replan", action="store_true", help="plans anew, and takes what was measured from OUT.json"
    )
    options = parser.parse_args()
    known = json.loads(options.out.with_suffix(".json").read_text())["runs"] if options.replan else []
    before = {run["shape"]: run["measured_gib"] for run in known}
    report: dict[str, Any] = {"command": command_of(parser), "environment": environment(), "runs": []}
    for shape in SHAPES:
        if shape.name.split(",")[0] in options.shapes:
            report["runs"].append(run_shape(shape, before.get(shape.name)))
            print(json.dumps(report["runs"][-1]), flush=True)
            write_report(options.out, report, to_markdown(report))
    if any(abs(run["ratio"] - 1) > TOLERANCE for run in report["runs"]):
        sys.exit(f"planned and measured differ by more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
