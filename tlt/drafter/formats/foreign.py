"""Reads other trainers' drafter folders into our layout. No tensor is dropped in silence.

SafeAILab's EAGLE   "LlamaForCausalLM", layers.0. or midlayer.,
                    often with a copy of the embedding and a bias of fc
SpecForge, SGLang   "LlamaForCausalLMEagle3", midlayer.,
                    layer ids under eagle_config, one less than vLLM's
speculators         "Eagle3DraftModel", layers.0., the layer's geometry under transformer_layer_config;
                    norm_before_residual is true where it is absent, as vLLM reads it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tlt.base.types import UserError
from tlt.drafter.formats.block_folder import block_method
from tlt.drafter.model import draft_token_ids
from tlt.drafter.shape import Method
from tlt.models.hf.config import MOST_LAYERS, Fields
from tlt.models.hf.files import INDEX, WEIGHTS, read_json
from tlt.models.hf.weights import read_safetensors, stored_names

METHOD_BY_ARCHITECTURE: Mapping[str, Method | None] = {
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "LlamaForCausalLM": None,
}
"""None: the tensors' names tell the form."""

BLOCK_ARCHITECTURES = (
    "DFlashDraftModel",
    "Qwen3DSparkModel",
    "DFlashSpeculator",
    "DSparkSpeculator",
    "DSparkDraftModel",
)

TRAINERS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")
"""The target's tensors in speculators' folders, which no engine reads."""

