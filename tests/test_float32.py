"""Float32 on inputs that are ill-conditioned, but ordinary: references in float64.

A test in float64 does not see what float32 rounds away. Each table has a row for each
closed form: rules on features, solves, running moments, measures and losses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from helpers import frozen_twins, twins
from jaxcl import core, metrics
from jaxcl.evals import collapse, uniformity
from jaxcl.index import drift, maps
from jaxcl.losses import (
    contrastive,
    distill,
    incremental,
    noncontrastive,
    prototype,
    replay,
    streaming,
)
from jaxcl.losses import (
    teacher as teacher_lib,
)
from jaxcl.memory import coreset, duel, herding, quadratic, shapley
from jaxcl.methods import (
    acil,
    fecam,
    frozen,
    linear_head,
    ncm,
    ranpac,
    slda,
    stored_knn,
)
from jaxcl.nets import layers

DIM, CLASSES, COUNT, BATCH = 24, 5, 300, 60
WIDTH = 64  # random projections
KEY = jax.random.key(3)


def rotated(rows, seed=1):
    """Rows whose directions are no axes."""
    noise = np.random.default_rng(seed).normal(size=(rows.shape[1],) * 2)
    return rows @ np.linalg.qr(noise)[0]


def steep(power, largest=10.0):
    """Variances i^-power; classes differ as much in every whitened direction."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, COUNT)
    centres = 1.5 * rng.normal(size=(CLASSES, DIM)) / np.sqrt(DIM) * 2
    rows = centres[label] + rng.normal(size=(COUNT, DIM))
    return rotated(
        rows * np.sqrt(largest) * np.arange(1, DIM + 1) ** (-power / 2)
    ), label


def scaled(size):
    """Rectified features of a root mean square."""
    rows, label = steep(0.5)
    rows = np.maximum(rows, 0)
    return rows * size / np.sqrt((rows**2).mean()), label


def far():
    """A mean of 100 deviations."""
    rows, label = steep(0.5, 1.0)
    return rows + 100, label


def rare(copies):
    """Class 4 has equal rows alone, class 3 has none, and class 2 has two rows."""
    rows, label = scaled(1.0)
    label = np.where(label > 1, 0, label)
    rows, label = rows.copy(), label.copy()
    rows[7 : 7 + copies], label[7 : 7 + copies] = rows[7] + 0.5, 4
    label[[20, 90]] = 2
    return rows, label


def few():
    """Most rows are equal to one of four."""
    rows, label = scaled(1.0)
    place = np.arange(COUNT) % 4
    return rows[place], label[place]


def blank():
    """Rows of zeros, and a feature that is always 0."""
    rows, label = scaled(1.0)
    rows = rows.copy()
    rows[::10], rows[:, 2] = 0, 0
    return rows, label


KINDS = {
    "i^-1.5": functools.partial(steep, 1.5),
    "i^-2": functools.partial(steep, 2.0),
    "i^-4": functools.partial(steep, 4.0, 1e3),
    "rms 16": functools.partial(scaled, 16.0),
    "rms 100": functools.partial(scaled, 100.0),
    "rms 0.001": functools.partial(scaled, 1e-3),
    "far": far,
    "one row": functools.partial(rare, 1),
    "two equal rows": functools.partial(rare, 2),
    "few rows": few,
    "zeros": blank,
}
twin = frozen_twins
RULES = {
    "ncm": (ncm.make_rule("cosine"), twin.ncm),
    "ncm-euclidean": (ncm.make_rule("euclidean"), twin.ncm_euclidean),
    "slda": (slda.make_rule(1e-4), functools.partial(twin.slda, shrinkage=1e-4)),
    "ranpac": (ranpac.make_rule(WIDTH), twin.ranpac_scores),
    "acil": (acil.make_rule(WIDTH, 0.1), twin.acil),
    "fecam": (fecam.make_rule(0.5, 1.0, 1.0, False), twin.fecam),
    "fecam-shared": (
        fecam.make_rule(0.5, 1.0, 1.0, True),
        functools.partial(twin.fecam, shared=True),
    ),
    "fecam-code": (
        fecam.make_rule(0.5, 1.0, 1.0, False, "code"),
        functools.partial(twin.fecam, form="code"),
    ),
    "stored_knn": (
        stored_knn.make_rule(CLASSES, COUNT, 5, 0.01),
        functools.partial(twin.stored_knn, temperature=0.01),
    ),
    "linear_head": (
        linear_head.make_rule(0, 2.0, 3),
        functools.partial(twin.linear_head, batch=BATCH),
    ),
}
PROGRAMS = {
    name: (
        jax.jit(rule.add),
        jax.jit(lambda state, x, r=rule: r.scores(r.fit(state), x)),
    )
    for name, (rule, _) in RULES.items()
}


