"""Which gate keeps its promise over twenty updates, and what does it cost?

  python benchmarks/guarantee.py answers --out=runs/guarantee
  python benchmarks/guarantee.py simulate --out=runs/guarantee
  python benchmarks/guarantee.py power --out=runs/guarantee
  python benchmarks/guarantee.py chain --out=runs/guarantee

`answers` trains a small encoder of digits and one of silhouettes by SimCLR, updates
each twenty times with new images, and saves the margin of the nearest-neighbour vote
for every labelled image.

`simulate` draws histories of twenty updates. An update adds the change of margins of a
real update, drawn at random, to the parent's margins; a shift of all margins sets its
true loss, that over all images. A judge is a sample of the images. A history that ever
accepts an encoder beyond the limit is broken. `power` draws the power of one update.

`chain` makes twenty real updates of silhouettes, one of them harmful, by each rule.
"""

import argparse
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from jaxcl.run import updates
from jaxcl.update import gate

LIMIT, LIFE, UPDATES = 0.02, 0.05, 20
SIZES = (300, 1000, 3000)
BATCH = 60  # of the small encoders
SETS = ("digits", "silhouettes")


# Tests: (images, lost, gained, error), arrays of histories -> whether each loss is
# shown to be within the limit


def by_pieces(n, lost, gained, error) -> np.ndarray:
    """Bound lost and gained pairs apart (Clopper and Pearson), at half the error."""
    most = special.betaincinv(lost + 1, np.maximum(n - lost, 0.5), 1 - error / 2)
    least = special.betaincinv(np.maximum(gained, 0.5), n - gained + 1, error / 2)
    return np.where(lost < n, most, 1) - np.where(gained > 0, least, 0) <= LIMIT


def by_bets(n, lost, gained, error) -> np.ndarray:
    """Bet against a loss beyond the limit; reject if the capital reaches 1 / error.

    The capital of a fixed bet is a product over the pairs, and that of a mixture of
    bets a mean (Waudby-Smith and Ramdas, 2024).
    """
    bets = np.geomspace(0.003, 0.95 / (1 - LIMIT), 40)
    cells = np.stack([lost, gained, n - lost - gained], axis=1)
    steps = np.log1p(np.stack([bets * (LIMIT - 1), bets * (LIMIT + 1), bets * LIMIT]))
    capital = special.logsumexp(cells @ steps, axis=1) - math.log(len(bets))
    return capital >= -np.log(error)


def by_newcombe(n, lost, gained, error) -> np.ndarray:
    """Square and add the ends of two score intervals, correlated (Newcombe, method 10).

    The cells of the right and the wrong pairs are taken to be equal, since only their
    sum is known here.
    """
    same, z = (n - lost - gained) / 2, -special.ndtri(error)
    first, now = (same + lost) / n, (same + gained) / n

    def wilson(p):
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return middle - half, middle + half

    (_, high), (low, _) = wilson(first), wilson(now)
    sizes = (same + lost) * (same + gained) * (n - same - lost) * (n - same - gained)
    phi = (same * same - lost * gained) / np.sqrt(np.maximum(sizes, 1))
    up, down = high - first, now - low
    half = np.sqrt(np.maximum(up * up - 2 * phi * up * down + down * down, 0))
    return (lost - gained) / n + half <= LIMIT


def by_exact(n, lost, gained, error) -> np.ndarray:
    """Use the test of the library: Tango's score, exact (Berger and Boos)."""
    usual = special.ndtr(gate.score(lost, gained, n, LIMIT))
    near = (usual <= error) & (usual >= error / 2)  # others are clear
    passes = usual < error
    for row in np.flatnonzero(near):
        passes[row] = _passes(n, int(lost[row]), int(gained[row]), float(error[row]))
    return passes


@functools.cache
def _passes(n, lost, gained, error) -> bool:
    return gate.loss_p_value(gate.Pairs(n, lost, gained), LIMIT, error) <= error


