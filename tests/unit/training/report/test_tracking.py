"""Trackers: what they are told, and that none of them can stop or delay a run."""

import inspect
import json
import math
import os
import sqlite3
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.report.records import record
from tlt.base.config.load import load_config
from tlt.base.records import NAN
from tlt.base.types import UserError
from tlt.training.report import trackers
from tlt.training.report.trackers import NAMES, RANK_VARIABLES, Accelerated, TrackedRun, check_trackers
from tlt.training.report.tracking import Patience, Tracking, run_id, track

FAKES = """
import json, os, signal, sys, threading, time
from pathlib import Path

class Diary:
    def begin(self, run):
        self.path = run.folder / f"{type(self).__name__}.jsonl"
        self.note(["begin", run.name, run.project, run.run_id, run.step, run.config, os.getpid()])
        print("the library talks")
        return "look here"
    def log(self, step, values): self.note(["log", step, values])
    def finish(self): self.note(["finish"])
    def note(self, line):
        with self.path.open("a") as file: file.write(json.dumps(line) + "\\n")

def fail(): raise RuntimeError("server\\ngone")
def leave(): sys.exit("enough")
def hang(): time.sleep(1000)
def die(): os._exit(7)
def be_killed(): os.kill(os.getpid(), signal.SIGKILL)

for how in (fail, leave, hang, die, be_killed):
    for where in ("begin", "log", "finish"):
        name, method = f"{how.__name__}_at_{where}", lambda self, *arguments, how=how: how()
        globals()[name] = type(name, (Diary,), {where: method})

class Lingers(Diary):
    def finish(self): threading.Thread(target=hang).start()

class Tables(Diary):
    def log_table(self, *told): self.note(["log_table", *told])

class Hiccup(Diary):
    def log(self, step, values):
        if step in (2, 4): raise OSError("disk full")
        super().log(step, values)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "fake_trackers.py").write_text(FAKES)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def tracked(folder: Path, step: int = 0) -> TrackedRun:
    config = {"run": {"seed": 3, "out_dir": str(folder)}, "task": {"options": {}}}
    return TrackedRun("my run", "my-project", "1a2b3c4d", folder, config, step)


def begin(
    folder: Path, names: list[str], said: list[str], answer: float = 60.0, finish: float = 60.0
) -> Tracking:
    return track(
        [f"fake_trackers:{name}" for name in names], tracked(folder), said.append, Patience(answer, finish)
    )


def diary(folder: Path, name: str = "Diary") -> list[list[object]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


# -- names ---------------------------------------------------------------------------------------------------


def test_figures_are_named_by_their_place_in_the_record_and_counted_from_1() -> None:
    drafts = {
        "draft_acceptance_rate": 0.4,
        "draft_mean_acceptance_length": 2.2,
        "draft_acceptance_rate_pos": (0.8, 0.4),
    }
    values = record(6, rewards={"mean": 0.25}, update={"loss": -1.5}, rollout=drafts).figures()
    expected = {
        "step_seconds": 0.5,
        "rewards/mean": 0.25,
        "update/loss": -1.5,
        "rollout/draft_acceptance_rate": 0.4,
        "rollout/draft_mean_acceptance_length": 2.2,
        "rollout/draft_acceptance_rate_pos_1": 0.8,
        "rollout/draft_acceptance_rate_pos_2": 0.4,
        "rollout/response_tokens/max": 700,
        "rollout/strategy_seconds/off": 1.5,
        "drafter/version": 6,
        "idle/preemption_seconds_2": 0.002,
    }
    assert {name: values[name] for name in expected} == expected
    assert not {"step", "finished_at", "algorithm", "drafter/training"} & values.keys()


def test_what_does_not_exist_is_left_out() -> None:
    rollout = {"accept_length": NAN, "draft_acceptance_rate_pos": (0.5, NAN)}
    values = record(1, rollout=rollout, update={"grad_norm": math.inf}).figures()
    assert "rollout/draft_acceptance_rate_pos_1" in values
    assert (
        not {"rollout/accept_length", "update/grad_norm", "rollout/draft_acceptance_rate_pos_2"}
        & values.keys()
    )
    assert all(math.isfinite(value) for value in values.values())


def test_a_run_keeps_its_id_and_no_two_share_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = run_id(tmp_path / "a")
    assert run_id(tmp_path / "a") == first != run_id(tmp_path / "b")


# -- what a tracker is told ----------------------------------------------------------------------------------


def test_a_tracker_is_told_the_run_then_its_figures_in_order_then_the_end(folder: Path) -> None:
    said: list[str] = []
    tracking = begin(folder, ["Diary"], said)
    for step in range(50):
        tracking.log(step, {"train/loss": step / 2})
    tracking.finish()
    tracking.finish()
    (start, *logs, end) = diary(folder)
    assert start[:-1] == ["begin", "my run", "my-project", "1a2b3c4d", 0, dict(tracked(folder).config)]
    assert logs == [["log", step, {"train/loss": step / 2}] for step in range(50)]
    assert end == ["finish"]
    assert said == ["tracking: fake_trackers:Diary: look here"]
    assert "the library talks" in (folder / "tracking.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(str(start[-1])), 0)


def test_without_trackers_nothing_happens(folder: Path) -> None:
    tracking = track([], tracked(folder), pytest.fail)
    tracking.log(1, {"a": 1.0})
    tracking.finish()
    assert list(folder.iterdir()) == []


# -- what cannot stop a run ----------------------------------------------------------------------------------

REASONS = {
    "fail": "RuntimeError: server gone",
    "leave": "SystemExit: enough",
    "hang": "no answer within 1 s",
    "die": "its process ended: exit code 7",
    "be_killed": "its process ended: killed by SIGKILL (out of memory?)",
}


@pytest.mark.parametrize("where", ["begin", "log", "finish"])
@pytest.mark.parametrize("how", REASONS)
def test_a_tracker_that_fails_is_said_in_one_line_and_the_others_go_on(
    folder: Path, how: str, where: str
) -> None:
    said: list[str] = []
    names = [f"{how}_at_{where}", "Diary"]
    tracking = begin(folder, names[:1], said, answer=1.0 if how == "hang" else 60.0)
    other = begin(folder, ["Diary"], [])
    for step in range(3):
        tracking.log(step, {"train/loss": 1.0})
        other.log(step, {"train/loss": 1.0})
    tracking.finish()
    other.finish()
    assert diary(folder)[-2:] == [["log", 2, {"train/loss": 1.0}], ["finish"]]
    about = [line for line in said if REASONS[how] in line]
    assert len(about) == 1, said
    assert about[0].startswith(f"tracking: fake_trackers:{names[0]}: ")
    assert "\n" not in "".join(said)
    assert len(said) <= 3


def test_a_step_that_could_not_be_logged_is_said_once_and_the_next_is_tried(folder: Path) -> None:
    said: list[str] = []
    tracking = begin(folder, ["Hiccup"], said)
    for step in range(6):
        tracking.log(step, {})
    tracking.finish()
    assert [line[1] for line in diary(folder, "Hiccup")[1:-1]] == [0, 1, 3, 5]
    (_, once, count) = said
    assert "disk full" in once
    assert ": 2 steps are missing" in count


def test_a_log_never_waits_and_the_end_waits_no_longer_than_its_bound(folder: Path) -> None:
    """Were `log` to wait for the tracker that hangs, this test would take its 1,000 s."""
    said: list[str] = []
    tracking = begin(folder, ["hang_at_log"], said, answer=1000.0, finish=0.5)
    wait_for(lambda: bool(said))
    for step in range(10_000):
        tracking.log(step, {f"a{i}": 1.0 for i in range(50)})
    tracking.finish()
    about = "tracking: fake_trackers:hang_at_log: not finished 0.5 s after the run"
    assert said[1:] == [f"{about}; the run goes on, and its metrics.jsonl has all figures"]
    pid = int(str(diary(folder, "hang_at_log")[0][-1]))
    wait_for(lambda: not is_running(pid))


def test_a_process_that_does_not_end_by_itself_is_ended(folder: Path) -> None:
    said: list[str] = []
    track(["fake_trackers:Lingers"], tracked(folder), said.append, Patience(exit=0.2)).finish()
    assert said == ["tracking: fake_trackers:Lingers: look here"]
    assert not is_running(int(str(diary(folder, "Lingers")[0][-1])))


def test_a_tracker_that_cannot_be_started_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    tracking = begin(folder, ["Diary"], said)
    tracking.log(1, {})
    tracking.finish()
    assert len(said) == 1
    assert "could not be started" in said[0]


def test_a_log_file_that_cannot_be_written_does_no_harm(folder: Path) -> None:
    (folder / "tracking.log").mkdir()
    said: list[str] = []
    begin(folder, ["Diary"], said).finish()
    assert said == ["tracking: fake_trackers:Diary: look here"]


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():  # pytest's own time-out ends it
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- the user's mistakes -------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "NAMES", {"trackio": "no_such_package"})
    with pytest.raises(
        UserError,
        match=r"^tracking.use: trackio .*not installed; pip install 'accelerate>=1.10' 'trackio.*'$",
    ):
        check_trackers(["trackio"])
    (folder.parent / "modules" / "no_such_package").mkdir()  # as W&B leaves ./wandb: no package
    with pytest.raises(UserError, match="not installed"):
        check_trackers(["trackio"])
    (folder.parent / "modules" / "no_such_package" / "__init__.py").touch()
    check_trackers(["trackio"])


WANDB = """
import os, sys

