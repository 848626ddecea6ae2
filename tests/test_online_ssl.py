"""Online self-supervised learning: a twin of the whole step, in float64 NumPy.

Seven batches that fill a memory and overflow it, two updates each, for every
regulariser and every base. The networks are those of `helpers/dense_net.py`, the losses
those of `helpers/two_view_losses.py`; the second view is the first one mirrored and
squared. What is drawn at random is drawn by the library's own functions, which other
tests check, with the keys of the step.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import (
    dense_net,
    duel_twin,
    gss_twin,
    interpreted,
    loss_aware_twin,
    redundancy_twin,
    run_directories,
    toy,
    twins,
    two_view_losses,
)
from jaxcl import core, optim
from jaxcl.memory import buffer, policies
from jaxcl.methods import online_ssl
from jaxcl.methods.two_view import bases, records, stream
from jaxcl.methods.two_view import step as two_view_step
from jaxcl.run import job, train

# Rows of a batch, replayed ones (no multiple), of the memory, of a queue bank; features
# of a projection; pixels of a side; updates on a batch; batches.
B, R, M, K, D, SIDE, UPDATES, STEPS = 4, 6, 11, 13, 3, 3, 2, 7
MOMENTUM, DECAY, RATE = 0.5, 0.01, 0.03  # of the optimiser
ALPHA, TAU, SLOW, EVERY = 0.3, 0.8, 0.9, 3
MIXED, MIX = 3, 0.7  # rows that LUMP draws; of the distribution of its mixtures
ALIGNED = ("cassle", "cla_r", "pnr")  # through the predictor a
COPIED = ("encoder", "projector")
OPTIONS = dense_net.OPTIONS | {
    "queue_size": K,
    "teacher_ema": TAU,
    "snapshot_every": EVERY,
    "stored_momentum": ALPHA,
    "momentum": SLOW,
    "mix": MIX,
}
# name -> base, regulariser, policy, other options
CASES = {
    "simsiam-none": ("simsiam", "none", "fifo", {}),
    "simsiam-cassle": ("simsiam", "cassle", "fifo", {}),
    "simsiam-cla_r": ("simsiam", "cla_r", "min_redundancy", {}),
    "simclr-pnr": ("simclr", "pnr", "reservoir", {}),
    "mocov2plus-pnr": ("mocov2plus", "pnr", "fifo", {"rows": "all"}),
    "byol-pnr": ("byol", "pnr", "min_redundancy", {"rows": "all"}),
    "vicreg-cassle": (
        "vicreg",
        "cassle",
        "fifo",
        {"rows": "all", "teacher": "snapshot", "frozen_bn": "running"},
    ),
    "barlow_twins-pnr": ("barlow_twins", "pnr", "fifo", {"teacher": "snapshot"}),
    "mocov2plus-cla_r": ("mocov2plus", "cla_r", "fifo", {"form": "paper"}),
    "simclr-cassle": ("simclr", "cassle", "fifo", {"frozen_bn": "running"}),
    "simsiam-loss_aware": ("simsiam", "none", "loss_aware", {}),
    "simclr-duel": ("simclr", "none", "duel", {}),
    "byol-loss_aware": ("byol", "cassle", "loss_aware_reservoir", {}),
    "simclr-loss_aware": ("simclr", "none", "loss_aware_reservoir", {}),
    "simsiam-gss": ("simsiam", "none", "gss", {}),
    "byol-gss": ("byol", "none", "gss", {}),
    "byol-der": ("byol", "der", "fifo", {}),
    "simclr-der": ("simclr", "der", "min_redundancy", {}),
    "simclr-lump": ("simclr", "lump", "reservoir", {}),
    "byol-lump": ("byol", "lump", "fifo", {}),
    # CLA-B
    "byol-cassle": ("byol", "cassle", "fifo", {"rows": "all", "remembers": False}),
}


def parts(policy="fifo", **changes):
    replay = core.Replay(capacity=M, policy=policy, size=R, updates=UPDATES)
    made = core.Parts(
        encoder=dense_net.Flat(),
        augment=lambda key, images: twins.views_of(images),
        tx=optim.sgd(momentum=MOMENTUM, weight_decay=DECAY),
        lr=optim.by_task([optim.constant(RATE)]),
        num_classes=3,
        replay=replay,
        batch_size=B,
    )
    return made._replace(**changes)


def taken(base, regulariser, options):
    """Those options that the base and the regulariser have."""
    given = {"base": base, "regulariser": regulariser}
    names = toy.names_of_options(online_ssl.make, given)
    return {name: value for name, value in options.items() if name in names}


def made(base, regulariser, policy="fifo", changes=None, **of_parts):
    own = parts(policy, **of_parts)
    if regulariser == "lump":
        own = own._replace(replay=own.replay._replace(size=MIXED))
    return online_ssl.make(
        own,
        base=base,
        regulariser=regulariser,
        **(taken(base, regulariser, OPTIONS) | (changes or {})),
    )


@functools.cache
def make(name):
    return made(*CASES[name])


def batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "image": jnp.asarray(rng.integers(0, 256, (B, SIDE, SIDE, 1)), jnp.uint8),
        "label": jnp.asarray(rng.integers(0, 3, B), jnp.int32),
    }


def begin(method, seed=7):
    return jax.jit(method.init)(jax.random.key(seed), batch(0))


def mean_of(old, new, keep):
    return jax.tree.map(lambda a, b: keep * a + (1 - keep) * b, old, new)


class Twin:
    """All that a run changes, in float64."""

    def __init__(self, name, state):
        self.base, self.regulariser, self.policy, changes = CASES[name]
        self.options = OPTIONS | changes
        self.spec = bases.make_base(self.base)
        self.taught = self.regulariser in ("cassle", "pnr")
        self.every = self.options.get("rows") == "all"
        self.snapshot = self.options.get("teacher") == "snapshot"
        self.averaged = self.options.get("frozen_bn") == "running"
        self.mixes = self.regulariser == "lump"
        self.heads = ["predictor"] * bool(self.spec.predictor_hidden_dim)
        self.heads += ["distiller"] * (self.regulariser in ALIGNED)
        self.drawn = MIXED if self.mixes else R
        self.remembers = self.options.get("remembers", True)
        self.size = R if self.remembers and not self.mixes else 0  # in the batch
        self.key, self.number, self.pointer = core.copy(state.key), 0, 0
        self.items, self.filled = {}, np.zeros(M, bool)
        self.entered = 0  # rows that found a full memory and were stored
        if self.remembers:
            held = state.extra.memory.items
            self.items = {n: np.zeros(x.shape, x.dtype) for n, x in held.items()}
        self.read(state)

    def read(self, state):
        """Arrays as ours has them: what was compared does not pile up its rounding."""
        extra = state.extra
        self.params, self.stats = twins.to64(state.params), twins.to64(state.stats)
        self.velocity = twins.to64(twins.velocity(state))
        self.slow, self.teacher = twins.to64((extra.momentum, extra.teacher))
        self.teacher_stats = twins.to64(extra.teacher_stats)
        queues = (extra.base, extra.strategy)
        self.queues = twins.to64([None if x is None else x.rows for x in queues])
        for name in {"projection", "feature", "loss", "score"} & set(self.items):
            self.items[name] = twins.to64(extra.memory.items[name])

    def copied(self, tree):
        return {name: tree[name] for name in COPIED}

    # A step

    def step(self, incoming):
        key = jax.random.fold_in(self.key, self.number)
        k_write, *keys = jax.random.split(key, 1 + UPDATES)
        if self.taught and self.snapshot and self.number % EVERY == 0:
            self.follow(0.0)
        for k_update in keys:
            metrics, *told = self.update(incoming, k_update)
        if self.remembers:
            self.store(incoming, *told, k_write)
        self.number += 1
        return metrics

    def follow(self, keep):
        self.teacher = mean_of(self.teacher, self.copied(self.params), keep)
        now = self.copied(self.stats)
        self.teacher_stats = mean_of(self.teacher_stats, now, keep)

    def add_rows(self, incoming, key):
        """Views of the incoming and the replayed rows, slots, and share of the rows."""
        size, active = self.size, self.filled.sum() > self.drawn
        views = twins.views_of(np.float64(incoming["image"]))
        replayed = None
        share = 0.0
        slots = np.zeros(0, int)
        if self.remembers:
            held = buffer.Buffer({}, jnp.asarray(self.filled), jnp.int32(0))
            k_draw = jax.random.split(key, 3)[1]
            slots = np.asarray(buffer.sample(held, k_draw, self.drawn)[2])
            if active:
                replayed = twins.views_of(np.float64(self.items["image"][slots]))
        if self.mixes and active:
            k_mix = jax.random.fold_in(key, stream._MIX)
            own = float(jax.random.beta(k_mix, MIX, MIX))
            views = np.stack(
                [
                    own * views[i] + (1 - own) * replayed[i % MIXED]
                    for i in range(len(views))
                ]
            )
            share = 1 - own
        if size:
            if replayed is None:
                replayed = np.stack([views[i % B] for i in range(R)])
            views = np.concatenate([replayed, views])
            share = R / (R + B) if active else 0.0
        return views, slots, share

    def update(self, incoming, key):
        size, active = self.size, self.filled.sum() > self.drawn
        views, slots, share = self.add_rows(incoming, key)
        images = views.reshape(2 * len(views), -1)
        run = functools.partial(dense_net.apply, groups=2)
        fixed = {}
        if self.spec.momentum:
            rows = run(COPIED, self.slow, self.stats, images, train=True)[0]
            fixed["k"] = rows.reshape(-1, 2, D)
        if self.taught:
            stats = self.teacher_stats if self.averaged else self.stats
            rows = run(COPIED, self.teacher, stats, images, train=not self.averaged)[0]
            fixed["f"] = rows.reshape(-1, 2, D)
        if "projection" in self.items and active:
            fixed["stored"] = np.float64(self.items["projection"][slots])
        outputs, self.stats, backward = self.forward(images)
        value, terms, slopes = self.differentiated(outputs, fixed, active)
        grads = backward(slopes)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
        self.velocity, self.params = twins.momentum_step(
            self.params, self.velocity, grads, rate=RATE, momentum=MOMENTUM, decay=DECAY
        )
        self.keep_up(fixed, active)
        z = outputs["z"].reshape(-1, 2, D)
        losses = self.pair_losses(outputs, fixed)
        scores = self.scores(outputs, fixed, active)
        if size and active:
            self.refresh(slots, z[:R], losses[:R])
        metrics = {"loss": value, "lr": RATE, "grad_norm": norm, "replayed": share}
        return metrics | terms, z[size:], losses[size:], scores[size:]

    def pairs(self, outputs, fixed):
        """Of each image what the base compares, and with what: [2,D] each."""
        query = outputs.get("o", outputs["z"]).reshape(-1, 2, D)
        target = fixed.get("k", outputs["z"]).reshape(-1, 2, D)
        return list(zip(query, target, strict=True))

    def pair_losses(self, outputs, fixed):
        """Of each image -cos of its views, as the base has them, both directions."""
        return [
            -(twins.cosine(q[0], t[1]) + twins.cosine(q[1], t[0])) / 2
            for q, t in self.pairs(outputs, fixed)
        ]

    def scores(self, outputs, fixed, active):
        """Of each image how much its gradient is like that of the replayed ones."""
        slopes = [gss_twin.slope(q, t) for q, t in self.pairs(outputs, fixed)]
        past = np.mean(slopes[:R], axis=0) if active else None
        return [gss_twin.score(slope, past) for slope in slopes]

    def forward(self, images):
        nets = self.params, self.stats
        rows, stats, back = dense_net.apply(COPIED, *nets, images, train=True, groups=2)
        outputs, more, back_heads = dense_net.apply_heads(
            self.heads,
            *nets,
            rows,
            count=None if self.every else 2 * R,
            unit=self.base == "mocov2plus",
        )

        def backward(slopes):
            down, grads = back_heads(slopes)
            return grads | back(down)[1]

        return {"z": rows} | outputs, self.stats | stats | more, backward

    def losses(self, outputs, fixed, active):
        """A function of the arrays of `outputs`: the loss, and its terms."""
        names = two_view_losses.Options._fields
        given = {n: v for n, v in self.options.items() if n in names}
        options = two_view_losses.Options(**given)
        alone, distil, pnr = two_view_losses.BASES[self.base]
        first = 0 if active else self.size

        def terms(*arrays):
            by_row = {
                name: rows.reshape(-1, 2, D)
                for name, rows in zip(outputs, arrays, strict=True)
            } | {n: x for n, x in fixed.items() if n != "stored"}

            def cut(start, stop):
                return two_view_losses.Features(
                    key_queue=self.queues[0],
                    frozen_queue=self.queues[1],
                    **{n: x[start:stop] for n, x in by_row.items()},
                )

            whole, past = cut(first, None), cut(0, self.size)
            align, now = 0.0, cut(self.size, None)
            if self.mixes or self.regulariser == "none":
                pass
            elif self.every or active:
                rows = whole if self.every else past
                if self.regulariser == "cassle":
                    align = distil(rows, options)
                elif self.regulariser == "pnr":
                    align = pnr(rows, options) - alone(rows, options)
                elif self.regulariser == "der":
                    align = np.mean((rows.z - fixed["stored"][:, None]) ** 2)
                else:
                    stored = np.repeat(fixed["stored"][:, None], 2, axis=1)
                    align = -two_view_losses.cosine(rows.p, stored)
            weight = 1.0 if self.regulariser == "pnr" else options.weight
            return alone(whole, options) + weight * align, {
                "align": align,
                "stream_loss": alone(now, options),
                "replay_loss": alone(past, options) if active and self.size else 0.0,
            }

        return terms

    def differentiated(self, outputs, fixed, active):
        """The loss, its terms, and the slopes of the outputs by differences."""
        terms = self.losses(outputs, fixed, active)
        arrays = list(outputs.values())
        slopes = {
            name: twins.central_difference(lambda *a: terms(*a)[0], arrays, i)
            for i, name in enumerate(outputs)
        }
        if self.base == "simsiam":  # there z is a target, without gradient
            slopes["z"] = np.zeros_like(slopes["z"])
        return *terms(*arrays), slopes

    def keep_up(self, fixed, active):
        """Slow network, teacher and queues after an update."""
        if self.spec.momentum:
            self.slow = mean_of(self.slow, self.copied(self.params), SLOW)
        if self.taught and not self.snapshot:
            self.follow(TAU)
        self.enqueue(fixed, active)

    def enqueue(self, fixed, active):
        if self.spec.queue_size:
            first = 0 if active else self.size
            for queue, name in zip(self.queues, "kf", strict=True):
                if queue is not None:
                    rows = twins.unit(fixed[name][first:])
                    for i, pair in enumerate(rows):
                        queue[:, (self.pointer + i) % K] = pair
            self.pointer = (self.pointer + len(fixed["k"]) - first) % K

    def refresh(self, slots, z, losses):
        """What is stored of replayed rows moves with every use."""
        for slot, (z1, z2), loss in zip(slots, z, losses, strict=True):
            if "loss" in self.items:
                self.items["loss"][slot] = (self.items["loss"][slot] + loss) / 2
                self.items["draws"][slot] += 1
            if self.regulariser == "cla_r":
                held, now = self.items["projection"], (z1 + z2) / 2
                held[slot] = ALPHA * held[slot] + (1 - ALPHA) * now
            if "feature" in self.items:
                held, now = self.items["feature"], twins.unit(z1 + z2)
                first = "used" in self.items and not self.items["used"][slot]
                held[slot] = now if first else twins.unit((held[slot] + now) / 2)
            if "used" in self.items:
                self.items["used"][slot] = True

    def store(self, incoming, z, losses, scores, key):
        features = [twins.unit(pair.sum(axis=0)) for pair in z]
        full = self.filled.all()
        for i, slot in enumerate(self.slots(key, losses, features, scores)):
            if slot >= M:
                continue
            self.entered += full
            self.filled[slot] = True
            new = {
                "image": np.asarray(incoming["image"])[i],
                "label": np.asarray(incoming["label"])[i],
                "task": 0,
                "projection": z[i].mean(axis=0),
                "feature": features[i],
                "used": False,
                "number": self.number * B + i,
                "loss": losses[i],
                "draws": 0,
                "score": scores[i],
            }
            for name, held in self.items.items():
                held[slot] = new[name]

    def slots(self, key, losses, features, scores):
        seen = self.number * B
        if self.policy == "fifo":
            return [(seen + i) % M for i in range(B)]
        if self.policy == "reservoir":
            held = buffer.Buffer({}, jnp.asarray(self.filled), jnp.int32(seen))
            return np.asarray(policies.reservoir(held, key, jnp.ones(B, bool)))
        if self.policy == "duel":
            keep = duel_twin.loop(
                self.items["feature"],
                np.stack(features),
                duel_twin.SCORES["affine"],
                filled=self.filled,
            )
            free = iter(np.flatnonzero(~keep[:M]))
            return [next(free) if comes else M for comes in keep[M:]]
        if self.policy == "gss":
            return gss_twin.slots(key, self.items["score"], self.filled, scores)
        excess = int(self.filled.sum()) + B - M
        if self.policy == "loss_aware_reservoir":
            held = buffer.Buffer({}, jnp.asarray(self.filled), jnp.int32(seen))
            enters = np.asarray(policies.reservoir(held, key, jnp.ones(B, bool)))
            return loss_aware_twin.entering(
                self.items["loss"], self.items["draws"], self.filled, losses, enters
            )
        if self.policy == "loss_aware":
            columns = self.items["loss"], self.items["draws"], self.filled
            gone = loss_aware_twin.lowest(loss_aware_twin.scores(*columns), excess)
        else:
            columns = (self.items[x] for x in ("feature", "used", "number"))
            gone = redundancy_twin.removed(*columns, self.filled, excess)
        return [s for s in range(M) if not self.filled[s] or s in gone][:B]

    # What ours must be

    def compare(self, state, rtol=5e-4, atol=1e-4):
        close = functools.partial(chex.assert_trees_all_close, rtol=rtol, atol=atol)
        extra = state.extra
        assert int(state.step) == self.number
        close(state.params, self.params)
        close(state.stats, self.stats)
        close(twins.velocity(state), self.velocity, atol=10 * atol)
        close(extra.momentum, self.slow)
        close(extra.teacher, self.teacher)
        close(extra.teacher_stats, self.teacher_stats)
        held = [extra.base, extra.strategy]
        close([x if x is None else x.rows for x in held], self.queues)
        if self.spec.queue_size:
            assert int(extra.base.pointer) == self.pointer
        if self.remembers:
            self.compare_memory(extra.memory, close)

    def compare_memory(self, memory, close):
        assert set(memory.items) == set(self.items)
        np.testing.assert_array_equal(memory.filled, self.filled)
        for name, held in self.items.items():
            assert memory.items[name].dtype != np.float64
            close(np.asarray(memory.items[name], held.dtype), held)
        assert int(memory.seen) == self.number * B


def under_way(name):
    """A state of random numbers, of five batches that left the memory full."""
    rng = np.random.default_rng(5)
    blank = jax.eval_shape(make(name).init, jax.random.key(7), batch(0))
    state = jax.tree.map(
        lambda x: (
            jax.random.key(7)
            if x.dtype == blank.key.dtype
            else jnp.asarray(rng.uniform(0.1, 0.9, x.shape).astype(x.dtype))
        ),
        blank,
    )
    memory = state.extra.memory
    drawn = {
        "image": rng.integers(0, 256, (M, SIDE, SIDE, 1)),
        "feature": twins.unit(rng.normal(size=(M, D))),
        "projection": rng.normal(size=(M, D)),
        "used": rng.random(M) < 0.5,
        "number": rng.permutation(5 * B)[:M],
        "loss": rng.uniform(-1, 1, M),
        "draws": rng.integers(1, 5, M),
        "score": rng.uniform(0, 2, M),
    }
    items = {
        n: jnp.asarray(drawn.get(n, np.zeros(M)), x.dtype)
        for n, x in memory.items.items()
    }
    memory = buffer.Buffer(items, jnp.ones(M, bool), jnp.int32(5 * B))
    queues = {
        name: queue._replace(rows=core.l2_normalize(queue.rows))
        for name in ("base", "strategy")
        if (queue := getattr(state.extra, name)) is not None
    }
    extra = state.extra._replace(memory=memory, **queues)
    return state.replace(step=jnp.int32(5), extra=extra)


REMEMBERING = [name for name in CASES if "remembers" not in CASES[name][3]]
FROM_TWO_ROWS = ["mocov2plus-pnr", "simclr-lump", "byol-der", "simsiam-gss"]


@pytest.mark.parametrize(
    ("name", "full"),
    [*((name, True) for name in REMEMBERING), *((n, False) for n in FROM_TWO_ROWS)],
)
def test_an_update_reads_and_writes_the_memory_by_the_equations(name, full):
    """Rows that are added, losses, queues and items, of networks' outputs at random."""
    state, setup, rng = (
        under_way(name),
        make(name).step.args[0],
        np.random.default_rng(6),
    )
    memory = state.extra.memory
    if not full:
        memory = memory._replace(filled=jnp.arange(M) < 2, seen=jnp.int32(0))
        extra = state.extra._replace(memory=memory)
        state = state.replace(step=jnp.int32(0), extra=extra)
    twin = Twin(name, state)
    twin.number, twin.filled = 5 * full, np.array(memory.filled)
    twin.items = {n: np.array(x) for n, x in memory.items.items()}
    twin.read(state)
    incoming, (keys,) = batch(5), stream.split_keys(jax.random.key(3), 1)
    key = keys.step
    count = len(twin.add_rows(incoming, key)[0])
    names = "zo" if "predictor" in twin.heads else "z"
    outputs = {n: rng.normal(size=(2 * count, D)) for n in names}
    if "distiller" in twin.heads:
        outputs["p"] = rng.normal(size=(2 * (count if twin.every else R), D))
    letters = "k" * bool(twin.spec.momentum) + "f" * twin.taught
    fixed = {n: rng.normal(size=(count, 2, D)) for n in letters}

    def ours(state, outputs, fixed):
        reading = records.Reading(twins.views_of(incoming["image"]))
        reading = stream.add_rows(setup, state.extra.memory, keys, reading)
        rows = {n: x.reshape(-1, 2, D) for n, x in outputs.items()} | fixed
        rows |= reading.features | {"state": state.extra.base}
        queue = state.extra.strategy
        if queue is not None:
            rows["frozen_queue"] = queue.rows
        x = records.Features(**{"label": None} | rows)
        losses, which = stream.list_losses(setup, reading)
        loss = losses[0](x)
        if which is not None:
            loss = jax.tree.map(lambda *x: jnp.where(which, *x), loss, losses[1](x))
        extra = two_view_step._update_states(setup, state.extra, x, reading, True)
        state, metrics, stats = stream.finish_update(
            setup, state.replace(extra=extra), loss[1], x, reading
        )
        state = stream.store_batch(
            setup, state, incoming, stats, state.step, keys.write
        )
        return state.extra, reading.views, loss[0], metrics

    extra, views, value, metrics = interpreted.jit(ours)(
        state, *jax.tree.map(jnp.float32, (outputs, fixed))
    )
    want, slots, share = twin.add_rows(incoming, key)
    if "projection" in twin.items and full:
        fixed["stored"] = np.float64(twin.items["projection"][slots])
    total, terms = twin.losses(outputs, fixed, full)(*outputs.values())
    pair_losses = twin.pair_losses(outputs, fixed)
    scores = twin.scores(outputs, fixed, full)
    z = outputs["z"].reshape(-1, 2, D)
    if twin.size and full:
        twin.refresh(slots, z[:R], pair_losses[:R])
    twin.enqueue(fixed, full)
    size = twin.size
    twin.store(incoming, z[size:], pair_losses[size:], scores[size:], keys.write)
    twin.number += 1
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)
    close(views, want)
    close((value, metrics), (total, terms | {"replayed": share}))
    queues = [None if x is None else x.rows for x in (extra.base, extra.strategy)]
    close(queues, twin.queues)
    twin.compare_memory(extra.memory, close)


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_equations(name):
    """Before the memory holds enough, while it fills, and once it overflows."""
    method = make(name)
    seed = 8 if name.startswith("byol") else 7  # of which some round at a kink
    state, step = begin(method, seed), interpreted.jit(method.step)
    twin = Twin(name, state)
    twin.compare(state)
    shares = set()
    for number in range(STEPS):
        expected = twin.step(batch(number))
        state, metrics = step(state, batch(number))
        assert set(metrics) == set(expected)
        for metric, value in expected.items():
            np.testing.assert_allclose(
                metrics[metric], value, rtol=5e-4, atol=2e-5, err_msg=metric
            )
        shares.add(float(metrics["replayed"]) > 0)
        twin.compare(state)
        twin.read(state)
    # First none is replayed, then all are.
    assert shares == ({False, True} if twin.remembers else {False})
    assert twin.entered > 1 or not twin.remembers


