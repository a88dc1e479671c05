"""`tlt drafter train` and `export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import model_validator

from tlt.apps.cli.data import Data, PromptOptions
from tlt.apps.cli.engine import DeviceOptions, Progress, generate_in_order, show_busy, show_progress
from tlt.apps.cli.options import AdapterName, DrafterName, File, ModelName, Options, Written
from tlt.apps.cli.summary import Summary, log, percent
from tlt.base.config.drafter import DraftVocabOption
from tlt.base.config.mistakes import mistake
from tlt.base.io.files import Record, check_new_folder
from tlt.base.io.hub import resolve_model
from tlt.base.speculation import Adaptive
from tlt.base.types import Request, Rollout, SamplingParams, UserError
from tlt.base.value_types import (
    BatchSize,
    BlockLayers,
    BlockLength,
    LearningRate,
    MaxTokens,
    PositiveFloat,
    PositiveInt,
    Samples,
    Seed,
    Temperature,
)
from tlt.training.saved.response_reader import read_responses

if TYPE_CHECKING:
    from tlt.engine.build.model import Model
    from tlt.models.decoder import ModelConfig
    from tlt.models.target import Target

_BLOCK_PRESETS = ("dflash", "dflash-pace", "dspark")


class AnswerOptions(PromptOptions):
    """The model's responses to prompts:"""

    adapter: AdapterName = None
    """LoRA adapter that is merged into the model: a folder as PEFT saves it, or OWNER/NAME on the hub."""
    samples: Samples = 1
    """Responses to every prompt of --prompts."""
    max_tokens: MaxTokens = 2048
    """Length at which a response to --prompts is cut off, in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature of the responses to --prompts; at 0 the most probable token is taken."""
    seed: Seed = 0
    """Seed of the sampling: the same seed gives the same responses."""
    max_batch_size: BatchSize = 64
    """Responses that are generated at a time."""

    def requests(self, prompts: Path, model: Model) -> list[Request]:
        from tlt.models.hf.prompts import make_requests

        vocab_size, window = model.config.vocab_size, model.config.max_positions
        encoded = self.read_prompts(prompts, model.tokenizer, vocab_size=vocab_size, window=window)
        params = SamplingParams(
            self.temperature, max_tokens=self.max_tokens, stop_ids=model.stop_ids, seed=self.seed
        )
        return make_requests(encoded, params, self.samples)


class DrafterTrain(AnswerOptions, DeviceOptions):
    """Train a drafter for a model on its own responses."""

    model: ModelName
    """The model to draft for: a Hugging Face checkpoint folder, or OWNER/NAME on the hub."""
    out: Annotated[Path, Written("DIR")]
    """Folder to write the drafter to; must not exist yet."""
    responses: File = None
    """JSONL of responses with prompt_ids and token_ids, as tlt generate writes it."""
    prompts: Data = None
    """Prompts, as for tlt generate, that the model answers first; instead of --responses."""
    init: DrafterName = None
    """Drafter to start from, a folder or OWNER/NAME on the hub, instead of a random one."""
    preset: Literal["eagle", "hass", "eagle3", "dflash", "dflash-pace", "dspark"] | None = None
    """Form of the drafter and method of its training (docs/drafter.md); by default that of --init, else
    hass. eagle, hass and eagle3 draft token by token, dflash, dflash-pace and dspark whole blocks."""
    layers: BlockLayers | None = None
    """Layers of a new block drafter; by default 2."""
    block: BlockLength | None = None
    """Tokens that a new block drafter drafts in one pass; by default 7."""
    draft_vocab: DraftVocabOption = "auto"
    """Tokens that the drafter is trained to propose. A number N: the N most frequent tokens of the responses.
    full: all tokens. auto: all, or fewer where the drafter's head takes a tenth of a forward or more.
        Later it can propose others, too."""
    epochs: PositiveFloat = 1.0
    """Passes over the responses; fractions are allowed."""
    learning_rate: LearningRate = 1e-3
    """Highest learning rate: it rises over the first 5 % of the tokens and falls over the second half."""
    tokens_per_micro_step: PositiveInt = 512
    """Tokens of an optimizer step."""
    seed: Seed = 0
    """Seed of the initial weights, of the order of the responses, and of the sampling with --prompts."""

    @model_validator(mode="after")
    def _agree(self) -> DrafterTrain:
        if (self.responses is None) == (self.prompts is None):
            given = "neither" if self.responses is None else "both"
            raise mistake(f"--responses, --prompts: {given} given; give one of them")
        for name in ("layers", "block"):
            if getattr(self, name) is not None and (
                self.init is not None or self.preset not in _BLOCK_PRESETS
            ):
                made = "that of --init is kept" if self.init is not None else "it is for block drafters alone"
                raise mistake(f"--{name}: {made}; leave it out")
        return self


