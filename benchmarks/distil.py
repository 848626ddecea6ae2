"""Small encoders by SimCLR, by distillation of a larger one, and by both, as tables.

  python benchmarks/distil.py --seeds 0 1 2 --page=docs/methods.md

The teacher is a ResNet that learns filled silhouettes, `--teacher-epochs` long. The
students learn, without labels, the teacher's images or outlines, which are new to it:
1,000 images of each. All ways to train a student take the same steps on the same two
views, so that its own FLOPs are equal but for its heads; the teacher's forward passes
come on top. With --data=FILE.npz (train_x, train_y, test_x, test_y) the images are
those of the file, such as CIFAR-10, and there is no new domain.

Tables have, in percent: the test images whose class a vote of the ten nearest train
images finds (k-NN) and a logistic regression (linear); and of the ten nearest images in
an index, the share of the query's class. The index is three quarters of the train
images by the teacher. Maps are fitted to the others: to bring the student's queries to
the teacher's space, or the teacher's vectors to the student's. Beside that: parameters,
milliseconds an image in batches of 64 on this CPU, megabytes of the export.

The same command resumes; all files are in --out. --page writes the tables when all
seeds are there.
"""

import argparse
import json
import pathlib
import time

import numpy as np
from sklearn import linear_model, pipeline, preprocessing

from jaxcl.config import build, own_images
from jaxcl.data import sources
from jaxcl.index import drift, maps
from jaxcl.run import encoder_folder, finish
from jaxcl.weights import encoder, export

K = 10
DOMAINS = ("plain", "outline")
STUDENTS = {
    "conv_net": {"name": "conv_net", "width": 16},
    "half ResNet": {"name": "resnet", "depth": 10, "width": 8},
}
TEACHER = {"name": "resnet", "depth": 10, "width": 16}
WAYS = ("SimCLR", "distilled", "both")
QUIET = {"progress": False, "plots": False, "tensorboard": False}
MEASURES = ("k-NN", "linear")
# Whose queries, whose index, and what is mapped
SEARCHES = ("own index", "queries mapped to the teacher's", "teacher's index mapped")


def read_images(args, domain) -> tuple[np.ndarray, ...]:
    """Return train images and labels, test images and labels."""
    if args.data:
        with np.load(args.data) as data:
            train_x, train_y, test_x, test_y = (
                data[name] for name in ("train_x", "train_y", "test_x", "test_y")
            )
        return train_x[: args.rows], train_y[: args.rows], test_x[:1000], test_y[:1000]
    data = sources.load("shapes", domains=(domain,), size=args.size)
    return data.train.images, data.train.label, data.test.images, data.test.label


def train_encoder(args, place, domain, network, seed, epochs, **more) -> pathlib.Path:
    """Train an encoder on the images of a domain; return the folder of its export."""
    if not (place / "encoder" / encoder_folder.CARD).exists():
        place.mkdir(parents=True, exist_ok=True)
        images = read_images(args, domain)[0]
        np.savez(place / "images.npz", train_x=images)
        section = {"name": "npz", "path": str(place / "images.npz")}
        network = dict(network)
        if network["name"] == "resnet":
            network["stem"] = "cifar"
        config = own_images.config(
            section, encoder=network, teacher=more.get("teacher")
        )
        config.update(seed=seed, epochs=epochs, evaluators={}, **QUIET)
        config.batch_size = 32
        config.method.hidden_dim, config.method.output_dim = 128, 64
        if not args.data:
            config.augment.update(scale=(0.7, 1.0), grayscale=1.0)
        if more.get("base_weight"):
            config.method.strategy.base_weight = more["base_weight"]
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place / "encoder"


def find_teacher(args, seed) -> pathlib.Path:
    """Train the teacher of a seed, or find it; return its folder."""
    place = pathlib.Path(args.out, "teacher", f"seed_{seed}")
    return train_encoder(args, place, "plain", TEACHER, seed, args.teacher_epochs)


def embed(folder, images) -> np.ndarray:
    """Embed images by the encoder of a folder."""
    return np.asarray(encoder.load_encoder(folder).embed(images))


def classify(rows, label, queries, wanted) -> dict[str, float]:
    """Return the percent of queries whose class each classifier finds."""
    near = np.asarray(drift.find_neighbours(queries, drift.unit(rows), K))
    votes = np.stack([(label[near] == c).sum(axis=1) for c in range(label.max() + 1)])
    regression = pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=2000)
    ).fit(rows, label)
    return {
        "k-NN": 100 * float((votes.argmax(axis=0) == wanted).mean()),
        "linear": 100 * float((regression.predict(queries) == wanted).mean()),
    }