def login(verify):
    assert not verify and not sys.stdin.isatty()
    if not os.environ.get("WANDB_API_KEY"):
        raise ValueError("no key is here")
"""


def test_wandb_without_a_key_is_refused_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent / "modules"))
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    check_trackers(["wandb"])
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(UserError) as error:
        check_trackers(["wandb"])
    remedy = "run wandb login, set WANDB_API_KEY, or keep its files here with WANDB_MODE=offline"
    assert str(error.value) == f"tracking.use: wandb cannot log in (no key is here); {remedy}"


def test_wandb_itself_is_asked_for_a_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    isolate(folder, monkeypatch)
    (folder / "home").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"wandb cannot log in \(No API key configured"):
        check_trackers(["wandb"])
    (folder / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {40 * '0'}\n")
    check_trackers(["wandb"])
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])


MISSPELT = {"wand": "unknown tracker 'wand'", "nowhere.x:Y": "no module 'nowhere'", "json:X": "has no 'X'"}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_tracker_that_does_not_exist_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=MISSPELT[name]) as error:
        check_trackers([name])
    assert "\n" not in str(error.value)
    check_trackers(["json:JSONDecoder"])


@pytest.mark.parametrize(
    "words", [["--tracking.use", "wandb, trackio"], ["--tracking.use", '["wandb", "trackio"]']]
)
def test_trackers_are_named_with_commas_or_as_a_list(words: list[str], tmp_path: Path) -> None:
    config = load_config({"model": {"path": tmp_path}, "task": {"name": "countdown"}}, words)
    assert config.tracking.use == ["wandb", "trackio"]
    assert type(config).from_json(config.to_json()) == config


# -- the libraries themselves --------------------------------------------------------------------------------


def track_twice(folder: Path, name: str) -> list[str]:
    """Tracks steps 0 to 4, then, as after a kill behind the checkpoint of step 3, steps 4 and 5 again."""
    said: list[str] = []
    for start, steps, value in ((0, range(5), 0.5), (3, range(4, 6), 0.75)):
        tracking = track([name], tracked(folder, start), said.append)
        for step in steps:
            tracking.log(
                step,
                {
                    "rollout/draft_acceptance_rate": value + step,
                    "rollout/strategy_seconds/learned:4x1x4": 1.0,
                },
            )
        tracking.finish()
    assert len(said) == 2, said
    return said


def test_tensorboard_reads_what_was_written_and_hides_what_a_resumed_run_repeats(folder: Path) -> None:
    pytest.importorskip("tensorboardX")
    said = track_twice(folder, "tensorboard")
    assert said[0] == f"tracking: tensorboard: tensorboard --logdir {folder / 'tensorboard'}"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("rollout/draft_acceptance_rate")]
    assert scalars == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5), (4, 4.75), (5, 5.75)]
    assert "seed" in str(events.Tensors("config/text_summary"))


def test_wandb_offline_needs_no_network_and_no_account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    isolate(folder, monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = track_twice(folder, "wandb")
    assert "offline; to upload: wandb sync" in said[0]
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == ["run-1a2b3c4d.wandb"] * 2
    rows = [row for path in files for row in wandb_rows(path)]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 4, 5]
    assert [row["rollout/draft_acceptance_rate"] for row in rows] == [0.5, 1.5, 2.5, 3.5, 4.5, 4.75, 5.75]


def wandb_rows(path: Path) -> list[dict[str, float]]:
    """The figures in a .wandb file: LevelDB's log format (records cut at blocks of 32 KiB) behind a header
    of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            message = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if message.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in message.history.item
                    }
                )
    return rows


