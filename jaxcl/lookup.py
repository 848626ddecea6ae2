"""Find the functions and modules that a config names.

A name with a dot is of the user's package, which Python must find.
"""

import importlib
import pkgutil
import types
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from jaxcl import core
from jaxcl.errors import Refused


def find_function(choices: dict, section, field: str):
    """Find the function that a section's `name` picks; return the other keys, too.

    Args:
      choices: name -> function. A name with a dot is a function of the user's
        package: "mypackage.mymodule.function".
      section: ConfigDict or dict.
      field: path of the section, for messages ("config.encoder").

    Raises:
      Refused: there is no such function.
    """
    section = dict(section)
    name, field = section.pop("name", None), f"{field}.name"
    if not _is_foreign(name):
        core.check_choice(field, name, tuple(choices))
        return choices[name], section
    package, _, last = name.rpartition(".")
    function = getattr(_import_module(package, name, field), last, None)
    if not callable(function):
        raise Refused(
            f"{field}={name!r}: {package} has no function {last!r}; must be "
            f"package.module.function, or one of {', '.join(choices)}"
        )
    return function, section


def find_module(package: str, name: str, field: str):
    """Find the module `package.name`, or that of the user's package.

    Args:
      package: "jaxcl.methods" or "jaxcl.evals".
      name: name of one of its modules, or with a dot "mypackage.mymodule"; the module
        has a function `make`.
      field: path of the option, for messages.

    Raises:
      Refused: there is none, or it has no `make`.
    """
    if _is_foreign(name):
        return _import_user_module(name, field)
    path = f"{package}.{name}"
    exists = isinstance(name, str) and name.isidentifier() and find_spec(path)
    module = importlib.import_module(path) if exists else None
    if not hasattr(module, "make"):
        core.check_choice(field, name, tuple(list_modules(package)))  # refuses it
    return module


def find_entry(choices: Mapping[str, Any], name: str, field: str) -> Any:
    """Find an entry of a table, or the `make` of a module of the user's package.

    Args:
      choices: name -> entry.
      name: a key of `choices`, or with a dot a module, "mypackage.mymodule".
      field: path of the section, for messages ("config.method.base").

    Raises:
      Refused: there is neither; the message has the nearest names.
    """
    if _is_foreign(name):
        return _import_user_module(name, field).make
    core.check_choice(field, name, tuple(choices))
    return choices[name]


def check_type(record: Any, kind: type, name: str, field: str) -> Any:
    """Return a `make`'s result if it is of the type `kind`; refuse it otherwise."""
    if not isinstance(record, kind):
        raise Refused(
            f"{field}={name!r}: `make` returns a {type(record).__name__}; must be a "
            f"{kind.__module__}.{kind.__name__}"
        )
    return record


def name_of(section: str | Mapping[str, Any] | None) -> str | None:
    """Return the name that a section has; a plain string is a name."""
    return section.get("name") if isinstance(section, Mapping) else section


def _import_user_module(name, field):
    """Import a module of the user's package that has `make`."""
    module = _import_module(name, name, field)
    if not hasattr(module, "make"):
        raise Refused(field, name, "the module has no function `make`")
    return module


def list_modules(package: str) -> dict[str, types.ModuleType]:
    """Import all modules of a package; return those that have `make`, by name."""
    folder = importlib.import_module(package)
    names = [info.name for info in pkgutil.iter_modules(folder.__path__)]
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "make")}


def _is_foreign(name) -> bool:
    """Tell whether a name is a dotted path into the user's package."""
    parts = name.split(".") if isinstance(name, str) else ()
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _import_module(path, name, field):
    """Import a module; refuse `name` if there is none.

    An import that fails inside the module is the module's error, and is raised.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise Refused(
            f"{field}={name!r}: no module {error.name!r}; Python must find it where "
            "the command runs"
        ) from error


def find_method(name: str):
    """Find the module that config.method.name names."""
    return find_module("jaxcl.methods", name, "config.method.name")
