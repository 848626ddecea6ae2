"""Two-view self-supervised learning under a continual strategy.

One step for every pair of a base and a strategy. A base (`bases.py`) is the loss of
one task alone; a strategy (`strategies.py`) says what the later tasks train with.

Papers: Cha, Cho, Moon, "Regularizing with Pseudo-Negatives for Continual
Self-Supervised Learning", ICML 2024 (PNR); Fini et al., "Self-Supervised
Models are Continual Learners", CVPR 2022 (CaSSLe). The papers of the bases and of the
other strategies are named where these are defined.

Departures:
- Negatives and batch statistics span the global batch; the released code
  takes them per device.
- The frozen network is in eval mode by default (`frozen_bn="running"`); the
  released code flips between both modes by accident.
- The momentum of the slow network follows the progress within the task at
  every step; the released code skips the first step and lags by one.
- `form="paper"` takes the papers' equations where the released code, the
  default, differs from them.
- DINO: the temperature of its targets and the time in which its prototypes stay are
  shares of the first task, not numbers of epochs; no clipping of gradients by tensor,
  no schedule of the weight decay; prototypes are always compared by their direction.
- LeJEPA's mean view is that of the two views, whatever local crops there are.
- SimSiam's predictor has the learning rate of all; its paper keeps it constant.
- EWC estimates the Fisher information during the last part of a task's training
  (`fisher_share`), not in a separate pass after it. Where the penalty is so stiff that
  a step would jump over its minimum, the step ends at the minimum.
"""

import functools
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim, schema
from jaxcl.losses import streaming as streaming_lib
from jaxcl.memory import buffer, importance, policies, queue
from jaxcl.methods.two_view import bases, head, networks, strategies
from jaxcl.nets import chain


