"""Where compiled loops are kept: they are compiled anew when any file of loops has changed, and processes do not take each
other's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

loops = pytest.importorskip("tlt.base.loops", reason="Numba is not installed")

from numba.core.caching import IndexDataCacheFile  # noqa: E402 - only where Numba is

PACKAGE = Path(loops.__file__).parents[1]


def test_every_file_of_loops_is_in_the_stamp() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    with_loops = {name for name, source in sources.items() if "@njit" in source}
    assert "models/loops/items.py" in with_loops
    assert with_loops <= {name for name, *_ in loops._stamp()}


CALLED = "from numba import njit\n\n@njit(cache=True)\ndef called():\n    return {number}\n"
CALLING = """
import sys
sys.path.insert(0, {folder!r})
from tlt.base import loops
from pathlib import Path
loops._PACKAGE = Path({folder!r})
loops._stamp.cache_clear()
from compiled_calling import calling
print(calling())
"""


def test_a_change_of_what_a_loop_calls_is_seen(tmp_path: Path) -> None:
    """With Numba's own locators the second process would print 1."""
    (tmp_path / "compiled_calling.py").write_text(
        "from numba import njit\nfrom compiled_called import called\n\n"
        "@njit(cache=True)\ndef calling():\n    return called()\n"
    )
    printed = []
    for number in (1, 2):
        (tmp_path / "compiled_called.py").write_text(CALLED.format(number=number))
        os.utime(tmp_path / "compiled_called.py", (number, number))
        command = [sys.executable, "-B", "-c", CALLING.format(folder=str(tmp_path))]
        printed.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert printed == ["1", "2"]


def test_processes_that_compile_at_once_keep_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for them: each opens the lock by itself."""
    write_index = IndexDataCacheFile._save_index

    def write_slowly(self: Any, overloads: Any) -> None:
        time.sleep(0.05)  # the others have read the index meanwhile
        write_index(self, overloads)

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", write_slowly)
    keys = [f"signature {number}" for number in range(4)]

    def file() -> Any:
        return IndexDataCacheFile(str(tmp_path), "function", "stamp")

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(lambda key: file().save(key, f"code of {key}"), keys))
    assert [file().load(key) for key in keys] == [f"code of {key}" for key in keys]


def loop(at: int) -> None: ...


def test_a_process_waits_for_another_that_compiles_the_same() -> None:
    loops.compiled(loop)  # on disk: whoever does not wait has loaded it at once
    with ThreadPoolExecutor(1) as pool:
        with loops._alone(loop):
            address = pool.submit(loops.compiled.__wrapped__, loop)
            assert not wait([address], timeout=1).done
        assert address.result() > 0
