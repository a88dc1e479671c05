"""Shared options of commands that read data."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tlt.apps.cli.options import JsonObject, JsonTexts, Options, Written
from tlt.apps.cli.summary import log
from tlt.base.config.environment import EnvironmentSection
from tlt.base.config.section import Day
from tlt.base.io.data import DataSource, read_data
from tlt.base.types import UserError
from tlt.base.value_types import PositiveInt

if TYPE_CHECKING:
    from tlt.models.hf.prompts import ChatFormat, EncodedPrompt
    from tlt.models.hf.tokenizer import Tokenizer

Data = Annotated[Path | None, Written("DATA")]
Subset = Annotated[str | None, Written("NAME")]
Columns = JsonTexts
NO_ENVIRONMENT = EnvironmentSection()


class DataOptions(Options):
    """The rows of the data:"""

    subset: Subset = None
    """Configuration of a dataset, such as main."""
    split: Annotated[str | None, Written("NAME")] = None
    """Split of a dataset, such as test or 'test[:100]'; by default the only one, else test."""
    columns: Columns = Field(default_factory=dict)
    """The data's names of columns by TLT's, such as '{"prompt": "question"}'."""

    def source(self, name: Path, option: str) -> DataSource:
        return DataSource(name, option, self.subset, self.split, self.columns, usual_split="test")


class PromptOptions(DataOptions):
    """The rows of the prompts, and how a prompt is written:"""

    chat: bool = False
    """Whether a text prompt goes into the chat template as the user's message; messages always do."""
    system_prompt: Annotated[str | None, Written("TEXT")] = None
    """System message to begin every prompt with; a text prompt then becomes the user's message."""
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    """Variables for the chat template, such as '{"enable_thinking": false}'."""
    date: Annotated[Day | None, Written("DATE")] = None
    """Date that the chat template writes, where it writes one, such as 2026-11-26; by default today."""
    max_prompt_tokens: PositiveInt | None = None
    """Length of the longest prompt, in tokens; longer ones are left out, and counted."""

    def read_prompts(
        self,
        name: Path,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        window: int,
        environment: EnvironmentSection = NO_ENVIRONMENT,
    ) -> list[EncodedPrompt]:
        from tlt.models.hf.prompts import describe_prompts, describe_template, encode_prompts

        chat = self.chat_format(environment)
        given, longest = read_data(self.source(name, "--prompts")), self.max_prompt_tokens
        records = given
        if environment.is_used:
            from tlt.training.build.environment import check_turns, with_environment

            if tokenizer is None:
                raise UserError("--environment: needs a tokenizer, but the model's folder has none; add it")
            records = with_environment(environment, given)
            check_turns(environment, given, tokenizer, chat)
        rows = [record for _, record in records]
        for line in describe_template(rows, tokenizer, chat, "--chat true"):
            log(line)
        prompts = encode_prompts(
            records, tokenizer, chat, vocab_size=vocab_size, window=window, longest=longest
        )
        for line in describe_prompts(rows, len(prompts), longest, "--max-prompt-tokens"):
            log(line)
        row_of = {id(shown): row for (_, shown), (_, row) in zip(records, given, strict=True)}
        return [replace(prompt, record=row_of[id(prompt.record)]) for prompt in prompts]

    def chat_format(self, environment: EnvironmentSection = NO_ENVIRONMENT) -> ChatFormat:
        from tlt.models.hf.prompts import ChatFormat

        day = None if self.date is None else datetime.date.fromisoformat(self.date)
        wraps = self.chat or environment.is_used
        return ChatFormat(wraps, self.system_prompt, self.chat_template_kwargs, day)
