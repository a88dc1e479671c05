"""The configuration: defaults, layers, paths, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tlt.base.config.load import load_config, read_overrides
from tlt.base.config.schema import Config, ModelSection, TaskSection
from tlt.base.io.plugins import without_folder
from tlt.base.speculation import Adaptive
from tlt.base.types import UserError
from tlt.training.saved.inputs import code_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """recipe/run.toml with a model and a drafter beside it; the working directory is elsewhere."""
    recipe = tmp_path / "recipe"
    for name in ("base", "drafter"):
        (recipe / name).mkdir(parents=True)
    (recipe / "run.toml").write_text('[model]\npath = "base"\n\n[task]\nname = "countdown"\n')
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return recipe


MINIMAL = "[model]\npath = 'base'\n[task]\nname = 'countdown'\n"
REMEDY = "an override is written --section.key value"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_minimal_file_gets_every_default(folder: Path) -> None:
    config = load_config(folder / "run.toml")
    assert config.rollout.speculation == Adaptive()
    assert (config.run.num_ranks, config.run.dtype) == ("auto", "auto")
    assert (config.evaluation.num_problems, config.run.time_limit_minutes) == (64, None)
    assert config.drafter.path is None
    assert config.algorithm.resolve(config.sampling.max_tokens).clip_high == 0.28
    assert config.task.num_problems == 4096


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(folder: Path) -> None:
    path = write(folder, f"{MINIMAL}[run]\nseed = 1\nnum_steps = 7\n")
    config = load_config(path, ["--run.seed", "2", "--run.seed=3", "--optimizer.learning_rate", "1e-4"])
    assert (config.run.seed, config.run.num_steps, config.optimizer.learning_rate) == (3, 7, 1e-4)


def test_overrides_are_read_as_the_key_wants_them(folder: Path) -> None:
    config = load_config(
        folder / "run.toml",
        [
            *("--rollout.speculation", "off", "--drafter.train", "false", "--run.time_limit_minutes", "none"),
            *("--task.options.mix", "{2 = 0.5, 3 = 0.5}", "--task.options.label", "hard"),
            *("--sampling.temperature", "1"),
        ],
    )
    assert config.run.time_limit_minutes is None
    assert config.task.options == {"mix": {"2": 0.5, "3": 0.5}, "label": "hard"}
    assert config.sampling.temperature == 1.0


def test_the_configuration_is_frozen(folder: Path) -> None:
    config = load_config(folder / "run.toml")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 1


def test_json_round_trip_changes_nothing(folder: Path) -> None:
    config = load_config(
        folder / "run.toml", ["--drafter.path", str(folder / "drafter"), "--rollout.speculation", "4x1x4"]
    )
    again = Config.from_json(config.to_json())
    assert again == config
    (folder / "config.json").write_text(config.to_json())
    assert load_config(folder / "config.json") == config


KEYS = """
run         out_dir seed num_steps num_ranks threads_per_rank device dtype checkpoint_every keep_checkpoints
run         time_limit_minutes launcher max_restarts timeout_seconds keep_responses show_samples equal_rows
parallel    policy param_dtype checkpoint_activations reduce_each_micro_batch
model       path adapter chat_template_kwargs implementation
lora        rank alpha rslora targets base_dtype
task        name options num_problems data subset split columns chat system_prompt
task        max_prompt_tokens date
rollout     problems_per_step samples_per_problem max_batch_size kv_gib engine speculation tuner ahead
rollout     measure_speedup_every router_replay
vllm        tensor_parallel max_draft_tokens compile prefix_caching transfer
sampling    temperature top_k top_p min_p max_tokens stop stop_ids
drafter     path train learning_rate vocabulary
algorithm   name advantage ratio aggregation clip_low clip_high kl_coefficient kl_in kl_estimator
algorithm   kl_bias_correction mask_truncated overlong_buffer_tokens overlong_penalty dynamic_sampling
algorithm   epochs minibatches tokens_per_micro_batch importance_correction_cap
optimizer   learning_rate beta1 beta2 eps weight_decay warmup_steps schedule clip_grad_norm
evaluation  every num_problems samples_per_problem temperature data subset split columns
environment tools factory factories respond max_turns tool_timeout_seconds deterministic num_workers
rewards     functions weights solved_at num_workers timeout_seconds
tracking    use project run_name
"""


def test_every_key_of_the_contract_exists_and_no_other() -> None:
    config = Config(model=ModelSection(path=Path("m")), task=TaskSection(name="t"))
    found = {(section, key) for section, values in json.loads(config.to_json()).items() for key in values}
    lines = map(str.split, KEYS.strip().splitlines())
    expected = {(section, key) for section, *keys in lines for key in keys}
    assert found == expected


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_path_in_the_file_is_relative_to_the_file_where_it_exists_there(folder: Path) -> None:
    assert load_config(folder / "run.toml").model.path == folder / "base"


def test_a_path_in_the_file_is_else_relative_to_the_working_directory(folder: Path) -> None:
    (Path.cwd() / "elsewhere").mkdir()
    path = write(folder, '[model]\npath = "elsewhere"\n[task]\nname = "countdown"\n')
    assert load_config(path).model.path == Path.cwd() / "elsewhere"


def test_a_path_in_an_override_and_out_dir_are_relative_to_the_working_directory(folder: Path) -> None:
    (Path.cwd() / "base").mkdir()
    config = load_config(folder / "run.toml", ["--model.path", "base", "--run.out_dir", "runs/x"])
    assert config.model.path == Path.cwd() / "base"
    assert config.run.out_dir == Path.cwd() / "runs" / "x"
    assert load_config(folder / "run.toml").run.out_dir == Path.cwd() / "runs" / "run"


EMPTY = ("run.out_dir", "model.path", "task.data", "drafter.path", "evaluation.data")


@pytest.mark.parametrize("key", EMPTY)
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_is_refused_and_is_not_the_working_directory(folder: Path, key: str, text: str) -> None:
    """A shell makes it of a variable that is not set."""
    said = f"{key} is {text!r}; it is empty: give a path (the working directory is .)"
    assert mistake(folder / "run.toml", f"--{key}", text) == f"--{key}: {said}"
    section, name = key.split(".")
    with pytest.raises(UserError) as refused:
        load_config({"model": {"path": "."}, "task": {"name": "countdown"}} | {section: {name: text}})
    assert str(refused.value) == f"config: {said}"
    assert load_config(folder / "run.toml", ["--run.out_dir", "."]).run.out_dir == Path.cwd()


DEEP = (
    "a." * 20_000 + "b = 1",
    f"[{'a.' * 20_000}b]\nc = 1",
    "x = {" + "a." * 200 + "b = 1}",
    'x."y z" . ' + "'a'." * 2000 + "b = 1",
)


@pytest.mark.parametrize("text", DEEP)
def test_tables_that_lie_deep_in_each_other_are_refused_before_they_are_parsed(
    folder: Path, text: str
) -> None:
    path = write(folder, f"{MINIMAL}[task.options]\n{text}\n")
    assert "flatten" in mistake(path)


def test_tables_that_lie_deep_in_each_other_are_refused_wherever_they_come_from(folder: Path) -> None:
    told = mistake(folder / "run.toml", f"--task.options.{'a.' * 20_000}b", "1")
    assert "key of more than 64 parts" in told
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(UserError, match="more than 64 deep in each other; flatten them"):
        load_config({"model": {"path": "."}, "task": {"name": "countdown", "options": deep}})


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_file_is_named() -> None:
    told = "nowhere.toml: no such file; give the path of a TOML configuration"
    assert mistake(Path("nowhere.toml")) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nseed = = 1", "cannot be parsed"),
        (f"{MINIMAL}[run]\nnum_step = 1", ": run.num_step is unknown; did you mean run.num_steps?"),
        (
            f"{MINIMAL}[rewards]\nzzz = 1",
            "known keys are functions, weights, solved_at, num_workers, timeout",
        ),
        (MINIMAL.replace("path", "pth"), ": model.pth is unknown; did you mean model.path?"),
        ("[task]\nname = 'countdown'", "model is missing; add a section [model]"),
        ("[model]\n[task]", "model.path is missing; add it to section [model]"),
        ("[model]\npath = 'base'\n[task]", "give a task.name, rewards.functions, or environment.factory"),
        (f"{MINIMAL}[run]\nseed = '7'", ": run.seed is '7'; it must be a valid integer"),
        (f"run = 3\n{MINIMAL}", "run is 3; it must be a table of keys"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place_and_remedy(folder: Path, text: str, told: str) -> None:
    path = write(folder, text)
    message = mistake(path)
    assert message.startswith(f"{path}: ")
    assert told in message


def test_a_task_is_needed_where_no_reward_function_scores(folder: Path) -> None:
    path = write(folder, '[model]\npath = "base"\n[task]\n')
    assert "give a task.name, rewards.functions, or environment.factory" in mistake(
        path, "--rewards.functions", '["task"]'
    )
    assert load_config(path, ["--rewards.functions", '["mine:f"]']).task.name == "data"


def test_weights_belong_to_functions_one_each(folder: Path) -> None:
    functions = ("--rewards.functions", '["task", "mine:f"]')
    config = load_config(folder / "run.toml", [*functions, "--rewards.weights", "[1, 0.2]"])
    assert (config.rewards.functions, config.rewards.weights) == (("task", "mine:f"), (1.0, 0.2))
    assert Config.from_json(config.to_json()) == config
    told = {"[1]": "weights has 1 values for 2 functions", "[1, inf]": "must be a finite number"}
    for weights, part in told.items():
        assert part in mistake(folder / "run.toml", *functions, "--rewards.weights", weights)
    assert "names one twice" in mistake(folder / "run.toml", "--rewards.functions", '["mine:f", "mine:f"]')


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (("--run.seed", "x"), "--run.seed: run.seed is 'x'; it must be a valid integer"),
        (("--run.num_steps", "-1"), "it must be greater than or equal to 0"),
        (("--drafter.train", "yes"), "drafter.train is 'yes'; it must be a valid boolean"),
        (("--sampling.temperature", "nan"), "it must be a finite number"),
        (("--run.dtype", "float16"), "it must be 'auto', 'float32', 'float64' or 'bfloat16'"),
        (("--rollout.speculation", "4x1"), "give off, adaptive or DEPTHxWIDTHxBUDGET"),
        (("--rollout.samples_per_problem", "1"), "it must be greater than or equal to 2"),
        (("--rollout.speculation", "4x1x" + 5000 * "4"), "give off, adaptive or DEPTHxWIDTHxBUDGET"),
        (("--task.name", ""), "task.name is ''"),
        (("--sampling.stop", 3000 * "["), "it must be a list"),
        (("--task.options", 3000 * "["), "it must be a table such as"),
        (("--run.out_dir", 1300 * "abc/"), "no file can be called so: give another path"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_remedy(
    folder: Path, override: tuple[str, str], remedy: str
) -> None:
    message = mistake(folder / "run.toml", *override)
    assert message.startswith(f"{override[0]}: ")
    assert remedy in message


def test_a_run_that_would_neither_train_nor_evaluate_is_refused(folder: Path) -> None:
    nothing = ("--run.num_steps", "0", "--evaluation.num_problems", "0")
    assert "are both 0: nothing would be done; raise one of them" in mistake(folder / "run.toml", *nothing)
    assert load_config(folder / "run.toml", nothing[:2]).run.num_steps == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--run.seed", "--run.seed: has no value; write --run.seed VALUE"),
        ("--run.seed --run.num_steps 3", "--run.seed: has no value; write --run.seed VALUE"),
        ("--sed 3", f"--sed: unknown option; {REMEDY}, such as --run.seed 1"),
        ("--seed 3", "--seed: unknown option; did you mean --run.seed?"),
        ("run.seed 3", f"run.seed: unexpected argument; {REMEDY}"),
        (
            "--run. 3",
            "--run.: unexpected argument; an option is written --name value, an override --section.",
        ),
    ],
)
def test_a_malformed_override_says_how_to_write_it(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_overrides(words.split())
    assert str(caught.value).startswith(message)


def test_a_tasks_options_are_a_toml_table_or_a_json_object(folder: Path) -> None:
    """tlt task takes them as JSON."""
    for text in ("{label = 'hard', sizes = [2, 3]}", '{"label": "hard", "sizes": [2, 3]}'):
        config = load_config(folder / "run.toml", ["--task.options", text])
        assert config.task.options == {"label": "hard", "sizes": [2, 3]}
    message = mistake(folder / "run.toml", "--task.options", "{label}")
    assert message.endswith("task.options is '{label}'; it must be a table such as '{key = 1}'")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--model.path /nowhere", "model.path is /nowhere; there is no such folder"),
        ("--rollout.speculation hybrid:4x1x4", "speculation is 'hybrid:4x1x4' but drafter.path is not set"),
        ("--rollout.speculation magic:4x1x4", "rollout.speculation names the drafter 'magic'"),
        ("--drafter.train true", "drafter.train is true but drafter.path is not set"),
        ("--task.num_problems 3", "rollout.problems_per_step is 8 but task.num_problems only 3"),
        ("--algorithm.minibatches 33", "algorithm.minibatches is 33 but a step has only 32 responses"),
        (
            "--rollout.ahead 1 --rollout.speculation off",
            "rollout.ahead is 1, but nothing would draft from what is generated",
        ),
        ("--algorithm.overlong_buffer_tokens 9999", "is 9999 but sampling.max_tokens only 2048: lower it"),
        ("--algorithm.kl_estimator k2", "kl_estimator is set, but kl_coefficient is 0, so there is no KL"),
        ("--algorithm.kl_in loss", "kl_in is set, but kl_coefficient is 0, so there is no KL"),
        ("--evaluation.columns {prompt='a'}", "evaluation.columns is set, but neither evaluation.data"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(folder: Path, words: str, part: str) -> None:
    assert part in mistake(folder / "run.toml", *words.split())


def test_problems_come_from_one_source(folder: Path) -> None:
    (folder / "problems.jsonl").write_text("{}\n")
    own = f"{MINIMAL}data = 'problems.jsonl'\n"
    assert "exclude each other" in mistake(write(folder, f"{own}num_problems = 9\n"))
    path = write(folder, own)
    config = load_config(path)
    assert (config.task.num_problems, config.task.data) == (None, folder / "problems.jsonl")
    assert load_config(path, ["--task.num_problems", "9"]).task.data is None
    (folder / "others.jsonl").write_text("{}\n")
    other = folder / "others.jsonl"
    assert load_config(path, ["--task.data", str(other)]).task.data == other


def test_names_of_the_hub_stay_as_they_are_where_no_folder_has_them(folder: Path) -> None:
    path = write(folder, '[model]\npath = "me/model@v2"\n[task]\nname = "countdown"\ndata = "me/data@v1"\n')
    config = load_config(path, {"drafter.path": "me/drafter"})
    assert config.model.path == Path("me/model@v2")
    assert (config.task.data, config.drafter.path) == (Path("me/data@v1"), Path("me/drafter"))
    (folder / "me" / "model@v2").mkdir(parents=True)
    assert load_config(path).model.path == folder / "me" / "model@v2"
    assert load_config(path, ["--model.path", "me/other"]).model.path == Path("me/other")
    assert "model.path is " in mistake(path, "--model.path", "me/model/other")
    told = mistake(path, "--model.path", "model")
    assert "there is no such folder: give one that exists, or a model's name" in told


def test_lists_may_be_given_with_commas_on_the_command_line(folder: Path) -> None:
    words = "--rewards.functions task,mine:brief --rewards.weights 1,0.2 --tracking.use tensorboard"
    config = load_config(folder / "run.toml", words.split())
    assert config.rewards.functions == ("task", "mine:brief")
    assert config.rewards.weights == (1.0, 0.2)
    assert config.tracking.use == ["tensorboard"]
    one = load_config(folder / "run.toml", ["--rewards.functions", "mine:brief", "--rewards.weights", "0.5"])
    assert (one.rewards.functions, one.rewards.weights) == (("mine:brief",), (0.5,))


def test_code_of_an_environment_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    path = tmp_path / "run.toml"
    own = f"{tmp_path / 'mine.py'}:"
    begin = "[model]\npath = 'a/b'\n[task]\nname = 'countdown'\n[environment]\n"
    path.write_text(begin + "tools = ['mine.py:add', 'module:sub']\nrespond = 'mine.py:answer'")
    environment = load_config(path).environment
    assert environment.tools == (f"{own}add", "module:sub")
    assert environment.respond == f"{own}answer"
    path.write_text(begin + "factory = 'mine.py:Env'")
    assert load_config(path).environment.factory == f"{own}Env"
    path.write_text(begin + "factories = {chess = 'mine.py:Chess', go = 'module:Go'}")
    assert load_config(path).environment.factories == {"chess": f"{own}Chess", "go": "module:Go"}
    path.write_text(begin.replace("countdown", "verifiers:mine.py") + "factory = 'module:Env'")
    assert load_config(path).task.name == f"verifiers:{tmp_path / 'mine.py'}"
    assert without_folder(load_config(path).task.name) == "verifiers:mine.py"
    assert tmp_path / "mine.py" in code_of(load_config(path)).values()
