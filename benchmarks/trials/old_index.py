"""A stored index after an update: the ways to go on with it, as tables and a picture.

  python benchmarks/trials/old_index.py --streams outline busy night digits cifar \
      --cifar=cifar10.npz --seeds 0 1 2 3 4 --page=docs/index_upgrade.md \\
      --picture=docs/images/index_upgrade.png
  python benchmarks/trials/old_index.py --streams outline --network=vit --seeds 0 1 2 \
      --rows finetune l2_sp:0.1 l2_sp:1 cassle lora:4

A small network learns some images by SimCLR; an update teaches it others. The index
holds images of both kinds, embedded before. Streams:

- outline, busy, night: silhouettes that are filled, then of that kind, 1,000 each.
- digits: digits as they are and inverted, then a quarter turned.
- cifar: five classes of CIFAR-10, then the other five, 300 images of each, at 16
  pixels; the file has train_x, train_y, test_x and test_y.

A quarter of the train images are the pairs that fit a map, the others are the index,
the test images are the queries. Tables have the share of the ten nearest that have the
query's class, and the share of the neighbours that an index embedded again would give,
in percent. --page and --picture write them.

Each row updates in another way. `run` continues the run with its heads. The others
begin with the encoder alone, by a strategy: `l2_sp:0.1` sets its weight, `pnr:3e-4` and
`finetune:3e-4` the learning rate, `lora:8` the rank, which needs `--network=vit`. The
same command resumes; all files are in --out.
"""

import argparse
import json
import os
import pathlib
import shutil

import numpy as np

from jaxcl import plots
from jaxcl.config import build, own_images
from jaxcl.data.sources import by_name
from jaxcl.index import drift, maps, order
from jaxcl.report import numbers
from jaxcl.run import encoder_folder, finish, updates
from jaxcl.run import seeds as seeds_lib
from jaxcl.update import command, plan
from jaxcl.weights import encoder, export

K = 10
KINDS = ("outline", "busy", "night")
STREAMS = (*KINDS, "digits", "cifar")
# Ways to go on
OLD, LEFT = "old encoder, old index", "new queries, old index"
BACK, FORWARD = "new queries mapped back, old index", "vectors mapped forward"
AGAIN = "all embedded again"
SHARES = (0.05, 0.1, 0.25, 0.5)
ONLY_DRAWN = ("forward, 5%", "forward, 50%")  # in the picture, not in the tables
NETWORKS = ("conv_net", "vit")
QUIET = {"progress": False, "plots": False, "tensorboard": False}
BATCH = {"shapes": 32, "digits": 64, "cifar": 64}
AUGMENT = {
    "shapes": {"scale": (0.7, 1.0), "grayscale": 1.0},
    "digits": {"scale": (0.7, 1.0), "flip": 0.0},
    "cifar": {},
}
# Strategy -> the option that the number behind its name sets.
NUMBERS = {
    "finetune": ("optimizer", "lr"), "pnr": ("optimizer", "lr"),
    "l2_sp": ("method", "alpha"), "lwf_features": ("method", "weight"),
    "cassle": ("method", "weight"), "lora": ("tuning", "lora_rank"),
}  # fmt: skip


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
        data = by_name.load("digits_in_looks", size=8, looks=looks)
        first_new = 2
    else:
        data = by_name.load("shapes", domains=("plain", name), size=24)
        first_new = 1
    train, test = data.train, data.test
    is_new = train.domain >= first_new
    return train.images, train.label, is_new, test.images, test.label


def _first(images, label, count):
    """Return the first images of each class, at half of their size."""
    rows = np.concatenate([np.flatnonzero(label == c)[:count] for c in range(10)])
    pairs = images[rows].reshape(len(rows), 16, 2, 16, 2, 3)
    return pairs.mean(axis=(2, 4)).astype(np.uint8), label[rows]


def find_place(args, stream, row, seed) -> pathlib.Path:
    """Return the folder of an update."""
    return pathlib.Path(args.out, args.network, stream, row, f"seed_{seed}")


def embed_both(args, stream, row, seed) -> dict[str, np.ndarray]:
    """Embed all images before and after an update; train what is not there yet."""
    place = find_place(args, stream, row, seed)
    saved = place / "embeddings.npz"
    if not saved.exists():
        x, y, is_new, test, label = read_stream(args, stream)
        place.mkdir(parents=True, exist_ok=True)
        np.savez(place / "new.npz", train_x=x[is_new])
        first = pretrain(args, stream, x[~is_new], seed)
        copy = place / "copy"
        if not copy.exists():
            source = first / ("run" if row == "run" else "encoder")
            shutil.copytree(source, place / "part", dirs_exist_ok=True)
            os.replace(place / "part", copy)
        section = {"name": "npz", "path": str(place / "new.npz")}
        work = plan.make_plan(str(copy), section, make_update(args, stream, row, seed))
        if updates.read_report(work.workdir) is None:
            command.carry_out(work)
        export.export(str(copy), str(place / "export"), force=True)
        rows = {"label": y, "test_label": label, "is_new": is_new}
        for when, where in (("before", first / "encoder"), ("after", place / "export")):
            net = encoder.load_encoder(where)
            rows |= {when: net.embed(x), f"test_{when}": net.embed(test)}
        np.savez(saved, **rows)
    with np.load(saved) as data:
        return dict(data)


