"""What docs/security.md promises, read from the source and tried: no pickle, no remote code, no path out
of the folder, no credential written down."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import tlt
from tests.unit.test_architecture import _modules
from tlt.apps.cli.main import main
from tlt.base.config.load import load_config
from tlt.base.io.data import DataSource, read_data
from tlt.base.io.secrets import hide, holds_credential
from tlt.base.types import UserError
from tlt.models.hf.tokenizer import load_tokenizer

BASE = Path(tlt.__file__).parents[1] / "recipes" / "countdown" / "base"

# ── no pickle, no code from elsewhere ───────────────────────────────────────────────────────────────────────

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.save",
    "os.system",
    "yaml.load",
    "np.load",
    "numpy.load",
}


def dangers(source: str) -> list[str]:
    """What a module says that could run code which nobody has named: pickles, shells, evaluated text, code
    of the hub."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FORBIDDEN_MODULES:
                found.append(module)
            case ast.Call(func=func, keywords=keywords):
                name, given = ast.unparse(func), {word.arg: ast.unparse(word.value) for word in keywords}
                found += [name] if name in FORBIDDEN_CALLS else []
                found += ["a shell"] if given.get("shell", "False") != "False" else []
                is_loader = name.startswith("Auto") and name.endswith(".from_pretrained")
                if given.get("trust_remote_code", "False") != "False" or (
                    is_loader and "trust_remote_code" not in given
                ):
                    found.append(f"{name} that may run the hub's code")
    return found


def test_nothing_in_the_package_unpickles_a_file_or_runs_code_that_nobody_has_named() -> None:
    modules = _modules()
    assert len(modules) > 100
    found = {module: found for module, source in modules.items() if (found := dangers(source))}
    # an environment's state, over a pipe to a run's own worker; the journal keeps none
    assert found == {"tlt.tasks.environments.environment": ["pickle"]}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch\ntorch.load('x')",
        "AutoTokenizer.from_pretrained('x')",
        "AutoModelForCausalLM.from_pretrained('x', trust_remote_code=True)",
        "load(x, trust_remote_code=config.trusts)",
        "subprocess.run('ls', shell=True)",
        "def f():\n    eval('1')",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert dangers(source)


