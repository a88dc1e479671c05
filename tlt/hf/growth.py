"""Grows the tensors of a small model into a large geometry that computes the same function (as Net2Net, arXiv
1511.05641).

    hidden size e → E    the small model's dimensions come first, the others hold nothing. RMSNorm divides by a mean that is e/E
                         of the small one: its weights get √(e/E), and eps e/E (grow_config)
    head size d → D      the rotary pair (i, i + d/2) goes where the frequency is the same, to (i·D/d, D/2 + i·D/d); scores are
                         divided by √D, so queries get √(D/d)
    heads h → H          a query goes to a head whose keys and values are those that it reads (geometry.py)
    MLP f → F            further units write nothing
    layers l → L         further layers write nothing
    vocabulary v → V     the last hidden dimension, the constant, holds the same small number for every token; the head of the
                         unused ids reads it with a weight so negative that none of them is ever drawn

Nothing is not zero but tiny noise, so that no kernel and no power limit profits. What it changes is of
second order: to come back into the small model's dimensions it has to pass two matrices of noise. Every
tensor is made when it is asked for.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tlt.hf.geometry import kv_sources, query_places
from tlt.hf.weights import expected_shapes
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig, Transformer

NOISE = 1e-4
"""Of a matrix's own size. Its square, times the some hundred paths back, is below what float32 rounds."""

CONSTANT = 1e-5
"""Of the size of an embedding, and of a feature: it adds its square to the mean of a norm, 1e-12 of it at
hidden size 100."""

UNUSED_LOGIT = -100.0
"""Of the ids that the small model has not, at most. With 150,000 of them one is drawn once in 1e30 tokens."""

NUM_PROBES = 64
"""Tokens on which the size of the residual stream is measured."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor. size: in the grown tensor.
    places: where the small one's entries go.
    sources: which entries, in this order; None: all."""

    size: int
    places: Tensor
    sources: Tensor | None = None

    @staticmethod
    def first(num: int, size: int) -> Axis:
        """Returns the axis whose entries stay where they are."""
        return Axis(size, torch.arange(num))


