"""Orders of the rows of an epoch, and of the classes of a stream."""

from collections.abc import Sequence

import numpy as np

from jaxcl.errors import Refused

# The released CaSSLe experiments draw class orders with this seed, whatever the run's.
CASSLE_SEED = 5


def epoch_order(
    rng: np.random.Generator, rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """Shuffle rows into full batches, i32[steps, batch]; the remainder is left out."""
    steps = len(rows) // batch_size
    return rng.permutation(rows)[: steps * batch_size].reshape(steps, batch_size)


def filled_order(
    rng: np.random.Generator, rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """Shuffle all rows into batches, i32[steps, batch].

    The last batch is filled with -1, which is no row.
    """
    steps = -(-len(rows) // batch_size)
    order = np.full(steps * batch_size, -1, np.int32)
    order[: len(rows)] = rng.permutation(rows)
    return order.reshape(steps, batch_size)


def released_permutation(n: int, *, seed: int) -> np.ndarray:
    """Return the permutation i64[n] that torch.randperm(n) draws right after seeding.

    PyTorch has the same Mersenne Twister as NumPy's RandomState, and swaps position i
    with position i + (draw mod (n - i)). Holds for n < 2^32 / 20.
    """
    draws = np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)
    order = list(range(n))
    for i, draw in enumerate(draws[: max(n - 1, 0)].tolist()):
        j = i + draw % (n - i)
        order[i], order[j] = order[j], order[i]
    return np.asarray(order, np.int64)


def order_of_classes(
    names: Sequence[str],
    class_order: str | Sequence[int | str],
    seed: int,
    field: str = "class_order",
) -> np.ndarray:
    """Return all class numbers i64[C] in the order of an option, see `scenarios.make`.

    Args:
      names: names of all classes.
      seed: seed of the orders "released" and "shuffled".
      field: name of the option in messages.
    """
    n = len(names)
    if not isinstance(class_order, str):
        order = numbers(class_order, names, field)
        missing = [names[c] for c in range(n) if c not in set(order)]
        if missing:
            raise Refused(f"{field}: lacks {missing[:5]}; must hold all {n} classes")
        return np.asarray(order)
    if class_order == "sorted":
        return np.arange(n)
    if class_order == "released":
        return released_permutation(n, seed=seed)
    if class_order == "cassle":
        return released_permutation(n, seed=CASSLE_SEED)
    if class_order == "shuffled":
        return np.random.default_rng(seed).permutation(n)
    raise Refused(
        field,
        class_order,
        "must be 'sorted', 'released', 'cassle', 'shuffled' or a list",
    )


def numbers(
    entries: Sequence[int | str], names: Sequence[str], field: str
) -> list[int]:
    """Convert names or numbers of classes or domains to numbers; refuse duplicates."""
    chosen = []
    for entry in entries:
        if isinstance(entry, str) and entry in names:
            entry = names.index(entry)
        is_number = isinstance(entry, int | np.integer) and 0 <= entry < len(names)
        if not is_number:
            raise Refused(
                f"{field}: {entry!r} is neither a number below {len(names)} nor one of "
                f"{names[:10]}{'...' if len(names) > 10 else ''}"
            )
        chosen.append(int(entry))
    twice = {names[n] for n in chosen if chosen.count(n) > 1}
    if twice:
        raise Refused(f"{field}: {sorted(twice)} more than once")
    return chosen
