"""An evaluator: how many dimensions the features spread over (participation ratio).

Use it as an entry of config.evaluators, say
"spread": {"name": "my_package.my_evaluator"}. Then results.json has "spread/ratio".
"""

import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.evals import embedding


def participation_ratio(x):
    """Compute (sum_k l_k)^2 / sum_k l_k^2, l_k the eigenvalues of the covariance.

    Args:
      x: f32[N, D].

    Returns:
      A number from 1 (all rows on a line) to D.
    """
    centred = np.asarray(x, np.float64) - np.mean(x, axis=0, dtype=np.float64)
    covariance = centred.T @ centred
    return float(np.trace(covariance) ** 2 / np.sum(covariance**2))


@schema.checked("config.evaluators.my_evaluator")
def make(parts: core.EvalParts, *, max_rows: schema.Count = 1000):
    """Make the evaluator.

    Args:
      parts: components that the config builds for every evaluator.
      max_rows: at most so many evaluation rows, evenly spaced.
    """
    examples, rows = embedding.sample_rows(parts, "participation", max_rows, least=2)
    embed = embedding.make_embedder(parts, examples, rows=rows)

    def evaluate(state, task):
        ratio = participation_ratio(sharding.copy_to_host(embed(state)))
        return core.Result(rows={}, scalars={"ratio": ratio})

    return evaluate
