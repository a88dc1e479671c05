"""`tlt completion`: what a shell offers after some words, asked of bash itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tlt.apps.cli import main as cli
from tlt.apps.cli.commands import COMMANDS
from tlt.apps.cli.options import with_dashes
from tlt.base.config.schema import Config

# Typed words, and what may stand in the last one's place.
OFFERED = {
    "tlt dr": {"drafter"},
    "tlt --h": {"--help"},
    "tlt drafter e": {"export", "eval"},
    "tlt init o": {"own"},
    "tlt train m": {"math", "math/chain_sum", "mine.toml", "my run.toml"},
    "tlt train --resume m": {"mine.toml", "my run.toml"},
    "tlt train --run.dev": {"--run.device"},
    "tlt train --run.device c": {"cpu", "cuda"},
    "tlt train --run.device=c": {"cpu", "cuda"},
    "tlt train --run.out_dir m": {"mine.toml", "my run.toml"},
    r"tlt report my\ r": {"my run.toml"},
    "tlt report f": {"folder"},
    "tlt plan memory c": {"countdown", "countdown/headline"},
    "tlt plan memory --json c": {"countdown", "countdown/headline"},
    "tlt plan memory --run.num_st": {"--run.num_steps"},
    "tlt plan memory --device-gib c": set(),
    "tlt plan memory --j": {"--json"},
    "tlt drafter export --format vllm-eagle3": {"vllm-eagle3"},
    "tlt generate --run.dev": set(),
    "tlt hub push --private --wh": {"--what"},
}

# Each program writes what is offered for a line of "lines", apart by "|", as a line of "answers".
ASK_BASH = r"""
source tlt.bash
while IFS= read -r line; do
    line=${line//=/ = }
    read -a COMP_WORDS <<< "${line//\\/\\\\\\}"
    COMP_CWORD=$((${#COMP_WORDS[@]}-1))
    _tlt
    (IFS='|'; echo "${COMPREPLY[*]}" >> answers)
done < lines
"""
# zsh completes in its line editor alone: it starts one, and matches are taken from its builtin compadd.
ASK_ZSH = """
zmodload zsh/zpty
zpty editor zsh -f -i
zpty -w editor 'source ./ask-in-editor.zsh'
while zpty -r editor; do :; done > /dev/null
"""
ASK_IN_EDITOR = """
compadd() {
    local -a matches
    builtin compadd -A matches "$@"
    found+=("${matches[@]}")
    builtin compadd "$@"
}
source ./tlt.zsh
zle -C ask list-choices _main_complete
zle-line-init() {
    while IFS= read -r BUFFER; do
        CURSOR=$#BUFFER found=()
        zle ask
        print -r -- "${(j:|:)${(@Q)found}}" >> answers
    done < lines
    exit
}
zle -N zle-line-init
"""


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("shell", "ask"), [("bash", ASK_BASH), ("zsh", ASK_ZSH)])
def test_a_shell_completes_commands_options_values_keys_and_files(
    shell: str, ask: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (here / f"tlt.{shell}").write_text(printed(shell, capsys))
    (here / "ask-in-editor.zsh").write_text(ASK_IN_EDITOR)
    (here / "mine.toml").touch()
    (here / "my run.toml").touch()
    (here / "folder").mkdir()
    (here / "lines").write_text("\n".join(OFFERED) + "\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(here), "TERM": "xterm"}
    done = subprocess.run(
        [shell, "-c", ask], cwd=here, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    answers = [line.split("|") for line in (here / "answers").read_text().splitlines()]
    found = [{word.rpartition("=")[2].rstrip("/") for word in words if word} for words in answers]
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_every_command_option_and_key_stands_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(shell, capsys)
    for name, command in COMMANDS.items():
        assert f"'{name}'" in text.replace("\\'", "'")
        for option in command.options.model_fields.keys() - {"overrides", "rest"}:
            is_alone = "is_alone=True" in repr(command.options.model_fields[option].metadata)
            assert is_alone or f"--{with_dashes(option)}" in text, (name, option)
    config = Config.model_validate({"model": {"path": "m"}, "task": {"name": "t"}})
    keys = [f"{section}.{key}" for section, values in config.model_dump().items() for key in values]
    assert [key for key in keys if f"--{key}" not in text] == []


def test_the_script_is_printed_without_torch() -> None:
    code = "import sys; from tlt.apps.cli.main import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert finished.returncode == 0
