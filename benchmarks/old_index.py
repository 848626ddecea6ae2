"""A stored index after an update: the ways to go on with it, in one table.

  python benchmarks/old_index.py --streams outline digits --seeds 0 1 2 3 4
  python benchmarks/old_index.py --streams cifar --cifar=cifar10.npz
  python benchmarks/old_index.py --streams outline --rows finetune l2_sp cassle

A small network learns some images by SimCLR; an update teaches it others. The index
holds images of both kinds, embedded before. Streams:

- outline, busy, night: silhouettes that are filled, then of that kind; a network of
  three convolutions. The others have a Vision Transformer.
- digits: digits as they are and inverted, then a quarter turned.
- cifar: five classes of CIFAR-10, then the other five, 300 images of each; the file has
  train_x, train_y, test_x and test_y.

A quarter of the train images are the pairs that fit a map, the others are the index,
the test images are the queries. It prints the share of the ten nearest that have the
query's class, and the share of the neighbours that an index embedded again would give,
in percent. `--rows` compares ways to train the update, see keep_old.py. The same
command resumes; embeddings stay in --out. `--picture=FILE` draws the shares.
"""

import argparse
import pathlib
import shutil
from types import SimpleNamespace

import keep_old
import numpy as np

from jaxcl.config import build, files
from jaxcl.data import sources
from jaxcl.index import drift, maps, order
from jaxcl.run import encoder_folder, finish, updates
from jaxcl.update import command, plan
from jaxcl.weights import encoder, export

K = 10
KINDS = ("outline", "busy", "night")
STREAMS = (*KINDS, "digits", "cifar")
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)


def read_stream(args, name) -> tuple[np.ndarray, ...]:
    """Return train images, their labels, which are new, and test images and labels."""
    if name == "cifar":
        with np.load(args.cifar) as data:
            parts = [(data[f"{x}_x"], data[f"{x}_y"]) for x in ("train", "test")]
        (x, y), (test, label) = (
            _first(*part, count) for part, count in zip(parts, (300, 60), strict=True)
        )
        return x, y, y >= 5, test, label
    if name == "digits":
        looks = ("plain", "inverted", "rotated")
        data = sources.load("digits_in_looks", size=16, channels=3, looks=looks)
        first_new = 2
    else:
        data = sources.load("shapes", domains=("plain", name), size=16)
        first_new = 1
    train, test = data.train, data.test
    is_new = train.domain >= first_new
    return train.images, train.label, is_new, test.images, test.label


def _first(images, label, count):
    rows = np.concatenate([np.flatnonzero(label == c)[:count] for c in range(10)])
    return images[rows], label[rows]


def embed_both(args, stream, row, seed) -> dict[str, np.ndarray]:
    """Embed all images before and after an update; train what is not there yet."""
    place = pathlib.Path(args.out, stream, row, f"seed_{seed}")
    saved = place / "embeddings.npz"
    if not saved.exists():
        x, y, is_new, test, label = read_stream(args, stream)
        place.mkdir(parents=True, exist_ok=True)
        np.savez(place / "new.npz", train_x=x[is_new])
        first = pretrain(args, stream, x[~is_new], seed)
        if not (place / "encoder").exists():
            shutil.copytree(first, place / "encoder")
        asked = SimpleNamespace(epochs=args.epochs)
        config = keep_old.make_update(asked, row, seed, 0) | {"rows": 40}
        if stream in KINDS:
            config["train"] |= {"tuning": None, "batch_size": 32}
        section = {"name": "npz", "path": str(place / "new.npz")}
        work = plan.make_plan(str(place / "encoder"), section, config)
        if updates.read_report(work.workdir) is None:
            command.carry_out(work)
        export.export(str(place / "encoder"), str(place / "export"), force=True)
        rows = {"label": y, "test_label": label, "is_new": is_new}
        for when, where in (("before", first), ("after", place / "export")):
            net = encoder.load_encoder(where)
            rows |= {when: net.embed(x), f"test_{when}": net.embed(test)}
        np.savez(saved, **rows)
    with np.load(saved) as data:
        return dict(data)


def pretrain(args, stream, images, seed) -> pathlib.Path:
    """Train an encoder on the old images; return its folder."""
    kind = "shapes" if stream in KINDS else stream
    place = pathlib.Path(args.out, f"old_{kind}", f"seed_{seed}")
    if not (place / "encoder" / encoder_folder.CARD).exists():
        place.mkdir(parents=True, exist_ok=True)
        np.savez(place / "old.npz", train_x=images)
        config = files.read_config(["--config=keep_fresh"])
        config.update(seed=seed, epochs=2 * args.epochs, batch_size=keep_old.BATCH)
        config.update(keep_old.QUIET)
        config.data = {"name": "npz", "path": str(place / "old.npz")}
        config.scenario.evaluation = "none"
        config.augment.update(size=16, resize=16, flip=0.5 * (stream == "cifar"))
        if kind == "shapes":  # of which the transformer learns nothing in this time
            config.augment.update(scale=(0.7, 1.0), grayscale=1.0)
            config.encoder = {"name": "conv_net", "width": 16}
            config.batch_size = 32
        else:
            config.encoder.update(image_size=16, **keep_old.SIZES)
        config.method.update(keep_old.HEADS)
        config.schedule.update(warmup_epochs=0)
        config.evaluators = {}
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place / "encoder"


