"""Measure how a step changes the representation of past tasks.

Caccia et al., "Reducing Representation Drift in Online Continual Learning", 2021,
called P: sections 3.3 and 4.5, Table 1, Figs 1, 3 and 9. No code of these was
released. Let f^n be the features of an image, scaled to length 1:
- drift, of stored rows x of past tasks: the mean of |f^n_before(x) - f^n_after(x)|,
  before and after an incoming batch with all its updates, in evaluation mode.
- gradients, of replayed rows x of past tasks: the mean of |dL / df^n(x)|, where L is
  the loss of the (last) update; and the same for the head's rows w_c of their classes,
  P's prototypes.

Departures:
- Drift is measured on rows drawn from the memory after the step.
- Gradients are along the unit sphere: |f| times the part of dL/df at right angles to f.
  Only that part of dL/df^n can move f^n. The length of f, which a linear head reads, is
  left out.
- A row that passes through the network several times in an update counts as often.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.errors import Refused
from jaxcl.memory import buffer, sharded
from jaxcl.methods.online.network import Network, Outputs, Rows

_STREAM = 0xD21F7  # keeps the probe's random numbers apart from the method's
_PROBE = (
    "probe"  # a parameter that `tap_gradients` alone uses; its gradient is the measure
)


def add_measures(
    method: core.Method, parts: core.Parts, *, rows: int = 64
) -> core.Method:
    """Add the metrics of `parts.replay.measure` to a method.

    The trained network stays the same, bit for bit. Metrics are 0 while there is no row
    of a past task.

    Args:
      method: a method with a `memory`.
      parts: core.Parts of the config.
      rows: number of stored rows whose drift is measured, drawn for each step by a
        separate key. The cost is two passes of these rows in evaluation mode.

    Returns:
      A method whose steps also give "drift", f32[]; "feature_gradient_norm" and
      "prototype_gradient_norm" are from `Measured`, the network that it trains.

    Raises:
      Refused: the method has no memory. Tracing refuses a step that does not call
        `gradient`.
    """
    measure = parts.replay.measure
    if method.memory is None:
        raise Refused(
            f"config.replay.measure={measure}: is of stored rows, and "
            "config.method.name stores none; leave it out"
        )

    def step(state, batch):
        after, metrics = method.step(state, batch)
        if "gradients" in measure and "feature_gradient_norm" not in metrics:
            raise Refused(
                f"config.replay.measure={measure}: 'gradients' is for methods that "
                "descend a loss (online.descend), which config.method.name does not"
            )
        if "drift" in measure:
            metrics = {**metrics, "drift": measure_drift(state, after)}
        return after, metrics

    def measure_drift(state, after):
        memory = method.memory(after)
        key = jax.random.fold_in(core.step_key(state), _STREAM)
        shards = sharded.count_shards(parts.replay)
        count = -(-rows // shards) * shards  # each device its share
        items, mask, _ = sharded.sample(
            memory,
            key,
            min(count, memory.capacity),
            log_weights=buffer.log_weights(memory.items["task"] < state.task),
        )
        images, mask = sharding.shard_rows_in_jit((items["image"], mask))
        images = parts.eval_transform(images)
        old, new = (_unit_rows(method.embed(s, images)) for s in (state, after))
        return _masked_mean(jnp.linalg.norm(old - new, axis=1), mask)

    metrics = method.plotted_metrics + _metrics(measure)
    return method._replace(step=step, plotted_metrics=metrics)


def _metrics(measure: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a step's metrics."""
    drift = ("drift",) if "drift" in measure else ()
    norms = "feature_gradient_norm", "prototype_gradient_norm"
    return drift + (norms if "gradients" in measure else ())