def search(own, teacher, label, own_queries, wanted, seed) -> dict[str, float]:
    """Return the percent of the ten nearest that have the query's class."""
    order = np.random.default_rng(seed).permutation(len(label))
    fit, index = np.split(order, [len(label) // 4])

    def share(queries, rows):
        near = np.asarray(drift.find_neighbours(queries, drift.unit(rows), K))
        return 100 * float((label[index][near] == wanted[:, None]).mean())

    back = maps.fit_all(own[fit], teacher[fit], mapped="queries", k=K)[0]
    forward = maps.fit_all(teacher[fit], own[fit], mapped="vectors", k=K)[0]
    mapped = maps.map_features(forward.arrays, drift.unit(teacher[index]))
    return {
        SEARCHES[0]: share(own_queries, own[index]),
        SEARCHES[1]: share(maps.map_features(back.arrays, own_queries), teacher[index]),
        SEARCHES[2]: share(own_queries, mapped),
    }


def weigh(folder, images) -> dict[str, float]:
    """Return parameters, milliseconds an image and megabytes of an encoder."""
    network, batch = encoder.load_encoder(folder), images[:64]
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        network.embed(batch)
        seconds.append(time.perf_counter() - began)
    size = (folder / encoder_folder.TENSORS).stat().st_size
    return {
        "parameters": network.card["parameters"],
        "ms an image": 1000 * min(seconds[1:]) / len(batch),
        "MB": size / 1e6,
    }


def measure(args, domain, seed) -> dict[str, dict[str, float]]:
    """Return name of a row -> its measures, of one domain and seed."""
    saved = pathlib.Path(args.out, domain, f"seed_{seed}", "measured.json")
    if saved.exists():
        return json.loads(saved.read_text())
    x, y, queries, wanted = read_images(args, domain)
    teacher = find_teacher(args, seed)
    teacher_rows, teacher_queries = embed(teacher, x), embed(teacher, queries)
    found = {"teacher": classify(teacher_rows, y, teacher_queries, wanted)}
    found["teacher"] |= search(
        teacher_rows, teacher_rows, y, teacher_queries, wanted, seed
    )
    found["teacher"] |= weigh(teacher, x)
    for student, network in STUDENTS.items():
        for way in WAYS:
            more: dict = {} if way == "SimCLR" else {"teacher": str(teacher)}
            more |= {"base_weight": 1.0} if way == "both" else {}
            place = saved.parent / student.replace(" ", "_") / way
            folder = train_encoder(
                args, place, domain, network, seed, args.epochs, **more
            )
            rows, asked = embed(folder, x), embed(folder, queries)
            one = classify(rows, y, asked, wanted)
            one |= search(rows, teacher_rows, y, asked, wanted, seed)
            found[f"{student}, {way}"] = one | weigh(folder, x)
            print(domain, seed, student, way, one, flush=True)
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps(found))
    return found


def show(values) -> str:
    """Show the mean of some percents and, of several, its standard error."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.1f} ± {error:.1f}"


def write_table(domain, seeds) -> str:
    """Write a line for each encoder: means and standard errors over seeds."""
    heads = [f"{domain} ({len(seeds)})", *MEASURES, *SEARCHES]
    heads += ["parameters", "ms an image", "MB"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in seeds[0]:
        cells = [show([x[row][name] for x in seeds]) for name in heads[1:6]]
        own = [x[row] for x in seeds]
        cells.append(f"{own[0]['parameters']:,}")
        cells.append(f"{np.median([x['ms an image'] for x in own]):.2f}")
        cells.append(f"{own[0]['MB']:.2f}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv=None) -> dict:
    """Print the tables after each seed; write them to a page when all are there."""
    args = parser().parse_args(argv)
    domains = DOMAINS[:1] if args.data else DOMAINS
    found: dict[str, list] = {domain: [] for domain in domains}
    for seed in args.seeds:
        for domain in domains:
            found[domain].append(measure(args, domain, seed))
        text = "\n\n".join(write_table(*pair) for pair in found.items())
        print(f"\n{text}", flush=True)
    if args.page:
        page, mark = pathlib.Path(args.page), "cifar" if args.data else "silhouettes"
        begin, end = (f"<!-- {x}distil.py: {mark} -->\n" for x in ("", "end of "))
        before, _, rest = page.read_text().partition(begin)
        after = rest.partition(end)[2]
        page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
    return found


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--epochs", type=int, default=20, help="of a student")
    made.add_argument("--teacher-epochs", type=int, default=60)
    made.add_argument("--size", type=int, default=24, help="pixels of silhouettes")
    made.add_argument("--data", help=".npz file in place of silhouettes")
    made.add_argument("--rows", type=int, default=2000, help="train images of --data")
    made.add_argument("--out", default="runs/distil", help="folder of all files")
    made.add_argument("--page", help="page with marks, between which tables belong")
    return made


if __name__ == "__main__":
    main()