class DrafterExport(Options):
    """Write a drafter for vLLM or SGLang, with a README.md that says how to serve it."""

    drafter: Annotated[Path, Written("DRAFTER", is_alone=True)]
    """Drafter of TLT or of another trainer: a folder, or OWNER/NAME on the hub."""
    target: Annotated[Path, Written("MODEL")]
    """The model that it drafts for: a folder, or OWNER/NAME on the hub. Some formats take rows of its head
    along."""
    to: Annotated[Path, Written("DIR")]
    """Folder to write; must not exist yet."""
    format: Literal[
        "vllm-eagle",
        "vllm-eagle3",
        "sglang-eagle3",
        "speculators",
        "vllm-dflash",
        "sglang-dflash",
        "speculators-dflash",
        "speculators-dspark",
        "deepspec-dspark",
    ]
    """Format to write: vllm-eagle for eagle and hass drafters; vllm-eagle3, sglang-eagle3 or speculators for
    eagle3 drafters; for dflash and dspark drafters one that ends in their name."""
    draft_vocab: DraftVocabOption = "auto"
    """Tokens that the drafter may propose, where the format has a head of the drafter's own. A number N: the
    N most frequent tokens. full: all tokens. auto: all, or fewer where the drafter's head takes a tenth of a
    forward or more."""
    responses: File = None
    """JSONL of responses whose tokens are counted to find the most frequent ones; by default the counts in
    the drafter's folder."""


def train(options: DrafterTrain) -> Record:
    check_new_folder(options.out, "--out")
    folder, adapter = resolve_model(options.model), options.adapter and resolve_model(options.adapter)
    with show_busy():
        import torch

        from tlt.drafter.formats.folder import choose_preset, load_drafter, save_drafter
        from tlt.drafter.shape import BlockOptions, drafter_shape
        from tlt.drafter.training.losses import PRESETS
        from tlt.drafter.training.offline import OfflineSettings, train_offline
        from tlt.drafter.vocabulary import DraftCosts, DraftVocabulary, check_wanted, choose_by
        from tlt.engine.build.drafter import build_draft_model, new_draft_model
        from tlt.engine.build.model import load_model
        from tlt.models.hf.weights import content_hash
        from tlt.models.new import new_target

        device, dtype = options.choose_device(), options.choose_dtype()
    source = load_model(folder, adapter=adapter)
    config, tensors = source.config, source.tensors
    stored = None if options.init is None else load_drafter(resolve_model(options.init), config, tensors)
    preset = PRESETS[options.preset or "hass"] if stored is None else choose_preset(options.preset, stored)
    block = BlockOptions(options.layers, options.block)
    shape = drafter_shape(config, preset.method, block=block) if stored is None else stored.config
    check_wanted(options.draft_vocab, shape)
    torch.set_num_threads(options.threads)
    requests = None if options.prompts is None else options.requests(options.prompts, source)
    rollouts = [] if options.responses is None else _read(options.responses, config)
    if options.responses is not None:
        _check_trainable(rollouts, f"--responses: {options.responses} has")
    log(f"model and drafter on {device}")
    target = new_target(config, dtype, device)
    target.load(tensors, version=0)
    if requests is not None:
        rollouts = _answer(options, target, requests)
        _check_trainable(rollouts, "--prompts: they have")
    if stored is None:
        model = new_draft_model(shape, target, rollouts, options.seed)
    else:
        model = build_draft_model(stored, device)
    vocabulary = counts_V = None
    if shape.can_choose:
        vocabulary = DraftVocabulary(DraftCosts.of(config, shape), options.draft_vocab)
        choose_by(rollouts, vocabulary)
    settings = OfflineSettings(
        options.epochs,
        options.learning_rate,
        options.tokens_per_micro_step,
        options.seed,
        options.temperature,
    )
    progress = Progress(0, 100, "% of the tokens", "reading the responses")

    def on_progress(share: float, loss: float | None) -> None:
        nonlocal progress
        does = "reading the responses" if loss is None else f"training, loss {loss:.4f}"
        progress = Progress(100 * share, 100, "% of the tokens", does)

    with show_progress(lambda: progress):
        summary = train_offline(model, target, preset, rollouts, settings, on_progress, vocabulary)
    about = {
        "preset": preset.name,
        "policy_hash": content_hash(tensors),
        "num_tokens": summary.tokens,
        "cpu_seconds": summary.cpu_seconds,
        "acceptance": summary.acceptance,
        "init": str(options.init or "random"),
    }
    if vocabulary is not None:
        counts_V = vocabulary.counts_V
    save_drafter(options.out, model, torch.bfloat16, about, counts_V)
    return {"responses": len(rollouts), **asdict(summary), "device": str(device), "out": str(options.out)}


