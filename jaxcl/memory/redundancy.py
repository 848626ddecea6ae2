"""Choose the rows of a memory that resemble another row most: minimum redundancy.

Purushwalkam, Morgado and Gupta, "The Challenges of Continuous Self-Supervised
Learning", ECCV 2022, called MinRed, with the rules of its released code. A row is
compared by a unit vector that moves with every use of the row, see `move_vectors`.

Departure: here the memory has slots. Rows of a batch take free slots first; the others
replace the rows that the released code removes after appending them.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import buffer

_OLD = 0.5  # share of the stored vector after a use of its row


def move_vectors(old: jax.Array, new: jax.Array, used: jax.Array) -> jax.Array:
    """Average the stored vectors of drawn rows with their new features, as unit rows.

    The first use of a row replaces its vector by n(new).

    Args:
      old: f32[R, D], unit rows.
      new: f32[R, D], features of the same rows now, of any length.
      used: bool[R], the row was used before.

    Returns:
      f32[R, D], unit rows.
    """
    new = core.l2_normalize(new)
    averaged = core.l2_normalize(_OLD * old + (1 - _OLD) * new)
    return jnp.where(used[:, None], averaged, new)


def find_redundant(rows: jax.Array, competes: jax.Array, count: jax.Array) -> jax.Array:
    """Find the most redundant rows, one after another.

    Each choice is argmax_i max_{j != i} cos(u_i, u_j) among the competing rows that are
    left; of equal ones the first. The released code compares (1 + cos) / 2, which has
    the same order. The cosines of all pairs are held at once, a matrix of K x K.

    Args:
      rows: f32[K, D], unit rows u.
      competes: bool[K], rows that may go; others neither go nor are compared with.
      count: i32[], number of rows that go, fewer than compete.

    Returns:
      bool[K], True for rows that go.
    """
    chex.assert_rank([rows, competes], [2, 1])
    cosines = core.dot(rows, rows)
    # Rounding may differ on the two sides of the diagonal; the first of a pair goes.
    cosines = jnp.maximum(cosines, cosines.T)
    cosines = jnp.where(jnp.eye(len(rows), dtype=bool), -jnp.inf, cosines)

    def drop_row(_, left):
        nearest = jnp.max(jnp.where(left, cosines, -jnp.inf), axis=1)
        return left.at[jnp.argmax(jnp.where(left, nearest, -jnp.inf))].set(False)

    return competes & ~jax.lax.fori_loop(0, count, drop_row, competes)


def find_oldest(number: jax.Array, filled: jax.Array, count: jax.Array) -> jax.Array:
    """Find the rows that have been stored longest.

    Args:
      number: i32[K], place of each row in the stream.
      filled: bool[K], slots that hold a row.
      count: i32[], number of rows to find, at most as many as there are.

    Returns:
      bool[K], True for these rows.
    """
    number = jnp.where(filled, number, jnp.iinfo(jnp.int32).max)
    return filled & buffer.find_lowest(number, count)


def find_evicted(
    rows: jax.Array,
    used: jax.Array,
    number: jax.Array,
    filled: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Find the rows that MinRed's rule removes.

    Rows that were used at least once compete by redundancy. If they are fewer than
    twice `count`, the rows that have been stored longest go instead.

    Args:
      rows: f32[K, D], unit rows.
      used: bool[K], the row was drawn at least once.
      number: i32[K], place of each row in the stream.
      filled: bool[K], slots that hold a row.
      count: i32[], number of rows that go, at most as many as there are.

    Returns:
      bool[K], True for rows that go.
    """
    competes = filled & used
    return jax.lax.cond(
        jnp.sum(competes) >= 2 * count,
        lambda: find_redundant(rows, competes, count),
        lambda: find_oldest(number, filled, count),
    )
