"""The environment in which tests run their programs; set before jax is imported."""

import importlib.metadata
import os
import pathlib
import stat
import sys
import tempfile

# The nets are tiny: compiling is what costs, so the expensive passes are off, and loops
# are emitted as LLVM's code at once instead of through MLIR (a third of the time).
# XLA aborts on a flag that it does not know, so each flag has the last release of
# jaxlib that is known to have it; None: the newest has it.
FLAGS = {
    "--xla_backend_optimization_level=0": None,
    "--xla_llvm_disable_expensive_passes=true": None,
    "--xla_cpu_use_fusion_emitters=false": (0, 11, 0),
}


def known_flags() -> list[str]:
    """Return the flags of FLAGS that the installed jaxlib knows."""
    release = importlib.metadata.version("jaxlib").split(".")[:3]
    installed = tuple(map(int, release))
    return [flag for flag, last in FLAGS.items() if last is None or installed <= last]


def compile_cache() -> str:
    """A folder of compiled programs that serves run after run, and this user alone.

    What is in it is loaded as code, so that nobody else may have put it there.

    Raises:
      PermissionError: somebody else made it, or may write to it.
    """
    name = f"jaxcl-test-cache-{os.getuid()}"
    path = pathlib.Path(tempfile.gettempdir()) / name
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not own or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{path}: is not a folder of this user alone (mode 0700); remove it, or "
            "name another one by JAX_COMPILATION_CACHE_DIR"
        )
    return str(path)


def keep_bytecode() -> None:
    """Let this process and those that it starts keep the bytecode of modules.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process would
    compile JAX's and our sources again: half of the time of its imports. The files lie
    in the cache, so that no folder of sources changes.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        folder = os.path.join(compile_cache(), "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False


def settle(devices: int) -> None:
    """Cheap compilation, fake CPU devices, and the cache."""
    keep_bytecode()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    os.environ["XLA_FLAGS"] = " ".join(known_flags())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compile_cache()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads that wait cost more than sums
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    # PyTorch 2.13's gradient of a strided 1 x 1 convolution of channels-last images is
    # wrong, crashes or hangs with oneDNN's AVX2 kernels, on processors without AVX-512.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
