"""The command: attack for so many minutes, count what became of it.

    python -m tests.attack --minutes=20 --seed=3
    python -m tests.attack --kind='kill: *' --minutes=5
    python -m tests.attack --list

Attacks come in rounds. A round has every kind once (or as often as the kind says), in
an order that the seed shuffles. A failure prints the one command that repeats it, and
keeps its folder. Exits with 1 if there was one.
"""

import argparse
import collections
import fnmatch
import itertools
import pathlib
import shlex
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence

import numpy as np

from attack import kind as kind_lib


def sequence(
    kinds: Sequence[kind_lib.Kind], seed: int
) -> Iterator[tuple[int, kind_lib.Kind]]:
    """(number, kind) of every attack, without an end."""
    each = [kind for kind in kinds for _ in range(kind.often)]
    numbers = itertools.count()
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        for place in rng.permutation(len(each)):
            yield next(numbers), each[place]


def numbers_of(seed: int, number: int) -> np.random.Generator:
    """The random numbers of an attack."""
    return np.random.default_rng([seed, number, 1])


def repeat(kind: kind_lib.Kind, seed: int, number: int) -> str:
    """The command that makes the same attack."""
    words = ["python", "-m", "tests.attack", f"--seed={seed}", f"--number={number}"]
    return shlex.join([*words, f"--kind={kind.name}"])


def make_one(kind, seed, number, root, say) -> str | None:
    """Make an attack and say what became of it; the outcome, None if it failed."""
    folder = root / f"attack-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, failure = time.monotonic(), None
    place = kind_lib.Place(folder, root / "shared")
    try:
        outcome = kind.attack(numbers_of(seed, number), place)
    except Exception:
        outcome, failure = "FAILED", traceback.format_exc()
    seconds = time.monotonic() - began
    say(f"{number:5} {seconds:6.1f} s  {kind.name}  {outcome}")
    if failure is None:
        shutil.rmtree(folder, ignore_errors=True)
        return outcome
    say(f"{failure}Left in {folder}\nTo repeat: {repeat(kind, seed, number)}")
    return None


def attack(
    kinds: Sequence[kind_lib.Kind],
    *,
    seed: int,
    minutes: float,
    number: int | None,
    root: pathlib.Path,
    say=print,
) -> int:
    """Attack until the time is over; returns how many attacks failed.

    Args:
      kinds: that are chosen.
      seed: of everything that is random.
      minutes: no attack begins later, but there is one at least.
      number: of the one attack that is to be repeated, of the one kind; None: all.
      root: where attacks work.
      say: takes each line of what is told.
    """
    counts, failures = collections.Counter(), []
    if number is not None:
        attacks = [(number, kind) for kind in kinds]
    else:
        attacks = sequence(kinds, seed)
    end = time.monotonic() + 60 * minutes
    for place, kind in attacks:
        outcome = make_one(kind, seed, place, root, say)
        counts[kind.name, "FAILED" if outcome is None else outcome] += 1
        if outcome is None:
            failures.append(repeat(kind, seed, place))
        if time.monotonic() >= end:
            break
    say(f"seed {seed}: {sum(counts.values())} attacks, {len(failures)} failed")
    for (name, outcome), count in sorted(counts.items()):
        say(f"{count:7}  {name}  {outcome}")
    for line in failures:
        say(f"failed: {line}")
    return len(failures)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command.add_argument("--minutes", type=float, default=1.0, help="for so long")
    command.add_argument("--seed", type=int, default=None, help="default: of the clock")
    command.add_argument("--kind", default="*", help="names of kinds, with * and ?")
    command.add_argument("--number", type=int, default=None, help="repeat this attack")
    command.add_argument("--root", help="work here, where an earlier attack did, too")
    command.add_argument("--list", action="store_true", help="say the kinds and end")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Attack; the exit code."""
    from attack import kinds  # starts jax, which --help need not wait for

    options = parser().parse_args(argv)
    chosen = [one for one in kinds.KINDS if fnmatch.fnmatchcase(one.name, options.kind)]
    if options.list:
        print("\n".join(one.name for one in chosen))
        return 0
    if not chosen:
        raise SystemExit(f"--kind={options.kind}: no kind is called so; see --list")
    seed = options.seed if options.seed is not None else int(time.time())
    root = pathlib.Path(options.root or tempfile.mkdtemp(prefix="jaxcl-attack-"))
    failed = attack(
        chosen,
        seed=seed,
        minutes=options.minutes,
        number=options.number,
        root=root,
        say=lambda text: print(text, flush=True),
    )
    if not failed and not options.root:
        shutil.rmtree(root, ignore_errors=True)
    return int(bool(failed))
