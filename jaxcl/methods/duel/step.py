"""DUEL: contrast against a memory that drops its most frequent rows.

Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024: D-MoCo (`base="moco"`) and D-SimCLR
(`base="simclr"`). With `policy="fifo"` or `negatives="batch"` they are the MoCo v2 and
the SimCLR that the paper compares them with.

Departures:
- The paper trains from a full memory; here the stream fills it, and rows that do not
  exist yet are masked.
- The policy compares stored features, which rows had when they came in, with features
  of the step: for D-MoCo the keys of the second view. Algorithm 1 embeds all of them
  with the network after the step, and Algorithm 3 the anchors' views:
  `policy_features`. The paper's Table 3 leaves no time for another pass.
- Algorithm 3 draws rows for MoCo, too; appendix E says how many for D-SimCLR alone.
- Rows drawn from the memory are augmented like the batch and normalised by their own
  statistics, which do not move the running ones.
- Keys are not shuffled among devices: batch statistics are those of the global batch.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim, schema, sharding
from jaxcl.errors import Refused
from jaxcl.losses import contrastive
from jaxcl.losses import streaming as streaming_lib
from jaxcl.memory import buffer, duel
from jaxcl.methods.duel import active_memory
from jaxcl.nets import chain, mlp

# What the policy compares: features as stored and as the step made them, those of the
# batch by the network after the step (Algorithm 3), or all of them (Algorithm 1).
Compared = Literal["step", "batch", "all"]
_SHARE = 8  # of the memory one row in so many is drawn: 256 of 2048 (Appendix E)


class Extra(NamedTuple):
    """DUEL's state apart from the trained network."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} for SimCLR
    momentum_stats: core.PyTree  # f32, its own running statistics
    # feature f32[D] unit row, label and index i32; also image u8 for SimCLR and where
    # rows are embedded again. None: no memory
    memory: buffer.Buffer | None


class StepSetup(NamedTuple):
    """The constants of a step; for the options see `make`."""

    parts: core.Parts
    net: chain.Chain  # encoder and projector
    settings: active_memory.Settings
    moco: bool  # False: SimCLR
    remembers: bool  # keeps a memory
    negatives: str
    positive_in_denominator: bool
    hml_weight: float | None
    temperature: float
    drawn: int
    refresh: bool
    policy_features: Compared
    momentum: float
    fresh_memory: bool


class StepKeys(NamedTuple):
    """Random keys of a step, by use."""

    augment: jax.Array
    write: jax.Array
    draw: jax.Array  # which rows of the memory
    augment_drawn: jax.Array
    augment_stored: jax.Array


def _check_setup(setup: StepSetup) -> None:
    """Refuse options that do not fit each other."""
    draws, size = setup.negatives != "batch" or setup.refresh, setup.settings.size
    if draws and setup.drawn > size:
        raise Refused(
            f"config.method.drawn={setup.drawn}: must be from 1 to {size}, the "
            "rows of the memory (memory_size)"
        )
    if setup.settings.logsumexp is not None and setup.settings.spread:
        raise Refused(
            "config.method.streaming=True: would send a memory that is split over the "
            "devices (config.method.sharded) to each of them; must be False"
        )
    if setup.hml_weight is not None and setup.negatives != "memory":
        raise Refused(
            f"config.method.negatives={setup.negatives!r}: must be 'memory' where "
            "config.method.hml_weight is given, since M-HML is against the memory alone"
        )


