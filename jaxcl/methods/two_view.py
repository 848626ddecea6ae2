"""Two-view self-supervised learning, alone, with CaSSLe, or with PNR.

One file, longer than a method's usually is, instead of one for each pair of a base
and a strategy.

Papers: Cha, Cho, Moon, "Regularizing with Pseudo-Negatives for Continual
Self-Supervised Learning", ICML 2024 (PNR); Fini et al., "Self-Supervised
Models are Continual Learners", CVPR 2022 (CaSSLe). A base (`ssl_bases.py`)
is the loss of one task alone, a strategy is what the tasks after the first
train with instead.

Departures:
- Negatives and batch statistics span the global batch; the released code
  takes them per device.
- The frozen network is in eval mode by default (`frozen_bn="running"`); the
  released code flips between both modes by accident.
- The momentum of the slow network follows the progress within the task at
  every step; the released code skips the first step and lags by one.
- `form="paper"` takes the papers' equations where the released code, the
  default, differs from them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core, optim
from jaxcl.losses import contrastive
from jaxcl.memory import queue
from jaxcl.methods import ssl_bases
from jaxcl.nets import chain, heads

STRATEGIES = ("finetune", "cassle", "pnr")


class Extra(NamedTuple):
    """What two-view methods keep beside the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, encoder and projector as the last task left them
    teacher_stats: core.PyTree  # f32
    key_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `momentum`
    key_pointer: jax.Array  # i32[], where the next keys go
    frozen_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `teacher`
    frozen_pointer: jax.Array  # i32[]