def test_labels_and_tasks_change_nothing_but_what_is_stored_of_them():
    method = made("simsiam", "cla_r", "min_redundancy")
    step, states = interpreted.jit(method.step), []
    for other in (0, 1):
        state = begin(method).replace(task=jnp.int32(other))
        for number in range(5):
            incoming = batch(number)
            incoming["label"] = (incoming["label"] + other) % 3
            state, _ = step(state, incoming)
        memory = state.extra.memory
        items = {n: x for n, x in memory.items.items() if n not in ("label", "task")}
        states.append((state.params, state.stats, items))
    chex.assert_trees_all_equal(*states)


def test_drift_is_measured_and_training_stays_the_same():
    """Of stored rows of past tasks, which the measure alone asks for."""
    replay = core.Replay(capacity=M, policy="fifo", size=R, measure=("drift",))
    plain, ends = parts(replay=replay, eval_transform=lambda x: x / 255.0), []
    for measure in ((), ("drift",)):
        own = plain._replace(replay=replay._replace(measure=measure))
        options = taken("simsiam", "cla_r", OPTIONS)
        method = online_ssl.make(own, regulariser="cla_r", **options)
        state, step = begin(method), interpreted.jit(method.step)
        for number in range(4):
            state = state.replace(task=jnp.int32(number // 2))
            before = state
            state, metrics = step(state, batch(number))
        ends.append(state)
    assert method.plotted_metrics == ("drift",)
    past = np.flatnonzero(np.asarray(state.extra.memory.items["task"]) == 0)
    images = state.extra.memory.items["image"][past] / 255.0
    old, new = (
        twins.unit(np.float64(method.embed(s, images))) for s in (before, state)
    )
    moved = np.linalg.norm(old - new, axis=1).mean()
    np.testing.assert_allclose(metrics["drift"], moved, rtol=1e-3)
    chex.assert_trees_all_close(ends[0].params, ends[1].params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"base": "supcon"}, "method.base='supcon'"),
        ({"rows": "all", "regulariser": "cla_r"}, "rows='all'"),
        ({"remembers": False}, "remembers=False"),
        ({"remembers": False, "rows": "all", "regulariser": "cla_r"}, "remembers=F"),
        ({"rows": "all", "regulariser": "der"}, "rows='all'"),
        ({"remembers": False, "regulariser": "der"}, "regulariser='der'"),
        ({"remembers": False, "regulariser": "lump"}, "'lump'"),
    ],
)
def test_options_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        online_ssl.make(parts(), **({"regulariser": "cassle"} | changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"policy": "ring"}, "replay.policy='ring'"),
        ({"policy": "task_ring"}, "replay.policy='task_ring'"),
        ({"policy": "class_balanced"}, "replay.policy='class_balanced'"),
        ({"capacity": R}, f"replay.capacity={R}"),
        ({"augment": "replay"}, "replay.augment='replay'"),
        ({"measure": ("drift", "gradients")}, "replay.measure="),
        ({"statistics": "memory"}, "replay.statistics='memory'"),
    ],
)
def test_memories_are_refused_by_name(changes, said):
    replay = core.Replay(capacity=M, size=R)._replace(**changes)
    with pytest.raises(ValueError, match=said):
        online_ssl.make(parts(replay=replay))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"size": B + 1}, f"replay.size={B + 1}: .*'lump'.*config.batch_size={B}"),
        ({"policy": "min_redundancy"}, "feature, used.*'lump'.*reservoir"),
    ],
)
def test_memories_that_lump_cannot_mix_with_are_refused(changes, said):
    replay = core.Replay(capacity=M, size=B)._replace(**changes)
    with pytest.raises(ValueError, match=said):
        online_ssl.make(parts(replay=replay), regulariser="lump")
    online_ssl.make(parts(replay=replay._replace(size=B)), regulariser="der")


