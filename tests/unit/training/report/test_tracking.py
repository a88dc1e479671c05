"""Trackers: what they are told, and that none of them can stop or delay a run."""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.training.report.records import record
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


# -- the libraries themselves --------------------------------------------------------------------------------


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