TESTS = {
    "exact, in pieces": by_pieces,
    "bets": by_bets,
    "Newcombe 10, normal": by_newcombe,
    "exact score": by_exact,
}


# Budgets: outcomes so far, True for an update that is proven harmless, None for one
# that is proven harmful -> error of the next one


def by_series(outcomes) -> float:
    """Spend 6 / (pi t)^2 of the budget at update t."""
    return LIFE * 6 / (math.pi * (len(outcomes) + 1)) ** 2


@functools.cache
def by_words(outcomes) -> float:
    """Use the budget of the library: the probability of the outcomes so far."""
    words = {True: gate.ACCEPTED, None: gate.REJECTED, False: gate.ROLLED_BACK}
    known = [words[x] for x in outcomes]
    return _by_counts(*(known.count(x) for x in gate.OUTCOMES))


@functools.cache
def _by_counts(*counts) -> float:
    """Compute the error after some outcomes, whose order does not matter."""
    past = [
        gate.PastUpdate(word, False)
        for word, count in zip(gate.OUTCOMES, counts, strict=True)
        for _ in range(count)
    ]
    return gate.share_budget(past, LIFE).error


BUDGETS = {
    "6 / (pi t)^2": by_series,
    "outcomes": by_words,
}


# Histories


class Pool(NamedTuple):
    """Real margins of votes: above 0 the answer is right."""

    first: np.ndarray  # f64[N], of an encoder
    changes: np.ndarray  # f64[U, N], by real updates
    # i64[64, N]: each image has the change of another one with a near margin, so that
    # updates differ
    mixes: np.ndarray


class Rule(NamedTuple):
    """A gate."""

    test: Callable | None  # None: the observed loss is compared with the limit
    budget: Callable = by_words
    to_parent: bool = False  # count the loss from the parent
    accepts_undecided: bool = False


RULES = {
    "today: observed loss to the parent": Rule(None, to_parent=True),
    "observed loss to the reference": Rule(None),
    **{
        f"{test}; {budget}": Rule(TESTS[test], BUDGETS[budget])
        for test, budget in (
            ("exact, in pieces", "6 / (pi t)^2"),
            ("bets", "6 / (pi t)^2"),
            ("Newcombe 10, normal", "6 / (pi t)^2"),
            ("exact score", "outcomes"),
        )
    },
}


MAIN = (  # of which all histories are drawn; of the others three in ten
    "today: observed loss to the parent",
    "observed loss to the reference",
    "exact score; outcomes",
)

DESIGNS = ("harmless", "edge")  # kinds of which all designs are compared


class Counts(NamedTuple):
    """What a rule did in some histories."""

    broken: np.ndarray  # bool[H], accepted an encoder beyond the limit
    harmless: int  # updates that kept the true loss within the limit
    accepted: int  # of them
    rejected: int  # of them, for a loss that was observed
    best: float  # of them, accepted on average by the best test with the same errors


def load_pool(out: pathlib.Path, name: str) -> Pool:
    """Read the margins of a set, of up to 1,000 images; ties are broken at random."""
    margins = np.load(out / f"margins_{name}.npy")[:, :1000].astype(float)
    noise = np.random.default_rng(0).uniform(-1e-6, 1e-6, margins.shape)
    margins = margins + noise
    rng, mixes = np.random.default_rng(1), np.empty((64, margins.shape[1]), int)
    for mix in mixes:
        order = np.argsort(margins[0] + rng.normal(0, 0.05, len(mix)))
        mix[order] = np.roll(order, int(rng.integers(1, 20)))
    return Pool(margins[0], np.diff(margins, axis=0), mixes)


