"""Optimisers as directions, learning rates as functions of progress.

An optimiser's `update(grads, opt_state, params, *, lr)` returns a direction d
and the caller moves `params - lr * d` (`core.apply_gradients`), so a schedule
can restart with every task, or be a learned controller, without recompiling.
A schedule maps progress f32[] in [0, 1), the share of the task that is done, to
a learning rate f32[]; `by_task` joins one for each task. Defaults follow the released
PNR and CaSSLe code unless noted.
"""

import functools
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from jaxcl import schema
from jaxcl.errors import Refused

# Added to what is divided by: 0 would make 0 / 0 of a gradient that is 0.
Epsilon = Annotated[float, schema.Range(least=1e-30)]


def _matrices(params):
    """Mark the parameters that are not biases or scales of normalisation."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _momentum(momentum, nesterov):
    if nesterov and not momentum:
        raise Refused(
            "config.optimizer.nesterov=True: looks ahead by the momentum, which is 0; "
            "must be False"
        )
    # No buffer of zeros where none is needed: it would double the saved state.
    return optax.trace(momentum, nesterov) if momentum else optax.identity()


def _decay(weight_decay, exclude_1d):
    if not weight_decay:
        return optax.identity()
    mask = _matrices if exclude_1d else None
    return optax.add_decayed_weights(weight_decay, mask)


@schema.checked("config.optimizer")
def sgd(
    *,
    momentum: schema.Momentum = 0.9,
    nesterov: bool = False,
    weight_decay: schema.Weight = 0.0,
    exclude_1d: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Build SGD with torch's momentum: buf = m * buf + g + wd * w.

    The direction is buf, with `nesterov` g + wd * w + m * buf. The learning rate
    is outside the buffer and the buffer starts as the first gradient.

    Args:
      momentum: m in [0, 1).
      nesterov: look ahead by one step of the buffer.
      weight_decay: wd, coupled (it enters the buffer).
      exclude_1d: no weight decay on parameters of one or no axis.

    Returns:
      optax.GradientTransformationExtraArgs; `lr` is accepted and not used.

    Raises:
      Refused: for a value out of its range.
    """
    return optax.chain(_decay(weight_decay, exclude_1d), _momentum(momentum, nesterov))


