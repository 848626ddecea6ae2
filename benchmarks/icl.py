"""Time of a step of ICL with each of its parts, on graphs or on images.

  python benchmarks/icl.py
  python benchmarks/icl.py --graphs=proteins.npz
  python benchmarks/icl.py --images

builds a job of each variant, and of plain InfoNCE, and times their compiled steps in
the second task as the training loop calls them, in turns.
"""

import argparse
import contextlib
import pathlib

import ml_collections
import numpy as np
import throughput

from jaxcl.config import build
from jaxcl.data import graph_arrays, stream
from jaxcl.methods import icl
from jaxcl.run import job

# With its agents, and the same without: the agents' share is the difference.
PAIRS = {"icl": "no_lrl", "no_meta": "no_both"}
VARIANTS = ("continue", "no_both", "no_meta", "no_lrl", "icl")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--graphs", help="an .npz file or a TUDataset folder of graphs")
    made.add_argument("--images", action="store_true", help="random images instead")
    made.add_argument("--growth", type=float, default=0.5)
    made.add_argument("--batch", type=int, default=32)
    made.add_argument("--rows", type=int, default=1000, help="of what is made up")
    made.add_argument("--depth", type=int, default=18, help="of the ResNet")
    made.add_argument("--width", type=int, default=16, help="of its first stage")
    made.add_argument("--size", type=int, default=32, help="pixels of a side")
    made.add_argument("--windows", type=int, default=7)
    made.add_argument("--steps", type=int, default=20, help="per window")
    made.add_argument("--json", help="file to append one line per variant to")
    return made


def _examples(args, directory) -> dict:
    """Sections of the config that say what is read."""
    if not args.images:
        data = {"name": "graphs", "path": args.graphs}
        if args.graphs is None:
            made_up = {"count": args.rows, "nodes": (20, 60)}
            data = {"name": "rings_and_trees", **made_up}
        return {"data": data, "augment": {"name": "graphs"}, "encoder": {"name": "gcn"}}
    shape = (args.rows, args.size, args.size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = pathlib.Path(directory) / "random.npz"
    if not path.exists():
        np.savez(path, train_x=images, train_y=np.arange(args.rows) % 2)
    return {
        "data": {"name": "npz", "path": str(path)},
        "augment": {
            "size": args.size,
            "scale": (0.2, 1.0),
            "interpolation": "bilinear",
            "jitter": (0.4, 0.4, 0.4, 0.1),
            "mean": (0.5,) * 3,
            "std": (0.25,) * 3,
        },
        "encoder": {"name": "resnet", "depth": args.depth, "width": args.width},
    }


def make_job(args, variant: str, directory) -> job.Job:
    """The job of a variant: the old rows, then the new ones, without an end."""
    made = {
        "name": variant,
        **_examples(args, directory),
        "scenario": {"name": "growth", "growth": args.growth, "evaluation": "none"},
        "method": {"name": "icl", **icl.VARIANTS[variant]},
        "batch_size": args.batch,
        "epochs": 1000,
        "optimizer": {"name": "adam", "lr": 1e-3, "weight_decay": 1e-5},
        "scale_lr": False,
        "schedule": {"name": "constant"},
        "evaluators": {},
        "devices": 1,
        "evaluate_untrained": False,
        "plasticity": False,
        "save_every": 0,
    }
    where = pathlib.Path(directory) / variant
    return build.build(ml_collections.ConfigDict(made), where)


def filling(work: job.Job) -> list[float] | None:
    """Measure the padded share of nodes and edges in twenty epochs; None of images."""
    examples = work.stream.dataset.train
    if examples.graphs is None:
        return None
    rng, rows = np.random.default_rng(0), np.arange(stream.count_rows(examples))
    order = [stream.filled_order(rng, rows, work.data.batch_size) for _ in range(20)]
    budgets = graph_arrays.buckets(examples.graphs, work.data.batch_size)
    masks = []
    for batch in np.concatenate(order):
        budget = graph_arrays.budget_of(examples.graphs, batch, budgets)
        made = graph_arrays.pad_batch(examples.graphs, batch, **budget._asdict())
        masks.append((made.node_mask, made.edge_mask))
    return [1 - np.concatenate(x).mean() for x in zip(*masks, strict=True)]


def measure(args, directory) -> list[dict]:
    """What the table says of each variant, name -> value."""
    with contextlib.ExitStack() as stack:
        works = {name: make_job(args, name, directory) for name in VARIANTS}
        _, seconds = throughput.in_turns(works, args, stack)
    found, waste = [], filling(works["continue"])
    for name, work in works.items():
        step, ratio = seconds[name], np.divide(seconds[name], seconds["continue"])
        rows = work.data.batch_size * work.batches_per_step(1)
        share = None
        if name in PAIRS:
            share = float(np.median(1 - np.divide(seconds[PAIRS[name]], step)))
        found.append(
            {
                "variant": name,
                "flops": throughput.flops(work, 1),
                "step_ms": 1e3 * float(np.median(step)),
                "rows_per_second": float(rows / np.median(step)),
                "ratio": float(np.median(ratio)),
                "ratio_min": float(ratio.min()),
                "ratio_max": float(ratio.max()),
                "agents": share,
                "waste": waste,
            }
        )
    return found


def line(found: dict | None = None) -> str:
    """One row of the table, or its head."""
    cells = "variant", "G FLOP", "step ms", "rows/s", "step / plain", "agents' share"
    if found is not None:
        flops, share = found["flops"], found["agents"]
        cells = (
            found["variant"],
            "-" if flops is None else f"{flops / 1e9:.2f}",
            f"{found['step_ms']:.2f}",
            f"{found['rows_per_second']:,.0f}",
            f"{found['ratio']:.2f}  ({found['ratio_min']:.2f} to "
            f"{found['ratio_max']:.2f})",
            "-" if share is None else f"{100 * share:.1f} %",
        )
    widths = 10, 10, 10, 10, 24, 15
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure all variants, print the table, return what it holds."""
    rows = throughput.lines(parser().parse_args(argv), measure, line)
    if rows[0]["waste"] is not None:
        nodes, edges = (f"{100 * x:.0f} %" for x in rows[0]["waste"])
        print(f"filling of batches: {nodes} of the nodes, {edges} of the edges")
    return rows


if __name__ == "__main__":
    main()
