"""Losses in float64, spelt out row by row and element by element from the equations.

They share no code with the library. Tests of losses compare values and gradients with
them; `two_view_losses` makes the losses of whole methods of them.
"""

import itertools
import math

import numpy as np

from helpers import twins


def others(rows, i):
    return [row for j, row in enumerate(rows) if j != i]


def nt_xent(z1, z2, temperature=0.2):
    rows, partner = [*z1, *z2], [*z2, *z1]
    n = len(rows)
    return sum(
        twins.nce(rows[i], partner[i], others(rows, i), temperature) / n
        for i in range(n)
    )


def info_nce(
    a, p, n=(), of=None, temperature=0.2, positive_in_denominator=True, there=None
):
    """Negatives: the rows of n that are there, and positives of other examples."""
    n = [row for i, row in enumerate(n) if there is None or there[i]]
    total = 0.0
    for i in range(len(a)):
        batch = [] if of is None else [p[j] for j in range(len(p)) if of[j] != of[i]]
        columns = [*n, *batch] + [p[i]] * positive_in_denominator
        total += twins.nce(a[i], p[i], columns, temperature)
    return total / len(a)


def m_hml(a, p, memory, weight=1.0, temperature=0.5):
    """DUEL, Eq. 5, with q = exp((cos - 1) / tau)."""

    def q(x, y):
        return math.exp((twins.cosine(x, y) - 1) / temperature)

    hebbian = -sum(math.log(q(*pair)) for pair in zip(a, p, strict=True)) / len(a)
    means = [sum(q(x, m) for m in memory) / len(memory) for x in a]
    return weight * hebbian + sum(map(math.log, means)) / len(a)


def sup_con(z, labels, temperature=0.1, mask=None):
    total = 0.0
    for i in range(len(z)):
        same = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
        if same and (mask is None or mask[i]):
            terms = [twins.nce(z[i], z[j], others(z, i), temperature) for j in same]
            total += sum(terms) / len(same)
    return total / len(z)


def cassle(p1, p2, f1, f2, temperature=0.2, form="code"):
    p, f = [*p1, *p2], [*f1, *f2]
    n = len(p)
    if form == "paper":
        return (
            sum(twins.nce(p[i], f[i], others(f, i), temperature) for i in range(n)) / n
        )
    forward = sum(twins.nce(p[i], f[i], f, temperature) for i in range(n)) / n
    backward = sum(twins.nce(f[i], p[i], p, temperature) for i in range(n)) / n
    return (forward + backward) / 2


def pnr_simclr(z1, z2, p1, p2, f1, f2, temperature=0.2, pn1=True, pn2=True):
    """Eq. 2 + 3 for both orders of the views, halved."""
    total, tau = 0.0, temperature
    n = len(z1)
    for za, zb, pa, fa, fb in ((z1, z2, p1, f1, f2), (z2, z1, p2, f2, f1)):
        for i in range(n):
            current = [*others(za, i), *zb]
            frozen = [*others(fa, i), *fb]
            total += twins.nce(za[i], zb[i], current + (frozen if pn1 else []), tau)
            total += twins.nce(pa[i], fa[i], frozen + (current if pn2 else []), tau)
    return total / (2 * n)


def pnr_moco(
    *arrays, temperature=0.2, distill_temperature=0.2, form="code", pn1=True, pn2=True
):
    q1, q2, k1, k2, p1, p2, f1, f2, keys, frozen = arrays
    total = 0.0
    n = len(q1)
    for q, k, p, f, bank in ((q1, k2, p1, f1, 1), (q2, k1, p2, f2, 0)):
        for i in range(n):
            columns = [k[i], *keys[bank], *(frozen[bank] if pn1 else [])]
            total += twins.nce(q[i], k[i], columns, temperature)
            columns = [*frozen[bank], *(keys[bank] if pn2 else [])]
            if form == "code":
                columns.append(f[i])
            total += twins.nce(p[i], f[i], columns, distill_temperature)
    return total / (2 * n)


def mean_cos(a, b):
    return sum(twins.cosine(x, y) for x, y in zip(a, b, strict=True)) / len(a)


def squared(a, b):
    """Sum over rows and features of (a - b)^2."""
    return sum((a[i][d] - b[i][d]) ** 2 for i, d in np.ndindex(a.shape))


def deviations(z, d):
    mean = sum(row[d] for row in z) / len(z)
    return [row[d] - mean for row in z]


def barlow(z1, z2, scale=0.1, weight=5e-3):
    n, features = z1.shape

    def standard(z, d):
        parts = deviations(z, d)
        variance = sum(x * x for x in parts) / n
        return [x / math.sqrt(variance + 1e-5) for x in parts]

    total = 0.0
    for d in range(features):
        for e in range(features):
            pairs = zip(standard(z1, d), standard(z2, e), strict=True)
            c = sum(x * y for x, y in pairs) / n
            total += (c - 1) ** 2 if d == e else weight * c**2
    return scale * total


def byol(p, t):
    return 2 - 2 * mean_cos(p, t)


def mse(a, b):
    return squared(a, b) / a.size