@dataclasses.dataclass(frozen=True)
class Measured(Network):
    """A network that also measures the gradients of its loss in rows of past tasks."""

    num_tasks: int

    def pass_together(
        self, params: core.PyTree, stats: core.PyTree, incoming: Rows, *draws: Rows
    ):
        """Pass incoming and replayed rows; the latter are measured."""
        (new, *old), stats = super().pass_together(params, stats, incoming, *draws)
        measured = (
            self._measure(params, outputs, rows)
            for outputs, rows in zip(old, draws, strict=True)
        )
        return (new, *measured), stats

    def pass_replayed(self, params: core.PyTree, stats: core.PyTree, rows: Rows):
        """Pass replayed rows, which are measured."""
        outputs, stats = super().pass_replayed(params, stats, rows)
        return self._measure(params, outputs, rows), stats

    def _measure(self, params, outputs, rows) -> Outputs:
        """Return the outputs; `gradient` gets the norms of the features' gradients."""
        features = tap_gradients(params, outputs.features, tasks_of(rows))
        return Outputs(features, self.logits(params, features))

    def gradient(self, state: core.TrainState, loss: Callable):
        """Differentiate a loss, and measure its gradient.

        Returns:
          (value, anything); the gradient of `state.params`; metrics,
          "feature_gradient_norm" and "prototype_gradient_norm", f32[].

        Raises:
          Refused: the loss has no measured pass of replayed rows.
        """
        memory = state.extra.memory
        params = {**state.params, _PROBE: jnp.zeros((self.num_tasks, 2))}
        _check_used(loss, params)
        value, grads = jax.value_and_grad(loss, has_aux=True)(params)
        grads = dict(grads)
        total, count = jnp.where(
            jnp.arange(self.num_tasks) < state.task, grads.pop(_PROBE).T, 0
        ).sum(axis=1)
        past = memory.filled & (memory.items["task"] < state.task)
        classes = jnp.zeros(self.num_classes, bool).at[memory.items["label"]].max(past)
        weights = (tree["head"]["weight"] for tree in (grads, state.params))
        metrics = {
            "feature_gradient_norm": total / jnp.maximum(count, 1),
            "prototype_gradient_norm": _masked_mean(_along_sphere(*weights), classes),
        }
        return value, grads, metrics


def tasks_of(rows: Rows) -> jax.Array | None:
    """Return the task of each replayed row, i32[R]; None without tasks."""
    task = rows.items.get("task")
    return None if task is None else jnp.where(rows.mask, task, -1)


def tap_gradients(
    params: core.PyTree, features: jax.Array, tasks: jax.Array | None
) -> jax.Array:
    """Return features unchanged, and add a measure of their gradients to the gradient.

    Args:
      params: parameters with that of the probe, or nothing is measured.
      features: f32[R,D].
      tasks: i32[R], the task in which each row came, -1: the row does not count; None:
        no row counts.
    """
    if tasks is None or _PROBE not in params:
        return features
    return _tap_gradients(features, tasks, params[_PROBE])


@jax.custom_vjp
def _tap_gradients(features, tasks, probe):
    return features


def _tap_forward(features, tasks, probe):
    return features, (features, tasks, probe)


def _tap_backward(saved, slope):
    features, tasks, probe = saved
    norms = _along_sphere(slope, features)
    members = tasks[:, None] == jnp.arange(len(probe))
    # If several passes use the parameter, its gradient is the sum of theirs.
    sums = jnp.sum(norms[:, None], axis=0, where=members)
    sums_and_counts = jnp.stack([sums, members.sum(axis=0)], 1)
    return slope, None, sums_and_counts.astype(probe.dtype)


_tap_gradients.defvjp(_tap_forward, _tap_backward)


def _along_sphere(slope, vectors):
    """Return |v| times the norm of the part of dL/dv at right angles to v, f32[R]."""
    slope, vectors = (x.astype(jnp.float32) for x in (slope, vectors))
    unit = core.l2_normalize(vectors)
    across = slope - jnp.sum(slope * unit, axis=1, keepdims=True) * unit
    return jnp.linalg.norm(vectors, axis=1) * jnp.linalg.norm(across, axis=1)


def _unit_rows(features):
    return core.l2_normalize(features.astype(jnp.float32))


def _masked_mean(values, mask):
    return jnp.sum(values, where=mask) / jnp.maximum(jnp.sum(mask), 1)


def _check_used(loss, params):
    """Refuse a loss without measured rows, since its metrics would be 0."""
    names = [path[0].key for path, _ in jax.tree.leaves_with_path(params)]
    traced = jax.make_jaxpr(loss)(params).jaxpr
    probe = traced.invars[names.index(_PROBE)]
    if not any(probe is operand for line in traced.eqns for operand in line.invars):
        raise Refused(
            "config.replay.measure: 'gradients' needs replayed rows to pass by "
            "themselves (online.Network.pass_replayed), which config.method as set "
            "does not do"
        )
