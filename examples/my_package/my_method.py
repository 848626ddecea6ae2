"""A method: SimCLR whose features stay near those of the last task.

A worked example, of no paper. Use it with --config.method.name=my_package.my_method.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import contrastive
from jaxcl.nets import chain, mlp


class Extra(NamedTuple):
    """The teacher: encoder and projector as the last task left them."""

    teacher: core.PyTree  # f32, parameters
    teacher_stats: core.PyTree  # f32, running statistics of batch norm


def l2(z, f):
    """Compute the mean of |z - f|^2 over unit rows; no gradient reaches `f`.

    Args: z, f: f32[N, D]. Returns: f32[].
    """
    z, f = core.l2_normalize(z), core.l2_normalize(f)
    return jnp.mean(jnp.sum((z - jax.lax.stop_gradient(f)) ** 2, axis=-1))


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    temperature: schema.Temperature = 0.2,
    weight: schema.Weight = 1.0,
    hidden_dim: schema.Width = 2048,
    output_dim: schema.Width = 128,
) -> core.Method:
    """Make SimCLR + weight * l2; the second term counts from the second task on.

    Args:
      parts: components that the config builds for every method.
      temperature: temperature of SimCLR's loss.
      weight: factor of the distance to the teacher.
      hidden_dim, output_dim: widths of the projector's layers.
    """
    shape = mlp.CONTRASTIVE._replace(hidden_dim=hidden_dim, output_dim=output_dim)
    projector = mlp.projector(shape, dtype=parts.encoder.dtype)
    nets = chain.Chain({"encoder": parts.encoder, "projector": projector})

    def init(key, batch):
        k_state, k_augment, k_nets = jax.random.split(key, 3)
        images = parts.augment(k_augment, batch["image"][:1])[0]
        params, stats = nets.init(k_nets, images)
        extra = Extra(core.copy(params), core.copy(stats))
        return core.new_state(k_state, params, stats, parts.tx, extra)

    def begin_task(state, task):
        extra = Extra(core.copy(state.params), core.copy(state.stats))
        return state.replace(opt_state=parts.tx.init(state.params), extra=extra)

    def loss_fn(params, state, images, frozen):
        z, stats = nets(params, state.stats, images, train=True, groups=2)
        views = z.reshape(-1, 2, output_dim)
        loss = contrastive.nt_xent(views[:, 0], views[:, 1], temperature=temperature)
        distance = l2(z, frozen)
        # `state.task` is an array, so all tasks run the same compiled program.
        factor = jnp.where(state.task > 0, weight, 0.0)
        return loss + factor * distance, (stats, distance)

    def step(state, batch):
        views = parts.augment(core.step_key(state), batch["image"])
        images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
        teacher, teacher_stats = state.extra
        frozen, _ = nets(teacher, teacher_stats, images, train=False)
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (stats, distance)), grads = grad(state.params, state, images, frozen)
        lr = core.rate(parts, state)
        state = core.apply_gradients(state, grads, parts.tx, lr).replace(stats=stats)
        return state, {"loss": loss, "distance": distance, "lr": lr}

    return core.Method(init, step, nets.embed, begin_task=begin_task)
