"""A linear head that learns labels beside a method, and tells it nothing.

Source: the online classifier of the released CIFAR-100 experiments of CaSSLe (Fini et
al., CVPR 2022) and PNR (Cha et al., ICML 2024). At each step it sees as many labelled
rows again, of all classes, under the second view's augmentation.

Departures:
- Features are in evaluation mode, with the running statistics. The released code
  forwards these rows, of classes to come too, through the encoder in training mode,
  so that its running statistics know them.
- Plain SGD and half a cosine over each task; the released head shares the network's
  LARS and schedule.
- No second head on a slow network.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim
from jaxcl.evals import head as head_lib

_STREAM = 0x4EAD  # keeps the head's random numbers apart from the method's


class Extra(NamedTuple):
    """What a method with a head keeps."""

    method: core.PyTree  # its own extra
    layer: head_lib.Head  # carried from task to task
    velocity: head_lib.Head  # its momentum buffer, fresh in each task


def _own(state):
    """The state as the method without its head knows it."""
    return state.replace(extra=state.extra.method)


def _with(state, own):
    """The method's new state `own`, with the head of `state`."""
    return own.replace(extra=state.extra._replace(method=own.extra))


def add(
    method: core.Method, parts: core.Parts, *, lr: float, momentum: float = 0.9
) -> core.Method:
    """The method with an online head; what it trains is the same, bit for bit.

    The head reads the encoder through `embed` alone, so that neither a gradient nor
    a running statistic of its rows can reach the network; and it draws its random
    numbers from a key of its own.

    Args:
      method: its `embed` is in evaluation mode.
      parts: what it was made of; of the augmentation's views the last is taken.
      lr: learning rate at the start of each task, half a cosine to 0.
      momentum: of SGD; there is no weight decay.

    Returns:
      A method whose steps want batch["labelled"] and also give "head_loss" and
      "head_accuracy", of the labelled rows before the step. `predict` is the head.
    """
    curve = optim.cosine(lr, epochs=1, per_epoch=False)

    def views(key, images):
        return parts.augment(jax.random.fold_in(key, _STREAM), images)[:, -1]

    def init(key, batch):
        own = method.init(key, batch)
        images = batch["labelled"]["image"]
        found = jax.eval_shape(lambda: method.embed(own, views(key, images)))
        k_layer = jax.random.fold_in(key, _STREAM)
        layer = head_lib.start(k_layer, found.shape[1], parts.num_classes)
        velocity = jax.tree.map(jnp.zeros_like, layer)
        return own.replace(extra=Extra(own.extra, layer, velocity))

    def step(state, batch):
        images, labels = (batch["labelled"][name] for name in ("image", "label"))
        own = _own(state)
        features = method.embed(own, views(core.step_key(state), images))
        layer, velocity, loss, scores = head_lib.descend(
            state.extra.layer,
            state.extra.velocity,
            features,
            labels,
            jnp.ones(len(labels)),
            lr=curve(core.progress(state)),
            momentum=momentum,
            weight_decay=0.0,
        )
        own, metrics = method.step(own, batch)
        right = scores.argmax(axis=1) == labels
        metrics = {**metrics, "head_loss": loss, "head_accuracy": jnp.mean(right)}
        return own.replace(extra=Extra(own.extra, layer, velocity)), metrics

    def begin_task(state, task):
        state = _with(state, method.begin_task(_own(state), task))
        rest = jax.tree.map(jnp.zeros_like, state.extra.velocity)
        return state.replace(extra=state.extra._replace(velocity=rest))

    def project(state, images):
        return method.project(_own(state), images)

    return core.Method(
        init=init,
        step=step,
        embed=lambda state, images: method.embed(_own(state), images),
        predict=lambda state, images: head_lib.logits(
            state.extra.layer, method.embed(_own(state), images)
        ),
        begin_task=begin_task,
        end_task=lambda state, task: _with(state, method.end_task(_own(state), task)),
        source=lambda state, task: method.source(_own(state), task),
        eval_state=lambda state: _with(state, method.eval_state(_own(state))),
        supervised=method.supervised,
        labelled=True,
        project=method.project and project,
    )
