"""The law's kernel (tlt/speculative/fused.py) beside the plain law, as far as a machine without a GPU can tell.

    words      all 2³² random words through both formulas of the noise: how many differ, how many could on a GPU
    cases      random rows through both, in Triton's interpreter: tokens and noise bit for bit, log-probabilities by the bound
    memory     bytes allocated and moved for each logit: PyTorch's own counts for operators, arithmetic for the kernel
    compiled   for sm_80 and sm_90: registers, spills, shared memory, instructions for each value

    python -m benchmarks.law_kernel --out benchmarks/results/law-kernel        needs Triton: the environment of make vllm-test

No GPU runs here: nothing in the report is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tlt.bench.report import environment, provenance, table, write_report
from tlt.speculative.params import BatchParams
from tlt.speculative.rows import reference
from tlt.speculative.sampling import gumbel_noise
from tlt.types import SamplingParams

VOCAB_SIZE = 152064
LAWS = {
    "T = 1": SamplingParams(),
    "T = 0.7": SamplingParams(temperature=0.7),
    "T = 0": SamplingParams(temperature=0),
    "T = 0.7, top-k 50, top-p 0.95, min-p 0.01": SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01),
}


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_words(num_words: int, per_part: int = 1 << 15) -> dict[str, Any]:
    """Returns how many of the first words become other noise by the kernel's formula than by the plain law's, and how many lie
    so close to a border of float32 that logarithms with errors below a unit in the last place might round otherwise."""
    differ = uncertain = 0
    for first in range(0, num_words, per_part):
        words = np.arange(first, min(first + per_part, num_words), dtype=np.int64).astype(np.float64)
        uniform = torch.from_numpy(words + 0.5) * 2.0**-32
        plain = torch.log1p(uniform.neg_()).neg_().log_().neg_().float().numpy()
        exponential = -np.log((4294967295.5 - words) * 2.0**-32)
        noise = -np.log(exponential)
        differ += int((noise.astype(np.float32).view(np.int32) != plain.view(np.int32)).sum())
        # ours and the GPU's may each err by a unit, 2^-52 of the value at most: in E, which shifts the noise, and in the noise
        error = (1 + np.abs(noise)) * 2.0**-51
        uncertain += int(((noise - error).astype(np.float32) != (noise + error).astype(np.float32)).sum())
    each_row = uncertain / num_words * VOCAB_SIZE
    return {"num_words": num_words, "differ": differ, "uncertain": uncertain, "each_row": each_row}


# ── cases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_cases(num_cases: int, seed: int = 0) -> dict[str, Any]:
    """Returns in how many rows and values the interpreted kernel and the plain law differ. The last case is a large one."""
    from tlt.speculative import fused

    generator = torch.Generator().manual_seed(seed)
    found = Counter[str]()
    largest = 0.0
    for case in range(num_cases):
        vocab_size = VOCAB_SIZE if case == num_cases - 1 else int(torch.randint(1, 5000, (), generator=generator))
        rows = _rows(4, vocab_size, generator)
        rows["logits"] = rows["logits"].to((torch.float32, torch.bfloat16, torch.float16)[case % 3])
        params = BatchParams([_any_params(generator) for _ in range(4)])
        tokens_R, logprobs_R = reference(rows["logits"], rows["keys"], rows["positions"], params)
        others_R, their_logprobs_R = fused.draw(rows["logits"], rows["keys"], rows["positions"], params)
        noise = fused.gumbel_noise(rows["keys"], rows["positions"][:, None], vocab_size)
        plain = gumbel_noise(rows["keys"], rows["positions"][:, None], vocab_size)
        found["rows"] += 4
        found["other_tokens"] += int((tokens_R != others_R).sum())
        found["values"] += noise.numel()
        found["other_noise"] += int((noise.view(torch.int32) != plain.view(torch.int32)).sum())
        scaled_RV = params.scale(rows["logits"][:, None])[:, 0]
        sizes_R = scaled_RV.gather(1, tokens_R[:, None])[:, 0].abs() + scaled_RV.logsumexp(-1).abs()
        shares_R = (logprobs_R - their_logprobs_R).abs() / (2.0**-17 + 2.0**-22 * sizes_R)
        largest = max(largest, float(shares_R.max()))
    return {**found, "logprob_share": largest}


def _rows(num_rows: int, vocab_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "logits": 3 * torch.randn(num_rows, vocab_size, generator=generator),
        "keys": torch.randint(2**32, (num_rows, 4), generator=generator),
        "positions": torch.randint(2**32, (num_rows,), generator=generator),
    }


def _any_params(generator: torch.Generator) -> SamplingParams:
    cold, k, p, m = torch.rand(4, generator=generator).tolist()
    if cold < 0.2:
        return SamplingParams(temperature=0)
    if cold < 0.6:
        return SamplingParams(temperature=2 * cold)
    return SamplingParams(temperature=cold, top_k=int(50 * k), top_p=1 - p / 2, min_p=m / 5)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, each tensor of theirs once, but a gather's source; views move nothing."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            is_read = args[1:] if func is torch.ops.aten.gather.default else args
            tensors = [leaf for leaf in tree_leaves((is_read, kwargs, result)) if isinstance(leaf, Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def count_bytes(function: Callable[[], object]) -> dict[str, float]:
    """Returns the bytes of a call: allocated in sum, held at most, moved. The first two are the allocator's own records."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function()
    del result
    held = peak = allocated = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        allocated += max(event.nbytes(), 0)
        peak = max(peak, held)
    with _Moved() as moved:
        function()
    return {"allocated": allocated, "held": peak, "moved": moved.num_bytes}


