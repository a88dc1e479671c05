"""Writes drafters for other engines, with a README that has the command to serve them.

vllm-eagle       EagleLlamaForCausalLM: fc, layers.0; embedding and head are the target's
vllm-eagle3,     LlamaForCausalLMEagle3: fc, midlayer, norm, lm_head,
sglang-eagle3    and d2t/t2d of a reduced vocabulary
speculators      the same tensors under layers.0, the layer's geometry nested; names its target
vllm-dflash,     z-lab's form, which is ours (block_folder.py)
sglang-dflash
speculators-dflash, speculators-dspark      the same tensors; names its target
deepspec-dspark  DeepSpec's form, with copies of embedding and head
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tlt import __version__
from tlt.base.io.files import replace_folder
from tlt.base.types import UserError
from tlt.base.value_types import DraftVocab
from tlt.drafter.formats.folder import StoredDrafter, write_files
from tlt.drafter.formats.layouts import DescribedTarget, lay_out, num_to_draft
from tlt.drafter.forms import new_model
from tlt.drafter.shape import BlockShape, EagleShape, Method
from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary, check_wanted, sizes_of
from tlt.models.decoder import ModelConfig
from tlt.models.hf.files import DRAFTER_FILES


@dataclass(frozen=True)
class Format:
    """has_head: whether the drafter's own head is stored, and with it a draft vocabulary."""

    method: Method
    engine: str
    launch: str
    has_head: bool = True


_VLLM = (
    "vllm serve {target} --speculative-config "
    """'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": {k}}}'"""
)
_SGLANG = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens {nodes}"
)
_SGLANG_BLOCKS = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {folder} --speculative-num-draft-tokens {nodes}"
)
FORMATS: Mapping[str, Format] = {
    "vllm-eagle": Format("eagle", "vLLM", _VLLM, has_head=False),
    "vllm-eagle3": Format("eagle3", "vLLM", _VLLM),
    "sglang-eagle3": Format("eagle3", "SGLang", _SGLANG),
    "speculators": Format("eagle3", "vLLM", "vllm serve {folder}"),
    "vllm-dflash": Format("dflash", "vLLM", _VLLM),
    "sglang-dflash": Format("dflash", "SGLang", _SGLANG_BLOCKS, has_head=False),
    "speculators-dflash": Format("dflash", "vLLM", "vllm serve {folder}"),
    "speculators-dspark": Format("dspark", "vLLM on GPUs", "vllm serve {folder}"),
    "deepspec-dspark": Format("dspark", "vLLM on GPUs", _VLLM, has_head=False),
}


def export_drafter(drafter: StoredDrafter, name: str, target: DescribedTarget, out: Path) -> None:
    check_format(drafter, name)
    tensors, described = lay_out(drafter, name, target)
    with replace_folder(out, (*DRAFTER_FILES, "README.md")) as folder:
        write_files(folder, tensors, described)
        (folder / "README.md").write_text(_readme(drafter, name, target, out))


def with_vocabulary(
    drafter: StoredDrafter, name: str, wanted: DraftVocab, target: ModelConfig
) -> StoredDrafter:
    """Chooses the draft vocabulary by the folder's counts. Raises UserError for a size that the format or the
    counts do not allow."""
    check_wanted(wanted, drafter.config)
    has_place = FORMATS[name].has_head
    if isinstance(wanted, int):
        if not has_place:
            raise UserError(
                f"--draft-vocab: {wanted} has no place in {name}, whose head is the target's; leave it out"
            )
        if drafter.counts_V is None:
            what = f"{wanted} needs counts of tokens, which the drafter's folder lacks; give --responses"
            raise UserError(f"--draft-vocab: {what}")
    if not has_place or not drafter.config.can_choose or drafter.counts_V is None:
        return drafter
    chosen = DraftVocabulary(DraftCosts.of(target, drafter.config), wanted, drafter.counts_V).token_ids
    if chosen is None:
        return drafter
    model = new_model(replace(drafter.config, draft_vocab_size=len(chosen)))
    model.set_vocabulary(chosen)
    tensors = {**drafter.tensors, "d2t": model.d2t, "t2d": model.t2d}
    if (name_of_rows := "markov_head.markov_w2.weight") in tensors:
        tensors[name_of_rows] = tensors[name_of_rows][chosen]
    return replace(drafter, config=model.config, tensors=tensors)