def make_update(args, stream, row, seed) -> dict:
    """Make the config of an update by a row of the table."""
    config = {"rows": 40, "limits": {"accuracy_drop": None}}
    train: dict = {"epochs": args.epochs, **QUIET}
    if row == "run":
        return config | {"train": train}
    name, _, number = row.partition(":")
    strategy = "finetune" if name == "lora" else name
    train |= {"seed": seed, "batch_size": BATCH[find_kind(stream)], "tuning": None}
    train["optimizer"] = {"lr": 1e-3}
    train["augment"] = AUGMENT[find_kind(stream)]
    train["method"] = {"strategy": strategy, "hidden_dim": 128, "output_dim": 64}
    if name in ("cassle", "pnr"):
        train["method"]["distill_hidden_dim"] = 128
    if name == "l2_sp":
        train["optimizer"]["weight_decay"] = 0.0
    if name == "lora":
        train["tuning"] = {"lora_rank": 8, "lora_on": "all", "open_layers": 0}
    if number:
        section, option = NUMBERS[name]
        value = int(number) if option == "lora_rank" else float(number)
        train[section][option] = value
    return config | {"train": train}


def find_kind(stream) -> str:
    """Return the kind of a stream's images."""
    return "shapes" if stream in KINDS else stream


def make_network(name, size) -> dict:
    """Make config.encoder for images of `size` pixels."""
    if name == "conv_net":
        return {"name": name, "width": 16}
    return {
        "name": name, "width": 48, "layers": 2, "heads": 3, "hidden": 96,
        "patch": size // 4, "image_size": size, "features": "mean",
    }  # fmt: skip


def pretrain(args, stream, images, seed) -> pathlib.Path:
    """Train an encoder on the old images; return the folder of the run and of it."""
    kind = find_kind(stream)
    place = pathlib.Path(args.out, args.network, f"old_{kind}", f"seed_{seed}")
    if not (place / "encoder" / encoder_folder.CARD).exists():
        place.mkdir(parents=True, exist_ok=True)
        np.savez(place / "old.npz", train_x=images)
        section = {"name": "npz", "path": str(place / "old.npz")}
        network = make_network(args.network, images.shape[1])
        config = own_images.config(section, encoder=network)
        config.update(seed=seed, epochs=3 * args.epochs, **QUIET)
        config.batch_size = BATCH[find_kind(stream)]
        config.evaluators = {}
        if args.network == "vit":
            config.update(scale_lr=False, optimizer={"lr": 1e-3})
        config.augment.update(AUGMENT[kind])
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place


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
    searches = {OLD: (asked, old_index), LEFT: (new, old_index)}
    searches[BACK] = maps.map_features(back.arrays, new), old_index
    searches[FORWARD] = new, mapped
    reference = order.make_reference(before[fit], after[fit], forward)
    worst = np.argsort(-order.predict_errors(old_index, reference), kind="stable")
    at_random = np.random.default_rng(seed).permutation(len(index))
    for how, places in (("ordered", worst), ("random", at_random)):
        for share in SHARES:
            mixed, again = mapped.copy(), places[: round(share * len(index))]
            mixed[again] = fresh[again]
            searches[f"forward, {share:.0%} again, {how}"] = new, mixed
    searches[AGAIN] = new, fresh
    near = {
        way: np.asarray(drift.find_neighbours(*pair, K))
        for way, pair in searches.items()
    }
    wanted, classes = near[AGAIN], rows["test_label"][:, None]
    return {
        way: (
            100 * float((label[index][found] == classes).mean()),
            100 * float(maps.share_found(found, wanted).mean()),
        )
        for way, found in near.items()
    }


def measure_all(args) -> dict[str, list[dict]]:
    """Return the shares of each stream and row, a dict for each seed; see `measure`."""
    found: dict[str, list] = {}
    for seed in args.seeds:
        for stream in args.streams:
            for row in args.rows:
                saved = find_place(args, stream, row, seed) / "measured.json"
                if not saved.exists() and not args.measured:
                    one = measure(embed_both(args, stream, row, seed), seed)
                    saved.write_text(json.dumps(one))
                if saved.exists():
                    name = stream if args.rows == ["run"] else row
                    found.setdefault(name, []).append(json.loads(saved.read_text()))
        if found and (seed == args.seeds[-1] or not args.measured):
            write(args, found)
    return found


def write(args, found) -> None:
    """Print the tables; write them to a page, and the picture, if asked."""
    streams = args.rows == ["run"]
    text = write_streams(found) if streams else write_rows(found)
    print(f"\n{text}", flush=True)
    if args.page:
        page = pathlib.Path(args.page)
        mark = "streams" if streams else f"rows of {args.network}"
        begin, end = (f"<!-- {x}old_index.py: {mark} -->\n" for x in ("", "end of "))
        before, _, rest = page.read_text().partition(begin)
        after = rest.partition(end)[2]
        page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
    if args.picture:
        draw(found, args.picture)


