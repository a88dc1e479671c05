"""The layouts in which engines load a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tlt.drafter.formats.block_folder import block_to_speculators
from tlt.drafter.formats.folder import StoredDrafter, drafter_to_hf
from tlt.drafter.model import draft_token_ids
from tlt.drafter.shape import BlockShape, DrafterShape

NUM_DRAFT_TOKENS = 3
"""For EAGLE's family, as in the engines' examples; `tlt drafter eval` measures the best number."""

Layout = tuple[dict[str, Tensor], dict[str, Any]]
"""(tensors, config.json)"""


@dataclass(frozen=True)
class DescribedTarget:
    """name: the name that users load it by.
    policy_hash: content hash of its tensors, if known.
    embedding_VE: needed for DeepSpec's form, which repeats it.
    """

    name: str
    architecture: str
    head_VE: Tensor
    policy_hash: str | None = None
    embedding_VE: Tensor | None = None


def num_to_draft(config: DrafterShape) -> int:
    return config.max_depth if isinstance(config, BlockShape) else NUM_DRAFT_TOKENS


def lay_out(drafter: StoredDrafter, name: str, target: DescribedTarget) -> Layout:
    config, dtype = drafter.config, drafter.tensors["fc.weight"].dtype
    tensors, described = dict(drafter.tensors), drafter_to_hf(config, dtype, drafter.about)
    if config.method == "eagle3" or config.is_reduced:
        tensors.setdefault("lm_head.weight", _head(drafter, target))
    if config.method == "eagle3":
        # vLLM reads the ids at the top level, which count layer inputs; SGLang reads these, and adds one
        layer_ids = [index - 1 for index in config.capture]
        described["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "use_aux_hidden_state": True,
        }
    if name == "speculators":
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
        described = _eagle3_speculators(described) | _verified_by(target, "eagle3", NUM_DRAFT_TOKENS)
    elif name.startswith("speculators-"):
        assert isinstance(config, BlockShape), name
        described = block_to_speculators(config, dtype, drafter.about)
        described |= _verified_by(target, config.method, config.max_depth)
    elif name == "deepspec-dspark":
        assert target.embedding_VE is not None, "the caller gives it"
        tensors.setdefault("lm_head.weight", _head(drafter, target))
        tensors["embed_tokens.weight"] = target.embedding_VE.to(dtype, copy=True)
    return tensors, described


def _head(drafter: StoredDrafter, target: DescribedTarget) -> Tensor:
    head_VE = target.head_VE
    rows_VE = head_VE[draft_token_ids(drafter.tensors["d2t"])] if drafter.config.is_reduced else head_VE
    return rows_VE.to(drafter.tensors["fc.weight"].dtype)


def _verified_by(target: DescribedTarget, algorithm: str, num_tokens: int) -> dict[str, Any]:
    return {
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        }
    }


def _eagle3_speculators(described: Mapping[str, Any]) -> dict[str, Any]:
    own = (
        "draft_vocab_size",
        "norm_before_residual",
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
        "transformer_layer_config": layer,
        "norm_before_fc": False,
        **{key: described[key] for key in own},
    }
