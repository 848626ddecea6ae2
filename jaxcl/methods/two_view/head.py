"""A linear head that learns labels beside a method without labels.

Source: the online classifier of the released CIFAR-100 experiments of CaSSLe (Fini et
al., CVPR 2022) and PNR (Cha et al., ICML 2024). At each step it sees a labelled batch,
as large as the method's, of all classes, under the second view's augmentation.

Departures of the form "apart", the default; "released" has only the last two:
- Features are in evaluation mode, with the running statistics. The released code
  sends these rows, some of which are of later tasks' classes, through the encoder in
  training mode, so that they move its running statistics.
- Plain SGD and half a cosine over each task; the released head shares the network's
  LARS and schedule.
- No second head on a slow network.
- LARS does not scale the bias; in PNR's MoCo scripts it does.

So "released" has the LEAK of the released runs: each step the running statistics of the
network move with rows of all classes, those of later tasks too. Every evaluation of the
network reads them, and so does a frozen network with `frozen_bn="running"`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim
from jaxcl.nets import chain, linear_head

Form = Literal["apart", "released"]

# Functions of a method that read its state, and that a head leaves as they are.
_READ_THE_STATE = (
    "embed",
    "source",
    "memory",
    "objective",
    "replayed",
    "project",
)
_STREAM = 0x4EAD  # keeps the head's random numbers apart from the method's


class Extra(NamedTuple):
    """The state of a method with an online head."""

    method: core.PyTree  # `extra` of the method without its head
    layer: linear_head.LinearHead  # carried from task to task
    velocity: core.PyTree  # the optimiser's, with momentum; zero when a task begins


def add(
    method: core.Method,
    parts: core.Parts,
    *,
    lr: float,
    momentum: float = 0.9,
    form: str = "apart",
) -> core.Method:
    """Add an online head to a method.

    "apart": the trained network stays the same, bit for bit. The head reads the encoder
    through `embed` alone, so that neither gradients nor running statistics of its rows
    can reach the network. Its random numbers come from a key of its own.
    "released": its rows pass in training mode, and move the running statistics of the
    encoder after those of the method's own rows. No gradient reaches the network.

    Args:
      method: its `embed` is in evaluation mode; with "released" its encoder is that of
        `parts`, and learns in `params`.
      parts: the method's parts; the head sees the last augmented view.
      lr: learning rate at the start of each task, half a cosine to 0; with "released"
        the peak of the network's own schedule, with LARS.
      momentum: momentum of SGD; there is no weight decay.
      form: "apart" or "released".

    Returns:
      A method whose steps also read batch["labelled"] and whose metrics also have
      "head_loss" and "head_accuracy", of the labelled rows before the step. `predict`
      is the head's.
    """
    if form == "released":  # LARS without decay
        rates = parts.schedule_with_peak(lr)
        tx = optim.lars(momentum=momentum, weight_decay=0.0)
    else:
        rates = optim.by_task([optim.cosine(lr, epochs=1, per_epoch=False)])
        tx = optim.sgd(momentum=momentum)

    def view(key, images):
        """Augment images u8[B,H,W,C]; the head sees the last view, f32[B,H,W,C]."""
        return parts.augment(jax.random.fold_in(key, _STREAM), images)[:, -1]

    def init(key, batch):
        state = method.init(key, batch)
        features = jax.eval_shape(
            lambda: method.embed(state, view(key, batch["labelled"]["image"]))
        )
        layer = linear_head.start_head(
            jax.random.fold_in(key, _STREAM), features.shape[1], parts.num_classes
        )
        return state.replace(extra=Extra(state.extra, layer, tx.init(layer)))

    def step(state, batch):
        """Take a step of the method, then one of the head."""
        before, labelled = _without_head(state), batch["labelled"]
        images = view(core.step_key(state), labelled["image"])
        after, metrics = method.step(before, batch)
        if form == "released":  # the rows move the network's running statistics
            encoder = chain.Chain({"encoder": parts.encoder})
            features, update = encoder(before.params, after.stats, images, train=True)
            after = after.replace(stats=after.stats | update)
        else:
            features = method.embed(before, images)
        label, mask = labelled["label"], jnp.ones(len(features))
        lr = rates(core.progress(state), state.task)
        layer, velocity, loss, scores = linear_head.take_step(
            tx, *state.extra[1:], features, label, mask, lr
        )
        accuracy = jnp.mean(scores.argmax(axis=1) == label)
        metrics = {**metrics, "head_loss": loss, "head_accuracy": accuracy}
        return after.replace(extra=Extra(after.extra, layer, velocity)), metrics

    def begin_task(state, task):
        """Begin a task of the method; the head's momentum begins at zero."""
        state = _with_head(state, method.begin_task(_without_head(state), task))
        velocity = jax.tree.map(jnp.zeros_like, state.extra.velocity)
        return state.replace(extra=state.extra._replace(velocity=velocity))

    def predict(state, images):
        features = method.embed(_without_head(state), images)
        return linear_head.score_features(state.extra.layer, features)

    def take_head_off(function):
        """Wrap a function of the method's state to take the state with the head."""
        return function and (lambda state, *rest: function(_without_head(state), *rest))

    def put_head_back(function):
        """Wrap a function from state to state; the head stays as it is."""
        return lambda state, *rest: _with_head(
            state, function(_without_head(state), *rest)
        )

    return method._replace(
        init=init,
        step=step,
        begin_task=begin_task,
        end_task=put_head_back(method.end_task),
        eval_state=put_head_back(method.eval_state),
        predict=predict,
        labelled=True,
        **{name: take_head_off(getattr(method, name)) for name in _READ_THE_STATE},
    )


def _without_head(state):
    """Return the state of the method without its head."""
    return state.replace(extra=state.extra.method)


def _with_head(state, after):
    """Return the method's new state `after`, with the head of `state`."""
    return after.replace(extra=state.extra._replace(method=after.extra))
