"""Two-view self-supervised learning, alone, with CaSSLe, or with PNR.

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
from jaxcl.methods import ssl_bases
from jaxcl.nets import heads

STRATEGIES = ("finetune", "cassle", "pnr")


class Extra(NamedTuple):
    """What two-view methods keep beside the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, encoder and projector as the last task left them
    teacher_stats: core.PyTree  # f32
    key_queue: jax.Array  # f32[2,K,D] unit rows, [v] from view v of the slow network
    key_pointer: jax.Array  # i32[], where the next keys go
    frozen_queue: jax.Array  # f32[2,K,D] unit rows, [v] from view v of the teacher
    frozen_pointer: jax.Array  # i32[]


def enqueue(queue, pointer, rows):
    """Overwrite the oldest rows of both banks.

    Args: queue f32[2,K,D], pointer i32[], rows f32[2,B,D] with B <= K.
    Returns: the new queue and pointer.
    """
    size, count = queue.shape[1], rows.shape[1]
    if size % count == 0:  # never wraps: one contiguous write
        queue = jax.lax.dynamic_update_slice(queue, rows, (0, pointer, 0))
    else:
        queue = queue.at[:, (pointer + jnp.arange(count)) % size].set(rows)
    return queue, (pointer + count) % size


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
    distils, queues = strategy != "finetune", spec.queues
    dtype = parts.encoder.dtype
    projector = heads.projector(
        base, hidden_dim=hidden_dim, output_dim=output_dim, dtype=dtype
    )
    distiller = heads.predictor(
        hidden_dim=distill_hidden_dim, output_dim=output_dim, dtype=dtype
    )

    def project(params, stats, images, *, train):
        """Images f32[2B,...], views interleaved -> f32[B,2,D] and new stats."""
        outputs, new = images, {}
        for name, net in (("encoder", parts.encoder), ("projector", projector)):
            outputs, updated = _apply(net, params, stats, name, outputs, train)
            new[name] = updated
        return outputs.reshape(-1, 2, outputs.shape[-1]), new

    def init(key, batch):
        k_state, k_augment, *k_nets = jax.random.split(key, 5)
        k_queues = jax.random.split(jax.random.fold_in(key, 1))
        images = parts.augment(k_augment, batch["image"][:1])[0]
        hidden = jnp.zeros((2, parts.encoder.num_features))
        inputs = {"encoder": images, "projector": hidden}
        nets = {"encoder": parts.encoder, "projector": projector}
        if distils:
            inputs["distiller"] = jnp.zeros((2, output_dim))
            nets["distiller"] = distiller
        params, stats = {}, {}
        for (name, net), k_net in zip(nets.items(), k_nets, strict=False):
            variables = net.init(k_net, inputs[name], train=True, groups=2)
            params[name] = variables["params"]
            stats[name] = variables.get("batch_stats", {})
        slow = {name: params[name] for name in ("encoder", "projector")}
        slow_stats = {name: stats[name] for name in slow}
        shape = (2, queue_size if queues else 0, output_dim)
        banks = [contrastive.l2_normalize(jax.random.normal(k, shape)) for k in k_queues]
        zero = jnp.zeros((), jnp.int32)
        extra = Extra(
            momentum=core.copy(slow) if spec.momentum else {},
            momentum_stats=core.copy(slow_stats) if spec.momentum else {},
            teacher=core.copy(slow) if distils else {},
            teacher_stats=core.copy(slow_stats) if distils else {},
            key_queue=banks[0],
            key_pointer=zero,
            frozen_queue=banks[1] if strategy == "pnr" else banks[1][:, :0],
            frozen_pointer=zero + 0,
        )
        return core.new_state(k_state, params, stats, parts.tx, extra)

    def begin_task(state, task):
        state = state.replace(opt_state=parts.tx.init(state.params))
        if not distils or task.index == 0:
            return state
        online = {name: state.params[name] for name in ("encoder", "projector")}
        online_stats = {name: state.stats[name] for name in online}
        extra = state.extra._replace(
            teacher=core.copy(online), teacher_stats=core.copy(online_stats)
        )
        if task.index > 1:
            return state.replace(extra=extra)
        # g is born with the second task; what it was in the first is dropped.
        key = jax.random.fold_in(core.step_key(state), 1)
        fresh = distiller.init(key, jnp.zeros((2, output_dim)), train=True, groups=2)
        return state.replace(
            params={**state.params, "distiller": fresh["params"]},
            stats={**state.stats, "distiller": fresh["batch_stats"]},
            extra=extra,
        )

    def frozen_features(state, images):
        """The teacher's f32[B,2,D]; zeros in the first task, at no cost."""
        extra, train = state.extra, frozen_bn == "batch"

        def forward():
            return project(extra.teacher, extra.teacher_stats, images, train=train)[0]

        absent = jnp.zeros((images.shape[0] // 2, 2, output_dim))
        return jax.lax.cond(state.task == 0, lambda: absent, forward)

    def step(state, batch):
        views = parts.augment(core.step_key(state), batch["image"])
        images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
        extra, keys, frozen = state.extra, None, None
        if spec.momentum:
            keys, slow_stats = project(
                extra.momentum, extra.momentum_stats, images, train=True
            )
            extra = extra._replace(momentum_stats=slow_stats)
        if distils:
            frozen = frozen_features(state, images)

        def loss_fn(params):
            z, stats = project(params, state.stats, images, train=True)
            features = ssl_bases.Features(
                z, keys, None, frozen, extra.key_queue, extra.frozen_queue,
                batch["label"],
            )  # fmt: skip
            if not distils:
                return spec.loss(features, options), stats
            p, stats["distiller"] = _apply(
                distiller, params, state.stats, "distiller",
                spec.distiller_input(z).reshape(-1, output_dim), True,
            )  # fmt: skip
            features = features._replace(p=p.reshape(z.shape))
            later = spec.cassle if strategy == "cassle" else spec.pnr
            # Nothing inside the cond but products of embeddings: its gradient
            # holds no convolution.
            loss = jax.lax.cond(
                state.task == 0,
                lambda f: spec.loss(f, options),
                lambda f: later(f, options),
                features,
            )
            return loss, stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        progress = core.progress(state)
        lr = parts.lr(progress)
        state = core.apply_gradients(state, grads, parts.tx, lr)
        if spec.momentum:
            decay = optim.momentum_schedule(
                progress, start=momentum_start, end=momentum_end
            )
            online = {name: state.params[name] for name in extra.momentum}
            extra = extra._replace(momentum=optim.ema(extra.momentum, online, decay))
        if queues:
            extra = _update_queues(extra, keys, frozen, state.task)
        metrics = {"loss": loss, "lr": lr, "grad_norm": optax.global_norm(grads)}
        return state.replace(stats=stats, extra=extra), metrics

    def embed(state, images):
        variables = {"params": state.params["encoder"]}
        variables["batch_stats"] = state.stats["encoder"]
        return parts.encoder.apply(variables, images, train=False)

    return core.Method(init, step, embed, begin_task=begin_task)


def _apply(net, params, stats, name, inputs, train):
    """Outputs of one net and its running statistics after them."""
    variables = {"params": params[name], "batch_stats": stats[name]}
    outputs, updated = net.apply(
        variables, inputs, train=train, groups=2, mutable=["batch_stats"]
    )
    return outputs, updated.get("batch_stats", stats[name])


def _update_queues(extra: Extra, keys, frozen, task) -> Extra:
    """Put this step's keys, and past the first task the teacher's, in the queues."""
    rows = contrastive.l2_normalize(keys).swapaxes(0, 1)
    queue, pointer = enqueue(extra.key_queue, extra.key_pointer, rows)
    extra = extra._replace(key_queue=queue, key_pointer=pointer)
    if frozen is None or extra.frozen_queue.shape[1] == 0:
        return extra
    rows = contrastive.l2_normalize(frozen).swapaxes(0, 1)
    # In the first task the queue keeps its random rows: it writes what is there.
    first, count = task == 0, rows.shape[1]
    slots = (extra.frozen_pointer + jnp.arange(count)) % extra.frozen_queue.shape[1]
    rows = jnp.where(first, extra.frozen_queue[:, slots], rows)
    queue, pointer = enqueue(extra.frozen_queue, extra.frozen_pointer, rows)
    return extra._replace(
        frozen_queue=queue,
        frozen_pointer=jnp.where(first, extra.frozen_pointer, pointer),
    )
