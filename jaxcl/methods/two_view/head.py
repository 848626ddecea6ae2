"""A linear head that learns labels beside a method and has no effect on it.

Source: the online classifier of the released CIFAR-100 experiments of CaSSLe (Fini et
al., CVPR 2022) and PNR (Cha et al., ICML 2024). At each step it sees a labelled batch,
as large as the method's, of all classes, under the second view's augmentation.

Departures:
- Features are in evaluation mode, with the running statistics. The released code
  sends these rows, some of which are of later tasks' classes, through the encoder in
  training mode, so that they move its running statistics.
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

    method: core.PyTree  # `extra` of the method without its head
    layer: head_lib.Head  # carried from task to task
    velocity: head_lib.Head  # momentum buffer of the layer, zero when a task begins


def _own(state):
    """The state as the method without its head knows it."""
    return state.replace(extra=state.extra.method)


def _with(state, own):
    """The method's new state `own`, with the head of `state`."""
    return own.replace(extra=state.extra._replace(method=own.extra))


def add(
    method: core.Method, parts: core.Parts, *, lr: float, momentum: float = 0.9
) -> core.Method:
    """The method with an online head; the network it trains is the same, bit for bit.

    The head reads the encoder through `embed` alone, so that neither gradients nor
    running statistics of its rows can reach the network. Its random numbers come from
    a key of its own.

    Args:
      method: a method whose `embed` is in evaluation mode.
      parts: what the method was made of; the head sees the last augmented view.
      lr: learning rate at the start of each task, half a cosine to 0.
      momentum: of SGD; there is no weight decay.

    Returns:
      A method whose steps also read batch["labelled"] and whose metrics also have
      "head_loss" and "head_accuracy", of the labelled rows before the step. `predict`
      is the head's.
    """
    curve = optim.cosine(lr, epochs=1, per_epoch=False)

    def views(key, images):
        return parts.augment(jax.random.fold_in(key, _STREAM), images)[:, -1]

    def init(key, batch):
        own = method.init(key, batch)
        images = batch["labelled"]["image"]
        features = jax.eval_shape(lambda: method.embed(own, views(key, images)))
        k_layer = jax.random.fold_in(key, _STREAM)
        layer = head_lib.start(k_layer, features.shape[1], parts.num_classes)
        velocity = jax.tree.map(jnp.zeros_like, layer)
        return own.replace(extra=Extra(own.extra, layer, velocity))

    def step(state, batch):
        own, labelled = _own(state), batch["labelled"]
        features = method.embed(own, views(core.step_key(state), labelled["image"]))
        lr = curve(core.progress(state))
        extra, head_metrics = _descend(
            state.extra, features, labelled["label"], lr=lr, momentum=momentum
        )
        own, metrics = method.step(own, batch)
        return _with(state.replace(extra=extra), own), {**metrics, **head_metrics}

    def begin_task(state, task):
        state = _with(state, method.begin_task(_own(state), task))
        velocity = jax.tree.map(jnp.zeros_like, state.extra.velocity)
        return state.replace(extra=state.extra._replace(velocity=velocity))

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


def _descend(extra, features, labels, *, lr, momentum):
    """`extra` after a step of the head; its loss and accuracy before the step."""
    layer, velocity, loss, scores = head_lib.descend(
        extra.layer,
        extra.velocity,
        features,
        labels,
        jnp.ones(len(labels)),
        lr=lr,
        momentum=momentum,
        weight_decay=0.0,
    )
    accuracy = jnp.mean(scores.argmax(axis=1) == labels)
    metrics = {"head_loss": loss, "head_accuracy": accuracy}
    return extra._replace(layer=layer, velocity=velocity), metrics
