"""The files of vLLM's tests that run here: of sampling, logits processors, scheduling, input batches, model
runners and speculative decoding, as far as some of their tests pass on a CPU without a network."""

from __future__ import annotations

FILES = (
    "tests/v1/sample/test_rejection_sampler.py",
    "tests/v1/sample/test_sampler.py",
    "tests/v1/sample/test_thinking_budget_state.py",
    "tests/v1/sample/test_trace_replay_params.py",
    "tests/v1/sample/test_head_dtype.py",
    "tests/v1/logits_processors/test_loader.py",
    "tests/samplers/test_non_finite_params.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_output.py",
    "tests/v1/core/test_worker_slot_overflow.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/worker/test_gpu_input_batch.py",
    "tests/v1/worker/test_gpu_model_runner.py",
    "tests/v1/worker/test_gpu_worker.py",
    "tests/v1/worker/test_gpu_worker_weight_transfer.py",
    "tests/v1/worker/test_logits_processor_loader.py",
    "tests/v1/worker/test_grammar_invalid_drafts.py",
    "tests/v1/worker/test_spec_decode_embed_sharing_pp.py",
    "tests/v1/worker/test_utils.py",
    "tests/v1/spec_decode/test_adaptive_verification.py",
    "tests/v1/spec_decode/test_draft_attention_backend_override.py",
    "tests/v1/spec_decode/test_draft_moe_backend_override.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/spec_decode/test_extract_hidden_states.py",
    "tests/v1/spec_decode/test_llm_base_proposer.py",
    "tests/v1/spec_decode/test_llm_base_proposer_sampling.py",
    "tests/v1/spec_decode/test_ngram.py",
    "tests/v1/spec_decode/test_request_acceptance.py",
    "tests/v1/spec_decode/test_synthetic_rejection_sampler_utils.py",
    "tests/v1/spec_decode/test_vocab_mapping.py",
    "tests/v1/sample/test_sampling_params_e2e.py",
    "tests/v1/e2e/test_cpu_spec_decode.py",
    "tests/v1/sample/test_logprobs.py::test_logprobs_mode",
    "tests/samplers/test_logprobs.py",
    "tests/samplers/test_no_bad_words.py",
    "tests/v1/e2e/general/test_min_tokens.py",
)
"""Those that start engines stand last; one names its function. Of the same folders, others need a GPU, Triton or models of other
families; these take long and draw no token: v1/logits_processors/test_correctness.py (43 tests pass),
v1/sample/test_topk_topp_sampler.py (3; 130 need Triton or a GPU), v1/core/test_prefix_caching.py; and the rest of
v1/sample/test_logprobs.py takes more than ten minutes."""
