"""Options that commands share which read prompts or problems: the rows of the data, and the form of
prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tlt.cli.options import JsonObject, JsonTexts, Options, Written
from tlt.io.data import DataSource, read_data

if TYPE_CHECKING:
    from tlt.hf.prompts import EncodedPrompt
    from tlt.hf.tokenizer import Tokenizer

Data = Annotated[Path | None, Written("DATA")]
Subset = Annotated[str | None, Written("NAME")]
Columns = JsonTexts


class DataOptions(Options):
    """The rows of the data:"""

    subset: Subset = None
    """Configuration of a dataset, such as main."""
    split: Annotated[str | None, Written("NAME")] = None
    """Split of a dataset, such as test or 'test[:100]'; by default the only one, else test."""
    columns: Columns = Field(default_factory=dict)
    """The data's names of columns by TLT's, such as '{"prompt": "question"}'."""

    def source(self, name: Path, option: str) -> DataSource:
        """Returns the rows of the data that an option names."""
        return DataSource(name, option, self.subset, self.split, self.columns, usual_split="test")


class PromptOptions(DataOptions):
    """The rows of the prompts, and how a prompt is written:"""

    chat: bool = False
    """Whether a text prompt goes into the chat template as the user's message; messages always do."""
    system_prompt: Annotated[str | None, Written("TEXT")] = None
    """System message to begin every prompt with; a text prompt then becomes the user's message."""
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    """Variables for the chat template, such as '{"enable_thinking": false}'."""

    def read_prompts(
        self, name: Path, tokenizer: Tokenizer | None, *, vocab_size: int, window: int
    ) -> list[EncodedPrompt]:
        """Returns the prompts of --prompts as token ids."""
        from tlt.hf.prompts import ChatFormat, describe_raw, encode_prompts

        chat = ChatFormat(self.chat, self.system_prompt, self.chat_template_kwargs)
        records = read_data(self.source(name, "--prompts"))
        if raw := describe_raw((record for _, record in records), tokenizer, chat, "--chat true"):
            print(f"tlt: {raw}", file=sys.stderr, flush=True)
        return encode_prompts(records, tokenizer, chat, vocab_size=vocab_size, window=window)
