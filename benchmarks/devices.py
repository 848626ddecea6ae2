"""Whether a run ends alike on one device and on several: its scores over seeds.

  JAX_NUM_CPU_DEVICES=8 python benchmarks/devices.py --seeds 20

One step on 1 and on 8 devices agrees to rounding. Rounding then grows: a run of some
hundred steps ends at another accuracy. The script trains a config with many seeds, each
on one device, on all, and once more on one device from a start that differs in the last
bit: that control says how far rounding alone takes a run. It prints the scores of each
kind of run, their means and spreads, and tests for a difference: of means (paired by
seed) and of distributions (Kolmogorov and Smirnov).
"""

import argparse
import importlib.util
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxcl.config import build
from jaxcl.run import job, log_file, result_file, train

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "er_ace_cifar10.py"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--config", default=f"{CONFIG}:debug", help="FILE or FILE:ARG")
    made.add_argument("--matrix", default="predict/class_incremental")
    made.add_argument("--seeds", type=int, default=20)
    made.add_argument("--json", help="file to append one line per run to")
    return made


def read(config: str):
    """The ConfigDict of FILE:ARG, of which nothing but the scores is kept."""
    file, _, argument = config.partition(":")
    spec = importlib.util.spec_from_file_location("devices_config", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.get_config(argument) if argument else module.get_config()
    made.update(seeds=1, tensorboard=False, plots=False, progress=False)
    made.update(plasticity=False, evaluate_untrained=False, save_every=0, log_every=1)
    return made


def shifted(method):
    """The method, whose parameters start one part in 2^23 away."""

    def init(key, batch):
        state = method.init(key, batch)
        params = jax.tree.map(lambda p: p * jnp.float32(1 + 2**-23), state.params)
        return state.replace(params=params)

    return method._replace(init=init)


def kinds(config, folder) -> dict:
    """Kind of run -> (its job, the step that all seeds share)."""
    found = {}
    for name, devices in (("one", 1), ("all", len(jax.devices()))):
        config.devices = devices
        work = build.build(config, pathlib.Path(folder) / name)
        work = work._replace(logging=work.logging._replace(quiet=True))
        found[name] = work, job.compile_step(work)
    work, step = found["one"]
    found["one, last bit"] = work._replace(method=shifted(work.method)), step
    return found


def score(work, step, matrix) -> tuple[float, float]:
    """Final average accuracy in percent, and the loss of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        found = train.run_tasks(work, folder, step=step)
        rows = log_file.read_rows(folder)
    last = result_file.matrix(found, matrix)[-1]
    first = next(row["loss"] for row in rows if "loss" in row)
    return 100 * float(np.mean(last)), float(first)


def compared(scores: dict) -> str:
    """The table of what each kind of run came to, beside runs on one device."""
    one = np.array(scores["one"])
    lines = ["| runs | mean | sd over seeds | mean difference, by seed | its sd | p "]
    lines[0] += "(means) | p (distributions) |"
    lines.append("|---|---|---|---|---|---|---|")
    for name, values in scores.items():
        values, cells = np.array(values), ["", "", "", ""]
        if name != "one":
            difference = values - one
            t = scipy.stats.ttest_rel(values, one)
            same = scipy.stats.ks_2samp(values, one)
            low, high = t.confidence_interval()
            cells = [
                f"{difference.mean():+.2f} ({low:+.2f} to {high:+.2f})",
                f"{difference.std(ddof=1):.2f}",
                f"{t.pvalue:.2f}",
                f"{same.pvalue:.2f}",
            ]
        shown = [name, f"{values.mean():.2f}", f"{values.std(ddof=1):.2f}", *cells]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(argv=None) -> dict:
    """The command; returns the scores of each kind of run, a list over seeds."""
    args = parser().parse_args(argv)
    config = read(args.config)
    with tempfile.TemporaryDirectory() as folder:
        works = kinds(config, folder)
        scores, apart = {name: [] for name in works}, 0.0
        for seed in range(args.seeds):
            first = {}
            for name, (work, step) in works.items():
                own = work._replace(data=work.data._replace(seed=seed))
                value, first[name] = score(own, step, args.matrix)
                scores[name].append(value)
                line = {"seed": seed, "runs": name, "score": value} | {
                    "first_loss": first[name]
                }
                print(json.dumps(line), flush=True)
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
            apart = max(apart, abs(first["all"] / first["one"] - 1))
    print(f"{len(jax.devices())} devices of {jax.devices()[0].device_kind}")
    print(f"losses of the first step: at most {apart:.0e} apart")
    print(compared(scores))
    return scores


if __name__ == "__main__":
    main()
