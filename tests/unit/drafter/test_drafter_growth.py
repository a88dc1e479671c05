"""A drafter that grows with its target computes the same, and proposes the same trees.

All weights are random, those of the norms included, and the eps of the norms is large enough to matter. The
target gains layers, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lossless.helpers import CONFIG, VOCAB, make_policy
from tests.unit.drafter.parts import make_requests, random_tokens
from tlt.assembly.engine import EngineSettings, build_engine
from tlt.config.drafter import DrafterSection
from tlt.drafter.block import BlockModel, run_blocks
from tlt.drafter.eagle import EagleModel
from tlt.drafter.formats.folder import StoredDrafter, load_drafter, save_stored
from tlt.drafter.forms import new_model
from tlt.drafter.growth import grow_drafter, grow_shape
from tlt.drafter.model import DraftModel
from tlt.drafter.shape import BlockOptions, BlockShape, DrafterShape, Method, drafter_shape
from tlt.drafter.training.buffer import PackedBatch
from tlt.hf.geometry import Geometry, grow_config
from tlt.hf.growth import NOISE, GrownTensors
from tlt.models.attention import PackedCausal
from tlt.models.decoder import ModelConfig
from tlt.models.packed import PackedTransformer
from tlt.speculative.strategy import Strategy
from tlt.speculative.verify import verify
from tlt.tuning.tuner import Fixed
from tlt.types import DraftTree, UserError

LARGE = ModelConfig("llama", 131, 96, 112, 8, 12, 4, 16, rope_theta=77.0, tie_embeddings=True)
TREE = Strategy("learned", 3, 2, 6)
TOKENS = torch.tensor(random_tokens(30, seed=3))


def grow(small: ModelConfig, **changes: Any) -> ModelConfig:
    return grow_config(small, Geometry("large", dataclasses.replace(LARGE, **changes))).config


def policy_of(config: ModelConfig) -> dict[str, Tensor]:
    return dict(make_policy(config=config).named_parameters())


def stored(model: DraftModel, **about: Any) -> StoredDrafter:
    return StoredDrafter(model.config, model.state_dict(), about)


# ── EAGLE ───────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = dataclasses.replace(CONFIG, num_layers=6, rms_norm_eps=3e-3)
EAGLES: dict[str, DrafterShape] = {
    "eagle": drafter_shape(SMALL),
    "eagle, reduced": drafter_shape(SMALL, "eagle", VOCAB - 9),
    "eagle3": drafter_shape(SMALL, "eagle3"),
    "eagle3, reduced": drafter_shape(SMALL, "eagle3", VOCAB - 9),
    "eagle3, reads the features": dataclasses.replace(drafter_shape(SMALL, "eagle3"), capture=(0, 3, 6)),
}


def random_drafter(shape: DrafterShape) -> DraftModel:
    model, generator = new_model(shape).double(), torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = (
                0.1 if shape.method == "eagle" else 0.3
            )  # its own states are not normed, and would explode
            parameter.copy_(1 + 0.4 * drawn if "norm" in name else scale * drawn)
    if shape.is_reduced:
        model.set_vocabulary(torch.arange(4, 4 + shape.draft_vocab_size))
    return model


@torch.no_grad()
def chain_logits(drafter: StoredDrafter, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits of drafts at all of TOKENS: of the target's layers, then of four own states that go
    on from each other, without any engine."""
    target = PackedTransformer(config, torch.float64)
    target.load(tensors, version=0)
    model = new_model(drafter.config).double()
    assert isinstance(model, EagleModel)
    model.load_state_dict(drafter.tensors)
    attend = PackedCausal(config, [len(TOKENS)])
    hidden = model.fuse(
        target.forward_capturing(TOKENS, attend.positions(), attend, drafter.config.capture)[1]
    )
    attend, found = PackedCausal(drafter.config.layer, [len(TOKENS)]), []
    for _ in range(5):
        hidden = model(target.embed(TOKENS), hidden, attend.positions(), attend)
        found.append(model.logits(hidden, model.rows(target.head_VE, None)))
    return torch.stack(found)


@pytest.mark.parametrize("geometry", ["tied", "untied", "shallow"])
@pytest.mark.parametrize("case", EAGLES)
def test_the_grown_eagle_computes_what_the_small_one_does(case: str, geometry: str) -> None:
    tensors, config = policy_of(SMALL), GEOMETRIES[geometry]
    facts = {"preset": "hass", "num_tokens": 9, "cpu_seconds": 0.5, "acceptance": 0.75}
    small = stored(random_drafter(EAGLES[case]), **facts, target="of the small one", init="elsewhere")
    grown = grow_drafter(small, SMALL, tensors, config, torch.float64, noise=0.0)
    assert grown.about == facts
    expected = chain_logits(small, SMALL, tensors)
    found = chain_logits(grown, config, GrownTensors(SMALL, tensors, config, torch.float64, 0.0))
    num = expected.shape[-1]
    assert found.shape[-1] == (num if grown.config.is_reduced else LARGE.vocab_size)
    torch.testing.assert_close(found[..., :num], expected, atol=1e-9, rtol=0)
    assert (found[..., num:] < -50).all()  # no unused id is ever proposed