def learn(name, features, label):
    state = RULES[name][0].start(KEY, DIM, CLASSES)
    for start in range(0, len(label), BATCH):
        index = np.arange(start, start + BATCH, dtype=np.int32)
        rows = features[index], label[index], index, np.ones(BATCH, bool)
        state = PROGRAMS[name][0](state, frozen.Rows(*rows))
    return state


# Features of a mean of 100 deviations: predictions are right, scores are not.
DIGITS_LOST = {("acil", "far"), ("ranpac", "far"), ("stored_knn", "far")}
# Unit rows far from 0 have no variance along their mean, and equal factors of shrinkage
# leave the matrix singular there: float64 is as wrong.
WITHOUT_VALUE = {("fecam", "far"), ("fecam-shared", "far")}


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in RULES
        for kind in KINDS
        if (name, kind) not in WITHOUT_VALUE
    ],
)
def test_a_rule_classifies_as_in_float64(name, kind):
    features, label = KINDS[kind]()
    features, label = features.astype(np.float32), label.astype(np.int32)
    state = learn(name, features, label)
    found = np.asarray(PROGRAMS[name][1](state, features[:BATCH]))
    x = features.astype(float)
    want = RULES[name][1](x, label, x[:BATCH], state, CLASSES)
    assert (found.argmax(1) == want.argmax(1)).mean() > 0.97
    if (name, kind) in DIGITS_LOST:
        return
    exists = np.isfinite(want)
    assert (np.isfinite(found) == exists).all()
    gaps = np.abs(found[exists] - want[exists])
    assert gaps.max() < 5e-3 * np.ptp(want[exists]) + 1e-5 * np.abs(want[exists]).max()


def test_counts_go_beyond_those_that_float32_can_add_one_to():
    rows = frozen.Rows(
        jnp.ones((1, DIM)), jnp.zeros(1, jnp.int32), jnp.zeros(1), jnp.ones(1, bool)
    )
    for name, (rule, _) in RULES.items():
        if name == "stored_knn":
            continue
        state = rule.start(KEY, DIM, CLASSES)
        full = jax.tree.map(
            lambda x: jnp.full_like(x, 2**24) if x.dtype == jnp.int32 else x, state
        )
        counts = jax.eval_shape(rule.add, state, rows)
        after = PROGRAMS[name][0](full, rows)
        moved = [
            int(new.max()) - 2**24
            for new, old in zip(*map(jax.tree.leaves, (after, counts)), strict=True)
            if old.dtype == jnp.int32
        ]
        assert moved and set(moved) == {1}, name