def epps_pulley(x, form="code"):
    """One column: the trapezoids one by one, over the whole range of t."""
    end, steps = (3, 32) if form == "code" else (5, 16)
    n = len(x)

    def integrand(t):
        mean = sum(complex(math.cos(t * v), math.sin(t * v)) for v in x) / n
        gap = mean - math.exp(-t * t / 2)
        return abs(gap) ** 2 * math.exp(-t * t / 2)

    values = [integrand(-end + 2 * end * j / steps) for j in range(steps + 1)]
    pairs = itertools.pairwise(values)
    return n * sum(2 * end / steps * (low + high) / 2 for low, high in pairs)


def lejepa(z, slices, weight=0.05, form="code", centre=2):
    n, views, features = z.shape
    normal = apart = 0.0
    for v in range(views):
        for a in slices:
            column = [float(row @ a) for row in z[:, v]]
            normal += epps_pulley(column, form) / len(slices) / views
        for i in range(n):
            mean = sum(z[i, w] for w in range(centre)) / centre
            apart += np.sum((mean - z[i, v]) ** 2) / n / views
    if form == "code":
        apart /= features
    return weight * normal + (1 - weight) * apart


def softmax(logits):
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def cross_entropy(q, p):
    return -sum(x * math.log(y) for x, y in zip(q, p, strict=True))


def dino(logits, targets, temperature=0.1):
    n, views, _ = logits.shape
    terms = [
        cross_entropy(targets[i, g], softmax(logits[i, v] / temperature))
        for i in range(n)
        for g in range(targets.shape[1])
        for v in range(views)
        if v != g
    ]
    return sum(terms) / len(terms)


def ibot(logits, targets, hides=(1, 0, 1), temperature=0.1):
    """The mean over all views; those that hide no patch have the loss 0."""
    p = np.exp(logits / temperature)
    p = p / p.sum(axis=-1, keepdims=True)
    terms = [-np.sum(targets[v] * np.log(p[v]), axis=-1).mean() for v in range(len(p))]
    return sum(h * term for h, term in zip(hides, terms, strict=True)) / len(p)


def koleo(h):
    unit = twins.unit(h)
    apart = [
        min(np.linalg.norm(a - b) for j, b in enumerate(unit) if j != i)
        for i, a in enumerate(unit)
    ]
    return -np.mean(np.log(apart))


def cassle_prototypes(p1, p2, f1, f2, learnt, frozen, temperature=0.1):
    terms = []
    for p, f in [*zip(p1, f1, strict=True), *zip(p2, f2, strict=True)]:
        predicted, target = (
            softmax([twins.cosine(x, row) / temperature for row in prototypes])
            for x, prototypes in ((p, learnt), (f, frozen))
        )
        terms.append(cross_entropy(target, predicted))
    return sum(terms) / len(terms)


def vicreg(z1, z2, invariance=25.0, variance=25.0, covariance=1.0):
    n, features = z1.shape
    total = invariance * mse(z1, z2)
    for z in (z1, z2):
        for d in range(features):
            for e in range(features):
                pairs = zip(deviations(z, d), deviations(z, e), strict=True)
                c = sum(x * y for x, y in pairs) / (n - 1)
                if d == e:
                    hinge = max(0.0, 1 - math.sqrt(c + 1e-4))
                    total += variance * hinge / features
                else:
                    total += covariance * c**2 / features
    return total


def pnr_supcon(*arrays, labels, tau=0.1, tau_d=0.2, pn1=True, pn2=True, others=False):
    z1, z2, p1, p2, f1, f2 = arrays
    z, p, f, label = [*z1, *z2], [*p1, *p2], [*f1, *f2], [*labels, *labels]
    n = len(z)
    total = 0.0
    for i in range(n):
        current = [z[j] for j in range(n) if j != i]
        frozen = [f[j] for j in range(n) if j != i]
        same = [z[j] for j in range(n) if j != i and label[j] == label[i]]
        apart = [
            j for j in range(n) if j != i and not (others and label[j] == label[i])
        ]
        columns = current + ([f[j] for j in apart] if pn1 else [])
        total += sum(twins.nce(z[i], row, columns, tau) for row in same) / len(same)
        columns = frozen + ([z[j] for j in apart] if pn2 else [])
        total += twins.nce(p[i], f[i], columns, tau_d)
    return total / n


def relation(now, past):
    """-sum q log p of two lists of logits."""
    now, past = (np.asarray(x) - np.max(x) for x in (now, past))
    q = np.exp(past) / np.exp(past).sum()
    return -np.sum(q * (now - np.log(np.exp(now).sum())))


def sample_nce(s, g, labels, rows=None, scope="old", old=()):
    """CCLIS, Eq. 10, class by class; `s`: logits [C,N], `g`: the chances of rows."""
    rows = range(len(labels)) if rows is None else rows

    def partition(i):
        total = 0.0
        for m in range(len(s)):
            pool = [k for k in rows if labels[k] == m]
            estimated = {
                "old": i in old and m in old and m != i,
                "all_negatives": m != i,
                "all": True,
                "none": False,
            }[scope]
            for k in pool:
                term = math.exp(s[i, k])
                total += term / (g[k] * len(pool)) if estimated else term
        return total

    return np.mean([math.log(partition(labels[j])) - s[labels[j], j] for j in rows])


