"""Finds the user's own code by name, `package.module:object`: tasks, reward functions and trackers.

Modules are found where Python finds them, and in the working directory. Every mistake in them is one line
that names the place.
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

from tlt.io.secrets import hide
from tlt.io.text import one_line, visible
from tlt.types import UserError

MAX_MESSAGE = 300
"""Characters of an exception's message that are kept."""

_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages")
_HERE = Path(__file__).parents[1]
_CALLERS = (__file__, *(str(_HERE / part) for part in ("tasks/base.py", "rewards", "report")))
"""The files that call a user's code: no mistake of the user's lies in them."""


def get_object(place: str, spec: str) -> Any:
    """Returns the object "package.module:object". Raises UserError that begins with `place`."""
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
    except BaseException as error:  # the module's own __getattr__ may raise anything
        what = f"cannot be looked up ({describe(error)})"
        raise UserError(f"{place}: {what}; correct {module.__file__}") from None


def source_of(spec: str) -> Path | None:
    """Returns the file of the module in "package.module:object"; None: a name of another form, or no file
    of the user's."""
    module_name, colon, _ = spec.partition(":")
    if not colon or module_name.partition(".")[0] == "tlt":
        return None
    see_working_directory()
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # ValueError: the module was made in this process
        return None
    origin = found.origin if found is not None and found.has_location else None
    return Path(origin) if origin is not None and Path(origin).is_file() else None


def is_importable(spec: str) -> bool:
    """Returns whether other processes can import the object, too: not if its module is this process's script
    or was made in it."""
    module = sys.modules.get(spec.partition(":")[0])
    return module is None or module.__spec__ is not None


def see_working_directory() -> None:
    """Adds the working directory to where Python finds modules; last, so that it hides no installed
    module."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _import(place: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            what = f"cannot be loaded: no module {error.name!r} in {Path.cwd()} or on PYTHONPATH"
            remedy = "run the command in the folder of its file, or add that folder to PYTHONPATH"
            raise UserError(f"{place} {what}; {remedy}") from None
        raise UserError(f"{place}: cannot be imported ({describe(error)}); correct the file") from None


def describe(error: BaseException) -> str:
    """Returns one line of bounded length, without credentials: kind, message, and the last place in a file of
    the user's."""
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
