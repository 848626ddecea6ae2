"""Settings for all tests: 8 fake CPU devices, cheap compilation, a shared cache."""

import collections
import contextlib
import gc
import json
import logging
import os
import pathlib
import subprocess
import time

import environment

# Before jax is imported anywhere; processes that tests start inherit these.
environment.settle(devices=8)

import jax  # noqa: E402
import pytest  # noqa: E402

pytest.register_assert_rewrite("helpers")  # what they assert is shown in full

from helpers import interpreted  # noqa: E402

SLOW = pathlib.Path(__file__).with_name("slow.txt")
LAST_SLOW_RUN = pathlib.Path(__file__).with_name("last_slow_run.json")
# Files that take longest, these the first.
LONG = {
    name: place
    for place, name in enumerate(
        ("test_quickstart", "test_update", "test_methods", "test_launch_local")
        + ("test_main", "test_seeds", "test_streaming", "test_export")
        + ("test_speedup", "test_benchmarks")
    )
}
# Files, or tests, of which nothing dear is shared but by the tests of one variant.
BY_VARIANT = {"test_methods", "test_debug_config_trains"}
# Files whose subject is not what XLA makes of a program: it compiles nothing for their
# quick tests.
BY_NUMPY = {
    *("alignment", "aser", "augment", "augment_graph", "bases", "benchmarks", "cclis"),
    *("compare", "convnext", "core", "ddpg", "der", "distil", "drift", "duel"),
    *("duel_theory", "embed", "er_lwf", "evals", "examples", "export", "filtering"),
    *("fit", "frozen", "gcn", "gcr", "gem", "gss", "herding", "hidden_patches", "icl"),
    *("import_file", "import_peers", "importance", "incremental", "index"),
    *("index_maps", "index_parts", "layouts", "logistic", "loss_aware", "losses"),
    *("memory", "memory_evals", "mir", "nets", "noncontrastive", "online"),
    *("online_head", "online_probe", "online_ssl", "optim", "overview", "pieces"),
    *("plasticity", "policies", "prototype", "queue", "redundancy", "rehearsal"),
    *("replay_losses", "selection", "stablehlo", "stops", "streaming_losses", "tuning"),
    *("two_view", "uniformity", "update", "vit"),
}


def pytest_addoption(parser):
    group = parser.getgroup("jaxcl")
    group.addoption(
        "--shard", metavar="I/N", help="of the tests chosen, part I (from 1) of N"
    )
    group.addoption(
        "--skipped", metavar="FILE", help="write what was skipped, for pytest @FILE"
    )
    group.addoption(
        "--strict-skips",
        action="store_true",
        help="fail where a test is skipped",
    )
    group.addoption(
        "--xla", action="store_true", help="compile what quick tests compute by NumPy"
    )
    group.addoption("--record", action="store_true", help=f"write {LAST_SLOW_RUN.name}")