def prd(s, teacher, classes, rows=None, past=0.1, now=0.2):
    """CCLIS, Eq. 13, of similarities [C,N]; the mean over rows."""
    rows, classes = range(s.shape[1]) if rows is None else rows, list(classes)
    each = [relation(s[classes, j] / now, teacher[classes, j] / past) for j in rows]
    return np.mean(each)


def ird(z, teacher, rows=None, past=0.01, now=0.2):
    """Co2L: the mean over rows of the relations of their cosines to the others."""
    rows = list(range(len(z)) if rows is None else rows)
    s, before = (twins.unit(x[rows]) @ twins.unit(x[rows]).T for x in (z, teacher))
    pairs = [(others(s[i], i), others(before[i], i)) for i in range(len(rows))]
    return np.mean([relation(np.divide(a, now), np.divide(b, past)) for a, b in pairs])


def proposal(s, labels, seen, rows):
    """CCLIS, Eq. 12 one entry at a time, f64[N]; then what it leaves out."""
    g, left = np.zeros(len(labels)), np.zeros(len(labels))
    for i in seen:
        top = max(s[i, k] for k in rows)
        total = sum(np.exp(s[i, k] - top) for k in rows)
        for j in rows:
            into = left if labels[j] == i else g
            into[j] += np.exp(s[i, j] - top) / total / (len(seen) - 1)
    return g, left


def shares_by_class(g, labels, rows):
    """Divide each row's number by the sum of its class; other rows have 0."""
    sums = np.bincount(np.asarray(labels)[rows], np.asarray(g)[rows])
    return np.array([g[j] / sums[labels[j]] if j in rows else 0 for j in range(len(g))])


def labelled_cross_entropy(logits, labels, classes=None, rows=None):
    """Mean over rows; `classes`: a list for all of them, or a set or list for each."""
    labels, values = np.asarray(labels), []
    for i in range(len(logits)) if rows is None else rows:
        chosen = range(logits.shape[1]) if classes is None else classes
        chosen = chosen[i] if isinstance(chosen[0], list | set) else chosen
        if chosen:
            z = logits[i, [*chosen]] - logits[i, labels[i]]
            values.append(z.max() + np.log(np.exp(z - z.max()).sum()))
    return np.mean(values) if values else 0.0


def sigma(z):
    return 1 / (1 + np.exp(-z))


def icarl(logits, teacher, labels, old=(), classes=range(5), rows=None, summed=False):
    """Binary cross-entropies; of the classes `old` the teacher has the targets."""
    per_row = []
    for i in range(len(logits)) if rows is None else rows:
        terms = []
        for c in classes:
            t = sigma(teacher[i, c]) if c in old else float(c == labels[i])
            q = sigma(logits[i, c])
            terms.append(-t * math.log(q) - (1 - t) * math.log(1 - q))
        per_row.append(np.sum(terms) if summed else np.mean(terms))
    return np.mean(per_row)


def task_distillation(logits, teacher, groups, rows=None, t=2.0):
    """Mean over rows of the sum over groups of KL(teacher || now) within each."""
    per_row = []
    for i in range(len(logits)) if rows is None else rows:
        total = 0.0
        for group in groups:
            q, p = (np.exp(z[i, group] / t) for z in (teacher, logits))
            q, p = q / q.sum(), p / p.sum()
            total += np.sum(q * np.log(q / p))
        per_row.append(total)
    return np.mean(per_row)


def huber(x, delta):
    return x * x / 2 if abs(x) <= delta else delta * (abs(x) - delta / 2)


def teacher_cosine(p, t):
    return sum(1 - twins.cosine(a, b) for a, b in zip(p, t, strict=True)) / len(p)


def teacher_smooth_l1(p, t, beta=2.0):
    """Wei et al.; a row that does not vary stays 0."""
    total = 0.0
    for a, b in zip(p, t, strict=True):
        b = (b - np.mean(b)) / math.sqrt(np.var(b) + 1e-6)
        total += np.mean([huber(x - y, beta) / beta for x, y in zip(a, b, strict=True)])
    return total / len(p)


def rkd_distance(p, t):
    """RKD-D of Park et al."""
    pairs = [(i, j) for i in range(len(p)) for j in range(len(p)) if i != j]

    def relative(x):
        distances = [math.dist(x[i], x[j]) for i, j in pairs]
        return [d / (sum(distances) / len(pairs)) for d in distances]

    both = zip(relative(p), relative(t), strict=True)
    return sum(huber(a - b, 1) for a, b in both) / len(pairs)


def rkd_angle(p, t):
    """RKD-A of Park et al."""
    triples = [
        (i, j, k)
        for i in range(len(p))
        for j in range(len(p))
        for k in range(len(p))
        if len({i, j, k}) == 3
    ]

    def cosines(x):
        return [twins.cosine(x[i] - x[j], x[k] - x[j]) for i, j, k in triples]

    both = zip(cosines(p), cosines(t), strict=True)
    return sum(huber(a - b, 1) for a, b in both) / len(triples)
