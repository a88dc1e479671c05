"""The memory of a command: the largest resident set among all its processes.

python -m benchmarks.largest MODULE WORDS …        runs `python -m MODULE WORDS`, then prints it, in MiB
"""

from __future__ import annotations

import resource
import subprocess
import sys

from benchmarks.command import run_child


def largest_mib(*command: str) -> int:
    """Runs `python -m COMMAND`; returns the largest resident set among all its processes, in MiB."""
    return int(run_child([sys.executable, "-m", "benchmarks.largest", *command]).split()[-1])


if __name__ == "__main__":
    done = subprocess.run([sys.executable, "-m", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=False)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    sys.exit(done.returncode)
