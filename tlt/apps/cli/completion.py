"""`tlt completion`: a shell script that holds all words, so TLT does not run while a user types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from tlt.apps.cli.options import Options, WithOverrides, Written, options_of, with_dashes
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.config.section import takes_a_path
from tlt.base.io.recipes import list_configs


class ShellCompletion(Options):
    """Print a script that lets a shell complete what is typed after tlt.

    bash: tlt completion bash > ~/.local/share/bash-completion/completions/tlt

    zsh: tlt completion zsh > ~/.tlt-completion.zsh, and source that file at the end of ~/.zshrc
    """

    shell: Annotated[Literal["bash", "zsh"], Written("bash|zsh", is_alone=True)]
    """The shell to print it for."""


@dataclass(frozen=True)
class Words:
    """words: what may follow an option; empty: any text.
    has_value: False: the option is a switch.
    """

    words: tuple[str, ...] = ()
    is_path: bool = False
    has_value: bool = True


SWITCH = Words(has_value=False)


def typed(kind: type[Options], has_record: bool) -> tuple[dict[str, Words], Words]:
    options = {"--help": SWITCH, **({"--json": SWITCH} if has_record else {})}
    alone = Words()
    for name, field in options_of(kind).items():
        hint, words = Written.of(field), _words(field)
        if hint is None or not hint.is_alone:
            options[f"--{with_dashes(name)}"] = SWITCH if hint and not hint.metavar else words
        else:
            recipes = list_configs() if name in ("config", "recipe") else []
            alone = Words((*alone.words, *words.words, *recipes), alone.is_path or words.is_path)
    return options, alone


def keys() -> dict[str, Words]:
    return {
        f"--{name}.{key}": _words(field)
        for name in Config.model_fields
        for key, field in section_of(Config, name).model_fields.items()
    }


def _words(field: FieldInfo) -> Words:
    return Words(tuple(_choices(field.annotation)), takes_a_path(field.annotation))


def _choices(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) not in (tuple, list, dict):
        for branch in get_args(kind):
            yield from _choices(branch)


# ── scripts ─────────────────────────────────────────────────────────────────────────────────────────────────


def script(shell: Literal["bash", "zsh"], commands: Mapping[str, tuple[type[Options], bool]]) -> str:
    """commands: option types, and whether `--json` is one."""
    return _offer(commands) + (_ZSH if shell == "zsh" else _BASH)


# Both shells share this. Arguments: the current word's index, it, the one before it, the first two.
_OFFER = """\
# completion of tlt, printed by tlt completion
_tlt_offer() {{
    local index=$1 cur=$2 prev=$3 name=$4
    local options= keys='{keys}'
    offered= files=
    if [ "$index" -eq 1 ]; then
        offered='{first} --help --version'
        return
    fi
    if [ "$index" -eq 2 ]; then
        case "$name" in
{second}
        esac
    else
        case "$name $5" in
            {pairs}) name="$name $5" ;;
        esac
    fi
    case "$name $prev" in
        {switches}) prev= ;;
{values}
        *' --'*) return ;;
    esac
    if [ "${{prev#--}}" = "$prev" ]; then
        case "$name" in
{commands}
        esac
    fi
    if [ "${{cur#-}}" != "$cur" ]; then
        offered=$options files=
    fi
}}
"""

# bash takes "=" for a word of its own, and a name's spaces stand in it with backslashes.
_BASH = """
_tlt() {
    local offered files cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
    if [ "$cur" = = ]; then
        cur=
    elif [ "$prev" = = ]; then
        prev=${COMP_WORDS[COMP_CWORD-2]}
    fi
    _tlt_offer "$COMP_CWORD" "$cur" "$prev" "${COMP_WORDS[1]}" "${COMP_WORDS[2]}"
    COMPREPLY=($(compgen -W "$offered" -- "$cur"))
    if [ -n "$files" ]; then
        local IFS=$'\\n'
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -f -- "${cur//\\\\/}"))
    fi
}
complete -F _tlt tlt
"""

_ZSH = """
_tlt() {
    local offered files prev=${words[CURRENT-1]}
    if [[ $PREFIX == --*=* ]]; then
        prev=${PREFIX%%=*}
        compset -P '*='
    fi
    _tlt_offer $((CURRENT - 1)) "$PREFIX" "$prev" "${words[2]}" "${words[3]}"
    compadd -- ${=offered}
    [[ -z $files ]] || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _tlt tlt
"""


def _offer(commands: Mapping[str, tuple[type[Options], bool]]) -> str:
    values, cases = {f"*' {key}'": words for key, words in keys().items()}, []
    for name, (kind, has_record) in commands.items():
        options, alone = typed(kind, has_record)
        values |= {f"'{name} {option}'": words for option, words in options.items()}
        listed = " ".join(options) + (" $keys" if issubclass(kind, WithOverrides) else "")
        cases.append(f"            '{name}') options=\"{listed}\" {_offered(alone, adds=True)} ;;")
    second: dict[str, list[str]] = {}
    for name in commands:
        first, _, rest = name.partition(" ")
        second.setdefault(first, []).extend([rest] if rest else [])
    return _OFFER.format(
        keys=" ".join(keys()),
        first=" ".join(second),
        second="\n".join(f"            '{one}') offered='{' '.join(two)}' ;;" for one, two in second.items()),
        pairs="|".join(f"'{name}'" for name in commands if " " in name),
        switches="|".join(place for place, words in values.items() if not words.has_value),
        values="\n".join(
            f"        {place}) {_offered(words)} ;;"
            for place, words in values.items()
            if words.words or words.is_path
        ),
        commands="\n".join(cases),
    )


def _offered(words: Words, adds: bool = False) -> str:
    listed = " ".join(words.words)
    return f'offered="{"$offered " if adds else ""}{listed}" files={"yes" if words.is_path else ""}'