@schema.checked("config.method")
@schema.debug(hidden_dim=16, output_dim=8, memory_size=32, drawn=8)
def make(
    parts: core.Parts,
    *,
    base: Literal["moco", "simclr"] = "moco",
    policy: active_memory.Policy = "duel",
    negatives: Literal["mixed", "memory", "batch"] = "mixed",
    positive_in_denominator: bool = True,
    hml_weight: schema.Weight | None = None,
    temperature: schema.Temperature = 0.5,
    memory_size: schema.Count = 2048,
    drawn: schema.Count | None = None,
    score: duel.Score = "affine",
    newcomer_competes: bool = False,
    safe_update: bool = False,
    refresh: bool = False,
    policy_features: Compared = "step",
    fresh_memory: bool = False,
    keep_images: bool = False,
    sharded: bool = False,
    momentum: schema.Share = 0.9,
    hidden_layers: schema.Layers = 0,
    hidden_dim: schema.Width = 512,
    output_dim: schema.Width = 256,
    streaming: bool = False,
) -> core.Method:
    """Make MoCo v2 or SimCLR with an active memory of negatives.

    Args:
      base: "moco" (a slow network makes the keys, which the memory keeps) or "simclr"
        (the present network embeds the images of rows drawn from the memory).
      policy: "duel", "fifo" or "reservoir", which rows the memory keeps.
      negatives: "mixed" (from batch and memory), "memory" or "batch" (Table 4); with
        "batch" SimCLR keeps no memory.
      positive_in_denominator: whether epsilon of Eq. 17 is 1 or 0.
      hml_weight: lambda of M-HML (Eq. 5), which is then the loss; None: InfoNCE.
      temperature: temperature of the loss, and tau of the exponential score.
      memory_size: rows, K.
      drawn: rows that each step draws from the memory as negatives, without replacement
        (Algorithm 3); None: an eighth, 256 of 2048 (Appendix E). `memory_size` takes
        the whole memory.
      score: "affine" or "exponential", duplication probability of the policy.
      newcomer_competes: Algorithm 1 in place of Algorithm 4.
      safe_update: leave the memory alone if its distinctiveness to the batch would fall
        (Algorithm 2).
      refresh: renew the stored features of the drawn rows at every step; MoCo then also
        keeps images, and its slow network embeds them.
      policy_features: features that the policy compares. "step": stored ones and those
        of the step; "batch": after the step its network (MoCo: the slow one) embeds the
        anchors' views (Algorithm 3); "all": those, and all stored images again
        (Algorithm 1). The last two cost another pass.
      fresh_memory: begin each task with an empty memory.
      keep_images: MoCo keeps images even if nothing reads them, so that a run that
        renews features can start from this one.
      sharded: each device holds its share of the memory.
      momentum: momentum of the slow network.
      hidden_layers, hidden_dim, output_dim: shape of the projector; 0 layers: one
        Linear.
      streaming: make no matrix of logits, see `losses.streaming`.

    Raises:
      Refused: naming field, value and range.
    """
    drawn = max(1, memory_size // _SHARE) if drawn is None else drawn
    moco = base == "moco"
    settings = active_memory.Settings(
        policy=policy,
        size=memory_size,
        dim=output_dim,
        images=not moco or refresh or keep_images or policy_features == "all",
        spread=sharded,
        safe=safe_update,
        newcomer_competes=newcomer_competes,
        score=score,
        temperature=temperature,
        logsumexp=streaming_lib.logsumexp if streaming else None,
    )
    widths = (hidden_dim,) * hidden_layers + (output_dim,)
    projector = mlp.MLP(widths, dtype=parts.encoder.dtype)
    setup = StepSetup(
        parts=parts,
        net=chain.Chain({"encoder": parts.encoder, "projector": projector}),
        settings=settings,
        moco=moco,
        remembers=moco or negatives != "batch",
        negatives=negatives,
        positive_in_denominator=positive_in_denominator,
        hml_weight=hml_weight,
        temperature=temperature,
        drawn=drawn,
        refresh=refresh,
        policy_features=policy_features,
        momentum=momentum,
        fresh_memory=fresh_memory,
    )
    _check_setup(setup)
    return core.Method(
        init=functools.partial(_init_state, setup),
        step=functools.partial(_step, setup),
        embed=setup.net.embed,
        project=setup.net.project,
        begin_task=functools.partial(_begin_task, setup),
        memory=_memory if setup.remembers else None,
    )


def _begin_task(setup, state, task):
    """Start the optimiser anew; empty the memory if the options say so."""
    if setup.fresh_memory and setup.remembers:
        empty = jax.tree.map(jnp.zeros_like, state.extra.memory)
        state = state.replace(extra=state.extra._replace(memory=empty))
    return state.replace(opt_state=jax.jit(setup.parts.tx.init)(state.params))


def _memory(state):
    """Gather the memory, as evaluators read it."""
    return active_memory.join_shards(state.extra.memory)


def _init_state(setup, key, batch):
    """Make the state before the first step."""
    k_state, k_augment, k_net = jax.random.split(key, 3)
    images = setup.parts.augment(k_augment, batch["image"][:1])[0]
    params, stats = setup.net.init(k_net, images)
    slow = (core.copy(params), core.copy(stats)) if setup.moco else ({}, {})
    memory = active_memory.create(setup.settings, batch) if setup.remembers else None
    extra = Extra(*slow, memory=memory)
    return core.new_state(k_state, params, stats, setup.parts.tx, extra)


def _step(setup, state, batch):
    """Take one step of the optimiser, then offer the batch to the memory."""
    keys = StepKeys(*jax.random.split(core.step_key(state), len(StepKeys._fields)))
    views = setup.parts.augment(keys.augment, batch["image"])
    core.check_views(views, 2, "duel")
    memory = _memory(state) if setup.remembers else None
    embed = functools.partial(_embed_images, setup, batch["image"].ndim == 5)
    draw = functools.partial(_draw_rows, setup, keys, embed)
    loss, memory = (_make_moco_loss if setup.moco else _make_simclr_loss)(
        setup, state, views, memory, draw
    )
    state, (stats, slow_stats, target), metrics = core.descend(setup.parts, state, loss)
    extra = state.extra._replace(momentum_stats=slow_stats)
    if setup.moco:
        slow = optim.ema(extra.momentum, state.params, setup.momentum)
        extra = extra._replace(momentum=slow)
    if setup.remembers:
        if setup.policy_features != "step":
            after = (slow, slow_stats) if setup.moco else (state.params, stats)
            target = _project(setup, after, views[:, 0])
        if setup.policy_features == "all":
            stored = functools.partial(embed, keys.augment_stored, after)
            memory = _embed_all(memory, stored)
        memory, metrics["joined"] = active_memory.update(
            setup.settings, memory, keys.write, batch, target, after=metrics["loss"]
        )
        extra = extra._replace(memory=memory)
    return state.replace(stats=stats, extra=extra), metrics


def _make_moco_loss(setup, state, views, memory, draw):
    """Return the loss of a step and the memory it reads.

    Args:
      draw: (network, memory) -> the result of `_draw_rows`.

    Returns:
      A function of the parameters, and the memory. The function gives the loss and
      (statistics, those of the slow network, features that the memory may keep).
    """
    slow = state.extra.momentum, state.extra.momentum_stats
    rows, exists, memory = draw(slow, memory)

    def loss(params):
        queries, stats = setup.net(params, state.stats, views[:, 0], train=True)
        keys, slow_stats = setup.net(*slow, views[:, 1], train=True)
        keys = core.l2_normalize(jax.lax.stop_gradient(keys))
        value = _contrast(setup, queries, keys, jnp.arange(len(keys)), rows, exists)
        return value, (stats, slow_stats, keys)

    return loss, memory


def _make_simclr_loss(setup, state, views, memory, draw):
    """Return the loss of a step and the memory it reads; there is no slow network."""
    images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
    rows = exists = None
    if setup.remembers:
        rows, exists, memory = draw((state.params, state.stats), memory)

    def loss(params):
        z, stats = setup.net(params, state.stats, images, train=True, groups=2)
        pairs = z.reshape(-1, 2, z.shape[-1])
        partners, examples = pairs[:, ::-1].reshape(z.shape), jnp.arange(len(z))
        target = core.l2_normalize(jax.lax.stop_gradient(pairs[:, 0]))
        value = _contrast(setup, z, partners, examples // 2, rows, exists)
        return value, (stats, {}, target)

    return loss, memory


def _contrast(setup, anchors, positives, examples, rows, exists):
    """Return the loss of anchors against their positives and rows of the memory."""
    if setup.hml_weight is not None:
        return contrastive.m_hml(
            anchors,
            positives,
            rows,
            weight=setup.hml_weight,
            temperature=setup.temperature,
            mask=exists,
            logsumexp=setup.settings.logsumexp,
        )
    return contrastive.info_nce(
        anchors,
        positives,
        None if setup.negatives == "batch" else rows,
        positive_in_denominator=setup.positive_in_denominator,
        unit_negatives=True,
        negative_mask=exists,
        examples=None if setup.negatives == "memory" else examples,
        temperature=setup.temperature,
        logsumexp=setup.settings.logsumexp,
    )


def _draw_rows(setup, keys, embed, network, memory):
    """Draw rows: features f32[R, D], which exist bool[R], the memory afterwards.

    Args:
      embed: function, as `_embed_images`.
      network: parameters and statistics of the embedding network.
    """
    embeds = not setup.moco or setup.refresh
    if setup.negatives == "batch" and not setup.refresh:
        return None, None, memory
    if not embeds and setup.drawn == memory.capacity:
        return memory.items["feature"], memory.filled, memory
    items, exists, slots = buffer.sample(memory, keys.draw, setup.drawn)
    if not embeds:
        return items["feature"], exists, memory
    rows = embed(keys.augment_drawn, network, items["image"])
    if setup.refresh:
        memory = active_memory.refresh_rows(memory, slots, rows, exists)
    return rows, exists, memory


def _embed_all(memory, embed):
    """Embed all stored rows again; slots without a row are blank."""
    images = memory.items["image"]
    filled = memory.filled.reshape(-1, *(1,) * (images.ndim - 1))
    features = embed(jnp.where(filled, images, 0))
    slots = jnp.arange(memory.capacity)
    return active_memory.refresh_rows(memory, slots, features, memory.filled)


def _embed_images(setup, cut, key, network, images):
    """Embed augmented stored images u8[R, H, W, C] as unit rows f32[R, D].

    Args:
      cut: the memory holds one crop of each image, as for streamed sets.
        `parts.augment` takes two, so it gets the same one twice.
      network: parameters and statistics.
    """
    images = sharding.shard_rows_in_jit(images)
    if cut:
        images = jnp.stack([images, images], axis=1)
    return _project(setup, network, setup.parts.augment(key, images)[:, 0])


def _project(setup, network, views):
    """Project to unit rows f32[N, D], without moving running statistics."""
    return core.l2_normalize(setup.net(*network, views, train=True)[0])