class Extra(NamedTuple):
    """What two-view methods keep beside the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, encoder and projector at the end of the last task
    teacher_stats: core.PyTree  # f32
    key_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `momentum`
    key_pointer: jax.Array  # i32[], where the next keys go
    frozen_queue: jax.Array | None  # f32[2,K,D] unit rows, [v] from view v of `teacher`
    frozen_pointer: jax.Array  # i32[]
    memory: buffer.Buffer | None  # u8 images; DER also: f32[D], their projections
    importance: importance.Importance | None  # EWC's penalty
    centre: jax.Array | None  # f32[K], running mean of the slow network's logits, DINO


_STREAM = 0xD157  # keeps the fresh g apart from the step's own keys
_BRANCHES = 0xD409  # the same for branches that the encoder drops
_SLICES = 0x51CE  # for LeJEPA's slices
_LOCAL = 0x10CA  # for local crops
DROPS_BRANCHES = True  # it gives its encoder a key for them
TAKES_LOCAL = True  # some of its bases take local crops, config.augment.local

# Options that change nothing where a task is trained alone.
UNUSED_ALONE = (
    "distill_temperature",
    "weight",
    "negative_weight",
    "pn1",
    "pn2",
    "distill_hidden_dim",
    "frozen_bn",
    "memory_size",
    "mix",
    "fisher_share",
)


def unread(options: dict) -> list[str]:
    """Options that change the loss under another base or strategy, and not under these.

    Sizes and PNR's lambda are left out: a config sets them for every base that it may
    be given.
    """
    spec, plan = bases.get(options["base"]), strategies.get(options["strategy"])
    own = options["base"] not in bases.BASES  # reads any of the options
    pnr, contrastive = options["strategy"] == "pnr", spec.unbounded is None
    distils = plan.distiller and not (pnr and contrastive)
    centred = spec.prototypes and options["balance"] == "centre"
    reads = {
        ("temperature",): spec.temperatures,
        ("distill_temperature",): plan.distiller and spec.temperatures,
        ("weight",): distils or plan.weight is not None,
        ("pn1", "pn2"): pnr,
        ("frozen_bn",): plan.teacher,
        ("momentum_start", "momentum_end"): spec.momentum,
        ("scale", "off_diagonal"): own or options["base"] == "barlow_twins",
        ("invariance", "variance", "covariance"): own or options["base"] == "vicreg",
        ("balance", "target_temperature", "target_start"): spec.prototypes,
        ("target_warmup", "prototypes_held"): spec.prototypes,
        ("centre_momentum",): centred,
        ("normality",): spec.slices,
        ("streaming",): own or options["base"] in ("simclr", "mocov2plus"),
        ("mix",): plan.mixes,
        ("fisher_share",): plan.consolidates,
        ("head_lr", "head_form"): options["online_head"],
    }
    standard = schema.defaults(make)
    return [
        name
        for names, read in reads.items()
        for name in names
        if not read and options[name] != standard[name]
    ]


def alone(options: dict) -> dict:
    """Options of the same method on one task alone, where no strategy applies."""
    return options | {"strategy": "finetune"}


def settled(options: dict, replay: core.Replay | None = None) -> dict:
    """The options, with the base's or the strategy's in place of each None."""
    spec, plan = bases.get(options["base"]), strategies.get(options["strategy"])
    return networks.settled(spec, plan, options)


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    base: str = "mocov2plus",
    strategy: str = "finetune",
    temperature: schema.Temperature | None = None,
    distill_temperature: schema.Temperature | None = None,
    weight: schema.Weight | None = None,
    negative_weight: schema.Weight | None = None,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width | None = None,
    hidden_layers: schema.Layers | None = None,
    predictor_hidden_dim: schema.Width | None = None,
    distill_hidden_dim: schema.Width = 2048,
    queue_size: schema.Count = 65536,
    momentum_start: schema.Share | None = None,
    momentum_end: schema.Share | None = None,
    frozen_bn: Literal["running", "batch"] = "running",
    form: Literal["code", "paper"] = "code",
    pn1: bool = True,
    pn2: bool = True,
    scale: schema.Positive = 0.1,
    off_diagonal: schema.Weight = 5e-3,
    invariance: schema.Weight = 25.0,
    variance: schema.Weight = 25.0,
    covariance: schema.Weight = 1.0,
    prototypes: schema.Count = 4096,
    balance: Literal["centre", "sinkhorn"] = "centre",
    target_temperature: schema.Temperature = 0.04,
    target_start: schema.Temperature = 0.04,
    target_warmup: schema.Share = 0.3,
    centre_momentum: schema.Share = 0.9,
    prototypes_held: schema.Share = 0.01,
    normality: schema.Share = 0.05,
    slices: schema.Count = 1024,
    memory_size: schema.Count = 256,
    mix: schema.Positive = 0.4,
    fisher_share: Annotated[float, schema.Range(above=0, most=1)] = 0.1,
    online_head: bool = False,
    head_lr: schema.Positive = 0.1,
    head_form: head.Form = "apart",
    streaming: bool = False,
) -> core.Method:
    """One base under one strategy; None is the base's default, from its paper.

    Args:
      parts: what the config builds.
      base: a name in `bases.BASES`, or the module of a base of your own.
      strategy: a name in `strategies.STRATEGIES`, or the module of one of your own.
      temperature, distill_temperature: of the base loss and of distillation.
      weight: of what the strategy adds to the base loss.
      negative_weight: PNR's lambda, for bases without negatives.
      hidden_dim, output_dim, hidden_layers: of the projector.
      predictor_hidden_dim: hidden units of BYOL's and SimSiam's own predictor.
      distill_hidden_dim: hidden units of the predictor g.
      queue_size: rows of each queue bank; at least the global batch.
      momentum_start, momentum_end: of the slow network, over each task.
      frozen_bn: "running" (eval mode) or "batch" statistics in the teacher.
      form: "code" or "paper": which to follow where they differ.
      pn1, pn2: pseudo-negatives in the first and second term (Table 7).
      scale, off_diagonal: of Barlow Twins.
      invariance, variance, covariance: weights of VICReg.
      prototypes: how many DINO has.
      balance: DINO's targets: "centre" subtracts a running mean, "sinkhorn" uses all
        prototypes alike.
      target_temperature, target_start, target_warmup: of DINO's targets, which begins
        with `target_start` and rises over that share of the first task.
      centre_momentum: of the running mean.
      prototypes_held: share of the first task in which DINO's prototypes stay.
      normality: LeJEPA's lambda, of its SIGReg.
      slices: random directions of SIGReg in each step.
      memory_size: examples that DER and LUMP keep.
      mix: LUMP draws mixtures from Beta(mix, mix).
      fisher_share: last share of a task in which EWC sums squared gradients.
      online_head: train a linear head on labels of all classes, see `head.py`.
      head_lr: learning rate of that head.
      head_form: "apart" or "released", whose rows move the network's statistics.
      streaming: losses of SimCLR and MoCo make no matrix of logits, see
        `losses.streaming`.
    """
    arguments = settled(locals())
    spec, plan = bases.get(base), strategies.get(strategy)
    options = loss_options(arguments)
    if streaming:
        form = functools.partial(streaming_lib.logsumexp, on_each=parts.on_each)
        options = options._replace(logsumexp=form)
    if strategy == "pnr":
        bases.warn_of_distance(base, options)
    _check_local(parts, arguments)
    if parts.batch_size == 1 and not (spec.momentum or spec.predictor):
        raise ValueError(
            f"config.batch_size=1: base {base!r} compares rows of a batch; must be at "
            "least 2"
        )
    setup = networks.Setup(
        parts=parts,
        base=spec,
        strategy=plan,
        options=options,
        **networks.build(parts, spec, arguments),
        queue_size=queue_size,
        prototypes=prototypes if spec.prototypes else 0,
        slices=slices if spec.slices else 0,
        momentum={end: arguments[f"momentum_{end}"] for end in ("start", "end")},
        targets=networks.Targets(
            temperature=target_temperature,
            start=target_start,
            warmup=target_warmup,
            centre_momentum=centre_momentum,
            held=prototypes_held,
        ),
        frozen_train=frozen_bn == "batch",
        memory_size=memory_size,
        mix=mix,
        fisher_share=fisher_share,
    )
    method = core.Method(
        init=functools.partial(_init, setup),
        step=functools.partial(_step, setup),
        embed=setup.copied.embed,
        project=setup.copied.project,
        begin_task=functools.partial(_begin_task, setup),
        end_task=functools.partial(_end_task, setup),
        supervised=spec.supervised,
    )
    if not online_head:
        return method
    return head.add(method, parts, lr=head_lr, form=head_form)


def _check_local(parts, options):
    """Refuse local crops that the base or the strategy would not read."""
    if parts.local is None:
        return
    if not bases.get(options["base"]).local:
        takes = ", ".join(name for name, base in bases.BASES.items() if base.local)
        raise ValueError(
            f"config.augment.local: base {options['base']!r} takes no local crops; "
            f"leave the section out, or set config.method.base to one of {takes}"
        )
    if strategies.get(options["strategy"]).mixes:
        raise ValueError(
            f"config.augment.local: strategy {options['strategy']!r} mixes two views "
            "alone; leave the section out"
        )


def loss_options(arguments: dict) -> bases.Options:
    """The options of the losses, from arguments that are `networks.settled`."""
    names = [name for name in bases.Options._fields if name != "logsumexp"]
    return bases.Options(**{name: arguments[name] for name in names})


def _init(setup, key, batch):
    keys = jax.random.split(key, 6)
    k_state, k_augment, k_online, k_distiller, *k_queues = keys
    base, strategy = setup.base, setup.strategy
    images = setup.parts.augment(k_augment, batch["image"][:1])[0]
    nets = setup.copied.nets | setup.predictor.nets
    params, stats = chain.Chain(nets).init(k_online, images)
    params |= networks.new_prototypes(setup, k_online)
    frozen = networks.copied(setup, params), networks.copied(setup, stats)
    if strategy.distiller:
        distiller = networks.new_distiller(setup, k_distiller)
        params, stats = params | distiller[0], stats | distiller[1]
    banks = [
        core.l2_normalize(jax.random.normal(k, (2, setup.queue_size, setup.dim)))
        for k in k_queues
    ]
    memory = None
    if strategy.stores:
        example = {"image": batch["image"][0]}
        if not strategy.mixes:
            example["projection"] = jnp.zeros((setup.dim,))
        memory = buffer.create(example, setup.memory_size)
    extra = Extra(
        *(core.copy(frozen) if base.momentum else ({}, {})),
        *(core.copy(frozen) if strategy.teacher else ({}, {})),
        key_queue=banks[0] if base.queues else None,
        key_pointer=jnp.zeros((), jnp.int32),
        frozen_queue=banks[1] if base.queues and strategy.frozen_queue else None,
        frozen_pointer=jnp.zeros((), jnp.int32),
        memory=memory,
        importance=importance.create(params) if strategy.consolidates else None,
        centre=jnp.zeros(setup.prototypes) if _centres(setup) else None,
    )
    return core.new_state(k_state, params, stats, setup.parts.tx, extra)


def _centres(setup):
    """Whether targets are centred, so that a running mean is kept."""
    return setup.base.prototypes and setup.options.balance == "centre"


def _begin_task(setup, state, task):
    state = state.replace(opt_state=setup.parts.tx.init(state.params))
    if not setup.strategy.teacher or (task.index == 0 and not setup.parts.begun):
        return state
    if setup.strategy.distiller and task.index == 1 and not setup.parts.begun:
        # g is first used in the second task, which starts it anew.
        key = jax.random.fold_in(core.step_key(state), _STREAM)
        fresh = jax.jit(functools.partial(networks.new_distiller, setup))(key)
        state = state.replace(
            params=state.params | fresh[0], stats=state.stats | fresh[1]
        )
    extra = state.extra._replace(
        teacher=core.copy(networks.copied(setup, state.params)),
        teacher_stats=core.copy(networks.copied(setup, state.stats)),
    )
    return state.replace(extra=extra)


def _end_task(setup, state, task):
    if not setup.strategy.consolidates:
        return state
    penalty = jax.jit(importance.consolidate)(state.extra.importance, state.params)
    return state.replace(extra=state.extra._replace(importance=penalty))


def _banks(embeddings):
    """f32[B,2,D] -> unit rows f32[2,B,D], as the queues hold them."""
    return core.l2_normalize(embeddings).swapaxes(0, 1)


def _losses(setup, outputs, features, first):
    """The loss and its gradient with respect to `outputs`."""

    def gradient_of(loss):
        def of(outputs):
            return loss(features._replace(**outputs._asdict()), setup.options)

        return jax.value_and_grad(of)

    later = gradient_of(functools.partial(setup.strategy.loss, setup.base))
    if not setup.strategy.teacher:
        return later(outputs)
    # The gradient is taken inside the cond, or the residuals of both branches, as
    # large as the logits, would leave it. The networks stay outside: on CPU the
    # gradient of a convolution is slow inside a cond.
    return jax.lax.cond(first, gradient_of(setup.base.loss), later, outputs)


def _drawn(setup, memory, keys, count):
    """Stored examples: two views f32[R,2,H,W,C], bool[R], the items."""
    k_draw, k_augment = keys
    count = min(count, setup.memory_size)
    # Every device holds the whole memory; each takes its share of the drawn rows.
    items, mask, _ = setup.parts.split(buffer.sample(memory, k_draw, count))
    return setup.parts.augment(k_augment, items["image"]), mask, items


def _step(setup, state, batch):
    base, strategy, extra = setup.base, setup.strategy, state.extra
    keys = jax.random.split(core.step_key(state), 5)
    k_augment, k_mix, k_write, *k_drawn = keys
    views = setup.parts.augment(k_augment, batch["image"])
    core.check_views(views, 2, "two_view")
    features = bases.Features(None, batch["label"])
    replayed = items = None
    if strategy.stores:
        others, mask, items = _drawn(setup, extra.memory, k_drawn, len(views))
        if strategy.mixes:
            views, _ = strategies.mixed(k_mix, setup.mix, views, others, mask)
        else:
            replayed = others[:, 0]
            features = features._replace(stored=items["projection"], stored_mask=mask)
    images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
    if strategy.teacher:
        features = features._replace(f=networks.frozen_features(setup, state, images))
    features = features._replace(
        key_queue=extra.key_queue,
        frozen_queue=extra.frozen_queue,
        slow_prototypes=extra.momentum.get("prototypes"),
        frozen_prototypes=extra.teacher.get("prototypes"),
        centre=extra.centre,
        target_temperature=_target_temperature(setup, state),
        slices=_slices(setup, state),
    )
    local = None
    if setup.parts.local is not None:
        k_local = jax.random.fold_in(core.step_key(state), _LOCAL)
        local = setup.parts.local(k_local, batch["image"])

    key = None
    if getattr(setup.parts.encoder, "drop_path", 0):
        key = jax.random.fold_in(core.step_key(state), _BRANCHES)

    def forward(params):
        return networks.forward(
            setup,
            params,
            state.stats,
            images,
            replayed,
            features.stored_mask,
            key,
            local,
            slow=(extra.momentum, extra.momentum_stats) if base.momentum else None,
        )

    outputs, backward, after = jax.vjp(forward, state.params, has_aux=True)
    stats, keys, slow_stats = after
    extra = extra._replace(momentum_stats=slow_stats)
    features = features._replace(k=keys)
    first, progress = networks.unguided(setup, state), core.progress(state)
    loss, slopes = _losses(setup, outputs, features, first)
    (grads,) = backward(_held(setup, state, slopes))
    lr = core.rate(setup.parts, state)
    grads, extra = _consolidated(setup, extra, state, grads, lr)
    state = core.apply_gradients(state, grads, setup.parts.tx, lr)
    extra = _moved(setup, extra, state.params, features, first, progress)
    if strategy.stores:
        offered = {"image": batch["image"], "projection": outputs.z[:, 0]}
        extra = _stored(extra, k_write, offered, after=items)
    metrics = {"loss": loss, "lr": lr, "grad_norm": core.norm(grads)}
    return state.replace(stats=stats, extra=extra), metrics


def _slices(setup, state):
    """LeJEPA's random directions of this step, unit rows f32[S,D]."""
    if not setup.slices:
        return None
    key = jax.random.fold_in(core.step_key(state), _SLICES)
    return core.l2_normalize(jax.random.normal(key, (setup.slices, setup.dim)))