@dataclass(frozen=True)
class Form:
    """How one kind of tensor grows: its dimensions, and a factor on its values. is_norm: what is new is no
    noise, but as large as the rest: there it meets noise."""

    axes: tuple[Axis, ...]
    factor: float = 1.0
    is_norm: bool = False

    def grow(self, values: Tensor, noise: Tensor) -> Tensor:
        """Writes the values over the noise, which has the grown tensor's shape, and returns it."""
        for dim, axis in enumerate(self.axes):
            values = values if axis.sources is None else values.index_select(dim, axis.sources)
        sides = [
            axis.places.view(-1, *[1] * (len(self.axes) - 1 - dim)) for dim, axis in enumerate(self.axes)
        ]
        columns = tuple(side.to(noise.device) for side in sides)
        noise[columns] = (values.double() * self.factor).to(noise.device, noise.dtype)
        return noise

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True)
class Widening:
    """How the tensors of decoder layers grow from the small config to the grown one."""

    small: ModelConfig
    grown: ModelConfig

    @property
    def constant(self) -> int:
        """The hidden dimension that holds the constant."""
        return self.grown.hidden_size - 1

    @property
    def norm_factor(self) -> float:
        return math.sqrt(self.small.hidden_size / self.grown.hidden_size)

    @property
    def hidden(self) -> Axis:
        return Axis.first(self.small.hidden_size, self.grown.hidden_size)

    @property
    def norm(self) -> Form:
        return Form((self.hidden,), self.norm_factor, is_norm=True)

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The form of every tensor of a layer, by its name there."""
        small, grown, hidden = self.small, self.grown, self.hidden
        mlp = Axis.first(small.intermediate_size, grown.intermediate_size)
        head, size = Axis.first(small.head_dim, grown.head_dim), grown.head_dim / small.head_dim
        rotary = Axis(grown.head_dim, _rotary_places(small.head_dim, grown.head_dim))
        query, key, value = self._queries(rotary), self._keys(rotary), self._keys(head)
        # Qwen3 divides queries and keys by a mean over D beside the eps of the hidden size. `matched` lets
        # that eps weigh as much as before, and else cancels out. The mean is d/D of the small one: queries
        # have their √(D/d), keys lose it again.
        matched = math.sqrt(size) * self.norm_factor if grown.qk_norm else 1.0
        of_query = matched if grown.qk_norm else math.sqrt(size)
        forms = {"input_layernorm.weight": self.norm, "post_attention_layernorm.weight": self.norm}
        for name, axis, factor in (("q", query, of_query), ("k", key, matched), ("v", value, 1.0)):
            forms[f"self_attn.{name}_proj.weight"] = Form((axis, hidden), factor)
            forms[f"self_attn.{name}_proj.bias"] = Form((axis,), factor)
        forms["self_attn.q_norm.weight"] = Form((rotary,), 1.0, is_norm=True)
        forms["self_attn.k_norm.weight"] = Form((rotary,), 1 / math.sqrt(size), is_norm=True)
        forms["self_attn.o_proj.weight"] = Form((hidden, self._queries(head)))
        forms["mlp.gate_proj.weight"] = forms["mlp.up_proj.weight"] = Form((mlp, hidden))
        forms["mlp.down_proj.weight"] = Form((hidden, mlp))
        return forms

    def _queries(self, within: Axis) -> Axis:
        """Returns the axis of all query heads, one after the other. within: a head's own dimensions."""
        heads = torch.tensor(query_places(self.small, self.grown))
        return Axis(self.grown.num_heads * within.size, _inside(heads, within.size, within.places))

    def _keys(self, within: Axis) -> Axis:
        """Returns the axis of all kv heads. within: a head's own dimensions."""
        heads, num = torch.tensor(kv_sources(self.small, self.grown)), self.small.head_dim
        places = _inside(torch.arange(len(heads)), within.size, within.places)
        return Axis(self.grown.num_kv_heads * within.size, places, _inside(heads, num, torch.arange(num)))

    def grow(
        self, name: str, layer: Mapping[str, Tensor], noise: Noise, seed: str, is_idle: bool = False
    ) -> Tensor:
        """Returns a layer's tensor. layer: the small one's tensors, by their names within it.
        is_idle: the layer is a further one, and all noise but for its norms; `layer` says how large.
        seed: decides the noise."""
        form, like = self.forms[name], layer.get(name)
        if like is None:  # a bias that the small model has not: zero where it would count
            weight = layer[name.removesuffix("bias") + "weight"]
            like, size = torch.zeros(len(weight), dtype=weight.dtype), rms(weight)
        else:
            size = rms(like) * form.factor
        if form.is_norm:
            grown = torch.full(form.shape, size, dtype=noise.dtype, device=noise.device)
        else:
            grown = noise.draw(form.shape, size, seed)
        if (
            name == "self_attn.o_proj.weight"
        ):  # a further head may read the very values of a group: noise is met once only
            grown[: self.small.hidden_size] *= noise.scale
        if not is_idle:
            form.grow(like, grown)
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            grown[self.constant] = 0  # nothing is ever added to the constant
        return grown


@dataclass(frozen=True)
class Noise:
    """Uniform noise. scale: of the size of what it surrounds; 0 leaves zeros.
    device: where it is drawn; a GPU draws the noise of 7B in a second, a CPU in a minute."""

    scale: float
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def draw(self, shape: tuple[int, ...], size: float, seed: str) -> Tensor:
        """Returns noise of this root mean square times the scale, the same for the same seed and kind of
        device."""
        bound = math.sqrt(3) * self.scale * size
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(seed.encode()))
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device)
        return drawn.uniform_(-bound, bound, generator=generator)