def _read(file: Path, config: ModelConfig) -> list[Rollout]:
    return read_responses(file, vocab_size=config.vocab_size, window=config.max_positions)


def _check_trainable(rollouts: Sequence[Rollout], where: str) -> None:
    from tlt.drafter.training.buffer import is_trainable

    if not any(map(is_trainable, rollouts)):
        raise UserError(f"{where} no response of three tokens or more; give longer ones")


def _answer(options: DrafterTrain, target: Target, requests: Sequence[Request]) -> list[Rollout]:
    from tlt.engine.build.engine import build_engine
    from tlt.engine.settings import EngineSettings

    settings = EngineSettings(Adaptive(), device=target.device, max_batch_size=options.max_batch_size)
    engine = build_engine(target.config, target, settings)
    rollouts = generate_in_order(engine, requests)
    engine.release()
    return rollouts


def export(options: DrafterExport) -> Record:
    check_new_folder(options.to, "--to")
    folder, drafter_folder = resolve_model(options.target), resolve_model(options.drafter)
    with show_busy():
        from tlt.drafter.formats.export import (
            FORMATS,
            check_format,
            export_drafter,
            lacks_counts,
            mismatch,
            unequal_key_norms,
            with_vocabulary,
        )
        from tlt.drafter.formats.folder import load_drafter
        from tlt.drafter.formats.layouts import DescribedTarget
        from tlt.drafter.vocabulary import count_tokens
        from tlt.models.hf.config import config_to_hf
        from tlt.models.hf.families import load_model_config
        from tlt.models.hf.weights import content_hash, load_tensors

    config = load_model_config(folder)
    tensors = load_tensors(folder, config)
    drafter = load_drafter(drafter_folder, config, tensors)
    if options.responses is not None:
        token_ids = (token for rollout in _read(options.responses, config) for token in rollout.token_ids)
        drafter = replace(drafter, counts_V=count_tokens(token_ids, config.vocab_size))
    check_format(drafter, options.format)
    name, wanted = options.format, options.draft_vocab
    lack = lacks_counts(drafter, name, wanted, config) if wanted == "auto" else None
    drafter = with_vocabulary(drafter, name, wanted, config)
    (architecture,) = config_to_hf(config, drafter.tensors["fc.weight"].dtype)["architectures"]
    embedding_VE = tensors["model.embed_tokens.weight"]
    head_VE = tensors.get("lm_head.weight", embedding_VE)
    target = DescribedTarget(str(options.target), architecture, head_VE, content_hash(tensors), embedding_VE)
    warnings = lack, mismatch(drafter, target), unequal_key_norms(drafter, name), drafter.note
    for warning in filter(None, warnings):
        print(f"tlt drafter export: warning: {warning}", file=sys.stderr)
    export_drafter(drafter, name, target, options.to)
    engine, size = FORMATS[name].engine, drafter.config.draft_vocab_size
    return {"format": name, "engine": engine, "draft_vocab": size, "out": str(options.to)}


# ── summaries for people ────────────────────────────────────────────────────────────────────────────────────


def summarize_training(record: Record) -> Summary:
    rows = {name: record[name] for name in ("responses", "tokens", "steps", "seconds", "loss", "draft_vocab")}
    rows["device"] = record["device"]
    rows["coverage of the tokens"] = percent(record["coverage"])
    if record["warning"]:
        rows["warning"] = record["warning"]
    share = record["acceptance"]
    accepted = "" if share is None else f", accepted with probability {percent(share)}"
    return Summary(f"drafter written to {record['out']}{accepted}", rows)


def summarize_export(record: Record) -> Summary:
    rows = {"format": record["format"], "draft vocabulary": record["draft_vocab"]}
    return Summary(f"drafter for {record['engine']} written to {record['out']}", rows)
