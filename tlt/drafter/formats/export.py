"""Writes drafters for other engines: the same tensors in the layout that each engine loads, and a README with
the command that serves them.

    vllm-eagle       EagleLlamaForCausalLM: fc, layers.0; embedding and head are the target's
    vllm-eagle3,     LlamaForCausalLMEagle3: fc, midlayer, norm, lm_head,
    sglang-eagle3    and d2t/t2d of a reduced vocabulary
    speculators      the same tensors under layers.0, the layer's geometry nested; names its target

An engine that lacks a key, or reads it differently, usually reports nothing and accepts fewer drafts.
docs/drafter.md lists what each engine does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt import __version__
from tlt.drafter.formats.folder import StoredDrafter, drafter_to_hf, write_files
from tlt.drafter.forms import new_model
from tlt.drafter.model import draft_token_ids
from tlt.drafter.shape import Method
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary, check_wanted, sizes_of
from tlt.io.files import replace_folder
from tlt.kinds import DraftVocab
from tlt.models.decoder import ModelConfig
from tlt.types import UserError

NUM_DRAFT_TOKENS = 3
"""Draft tokens in the launch commands, as in the engines' own examples. `tlt drafter eval` measures the best
number."""


@dataclass(frozen=True)
class Format:
    """A layout of files.

    method: the form of drafter that it holds.
    engine: the engine that reads it.
    launch: the command that starts this engine.
    """

    method: Method
    engine: str
    launch: str


_VLLM = (
    "vllm serve {target} --speculative-config "
    """'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {k}}}'"""
)
_SGLANG = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {nodes}"
)
FORMATS: Mapping[str, Format] = {
    "vllm-eagle": Format("eagle", "vLLM", _VLLM),
    "vllm-eagle3": Format("eagle3", "vLLM", _VLLM),
    "sglang-eagle3": Format("eagle3", "SGLang", _SGLANG),
    "speculators": Format("eagle3", "vLLM", "vllm serve {folder}"),
}


@dataclass(frozen=True)
class Target:
    """The model to draft for.

    name: the name that users load it by.
    architecture: the architecture in its config.json.
    head_VE: its head, whose rows are exported with EAGLE-3 drafters.
    policy_hash: content hash of its tensors; None: unknown.
    """

    name: str
    architecture: str
    head_VE: Tensor
    policy_hash: str | None = None


def export_drafter(drafter: StoredDrafter, name: str, target: Target, out: Path) -> None:
    """Writes the folder `out`, whole or not at all. UserError if the format cannot hold the drafter."""
    check_format(drafter, name)
    dtype = drafter.tensors["fc.weight"].dtype
    tensors, described = dict(drafter.tensors), drafter_to_hf(drafter.config, dtype, drafter.about)
    if drafter.config.method == "eagle3":
        if not drafter.config.owns_head:
            head_VE = target.head_VE
            rows_VE = head_VE[draft_token_ids(tensors["d2t"])] if drafter.config.is_reduced else head_VE
            tensors["lm_head.weight"] = rows_VE.to(dtype)
        # vLLM reads the ids at the top level, which count layer inputs; SGLang reads these, and adds one
        layer_ids = [index - 1 for index in drafter.config.capture]
        described["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "use_aux_hidden_state": True,
        }
    if name == "speculators":
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
        described = _speculators_config(described, target)
    with replace_folder(out) as folder:
        write_files(folder, tensors, described)
        (folder / "README.md").write_text(_readme(drafter, name, target, out))


def with_vocabulary(drafter: StoredDrafter, wanted: DraftVocab, target: ModelConfig) -> StoredDrafter:
    """Returns an eagle3 drafter with the wanted draft vocabulary, chosen by the counts in its folder, or
    the drafter itself if the vocabulary stays whole. UserError for a size that the format or the counts do
    not allow."""
    check_wanted(wanted, drafter.config)
    is_eagle = drafter.config.method == "eagle"
    if isinstance(wanted, int):
        if is_eagle:
            raise UserError(
                f"--draft-vocab: {wanted} has no place in vllm-eagle, whose head is the target's; leave it "
                "out"
            )
        if drafter.counts_V is None:
            raise UserError(
                f"--draft-vocab: {wanted} needs counts of tokens, which the drafter's folder lacks; give "
                "--responses"
            )
    if is_eagle or not drafter.config.can_choose or drafter.counts_V is None:
        return drafter
    chosen = DraftVocabulary(DraftCosts.of(target, drafter.config), wanted, drafter.counts_V).token_ids
    if chosen is None:
        return drafter
    model = new_model(replace(drafter.config, draft_vocab_size=len(chosen)))
    model.set_vocabulary(chosen)
    return replace(
        drafter, config=model.config, tensors={**drafter.tensors, "d2t": model.d2t, "t2d": model.t2d}
    )


def lacks_counts(drafter: StoredDrafter, wanted: DraftVocab, target: ModelConfig) -> str | None:
    """Returns a warning if an eagle3 drafter keeps the whole vocabulary because its folder has no counts,
    else None."""
    can_reduce = drafter.config.method == "eagle3" and drafter.config.can_choose
    sizes = sizes_of(DraftCosts.of(target, drafter.config), wanted)
    if drafter.counts_V is not None or not can_reduce or not sizes:
        return None
    return (
        "the draft vocabulary stays whole, for the drafter's folder records no counts of tokens; give "
        "--responses"
    )


def mismatch(drafter: StoredDrafter, target: Target) -> str | None:
    """Returns a warning if the drafter was trained for other weights than the target's; None if it was
    not, or if that is unknown."""
    trained_for, found = drafter.policy_hash, target.policy_hash
    if trained_for is None or found is None or trained_for == found:
        return None
    return (
        f"drafter was trained for policy {trained_for[:12]}, this target is {found[:12]}; responses stay "
        "right, but "
        "fewer guesses are accepted: give the policy it was trained for, or train it on"
    )


def check_format(drafter: StoredDrafter, name: str) -> None:
    """Raises UserError if the format holds another form of drafter, or has no place for a bias of fc."""
    form = FORMATS[name]
    if form.method != drafter.config.method:
        fitting = ", ".join(key for key, value in FORMATS.items() if value.method == drafter.config.method)
        remedy = f"give {fitting}" if fitting else "no other engine's form of it is written yet"
        raise UserError(
            f"--format: {name} is for {form.method} drafters, this one is {drafter.config.method}; {remedy}"
        )
    if drafter.config.has_bias:
        raise UserError(
            f"--format: {name} has no place for the bias of fc that this drafter has; train one with tlt "
            "instead"
        )


def _speculators_config(described: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Returns config.json in speculators' form: the drafter's own keys at the top level, its layer's keys
    nested."""
    own = (
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "tie_word_embeddings",
        "torch_dtype",
        "tlt",
    )
    layer = {key: value for key, value in described.items() if key not in (*own, "eagle_config")}
    layer |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFT_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "norm_before_fc": False,
        **{key: described[key] for key in own},
    }


