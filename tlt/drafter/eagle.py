"""The drafters of EAGLE's family: one layer.

    pair t:  embedding(token t+1), hidden t ─▶ one decoder layer ─▶ hidden t+1 ─ head ─▶ token t+2

    eagle    hidden t = feature t, the output of the target's final norm
             fc joins it with the embedding
    eagle3   hidden t = fc(residual sums of three of the target's layers at t)
             attention reads norm(embedding) ‖ norm(hidden), the residual stream starts as hidden, or,
             with norm_before_residual (speculators), as norm(hidden)

Pair t has the rotary position t. `eagle` (arXiv 2401.15077) applies the target's head to the hidden state;
`eagle3` (arXiv 2503.01840) normalizes it first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tlt.base.uploads import upload
from tlt.drafter.model import Anchors, DraftModel, Embed, PackedDrafter, PackedText, flatten_anchors
from tlt.drafter.pairs import align
from tlt.drafter.shape import EagleShape
from tlt.models.attention import PackedCausal
from tlt.models.decoder import Attend, DecoderLayer, run_layer
from tlt.models.loops import available
from tlt.models.packed import PackedLayer


class EagleModel(DraftModel):
    config: EagleShape

    def __init__(self, config: EagleShape) -> None:
        super().__init__(config)
        layer = DecoderLayer(config.layer, norms=config.layer_norms)
        if config.method == "eagle":
            self.layers = nn.ModuleList([layer])
        else:
            self.midlayer = layer

    def fuse(self, features_MF: Tensor) -> Tensor:
        features_MF = features_MF[..., : self.config.feature_size]
        return features_MF if self.config.method == "eagle" else self.fc(features_MF)

    def forward(
        self, embeddings_ME: Tensor, hidden_ME: Tensor, positions_M: Tensor, attend: Attend
    ) -> Tensor:
        rope, pair = self.rope_at(hidden_ME, positions_M), torch.cat([embeddings_ME, hidden_ME], dim=-1)
        if self.config.method == "eagle":
            hidden: Tensor = self.layers[0](0, self.fc(pair), rope, attend)
        else:
            is_normed = self.config.norm_before_residual
            stream_ME = self.midlayer.get_submodule("hidden_norm")(hidden_ME) if is_normed else hidden_ME
            hidden = self.midlayer(0, stream_ME, rope, attend, pair)
        return hidden

    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        return _predict(self, text, anchors, embed)


class PackedEagle(PackedDrafter):
    model_class = EagleModel
    config: EagleShape

    def __init__(self, config: EagleShape, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(config, dtype, device)
        self.layer = PackedLayer(config.layer, dtype, self.device, norms=config.layer_norms)
        self.compiled = available.compile_layers(config.layer, [self.layer], None)

    def load_layers(self, tensors: Mapping[str, Tensor]) -> None:
        self.layer.load(tensors, self.config.layer_name + ".")
        if self.compiled is not None:
            self.compiled.loaded()

    def fuse(self, features_NF: Tensor) -> Tensor:
        features_NF = features_NF[..., : self.config.feature_size]
        return features_NF if self.config.method == "eagle" else self.fc(features_NF)

    def forward(
        self, embeddings_NE: Tensor, hidden_NE: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        rope, pair_NI = self.rope.at(positions_N), torch.cat([embeddings_NE, hidden_NE], dim=-1)
        if self.config.method == "eagle":
            stream_NE, read_NI = self.fc(pair_NI), None
        else:
            is_normed = self.config.norm_before_residual
            stream_NE = self.layer.input_norms["hidden_norm"](hidden_NE) if is_normed else hidden_NE
            read_NI = pair_NI
        if self.compiled is not None and self.compiled.serves(attend):
            return self.compiled.run(stream_NE, rope, attend, read_NI=read_NI)[0]
        return run_layer(self.layer, 0, stream_NE, rope, attend, read_NI)

    def predict(self, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
        return _predict(self, text, anchors, embed)


def _predict(drafter: EagleModel | PackedEagle, text: PackedText, anchors: Anchors, embed: Embed) -> Tensor:
    pairs = align(text.lengths, text.token_ids_N.device)
    embeddings_ME = embed(text.token_ids_N[pairs.token_index_M])
    hidden_ME = drafter.fuse(text.captured_NF[pairs.feature_index_M].to(embeddings_ME.dtype))
    attend = PackedCausal(drafter.config.layer, pairs.lengths)
    output_ME = drafter.forward(embeddings_ME, hidden_ME, pairs.positions_M, attend)
    is_asked_N = torch.zeros_like(text.token_ids_N, dtype=torch.bool)
    is_asked_N[upload(flatten_anchors(text.lengths, anchors), text.token_ids_N.device)] = True
    return output_ME[is_asked_N[pairs.token_index_M]]