def draw_histories(
    pool: Pool, rule: Rule, size: int, losses: np.ndarray, seed: int
) -> Counts:
    """Draw histories, all of them at once.

    Args:
      pool: of real margins.
      rule: decides.
      size: of the judge.
      losses: f64[H, updates], of each update against its parent, shares; nan: of the
        real update.
      seed: of the judges and the updates, the same for all rules.
    """
    rng, count = np.random.default_rng(seed), len(losses)
    # How often each image is in the judge
    images = len(pool.first)
    judge = rng.multinomial(size, np.full(images, 1 / images), count)
    reference = pool.first > 0
    parent, outcomes = np.tile(pool.first, (count, 1)), [()] * count
    broken, sums = np.zeros(count, bool), np.zeros(4)
    for loss in losses.T:
        which = rng.integers(len(pool.changes), size=(count, 1))
        mixes = pool.mixes[rng.integers(len(pool.mixes), size=count)]
        after = parent + pool.changes[which, mixes]
        if not np.isnan(loss).any():
            wrong = ((parent <= 0).mean(axis=1) + loss) * parent.shape[1]
            after = shift_margins(after, np.round(wrong).astype(int))
        right = after > 0
        lost, gained = reference & ~right, ~reference & right
        true = lost.mean(axis=1) - gained.mean(axis=1)
        changed = lost.mean(axis=1) + gained.mean(axis=1)
        base = parent > 0 if rule.to_parent else reference
        losses_seen = np.where(base & ~right, judge, 0).sum(axis=1)
        gains_seen = np.where(~base & right, judge, 0).sum(axis=1)
        beyond = losses_seen - gains_seen > LIMIT * size
        if rule.test is None:
            accept, power = ~beyond, np.zeros(count)
        else:
            error = np.array([rule.budget(x) for x in outcomes])
            accept = rule.test(size, losses_seen, gains_seen, error)
            spread = np.sqrt(np.maximum(changed - true**2, 1e-12))
            z = (LIMIT - true) * math.sqrt(size) / spread
            power = special.ndtr(z + special.ndtri(error))
        fine = true <= LIMIT + 1e-9
        sums[:3] += [(x & fine).sum() for x in (fine, accept, beyond)]
        sums[3] += power[fine].sum()
        alarm = np.zeros(count, bool)
        if rule.test is not None:
            z = gate.score(losses_seen, gains_seen, size, LIMIT)
            alarm = special.ndtr(-z) <= error / 75  # as the library has it
        outcomes = [
            (*x, None if z else bool(y))
            for x, y, z in zip(outcomes, accept, alarm, strict=True)
        ]
        broken |= accept & ~fine
        parent = np.where(accept[:, None], after, parent)
    return Counts(broken, *sums)


