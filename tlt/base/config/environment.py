"""The section [environment]."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tlt.base.config.mistakes import mistake
from tlt.base.config.section import Section, split_words
from tlt.base.value_types import PositiveInt, Seconds

Name = Annotated[str, Field(min_length=1)]


class EnvironmentSection(Section):
    """Responses of several turns: what the policy can call, and what answers it (docs/environments.md).
    Prompts then use the tokenizer's chat template."""

    tools: Annotated[tuple[Name, ...], Field(strict=False), BeforeValidator(split_words)] = ()
    """Functions that the policy can call, typed and with docstrings, as "package.module:function" or
    "FILE.py:function"; on the command line with commas between."""
    factory: Name | None = None
    """Class of an environment, as TRL's environment_factory: reset(**row), public methods that are tools, and
    optionally get_reward() and respond(messages)."""
    factories: dict[str, str] = Field(default={})
    """Several such classes by name; the row's column environment gives the name."""
    respond: Name | None = None
    """Function that answers turns without a call, given the messages so far; None from it ends the
    response."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a response."""
    tool_timeout_seconds: Seconds = 10.0
    """Time limit of a single call; after it the policy reads that there is no result."""
    deterministic: bool = True
    """Whether tools and environments are functions of what they were told. false says that one is not, such
    as a search of the web: header and report then tell that another run with this seed may part."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes of each rank that run tools and environments: as many calls run at once."""

    @property
    def is_used(self) -> bool:
        return bool(self.tools or self.has_factory or self.respond)

    @property
    def has_factory(self) -> bool:
        return bool(self.factory or self.factories)

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("factory") and values.get("factories"):
            raise mistake("factory and factories exclude each other: remove one")
        return values