def test_batches_of_one_row_and_of_one_view_are_refused():
    with pytest.raises(ValueError, match="batch_size=1"):
        made("simsiam", "none", batch_size=1)
    method = made("simsiam", "none", augment=lambda key, x: twins.views_of(x)[:, :1])
    with pytest.raises(ValueError, match="augment.views=1"):
        jax.eval_shape(method.init, jax.random.key(0), batch(0))


def test_a_memory_over_devices_holds_what_came(tmp_path):
    """Each of 8 devices keeps, draws and moves rows of its own."""
    method = {"name": "online_ssl", "base": "simsiam", "regulariser": "cla_r"}
    method |= {"hidden_dim": 8, "output_dim": 4, "predictor_hidden_dim": 4}
    changes = {
        "method": method,
        "replay": {
            "capacity": 64,
            "size": 16,
            "policy": "min_redundancy",
            "sharded": True,
        },
        "optimizer.lr": 0.02,
        "epochs": 1,
        "devices": 8,
        "first_tasks": 1,
    }
    work = toy.job(tmp_path, tasks=1, **changes)
    train.run_tasks(work, tmp_path)
    memory = work.method.memory(toy.saved(work, tmp_path).state)
    assert np.asarray(memory.filled).all() and memory.seen.shape == (8,)
    numbers = np.sort(memory.items["number"])
    assert len(np.unique(numbers)) == 64 and numbers[-1] == int(memory.seen.sum()) - 1
    # The rows of each device are those of its place in each batch.
    owner = np.asarray(memory.items["number"]) % 48 // 6
    np.testing.assert_array_equal(owner, np.repeat(np.arange(8), 8))
    lengths = np.linalg.norm(memory.items["feature"], axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    assert np.asarray(memory.items["used"]).any()


def test_a_set_without_labels_has_the_memory_of_one_class(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "set.npz", train_x=images)
    method = {"name": "online_ssl", "base": "simsiam", "regulariser": "cla_r"}
    method |= {"hidden_dim": 8, "output_dim": 4, "predictor_hidden_dim": 4}
    work = run_directories.untried(
        tmp_path / "run",
        data={"name": "npz", "path": str(tmp_path / "set.npz")},
        scenario={"name": "growth", "evaluation": "none"},
        method=method,
        replay={"per_class": 60},
    )
    state, _ = job.shapes(work.method, work.data)
    assert work.method.memory(state).filled.shape == (60,)


def test_rows_are_replayed_once_more_are_stored_than_a_draw_has():
    def augment(key, images):
        return jnp.repeat(images[:, None].astype(jnp.float32), 2, axis=1)

    rows = {"image": jnp.arange(1, 5, dtype=jnp.uint8).reshape(4, 1, 1, 1)}
    (keys,) = stream.split_keys(jax.random.key(0), 1)
    setup = types.SimpleNamespace(
        size=2,
        parts=types.SimpleNamespace(augment=augment),
        strategy=records.Strategy(),
    )
    empty = buffer.create(jax.tree.map(lambda x: x[0], rows), 4)
    incoming = {"image": jnp.full((3, 1, 1, 1), 9, jnp.uint8)}
    for count in range(5):
        slots = jnp.where(jnp.arange(4) < count, jnp.arange(4), 4)
        memory = buffer.write(empty, slots, rows)
        reading = records.Reading(augment(None, incoming["image"]))
        found = stream.add_rows(setup, memory, keys, reading)
        assert bool(found.active) == (count > 2)
        pixels = found.views[:, 0, 0, 0, 0]  # replayed rows stand before the others
        assert (pixels[2:] == 9).all() and bool((pixels[:2] < 9).all()) == (count > 2)


@pytest.mark.parametrize("beside", [2, 4])
def test_replayed_rows_and_new_ones_of_another_number_replace_the_oldest_keys(beside):
    base = bases.make_base({"name": "mocov2plus", "queue_size": 8})
    setup, angles = types.SimpleNamespace(beside=beside), np.float32(np.arange(18) / 12)
    reading = records.Reading(None, active=True)

    def fill(keys):
        queue, banks = base.init_state(jax.random.key(0), 2), []
        for rows in jnp.split(keys, 3):
            x = records.Features(rows, None, k=rows)
            for group, active, aligned in stream.group_rows(setup, x, reading):
                queue = base.update(queue, group, active=active, aligned=aligned)
            banks.append(queue.rows)
        return banks

    keys = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None].repeat(2, 1)
    for end, bank in zip((12, 18), interpreted.jit(fill)(keys)[1:], strict=True):
        found = np.sort(np.arctan2(bank[..., 1], bank[..., 0]))
        np.testing.assert_allclose(found, [angles[end - 8 : end]] * 2, atol=1e-6)
