"""An index of old embeddings, searched by an updated encoder through adapters.

An encoder learns half of the classes without labels, and its embeddings of these images
become an index. An update teaches it the other half. Test images of the old classes are
then searched for: do they find the ten images that the old encoder finds?

  python benchmarks/old_index.py --data=digits --out=runs/old_index
  python benchmarks/old_index.py --data=data/cifar10 --encoder=resnet18 --epochs=50

It prints a markdown table, percent over seeds. The index is FAISS's HNSW or that of
hnswlib, if one is installed (`pip install 'jaxcl[index]'`), else a product in NumPy.
"""

import argparse
import importlib.util
import pathlib

import numpy as np

import jaxcl
from jaxcl.config import own_images
from jaxcl.data import sources
from jaxcl.update import adapters

K, MOST = 10, 1024  # neighbours; pairs of embeddings that an adapter is fitted to


def engine():
    """The name of the first engine that is installed."""
    for name in ("faiss", "hnswlib"):
        if importlib.util.find_spec(name):
            return name
    return "numpy"


def search(name, index, queries):
    """Row numbers i64[Q, K] of the neighbours of rows of length 1."""
    if name == "faiss":
        import faiss

        graph = faiss.IndexHNSWFlat(index.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        graph.add(index)
        return graph.search(queries, K)[1]
    if name == "hnswlib":
        import hnswlib

        graph = hnswlib.Index(space="ip", dim=index.shape[1])
        graph.init_index(len(index), random_seed=0)
        graph.add_items(index)
        graph.set_ef(4 * K)
        return graph.knn_query(queries, K)[0]
    return np.argsort(-queries @ index.T, axis=1)[:, :K]


def unit(rows):
    return np.ascontiguousarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def measure(args, dataset, seed):
    """Search -> (percent of the old neighbours, percent of the query's class)."""
    half = len(dataset.class_names) // 2
    old, test = dataset.train.label < half, dataset.test.label < half
    images, queries = dataset.train.images[old], dataset.test.images[test]
    labels, wanted = dataset.train.label[old], dataset.test.label[test]
    off = dict.fromkeys(("plots", "tensorboard", "evaluate_untrained"), False)
    run = jaxcl.fit(
        images,
        encoder=args.encoder,
        epochs=args.epochs,
        seed=seed,
        options=off,
        quiet=True,
        out=pathlib.Path(args.out, f"seed_{seed}"),
    )
    before = run.encoder
    run.update(dataset.train.images[~old], limits={"accuracy_drop": None})
    index, fresh = (unit(x.embed(images)) for x in (before, run.encoder))
    asked, new = (unit(x.embed(queries)) for x in (before, run.encoder))
    name = engine()
    truth = search(name, index, asked)
    rows = np.random.default_rng(seed).permutation(len(index))[:MOST]
    found = {"old queries, old index": truth}
    found["new queries, old index"] = search(name, index, new)
    for kind, fit in adapters.KINDS.items():
        mapped = adapters.map_features(fit(index[rows], fresh[rows]), new)
        found[f"{kind} adapter, old index"] = search(name, index, np.array(mapped))
    found["new queries, all embedded again"] = search(name, fresh, new)
    result = {}
    for key, near in found.items():
        pairs = zip(near, truth, strict=True)
        shared = np.mean([len({*a} & {*b}) / K for a, b in pairs])
        result[key] = 100 * shared, 100 * (labels[near] == wanted[:, None]).mean()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help="a path, or digits")
    parser.add_argument("--out", default="runs/old_index", help="folder of the runs")
    parser.add_argument("--encoder", default="conv_net")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    made = sources.needs_nothing(args.data)
    section = {"name": args.data} if made else sources.section_of(args.data)
    dataset, cells = own_images.read_images(section), {}
    for seed in range(args.seeds):
        for key, pair in measure(args, dataset, seed).items():
            cells.setdefault(key, []).append(pair)
    print(f"{engine()}, {args.seeds} seeds\n")
    print("| | old neighbours | images of the class |\n|---|---:|---:|")
    for key, pairs in cells.items():
        shown = [f"{x.mean():.1f} ± {x.std():.1f}" for x in np.array(pairs).T]
        print(f"| {key} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