def count_seeds(found) -> dict[str, str]:
    """Return name -> the name with its number of seeds."""
    return {name: f"{name} ({len(seeds)})" for name, seeds in found.items()}


def write_streams(found) -> str:
    """Write means and standard errors over seeds; say on which streams a map helps."""
    titles = ("of the query's class, %", "of the new neighbours, %")
    heads, texts = count_seeds(found).values(), []
    for number, title in enumerate(titles):
        lines = [
            f"| {' | '.join([title, *heads])} |",
            "|---" + "|---:" * len(found) + "|",
        ]
        ways = next(iter(found.values()))[0]
        for way in (x for x in ways if not x.startswith(ONLY_DRAWN)):
            cells = [show([x[way][number] for x in seeds]) for seeds in found.values()]
            lines.append(f"| {way} | {' | '.join(cells)} |")
        texts.append("\n".join(lines))
    return "\n\n".join([*texts, *(say_gain(*pair) for pair in found.items())])


def say_gain(name, seeds) -> str:
    """Say what a mapped index gains over the best index that needs no image.

    The 95 % interval of the mean over seeds is that of Student's t, in pairs.
    """
    others = [OLD, LEFT, BACK]
    best = max(others, key=lambda way: np.mean([x[way][0] for x in seeds]))
    gains = [x[FORWARD][0] - x[best][0] for x in seeds]
    again = [x[AGAIN][0] - x[best][0] for x in seeds]
    mean, low, high, _ = numbers.estimate_mean(gains)
    low, high = (-np.inf, np.inf) if low is None else (low, high)
    worth = "makes no difference that these seeds show"
    if low > 0 or high < 0:
        worth = "helps" if low > 0 else "**does harm**"
    return (
        f"- {name}: the map {worth}, {mean:+.1f} points of class ({low:+.1f} to "
        f'{high:+.1f}) over "{best}"; all embedded again {np.mean(again):+.1f}.'
    )


def write_rows(found) -> str:
    """Write a line for each way to train: means and standard errors over seeds."""
    columns = {
        "class, all again": (AGAIN, 0), "class, mapped": (FORWARD, 0),
        "neighbours, mapped": (FORWARD, 1), "neighbours, old index": (LEFT, 1),
    }  # fmt: skip
    lines = [f"| trained by (seeds) | {' | '.join(columns)} |"]
    lines += ["|---" + "|---:" * len(columns) + "|"]
    for name, title in count_seeds(found).items():
        cells = [show([x[way][n] for x in found[name]]) for way, n in columns.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    old = [x[OLD][0] for seeds in found.values() for x in seeds]
    return "\n".join(lines) + f"\n\nOld encoder, old index: class {np.mean(old):.1f}."


def show(values) -> str:
    """Show the mean of some percents and, of several, its standard error."""
    spread = seeds_lib.mean_and_error(x / 100 for x in values)
    return seeds_lib.percent(spread).replace("+-", "±")


def draw(found, path) -> None:
    """Draw precision against the share embedded again, a panel for each stream."""
    figure = plots.make_figure(max(3.2 * len(found), 7), 3.8)
    panels = figure.subplots(1, len(found), squeeze=False)
    for panel, (name, seeds) in zip(panels[0], found.items(), strict=True):
        value = {way: np.mean([x[way][0] for x in seeds]) for way in seeds[0]}
        first, last = value[FORWARD], value[AGAIN]
        for how in ("ordered", "random"):
            line = [value[f"forward, {share:.0%} again, {how}"] for share in SHARES]
            panel.plot(
                [0, *(100 * x for x in SHARES), 100],
                [first, *line, last],
                marker="o",
                markersize=3,
                label=f"mapped forward, then {how}",
            )
        for way, colour in ((OLD, "C2"), (LEFT, "C3"), (BACK, "C4")):
            panel.axhline(value[way], color=colour, linestyle="--", label=way)
        panel.set(title=f"{name} (seeds: {len(seeds)})", xlabel="embedded again, %")
    panels[0, 0].set_ylabel("of the query's class, %")
    labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=2, frameon=False)
    figure.set_layout_engine("constrained")
    plots.save_figure(figure, path)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--streams", nargs="+", default=[*KINDS], choices=STREAMS)
    made.add_argument("--rows", nargs="+", default=["run"], help="run, or NAME:NUMBER")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    made.add_argument("--network", default="conv_net", choices=NETWORKS)
    made.add_argument("--epochs", type=int, default=10, help="of an update")
    made.add_argument("--cifar", help="file of CIFAR-10")
    made.add_argument("--out", default="runs/old_index", help="folder of all files")
    made.add_argument("--measured", action="store_true", help="train nothing more")
    made.add_argument("--page", help="page with marks, between which tables belong")
    made.add_argument("--picture", help="file of the picture")
    return made


def main(argv=None) -> dict:
    """Print the tables after each seed; return their numbers."""
    return measure_all(parser().parse_args(argv))


if __name__ == "__main__":
    main()
