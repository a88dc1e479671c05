"""The user's own code, by name: `package.module:object`, sought where Python seeks modules and in the working
directory.

Tasks, reward functions and trackers are named so. Whatever goes wrong in them is said in one line that
names the place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tlt.io.text import one_line, visible
from tlt.types import UserError

MAX_MESSAGE = 300
"""Characters that are kept of an exception's message."""

_PYTHON = sysconfig.get_path("stdlib")
_HERE = Path(__file__).parents[1]
_CALLERS = (__file__, *(str(_HERE / part) for part in ("tasks/base.py", "rewards", "report")))
"""The files that call a user's code: what was raised, was not raised there."""


def get_object(place: str, spec: str) -> Any:
    """Returns the object "package.module:object". Raises UserError, which begins with `place`."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"{place}: is no 'package.module:object'; give one")
    if module_name.partition(".")[0] != "tlt":
        see_working_directory()
    module = _import(place, module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{place}: {module.__file__} has no {attribute!r}; correct the name") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a __getattr__ of the module's raises
        raise UserError(
            f"{place}: cannot be looked up ({describe(error)}); correct {module.__file__}"
        ) from None


def source_of(spec: str) -> Path | None:
    """Returns the file of the module in "package.module:object"; None: the name is of another kind, or no
    user's file."""
    module_name, colon, _ = spec.partition(":")
    if not colon or module_name.partition(".")[0] == "tlt":
        return None
    see_working_directory()
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # ValueError: made in this process
        return None
    path = None if found is None or not found.has_location or found.origin is None else Path(found.origin)
    return path if path is not None and path.is_file() else None


def is_importable(spec: str) -> bool:
    """Returns whether other processes can import the object, too: not where its module is this one's
    script or invention."""
    module = sys.modules.get(spec.partition(":")[0])
    return module is None or module.__spec__ is not None


def see_working_directory() -> None:
    """Lets Python seek modules in the working directory, too; last, so that what lies there hides no
    installed module."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _import(place: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever the user's module raises
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{place} cannot be loaded: no module {error.name!r} in {Path.cwd()} or on PYTHONPATH;"
                " run the command in the folder of its file, or add that folder to PYTHONPATH"
            ) from None
        raise UserError(f"{place}: cannot be imported ({describe(error)}); correct the file") from None


def describe(error: BaseException) -> str:
    """Returns one line of bounded length: kind, message, and the place in the user's file where it was
    raised."""
    if isinstance(error, UserError):
        return visible(str(error))
    text = one_line(error, MAX_MESSAGE)
    if isinstance(error, SyntaxError | ImportError):  # they say their place themselves
        return text
    files = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_CALLERS))
    ]
    users = [
        frame
        for frame in files
        if not frame.filename.startswith(_PYTHON) and "site-packages" not in frame.filename
    ]
    return f"{text}, {(users or files)[-1].filename}:{(users or files)[-1].lineno}" if files else text
