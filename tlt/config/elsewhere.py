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
    Known(
        "model.path",
        trl="model_name_or_path",
        verl="actor_rollout_ref.model.path",
        prime_rl="model.name",
        openrlhf="actor.model_name_or_path pretrain",
    ),
    Known("model.revision", trl="model_revision"),
    Known("model.adapter", verl="actor_rollout_ref.model.lora_adapter_path"),
    Known("model.chat_template_kwargs", trl="chat_template_kwargs", verl="data.apply_chat_template_kwargs"),
    Known(
        "task.data", trl="dataset_name", verl="data.train_files", openrlhf="data.prompt_dataset prompt_data"
    ),
    Known("task.subset", trl="dataset_config"),
    Known("task.split", trl="dataset_train_split", openrlhf="data.prompt_split prompt_split"),
    Known(
        "task.columns",
        verl="data.prompt_key",
        openrlhf="data.input_key data.label_key input_key label_key",
        note='by ours: {prompt = "question"}',
    ),
    Known("task.chat", openrlhf="data.apply_chat_template apply_chat_template"),
    Known(
        "task.max_prompt_tokens",
        trl="max_prompt_length",
        verl="data.max_prompt_length",
        openrlhf="prompt_max_len",
        note="longer prompts are left out, none is cut",
    ),
    Known(
        "task.name",
        prime_rl="orchestrator.train.source.env.taskset.id orchestrator.env.id",
        note="tlt task --help lists the tasks that come along",
    ),
    Known("evaluation.data", verl="data.val_files", openrlhf="eval.dataset eval_dataset"),
    Known("evaluation.split", trl="dataset_test_split", openrlhf="eval.split eval_split"),
    Known("evaluation.num_problems", verl="data.val_max_samples", prime_rl="orchestrator.eval.num_examples"),
    Known(
        "rewards.functions",
        trl="reward_funcs",
        verl="custom_reward_function.path",
        openrlhf="reward.remote_url remote_rm_url",
    ),
    Known("rewards.weights", trl="reward_weights"),
    Known(
        "rollout.problems_per_step",
        trl="generation_batch_size per_device_train_batch_size",
        verl="data.train_batch_size",
        prime_rl="orchestrator.batch_size",
        openrlhf="rollout.batch_size rollout_batch_size",
        note="problems, on all devices together; TRL and prime-rl count responses",
    ),
    Known(
        "rollout.samples_per_problem",
        trl="num_generations",
        verl="actor_rollout_ref.rollout.n",
        prime_rl="orchestrator.group_size orchestrator.rollouts_per_example",
        openrlhf="rollout.n_samples_per_prompt n_samples_per_prompt",
    ),
    Known(
        "rollout.max_batch_size", verl="actor_rollout_ref.rollout.max_num_seqs", note="responses at a time"
    ),
    Known(
        "sampling.max_tokens",
        trl="max_completion_length",
        verl="data.max_response_length actor_rollout_ref.rollout.response_length",
        prime_rl="orchestrator.train.sampling.max_completion_tokens orchestrator.sampling.max_tokens",
        openrlhf="rollout.max_new_tokens generate_max_len",
        note="of a response, without its prompt",
    ),
    Known(
        "sampling.temperature",
        verl="actor_rollout_ref.rollout.temperature",
        prime_rl="orchestrator.train.sampling.temperature orchestrator.sampling.temperature",
        openrlhf="rollout.temperature",
    ),
    Known("sampling.top_p", verl="actor_rollout_ref.rollout.top_p", openrlhf="rollout.top_p"),
    Known(
        "rollout.engine", trl="use_vllm vllm_mode", verl="actor_rollout_ref.rollout.name", note="tlt or vllm"
    ),
    Known(
        "vllm.tensor_parallel",
        trl="vllm_tensor_parallel_size",
        verl="actor_rollout_ref.rollout.tensor_model_parallel_size",
        openrlhf="vllm.tensor_parallel_size vllm_tensor_parallel_size",
    ),
    Known(
        "vllm.compile",
        verl="actor_rollout_ref.rollout.enforce_eager",
        openrlhf="vllm.enforce_eager enforce_eager",
        note="the opposite: false where enforce_eager is true",
    ),
    Known(
        "vllm.prefix_caching",
        verl="actor_rollout_ref.rollout.enable_prefix_caching",
        openrlhf="vllm.enable_prefix_caching enable_prefix_caching",
    ),
    Known(
        "rollout.kv_gib",
        trl="vllm_gpu_memory_utilization",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization",
        openrlhf="vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
        note="in GiB, of the caches alone",
    ),
    Known(
        "algorithm.name",
        trl="loss_type",
        verl="algorithm.adv_estimator",
        prime_rl="orchestrator.algo.type",
        openrlhf="algo.advantage.estimator advantage_estimator",
    ),
    Known(
        "algorithm.advantage",
        trl="scale_rewards",
        verl="algorithm.norm_adv_by_std_in_grpo",
        openrlhf="algo.advantage.no_std_norm no_advantage_std_norm",
    ),
    Known("algorithm.ratio", trl="importance_sampling_level"),
    Known("algorithm.aggregation", verl="actor_rollout_ref.actor.loss_agg_mode"),
    Known(
        "algorithm.clip_low",
        trl="epsilon",
        verl="actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio",
        openrlhf="actor.eps_clip eps_clip",
    ),
    Known(
        "algorithm.clip_high",
        trl="epsilon_high",
        verl="actor_rollout_ref.actor.clip_ratio_high",
        openrlhf="actor.eps_clip_low_high eps_clip_low_high",
    ),
    Known(
        "algorithm.kl_coefficient",
        trl="beta",
        verl="actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
        openrlhf="algo.kl.init_coef init_kl_coef",
    ),
    Known(
        "algorithm.kl_in",
        verl="algorithm.use_kl_in_reward actor_rollout_ref.actor.use_kl_loss",
        openrlhf="algo.kl.use_loss use_kl_loss",
        note="loss or reward",
    ),
    Known(
        "algorithm.kl_estimator",
        verl="actor_rollout_ref.actor.kl_loss_type algorithm.kl_penalty",
        openrlhf="algo.kl.estimator kl_estimator",
        note="k1, k2 or k3",
    ),
    Known("algorithm.kl_bias_correction", trl="use_bias_correction_kl"),
    Known("algorithm.mask_truncated", trl="mask_truncated_completions"),
    Known(
        "algorithm.overlong_buffer_tokens",
        verl="reward_model.overlong_buffer.len reward_model.reward_kwargs.overlong_buffer_cfg.len",
        openrlhf="reward.overlong_buffer_len overlong_buffer_len",
    ),
    Known(
        "algorithm.overlong_penalty",
        verl="reward_model.overlong_buffer.penalty_factor "
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        openrlhf="reward.overlong_penalty_factor overlong_penalty_factor",
    ),
    Known(
        "algorithm.dynamic_sampling",
        verl="algorithm.filter_groups.enable",
        openrlhf="algo.dynamic_filtering_enable dynamic_filtering",
    ),
    Known(
        "algorithm.epochs",
        trl="num_iterations",
        verl="actor_rollout_ref.actor.ppo_epochs",
        openrlhf="train.max_epochs max_epochs",
    ),
    Known(
        "algorithm.minibatches",
        trl="steps_per_generation gradient_accumulation_steps",
        verl="actor_rollout_ref.actor.ppo_mini_batch_size",
        openrlhf="train.batch_size train_batch_size",
        note="how many updates a step makes; the others give a batch's size",
    ),
    Known(
        "algorithm.tokens_per_micro_batch",
        verl="actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        openrlhf="train.max_tokens_per_gpu train.micro_batch_size train_max_tokens_per_gpu "
        "micro_train_batch_size",
        note="in tokens",
    ),
    Known(
        "algorithm.importance_correction_cap",
        trl="vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        verl="algorithm.rollout_correction.rollout_is_threshold",
        openrlhf="algo.advantage.is_correction_threshold",
    ),
    Known(
        "optimizer.learning_rate",
        verl="actor_rollout_ref.actor.optim.lr",
        prime_rl="trainer.optim.lr",
        openrlhf="actor.adam.lr actor_learning_rate",
    ),
    Known(
        "optimizer.schedule",
        trl="lr_scheduler_type",
        verl="actor_rollout_ref.actor.optim.lr_scheduler_type",
        prime_rl="trainer.scheduler.type",
        openrlhf="actor.lr_scheduler lr_scheduler",
    ),
    Known(
        "optimizer.warmup_steps",
        trl="warmup_ratio",
        verl="actor_rollout_ref.actor.optim.lr_warmup_steps "
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        prime_rl="trainer.scheduler.warmup_steps",
        openrlhf="actor.lr_warmup_ratio lr_warmup_ratio",
        note="in steps, no share of them",
    ),
    Known(
        "optimizer.beta1",
        trl="adam_beta1",
        verl="actor_rollout_ref.actor.optim.betas",
        prime_rl="trainer.optim.betas1",
        openrlhf="actor.adam.betas adam_betas",
    ),
    Known("optimizer.beta2", trl="adam_beta2", prime_rl="trainer.optim.betas2"),
    Known("optimizer.eps", trl="adam_epsilon", openrlhf="actor.adam.eps"),
    Known(
        "optimizer.weight_decay",
        verl="actor_rollout_ref.actor.optim.weight_decay",
        prime_rl="trainer.optim.weight_decay",
        openrlhf="actor.adam.weight_decay l2",
    ),
    Known(
        "optimizer.clip_grad_norm",
        trl="max_grad_norm",
        verl="actor_rollout_ref.actor.grad_clip",
        prime_rl="trainer.optim.max_norm",
        openrlhf="actor.max_norm max_norm",
    ),
    Known(
        "lora.rank",
        trl="lora_r",
        verl="actor_rollout_ref.model.lora_rank",
        prime_rl="trainer.model.lora.rank",
        openrlhf="ds.lora.rank lora_rank",
    ),
    Known(
        "lora.alpha",
        trl="lora_alpha",
        verl="actor_rollout_ref.model.lora_alpha",
        prime_rl="trainer.model.lora.alpha",
        openrlhf="ds.lora.alpha lora_alpha",
    ),
    Known("lora.rslora", trl="use_rslora"),
    Known(
        "lora.targets",
        trl="lora_target_modules",
        verl="actor_rollout_ref.model.target_modules",
        prime_rl="trainer.model.lora.target_modules",
        openrlhf="ds.lora.target_modules target_modules",
    ),
    Known(
        "parallel.checkpoint_activations",
        trl="gradient_checkpointing",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        prime_rl="trainer.model.ac",
        openrlhf="actor.gradient_checkpointing_enable gradient_checkpointing",
    ),
    Known(
        "run.num_steps",
        trl="max_steps num_train_epochs",
        verl="trainer.total_training_steps trainer.total_epochs",
        prime_rl="max_steps",
        openrlhf="train.num_episodes num_episodes",
        note="in steps, no passes over the data",
    ),
    Known("run.seed", verl="data.seed", openrlhf="train.seed"),
    Known(
        "run.out_dir",
        trl="output_dir",
        verl="trainer.default_local_dir",
        prime_rl="output_dir",
        openrlhf="ckpt.output_dir save_path",
    ),
    Known(
        "run.dtype",
        trl="bf16",
        verl="actor_rollout_ref.rollout.dtype",
        openrlhf="ds.param_dtype bf16",
        note="of the engine: auto, bfloat16 …",
    ),
    Known(
        "run.num_ranks",
        verl="trainer.n_gpus_per_node",
        prime_rl="deployment.num_train_gpus",
        openrlhf="actor.num_gpus_per_node actor_num_gpus_per_node",
        note="auto: every GPU",
    ),
    Known(
        "run.checkpoint_every",
        trl="save_steps",
        verl="trainer.save_freq",
        prime_rl="ckpt.interval",
        openrlhf="ckpt.save_steps save_steps",
    ),
    Known(
        "run.keep_checkpoints",
        trl="save_total_limit",
        verl="trainer.max_actor_ckpt_to_keep",
        prime_rl="ckpt.keep_last",
        openrlhf="ckpt.max_num max_ckpt_num",
    ),
    Known("run.show_samples", trl="log_completions num_completions_to_print", note="how many a step"),
    Known(
        "evaluation.every",
        trl="eval_steps",
        verl="trainer.test_freq",
        prime_rl="orchestrator.eval.interval",
        openrlhf="eval.steps eval_steps",
    ),
    Known(
        "evaluation.samples_per_problem",
        trl="num_generations_eval",
        verl="actor_rollout_ref.rollout.val_kwargs.n",
        prime_rl="orchestrator.eval.group_size orchestrator.eval.rollouts_per_example",
        openrlhf="eval.n_samples_per_prompt eval_n_samples_per_prompt",
    ),
    Known(
        "evaluation.temperature",
        verl="actor_rollout_ref.rollout.val_kwargs.temperature",
        prime_rl="orchestrator.eval.sampling.temperature",
        openrlhf="eval.temperature eval_temperature",
    ),
    Known(
        "tracking.use",
        trl="report_to",
        verl="trainer.logger",
        openrlhf="logger.wandb.key logger.tensorboard_dir use_wandb use_tensorboard",
    ),
    Known(
        "tracking.project",
        verl="trainer.project_name",
        prime_rl="monitors.wandb.project wandb.project",
        openrlhf="logger.wandb.project wandb_project",
    ),
    Known(
        "tracking.run_name",
        verl="trainer.experiment_name",
        prime_rl="monitors.wandb.name wandb.name",
        openrlhf="logger.wandb.run_name wandb_run_name",
    ),
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
    found = [
        (rank, trainer, name, known)
        for known in KNOWN
        for column, trainer in TRAINERS.items()
        for name in getattr(known, column).split()
        if (rank := _distance(wanted, name)) is not None
    ]
    if not found:
        return None
    rank, trainer, name, known = min(found, key=lambda each: each[0])
    return Meant(trainer, name, known, rank < _SAME_LAST_PART)


_SAME_LAST_PART = 3


def _distance(wanted: str, name: str) -> int | None:
    """Returns how far a trainer's name is from the one that was given, from 0; None: they share no end."""
    last = wanted.rpartition(".")[2]
    if name == wanted:
        return 0
    if "." in wanted and name.endswith(f".{wanted}"):
        return 1
    if name == last:
        return 2
    return _SAME_LAST_PART if name.rpartition(".")[2] == last else None


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
