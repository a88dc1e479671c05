"""Options and progress of the commands that generate."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.apps.cli.options import DrafterName, Options, StopNumbers, StopWords
from tlt.base.config.drafter import DrafterSection, DraftVocabOption, check_served
from tlt.base.config.engine import DecoderSection, DeviceSection, EngineSection
from tlt.base.config.sampling import SamplingSection
from tlt.base.config.vllm import VllmSection
from tlt.base.io.hub import Repository, resolve_model
from tlt.base.speculation import Speculation
from tlt.base.types import Request, ResponseId, Rollout, SamplingParams, UserError, id_of, resolve_dtype
from tlt.base.value_types import MaxTokens, Samples, Seed, Threads

if TYPE_CHECKING:
    import torch
    from rich.console import ConsoleRenderable

    from tlt.engine.backend import RolloutBackend
    from tlt.engine.settings import EngineSettings


class SamplingOptions(SamplingSection, Options):
    """The sampling of responses:"""

    max_tokens: MaxTokens = SamplingParams.max_tokens
    """Length at which a response is cut off, in tokens; by default also where the model's window ends."""
    stop: StopWords = SamplingParams.stop
    """Text that ends a response, or a JSON list of such texts; the response keeps it. A text that is a
    special token counts as its id."""
    stop_ids: StopNumbers = SamplingParams.stop_ids
    """Token ids that end a response, beside the model's own."""
    samples: Samples = 1
    """Responses to every prompt."""
    seed: Seed = SamplingParams.seed
    """Seed of the sampling: the same seed gives the same tokens, whatever the speculation."""


class DeviceOptions(DeviceSection, Options):
    """The device that computes:"""

    threads: Threads = 1
    """CPU threads to compute with."""

    def choose_device(self) -> torch.device:
        from tlt.engine.build.model import resolve_device

        return resolve_device(self.device, "--device")

    def choose_dtype(self) -> torch.dtype:
        return resolve_dtype(self.dtype, self.choose_device().type)


class EngineOptions(VllmSection, DeviceOptions, DecoderSection, EngineSection, Options):
    """The engine, its drafter and its device:"""

    drafter: DrafterName = None
    """Learned drafter: a folder as tlt drafter train writes it, or OWNER/NAME on the hub. Drafts by retrieval
    (ngram) need none."""
    draft_vocab: DraftVocabOption = "auto"
    """Tokens that the learned drafter may propose. A number N: the N most frequent tokens of what is sampled.
    full: all tokens. auto: all, or fewer where the drafter's head takes a tenth of a forward or more. Changes
    the speed alone. For TLT's own engine."""

    def check_engine(self, speculation: Speculation, has_references: bool = False) -> None:
        """Raises UserError for an engine that could not be built."""
        from tlt.drafter.drafting.hybrid import drafter_kinds
        from tlt.drafter.drafting.reference_drafter import reference_kinds
        from tlt.speculation.tuner.tuner import make_tuner

        if self.engine == "vllm":
            check_served(self.draft_vocab, "--draft-vocab")
            from tlt.engine.vllm.preflight import check_vllm

            device, has_drafter = self.choose_device().type, self.drafter is not None
            check_vllm(speculation, has_drafter, self.choose_dtype(), device, self)
        kinds = drafter_kinds(self.drafter is not None)
        make_tuner(speculation, reference_kinds(kinds) if has_references else kinds)
        if self.drafter is not None and not self.drafter.is_dir() and Repository.parse(self.drafter) is None:
            remedy = "give a drafter folder, or OWNER/NAME on the hub"
            raise UserError(f"--drafter: {self.drafter} does not exist; {remedy}")
        self.choose_device()

    @property
    def drafter_folder(self) -> Path | None:
        return None if self.drafter is None else resolve_model(self.drafter)

    def engine_settings(self, speculation: Speculation, window: int | None = None) -> EngineSettings:
        from tlt.engine.settings import EngineSettings

        return EngineSettings(
            speculation,
            dtype=self.choose_dtype(),
            device=self.choose_device(),
            max_batch_size=self.max_batch_size,
            drafting=DrafterSection(vocabulary=self.draft_vocab),
            kv_gib=self.kv_gib,
            engine=self.engine,
            vllm=self,
            window=window,
        )


def longest(requests: Sequence[Request]) -> int:
    return max(len(request.prompt_ids) + request.params.max_tokens for request in requests)


def generate_in_order(
    engine: RolloutBackend, requests: Sequence[Request], responses: Iterable[Rollout] | None = None
) -> list[Rollout]:
    """responses: as they end; None: the engine's own, of one turn."""
    answered: dict[ResponseId, Rollout] = {}
    begin = time.monotonic()

    def progress() -> Progress:
        speed = engine.stats.num_tokens / (time.monotonic() - begin)
        longest_now = max((unfinished.num_tokens for unfinished in list(engine.running)), default=0)
        note = f"{speed:,.0f} tok/s, longest {longest_now:,} tokens"
        return Progress(len(answered), len(requests), "responses", note)

    with show_progress(progress):
        for rollout in engine.generate(requests) if responses is None else responses:
            answered[id_of(rollout)] = rollout
    return [answered[id_of(request)] for request in requests]


# ------------------------------------------------------------------------------------------------------------
# Progress


@dataclass(frozen=True)
class Progress:
    done: float
    total: float
    unit: str
    note: str

    def __str__(self) -> str:
        return f"{self.done:.0f} / {self.total:.0f} {self.unit}, {self.note}"


@contextlib.contextmanager
def show_busy(what: str = "loading") -> Iterator[None]:
    """Shows nothing off a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def show_progress(read: Callable[[], Progress], seconds: float = 10.0) -> Iterator[None]:
    """A bar on a terminal, elsewhere a line every `seconds` seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        def draw() -> ConsoleRenderable:
            progress, row = read(), Table.grid(padding=(0, 1))
            row.add_row(ProgressBar(total=progress.total, completed=progress.done, width=24), str(progress))
            return row

        with Live(get_renderable=draw, console=Console(stderr=True), transient=True, refresh_per_second=2):
            yield
        return
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(seconds):
            print(f"tlt: {read()}", file=sys.stderr, flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()
