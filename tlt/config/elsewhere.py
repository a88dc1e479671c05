"""Other trainers' names of what our keys say: an unknown key is told ours, and docs/coming-from.md shows the
table."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Known:
    """A key of ours, with its names in other trainers; empty: it has none there. Several stand with spaces
    between."""

    ours: str
    trl: str = ""
    """Of TRL's GRPOConfig and its script's options."""
    verl: str = ""
    prime_rl: str = ""
    openrlhf: str = ""
    note: str = ""
    """How the value differs."""


TRAINERS = {"trl": "TRL", "verl": "verl", "prime_rl": "prime-rl", "openrlhf": "OpenRLHF"}

KNOWN = (
    Known("model.path", "model_name_or_path", "actor_rollout_ref.model.path", "model.name", "pretrain"),
    Known("model.chat_template_kwargs", "chat_template_kwargs", "data.apply_chat_template_kwargs"),
    Known("task.data", "dataset_name", "data.train_files", "", "prompt_data"),
    Known("task.subset", "dataset_config"),
    Known("task.split", "dataset_train_split", "", "", "prompt_split"),
    Known("task.columns", "", "data.prompt_key", "", "input_key label_key", 'by ours: {prompt = "question"}'),
    Known("task.name", "", "", "env.id", note="tlt task --help lists the tasks that come along"),
    Known("evaluation.data", "", "data.val_files", "", "eval_dataset"),
    Known("rewards.functions", "reward_funcs", "custom_reward_function.path", "", "remote_rm_url"),
    Known("rewards.weights", "reward_weights"),
    Known(
        "rollout.problems_per_step",
        "generation_batch_size per_device_train_batch_size",
        "data.train_batch_size",
        "orchestrator.batch_size",
        "rollout_batch_size",
        "problems, on all devices together; TRL and prime-rl count responses",
    ),
    Known(
        "rollout.samples_per_problem",
        "num_generations",
        "actor_rollout_ref.rollout.n",
        "orchestrator.rollouts_per_example",
        "n_samples_per_prompt",
    ),
    Known(
        "sampling.max_tokens",
        "max_completion_length max_new_tokens",
        "data.max_response_length",
        "orchestrator.sampling.max_tokens",
        "generate_max_len",
        "of a response, without its prompt",
    ),
    Known("sampling.temperature", "", "actor_rollout_ref.rollout.temperature"),
    Known("rollout.engine", "use_vllm vllm_mode", "actor_rollout_ref.rollout.name", note="tlt or vllm"),
    Known(
        "vllm.tensor_parallel",
        "vllm_tensor_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "",
        "vllm_tensor_parallel_size",
    ),
    Known(
        "rollout.kv_gib",
        "vllm_gpu_memory_utilization",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "",
        "vllm_gpu_memory_utilization",
        "in GiB, of the caches alone",
    ),
    Known("algorithm.name", "loss_type", "algorithm.adv_estimator", "", "advantage_estimator"),
    Known("algorithm.advantage", "scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
    Known("algorithm.ratio", "importance_sampling_level"),
    Known("algorithm.aggregation", "", "actor_rollout_ref.actor.loss_agg_mode"),
    Known("algorithm.clip_low", "epsilon", "actor_rollout_ref.actor.clip_ratio_low", "", "eps_clip"),
    Known("algorithm.clip_high", "epsilon_high", "actor_rollout_ref.actor.clip_ratio_high"),
    Known(
        "algorithm.kl_coefficient",
        "beta",
        "actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
        "",
        "init_kl_coef",
    ),
    Known("algorithm.kl_in", "", "algorithm.use_kl_in_reward", "", "use_kl_loss", "loss or reward"),
    Known(
        "algorithm.kl_estimator",
        "",
        "actor_rollout_ref.actor.kl_loss_type",
        "",
        "kl_estimator",
        "k1, k2 or k3",
    ),
    Known("algorithm.kl_bias_correction", "use_bias_correction_kl"),
    Known("algorithm.mask_truncated", "mask_truncated_completions"),
    Known(
        "algorithm.overlong_buffer_tokens", "", "reward_model.overlong_buffer.len", "", "overlong_buffer_len"
    ),
    Known("algorithm.dynamic_sampling", "", "algorithm.filter_groups.enable", "", "dynamic_filtering"),
    Known("algorithm.epochs", "num_iterations", "actor_rollout_ref.actor.ppo_epochs", "", "max_epochs"),
    Known(
        "algorithm.minibatches",
        "steps_per_generation gradient_accumulation_steps",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "",
        "train_batch_size",
        "how many updates a step makes; the others give a batch's size",
    ),
    Known(
        "algorithm.tokens_per_micro_batch",
        "",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "",
        "micro_train_batch_size",
        "in tokens",
    ),
    Known("algorithm.importance_correction_cap", "vllm_importance_sampling_cap"),
    Known(
        "optimizer.learning_rate",
        "",
        "actor_rollout_ref.actor.optim.lr",
        "trainer.optim.lr",
        "actor_learning_rate",
    ),
    Known("optimizer.schedule", "lr_scheduler_type", "", "", "lr_scheduler"),
    Known("optimizer.warmup_steps", "", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
    Known("optimizer.beta1", "adam_beta1"),
    Known("optimizer.beta2", "adam_beta2"),
    Known("optimizer.eps", "adam_epsilon"),
    Known(
        "optimizer.clip_grad_norm",
        "max_grad_norm",
        "actor_rollout_ref.actor.grad_clip",
        "trainer.optim.max_norm",
        "max_norm",
    ),
    Known("lora.rank", "lora_r", "actor_rollout_ref.model.lora_rank", "", "lora_rank"),
    Known("lora.alpha", "lora_alpha", "actor_rollout_ref.model.lora_alpha", "", "lora_alpha"),
    Known(
        "lora.targets", "lora_target_modules", "actor_rollout_ref.model.target_modules", "", "target_modules"
    ),
    Known(
        "parallel.checkpoint_activations",
        "gradient_checkpointing",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "",
        "gradient_checkpointing",
    ),
    Known("run.num_steps", "max_steps", "trainer.total_training_steps", "max_steps", "num_episodes"),
    Known("run.out_dir", "output_dir", "trainer.default_local_dir", "output_dir", "save_path"),
    Known(
        "run.dtype", "bf16", "actor_rollout_ref.rollout.dtype", "", "bf16", "of the engine: auto, bfloat16 …"
    ),
    Known("run.num_ranks", "", "trainer.n_gpus_per_node", note="auto: every GPU"),
    Known("run.checkpoint_every", "save_steps", "trainer.save_freq", "ckpt.interval", "save_steps"),
    Known("run.keep_checkpoints", "save_total_limit", "trainer.max_actor_ckpt_to_keep", "", "max_ckpt_num"),
    Known("run.show_samples", "log_completions num_completions_to_print", note="how many a step"),
    Known("evaluation.every", "eval_steps", "trainer.test_freq", "", "eval_steps"),
    Known(
        "evaluation.samples_per_problem",
        "num_generations_eval",
        "actor_rollout_ref.rollout.val_kwargs.n",
        "",
        "eval_n_samples_per_prompt",
    ),
    Known(
        "evaluation.temperature",
        "",
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "",
        "eval_temperature",
    ),
    Known("tracking.use", "report_to", "trainer.logger", "", "use_wandb use_tensorboard"),
    Known("tracking.project", "", "trainer.project_name", "wandb.project", "wandb_project"),
    Known("tracking.run_name", "", "trainer.experiment_name", "wandb.name", "wandb_run_name"),
)


@dataclass(frozen=True)
class Meant:
    """Another trainer's name, and our entry for it. is_whole: the whole name was given, not its last part."""

    trainer: str
    name: str
    known: Known
    is_whole: bool

    def told(self, ours: str) -> str:
        """Returns the remedy. ours: our key, as it is written."""
        note = f" ({self.known.note})" if self.known.note else ""
        return f"{self.trainer}'s {self.name} is {ours} here{note}"


def find_elsewhere(given: str) -> Meant | None:
    """Returns what a name means in another trainer: `max_steps`, `actor_rollout_ref.rollout.n`, or an end of
    it, `rollout.n` before `n`. None: no trainer has it."""
    wanted = given.replace("-", "_")
    last = wanted.rpartition(".")[2]
    weak = None
    for known in KNOWN:
        for column, trainer in TRAINERS.items():
            for name in getattr(known, column).split():
                if name in (wanted, last) or ("." in wanted and f".{name}".endswith(f".{wanted}")):
                    return Meant(trainer, name, known, True)
                if weak is None and name.rpartition(".")[2] == last:
                    weak = Meant(trainer, name, known, False)
    return weak


def as_table() -> str:
    """Returns the names as a table of Markdown."""
    columns = [field.name for field in fields(Known)]
    heads = ["TLT", *TRAINERS.values(), ""]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for known in KNOWN:
        cells = [getattr(known, column) for column in columns]
        code = [", ".join(f"`{word}`" for word in cell.split()) for cell in cells[:-1]]
        lines.append("| " + " | ".join([*code, cells[-1]]) + " |")
    return "\n".join(lines) + "\n"