def test_shares_of_many_rows():
    label = np.arange(300_000) % 7 % 5
    scores = np.tile(np.float32([0, 1, 0, 0, 1]), (len(label), 1))
    found = metrics.class_entropy(label, CLASSES), metrics.accuracy(scores, label)
    share = np.bincount(label) / len(label)
    want = -np.sum(share * np.log(share)), np.mean(label == 1)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_moments_of_many_rows_far_from_zero():
    """A hundred thousand rows, one after another within batches."""
    rng = np.random.default_rng(0)
    x = (100 + rng.normal(size=(100_000, 3))).astype(np.float32)
    label = (np.arange(len(x)) % 2).astype(np.int32)
    batches = x.reshape(-1, 100, 3), label.reshape(-1, 100)

    def add(carry, batch):
        rows = frozen.Rows(*batch, jnp.zeros(100, jnp.int32), jnp.ones(100, bool))
        means, gaps, before = frozen.move_means(carry[0], rows)
        squares = carry[1] + jnp.sum(gaps**2 * (before / (before + 1))[:, None], 0)
        return (means, squares, linear_head.observe(carry[2], rows)), None

    zeros = jnp.zeros(3)
    start = frozen.start_means(2, 3), zeros, linear_head.Moments(0, zeros, zeros)
    (means, squares, moments), _ = jax.jit(lambda b: jax.lax.scan(add, start, b))(
        batches
    )
    exact = x.astype(float)
    parts = exact[::2], exact[1::2]
    np.testing.assert_allclose(means.mean, [p.mean(0) for p in parts], atol=2e-4)
    within = sum(len(p) * p.var(0) for p in parts)
    np.testing.assert_allclose(squares, within, rtol=1e-4)
    np.testing.assert_allclose(moments.mean, exact.mean(0), atol=2e-4)
    np.testing.assert_allclose(moments.scatter / len(x), exact.var(0), rtol=1e-4)


def affine_twin(before, after, rank=6, ridge=1e-3):
    """Ridge regression of unit rows, projected on its leading outputs."""
    x, y = twins.unit(after), twins.unit(before)
    means = x.mean(0), y.mean(0)
    x, y = x - means[0], y - means[1]
    inner = x.T @ x
    full = np.linalg.solve(
        inner + ridge * np.trace(inner) / len(inner) * np.eye(len(inner)), x.T @ y
    )
    kept = np.linalg.eigh(full.T @ (x.T @ y))[1][:, -rank:]
    return twins.unit(x @ full @ kept @ kept.T + means[1])


def cka_twin(before, after):
    a, b = (twins.unit(x) - twins.unit(x).mean(0) for x in (before, after))
    inner = [np.sum((x.T @ y) ** 2) for x, y in ((a, b), (a, a), (b, b))]
    return inner[0] / np.sqrt(inner[1] * inner[2])


def rotation_twin(before, after):
    left, _, right = np.linalg.svd(twins.unit(after).T @ twins.unit(before))
    return np.mean(np.sum(twins.unit(after) @ left @ right * twins.unit(before), 1))


def variance_twin(features, labels):
    rows, found = twins.unit(features), []
    for c in np.unique(labels):
        mine = rows[labels == c]
        found.append(np.mean((1 - mine @ twins.unit(mine.mean(0))) ** 2))
    return np.mean(found)


def similarity_twin(features, labels):
    rows = twins.unit(features)
    means = twins.unit([rows[labels == c].mean(0) for c in np.unique(labels)])
    return (np.sum(means @ means.T) - len(means)) / (len(means) * (len(means) - 1))


def rankme_twin(x):
    values = np.linalg.svd(x, compute_uv=False)
    p = values / values.sum() + 1e-7
    return np.exp(-np.sum(p * np.log(p)))


def spread_twin(x):
    return twins.unit(x).std(0).mean() * np.sqrt(x.shape[1])


def uniformity_twin(x):
    unit = twins.unit(x)
    squares = ((unit[:, None] - unit) ** 2).sum(-1)[np.triu_indices(len(x), 1)]
    return np.log(np.exp(-2 * squares).mean())


def herding_twin(x, k):
    chosen = []
    for j in range(1, k + 1):
        total = x[chosen].sum(0)
        gaps = np.linalg.norm(x.mean(0) - (total + x) / j, axis=1)
        gaps[chosen] = np.inf
        chosen.append(int(np.argmin(gaps)))
    return chosen


def worth_twin(x, y, queries, labels, neighbours=3):
    """Jia et al., Theorem 1, from the farthest row on."""
    found = np.zeros((len(queries), len(x)))
    for e, (query, label) in enumerate(zip(queries, labels, strict=True)):
        order = np.argsort(((x - query) ** 2).sum(1), kind="stable")
        agrees = (y[order] == label) * 1.0
        value = agrees[-1] / len(x)
        found[e, order[-1]] = value
        for m in range(len(x) - 1, 0, -1):
            value += (agrees[m - 1] - agrees[m]) * min(neighbours, m) / neighbours / m
            found[e, order[m - 1]] = value
    return found


