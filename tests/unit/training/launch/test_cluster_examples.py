"""The manifests for clusters parse, and start the program with options that torchrun and Slurm have."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import get_args_parser

FOLDER = Path(__file__).parents[4] / "examples" / "cluster"


def torchrun_options(words: list[str]) -> Any:
    """What torchrun reads in a command; it ends this process for an option that it does not have."""
    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


def check_command(options: Any) -> None:
    assert (options.nnodes, options.nproc_per_node, options.max_restarts, options.master_port) == (
        "2",
        "8",
        3,
        29500,
    )
    assert options.module
    assert (options.training_script, options.training_script_args) == (
        "tlt",
        ["train", "run.toml", "--resume=auto"],
    )


def test_the_pods_of_the_kubernetes_job_find_the_first_one_by_its_name() -> None:
    service, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    index = "$(JOB_COMPLETION_INDEX)"  # which Kubernetes sets, and replaces in a command
    options = torchrun_options([word.replace(index, "1") for word in container["command"]])
    check_command(options)
    assert spec["completions"] == spec["parallelism"] == int(options.nnodes)
    assert spec["completionMode"] == "Indexed"
    assert options.node_rank == 1
    assert options.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options.nproc_per_node)
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_skypilot_task_runs_torchrun_on_each_of_its_nodes(tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    assert task["num_nodes"] == 2
    assert "file_mounts" not in task, "a mounted bucket neither appends nor locks"
    assert [*task["volumes"]] == ["/shared"]
    script = (
        task["run"].replace("cd /shared", f"cd {tmp_path}").replace("torchrun", "printf '%s\\n' torchrun")
    )
    environ = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    environ |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        ["bash", "-euc", script], env=environ, capture_output=True, text=True, check=True
    ).stdout
    options = torchrun_options(said.splitlines())
    check_command(options)
    assert (options.node_rank, options.master_addr) == (1, "10.0.0.1")


def test_the_slurm_script_is_bash_with_options_of_sbatch_and_starts_a_task_for_each_gpu() -> None:
    script = FOLDER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE)
    options = dict((*shlex.split(line, comments=True)[0].split("="), "")[:2] for line in lines)
    assert options["--ntasks-per-node"] == options["--gpus-per-node"]
    assert options["--signal"].startswith("TERM@"), "to the ranks, not to the script"
    assert "--requeue" in options
    assert 'python -m tlt train "$@"' in script.read_text()