def pytest_configure(config):
    if config.option.shard:
        config.pluginmanager.register(_Shard())
    if not hasattr(config, "workerinput"):  # once, not in each process of xdist
        config.pluginmanager.register(_Reports(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what slow.txt lists, tests with all their variants or single variants."""
    listed = set(SLOW.read_text().splitlines())
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in listed or name.partition("[")[0] in listed:
            item.add_marker(pytest.mark.slow)
    # The longest first, or one process waits for the other at the end.
    items.sort(key=lambda item: LONG.get(item.path.stem, len(LONG)))


def _variant(nodeid: str, among: set[str]) -> str:
    """Name the variant that a test of some files or tests is of; others have none."""
    path, _, test = nodeid.partition("::")
    name, _, variant = test.partition("[")
    return variant if {pathlib.PurePath(path).stem, name} & among else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a file, or of a variant, in the process that has their fixtures.

    xdist's groups reach no test of pytest 9.2, which ignores the names that it sets.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return f"{nodeid.partition('::')[0]} {_variant(nodeid, BY_VARIANT)}"

    return ByFile(config, log)


class _Shard:
    """Keeps one part of the tests that -m and -k left."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        part, parts = map(int, config.option.shard.split("/"))
        if not 1 <= part <= parts:
            raise pytest.UsageError(f"--shard={part}/{parts}: I must be from 1 to N")
        # Neighbours cost alike, so they go to different shards.
        mine = set(sorted({_group(item) for item in items})[part - 1 :: parts])
        left_out = [item for item in items if _group(item) not in mine]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _group(item) in mine]


def _group(item) -> str:
    """Tests that share a compiled program or a fixture stay together."""
    name = _variant(item.nodeid, BY_VARIANT | {"test_two_view"}) or item.originalname
    return f"{item.path.name}::{name}"


class _Reports:
    """What was skipped, and what runs of the slow tests came to."""

    def __init__(self, config):
        self.config, self.begun = config, time.time()
        self.skipped = {}  # node id -> reason
        self.counts = collections.Counter()
        self.failures = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)
        self._note(report)

    def pytest_collectreport(self, report):
        self._note(report)

    def _note(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = str(report.longrepr[-1])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        options = self.config.option
        if options.skipped:
            lines = "".join(f"{name}\n" for name in sorted(self.skipped))
            pathlib.Path(options.skipped).write_text(lines)
        if options.strict_skips and self.skipped and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if options.record:
            LAST_SLOW_RUN.write_text(json.dumps(self._records(), indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        if self.config.option.strict_skips:
            for name, reason in self.skipped.items():
                terminalreporter.write_line(f"SKIPPED {name}: {reason}")

    def _records(self):
        """Return this run by its shard, and the others of as many shards."""
        shard = self.config.option.shard or "1/1"
        old = json.loads(LAST_SLOW_RUN.read_text()) if LAST_SLOW_RUN.exists() else {}
        parts = shard.partition("/")[2]
        others = {name: run for name, run in old.items() if name.endswith(f"/{parts}")}
        runs = others | {shard: self._record()}
        return dict(sorted(runs.items(), key=lambda run: int(run[0].partition("/")[0])))

    def _record(self):
        def git(*words):
            done = subprocess.run(["git", *words], capture_output=True, text=True)
            return done.stdout.strip()

        return {
            "command": "pytest " + " ".join(self.config.invocation_params.args),
            "commit": git("rev-parse", "HEAD"),
            "changed_files": git(
                *("status", "--porcelain", "--", ":/", f":(exclude){LAST_SLOW_RUN}")
            ).splitlines(),
            "date": time.strftime("%Y-%m-%d"),
            **{name: self.counts[name] for name in ("passed", "failed", "skipped")},
            "failures": self.failures,
            "minutes": round((time.time() - self.begun) / 60),
            "cores": os.cpu_count(),
        }


def pytest_collection_finish():
    """Thousands of tests need not be looked through each time a trace leaves garbage.

    Measured on 33 tests: 5 % less processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_MAPS = pathlib.Path("/proc/self/maps")  # Linux alone has it, and the limit


@pytest.fixture(autouse=True, scope="module")
def _programs_of_other_modules_are_dropped():
    """Drop them where there are many: small ones are shared, and compile again."""
    yield
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _equations_are_computed_by_numpy(request):
    """Compile nothing where the equation is the subject; see helpers/interpreted.py."""
    option = request.config.option
    slow = option.markexpr and "not slow" not in option.markexpr
    name = request.path.stem.removeprefix("test_")
    with contextlib.ExitStack() as stack:
        if name in BY_NUMPY and not slow and not option.xla:
            stack.enter_context(interpreted.everything())
        yield


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


@pytest.fixture(autouse=True)
def _no_test_before_decides_what_is_printed():
    """Commands and `fit` print warnings on stderr from then on, in their process."""
    logger = logging.getLogger("absl")
    for handler in logger.handlers[:]:
        if type(handler).__module__ == "jaxcl.run.terminal":
            logger.removeHandler(handler)


@pytest.fixture(params=["pillow", "cv2"])
def decoder(request):
    if request.param == "cv2":
        pytest.importorskip("cv2")
    return request.param
