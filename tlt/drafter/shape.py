"""The shapes of drafters.

DrafterShape ─┬─ EagleShape   eagle, eagle3      a layer drafts token after token      eagle.py
              └─ BlockShape   dflash, dspark     a pass drafts a block of tokens       block.py
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from tlt.base.strategy import Strategy
from tlt.base.types import UserError
from tlt.models.decoder import ModelConfig

Method = Literal["eagle", "eagle3", "dflash", "dspark"]

NUM_DRAFTED = 7
"""Default tokens per block: an eighth is rarely accepted, and eight rows cost little more than one."""

NUM_LAYERS = 2

_MOST_RANK, _LEAST_RANK, _RANK_SHARE = 256, 16, 8
"""Rank of the Markov head: bounds, and hidden size / rank. DSpark's published drafters have 256."""


@dataclass(frozen=True)
class DrafterShape:
    """Determines the names and sizes of a drafter's tensors.

    layer: geometry of the decoder layers; vocabulary and `finish_logits` are the target's.
    capture: the target's layers whose inputs it reads. The target's number of layers stands for the features,
        the output of the final norm.
    draft_vocab_size: if smaller than the target's vocabulary, the tensor d2t lists the tokens.
    owns_head: False: the head is rows of the target's.
    has_bias: whether fc has a bias, as in foreign EAGLE drafters; vLLM's has none.
    """

    method: Method
    layer: ModelConfig
    capture: tuple[int, ...]
    draft_vocab_size: int
    owns_head: bool = False
    has_bias: bool = False

    @property
    def feature_size(self) -> int:
        return len(self.capture) * self.layer.hidden_size

    @property
    def is_reduced(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def can_choose(self) -> bool:
        return not (self.owns_head or self.is_reduced)

    @property
    def has_norm(self) -> bool:
        return self.method != "eagle"

    @property
    def fc_size(self) -> int:
        return self.feature_size

    @property
    def max_depth(self) -> int:
        return Strategy.MAX_DEPTH

    @property
    def weights_per_draft(self) -> int:
        raise NotImplementedError

    @property
    def weights_per_level(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class EagleShape(DrafterShape):
    """norm_before_residual: whether the residual stream starts as norm(hidden), as in speculators' eagle3."""

    norm_before_residual: bool = False

    @property
    def layer_name(self) -> str:
        return "layers.0" if self.method == "eagle" else "midlayer"

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """EAGLE has none: its attention reads the output of fc."""
        return () if self.method == "eagle" else ("input_layernorm", "hidden_norm")

    @property
    def fc_size(self) -> int:
        return 2 * self.layer.hidden_size if self.method == "eagle" else self.feature_size

    @property
    def weights_per_draft(self) -> int:
        return 0

    @property
    def weights_per_level(self) -> int:
        """eagle3's fc reads committed tokens alone."""
        fc = self.fc_size * self.layer.hidden_size if self.method == "eagle" else 0
        return layer_weights(self.layer, max(len(self.layer_norms), 1)) + fc


@dataclass(frozen=True)
class BlockShape(DrafterShape):
    """block_size: slots of a block, the anchor included.
    mask_token_id: the token whose embedding in the target fills the slots behind the anchor.
    markov_rank: rank of the Markov head; 0: no head.
    """

    block_size: int = dataclasses.field(kw_only=True)
    mask_token_id: int = dataclasses.field(kw_only=True)
    num_target_layers: int = dataclasses.field(kw_only=True)
    markov_rank: int = dataclasses.field(default=0, kw_only=True)

    @property
    def first_slot(self) -> int:
        """DFlash's anchor proposes nothing."""
        return 1 if self.method == "dflash" else 0

    @property
    def max_depth(self) -> int:
        return self.block_size - self.first_slot

    @property
    def weights_per_draft(self) -> int:
        return self.layer.num_layers * layer_weights(self.layer)

    @property
    def weights_per_level(self) -> int:
        return self.markov_rank * self.draft_vocab_size


def layer_weights(c: ModelConfig, num_inputs: int = 1) -> int:
    attention = (num_inputs * c.num_qkv + c.num_heads) * c.head_dim * c.hidden_size
    return attention + 3 * c.hidden_size * c.intermediate_size


@dataclass(frozen=True)
class BlockOptions:
    """None: the default for method and target."""

    num_layers: int | None = None
    num_drafted: int | None = None
    mask_token_id: int | None = None


def drafter_shape(
    target: ModelConfig,
    method: Method = "eagle",
    draft_vocab_size: int | None = None,
    block: BlockOptions = BlockOptions(),
) -> DrafterShape:
    """Layers take the form that other engines serve: Llama's for EAGLE's family, Qwen3's for blocks."""
    vocab_size = draft_vocab_size or target.vocab_size
    kept = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    geometry = ModelConfig(**kept | {"num_experts": 0, "experts_per_token": 0, "is_text_part": False})
    if method == "eagle" or method == "eagle3":
        layer = dataclasses.replace(geometry, architecture="llama", num_layers=1, tie_embeddings=True)
        capture = (target.num_layers,) if method == "eagle" else capture_layers(target.num_layers)
        return EagleShape(method, layer, capture, vocab_size)
    num_layers = block.num_layers or max(min(NUM_LAYERS, target.num_layers - 1), 1)
    layer = dataclasses.replace(geometry, architecture="qwen3", num_layers=num_layers, tie_embeddings=True)
    is_dspark, num_drafted = method == "dspark", block.num_drafted or NUM_DRAFTED
    return BlockShape(
        method,
        layer,
        spread_layers(target.num_layers, num_layers),
        vocab_size,
        block_size=num_drafted if is_dspark else num_drafted + 1,
        mask_token_id=target.vocab_size - 1 if block.mask_token_id is None else block.mask_token_id,
        num_target_layers=target.num_layers,
        markov_rank=markov_rank(target.hidden_size) if is_dspark else 0,
    )


def markov_rank(hidden_size: int) -> int:
    return max(min(hidden_size // _RANK_SHARE, _MOST_RANK), _LEAST_RANK)


def training_capture(config: DrafterShape, num_layers: int) -> tuple[int, ...]:
    """The drafter's layers, then `num_layers`: the target's features. EAGLE reads the features themselves,
    captured once.

        columns    │ inputs of the layers that the drafter reads │ the target's features │
    """
    return config.capture if config.capture[-1] == num_layers else (*config.capture, num_layers)


def capture_layers(num_layers: int) -> tuple[int, int, int]:
    """Early, middle and late, as in vLLM and SGLang; nearer the ends of a model with few layers."""
    if num_layers < 4:
        raise UserError(
            f"an eagle3 drafter reads three layers; this model has only {num_layers}, so use eagle"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers > 6 else (1, num_layers // 2, num_layers - 1)


def spread_layers(num_layers: int, num_read: int) -> tuple[int, ...]:
    """Spreads inputs of layers evenly: DFlash's outputs 1 to num_layers - 3, or nearer the ends of a model
    with few layers."""
    first, last = (2, num_layers - 2) if num_layers - 4 >= max(num_read - 1, 1) else (1, num_layers - 1)
    if num_layers < 2:
        raise UserError("a block drafter reads layers before the last, and this model has one; use eagle")
    if num_read > last - first + 1:
        raise UserError(
            f"a block drafter of {num_read} layers reads as many of the model's, which has only "
            f"{num_layers}; give fewer"
        )
    if num_read == 1:
        return (last,)
    return tuple(first + round(i * (last - first) / (num_read - 1)) for i in range(num_read))