OTHER_COMPUTATIONS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Keys that, if true, change a drafter's computation."""


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns config.json and tensors in our layout, the form under the key "method". Raises UserError."""
    weights = INDEX if (path / INDEX).is_file() else WEIGHTS
    for name in ("config.json", weights):
        if not (path / name).is_file():
            raise UserError(f"drafter {path}: {name} is missing; {_remedy(path)}")
    fields = read_fields(path)
    method = method_of(fields, stored_names(path))
    flat = flatten(fields, method)  # a whole model is refused before its weights are read
    try:
        stored = read_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"drafter {path}: {weights} cannot be read ({error}); train or copy it again"
        ) from None
    return flat, _rename(path, stored, method)


def read_fields(path: Path) -> Fields:
    fields = Fields(read_json(path / "config.json"), f"drafter {path}")
    for name in ("transformer_layer_config", "eagle_config", "dflash_config"):
        fields.table(name)
    about = fields.within("tlt")
    for name in ("policy_hash", "preset"):
        about.text(name)
    if (path / "mask_embedding.pt").is_file() and method_of(fields, ()) in ("dflash", "dspark"):
        what = "mask_embedding.pt gives the masks an embedding of their own, which is not computed here"
        remedy = "use a drafter that takes the target's"
        raise UserError(f"drafter {path}: {what}; {remedy}")
    return fields


def _remedy(path: Path) -> str:
    if not (path / "pytorch_model.bin").is_file():
        return "give a folder that tlt drafter train wrote, or another's with config.json and safetensors"
    return (
        'convert pytorch_model.bin once: python -c "import torch, safetensors.torch as s; '
        "d = torch.load('pytorch_model.bin', weights_only=True); "
        "s.save_file({k: v.contiguous() for k, v in d.items()}, 'model.safetensors')\""
    )


def method_of(fields: Fields, stored: Collection[str]) -> Method:
    """Raises UserError for an unknown architecture.

    stored: names of tensors, which decide where the architecture does not.
    """
    found = fields.items("architectures")
    name = found[0] if len(found) == 1 else None
    if name in BLOCK_ARCHITECTURES:
        return block_method(fields)
    if not isinstance(name, str) or name not in METHOD_BY_ARCHITECTURE:
        known = ", ".join((*METHOD_BY_ARCHITECTURE, *BLOCK_ARCHITECTURES))
        raise fields.refusal("architectures", f"only {known} can be loaded")
    is_eagle3 = any(key.endswith("hidden_norm.weight") for key in stored)
    return METHOD_BY_ARCHITECTURE[name] or ("eagle3" if is_eagle3 else "eagle")


def flatten(fields: Fields, method: Method) -> dict[str, Any]:
    """Puts the layer's geometry at the top level, and takes vLLM's ids of captured layers, which count inputs
    (SGLang's count outputs). Raises UserError for a drafter that we would compute differently."""
    described = {**fields.raw, "method": method}
    if method in ("dflash", "dspark"):
        return described
    nested = fields.within("eagle_config")
    merged: dict[str, Any] = {**fields.table("transformer_layer_config"), **described}
    flat = Fields(merged, fields.source)
    for key in OTHER_COMPUTATIONS:
        if flat.flag(key) or nested.flag(key):
            remedy = "use a drafter trained without it"
            raise UserError(f"{fields.source}: {key} is true, which is not computed here; {remedy}")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.refusal("use_aux_hidden_state", "use a drafter that reads three of the target's layers")
    if flat.integer("num_hidden_layers", 1) != 1:
        raise flat.refusal("num_hidden_layers", "only one-layer drafters can be loaded, no whole models")
    is_speculators = method == "eagle3" and "speculators_model_type" in merged
    normed = flat.flag("norm_before_residual", nested.flag("norm_before_residual", is_speculators))
    ids = "eagle_aux_hidden_state_layer_ids"
    if not flat.items(ids) and nested.items(ids):
        merged[ids] = [index + 1 for index in nested.layers(ids, -1, MOST_LAYERS)]
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return merged | llama | {"norm_before_residual": normed and method == "eagle3"}


def _rename(path: Path, stored: Mapping[str, Tensor], method: Method) -> dict[str, Tensor]:
    """Drops rotary frequencies. Raises UserError if two names coincide."""
    layer = "layers.0." if method == "eagle" else "midlayer."
    tensors: dict[str, Tensor] = {}
    for given, tensor in stored.items():
        name = given.removeprefix("model.")
        for prefix in ("layers.0.", "midlayer."):
            if method in ("eagle", "eagle3") and name.startswith(prefix):
                name = layer + name.removeprefix(prefix)
        if name in tensors:
            raise UserError(f"drafter {path}: tensor {given} is there under two names; remove one of them")
        if not name.endswith("rotary_emb.inv_freq") and name not in TRAINERS_OWN:
            tensors[name] = tensor
    return tensors


def with_vocabulary_map(path: Path, tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Adds the t2d of d2t. Raises UserError unless d2t gives distinct tokens of the target, and an existing
    t2d agrees."""
    if "d2t" not in tensors:
        return tensors
    d2t, again = tensors["d2t"], "train or copy it again"
    if d2t.dim() != 1 or d2t.is_complex():
        shape = f"{str(d2t.dtype).removeprefix('torch.')}{list(d2t.shape)}"
        raise UserError(f"drafter {path}: d2t is {shape}; it must be one row of whole numbers, {again}")
    token_ids = d2t.double() + torch.arange(len(d2t))
    wrong = ~((token_ids >= 0) & (token_ids < vocab_size) & (token_ids == token_ids.floor()))
    if wrong.any():
        draft_id = int(wrong.nonzero()[0])
        found = f"d2t gives draft token {draft_id} the target's {token_ids[draft_id].item():g}"
        raise UserError(f"drafter {path}: {found}; it must be one from 0 to {vocab_size - 1}, {again}")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[token_ids.long()] = True
    if (num_named := int(t2d.sum())) < len(d2t):
        found = f"the {len(d2t)} draft tokens of d2t are {num_named} of the target's"
        raise UserError(f"drafter {path}: {found}; each must be another one, {again}")
    given = tensors.get("t2d", t2d)
    if given.shape == t2d.shape and not torch.equal(given.bool(), t2d):
        raise UserError(f"drafter {path}: t2d marks other tokens than d2t names; {again}")
    return {**tensors, "d2t": d2t.long(), "t2d": given.bool()}


def drop_repeated(
    path: Path,
    tensors: dict[str, Tensor],
    method: Method,
    vocab_size: int,
    target: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """Drops copies of the target's embedding and head, a zero bias, and a draft vocabulary of all tokens.

    target: a different embedding or EAGLE head is a UserError; a different EAGLE-3 head stays. None: nothing
        is compared, and EAGLE-3 keeps its head.
    """
    tensors = dict(tensors)
    if "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    if "d2t" in tensors and len(tensors["d2t"]) == vocab_size and not tensors["d2t"].any():
        del tensors["d2t"], tensors["t2d"]
    embedding_VE, own_VE = tensors.pop("embed_tokens.weight", None), tensors.get("lm_head.weight")
    is_redundant, other = method == "eagle", "is not the target's; give the model it was trained for"
    if target is not None:
        target_VE = target["model.embed_tokens.weight"]
        if embedding_VE is not None and not _is_copy(embedding_VE, target_VE):
            raise UserError(f"drafter {path}: embed_tokens.weight {other}")
        head_VE = target.get("lm_head.weight", target_VE)
        if own_VE is not None:
            rows_VE = head_VE[draft_token_ids(tensors["d2t"])] if "d2t" in tensors else head_VE
            is_redundant = _is_copy(own_VE, rows_VE)
            if method == "eagle" and not is_redundant:
                raise UserError(f"drafter {path}: lm_head.weight {other}")
    if own_VE is not None and is_redundant:
        del tensors["lm_head.weight"]
    return tensors


def _is_copy(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: one may be stored in float16, the other in bfloat16."""
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-4)