def _target_temperature(setup, state):
    """Temperature of DINO's targets, f32[]: it rises in the first task alone."""
    if not setup.prototypes:
        return None
    targets = setup.targets
    done = jnp.float32(core.progress(state)) / max(targets.warmup, 1e-6)
    done = jnp.where(state.task > 0, 1.0, jnp.minimum(done, 1.0))
    if targets.warmup == 0:
        done = 1.0
    return targets.start + (targets.temperature - targets.start) * done


def _held(setup, state, slopes):
    """Slopes of the outputs, without those of prototypes that are to stay."""
    if not setup.prototypes:
        return slopes
    held = (state.task == 0) & (core.progress(state) < setup.targets.held)
    return slopes._replace(prototypes=jnp.where(held, 0.0, slopes.prototypes))


def _consolidated(setup, extra, state, grads, lr):
    """EWC: the gradient plus the penalty's; late in a task its square is summed."""
    estimate = extra.importance
    if estimate is None:
        return grads, extra
    weight = setup.options.weight
    penalty = importance.gradient(estimate, state.params, weight=weight, lr=lr)
    last = state.step + 1 == state.task_start + state.task_steps
    late = last | (core.progress(state) >= 1 - setup.fisher_share)
    extra = extra._replace(importance=importance.observe(estimate, grads, late))
    return jax.tree.map(jnp.add, grads, penalty), extra


