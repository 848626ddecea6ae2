"""Find config files: `configs/` of a checkout, `jaxcl/configs` of an installed copy."""

import ast
import difflib
import importlib.util
import pathlib
import types
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

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
    path = folder() / "papers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"papers_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    near = difflib.get_close_matches(path.stem, describe_configs(), n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    if pathlib.Path(file).is_dir():
        hint = f" ({file} is a folder: did you mean own_images:{file}?)"
    raise Refused(
        f"--config={name}: no file or config has this name{hint}; "
        "`jaxcl list configs` has all"
    )


def located_in(argv: Sequence[str]) -> list[str]:
    """Replace the value of --config by its path in the words of a command."""
    words = list(argv)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-config") and value:
            words[at] = f"{flag}={locate(value)}"
        elif flag in ("--config", "-config") and not equals and at + 1 < len(words):
            words[at + 1] = locate(words[at + 1])
    return words


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


def read_config(words: Sequence[str]) -> ml_collections.ConfigDict:
    """Read the config of a command's words, as `jaxcl.main` does.

    Args:
      words: "--config=FILE" or "--config=FILE:WORDS", and overrides.

    Raises:
      Refused, flags.Error: there is no such file, or a word is wrong.
    """
    argv, values = ["jaxcl", *located_in(words)], flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config",
        None,
        flag_values=values,
        sys_argv=argv,
        lock_config=False,
        accept_new_attributes=True,
    )
    left = values(argv)
    if len(left) > 1 or values["config"].value is None:
        raise Refused(f"{' '.join(words)!r}: must be a config, and --config.OPTIONs")
    return values["config"].value
