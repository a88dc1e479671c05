"""Compiles the law's kernels (tlt/speculation/law/fused.py) for GPUs that are not here: registers, spills,
instructions of float64."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLOAT64 = r"D(FMA|MUL|ADD|SETP|MNMX)\b|MUFU\.R\w*64H|[FI]2[FI]\.\w*F64|[FI]2F\.F64|F2F\.F32\.F64"
"""Instructions of float64 by their names in the machine code (SASS)."""


def compile_kernels(archs: Sequence[int], options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Compiles the kernels for GPUs of these compute capabilities, as `draw` would on them, and returns
    what each takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlt.speculation.law import fused

    found = []
    for arch in archs:
        for name, source, dtype in _sources(ASTSource, fused):
            kernel = triton.compile(
                source, target=GPUTarget("cuda", arch, 32), options=options or fused.OPTIONS
            )
            tools = Path(triton.__file__).parent / "backends/nvidia/bin"
            usage, code = disassembled(tools, kernel.asm["cubin"])
            float64 = len(re.findall(FLOAT64, code)) * 32 * kernel.metadata.num_warps / fused.BLOCK
            record = {"arch": f"sm_{arch}", "kernel": name, "logits": dtype, "float64": float64, **usage}
            found.append({**record, "float32_fma": len(re.findall(r"\bFFMA\b", code))})
    return found


def _sources(source_type: Any, fused: Any) -> list[tuple[str, Any, str]]:
    """Returns (name, kernel with the types of its arguments, type of the logits). Pointers and sizes are
    multiples of 16, as PyTorch's and large vocabularies are."""
    law = {"logits_ptr": "*fp32", "kept_ptr": "constexpr", "law": ("*i64", "*i64", "*fp64", "*fp64")}
    law |= {
        "token_ptr": "*i64",
        "best_ptr": "*fp32",
        "stride": "i64",
        "vocab_size": "i32",
        "BLOCK": "constexpr",
    }
    noise = {"noise_ptr": "*fp32", "key_ptr": "*i64", "position_ptr": "*i64", "num_positions": "i32"}
    noise |= {"vocab_size": "i32", "BLOCK": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 3, 4, 5, 6)}
    block = {"BLOCK": fused.BLOCK}

    def law_source(changes: dict[str, str], constants: dict[str, Any]) -> Any:
        return source_type(fn=fused.law_kernel, signature=law | changes, constexprs=constants, attrs=aligned)

    first = {(0,): aligned[(0,)]}
    return [
        ("law", law_source({}, {"kept_ptr": None, **block}), "float32"),
        ("law", law_source({"logits_ptr": "*bf16"}, {"kept_ptr": None, **block}), "bfloat16"),
        ("law after truncation", law_source({"kept_ptr": "*fp32"}, block), "float32"),
        ("noise", source_type(fn=fused.noise_kernel, signature=noise, constexprs=block, attrs=first), "–"),
    ]


def disassembled(tools: Path, cubin: bytes) -> tuple[dict[str, int], str]:
    """Returns the resources that a compiled kernel takes, and its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (
            [str(tools / "cuobjdump"), "-res-usage", file.name],
            [str(tools / "nvdisasm"), "-c", file.name],
        )
        usage, code = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    words = {"registers": "REG", "stack_bytes": "STACK", "spilled_bytes": "LOCAL", "shared_bytes": "SHARED"}
    return {name: int(re.findall(rf"{word}:(\d+)", usage)[-1]) for name, word in words.items()}, code


def compile_apart(archs: Sequence[int], options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Runs `compile_kernels` in a process of its own: one that interprets Triton cannot compile with it."""
    command = [sys.executable, "-m", "tests.vllm.compiled", json.dumps([list(archs), options])]
    with tempfile.TemporaryDirectory() as cache:
        inherited = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, capture_output=True, text=True, env=inherited, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled: list[dict[str, Any]] = json.loads(done.stdout)
    return compiled


if __name__ == "__main__":
    print(json.dumps(compile_kernels(*json.loads(sys.argv[1]))))
