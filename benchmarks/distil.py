"""Small encoders by SimCLR, by distillation of a larger one, and by both, as tables.

  python benchmarks/distil.py --seeds 0 1 2 --page=docs/methods.md

The teacher is a ResNet that learns 4,000 filled silhouettes with their labels (SupCon).
The students learn 1,000 others, without labels: filled ones, or outlines, which are new
to the teacher. All ways to train a student take the same steps on the same two views,
so that its own FLOPs are equal but for its heads; the teacher's forward passes come on
top. With --data=FILE.npz (train_x, train_y, test_x, test_y) the images are those of the
file, such as CIFAR-10, and there is no new domain.

First each way chooses its learning rate from GRID, and "distilled" its term from TERMS
at the second: by the k-NN accuracy of the first student on filled silhouettes of
seed 10, which no table has.

Tables have, in percent: the test images whose class a vote of the ten nearest train
images finds (k-NN) and a logistic regression (linear); and of the ten nearest images in
an index, the share of the query's class. The index is three quarters of the train
images by the teacher. Maps are fitted to the others: to bring the student's queries to
the teacher's space, or the teacher's vectors to the student's. Beside that: parameters,
milliseconds an image in batches of 64 on this CPU, megabytes of the export.

The same command resumes; all files are in --out. --page writes the tables after each
student.
"""

import argparse
import functools
import json
import pathlib
import time

import numpy as np
from sklearn import linear_model, pipeline, preprocessing

from jaxcl.config import build, own_images
from jaxcl.data.sources import by_name
from jaxcl.index import drift, maps
from jaxcl.run import encoder_folder, finish
from jaxcl.weights import encoder, export

K = 10
DOMAINS = ("plain", "outline")
STUDENTS = {
    "conv_net": {"name": "conv_net", "width": 16},
    "half ResNet": {"name": "resnet", "depth": 10, "width": 8},
}
TEACHER_SEED = 10
TEACHER = {"name": "resnet", "depth": 10, "width": 16}
# Way to train a student -> whether it has the teacher, weight of SimCLR's own loss
WAYS = {"SimCLR": (False, 1.0), "distilled": (True, 0.0), "both": (True, 1.0)}
TERMS = ("cosine", "smooth_l1", "distance")
GRID = (0.0005, 0.002, 0.008, 0.03)  # of AdamW
CHOICE_SEED = 10
QUIET = {"progress": False, "plots": False, "tensorboard": False}
QUIET |= {"evaluate_untrained": False, "plasticity": False, "save_every": 0}
MEASURES = ("k-NN", "linear")
# Whose queries, whose index, and what is mapped
SEARCHES = ("own index", "queries mapped to the teacher's", "teacher's index mapped")


def read_images(args, domain, seed) -> tuple[np.ndarray, ...]:
    """Return train images and labels, test images and labels of the students.

    With --data the test images of CHOICE_SEED, for choices, are train images, too.
    """
    if args.data:
        x, y, *test = read_file(args)
        order = np.random.default_rng(seed).permutation(len(x) - args.teacher_rows)
        rows, held_out = np.split(args.teacher_rows + order[: 2 * args.rows], 2)
        if seed == CHOICE_SEED:
            test = [x[held_out], y[held_out]]
        return x[rows], y[rows], *test
    data = by_name.load("shapes", domains=(domain,), size=args.size, draw_seed=seed)
    return data.train.images, data.train.label, data.test.images, data.test.label


