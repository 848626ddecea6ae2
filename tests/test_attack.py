"""The attacks of tests/attack: their order, their seeds, what a failure tells."""

import itertools
import re
import shlex

from attack import command
from attack import kind as kind_lib


def drawing(drawn, broken_at=None):
    """An attack that notes what it draws, and fails at one call."""

    def attack(rng, place):
        drawn.append(int(rng.integers(1 << 30)))
        (place.folder / "left").write_text("here")
        if len(drawn) == broken_at:
            raise kind_lib.Broken("the promise was broken")
        return "kept"

    return attack


def test_each_round_has_every_kind_and_the_seed_says_their_order():
    three = [
        kind_lib.Kind("a", None),
        kind_lib.Kind("b", None, often=2),
        kind_lib.Kind("c", None),
    ]

    def names(seed):
        order = itertools.islice(command.sequence(three, seed), 40)
        numbers, found = zip(*order, strict=True)
        assert numbers == tuple(range(40))
        return "".join(kind.name for kind in found)

    assert names(1) == names(1) != names(2)
    assert all(sorted(names(1)[i : i + 4]) == [*"abbc"] for i in range(0, 40, 4))


def test_a_failure_is_told_and_one_command_repeats_it(tmp_path):
    drawn, told = [], []
    both = [
        kind_lib.Kind("part: one", drawing(drawn, broken_at=3)),
        kind_lib.Kind("part: other", lambda rng, place: "kept"),
    ]
    failed = command.attack(
        both, seed=5, minutes=0.01, number=None, root=tmp_path, say=told.append
    )
    assert failed == 1 and len(set(drawn)) == len(drawn) > 3
    text = "\n".join(told)
    assert "Broken: the promise was broken" in text
    assert re.search(r"seed 5: \d+ attacks, 1 failed", text)
    assert re.search(r" 1  part: one  FAILED", text)
    (folder,) = tmp_path.glob("attack-*")
    assert (folder / "left").exists() and str(folder) in text
    words = shlex.split(re.search(r"To repeat: (.*)", text)[1])
    assert words[:3] == ["python", "-m", "tests.attack"]
    options = command.parser().parse_args(words[3:])
    again = []
    chosen = [kind_lib.Kind(options.kind, drawing(again, broken_at=1))]
    failed = command.attack(
        chosen,
        seed=options.seed,
        minutes=options.minutes,
        number=options.number,
        root=tmp_path / "again",
        say=told.append,
    )
    assert failed == 1 and again == [drawn[2]]