def lacks_counts(drafter: StoredDrafter, name: str, wanted: DraftVocab, target: ModelConfig) -> str | None:
    """Returns a warning if the vocabulary stays whole only for lack of counts."""
    can_reduce = FORMATS[name].has_head and drafter.config.can_choose
    sizes = sizes_of(DraftCosts.of(target, drafter.config), wanted)
    if drafter.counts_V is not None or not can_reduce or not sizes:
        return None
    return (
        "the draft vocabulary stays whole, for the drafter's folder records no counts of tokens; give "
        "--responses"
    )


def mismatch(drafter: StoredDrafter, target: DescribedTarget) -> str | None:
    """Returns a warning if the drafter was trained for other weights than the target's."""
    trained_for, found = drafter.policy_hash, target.policy_hash
    if trained_for is None or found is None or trained_for == found:
        return None
    return (
        f"drafter was trained for policy {trained_for[:12]}, this target is {found[:12]}; responses stay "
        "right, but fewer guesses are accepted: give the policy it was trained for, or train it on"
    )


def unequal_key_norms(drafter: StoredDrafter, name: str) -> str | None:
    """vLLM's CPU builds: 0.32 scales the context's keys of all layers by the first layer's k_norm."""
    if FORMATS[name].engine != "vLLM" or not isinstance(drafter.config, BlockShape):
        return None
    layers = range(drafter.config.layer.num_layers)
    norms = [drafter.tensors[f"layers.{index}.self_attn.k_norm.weight"] for index in layers]
    if all(torch.equal(norm, norms[0]) for norm in norms):
        return None
    return (
        "vLLM's CPU builds read the first layer's k_norm in every layer, and accept fewer of this drafter's "
        "guesses; use tlt serve there, which mends it (GPUs are right)"
    )


def check_format(drafter: StoredDrafter, name: str) -> None:
    """Raises UserError if the format cannot hold the drafter."""
    form, config = FORMATS[name], drafter.config
    if form.method != config.method:
        fitting = ", ".join(key for key, value in FORMATS.items() if value.method == config.method)
        raise UserError(
            f"--format: {name} is for {form.method} drafters, this one is {config.method}; give {fitting}"
        )
    lacks = None
    if config.has_bias:
        lacks = "the bias of fc"
    elif not form.has_head and (config.owns_head or config.is_reduced):
        lacks = "the head or draft vocabulary"
    elif isinstance(config, EagleShape) and config.norm_before_residual and form.engine == "SGLang":
        lacks = "the norm before the residual stream"
    if lacks is not None:
        raise UserError(
            f"--format: {name} has no place for {lacks} that this drafter has; train one with tlt instead"
        )
    if isinstance(config, BlockShape) and config.method == "dspark" and not config.markov_rank:
        raise UserError(
            f"--format: {name} needs the Markov head that this drafter lacks; serve it with tlt instead"
        )


def _readme(drafter: StoredDrafter, name: str, target: DescribedTarget, out: Path) -> str:
    form, about = FORMATS[name], drafter.about
    launch = form.launch.format(
        target=target.name,
        folder=out.name,
        method=form.method,
        k=num_to_draft(drafter.config),
        nodes=num_to_draft(drafter.config) + 1,
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
        f"A drafter of {drafter.config.layer.num_layers} decoder layer(s), which guesses the target's next "
        "tokens for speculative decoding. Serve it from the folder above:",
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