def make(
    parts: core.Parts,
    *,
    base="mocov2plus",
    strategy="finetune",
    temperature=0.2,
    distill_temperature=0.2,
    distill_weight=1.0,
    hidden_dim=2048,
    output_dim=128,
    distill_hidden_dim=2048,
    queue_size=65536,
    momentum_start=0.99,
    momentum_end=0.999,
    frozen_bn="running",
    form="code",
    pn1=True,
    pn2=True,
) -> core.Method:
    """One base under one strategy.

    Args:
      base: a name in `ssl_bases.BASES`.
      strategy: "finetune", "cassle" or "pnr", in force from the second task on.
      distill_weight: weight of CaSSLe's term.
      distill_hidden_dim: hidden units of the predictor g.
      queue_size: rows of each queue bank; at least the global batch.
      momentum_start, momentum_end: of the slow network, over each task.
      frozen_bn: "running" (eval mode) or "batch" statistics in the teacher.
      form: "code" or "paper", where they differ.
      pn1, pn2: pseudo-negatives in the first and second term (Table 7).
    """
    spec = ssl_bases.get(base)
    core.check_choice("config.method.strategy", strategy, STRATEGIES)
    core.check_choice("config.method.frozen_bn", frozen_bn, ("running", "batch"))
    core.check_choice("config.method.form", form, ("code", "paper"))
    options = ssl_bases.Options(
        temperature, distill_temperature, distill_weight, form, pn1, pn2
    )
    distils, dtype = strategy != "finetune", parts.encoder.dtype
    later = {"finetune": spec.loss, "cassle": spec.cassle, "pnr": spec.pnr}[strategy]
    projector = heads.projector(
        base, hidden_dim=hidden_dim, output_dim=output_dim, dtype=dtype
    )
    online = {"encoder": parts.encoder, "projector": projector}
    distiller = {
        "distiller": heads.predictor(
            hidden_dim=distill_hidden_dim, output_dim=output_dim, dtype=dtype
        )
    }

    def slow_part(tree):
        return {name: tree[name] for name in online}

    def new_distiller(key):
        return chain.init(distiller, key, jnp.zeros((2, output_dim)))

    def init(key, batch):
        k_state, k_augment, k_online, k_distiller, *k_queues = jax.random.split(key, 6)
        images = parts.augment(k_augment, batch["image"][:1])[0]
        params, stats = chain.init(online, k_online, images)
        slow = core.copy((params, stats))
        teacher = core.copy((params, stats)) if distils else ({}, {})
        if distils:
            more = new_distiller(k_distiller)
            params, stats = params | more[0], stats | more[1]
        banks = [
            contrastive.l2_normalize(jax.random.normal(k, (2, queue_size, output_dim)))
            for k in k_queues
        ]
        extra = Extra(
            *(slow if spec.momentum else ({}, {})),
            *teacher,
            key_queue=banks[0] if spec.queues else None,
            key_pointer=jnp.zeros((), jnp.int32),
            frozen_queue=banks[1] if spec.queues and strategy == "pnr" else None,
            frozen_pointer=jnp.zeros((), jnp.int32),
        )
        return core.new_state(k_state, params, stats, parts.tx, extra)

    def begin_task(state, task):
        state = state.replace(opt_state=parts.tx.init(state.params))
        if not distils or task.index == 0:
            return state
        if task.index == 1:
            # g is born with the second task; what it was in the first is dropped.
            key = jax.random.fold_in(core.step_key(state), 1)
            fresh = jax.jit(new_distiller)(key)
            state = state.replace(
                params=state.params | fresh[0], stats=state.stats | fresh[1]
            )
        extra = state.extra._replace(
            teacher=core.copy(slow_part(state.params)),
            teacher_stats=core.copy(slow_part(state.stats)),
        )
        return state.replace(extra=extra)

    def two(rows):
        return rows.reshape(-1, 2, output_dim)

    def frozen_features(state, images):
        """The teacher's f32[B,2,D]; zeros in the first task, at no cost."""

        def forward():
            extra, train = state.extra, frozen_bn == "batch"
            return chain.apply(
                online, extra.teacher, extra.teacher_stats, images, train=train,
                groups=2,
            )[0]  # fmt: skip

        absent = jnp.zeros((len(images), output_dim))
        return two(jax.lax.cond(state.task == 0, lambda: absent, forward))

    def forward(params, state, images):
        """What the losses read of the network that learns, and its statistics."""
        z, stats = chain.apply(
            online, params, state.stats, images, train=True, groups=2
        )
        if not distils:
            return (two(z), None), stats
        p, more = chain.apply(
            distiller, params, state.stats, spec.distiller_input(z), train=True,
            groups=2,
        )  # fmt: skip
        return (two(z), two(p)), stats | more

    def losses(embeddings, features, first):
        """The loss and its gradient with respect to z and p."""

        def gradient_of(loss):
            def of(embeddings):
                z, p = embeddings
                return loss(features._replace(z=z, p=p), options)

            return jax.value_and_grad(of)

        if not distils:
            return gradient_of(spec.loss)(embeddings)
        # The gradient is taken inside, or the residuals of both branches, as large
        # as the logits, would leave the cond. No convolution is in it: on CPU its
        # gradient would be slow there.
        return jax.lax.cond(
            first, gradient_of(spec.loss), gradient_of(later), embeddings
        )

    def step(state, batch):
        views = parts.augment(core.step_key(state), batch["image"])
        images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
        extra, keys, frozen = state.extra, None, None
        if spec.momentum:
            keys, slow_stats = chain.apply(
                online, extra.momentum, extra.momentum_stats, images, train=True,
                groups=2,
            )  # fmt: skip
            keys, extra = two(keys), extra._replace(momentum_stats=slow_stats)
        if distils:
            frozen = frozen_features(state, images)
        embeddings, backward, stats = jax.vjp(
            lambda params: forward(params, state, images), state.params, has_aux=True
        )
        progress, first = core.progress(state), state.task == 0
        features = ssl_bases.Features(
            None, keys, None, frozen, extra.key_queue, extra.frozen_queue,
            batch["label"],
        )  # fmt: skip
        loss, slopes = losses(embeddings, features, first)
        (grads,) = backward(slopes)
        lr = parts.lr(progress)
        state = core.apply_gradients(state, grads, parts.tx, lr)
        if spec.momentum:
            decay = optim.momentum_schedule(
                progress, start=momentum_start, end=momentum_end
            )
            moved = optim.ema(extra.momentum, slow_part(state.params), decay)
            extra = extra._replace(momentum=moved)
        if spec.queues:
            pair = queue.enqueue(extra.key_queue, extra.key_pointer, banks_of(keys))
            extra = extra._replace(key_queue=pair[0], key_pointer=pair[1])
        if extra.frozen_queue is not None:  # filled from the second task on
            pair = queue.enqueue(
                extra.frozen_queue, extra.frozen_pointer, banks_of(frozen),
                active=~first,
            )  # fmt: skip
            extra = extra._replace(frozen_queue=pair[0], frozen_pointer=pair[1])
        metrics = {"loss": loss, "lr": lr, "grad_norm": optax.tree.norm(grads)}
        return state.replace(stats=stats, extra=extra), metrics

    def embed(state, images):
        encoder = {"encoder": parts.encoder}
        return chain.apply(encoder, state.params, state.stats, images, train=False)[0]

    return core.Method(init, step, embed, begin_task=begin_task)


def banks_of(embeddings):
    """f32[B,2,D] -> unit rows f32[2,B,D], as the queues hold them."""
    return contrastive.l2_normalize(embeddings).swapaxes(0, 1)