def _moved(setup, extra, params, features, first, progress):
    """The slow network and the queues after a step."""
    if setup.base.momentum:
        decay = optim.momentum_schedule(progress, **setup.momentum)
        slow = optim.ema(extra.momentum, networks.copied(setup, params), decay)
        extra = extra._replace(momentum=slow)
    if extra.centre is not None:
        extra = extra._replace(centre=_centred(setup, extra.centre, features))
    if extra.key_queue is not None:
        rows, pointer = queue.enqueue(
            extra.key_queue, extra.key_pointer, _banks(features.k)
        )
        extra = extra._replace(key_queue=rows, key_pointer=pointer)
    if extra.frozen_queue is not None:  # filled from the second task on
        rows, pointer = queue.enqueue(
            extra.frozen_queue, extra.frozen_pointer, _banks(features.f), active=~first
        )
        extra = extra._replace(frozen_queue=rows, frozen_pointer=pointer)
    return extra


def _centred(setup, centre, features):
    """DINO's centre after a step: it moves to the mean of the slow network's logits."""
    # Cosines are linear in unit rows: the mean of logits is the logit of the mean.
    mean = jnp.mean(core.l2_normalize(features.k), axis=(0, 1))
    unit = core.l2_normalize(features.slow_prototypes)
    return optim.ema(
        centre, core.dot(unit, mean[None])[:, 0], setup.targets.centre_momentum
    )


def _stored(extra, key, offered, after):
    """`extra` after a step's examples were offered to the memory.

    `after` is what the step read of it, see `buffer.write`.
    """
    items = {name: offered[name] for name in extra.memory.items}
    slots = policies.reservoir(extra.memory, key, jnp.ones(len(items["image"]), bool))
    written = buffer.write(extra.memory, slots, items, after=after)
    return extra._replace(memory=written)