def test_a_tokenizer_that_brings_its_own_code_is_refused_and_the_code_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "strange", "vocab_size": 61}))
    auto = {"AutoTokenizer": ["tokenization_strange.Strange", None]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Strange", "auto_map": auto})
    )
    trace = tmp_path / "it-ran"
    (folder / "tokenization_strange.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)
    assert not trace.exists()


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_name_of_a_datasets_part_leads_out_of_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are kept in a file that subset and split name."""
    commit, asked = "0" * 40, []
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *_, **__: tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "secret%20x.jsonl").write_text('{"prompt": "not yours"}\n')

    def load(source: DataSource, *_: object, **__: object) -> object:
        asked.append(source)
        raise UserError("there is no such subset")

    monkeypatch.setattr("tlt.base.io.data._load", load)
    with pytest.raises(UserError, match="no such subset"):
        read_data(DataSource(Path(f"owner/name@{commit}"), "--data", subset="../secret", split="x"))
    assert len(asked) == 1


# ── credentials ─────────────────────────────────────────────────────────────────────────────────────────────

TOKEN = "hf_" + "aB3" * 11
KEYS = [
    ("tracking.project", "https://me:password@wandb.example/x"),
    ("tracking.run_name", TOKEN),
    ("task.data", "https://me:password@host/data.jsonl"),
    ("task.options.judge", "key: sk-" + "a1" * 20),
    ("task.options.urls", '["http://:password@host"]'),
    ("model.chat_template_kwargs.note", "the-value-of-a-variable"),
]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_API_KEY", "the-value-of-a-variable")
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{BASE}"\n[task]\nname = "countdown"\n')
    return file


@pytest.mark.parametrize(("key", "value"), KEYS)
def test_a_credential_in_the_configuration_is_refused_and_not_repeated(
    key: str, value: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{key}", value] if not value.startswith("[") else [f"--{key}={value}"]
    assert main(["train", str(run_file), *words]) == 2
    said = capsys.readouterr()
    assert f"{key}" in said.err
    assert said.err.count("\n") == 1
    assert "holds a password or token" in said.err
    assert not any(secret in said.err + said.out for secret in ("password@", TOKEN, "a1a1", "the-value"))
    section, name, *_ = key.split(".")
    with pytest.raises(UserError, match="holds a password or token"):
        load_config(
            {"model": {"path": str(BASE)}, "task": {"name": "countdown"}, section: {name: {"deep": [value]}}}
        )


FORMS = [
    TOKEN,
    "api_org_" + "aB3" * 11,
    "sk-" + "a1" * 20,
    "sk-proj-" + "aB3_" * 4 + "a1b2C3d4e5F6g7h8i9" * 5 + "-x",
    "sk-ant-api03-" + "aB3d" * 20,
    "ghp_" + "a1" * 18,
    "github_pat_" + "1A" * 11 + "_" + "b2" * 20,
    "glpat-" + "aB3-" * 5,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "aB3_-" * 7,
    "xoxb-" + "1234567890-" * 2 + "aBcDeF",
    "nvapi-" + "aB3_" * 16,
    "npm_" + "aB3" * 12,
    "sk_live_" + "aB3" * 8,
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "aB3_aB3_aB3_",
    "Authorization: Bearer " + "aB3." * 6,
    "https://host/v1?x=1&api_key=" + "a1b2c3d4e5",
    "https://host/v1?access_token=" + "a1b2c3d4e5",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_token_of_a_known_form_is_found_and_hidden(form: str) -> None:
    secret = form.rpartition(" ")[2].rpartition("=")[2] if "PRIVATE" not in form else "MIIE"
    for text in (form, f"before {form}", f"path/{form}/x", f'{{"a": "{form}"}}', f"x_{form}"):
        assert holds_credential(text, {})
        assert secret not in hide(text, {})


VALUE = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", VALUE),
        ("MY_KEY", VALUE),
        ("APP_SECRET_1", VALUE),
        ("MAIL_PASS", "correct-horse"),
        ("PGPASSWORD", "correct-horse"),
        ("my_api_key", "correct-horse"),
        ("HF_TOKEN", "correct-horse"),
    ],
)
def test_the_value_of_a_variable_that_holds_a_credential_is_found_and_hidden(
    variable: str, value: str
) -> None:
    assert hide(f"at {value}.", {variable: value}) == "at ***."


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PWD", "/work/project"),
        ("SSH_ASKPASS", "/usr/lib/ssh/ssh-askpass"),
        ("MONKEY", "a1b2c3d4e5f6g7h8i9"),
        ("SORT_KEY", "problem_id"),
        ("MAX_TOKEN_LENGTH", "32768"),
        ("TOKENIZERS_PARALLELISM", "false-false"),
        ("GOOGLE_APPLICATION_CREDENTIALS", str(Path(__file__))),
        ("USE_TOKEN", "true"),
    ],
)
def test_the_value_of_a_variable_that_only_sounds_like_one_is_left_alone(variable: str, value: str) -> None:
    assert hide(f"at {value}.", {variable: value}) == f"at {value}."


HARMLESS = (
    "hf_transformers_reference_engine_v2_large",
    "sk-learn-based-reward-model-2024-05-13",
    "models/risk-averse-a1b2c3d4e5f6g7h8i9",
    "the bearer of bad news-about-regularization",
    "https://host/data?split=train&token=8&key=problem_id",
    "key=value api_key token secret password",
    "AKIAK", "eyJ.eyJ.eyJ", "glpat-short", "xoxb-", "AIza",
    "meta-llama/Llama-3.3-70B-Instruct@" + "0a" * 20,
    "git@host:name/repository.git",
    "/data/keys/id_rsa", "runs/2026-11-23T10:30:00@host",
)  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_names_that_begin_like_a_token_are_left_alone(text: str) -> None:
    assert hide(text, {}) == text


def test_errors_do_not_repeat_a_credential(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompts", "https://me:password@host/x.jsonl", "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(BASE), *words]) == 2
    assert "https:/" in (said := capsys.readouterr().err)
    assert "password" not in said
