"""Time `jaxcl index upgrade` on a large file of vectors, beside a copy of the file.

  python benchmarks/index_speed.py --rows=1000000 --width=384
  python benchmarks/index_speed.py --rows=5000000 --width=768 --dtype=float16

It writes random vectors and 2,000 pairs to --out, fits a map by `jaxcl index fit`, and
runs `jaxcl index upgrade` in a process of its own. Memory is that process's largest
resident set; a second run on few rows tells how much of it the program itself needs.
The disk must have room for the file twice; all large files are deleted at the end.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np

PAIRS, BLOCK = 2000, 2**16
# Runs a command, and prints its seconds, its CPU seconds and its largest memory in MiB.
TIMED = """
import resource, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
seconds = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
sys.exit(code)
"""


def write_vectors(path, rows, width, dtype) -> None:
    """Write vectors; every 65,536 rows the same ones come again."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((min(BLOCK, rows), width), np.float32).astype(dtype)
    header = np.lib.format.open_memmap(path, "w+", dtype, (rows, width))
    del header
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - rows * block.nbytes // len(block))
        for start in range(0, rows, BLOCK):
            block[: min(BLOCK, rows - start)].tofile(file)
        os.fsync(file.fileno())


def fit_map(place, width) -> None:
    """Fit a map to pairs of the vectors and of a second, noisy space."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal((PAIRS, width), np.float32)  # the first rows
    turn = np.linalg.qr(rng.normal(size=(width, width)))[0]
    np.save(place / "old_pairs.npy", old)
    noise = 0.2 * rng.normal(size=old.shape)
    np.save(place / "new_pairs.npy", np.float32(old @ turn * 1.5 ** -np.arange(width)
                                                + noise))  # fmt: skip
    words = [f"--{x}={place / x}_pairs.npy" for x in ("old", "new")]
    run_index("fit", *words, f"--out={place / 'kit'}")


def run_index(*words) -> tuple[float, ...]:
    """Run `jaxcl index`; return seconds, CPU seconds and largest memory in MiB."""
    call = [sys.executable, "-c", TIMED, sys.executable, "-m", "jaxcl", "index"]
    done = subprocess.run([*call, *words], check=True, capture_output=True, text=True)
    return tuple(map(float, done.stdout.split()))


def time_copy(path, target) -> float:
    """Copy a file to the disk; return seconds."""
    forget(path)
    begin = time.perf_counter()
    shutil.copyfile(path, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    os.unlink(target)
    return seconds


def forget(path) -> None:
    """Drop a file from the system's cache, so that it is read from the disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def upgrade(place, path) -> tuple[float, ...]:
    """Map a file; return what `run_index` does."""
    forget(path)
    out = place / "new.npy"
    words = [f"--run={place / 'kit'}", f"--vectors={path}", f"--out={out}"]
    result = run_index("upgrade", *words)
    shapes = [np.load(x, mmap_mode="r").shape for x in (path, out)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{path} is {shapes[0]}, {out} is {shapes[1]}")
    for name in ("", ".json", ".version.npy", ".canary.safetensors"):
        os.unlink(f"{out}{name}")
    return result


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rows", type=int, default=1_000_000)
    made.add_argument("--width", type=int, default=384)
    made.add_argument("--dtype", default="float32", choices=("float16", "float32"))
    made.add_argument("--out", default="runs/index_speed", help="folder of the files")
    return made


def main(argv=None) -> dict[str, float]:
    """Print one line of numbers; return them."""
    args = parser().parse_args(argv)
    place = pathlib.Path(args.out)
    if place.exists():
        sys.exit(f"--out={place}: exists; give another path, or remove it")
    size = args.rows * args.width * np.dtype(args.dtype).itemsize
    place.mkdir(parents=True)
    free = shutil.disk_usage(place).free
    if free < 2.1 * size:
        sys.exit(f"--out={place}: needs {2.1 * size:,.0f} bytes, {free:,} are free")
    try:
        fit_map(place, args.width)
        path, few = place / "old.npy", place / "few.npy"
        write_vectors(few, PAIRS, args.width, args.dtype)
        least = upgrade(place, few)
        write_vectors(path, args.rows, args.width, args.dtype)
        copied = time_copy(path, place / "copy.npy")
        seconds, cpu, memory = upgrade(place, path)
        again = time_copy(path, place / "copy.npy")
        result = {"seconds": seconds, "cpu": cpu, "memory": memory, "copy": copied}
        print(
            f"{args.rows:,} x {args.width} {args.dtype}, {size / 1e9:.1f} GB: "
            f"{seconds:.0f} s, {cpu:.0f} s of CPU, {memory:.0f} MiB at most "
            f"({PAIRS:,} rows: {least[0]:.0f} s, {least[1]:.0f} s of CPU, "
            f"{least[2]:.0f} MiB); a copy took {copied:.0f} s before and {again:.0f} s "
            f"after; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPU cores"
        )
        return result
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
