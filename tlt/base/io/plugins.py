"""Finds the user's tasks, reward functions and trackers by name.

package.module:object    a module, found where Python finds it or in the working directory
FOLDER/FILE.py:object    a file, wherever it lies; modules beside it can be imported
verifiers:FOLDER/FILE.py a file of a task family's own kind
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tlt.base.io.secrets import hide
from tlt.base.io.text import one_line, visible
from tlt.base.types import UserError

MAX_MESSAGE = 300

_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages")
_HERE = Path(__file__).parents[2]
_CALLERS = (
    __file__,
    *(
        str(_HERE / part)
        for part in ("tasks/base.py", "tasks/rewards", "tasks/environments", "training/report")
    ),
)
"""Files that call the user's code, skipped in a search for the user's mistake."""


def get_object(place: str, spec: str) -> Any:
    """Raises UserError that begins with `place`."""
    module_name, attribute = split_name(spec)
    if not (module_name and attribute):
        raise UserError(f"{place}: is no 'package.module:object' or 'FILE.py:object'; give one")
    if is_file(spec):
        module = _load(place, module_name, _run_file)
    else:
        if module_name.partition(".")[0] != "tlt":
            see(Path.cwd())
        module = _load(place, module_name, importlib.import_module)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{place}: {module.__file__} has no {attribute!r}; correct the name") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module's own __getattr__ may raise anything
        what = f"cannot be looked up ({describe(error)})"
        raise UserError(f"{place}: {what}; correct {module.__file__}") from None


def split_name(spec: str) -> tuple[str, str]:
    """Returns (module or file, object); the first is empty without a colon."""
    module_name, _, attribute = spec.rpartition(":")
    return module_name, attribute


def is_file(spec: str) -> bool:
    return split_name(spec)[0].endswith(".py")


def file_in(spec: str) -> str | None:
    """Returns FILE.py of "FILE.py:object" and of "family:FILE.py", else None."""
    return next((part for part in spec.rpartition(":")[::2] if part.endswith(".py")), None)


def without_folder(spec: str) -> str:
    """A name that is the same on every machine: "word_problems.py:TASK"."""
    file = file_in(spec)
    return spec if file is None else spec.replace(file, file.rpartition("/")[2])


def source_of(spec: str) -> Path | None:
    """Returns the user's file, or None."""
    module_name, _ = split_name(spec)
    if (file := file_in(spec)) is not None:
        return Path(file).absolute() if Path(file).is_file() else None
    if not module_name or module_name.partition(".")[0] == "tlt":
        return None
    see(Path.cwd())
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # ValueError: the module was made in this process
        return None
    origin = found.origin if found is not None and found.has_location else None
    return Path(origin) if origin is not None and Path(origin).is_file() else None


def is_importable(spec: str) -> bool:
    """Whether other processes can import the object, which may lie in this process's script or a module made
    here."""
    module = sys.modules.get(split_name(spec)[0])
    return module is None or module.__spec__ is not None


def see(folder: Path) -> None:
    """Appends, so that no installed module is hidden."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _run_file(name: str) -> ModuleType:
    """A file runs once per process. Raises FileNotFoundError."""
    file = Path(name).resolve()
    digest = hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()
    known = f"{file.stem}_{digest}"  # no module's name: a file math.py hides no library
    if known not in sys.modules:
        see(file.parent)
        found = importlib.util.spec_from_file_location(known, file)
        assert found is not None, f"{file} ends in .py"
        assert found.loader is not None, f"{file} ends in .py"
        sys.modules[known] = importlib.util.module_from_spec(found)  # dataclasses look their module up there
        try:
            found.loader.exec_module(sys.modules[known])
        except BaseException:
            del sys.modules[known]
            raise
    return sys.modules[known]


def _load(place: str, module_name: str, load: Callable[[str], ModuleType]) -> ModuleType:
    try:
        return load(module_name)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            what = f"cannot be loaded: no module {error.name!r} in {Path.cwd()} or on PYTHONPATH"
            remedy = "run the command in the folder of its file, or add that folder to PYTHONPATH"
            raise UserError(f"{place} {what}; {remedy}") from None
        if isinstance(error, FileNotFoundError) and error.filename == str(Path(module_name).resolve()):
            raise UserError(f"{place}: there is no file {error.filename}; correct its path") from None
        raise UserError(f"{place}: cannot be imported ({describe(error)}); correct the file") from None


def describe(error: BaseException) -> str:
    """Returns type, message and the last line in a user's file, without credentials."""
    if isinstance(error, UserError):
        return hide(visible(str(error)))
    text = one_line(error, MAX_MESSAGE)
    if isinstance(error, SyntaxError | ImportError):  # their messages name the place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith(("<", *_CALLERS))]
    users = [frame for frame in files if not any(part in frame.filename for part in _LIBRARIES)]
    last = (users or files)[-1:]
    return ", ".join([text, *(f"{frame.filename}:{frame.lineno}" for frame in last)])