def tight(noise):
    """Rows that are nearly their class's mean."""
    rng = np.random.default_rng(2)
    label = rng.integers(0, CLASSES, COUNT)
    return rng.normal(size=(CLASSES, DIM))[label] + noise * rng.normal(
        size=(COUNT, DIM)
    ), label


CLOUDS = {
    name: KINDS[name]
    for name in ("i^-1.5", "i^-4", "rms 100", "rms 0.001", "far", "few rows", "zeros")
} | {"tight": functools.partial(tight, 1e-3), "one point": lambda: collapsed(1e-4)}


def collapsed(noise):
    rows, label = tight(0.0)
    noise = noise * np.random.default_rng(4).normal(size=rows.shape)
    return rows[:1] + noise, label


def moved(rows):
    """New embeddings: turned, squeezed and a little noise."""
    noise = np.random.default_rng(5).normal(size=rows.shape) * rows.std(0).mean()
    return rotated(rows, 6) * 3 + 0.1 * noise


def normalise(rows):
    """Normalise by the batch, before the running statistics have met any."""
    net = layers.BatchNorm()
    variables = net.init(KEY, rows, train=False)
    return net.apply(variables, rows, train=True, mutable=["batch_stats"])[0]


# name -> function of rows f32, labels and rows after; the twin; the tolerance, relative
# to the value or to this least one
MEASURES = {
    "adapter": (
        lambda x, y, z: maps.map_features(maps.fit_affine(z, x, rank=6, ridge=1e-3), z),
        lambda x, y, z: affine_twin(x, z),
        1e-3,
        0,
    ),
    "rotation": (
        lambda x, y, z: drift.mean_cosine(x, z @ drift.find_rotation(x, z)),
        lambda x, y, z: rotation_twin(x, z),
        1e-3,
        0,
    ),
    "cka": (
        lambda x, y, z: drift.linear_cka(x, z),
        lambda x, y, z: cka_twin(x, z),
        1e-3,
        0,
    ),
    "intra": (
        lambda x, y, z: metrics.intra_class_variance(x, y, CLASSES),
        lambda x, y, z: variance_twin(x, y),
        2e-2,
        1e-12,
    ),
    "inter": (
        lambda x, y, z: metrics.inter_class_similarity(x, y, CLASSES),
        lambda x, y, z: similarity_twin(x, y),
        1e-4,
        0,
    ),
    "uniformity": (
        lambda x, y, z: uniformity.uniformity(x),
        lambda x, y, z: uniformity_twin(x),
        1e-3,
        1e-3,
    ),
    "alignment": (
        lambda x, y, z: uniformity.alignment(x, z),
        lambda x, y, z: ((twins.unit(x) - twins.unit(z)) ** 2).sum(1).mean(),
        1e-4,
        0,
    ),
    "rankme": (
        lambda x, y, z: collapse.rankme(x),
        lambda x, y, z: rankme_twin(x),
        1e-4,
        0,
    ),
    "embedding_std": (
        lambda x, y, z: collapse.embedding_std(x),
        lambda x, y, z: spread_twin(x),
        1e-6,
        0,
    ),
    "herding": (
        lambda x, y, z: x[herding.herding(x, 40)],
        lambda x, y, z: x[herding_twin(x, 40)],
        1e-6,
        0,
    ),
    "shapley": (
        lambda x, y, z: shapley.shapley_values(x[20:], y[20:], x[:20], y[:20]),
        lambda x, y, z: worth_twin(x[20:], y[20:], x[:20], y[:20]),
        1e-5,
        0,
    ),
    "batch norm": (
        lambda x, y, z: normalise(x),
        lambda x, y, z: (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5),
        5e-3,
        1.0,
    ),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_that_of_float64(name):
    measure, reference, tolerance, least = MEASURES[name]
    for kind, draw in CLOUDS.items():
        rows, label = draw()
        x, z = rows.astype(np.float32), moved(rows).astype(np.float32)
        found = np.asarray(measure(x, label, z), float)
        want = np.asarray(reference(x.astype(float), label, z.astype(float)))
        gap = np.abs(found - want).max()
        assert gap < tolerance * max(np.abs(want).max(), least), (kind, gap)


def gradients(kind, count=40):
    """Rows as gradients: spectra that are steep, equal rows, rows of zeros."""
    rows, label = KINDS[kind]()
    return rows[:count].astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_program_is_that_of_float64(kind):
    """|A^T u - b|^2 over u >= 0 by its matrix A A^T, as GEM and GCR need it."""
    rows = gradients(kind)
    matrix, linear = rows @ rows.T, -rows @ rows.sum(0) + rows @ rows[0] * 45
    found = np.asarray(quadratic.find_minimum(matrix, linear), float)
    exact = rows.astype(float)
    aim = exact.sum(0) - 45 * exact[0]
    left = np.linalg.norm(exact.T @ found - aim)
    best = optimize.nnls(exact.T, aim, maxiter=2000)[1]
    assert (found >= 0).all() and left <= best + 1e-2 * np.linalg.norm(aim), (
        left,
        best,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_coreset_matches_the_gradient_as_in_float64(kind):
    rows = gradients(kind)
    rows = rows / np.abs(rows).max()
    with jax.enable_x64(True):
        want = choose(rows.astype(float))
    found = choose(rows)
    assert (found > 0).sum() == (want > 0).sum() == 8

    def miss(weights):
        exact = rows.astype(float)
        return np.linalg.norm(exact.T @ weights - exact.sum(0)) ** 2

    total = np.linalg.norm(rows.sum(0)) ** 2
    assert miss(found) <= miss(want) + 1e-2 * total


def choose(rows):
    """Choose 8 of the rows."""
    member, budget = np.ones(len(rows), bool), np.int32(8)
    return np.asarray(coreset.choose_coreset(KEY, rows, member, budget, size=8), float)


LABEL = jnp.array([0, 1, 0, 2, 1, 0, 2, 1])
OLD = jnp.array([True, True, False, False, False])


def losses(v):
    """Every kind of loss, of views v[0] to v[5] f[8,D], and logits made of them."""
    z1, z2, p1, p2, f1, f2 = v
    layer, queue = v[0, :5] + 0.5 * v[1, :5], jnp.stack([f1[:7], f2[:7]])
    logits, teacher = 10 * noncontrastive.prototype_cosines(v[:2], layer)
    long = logits * 100
    pair = jnp.stack([logits, teacher], axis=1)
    targets = noncontrastive.centred(pair, pair.mean((0, 1)), temperature=0.04)
    balanced = noncontrastive.sinkhorn(logits, temperature=0.05)
    return {
        "nt_xent": contrastive.nt_xent(z1, z2),
        "info_nce": contrastive.info_nce(z1, z2, f1),
        "cold": contrastive.nt_xent(z1, z2, temperature=0.01),
        "sup_con": contrastive.sup_con(z1, LABEL),
        "m_hml": contrastive.m_hml(z1, z2, f1),
        "diet": contrastive.diet(long[:, None], LABEL % 5),
        "barlow": noncontrastive.barlow_twins(z1, z2),
        "vicreg": noncontrastive.vicreg(z1, z2),
        "lejepa": noncontrastive.lejepa(jnp.stack([z1, z2], 1), jnp.eye(6)),
        "byol": noncontrastive.byol(p1, f1),
        "simsiam": noncontrastive.simsiam(p1, p2, z1, z2),
        "dino": noncontrastive.dino(pair, targets),
        "swav": noncontrastive.dino(pair, jnp.stack([balanced] * 2, axis=1)),
        "ibot": noncontrastive.ibot(pair, targets, LABEL % 2),
        "cassle": distill.cassle_contrastive(p1, p2, f1, f2),
        "cassle_barlow": distill.cassle_barlow(p1, p2, f1, f2),
        "cassle_prototypes": distill.cassle_prototypes(p1, p2, f1, f2, layer, layer),
        "pnr_simclr": distill.pnr_simclr(z1, z2, p1, p2, f1, f2),
        "pnr_moco": distill.pnr_moco(z1, z2, f2, f1, p1, p2, f1, f2, queue, queue),
        "pseudo_negative": distill.pseudo_negative(p1, p2, f1, f2, distance="cosine"),
        "less_forget": distill.less_forget(p1, p2, f1, f2),
        "relative_squared": distill.relative_squared(z1[:, None], f1[:, None]),
        "nce_one": incremental.nce_one(z1, z2, f1),
        "nce_two": incremental.nce_two(z1, z2, f1, f2, growth=0.5),
        "change_ratio": jnp.mean(incremental.change_ratio(z1, z2, f1, f2)),
        "ird": prototype.ird(z1, z2),
        "proposal": jnp.max(prototype.proposal(z1, LABEL, layer, jnp.ones(5, bool))),
        "sample_nce": prototype.sample_nce(z1, LABEL, layer, jnp.full(8, 0.3), OLD),
        "prd": prototype.prd(z1, z2, layer, layer, ~OLD),
        "cross_entropy": replay.cross_entropy(long, LABEL % 5),
        "er_ace": replay.er_ace(long, LABEL, logits, LABEL, jnp.ones(5, bool)),
        "triplet": replay.triplet(z1, z2, f1),
        "aml": replay.aml_sup_con(z1, z2, f1, LABEL, (LABEL + 1) % 3),
        "der": replay.der(logits, teacher),
        "icarl": replay.icarl(long, LABEL, teacher, OLD),
        "streaming": jnp.mean(streaming.logsumexp(z1, f1)),
        "duel": jnp.mean(duel.distinctiveness(*map(core.l2_normalize, (z1, f1)))),
        "koleo": noncontrastive.koleo(z1),
        **{
            name: getattr(teacher_lib, name)(p1, f1)
            for name in ("cosine", "smooth_l1", "rkd_distance", "rkd_angle")
        },
    }


def cloud(change):
    """Six views of eight rows, as float32 holds them."""
    rows = change(np.random.default_rng(7).normal(size=(6, 8, 6)))
    return np.asarray(rows, np.float32)


def repeat_rows(v):
    v = v.copy()
    v[:, 1] = v[:, 0]
    return v


def blank_row(v):
    v = v.copy()
    v[:, 3] = 0
    return v


VIEWS = {
    "long": lambda v: 100 * v,
    "tiny": lambda v: 1e-4 * v,
    "near one another": lambda v: 1 + 1e-2 * v,
    "equal rows": repeat_rows,
    "a row of zeros": blank_row,
    "steep": lambda v: v * np.arange(1, 7) ** -3.0,
    "views alike": lambda v: v[:1] + 1e-3 * v,
}
# Their logits are 100, where float32 has steps of 7.6e-6; the losses are 2e-3.
COARSE = {("dino", "views alike"), ("swav", "views alike")}
# Distances below rounding, which both cut off.
UNDEFINED = {("koleo", "equal rows"), ("koleo", "a row of zeros")}


@pytest.fixture(scope="module")
def both_losses():
    """Compile all losses once for each precision."""
    return jax.jit(jax.vmap(losses))


def test_losses_are_those_of_float64(both_losses):
    """Their equations are tested in float64 by twins; here the precision alone."""
    views = np.stack([cloud(change) for change in VIEWS.values()])
    found = jax.tree.map(np.asarray, both_losses(views))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, both_losses(views.astype(float)))
    wrong = {}
    for name, values in found.items():
        for i, kind in enumerate(VIEWS):
            least = 3e-2 if (name, kind) in COARSE else 1e-2
            gap = abs(values[i] - want[name][i]) / max(abs(want[name][i]), least)
            if (name, kind) not in UNDEFINED and not gap < 1e-4:
                wrong[name, kind] = values[i], want[name][i]
    assert not wrong
