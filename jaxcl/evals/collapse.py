"""Measure whether embeddings collapse: their spread, and the number of directions.

RankMe: Garrido et al., "RankMe: Assessing the Downstream Performance of Pretrained
Self-Supervised Representations by Their Rank", ICML 2023. The spread of unit rows is
measured as by Chen & He, "Exploring Simple Siamese Representation Learning", CVPR 2021,
Fig. 2.

Departures: RankMe is computed from the encoder's features of up to `max_rows`
evaluation rows without augmentation; the paper has 25,600 train images and the
projector's outputs.
"""

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.evals import embedding

_EPS = 1e-7  # the paper's
# Below this the embeddings are one, whatever they were before.
_ONE = 0.01


def embedding_std(embeddings: np.ndarray) -> float:
    """Compute the standard deviation of unit rows, averaged over D dimensions.

    It is multiplied by sqrt(D): 1 if all directions are equally frequent, 0 if all rows
    are equal.

    Args:
      embeddings: f32[N, D]; rows of zeros stay.
    """
    x = np.asarray(embeddings, np.float64)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / np.maximum(length, 1e-12)
    return float(unit.std(axis=0).mean() * math.sqrt(x.shape[1]))


def rankme(embeddings: np.ndarray) -> float:
    """Compute RankMe, exp(-sum_k p_k log p_k) with p_k = s_k / sum_j s_j + 1e-7.

    s are the singular values of the raw embeddings. RankMe is between 1 and min(N, D),
    except for the 1e-7.

    Args:
      embeddings: f32[N, D].

    Returns:
      A float; 0 if all embeddings are zero.
    """
    x = np.asarray(embeddings, np.float64)
    # Four times as fast as the singular values themselves, and exact to 1e-8 of them.
    squares = np.linalg.eigvalsh(x @ x.T if len(x) < x.shape[1] else x.T @ x)
    values = np.sqrt(np.maximum(squares, 0))
    if values.sum() == 0:
        return 0.0
    p = values / values.sum() + _EPS
    return float(np.exp(-np.sum(p * np.log(p))))


def _warnings(scalars, references, share) -> list[str]:
    """List warnings about scalars that are far below earlier ones, see `make`.

    Args:
      references: time of an earlier evaluation -> its scalars.
    """
    if not all(map(math.isfinite, scalars.values())):
        return ["embeddings are not finite"]
    warnings = [
        f"{name} is {value:.3g}, below {share:g} of the {before[name]:.3g} {when}: the "
        "embeddings collapse"
        for name, value in scalars.items()
        for when, before in references.items()
        if value < share * before[name]
    ]
    if scalars["embedding_std"] < _ONE and not warnings:
        warnings = [f"embedding_std is below {_ONE}: all embeddings are nearly one"]
    return warnings


@schema.checked("config.evaluators.collapse")
def make(
    parts: core.EvalParts,
    *,
    max_rows: Annotated[int, schema.Range(least=2)] = 2048,
    share: schema.Share = 0.5,
) -> Callable:
    """Build the evaluator of spread and rank, which warns if they fall.

    Args:
      parts: the parts of every evaluator; labels are not read.
      max_rows: most rows to embed, evenly spaced in the evaluation split, or without
        one in the train split.
      share: a warning says that a measure is below this share of its first value,
        usually the untrained network's, or of its previous one. A resumed process
        forgets both.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "embedding_std" and
      "rankme", see these functions.

    Raises:
      Refused: an option out of its range.
    """
    examples, rows = embedding.sample_rows(parts, "collapse", max_rows)
    embed = embedding.make_embedder(parts, examples, rows=rows)
    # Warnings depend on earlier evaluations, measurements do not.
    references, steps = {}, []

    def evaluate(state, task: int) -> core.Result:
        embeddings = np.asarray(sharding.copy_to_host(embed(state)), np.float32)
        finite = bool(np.isfinite(embeddings).all())
        scalars = {
            "embedding_std": embedding_std(embeddings) if finite else math.nan,
            "rankme": rankme(embeddings) if finite else math.nan,
        }
        step = int(state.step)
        if steps and step <= steps[-1]:  # another run
            references.clear()
        warnings = _warnings(scalars, references, share)
        if finite:  # the first evaluation is one reference, not two
            when = "at the evaluation before" if references else "at first"
            references[when] = scalars
        steps[:] = [step]
        return core.Result({}, scalars, tuple(warnings))

    return evaluate
