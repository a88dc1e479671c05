"""`tlt completion`: a shell script that holds all words, so TLT does not run while a user types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from tlt.apps.cli.options import Options, WithOverrides, Written, options_of, with_dashes
from tlt.base.config.mistakes import section_of
from tlt.base.config.schema import Config
from tlt.base.config.section import takes_a_path
from tlt.base.io.recipes import list_configs


class Completion(Options):
    """Print a script that lets a shell complete what is typed after tlt.

    bash: tlt completion bash > ~/.local/share/bash-completion/completions/tlt

    zsh: tlt completion zsh > ~/.tlt-completion.zsh, and source that file at the end of ~/.zshrc

    fish: tlt completion fish > ~/.config/fish/completions/tlt.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], Written("bash|zsh|fish", is_alone=True)]
    """The shell to print it for."""


@dataclass(frozen=True)
class Words:
    """What may follow an option, or stand alone.

    words: empty: any text.
    has_value: False: the option is a switch.
    """

    words: tuple[str, ...] = ()
    is_path: bool = False
    has_value: bool = True


@dataclass(frozen=True)
class Typed:
    purpose: str
    options: Mapping[str, Words]
    alone: Words
    takes_keys: bool


def typed(kind: type[Options], has_record: bool) -> Typed:
    found = options_of(kind)
    hints = {name: hint for name, field in found.items() if (hint := Written.of(field)) is not None}
    alone = {name: _words(found[name]) for name, hint in hints.items() if hint.is_alone}
    words = [word for one in alone.values() for word in one.words]
    words += list_configs() if {"config", "recipe"} & alone.keys() else []
    switches = {name for name, hint in hints.items() if not hint.metavar}
    options = {
        f"--{with_dashes(name)}": Words(has_value=False) if name in switches else _words(field)
        for name, field in found.items()
        if name not in alone
    }
    options |= {"--json": Words(has_value=False)} if has_record else {}
    options["--help"] = Words(has_value=False)
    purpose = (kind.__doc__ or "").splitlines()[0]
    is_path = any(one.is_path for one in alone.values())
    return Typed(purpose, options, Words(tuple(words), is_path), issubclass(kind, WithOverrides))


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


def script(shell: Literal["bash", "zsh", "fish"], commands: Mapping[str, Typed]) -> str:
    if shell == "fish":
        return _fish(commands)
    return _offer(commands) + (_ZSH if shell == "zsh" else _BASH)


# bash and zsh share this. Arguments: the current word's index, it, the one before it, and the first two.
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


def _offer(commands: Mapping[str, Typed]) -> str:
    first, second = _tree(commands)
    values = {f"*' {key}'": words for key, words in keys().items()}
    values |= {f"'{name} {o}'": words for name, one in commands.items() for o, words in one.options.items()}
    known = {place: words for place, words in values.items() if words.words or words.is_path}
    cases = []
    for name, one in commands.items():
        options = " ".join(one.options) + (" $keys" if one.takes_keys else "")
        cases.append(f"            '{name}') options=\"{options}\" {_offered(one.alone, adds=True)} ;;")
    return _OFFER.format(
        keys=" ".join(keys()),
        first=" ".join(first),
        second="\n".join(f"            '{one}') offered='{' '.join(two)}' ;;" for one, two in second.items()),
        pairs="|".join(f"'{name}'" for name in commands if " " in name),
        switches="|".join(place for place, words in values.items() if not words.has_value),
        values="\n".join(f"        {place}) {_offered(words)} ;;" for place, words in known.items()),
        commands="\n".join(cases),
    )


def _offered(words: Words, adds: bool = False) -> str:
    listed = " ".join(words.words)
    return f'offered="{"$offered " if adds else ""}{listed}" files={"yes" if words.is_path else ""}'


def _tree(commands: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    second: dict[str, list[str]] = {}
    for name in commands:
        first, _, rest = name.partition(" ")
        second.setdefault(first, []).extend([rest] if rest else [])
    return list(second), {first: rest for first, rest in second.items() if rest}


_FISH_FIRST = "test (count (commandline -opc)) -eq 1"
_FISH = """\
# completion of tlt, printed by tlt completion
function __tlt_is
    set -l words (commandline -opc)
    set -e words[1]
    set -l name "$words[1]"
    contains -- "$words[1] $words[2]" {pairs}; and set name "$words[1] $words[2]"
    contains -- "$name" $argv
end
complete -c tlt -f
complete -c tlt -n '{first}' -l version -d 'Print the version'
complete -c tlt -n '{first}' -l help
"""


def _fish(commands: Mapping[str, Typed]) -> str:
    pairs = " ".join(f"'{name}'" for name in commands if " " in name)
    lines = [_FISH.format(pairs=pairs, first=_FISH_FIRST).rstrip()]
    for group, names in _tree(commands)[1].items():
        if group not in commands:
            lines.append(f"complete -c tlt -n '{_FISH_FIRST}' -a {group} -d '{', '.join(names)}'")
    for name, one in commands.items():
        first, _, rest = name.partition(" ")
        is_second = f"test (count (commandline -opc)) -eq 2; and __tlt_is {first}"
        place = is_second if rest else _FISH_FIRST
        lines.append(f"complete -c tlt -n {_quoted(place)} -a {rest or first} -d {_quoted(one.purpose)}")
        place = _quoted(f"__tlt_is {_quoted(name)}")
        if one.alone.words or one.alone.is_path:
            lines.append(f"complete -c tlt -n {place} {_fish_words(one.alone)}")
        lines += [_fish_option(place, option, words) for option, words in one.options.items()]
    with_keys = " ".join(_quoted(name) for name, one in commands.items() if one.takes_keys)
    with_keys = _quoted(f"__tlt_is {with_keys}")
    lines += [_fish_option(with_keys, key, words) for key, words in keys().items()]
    return "\n".join(lines) + "\n"


def _fish_option(place: str, option: str, words: Words) -> str:
    value = f" -r {_fish_words(words)}" if words.has_value else ""
    return f"complete -c tlt -n {place} -l {option.removeprefix('--')}{value}".rstrip()


def _fish_words(words: Words) -> str:
    listed = [f"-a {_quoted(' '.join(words.words))}"] if words.words else []
    return " ".join([*listed, *(["-F"] if words.is_path else ["-f"])])


def _quoted(text: str) -> str:
    """fish has quotes of its own."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