@pytest.mark.parametrize("case", EAGLES)
def test_with_noise_the_eagle_ranks_the_same_and_no_matrix_holds_zeros(case: str) -> None:
    tensors, config = policy_of(SMALL), GEOMETRIES["tied"]
    small = stored(random_drafter(EAGLES[case]))
    grown = grow_drafter(small, SMALL, tensors, config, torch.float64)
    expected = chain_logits(small, SMALL, tensors)
    found = chain_logits(grown, config, GrownTensors(SMALL, tensors, config, torch.float64))
    check_noise(grown, found, expected)


def check_noise(grown: StoredDrafter, found: Tensor, expected: Tensor) -> None:
    """The noise changes the logits a little and no ranking, and fills every matrix."""
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert 0 < (found[..., : expected.shape[-1]] - expected).abs().max() < 1e-5
    for name, tensor in grown.tensors.items():
        if tensor.dim() == 2:  # the row that keeps the constant is the only one
            assert (tensor == 0).sum() <= tensor.shape[1], name


def test_the_grown_eagle3_reads_the_layers_that_the_small_one_reads() -> None:
    """They keep their numbers; only the features follow the last layer."""
    for case, capture in (("eagle3", (1, 3, 5)), ("eagle3, reads the features", (0, 3, 8))):
        grown = grow_shape(EAGLES[case], SMALL, GEOMETRIES["tied"])
        assert (grown.capture, grown.layer.num_layers, grown.fc_size) == (capture, 1, 3 * 96)


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = BlockOptions(num_layers=2, num_drafted=4, mask_token_id=13)


def shape_of(method: Method, draft_vocab: int | None = None, **changes: Any) -> BlockShape:
    """A block drafter's shape. changes: other sizes of its layers; `capture`: other layers to read."""
    shape = drafter_shape(SMALL, method, draft_vocab, OPTIONS)
    assert isinstance(shape, BlockShape)
    capture = changes.pop("capture", shape.capture)
    return dataclasses.replace(shape, capture=capture, layer=dataclasses.replace(shape.layer, **changes))


OF_ITS_OWN = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 40, "rope_theta": 90.0}
BLOCKS = {
    "dflash": shape_of("dflash"),
    "dspark": shape_of("dspark"),
    "dspark, reduced": shape_of("dspark", VOCAB - 9),
    "dspark, layers of sizes of their own": shape_of("dspark", **OF_ITS_OWN, rms_norm_eps=9e-3),
    "dflash, reads the features": shape_of("dflash", capture=(1, 3, 6)),
}
GEOMETRIES = {
    "tied": grow(SMALL),
    "untied": grow(SMALL, tie_embeddings=False),
    "shallow": grow(SMALL, num_layers=3),
}


