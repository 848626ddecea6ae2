"""Fine-tune an exported encoder with a linear head, in a loop of your own."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxcl
from jaxcl.data.sources import shapes

encoder = jaxcl.load_encoder("exports/quickstart")
data = shapes.shapes(size=24).train
params = {"encoder": encoder.params, "head": jnp.zeros((encoder.num_features, 10))}
stats, tx = encoder.stats, optax.adam(1e-2)


@jax.jit
def step(params, stats, opt_state, images, labels):
    """Take one step of Adam on encoder and head."""

    def loss(params):
        rows, after = encoder.apply(params["encoder"], stats, images, train=True)
        scores = optax.softmax_cross_entropy_with_integer_labels
        return scores(rows @ params["head"], labels).mean(), after

    (value, stats_), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), stats_, opt_state, value


opt_state, losses = tx.init(params), []
for start in range(0, 2048, 64):
    rows = slice(start, start + 64)
    images = encoder.prepare(data.images[rows])
    params, stats, opt_state, value = step(
        params, stats, opt_state, images, data.label[rows]
    )
    losses.append(float(value))
tuned = dataclasses.replace(encoder, params=params["encoder"], stats=stats)
print(losses[0], losses[-1], tuned.embed(data.images[:4]).shape)
