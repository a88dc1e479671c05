"""What TLT replaces or calls of vLLM's inside is where it was: a release that has moved any of it fails here,
by name, before a server samples by another law.

`python -m tests.vllm.test_seam FOLDER` looks the same up in another release's sources, without installing
them: FOLDER holds its `vllm/`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPLACED = """
engine/arg_utils.py
    EngineArgs.create_engine_config(self)
platforms/cpu.py
    CpuPlatform.register_triton_kernel_overrides(cls)
v1/engine/input_processor.py
    InputProcessor.process_inputs(self, request_id)
v1/worker/gpu_worker.py
    Worker.load_model(self)
    Worker.get_draft_model(self)
    Worker.update_weights(self, update_info)
    Worker.finish_weight_update(self)
v1/worker/gpu_model_runner.py
    GPUModelRunner.propose_draft_token_ids(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states)
    GPUModelRunner._input_fits_in_drafter(self, common_attn_metadata)
v1/sample/sampler.py
    Sampler.forward(self, logits, sampling_metadata, predict_bonus_token)
    Sampler.apply_logits_processors(self, logits, sampling_metadata, predict_bonus_token)
    Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
v1/sample/rejection_sampler.py
    RejectionSampler.forward(self, metadata, draft_probs, logits, sampling_metadata)
    RejectionSampler.apply_logits_processors(self, logits, sampling_metadata, metadata)
v1/core/sched/scheduler.py
    Scheduler.schedule(self)
    Scheduler.update_from_output(self, scheduler_output, model_runner_output)
v1/spec_decode/llm_base_proposer.py
    *._sample_draft_tokens(self, hidden_states)
    *.propose(self, num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, next_token_ids, token_indices_to_sample, common_attn_metadata, sampling_metadata)
model_executor/models/qwen3_dflash.py
    DFlashQwen3Model._normalize_context_k(self, all_k)
    DFlashQwen3Model._build_fused_kv_buffers(self)
    DFlashQwen3ForCausalLM._read_mask_embedding(self)
    DFlashQwen3ForCausalLM.precompute_and_store_context_kv(self, context_states, context_positions, context_slot_mapping)
    DFlashQwen3ForCausalLM.combine_hidden_states(self, hidden_states)
v1/worker/gpu/sample/logits_processor/interface.py
    LogitsProcessor.add_request(self, req_idx, sampling_params)
    LogitsProcessor.apply_staged_writes(self)
    LogitsProcessor.apply(self, logits, ctx)
v1/worker/gpu/spec_decode/speculator.py
    *.sample_draft(self, hidden_states, sample_src_positions, idx_mapping)
    *.compute_draft_logits(self, hidden_states, spec_step_idx)
    DraftModelSpeculator._build_attn_metadata(self, num_reqs, batch_desc, query_start_loc_np, seq_lens_cpu_upper_bound, step)
v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py
    TargetDependentARSpeculator.propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled)
    TargetDependentARSpeculator._run_model(self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp)
v1/worker/gpu/model_runner.py
    GPUModelRunner.prepare_attn(self, input_batch)
v1/worker/gpu/block_table.py
    BlockTables.gather_block_tables(self, idx_mapping, num_reqs_padded)
    BlockTables.compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded)
v1/worker/gpu/attn_utils.py
    build_slot_mappings_by_layer(slot_mappings, kv_cache_config)
model_executor/model_loader/reload/layerwise.py
    initialize_layerwise_reload(model)
    get_layerwise_info(layer)
model_executor/layers/utils.py
    dispatch_cpu_unquantized_gemm(layer, remove_weight)
"""
"""Files, and in each the functions with their first parameters. `*` stands for any class."""

READ = """
v1/core/sched/scheduler.py
    self.dynamic_sd_lookup | self.num_spec_tokens | request.spec_token_ids | request.spec_decode_metrics
    self.spec_decode_metrics_level | self.log_stats
v1/core/sched/output.py
    scheduled_spec_decode_tokens | num_scheduled_tokens | scheduled_new_reqs | preempted_req_ids
    num_spec_tokens_to_schedule
v1/outputs.py
    req_id_to_index | sampled_token_ids | class LogprobsTensors
v1/worker/gpu_input_batch.py
    num_tokens_no_spec | self.generators | self.token_ids_cpu | self.num_computed_tokens_cpu