@torch.no_grad()
def slot_logits(
    drafter: StoredDrafter, config: ModelConfig, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Returns the logits of every slot of blocks at all of TOKENS, behind every token there, and the
    confidence's."""
    target = PackedTransformer(config, torch.float64)
    target.load(tensors, version=0)
    model = new_model(drafter.config).double()
    assert isinstance(model, BlockModel)
    model.load_state_dict(drafter.tensors)
    attend, num = PackedCausal(config, [len(TOKENS)]), len(TOKENS)
    captured = target.forward_capturing(TOKENS, attend.positions(), attend, drafter.config.capture)[1]
    text = PackedBatch(TOKENS, captured, (num,), torch.ones(num - 1))
    hidden_AUE = run_blocks(model, text, [range(num)], target.embed)[:, model.config.first_slot :]
    logits = model.logits(hidden_AUE, model.rows(target.head_VE, None))
    before = TOKENS[:, None].expand(hidden_AUE.shape[:2])
    if (bias := model.bias(before, None)) is not None:
        logits = logits + bias
    has_confidence = model.config.has_confidence
    return logits, model.confidence_head(hidden_AUE, model.markov(before)) if has_confidence else None


def both(
    case: str, geometry: str, noise: float
) -> tuple[StoredDrafter, tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Returns the grown drafter, and the logits of the small one and of the grown one."""
    small, tensors, config = stored(random_drafter(BLOCKS[case])), policy_of(SMALL), GEOMETRIES[geometry]
    grown = grow_drafter(small, SMALL, tensors, config, torch.float64, noise)
    target = GrownTensors(SMALL, tensors, config, torch.float64, noise)
    return grown, slot_logits(small, SMALL, tensors), slot_logits(grown, config, target)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("case", BLOCKS)
def test_the_grown_block_computes_what_the_small_one_does(case: str, geometry: str) -> None:
    grown, (expected, confidence), (found, grown_confidence) = both(case, geometry, 0.0)
    num = expected.shape[-1]
    torch.testing.assert_close(found[..., :num], expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(grown_confidence, confidence, atol=1e-9, rtol=0)
    assert found.shape[-1] == (num if grown.config.is_reduced else LARGE.vocab_size)
    assert (found[..., num:] < -50).all()  # no unused id is ever proposed


@pytest.mark.parametrize("case", BLOCKS)
def test_with_noise_the_block_ranks_the_same_and_no_matrix_holds_zeros(case: str) -> None:
    grown, (expected, _), (found, _) = both(case, "tied", NOISE)
    check_noise(grown, found, expected)


def test_the_grown_block_has_the_sizes_of_the_geometry_and_the_layers_and_slots_of_the_small_one() -> None:
    """A layer of the target keeps its number; the features follow its last layer."""
    shape, config = BLOCKS["dspark"], GEOMETRIES["tied"]
    grown = grow_shape(shape, SMALL, config)
    assert isinstance(grown, BlockShape)
    assert (shape.markov_rank, grown.layer.hidden_size, grown.num_target_layers) == (16, 96, 8)
    assert (grown.layer.num_layers, grown.block_size, grown.mask_token_id, grown.capture) == (
        2,
        4,
        13,
        (2, 4),
    )
    assert grow_shape(BLOCKS["dflash, reads the features"], SMALL, config).capture == (1, 3, 8)
    wide = grow_shape(shape, SMALL, grow(SMALL, hidden_size=896))
    assert isinstance(wide, BlockShape)
    assert wide.markov_rank == 112
    assert wide.numbers_per_level == 112 * LARGE.vocab_size


def test_a_wider_markov_head_adds_the_same() -> None:
    small, tensors, config = (
        stored(random_drafter(BLOCKS["dspark"])),
        policy_of(SMALL),
        grow(SMALL, hidden_size=256),
    )
    grown = grow_drafter(small, SMALL, tensors, config, torch.float64, 0.0)
    assert grown.tensors["markov_head.markov_w1.weight"].shape == (LARGE.vocab_size, 32)
    expected, confidence = slot_logits(small, SMALL, tensors)
    found, grown_confidence = slot_logits(
        grown, config, GrownTensors(SMALL, tensors, config, torch.float64, 0.0)
    )
    torch.testing.assert_close(found[..., :VOCAB], expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(grown_confidence, confidence, atol=1e-9, rtol=0)


# ── in the engine ───────────────────────────────────────────────────────────────────────────────────────────


def run(
    config: ModelConfig, tensors: Mapping[str, Tensor], drafter: StoredDrafter
) -> tuple[list[Any], list[Any]]:
    """Returns the responses, and every verified tree with its verdict."""
    trees = []

    def noted(tree: DraftTree, *given: Any) -> Any:
        verdicts = verify(tree, *given)
        trees.append((tree.tokens_BN.tolist(), tree.parents_BN.tolist(), [v.tokens for v in verdicts]))
        return verdicts

    section = DrafterSection(confidence_threshold=0.0)
    settings = EngineSettings(dtype=torch.float64, max_batch_size=4, drafting=section)
    engine = build_engine(config, tensors, settings, drafter, tuner=Fixed(TREE), verify=noted)
    rollouts = list(engine.generate(make_requests()))
    return [(r.problem_id, r.sample_index, r.token_ids) for r in rollouts], trees


@pytest.mark.parametrize("case", ["eagle", "eagle3", "dflash", "dspark", "dspark, reduced"])
def test_the_engine_drafts_and_accepts_the_same_with_everything_grown(case: str, tmp_path: Path) -> None:
    """Target and drafter, noise included, at temperature 0.7: every proposed tree, every verdict, every
    response; and the drafter through its folder."""
    drafter = stored(random_drafter(EAGLES[case] if case in EAGLES else BLOCKS[case]))
    tensors, config = policy_of(SMALL), grow(SMALL)
    grown = GrownTensors(SMALL, tensors, config, torch.float64)
    save_stored(
        tmp_path / "drafter", grow_drafter(drafter, SMALL, tensors, config, torch.float64), torch.float64
    )
    expected = run(SMALL, tensors, drafter)
    found = run(config, grown, load_drafter(tmp_path / "drafter", config))
    accepted = sum(len(verdict) > 1 for _, _, verdicts in expected[1] for verdict in verdicts)
    assert accepted > 5
    assert found == expected


# ── what does not grow ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (
            dataclasses.replace(drafter_shape(SMALL), has_bias=True),
            "a drafter with a head or bias of its own does not grow; give one that TLT trained, ",
        ),
        (
            dataclasses.replace(BLOCKS["dflash"], owns_head=True),
            "a drafter with a head or bias of its own does not grow",
        ),
        (
            shape_of("dflash", intermediate_size=200),
            "the geometry has intermediate_size 112, but the drafter takes 200; give a larger one",
        ),
    ],
)
def test_a_drafter_that_does_not_grow_is_refused_in_one_line(shape: DrafterShape, part: str) -> None:
    with pytest.raises(UserError) as refused:
        grow_shape(shape, SMALL, GEOMETRIES["tied"])
    assert str(refused.value).startswith(f"--geometry: {part}")
    assert "\n" not in str(refused.value)