def test_trackio_keeps_one_run_in_a_database_of_its_own_without_a_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    isolate(folder, monkeypatch)
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    said = track_twice(folder, "trackio")
    assert said == ["tracking: trackio: trackio show --project my-project"] * 2
    (path,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {"my run-1a2b3c4d"}
    assert [step for _, step, _ in rows] == [0, 1, 2, 3, 4, 4, 5]
    assert json.loads(rows[-1][2])["rollout/draft_acceptance_rate"] == 5.75


RECORDING = """
from accelerate import PartialState

class Recorder:
    calls = []
    def __init__(self, project, **options): self.calls.append(["made", project, options])
    def start(self): self.calls.append(["start", PartialState().num_processes])
    def store_init_configuration(self, values): self.calls.append(["config", values])
    def log(self, values, step): self.calls.append(["log", step, values])
    def finish(self): self.calls.append(["finish"])
"""


@pytest.mark.parametrize("name", sorted({*NAMES} - {"wandb"}))
def test_each_tracker_of_accelerate_is_made_started_told_the_settings_and_finished(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    assert NAMES.keys() == tracking.LOGGER_TYPE_TO_CLASS.keys()
    found: dict[str, Any] = {}
    exec(RECORDING, found)
    recorder, takes = found["Recorder"], inspect.signature(tracking.LOGGER_TYPE_TO_CLASS[name])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, recorder)
    mlflow = SimpleNamespace(search_runs=lambda **_: [], set_tag=lambda *_: None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for variable in RANK_VARIABLES:
        monkeypatch.setenv(variable, "2")
    tracker = Accelerated(name)
    tracker.begin(tracked(folder, step=3))
    tracker.log(4, {"update/loss": 0.5})
    tracker.finish()
    (made, *calls) = recorder.calls
    assert calls[0] == ["start", 1], "it joins no process group, though the helper was started by a rank"
    assert calls[-2:] == [["log", 4, {"update/loss": 0.5}], ["finish"]]
    takes.bind(made[1], **made[2])
    told = json.dumps([made[2].get("config"), calls[1]])
    assert "seed" in told
    assert name in ("trackio", "tensorboard") or calls[1][1]["run.seed"] == 3


def test_a_later_attempt_goes_on_in_mlflows_run_of_a_killed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    found: dict[str, Any] = {}
    exec(RECORDING, found)
    recorder = found["Recorder"]
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "mlflow", recorder)
    asked: list[Any] = []

    def search_runs(**question: Any) -> list[Any]:
        asked.append(question)
        return [SimpleNamespace(info=SimpleNamespace(run_id="of the killed attempt"))]

    mlflow = SimpleNamespace(search_runs=search_runs, set_tag=lambda *tag: asked.append(tag))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run = tracked(folder, step=3)
    Accelerated("mlflow").begin(run)
    (made, *calls) = recorder.calls
    assert made[2]["run_id"] == "of the killed attempt"
    assert [call[0] for call in calls] == ["start"], "parameters are not written twice: MLflow refuses others"
    assert run.run_id in asked[0]["filter_string"]
    assert asked[1] == ("tlt.run_id", run.run_id)


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a library from the user's own account, cache and settings, and from any network."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(folder / "home"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_a_run_keeps_the_id_that_its_checkpoint_knows_and_refuses_another(tmp_path: Path) -> None:
    assert run_id(tmp_path, "12ab34cd") == "12ab34cd"
    assert run_id(tmp_path) == run_id(tmp_path, "12ab34cd") == "12ab34cd"
    with pytest.raises(
        UserError, match=r"is run 12ab34cd by its tracking.json, but its checkpoint is of run ffff;"
    ):
        run_id(tmp_path, "ffff")


@pytest.mark.parametrize("torn", [b"torn", b"\xff\x00", b"{}", b'{"run_id": null}', b"[" * 99_999])
def test_an_id_that_cannot_be_read_is_the_checkpoints_and_what_was_there_is_kept(
    torn: bytes, tmp_path: Path
) -> None:
    path, said = tmp_path / "tracking.json", list[str]()
    for kept in ("tracking.json.unreadable", "tracking.json.unreadable-2"):
        path.write_bytes(torn)
        assert run_id(tmp_path, "12ab34cd", said.append) == run_id(tmp_path) == "12ab34cd"
        assert (tmp_path / kept).read_bytes() == torn
        assert (
            f"is kept as {kept}; the run goes on under 12ab34cd, the id that its checkpoint or journal knows"
            in said.pop()
        )
    path.unlink()
    path.mkdir()
    assert run_id(tmp_path, say=said.append) == run_id(tmp_path)
    assert said.pop().endswith("a new id")
    assert not said


# -- samples -------------------------------------------------------------------------------------------------

SAMPLES = ("prompt", "reward"), [("2 | 3\n<b>", 0.5), ("4", None)]


def test_a_tracker_of_ones_own_is_told_samples_if_it_has_tables(folder: Path) -> None:
    said: list[str] = []
    for name in ("Tables", "Diary"):
        tracking = begin(folder, [name], said)
        tracking.log_table(3, "samples", *SAMPLES)
        tracking.finish()
    told = [["log_table", 3, "samples", [*SAMPLES[0]], [[*row] for row in SAMPLES[1]]]]
    assert [line for line in diary(folder, "Tables") if line[0] == "log_table"] == told
    assert [line[0] for line in diary(folder)] == ["begin", "finish"]
    assert len(said) == 2, said


def test_samples_become_a_table_of_the_library_or_text() -> None:
    calls: list[Any] = []
    library = SimpleNamespace(
        log_table=lambda *given, **named: calls.append((*given, named)),
        log=lambda values, step: calls.append((values, step)),
    )
    for name in ("wandb", "tensorboard", "mlflow", "dvclive"):
        tracker = Accelerated(name)
        tracker._tracker = library
        tracker.log_table(3, "samples", *SAMPLES)
    table, text = calls
    assert table == ("samples", ["prompt", "reward"], [["2 | 3\n<b>", 0.5], ["4", None]], {"step": 3})
    assert text[0]["samples"].splitlines() == [
        "| prompt | reward |",
        "| --- | --- |",
        "| 2 &#124; 3<br>&lt;b&gt; | 0.5 |",
        "| 4 | None |",
    ]
