"""`tlt completion`: what a shell offers after some words, asked of bash itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tlt.cli import main as cli
from tlt.cli.commands import COMMANDS
from tlt.cli.options import with_dashes
from tlt.config.schema import Config

ASK = 'source tlt.bash; while read -r -a COMP_WORDS; do COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _tlt; echo "${COMPREPLY[*]}"; done'


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_values_keys_and_files(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "tlt.bash").write_text(printed("bash", capsys))
    (here / "mine.toml").touch()
    offered = {
        "tlt dr": {"drafter"},
        "tlt drafter e": {"export", "eval"},
        "tlt init o": {"own"},
        "tlt train m": {"math", "math/chain_sum", "mine.toml"},
        "tlt train --resume m": {"mine.toml"},
        "tlt train --run.dev": {"--run.device"},
        "tlt train --run.device c": {"cpu", "cuda"},
        "tlt train --run.out_dir m": {"mine.toml"},
        "tlt plan memory c": {"countdown", "countdown/headline"},
        "tlt plan memory --json c": {"countdown", "countdown/headline"},
        "tlt plan memory --run.num_st": {"--run.num_steps"},
        "tlt plan memory --device-gib c": set(),
        "tlt plan memory --j": {"--json"},
        "tlt drafter export --format vllm-eagle3": {"vllm-eagle3"},
        "tlt generate --run.dev": set(),
        "tlt hub push --private --wh": {"--what"},
    }
    done = subprocess.run(
        ["bash", "-c", ASK],
        input="\n".join(offered) + "\n",
        cwd=here,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert dict(zip(offered, map(set, map(str.split, done.stdout.splitlines())), strict=True)) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_option_and_key_stands_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(shell, capsys)
    mark = "-l " if shell == "fish" else "--"
    for name, command in COMMANDS.items():
        assert f"'{name}'" in text.replace("\\'", "'")
        for option in command.options.model_fields.keys() - {"overrides"}:
            is_alone = "is_alone=True" in repr(command.options.model_fields[option].metadata)
            assert is_alone or f"{mark}{with_dashes(option)}" in text, (name, option)
    config = Config.model_validate({"model": {"path": "m"}, "task": {"name": "t"}})
    keys = [f"{section}.{key}" for section, values in config.model_dump().items() for key in values]
    assert [key for key in keys if f"{mark}{key}" not in text] == []


def test_the_script_is_printed_without_torch() -> None:
    code = "import sys; from tlt.cli.main import main; main(['completion', 'fish']); sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert finished.returncode == 0
