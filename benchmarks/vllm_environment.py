"""Makes the environment that the tests of tests/vllm run in, and says where its interpreter is.

python -m benchmarks.vllm_environment FOLDER        2 GB; versions: peers.py

Run by `make vllm-test`. Knows no test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers import setup_vllm_tests
from benchmarks.real_size.competitors import PeerError


def main() -> int:
    try:
        print(setup_vllm_tests(Path(sys.argv[1])))
    except PeerError as error:
        print(f"make: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