class GrownTensors(Mapping[str, Tensor]):
    """The tensors of the grown model by their Hugging Face names, each made on the device when it is asked
    for."""

    def __init__(
        self,
        small: ModelConfig,
        tensors: Mapping[str, Tensor],
        grown: ModelConfig,
        dtype: torch.dtype,
        noise: float = NOISE,
        device: torch.device | str = "cpu",
    ) -> None:
        self._small, self._tensors, self._grown = small, tensors, grown
        self._noise, self._widening = Noise(noise, dtype, device), Widening(small, grown)
        self._names = list(expected_shapes(grown))
        self._embedding_size = rms(tensors["model.embed_tokens.weight"])
        self._feature_size = rms(tensors["model.norm.weight"])

    def __getitem__(self, name: str) -> Tensor:
        if name.startswith("model.layers."):
            number, inner = name.removeprefix("model.layers.").split(".", 1)
            is_idle = int(number) >= self._small.num_layers
            source = f"model.layers.{0 if is_idle else number}."
            layer = {
                key.removeprefix(source): tensor
                for key, tensor in self._tensors.items()
                if key.startswith(source)
            }
            return self._widening.grow(inner, layer, self._noise, name, is_idle)
        return self._final_norm() if name == "model.norm.weight" else self._rows(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without making it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _rows(self, name: str) -> Tensor:
        """Returns the embedding or the head, or what is both."""
        is_head = name == "lm_head.weight"
        source = name if name in self._tensors else "model.embed_tokens.weight"
        values, constant = self._tensors[source], self._widening.constant
        form = Form((Axis.first(self._small.vocab_size, self._grown.vocab_size), self._widening.hidden))
        grown = form.grow(values, self._noise.draw(form.shape, rms(values), name))
        grown[:, constant] = 0 if is_head else CONSTANT * self._embedding_size
        if is_head or self._grown.tie_embeddings:
            grown[self._small.vocab_size :, constant] = UNUSED_LOGIT / (CONSTANT * self._feature_size)
        return grown

    def _final_norm(self) -> Tensor:
        """Returns the weight that makes the constant a feature of its size where the residual stream is as
        large as on the probes, and hence the logit of an unused id what UNUSED_LOGIT says."""
        values, form = self._tensors["model.norm.weight"], self._widening.norm
        size, noise = rms(values) * form.factor, self._noise
        grown = form.grow(values, torch.full(form.shape, size, dtype=noise.dtype, device=noise.device))
        growth = residual_size(self._small, self._tensors) / self._embedding_size
        grown[self._widening.constant] = self._feature_size * growth * form.factor
        return grown


@torch.no_grad()
def residual_size(config: ModelConfig, tensors: Mapping[str, Tensor]) -> float:
    """Returns the largest root mean square of the residual stream before the final norm, over tokens of
    all the vocabulary."""
    model = Transformer(config)
    model.load_state_dict(dict(tensors))
    model.model.add_module("norm", nn.Identity())
    probes = torch.linspace(
        0, config.vocab_size - 1, min(NUM_PROBES, config.vocab_size, config.max_positions)
    ).long()
    attend = PackedCausal(config, [len(probes)])
    residual_NE: Tensor = model(probes, attend.positions(), attend)
    return float(residual_NE.square().mean(-1).sqrt().max())


def rms(tensor: Tensor) -> float:
    """Returns the root of the mean square of all entries."""
    return float(tensor.detach().double().square().mean().sqrt())


def _rotary_places(small: int, grown: int) -> Tensor:
    """Returns where the dimensions of a small head go, so that each keeps its frequency."""
    first = torch.arange(small // 2) * (grown // small)
    return torch.cat([first, grown // 2 + first])


def _inside(blocks: Tensor, size: int, places: Tensor) -> Tensor:
    """Returns the same places in each of these blocks of `size` entries."""
    return (blocks[:, None] * size + places).flatten()