v1/spec_decode/llm_base_proposer.py
    self.needs_extra_input_slots | self.supports_mm_inputs | self.max_num_tokens | self.block_size
model_executor/models/qwen3_dflash.py
    self._k_norm_weights | self._rms_norm_eps | self._fused_kv_weight | self._hidden_norm_weight
    [a.qkv_proj.weight[a.q_size :] for a in layers_attn]
v1/worker/gpu_model_runner.py
    self.rejection_sampler | self.sampler | self.drafter | max_num_reqs
    self.effective_drafter_max_model_len
v1/spec_decode/metadata.py
    num_draft_tokens | draft_token_ids | max_spec_len | target_logits_indices | bonus_logits_indices
v1/worker/gpu/sample/logits_processor/interface.py
    expanded_idx_mapping | pos
v1/worker/gpu/model_runner.py
    draft_tokens = self.speculator.propose( | num_speculative_tokens=num_spec_tokens,
    num_spec_tokens = self.execute_model_state.num_spec_tokens_to_schedule | self.req_states
    self.max_num_reqs | self.max_model_len
v1/worker/gpu/states.py
    self.all_token_ids
v1/worker/gpu/input_batch.py
    idx_mapping_np | query_start_loc_np | num_computed_tokens_np | is_prefilling_np | num_scheduled_tokens
    self.seq_lens | self.query_start_loc
v1/worker/gpu/spec_decode/speculator.py
    self.draft_tokens | self.draft_max_seq_len | self.max_num_tokens | self.supports_mm_inputs
    self.enable_adaptive_verification | self.block_tables | self.kv_cache_config | self.input_buffers
v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py
    self.draft_tokens[:num_reqs].fill_(-1) | self.hidden_states[:num_tokens_padded].copy_(hidden_states)
    self.model.combine_hidden_states
v1/worker/gpu/cudagraph_utils.py
    class BatchExecutionDescriptor
config/speculative.py
    num_speculative_tokens_per_batch_size | def use_eagle
model_executor/model_loader/reload/layerwise.py
    finalize_layerwise_reload
model_executor/model_loader/reload/__init__.py
    finalize_layerwise_reload
config/observability.py
    per_request_spec_decode_metrics
"""
"""Files, and in each the attributes that TLT reads or writes."""


def moved(root: Path) -> list[str]:
    """Returns what is not where TLT looks for it. root: the folder of vLLM's sources."""
    found = []
    for file, functions in _by_file(REPLACED):
        known = dict(_functions(root / file))
        for function in functions:
            name, _, parameters = function.removesuffix(")").partition("(")
            wanted = parameters.split(", ")
            takes = known.get(name) or next(
                (one for key, one in known.items() if name[0] == "*" and key.endswith(name[1:])), None
            )
            if takes is None:
                found.append(f"{file}: {name} is gone")
            elif takes[: len(wanted)] != wanted:
                found.append(f"{file}: {name} takes {', '.join(takes)}; TLT knows {', '.join(wanted)}")
    for file, words in _by_file(READ):
        text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
        found += [f"{file}: {word} is gone" for word in words if word not in text]
    return found


def _by_file(table: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"\n(?! )", table.strip()):
        file, *lines = part.splitlines()
        yield file, [entry for line in lines for entry in line.strip().split(" | ")]


def _functions(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of a file's functions and methods, with their parameters."""
    if not file.is_file():
        return
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                yield prefix + one.name, [a.arg for a in (*one.args.posonlyargs, *one.args.args)]


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make vllm-test"
)
def test_the_seam_is_where_it_was() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert moved(Path(spec.origin).parent) == []


def test_what_has_moved_is_named(tmp_path: Path) -> None:
    file = tmp_path / "v1/core/sched/scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "class Scheduler:\n    def schedule(self): ...\n    def update_from_output(self, out): ...\n"
    )
    found = moved(tmp_path)
    assert "v1/core/sched/scheduler.py: self.dynamic_sd_lookup is gone" in found
    assert "v1/worker/gpu_worker.py: Worker.load_model is gone" in found
    assert [line for line in found if "scheduler.py: Scheduler.update_from_output takes self, out;" in line]
    assert not [line for line in found if "Scheduler.schedule is" in line]


if __name__ == "__main__":
    lines = moved(Path(sys.argv[1]) / "vllm")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(bool(lines))