def _readme(drafter: StoredDrafter, name: str, target: Target, out: Path) -> str:
    form, about = FORMATS[name], drafter.about
    launch = form.launch.format(
        target=target.name,
        folder=out.name,
        method=form.method,
        k=NUM_DRAFT_TOKENS,
        nodes=NUM_DRAFT_TOKENS + 1,
    )
    facts = {
        "Format": f"{name}, for {form.engine}",
        "Drafts for": target.name,
        "Policy's content hash": drafter.policy_hash or "not recorded",
        "Target's content hash": target.policy_hash or "not recorded",
        "Policy's step": about.get("policy_step", "not recorded"),
        "Preset": about.get("preset", "not recorded"),
        "Draft vocabulary": f"{drafter.config.draft_vocab_size} of {drafter.config.layer.vocab_size} tokens",
        "Layers of the target it reads": ", ".join(map(str, drafter.config.capture)),
        "Written by": f"tlt {__version__}",
    }
    lines = [
        f"# A drafter of form {form.method} for {target.name}",
        "",
        "One decoder layer that guesses the target's next tokens for speculative decoding. Serve it from "
        "the folder "
        "above:",
        "",
        f"    {launch}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in facts.items()),
        "",
        "How often its guesses are accepted depends on the target's weights: after further training, "
        "export again.",
    ]
    return "\n".join(lines) + "\n"