@schema.checked("config.optimizer")
def lars(
    *,
    eta: schema.Positive = 0.02,
    clip: bool = True,
    momentum: schema.Momentum = 0.9,
    nesterov: bool = False,
    weight_decay: schema.Weight = 1e-4,
    exclude_1d: bool = True,
    eps: Epsilon = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Build LARS (You et al., 2017) around SGD, with the clipping of the released code.

    For each tensor w with gradient g, where neither is zero,
      r = eta |w| / (|g| + wd |w| + eps), with `clip` r = min(r / lr, 1),
      g <- r (g + wd w),
    so that the effective step is min(eta |w| / ..., lr); where either is zero, g
    stays as it is, without decay. Momentum follows, as in `sgd`.

    Args:
      eta: trust coefficient, above 0.
      clip: never scale a gradient up; needs `lr` at every update.
      momentum: m in [0, 1).
      nesterov: look ahead by one step of the buffer.
      weight_decay: wd.
      exclude_1d: parameters of one or no axis have neither scaling nor decay.
      eps: keeps the ratio finite.

    Returns:
      optax.GradientTransformationExtraArgs.

    Raises:
      Refused: for a value out of its range; TypeError from `update` if `clip`
        is on and `lr` is not given.
    """

    def scale(g, w, g_norm, w_norm, lr):
        if exclude_1d and w.ndim <= 1:
            return g
        ratio = eta * w_norm / (g_norm + weight_decay * w_norm + eps)
        if clip:
            ratio = jnp.minimum(ratio / lr, 1.0)
        scaled = ratio * (g + weight_decay * w)
        return jnp.where((w_norm > 0) & (g_norm > 0), scaled, g)

    def update(grads, opt_state, params, *, lr=None, **unused):
        if clip and lr is None:
            raise TypeError("lars(clip=True): update needs the keyword lr")
        scaled, trees = functools.partial(scale, lr=lr), (grads, params)
        norms = (jax.tree.map(lambda x: jnp.linalg.norm(x.ravel()), t) for t in trees)
        return jax.tree.map(scaled, *trees, *norms), opt_state

    scaling = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    return optax.chain(scaling, _momentum(momentum, nesterov))


@schema.checked("config.optimizer")
def adam(
    *,
    b1: schema.Momentum = 0.9,
    b2: schema.Momentum = 0.999,
    eps: Epsilon = 1e-8,
    weight_decay: schema.Weight = 0.0,
    decoupled: bool = False,
    exclude_1d: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Build Adam (Kingma and Ba, ICLR 2015); with `decoupled`, AdamW.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the corrected second moment.
      weight_decay: wd; wd * w joins the gradient before the moments, or the
        direction after them if `decoupled`.
      decoupled: whether weight decay is decoupled, see `weight_decay`.
      exclude_1d: no weight decay on parameters of one or no axis.

    Returns:
      optax.GradientTransformationExtraArgs; `lr` is accepted and not used.

    Raises:
      Refused: for a value out of its range.
    """
    moments, decay = optax.scale_by_adam(b1, b2, eps), _decay(weight_decay, exclude_1d)
    return optax.chain(*((moments, decay) if decoupled else (decay, moments)))


def by_leaf(
    tx: optax.GradientTransformationExtraArgs, share: Callable
) -> optax.GradientTransformationExtraArgs:
    """Scale an optimizer's step by a share of the learning rate for each leaf.

    A share of 0 freezes the leaf: it has a direction of zeros, no weight decay and no
    place in the optimiser's state. Others multiply the direction, weight decay with it.

    Args:
      tx: the optimiser.
      share: function of a leaf's path, a tuple of names, to its share, a float.
    """

    def moving(tree):
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        named = {tuple(entry.key for entry in path): leaf for path, leaf in leaves}
        return {"/".join(name): leaf for name, leaf in named.items() if share(name)}

    def update(grads, opt_state, params, **extra):
        steps, opt_state = tx.update(moving(grads), opt_state, moving(params), **extra)

        def direction(path, gradient):
            name = tuple(entry.key for entry in path)
            if not share(name):
                return jnp.zeros_like(gradient)
            return share(name) * steps["/".join(name)]

        return jax.tree_util.tree_map_with_path(direction, grads), opt_state

    return optax.GradientTransformationExtraArgs(
        lambda params: tx.init(moving(params)), update
    )


def _require(condition, name, value, allowed):
    if not condition:
        raise Refused(f"config.schedule.{name}={value}: must be {allowed}")


def _check_base(base):
    schema.check_value(base, schema.Weight, "base")


def _epoch(progress, epochs, per_epoch):
    """Count the epochs done, f32[] in [0, epochs); whole ones with `per_epoch`."""
    progress = jnp.asarray(progress, jnp.float32)
    if not per_epoch:
        return progress * epochs
    # progress = step / steps is rounded, and 3 epochs must not become 2.9999998.
    epoch = jnp.floor(progress * epochs + epochs * 2.0**-22)
    return jnp.minimum(epoch, epochs - 1)


def constant(base: schema.Weight) -> Callable:
    """Keep the learning rate constant.

    Args:
      base: learning rate, 0 or more.

    Returns:
      progress f32[] -> f32[].

    Raises:
      Refused: if `base` is negative.
    """
    _check_base(base)
    return lambda progress: jnp.full_like(progress, base, dtype=jnp.float32)


@schema.checked("config.schedule")
def warmup_cosine(
    base: schema.Weight,
    *,
    epochs: schema.Count,
    warmup_epochs: schema.Natural = 10,
    start: schema.Weight | None = None,
    end: schema.Weight = 0.0,
    per_epoch: bool = True,
) -> Callable:
    """Warm up linearly, then follow half a cosine (the released PNR code).

    In epoch e of E, with W warm-up epochs:
      e < W: start + (base - start) e / (W - 1), so epochs W - 1 and W have base,
      else:  end + (base - end) (1 + cos(pi (e - W) / (E - W))) / 2.
    W = 1 begins with `start`, W = 0 with `base`.

    Args:
      base: peak learning rate.
      epochs: E, epochs of the task.
      warmup_epochs: W < E.
      start: learning rate of the first epoch; None: the released code's 0.003, or a
        tenth of `base` where that is less, as with Adam's rates.
      end: learning rate the cosine runs to.
      per_epoch: True steps once an epoch, as the released code; False takes the
        same curves at fractions of an epoch (the warm-up stops at base, and W = 1
        rises over that epoch).

    Returns:
      progress f32[] -> f32[].

    Raises:
      Refused: for a value out of its range.
    """
    _check_base(base)
    fits = warmup_epochs < epochs
    _require(fits, "warmup_epochs", warmup_epochs, f"0 to epochs - 1 = {epochs - 1}")
    start = min(0.003, base / 10) if start is None else start

    def schedule(progress):
        e = _epoch(progress, epochs, per_epoch)
        ramp = jnp.minimum(e / max(warmup_epochs - 1, 1), 1.0)
        angle = jnp.pi * (e - warmup_epochs) / (epochs - warmup_epochs)
        cosine_part = end + (base - end) * (1.0 + jnp.cos(angle)) / 2.0
        return jnp.where(e < warmup_epochs, start + ramp * (base - start), cosine_part)

    return schedule


@schema.checked("config.schedule")
def cosine(
    base: schema.Weight,
    *,
    epochs: schema.Count,
    end: schema.Weight = 0.0,
    per_epoch: bool = True,
) -> Callable:
    """Follow half a cosine from `base` to `end` (CaSSLe's MoCo).

    Args:
      base: learning rate of the first epoch.
      epochs: epochs of the task.
      end: learning rate the cosine runs to.
      per_epoch: True steps once an epoch, False continuously.

    Returns:
      progress f32[] -> f32[].

    Raises:
      Refused: for a value out of its range.
    """
    return warmup_cosine(
        base, epochs=epochs, warmup_epochs=0, end=end, per_epoch=per_epoch
    )


@schema.checked("config.schedule")
def step_decay(
    base: schema.Weight,
    *,
    epochs: schema.Count,
    milestones: tuple[schema.Count, ...],
    factor: schema.Positive = 0.1,
) -> Callable:
    """Multiply `base` by `factor` at each milestone (torch's MultiStepLR).

    Args:
      base: learning rate of the first epoch.
      epochs: epochs of the task.
      milestones: epochs, from 0, that begin with a smaller rate; each below
        `epochs`.
      factor: above 0.

    Returns:
      progress f32[] -> f32[].

    Raises:
      Refused: for a value out of its range.
    """
    _check_base(base)
    for milestone in milestones:
        fits = milestone < epochs
        allowed = f"1 to epochs - 1 = {epochs - 1} each"
        _require(fits, "milestones", milestones, allowed)
    # A table on the host: powers of the factor exact to the last bit of float32.
    rates = [base * factor**i for i in range(len(milestones) + 1)]

    def schedule(progress):
        e = _epoch(progress, epochs, True)
        passed = sum((e >= m).astype(jnp.int32) for m in milestones)
        return jnp.asarray(rates, jnp.float32)[passed]

    return schedule


@schema.checked("config.schedule")
def ramped_cosine(
    base: schema.Weight,
    *,
    epochs: schema.Count,
    warmup_epochs: schema.Natural = 10,
    start: schema.Weight = 0.01,
    floor: schema.Share = 1e-3,
) -> Callable:
    """Follow half a cosine over all epochs; a linear ramp replaces its beginning.

    With c(e) = base (floor + (1 - floor) (1 + cos(pi e / E)) / 2), the fraction x of
    epochs done and W warm-up epochs:
      x < W: start + (c(W) - start) x / W, again at every step,
      else:  c(floor(x) + 1), once an epoch; the last one has base * floor.
    Source: released code of SupCon (Khosla et al., NeurIPS 2020), which Co2L and CCLIS
    build on.

    Args:
      base: peak of the cosine.
      epochs: E, epochs of the task.
      warmup_epochs: W, at most E; 0 for none.
      start: learning rate of the first step.
      floor: share of `base` that the cosine runs to.

    Returns:
      progress f32[] -> f32[].

    Raises:
      Refused: for a value out of its range.
    """
    _check_base(base)
    fits = warmup_epochs <= epochs
    _require(fits, "warmup_epochs", warmup_epochs, f"0 to epochs = {epochs}")

    def curve(e):
        share = (1.0 + jnp.cos(jnp.pi * e / epochs)) / 2.0
        return base * (floor + (1.0 - floor) * share)

    def schedule(progress):
        done = _epoch(progress, epochs, False)
        ramp = start + (curve(warmup_epochs) - start) * done / max(warmup_epochs, 1)
        epoch = _epoch(progress, epochs, True)
        return jnp.where(epoch < warmup_epochs, ramp, curve(epoch + 1))

    return schedule


def by_task(schedules):
    """Use one schedule for each of the first tasks, the last one for all others.

    Args:
      schedules: progress f32[] -> f32[] each, at least one.

    Returns:
      (progress f32[], task i32[]) -> f32[].
    """

    def schedule(progress, task):
        rates = jnp.stack([rate(progress) for rate in schedules])
        return rates[jnp.minimum(task, len(schedules) - 1)]

    return schedule


def momentum_schedule(progress, *, start=0.99, end=0.999):
    """Compute the slow network's decay at a share of the task's progress.

    From BYOL (Grill et al., NeurIPS 2020), restarted every task by PNR.

    Args:
      progress: f32[] in [0, 1), share of the task that is done.
      start: decay at the beginning of the task.
      end: decay at its end.

    Returns:
      f32[].
    """
    progress = jnp.asarray(progress, jnp.float32)
    return end - (end - start) * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0


def ema(old, new, decay):
    """Average trees exponentially, decay * old + (1 - decay) * new.

    Args:
      old: tree of floating-point arrays; its dtypes are kept.
      new: tree of the same structure.
      decay: f32[] in [0, 1].

    Returns:
      A tree like `old`.
    """
    return jax.tree.map(
        lambda o, n: (decay * o + (1.0 - decay) * n).astype(o.dtype), old, new
    )
