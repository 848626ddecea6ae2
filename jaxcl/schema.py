"""Signatures as the schema: a section of a config becomes keyword arguments."""

import collections.abc
import difflib
import importlib
import inspect
import pkgutil
import types
import typing
from importlib.util import find_spec

from jaxcl import core


def options(function, section, field: str, given=()) -> dict:
    """The keyword arguments that a section of the config gives a function.

    Args:
      function: whose keyword-only parameters are the allowed keys.
      section: ConfigDict or dict.
      field: its path, for messages ("config.method").
      given: parameters that the config does not set.

    Raises:
      ValueError: an unknown key (with the nearest ones), a value of another
        type than the default, or a missing key that has no default.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in given
    }
    chosen = {}
    for key, value in section.items():
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"{field}.{key}: no such option; {hint}"
                f"allowed are {', '.join(sorted(parameters)) or 'none'}"
            )
        chosen[key] = _checked(value, parameters[key], f"{field}.{key}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in chosen:
            raise ValueError(f"{field}.{name}: missing, and it has no default")
    return chosen


def defaults(function) -> dict:
    """The keyword-only parameters that have a default, with it."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.default is not parameter.empty
    }


def _checked(value, parameter, field):
    """The value, refused where its type is not the parameter's."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(annotation, types.UnionType):
        kinds = [typing.get_origin(a) or a for a in typing.get_args(annotation)]
    elif default in (None, inspect.Parameter.empty) or value is None:
        return value
    else:
        kinds = [type(default)]
    kinds += [int] if float in kinds else []
    kinds += [list, tuple] if {list, tuple, collections.abc.Sequence} & {*kinds} else []
    if isinstance(value, bool):  # an int to Python, never to a user
        right = bool in kinds
    else:
        right = isinstance(value, tuple(kinds))
    if not right:
        names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise ValueError(f"{field}={value!r}: must be {names}; default {default!r}")
    return value


def named(choices: dict, section, field: str):
    """The function that a section's `name` picks, and the section's other keys.

    Args:
      choices: name -> function. A name with a dot is a function of the user's own
        package: "mypackage.mymodule.function".
      section: ConfigDict or dict.
      field: its path, for messages ("config.encoder").

    Raises:
      ValueError: there is no such function.
    """
    section = dict(section)
    name = section.pop("name", None)
    if not _is_foreign(name):
        core.check_choice(f"{field}.name", name, tuple(choices))
        return choices[name], section
    package, _, function = name.rpartition(".")
    found = getattr(_imported(package, name, f"{field}.name"), function, None)
    if not callable(found):
        raise ValueError(
            f"{field}.name={name!r}: {package} has no function {function!r}; must be "
            f"package.module.function, or one of {', '.join(choices)}"
        )
    return found, section


def module(package: str, name: str, field: str):
    """The module `package.name`, or that of the user's own package; no other is read.

    Args:
      package: "jaxcl.methods" or "jaxcl.evals".
      name: of one of its modules, or with a dot "mypackage.mymodule"; the module has a
        function `make`.
      field: for messages.

    Raises:
      ValueError: there is none, or it has no `make`.
    """
    if _is_foreign(name):
        found = _imported(name, name, field)
        if not hasattr(found, "make"):
            raise ValueError(f"{field}={name!r}: the module has no function `make`")
        return found
    path = f"{package}.{name}"
    there = isinstance(name, str) and name.isidentifier() and find_spec(path)
    found = importlib.import_module(path) if there else None
    if not hasattr(found, "make"):
        core.check_choice(field, name, _with_make(package))  # refuses it
    return found


def _with_make(package) -> list[str]:
    """Modules of a package that have `make`. It imports all of them, for a message."""
    folder = importlib.import_module(package)
    return [
        info.name
        for info in pkgutil.iter_modules(folder.__path__)
        if hasattr(importlib.import_module(f"{package}.{info.name}"), "make")
    ]


def _is_foreign(name) -> bool:
    """Whether a name is a dotted path into the user's own package."""
    return isinstance(name, str) and "." in name.strip(".")


def _imported(path, name, field):
    """Import a module; refuse `name` if there is none.

    An import that fails inside the module is the module's own error, and is raised.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{field}={name!r}: there is no module {error.name!r}; must be one that "
            "Python finds where the command runs"
        ) from error


def method(name: str):
    """The module that config.method.name names."""
    return module("jaxcl.methods", name, "config.method.name")


def differences(old: dict, new: dict, field="config") -> list[str]:
    """The fields in which two configs differ, as "field: old -> new"."""
    found = []
    for key in sorted(set(old) | set(new)):
        a, b, name = old.get(key, "absent"), new.get(key, "absent"), f"{field}.{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, name)
        elif a != b:
            found.append(f"{name}: {a!r} -> {b!r}")
    return found