class _Uncounted:
    """Stands in for a kernel: the interpreter's own copies are none of the law's."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            with _disable_current_modes():
                self.kernel[grid](*args, **options)

        return launch


def measure_memory(num_rows: int, vocab_size: int) -> list[dict[str, Any]]:
    """Returns the bytes for each logit of both ways. The kernel reads a logit once, and again what truncation has kept of it,
    and writes 20 bytes a block; the operators around it are counted as the plain law's are."""
    from tlt.speculative import fused

    rows = _rows(num_rows, vocab_size, torch.Generator().manual_seed(1))
    logits, keys, positions = rows["logits"], rows["keys"], rows["positions"]
    found = []

    def record(name: str, by_kernel: int, ways: dict[str, Callable[[], object]]) -> None:
        for way, function in ways.items():
            counts = count_bytes(function)
            counts["moved"] += by_kernel if way == "kernel" else 0
            found.append({"law": name, "way": way, **{key: value / logits.numel() for key, value in counts.items()}})

    with (
        patch.object(fused, "law_kernel", _Uncounted(fused.law_kernel)),
        patch.object(fused, "noise_kernel", _Uncounted(fused.noise_kernel)),
    ):
        for name, one in LAWS.items():
            args = (logits, keys, positions, BatchParams([one] * num_rows))
            blocks = 20 * num_rows * -(-vocab_size // fused.BLOCK)
            by_kernel = logits.nbytes * (1 + args[-1].truncates) + blocks
            record(name, by_kernel, {"plain": partial(reference, *args), "kernel": partial(fused.draw, *args)})
        made = (keys, positions[:, None], vocab_size)
        record(
            "noise alone", logits.nbytes, {"plain": partial(gumbel_noise, *made), "kernel": partial(fused.gumbel_noise, *made)}
        )
    return found


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CLASSES = {
    "float64": r"D(FMA|MUL|ADD|SETP|MNMX)\b|MUFU\.R\w*64H|[FI]2[FI]\.\w*F64|[FI]2F\.F64|F2F\.F32\.F64",
    "integer": r"(IMAD|IADD3|IADD|LOP3|SHF|LEA|ISETP|IMNMX|VIMNMX|UIADD3|UIMAD|ULOP3|USHF|ULEA|PRMT|UISETP|VIADD|SEL|I2F)\b",
    "float32": r"(FMUL|FADD|FFMA|FSETP|FMNMX|FSEL|MUFU|HADD2|F2F|FCHK)\b",
    "memory": r"(LDG|STG|LDS|STS|SHFL|BAR)\b",
}
"""Instructions by their names in the machine code (SASS)."""


def compile_kernels(archs: Sequence[int], options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Compiles the kernels for GPUs of these compute capabilities, as `draw` would on them, and returns what each takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlt.speculative import fused

    found = []
    for arch in archs:
        for name, source, dtype in _sources(ASTSource, fused):
            kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options or fused.OPTIONS)
            usage, code = _disassembled(Path(triton.__file__).parent / "backends/nvidia/bin", kernel.asm["cubin"])
            threads = 32 * kernel.metadata.num_warps
            found.append(
                {
                    "arch": f"sm_{arch}", "kernel": name, "logits": dtype, "threads": threads, **usage,
                    "instructions": {
                        kind: len(re.findall(pattern, code)) * threads / fused.BLOCK for kind, pattern in CLASSES.items()
                    },
                    "float32_fma": len(re.findall(r"\bFFMA\b", code)),
                }
            )  # fmt: skip
    return found


def _sources(source_type: Any, fused: Any) -> list[tuple[str, Any, str]]:
    """Returns (name, kernel with the types of its arguments, type of the logits). Pointers and sizes are multiples of 16, as
    PyTorch's and large vocabularies are."""
    law = {
        "logits_ptr": "*fp32", "kept_ptr": "constexpr", "law": ("*i64", "*i64", "*fp64", "*fp64"), "token_ptr": "*i64",
        "part_ptr": "*fp32", "stride": "i64", "vocab_size": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    noise = {
        "noise_ptr": "*fp32", "key_ptr": "*i64", "position_ptr": "*i64", "num_positions": "i32", "vocab_size": "i32",
        "BLOCK": "constexpr",
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 3, 4, 5, 6)}
    values = {"kept_ptr": None, "BLOCK": fused.BLOCK}
    truncated = law | {"kept_ptr": "*fp32"}
    half = law | {"logits_ptr": "*bf16"}
    only = {"BLOCK": fused.BLOCK}
    return [
        ("law", source_type(fn=fused.law_kernel, signature=law, constexprs=values, attrs=aligned), "float32"),
        ("law", source_type(fn=fused.law_kernel, signature=half, constexprs=values, attrs=aligned), "bfloat16"),
        (
            "law after truncation",
            source_type(fn=fused.law_kernel, signature=truncated, constexprs=only, attrs=aligned),
            "float32",
        ),
        ("noise", source_type(fn=fused.noise_kernel, signature=noise, constexprs=only, attrs={(0,): aligned[(0,)]}), "–"),
    ]


def _disassembled(tools: Path, cubin: bytes) -> tuple[dict[str, int], str]:
    """Returns the resources that a compiled kernel takes, and its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = subprocess.run([str(tools / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout
    words = {"registers": "REG", "stack_bytes": "STACK", "spilled_bytes": "LOCAL", "shared_bytes": "SHARED"}
    return {name: int(re.findall(rf"{word}:(\d+)", usage)[-1]) for name, word in words.items()}, code


def compile_apart(archs: Sequence[int], options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Runs `compile_kernels` in a process of its own: one that interprets Triton cannot compile with it."""
    command = [sys.executable, "-m", "benchmarks.law_kernel", "--compile-only", json.dumps([list(archs), options])]
    with tempfile.TemporaryDirectory() as cache:
        inherited = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, capture_output=True, text=True, env=inherited, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled: list[dict[str, Any]] = json.loads(done.stdout)
    return compiled


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


EQUAL = """\
Of {num_words:,} words, {differ:,} become other noise by -log(-log(1 - w)) than by the plain law's -log(-log1p(-w)), both in
float64 and rounded once. {uncertain:,} lie so close to the border between two float32 numbers that a GPU, whose float64
logarithms may err in their last bit, might round them to the other one: {each_row:.1g} values in a row of {vocab_size:,},
by a unit of float32 or, near noise 0, by 2^-51. A token changes only where such a value belongs to the best score or the
second best, and the two are that close."""

CASES = """\
{rows:,} random rows in the interpreter (float32, bfloat16, float16; T = 0 and above; with truncation and without; up to
{vocab_size:,} tokens): {other_tokens} other tokens; {other_noise} of {values:,} noise values of other bits; log-
probabilities apart by at most {logprob_share:.2f} of the bound that fused.py states."""

MEMORY = """\
Bytes for each logit, with {num_rows} rows of {vocab_size:,} float32 logits, beside the logits themselves. Allocated (in
sum) and held (at most): what PyTorch's allocator recorded on the CPU; a GPU runs the same operators. Moved: what operators
read and write, each of their tensors once; the kernel's loads and stores by arithmetic."""

COMPILED = """\
{block} values a program. Instructions are those of the machine code, for each value; it has no loop. An fma of float32
would be a contraction, which rounds otherwise than the law."""


def to_markdown(report: dict[str, Any]) -> str:
    numbers = {**report, **report["words"], **report["cases"]}
    memory = [[m["law"], m["way"], *(f"{m[key]:,.2f}" for key in ("allocated", "held", "moved"))] for m in report["memory"]]
    keys = ["arch", "kernel", "logits", "threads", "registers", "spilled_bytes", "shared_bytes", "float32_fma"]
    compiled = [
        [*(c[key] for key in keys), *(f"{number:.1f}" for number in c["instructions"].values())] for c in report["compiled"]
    ]
    paragraphs = [
        "# The law's kernel",
        *provenance(report),
        "**No GPU ran any of this**, so it holds no time: the kernel ran in Triton's interpreter, and was compiled for GPUs "
        "that are not here.",
        "## Equal bits",
        EQUAL.format(**numbers),
        CASES.format(**numbers),
        "## Memory",
        MEMORY.format(**numbers),
        table(["law", "way", "allocated", "held", "moved"], memory),
        "## Compiled",
        COMPILED.format(**numbers),
        table([*(key.replace("_", " ") for key in keys), *CLASSES], compiled),
    ]
    return "\n\n".join(paragraphs) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("law-kernel"))
    parser.add_argument("--num-words", type=int, default=1 << 32)
    parser.add_argument("--num-cases", type=int, default=80)
    parser.add_argument("--num-rows", type=int, default=4)
    parser.add_argument("--compile-only", type=json.loads, help="JSON of the arguments of compile_kernels")
    options = parser.parse_args()
    if options.compile_only is not None:
        print(json.dumps(compile_kernels(*options.compile_only)))
        return
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import triton

    from tlt.speculative import fused

    report = {
        "command": "python -m benchmarks.law_kernel",
        "environment": {**environment(), "triton": triton.__version__},
        "block": fused.BLOCK,
        "num_rows": options.num_rows,
        "vocab_size": VOCAB_SIZE,
        "compiled": compile_apart([80, 90]),
        "memory": measure_memory(options.num_rows, VOCAB_SIZE),
        "cases": compare_cases(options.num_cases),
        "words": compare_words(options.num_words),
    }
    write_report(options.out, report, to_markdown(report))


if __name__ == "__main__":
    main()
