"""Find config files: `configs/` of a checkout, `jaxcl/configs` of an installed copy."""

import ast
import difflib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import types
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags
from ml_collections.config_flags import config_path

from jaxcl.data.images import decode
from jaxcl.errors import Refused

_PACKAGE = pathlib.Path(__file__).parents[1]  # jaxcl/


def folder() -> pathlib.Path:
    """Find the folder of the configs that come with the library."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / "configs"
    return _PACKAGE / "configs"


def load_paper(name: str) -> types.ModuleType:
    """Load configs/papers/NAME.py, which the configs of a paper share."""
    return _load_module(str(folder() / "papers" / f"{name}.py"))


def _load_module(path: str) -> types.ModuleType:
    """Load a file, whatever its suffix, as a module that no `import` finds."""
    loader = importlib.machinery.SourceFileLoader(pathlib.Path(path).stem, path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def describe_configs() -> dict[str, str]:
    """Read the first line of the docstring of each config, by name."""
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        for path in sorted(folder().glob("*.py"))
        if path.stem != "__init__"
    }


def locate(name: str) -> str:
    """Find the path of a config: a file, or the name of one in `folder`.

    Args:
      name: "mine.py", "configs/mine.py", "pnr_cifar100", each optionally with a word
        after a colon, which is kept.

    Raises:
      Refused: there is no such file; the message has the nearest names.
    """
    file, colon, word = name.partition(":")
    if pathlib.Path(file).is_file():
        return name
    path = folder() / f"{pathlib.Path(file).name.removesuffix('.py')}.py"
    if path.is_file() and pathlib.Path(file).parent.name in ("", "configs"):
        return f"{path}{colon}{word}"
    matches = difflib.get_close_matches(path.stem, describe_configs(), n=3)
    hint = f" (did you mean {' or '.join(matches)}?)" if matches else ""
    if pathlib.Path(file).is_dir():
        hint = f" ({file} is a folder: did you mean own_images:{file}?)"
    raise Refused(
        f"--config={name}: no file or config has this name{hint}; "
        "`jaxcl list configs` has all"
    )


class _SectionParser(flags.ArgumentParser):
    """Parse the value of a whole section: its name, or a dict of its options."""

    def parse(self, argument):
        """Return a name, for `recipe.Sections`, or a section."""
        if not isinstance(argument, str):
            return argument
        try:
            value = ast.literal_eval(argument)
        except (SyntaxError, ValueError):
            return argument
        if not isinstance(value, dict):
            raise Refused(f"{argument}: must be a name, or a section {{...}}")
        return ml_collections.ConfigDict(value)


config_flags.register_flag_parser_for_type(ml_collections.ConfigDict, _SectionParser())


def load_config(name: str) -> ml_collections.ConfigDict:
    """Run `get_config` of a config file.

    Args:
      name: name or path for `locate`; the word after a colon is passed on.

    Raises:
      Refused, OSError: there is no such file, or it refuses the word.
    """
    path, colon, word = locate(name).partition(":")
    words, get_config = [word] if colon else [], _load_module(path).get_config
    try:
        inspect.signature(get_config).bind(*words)
    except TypeError as error:
        rule = "takes no word" if colon else "needs a word"
        allowed = f"the config {rule} behind its name and a colon"
        raise Refused("--config", name, allowed) from error
    try:
        config = get_config(*words)
    except ValueError as error:
        raise Refused(f"--config={name}: {error}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise Refused("--config", name, "its get_config must return a ConfigDict")
    return config


def override(config: ml_collections.ConfigDict, words: Sequence[str]) -> None:
    """Set options of a config in place.

    Args:
      config: a config; an option that it lacks is added.
      words: "--config.method.base=byol", "--noconfig.plots".

    Raises:
      Refused: a word has no place in the config, or is no number where one must be.
    """
    try:
        _set_options(config, words)
    except _WRONG:
        for word in words:  # which one?
            field, _, value = word.removeprefix("--").partition("=")
            try:
                _set_options(config, [word])
            except _WRONG as error:
                raise Refused(field, value, _say_wrong(config, field, error)) from error
        raise


_WRONG = (flags.Error, LookupError, AttributeError, TypeError, ValueError)


def _set_options(config, words) -> None:
    """Set options as flags of ml_collections do, by the types of the config."""
    argv, values = ["jaxcl", *words], flags.FlagValues()
    config_flags.DEFINE_config_dict(
        "config",
        config,
        flag_values=values,
        sys_argv=argv,
        lock_config=False,
        accept_new_attributes=True,
    )
    values(argv)


def _say_wrong(config, field, error) -> str:
    """Say what is wrong with an override."""
    path = field.partition(".")[2]
    section, _, _ = path.rpartition(".")
    try:
        kind = config_path.get_type(path, config, default_type=object)
    except (LookupError, AttributeError, TypeError):
        return f"the config has no section {section!r}"
    if kind is type(None):
        return "is None in the config and has no type; copy the file and set it there"
    kinds = {int: "a whole number", float: "a number", bool: "True or False"}
    return f"must be {kinds[kind]}" if kind in kinds else str(error)


def read_config(words: Sequence[str]) -> ml_collections.ConfigDict:
    """Read the config of a command's words.

    Args:
      words: "--config=FILE" or "--config=FILE:WORD", and overrides.

    Raises:
      Refused, OSError: there is no such file, or a word is wrong.
    """
    decode.lift_pillow_limit()
    named = [word for word in words if word.startswith("--config=")]
    overrides = [
        word for word in words if word.startswith(("--config.", "--noconfig."))
    ]
    if not named or len(named) + len(overrides) < len(words):
        raise Refused(f"{' '.join(words)!r}: must be a config, and --config.OPTIONs")
    config = load_config(named[-1].partition("=")[2])
    override(config, overrides)
    return config