def measure(rows, seed) -> dict[str, tuple[float, float]]:
    """Return way -> (percent of the query's class, percent of the new neighbours)."""
    before, after, label = rows["before"], rows["after"], rows["label"]
    order_of_rows = np.random.default_rng(seed).permutation(len(label))
    fit, index = np.split(order_of_rows, [len(label) // 4])
    asked, new = rows["test_before"], rows["test_after"]
    back = maps.fit_all(after[fit], before[fit], mapped="queries", k=K)[0]
    forward = maps.fit_all(before[fit], after[fit], mapped="vectors", k=K)[0]
    old_index, fresh = drift.unit(before[index]), drift.unit(after[index])
    mapped = maps.map_features(forward.arrays, old_index)
    searches = {"old encoder, old index": (asked, old_index)}
    searches["new queries, old index"] = new, old_index
    mapped_back = maps.map_features(back.arrays, new)
    searches["new queries mapped back, old index"] = mapped_back, old_index
    searches["vectors mapped forward"] = new, mapped
    reference = order.make_reference(before[fit], after[fit], forward)
    worst = np.argsort(-order.predict_errors(old_index, reference), kind="stable")
    at_random = np.random.default_rng(seed).permutation(len(index))
    for how, places in (("ordered", worst), ("random", at_random)):
        for share in SHARES:
            mixed, again = mapped.copy(), places[: round(share * len(index))]
            mixed[again] = fresh[again]
            searches[f"forward, {share:.0%} again, {how}"] = new, mixed
    searches["all embedded again"] = new, fresh
    near = {
        way: np.asarray(drift.find_neighbours(*pair, K))
        for way, pair in searches.items()
    }
    wanted, classes = near["all embedded again"], rows["test_label"][:, None]
    return {
        way: (
            100 * float((label[index][found] == classes).mean()),
            100 * float(maps.share_found(found, wanted).mean()),
        )
        for way, found in near.items()
    }


def write_table(found) -> str:
    """Write the means and standard errors over seeds: streams are columns."""
    names = [*found]
    lines = ["| | " + " | ".join(f"{x}: class | neighbours" for x in names) + " |"]
    lines += ["|---|" + "---:|" * (2 * len(names))]
    for way in next(iter(found.values()))[0]:
        cells = []
        for name in names:
            values = np.array([one[way] for one in found[name]])
            mean, count = values.mean(axis=0), len(values)
            error = values.std(axis=0, ddof=1) / count**0.5 if count > 1 else 0 * mean
            cells += [f"{m:.1f} ± {e:.1f}" for m, e in zip(mean, error, strict=True)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found, path) -> None:
    """Draw precision against the share embedded again, a panel for each stream."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(found), figsize=(max(3.2 * len(found), 7), 3.8), squeeze=False
    )
    for panel, (name, seeds) in zip(panels[0], found.items(), strict=True):
        value = {way: np.mean([x[way][0] for x in seeds]) for way in seeds[0]}
        first, last = value["vectors mapped forward"], value["all embedded again"]
        for how in ("ordered", "random"):
            line = [value[f"forward, {share:.0%} again, {how}"] for share in SHARES]
            panel.plot(
                [0, *(100 * x for x in SHARES), 100],
                [first, *line, last],
                marker="o",
                markersize=3,
                label=f"mapped forward, then {how}",
            )
        flat = {"old encoder, old index": "C2", "new queries, old index": "C3"}
        flat["new queries mapped back, old index"] = "C4"
        for way, colour in flat.items():
            panel.axhline(value[way], color=colour, linestyle="--", label=way)
        panel.set(title=name, xlabel="embedded again, %")
    panels[0, 0].set_ylabel("of the query's class, %")
    labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=2, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--streams", nargs="+", default=[*KINDS], choices=STREAMS)
    made.add_argument("--rows", nargs="+", default=["finetune"], choices=keep_old.ROWS)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    made.add_argument("--epochs", type=int, default=15, help="of an update")
    made.add_argument("--cifar", help="file of CIFAR-10")
    made.add_argument("--out", default="runs/old_index", help="folder of the runs")
    made.add_argument("--picture", help="file of the picture")
    return made


def main(argv=None) -> dict:
    """Print the table; return its numbers."""
    args = parser().parse_args(argv)
    found: dict[str, list] = {}
    for seed in args.seeds:
        for stream in args.streams:
            for row in args.rows:
                name = f"{stream} {row}" if len(args.rows) > 1 else stream
                one = measure(embed_both(args, stream, row, seed), seed)
                found.setdefault(name, []).append(one)
        print(f"\nseeds {args.seeds[: args.seeds.index(seed) + 1]}\n")
        print(write_table(found), flush=True)
    if args.picture:
        draw(found, args.picture)
    return found


if __name__ == "__main__":
    main()
