"""Settings for all tests: 8 fake CPU devices, cheap compilation, a shared cache."""

import os
import pathlib
import tempfile

# Before jax is imported anywhere; processes that tests start inherit these.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# The nets are tiny: compiling is what costs, so the expensive passes are off.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(tempfile.gettempdir()) / "jaxcl-test-cache"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import jax  # noqa: E402
import pytest  # noqa: E402

pytest.register_assert_rewrite("helpers")  # what they assert is shown in full

from helpers import pictures  # noqa: E402
from jaxcl import plots  # noqa: E402
from jaxcl.evals import tsne  # noqa: E402

SLOW = pathlib.Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what slow.txt lists: variants that take long and have a quick sister."""
    listed = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid.removeprefix("tests/") in listed:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_other_modules_are_dropped():
    yield
    jax.clear_caches()


_MAPS = pathlib.Path("/proc/self/maps")  # Linux alone has it, and the limit


@pytest.fixture(autouse=True)
def _programs_fit_into_the_process(request):
    """Each compiled program maps memory, of which a process has 65,530 pieces at most.

    Above that XLA dies of a segmentation fault, as it did in the slow rows of
    test_methods.py, one module.
    """
    yield
    done = request.config.stash[_DONE] = request.config.stash.get(_DONE, 0) + 1
    if done % 10 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


_DONE = pytest.StashKey[int]()


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved; nothing of it may be cut off."""
    found, save = [], plots._save

    def keep(figure, path):
        save(figure, path)
        pictures.check_whole(path)
        found.append(figure)

    monkeypatch.setattr(plots, "_save", keep)
    return found


@pytest.fixture
def drawn(monkeypatch):
    """What `plots.marked` was given, and what t-SNE was, which is left out."""
    calls, features, marked = [], [], plots.marked

    def keep(*given, **options):
        calls.append((given, options))
        marked(*given, **options)

    def look(found, **options):
        features.append(found)
        return found[:, :2]

    monkeypatch.setattr(plots, "marked", keep)
    monkeypatch.setattr(tsne, "project", look)
    return calls, features