def read_teacher_images(args) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels that no student sees."""
    if args.data:
        x, y, *_ = read_file(args)
        return x[: args.teacher_rows], y[: args.teacher_rows]
    options = {
        "train": args.teacher_rows,
        "size": args.size,
        "draw_seed": 1000 + TEACHER_SEED,
    }
    data = by_name.load("shapes", domains=DOMAINS[:1], **options)
    return data.train.images, data.train.label


def read_file(args) -> tuple[np.ndarray, ...]:
    """Read --data."""
    with np.load(args.data) as data:
        return tuple(data[x] for x in ("train_x", "train_y", "test_x", "test_y"))


def train_encoder(
    args, place, arrays, network, seed, epochs, options, rate=None
) -> pathlib.Path:
    """Train an encoder; return the folder of its export.

    Args:
      arrays: train images; and labels, if the base reads them.
      options: dotted name in the config -> value.
      rate: learning rate of Adam; None: LARS, with the rate of `own_images`.
    """
    if not (place / "encoder" / encoder_folder.CARD).exists():
        place.mkdir(parents=True, exist_ok=True)
        names = ("train_x", "train_y")[: len(arrays)]
        np.savez(place / "images.npz", **dict(zip(names, arrays, strict=True)))
        section = {"name": "npz", "path": str(place / "images.npz")}
        network = dict(network)
        if network["name"] == "resnet":
            network["stem"] = "cifar"
        config = own_images.config(
            section, encoder=network, teacher=options.get("teacher")
        )
        config.update(seed=seed, epochs=epochs, **QUIET)
        config.evaluators = {}
        config.batch_size = 32
        config.method.hidden_dim, config.method.output_dim = 128, 64
        if not args.data:
            config.augment.update(scale=(0.7, 1.0), grayscale=1.0)
        if rate is not None:
            config.optimizer = {"name": "adam", "lr": rate, "decoupled": True}
            config.optimizer.update({"exclude_1d": True, "weight_decay": 0.05})
        config.update_from_flattened_dict(options)
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place / "encoder"


def find_teacher(args) -> pathlib.Path:
    """Train the teacher of all students, or find it; return its folder."""
    place = pathlib.Path(args.out, "teacher", f"seed_{TEACHER_SEED}")
    arrays, epochs = read_teacher_images(args), args.teacher_epochs
    options: dict = {"method.base.name": args.teacher_base}
    if args.teacher_rate:
        options["scale_lr"] = False
    how = (TEACHER, TEACHER_SEED, epochs, options, args.teacher_rate)
    return train_encoder(args, place, arrays, *how)


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


def train_student(args, place, domain, student, way, seed, term, rate) -> pathlib.Path:
    """Train a student in one of `WAYS`; return the folder of its export."""
    options: dict = {"scale_lr": False}
    has_teacher, base_weight = WAYS[way]
    if has_teacher:
        options |= {f"method.strategy.{x}": float(x == term) for x in TERMS}
        options["method.strategy.base_weight"] = base_weight
        options["teacher"] = str(find_teacher(args))
    arrays = read_images(args, domain, seed)[:1]
    network, epochs = STUDENTS[student], args.epochs
    return train_encoder(args, place, arrays, network, seed, epochs, options, rate)


def choose(args) -> dict:
    """Choose the term, and the learning rate of each way; return "term" and ways."""
    saved = pathlib.Path(args.choice or pathlib.Path(args.out, "choice.json"))
    if saved.exists():
        return json.loads(saved.read_text())
    student, domain = next(iter(STUDENTS)), DOMAINS[0]
    x, y, queries, wanted = read_images(args, domain, CHOICE_SEED)

    def score(way, term, rate):
        place = pathlib.Path(args.out, "choice", way, term, str(rate))
        folder = train_student(
            args, place, domain, student, way, CHOICE_SEED, term, rate
        )
        scores = classify(embed(folder, x), y, embed(folder, queries), wanted)
        tried.append({"way": way, "term": term, "rate": rate} | scores)
        print(tried[-1], flush=True)
        return scores["k-NN"]

    tried: list[dict] = []
    term = max(TERMS, key=lambda term: score("distilled", term, GRID[1]))
    choice = {"term": term}
    for way in WAYS:
        choice[way] = max(GRID, key=functools.partial(score, way, term))
    saved.write_text(json.dumps(choice | {"tried": tried}))
    return choice


def measure(args, choice, student, domain, seed) -> dict[str, dict[str, float]]:
    """Return name of a row -> its measures: the teacher's, and a student's."""
    place = pathlib.Path(args.out, domain, f"seed_{seed}", student.replace(" ", "_"))
    saved = place / "measured.json"
    if saved.exists():
        return json.loads(saved.read_text())
    x, y, queries, wanted = read_images(args, domain, seed)
    teacher = find_teacher(args)
    teacher_rows, teacher_queries = embed(teacher, x), embed(teacher, queries)

    def describe(folder, rows, queries):
        scores = classify(rows, y, queries, wanted)
        scores |= search(rows, teacher_rows, y, queries, wanted, seed)
        return scores | weigh(folder, x)

    scores = {"teacher": describe(teacher, teacher_rows, teacher_queries)}
    for way in args.ways:
        options = (student, way, seed, choice["term"], choice[way])
        folder = train_student(args, place / way, domain, *options)
        one = describe(folder, embed(folder, x), embed(folder, queries))
        scores[f"{student}, {way}"] = one
        print(domain, seed, student, way, one, flush=True)
    saved.write_text(json.dumps(scores))
    return scores


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


def main(argv=None) -> None:
    """Print the tables after each student, and write them to a page."""
    args = parser().parse_args(argv)
    choice = choose(args)
    domains = DOMAINS[:1] if args.data else DOMAINS
    tables: dict[str, list[dict]] = {x: [{} for _ in args.seeds] for x in domains}
    for student in args.students:
        for number, seed in enumerate(args.seeds):
            for domain in domains:
                rows = measure(args, choice, student, domain, seed)
                tables[domain][number].update(rows)
        named = {"images" if args.data else x: seeds for x, seeds in tables.items()}
        text = "\n\n".join(write_table(*pair) for pair in named.items())
        rates = ", ".join(f"{choice[way]} {way}" for way in args.ways)
        text += f"\n\nTerm: `{choice['term']}`. Learning rates: {rates}."
        print(f"\n{text}", flush=True)
        if args.page:
            write_page(pathlib.Path(args.page), text, bool(args.data))


def write_page(page, text, from_file) -> None:
    """Write the tables between their marks."""
    mark = "cifar" if from_file else "silhouettes"
    begin, end = (f"<!-- {x}distil.py: {mark} -->\n" for x in ("", "end of "))
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--epochs", type=int, default=10, help="of a student")
    made.add_argument("--teacher-epochs", type=int, default=8)
    made.add_argument("--teacher-rows", type=int, default=4000, help="its images")
    made.add_argument("--teacher-base", default="supcon", help="its loss")
    made.add_argument("--teacher-rate", type=float, help="of AdamW; default: LARS")
    made.add_argument("--size", type=int, default=16, help="pixels of silhouettes")
    made.add_argument("--data", help=".npz file in place of silhouettes")
    made.add_argument("--rows", type=int, default=2000, help="train images of --data")
    made.add_argument("--students", nargs="+", default=[*STUDENTS], choices=STUDENTS)
    made.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    made.add_argument("--choice", help="choice.json of another --out")
    made.add_argument("--out", default="runs/distil", help="folder of all files")
    made.add_argument("--page", help="page with marks, between which tables belong")
    return made


if __name__ == "__main__":
    main()
