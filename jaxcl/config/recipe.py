"""Tools of config files: values that follow other fields, words of the argument."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.errors import Refused


class _Operation(NamedTuple):
    """An operation of ml_collections: `fn` of the field's own value and `args`."""

    fn: Callable
    args: list


def compute(function: Callable, *fields: Any, like: Any = None):
    """Tie a field to a function of other fields, computed after all overrides.

    Setting the value itself, as in `--config.optimizer.lr=0.5`, cuts the tie.

    Args:
      function: function of the values of the fields.
      fields: `config.section.get_ref(name)` each; with `like` also plain values.
      like: a value of its type; None: the present result.
    """
    if like is None:
        like = function(*(field.get() for field in fields))
    operation = _Operation(lambda _, *values: function(*values), list(fields))
    return config_dict.FieldReference(like, field_type=type(like), op=operation)


def look_up(table: dict, *fields: config_dict.FieldReference, default=None):
    """Tie a field to a table that other fields look up, see `compute`.

    `config.optimizer.lr = recipe.look_up({"byol": 1.0, "simclr": 0.6}, base)`, with
    `base = config.method.base.get_ref("name")`, makes `--config.method.base=byol` bring
    BYOL's learning rate with it.

    Args:
      table: value of the field, or a tuple for several fields, -> value. All values
        have one type. The key "" stands for all missing keys.
      fields: `config.section.get_ref(name)` each.
      default: the same as the key ""; may be a result of `look_up`.

    Raises:
      Refused: when the value is read, if the table has no entry for the fields.
    """

    # ml_collections returns None where an argument is None.
    defaults = [] if default is None else [default]

    def find(*values):
        values, otherwise = values[: len(fields)], values[len(fields) :]
        key = values if len(values) > 1 else values[0]
        if key in table:
            return table[key]
        if not otherwise and "" not in table:
            keys = ", ".join(map(repr, table))
            raise Refused(
                f"{key!r}: the config has no value for it, only for {keys}; set the "
                "value itself"
            )
        return otherwise[0] if otherwise else table[""]

    return compute(find, *fields, *defaults, like=next(iter(table.values())))


class Sections(config_dict.ConfigDict):
    """A section whose inner sections can be set by name, with a plain string.

    `config.method.base = "byol"` and `--config.method.base=byol` change the name of the
    section config.method.base. Values that follow the name change with it.
    """

    def __setitem__(self, key, value):
        """Set an option; a string for a section is its name."""
        inner = self[key] if key in self else None
        if isinstance(value, str) and isinstance(inner, config_dict.ConfigDict):
            inner["name"] = value
        else:
            super().__setitem__(key, value)

    def update(self, *other, **values):
        """Set several options, see `ConfigDict.update`."""
        names = {
            key: value
            for key, value in values.items()
            if isinstance(value, str) and key in self
        }
        for key, value in names.items():
            self[key] = value
        rest = {key: value for key, value in values.items() if key not in names}
        super().update(*other, **rest)


def set_by_name(section: config_dict.ConfigDict, table: Mapping[str, Mapping]) -> None:
    """Set options of an inner section that depend on its name.

    With `recipe.set_by_name(config.method.base, {"byol": {"momentum_start": 0.9}})`
    `--config.method.base=byol` brings the option with it. For names that are not in the
    table an option keeps the value that it had.

    Args:
      section: section with a `name`.
      table: name -> option -> value, or a result of `look_up`.
    """
    name = section.get_ref("name")
    for option in dict.fromkeys(x for values in table.values() for x in values):
        values = {kind: row[option] for kind, row in table.items() if option in row}
        before = schema.MISSING  # not set
        if section.get(option) is not None:
            before = section.get_oneway_ref(option)

        def pick(chosen, before, *candidates, kinds=tuple(values)):
            return dict(zip(kinds, candidates, strict=True)).get(chosen, before)

        first = next(iter(values.values()))
        like = first.get() if isinstance(first, config_dict.FieldReference) else first
        tied = compute(pick, name, before, *values.values(), like=like)
        with section.unlocked(), section.ignore_type():
            if option in section:
                del section[option]
            section[option] = tied


def warmup_epochs(epochs, usual: int | None = None) -> int:
    """Choose the epochs of a warm-up, for `compute`: fewer than those of any task.

    Args:
      epochs: epochs of each task, as in `config.epochs`.
      usual: number of epochs, if tasks have more; None: a tenth of the epochs, at most
        ten.
    """
    if not isinstance(epochs, int | tuple):
        return 0  # an override that the schema will refuse
    fewest = min(stream.epochs_of_tasks(epochs))
    wanted = min(10, -(-fewest // 10)) if usual is None else usual
    return min(wanted, fewest - 1)


def tie_warmup(config: config_dict.ConfigDict, usual: int | None = None):
    """Tie a warm-up to `config.epochs`, which must be set, see `warmup_epochs`."""
    choose = functools.partial(warmup_epochs, usual=usual)
    return compute(choose, config.get_ref("epochs"))


def parse_words(arg: str | None, *choices: Iterable[str]) -> tuple[str, ...]:
    """Read the words after the name of a config and a colon, separated by commas.

    With `row, small, debug = recipe.parse_words(arg, METHODS, ("", "small"))` the
    argument "mir,debug" is "mir", "" and "debug".

    Args:
      arg: the argument of `get_config`.
      choices: words of which an argument may have one; without one the first holds. ""
        means no word; a word that ends in "=N" takes a number from 1.

    Returns:
      The word of each choice, and "debug" or "".

    Raises:
      Refused: naming the argument, what is wrong with it and what is allowed.
    """
    asked = {word for word in (arg or "").split(",") if word}
    tables = [list(choice) for choice in (*choices, ("", "debug"))]
    chosen = []
    for table in tables:
        form = "|".join(map(re.escape, table)).replace("=N", "=[1-9][0-9]*")
        chosen.append(sorted(word for word in asked if re.fullmatch(form, word)))
    errors = [f"{word!r} is unknown" for word in sorted(asked.difference(*chosen))]
    rivals = [" and ".join(map(repr, words)) for words in chosen if len(words) > 1]
    errors += [f"{pair} exclude one another" for pair in rivals]
    if errors:
        named = [", ".join(filter(None, table)) for table in tables]
        allowed = "; ".join(f"one of {x}" if "," in x else x for x in named)
        raise Refused(
            f"{arg!r}: {errors[0]}; allowed are, with commas between, {allowed}"
        )
    return tuple(
        (words or table)[0] for words, table in zip(chosen, tables, strict=True)
    )


def split_words(text: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Split "PATH,NAME=VALUE,..." into the path and the values by name.

    Args:
      text: argument of a config; the path may hold commas and equals signs.
      names: the names that may follow the path.
    """
    path, *pairs = re.split(rf"(?:^|,)({'|'.join(names)})=", text)
    return path, dict(zip(pairs[::2], pairs[1::2], strict=True))


def change(config: config_dict.ConfigDict, changes: Mapping[str, Any]) -> None:
    """Change options of a config, in place.

    Args:
      config: its new options may have other types than the old ones.
      changes: path of an option ("method.temperature", with or without "config." before
        it) -> its value. A dict replaces a whole section; a path leads into a section,
        which is created if it is missing.
    """
    with config.unlocked(), config.ignore_type():
        for path, value in changes.items():
            *sections, name = path.removeprefix("config.").split(".")
            section = config
            for part in sections:
                if not isinstance(section.get(part), config_dict.ConfigDict):
                    section[part] = {}
                section = section[part]
            section[name] = value