def shift_margins(margins: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Shift the margins of each history, so that `wrong` of them are not above 0."""
    places = np.clip(wrong, 0, margins.shape[1] - 1)[:, None]
    edges = np.take_along_axis(np.sort(margins, axis=1), places, axis=1)
    return margins - edges + 1e-12


def make_losses(kind: str, seed: int) -> np.ndarray:
    """Draw the true losses of the updates of a history."""
    rng = np.random.default_rng([seed, 1])
    if kind == "harmless":
        return np.zeros(UPDATES)
    if kind == "leak":
        return np.full(UPDATES, 0.01)
    if kind == "edge":  # the first accepted one is just beyond the limit
        return np.full(UPDATES, LIMIT + 0.001)
    if kind == "mixed":
        return np.where(rng.random(UPDATES) < 0.2, rng.uniform(0.025, 0.06, UPDATES), 0)
    return np.full(UPDATES, np.nan)


KINDS = {
    "harmless": "lose nothing",
    "leak": "lose 1 point each",
    "edge": "lose 2.1 points each",
    "mixed": "a fifth lose 2.5 to 6 points",
    "real": "as real updates are",
}


def simulate(args) -> None:
    """Print the tables of drawn histories, and draw the power."""
    pools = [load_pool(args.out, name) for name in SETS]
    lines = []
    for kind in args.kinds:
        meaning = KINDS[kind]
        for name, rule in RULES.items():
            if name not in args.rules or (name not in MAIN and kind not in DESIGNS):
                continue
            count = args.histories if name in MAIN else args.histories * 3 // 10
            cells = [simulate_rule(pools, rule, kind, n, count) for n in SIZES]
            row = f"| {meaning} | {name} | " + " | ".join(cells) + " |"
            print(row, flush=True)
            lines.append(row)
    with open(args.out / "histories.md", "a") as file:
        file.write("\n".join(lines) + "\n")


def simulate_rule(pools, rule, kind, size, histories) -> str:
    """Describe what a rule does in many histories, half of them of each pool."""
    counts = []
    for number, pool in enumerate(pools):
        seeds = range(number, histories, len(pools))
        for first in range(0, len(seeds), 100):
            chosen = seeds[first : first + 100]
            losses = np.stack([make_losses(kind, seed) for seed in chosen])
            counts.append(draw_histories(pool, rule, size, losses, chosen[0]))
    broken = np.concatenate([x.broken for x in counts])
    harmless, accepted, rejected, best = np.array([x[1:] for x in counts]).sum(axis=0)
    text = f"{100 * broken.mean():.1f}"
    if harmless:
        parts = (accepted, rejected, harmless - accepted - rejected, best)
        shown = [f"{100 * x / harmless:.0f}" for x in parts]
        if rule.test is None:
            shown[2:] = ["0", "-"]
        text += f" ({' / '.join(shown)})"
    return text


def draw_power(args) -> None:
    """Draw how often one update is proven harmless, by its true loss."""
    from matplotlib import pyplot as plt

    losses, error, change = np.linspace(-0.02, 0.03, 21), by_words(()), 0.1
    rng = np.random.default_rng(0)
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for number, size in enumerate(SIZES):
        for name, test in TESTS.items():
            if name == "Newcombe 10, normal":
                continue  # it promises nothing for so small an error
            shares = []
            for loss in losses:
                cells = [(change + loss) / 2, (change - loss) / 2, 1 - change]
                lost, gained, _ = rng.multinomial(size, cells, args.histories).T
                errors = np.full(args.histories, error)
                shares.append(test(size, lost, gained, errors).mean())
            style = {"exact score": "-", "bets": "--", "exact, in pieces": ":"}[name]
            axes.plot(
                100 * losses,
                100 * np.array(shares),
                style,
                color=f"C{number}",
                label=f"{size:,} images" if style == "-" else None,
            )
        spread = np.sqrt(change - losses**2)
        z = (LIMIT - losses) * math.sqrt(size) / spread - -special.ndtri(error)
        axes.plot(
            100 * losses, 100 * special.ndtr(z), color=f"C{number}", alpha=0.25, lw=5
        )
    axes.axvline(100 * LIMIT, color="0.5", lw=1)
    axes.set(xlabel="true loss, points", ylabel="proven harmless, %")
    axes.set_title(
        "Solid: exact score; dashed: bets; dotted: pieces; wide: the best", size=9
    )
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out / "power.png", dpi=110)


# Real encoders


SMALL = {
    "encoder.name": "mlp",
    "encoder.widths": (256, 128),
    "augment.scale": (0.7, 1.0),
    "augment.grayscale": 1.0,
    "optimizer.name": "adam",
    "optimizer.lr": 2e-3,
    "schedule.warmup_epochs": 1,
    "evaluators": {},
    "evaluate_untrained": False,
    "plots": False,
    "tensorboard": False,
}
HARMFUL = 13  # the update of the chain that is trained wrongly
WRONG = {"train.optimizer.lr": 0.03}


class Images(NamedTuple):
    """Images of an experiment, none of them in two parts."""

    first: np.ndarray  # that the encoder learns before the updates
    labels: np.ndarray
    new: list[np.ndarray]  # for each update
    judge: tuple[np.ndarray, np.ndarray]  # images and labels, of --test
    others: tuple[np.ndarray, np.ndarray]  # that tell the true loss


def make_images(name: str, updates: int) -> Images:
    """Read digits, or draw silhouettes."""
    from jaxcl.data.sources import by_name, shapes

    if name == "digits":
        data = by_name.load(name="digits", size=16)
        both = data.train, data.test
        images = np.concatenate([part.images for part in both])
        labels = np.concatenate([part.label for part in both])
        order = np.random.default_rng(0).permutation(len(labels))
        cuts = [500, 980, 980]
        images, rest, judge, others = np.split(images[order], cuts)
        known, _, judged, hidden = np.split(labels[order], cuts)
        new = np.array_split(rest, updates)
        return Images(images, known, new, (judge, judged), (others, hidden))
    first = shapes.shapes(domains=("plain",), train=800, test=4000, size=16)
    looks = ("plain", "busy")
    more = shapes.shapes(
        domains=looks, train=30 * updates, test=10, size=16, draw_seed=1
    )
    parts = more.train.images.reshape(2, updates, 30, 16, 16, 3)
    new = list(np.concatenate([*parts], axis=1))
    judge, others = (
        (first.test.images[rows], first.test.label[rows])
        for rows in (slice(1000), slice(1000, None))
    )
    return Images(first.train.images, first.train.label, new, judge, others)


def start_run(images: Images, folder: pathlib.Path):
    """Train the first encoder, or open it."""
    import jaxcl

    return jaxcl.fit(
        images.first,
        encoder="conv_net",
        epochs=40,
        batch_size=64,
        options=SMALL,
        quiet=True,
        out=folder,
    )


def measure_margins(images: Images, encoder: Any) -> np.ndarray:
    """Measure by how much the votes for the right class lead, f64[N].

    Args:
      images: of the experiment.
      encoder: of the library, or the parameters of `embed`.
    """
    from jaxcl.evals import knn

    def represent(x):
        return embed(encoder, x) if isinstance(encoder, dict) else encoder.embed(x)

    bank, queries = (represent(x) for x in (images.first, images.others[0]))
    everyone, labels = np.ones(len(bank), bool), images.others[1]
    votes = knn.count_votes(queries, bank, images.labels, everyone, num_classes=10)
    votes = np.array(votes, float)
    votes /= votes.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    right = votes[rows, labels].copy()
    votes[rows, labels] = -1
    return right - votes.max(axis=1)


def save_answers(args) -> None:
    """Train and update encoders; save the margins of all of them."""
    for name in SETS:
        images = make_images(name, UPDATES)
        train = make_trainer(images.first[0].size)
        params = train(None, images.first, 2e-3, 60)
        margins = [measure_margins(images, params)]
        for number, new in enumerate(images.new):
            # Some images of before are seen again, as an update with a memory does.
            seen = np.concatenate([new, images.first[: 3 * len(new)]])
            lr = (1e-3, 3e-3, 1e-2)[number % 3]
            params = train(params, seen, lr, 6)
            margins.append(measure_margins(images, params))
            now, before, first = (x > 0 for x in (margins[-1], margins[-2], margins[0]))
            print(
                f"{name}, update {number + 1}: accuracy {now.mean():.3f}, changed "
                f"{(now != before).mean():.3f}, since the first "
                f"{(now != first).mean():.3f}",
                flush=True,
            )
        np.save(args.out / f"margins_{name}.npy", np.array(margins))


def embed(params: dict, images) -> Any:
    """Embed images by a network of two layers."""
    import jax

    rows = images.reshape(len(images), -1) / 127.5 - 1.0
    for layer in ("first", "second"):
        rows = jax.nn.relu(rows @ params[layer])
    return rows


def make_trainer(inputs: int) -> Callable:
    """Make the SimCLR of a small network; every call runs the same program."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxcl.losses import contrastive

    sizes = {"first": (inputs, 256), "second": (256, 128), "head": (128, 64)}
    optimizer = optax.inject_hyperparams(optax.adam)(1e-3)

    def draw_view(key, image):
        shift, gain, noise = jax.random.split(key, 3)
        moves = jax.random.randint(shift, (2,), -2, 3)
        moved = jnp.roll(image.astype(jnp.float32), moves, axis=(0, 1))
        moved *= jax.random.uniform(gain, minval=0.6, maxval=1.0)
        return moved + 12 * jax.random.normal(noise, image.shape)

    def loss(params, key, images):
        keys = jax.random.split(key, (2, len(images)))
        views = (jax.vmap(draw_view)(k, images) for k in keys)
        return contrastive.nt_xent(*(embed(params, x) @ params["head"] for x in views))

    @jax.jit
    def step(params, state, key, images):
        grads = jax.grad(loss)(params, key, images)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    def train(params, images, lr, epochs):
        key, rng = jax.random.key(len(images)), np.random.default_rng(len(images))
        if params is None:
            params = {
                name: jax.random.normal(jax.random.fold_in(key, i), size)
                * (2 / size[0]) ** 0.5
                for i, (name, size) in enumerate(sizes.items())
            }
        state = optimizer.init(params)
        state.hyperparams["learning_rate"] = jnp.asarray(lr, jnp.float32)
        for number in range(epochs * len(images) // BATCH):
            rows = rng.choice(len(images), BATCH, replace=False)
            step_key = jax.random.fold_in(key, number)
            params, state = step(params, state, step_key, images[rows])
        return params

    return train


def write_encoder(run: pathlib.Path) -> str:
    """Write the encoder of an update to a folder."""
    from jaxcl.weights import export

    export.export(str(run), f"{run}/own", force=True)
    return f"{run}/own"


def update_chain(args) -> None:
    """Make twenty real updates, one of them harmful, and say what was decided."""
    import jaxcl

    images, folder = (
        make_images("silhouettes", UPDATES),
        args.out / f"chain_{args.undecided}",
    )
    run = start_run(images, folder / "run")
    test = folder / "test.npz"
    np.savez(
        test,
        train_x=images.first,
        train_y=images.labels,
        test_x=images.judge[0],
        test_y=images.judge[1],
    )
    undecided = {"accept": "accept", "keep": "keep the old"}[args.undecided]
    margins = [measure_margins(images, run.encoder)]
    for number, new in enumerate(images.new, 1):
        options = {"train.optimizer.lr": args.lr, "rows": 100}
        options |= {"train.batch_size": 30, "train.steps_per_call": 1}
        options |= {"train.schedule.start": 0.0}  # else its first steps are at 3e-3
        options |= WRONG if number == HARMFUL else {}
        # A command that was stopped goes on.
        place = folder / "run" / updates.UPDATES / f"{number:04d}"
        verdict = updates.read_report(place)
        if verdict is None:
            update = run.update(
                new,
                test=str(test),
                epochs=10,
                limits={"undecided": undecided},
                options=options,
            )
            verdict = update.verdict
        ((_, accuracy),) = verdict["accuracy"].items()
        ((_, found),) = verdict["gate"]["matrices"].items()
        row = {"update": number, "accepted": verdict["accepted"]}
        row |= {"verdict": found["verdict"], "error": verdict["gate"]["error"]}
        row |= {key: found["reference"][key] for key in ("loss", "low", "high")}
        row |= {"most": found["most"], "changed": found["changed"]}
        row |= {"today": -accuracy["change"] <= LIMIT}
        if verdict["accepted"]:
            after = jaxcl.load_encoder(write_encoder(place))
            margins.append(measure_margins(images, after))
            row["true loss"] = float((margins[0] > 0).mean() - (margins[-1] > 0).mean())
        print(json.dumps(row), flush=True)
    np.save(folder / "margins.npy", np.array(margins))


def main(argv=None) -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"answers": [save_answers], "simulate": [simulate]}
    parts |= {"power": [draw_power], "chain": [update_chain]}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--out", type=pathlib.Path, default="runs/guarantee")
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=RULES)
    parser.add_argument("--undecided", default="accept", choices=("accept", "keep"))
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="of updates of the chain"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in parts[args.part]:
        part(args)


if __name__ == "__main__":
    main()
