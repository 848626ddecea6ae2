"""Read a finished run: its encoder, numbers and pictures."""

import base64
import html
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from etils import epath

from jaxcl import errors, plots, storage
from jaxcl.api import inputs, load
from jaxcl.config import options, recipe
from jaxcl.data.sources import by_name, in_memory
from jaxcl.errors import Refused
from jaxcl.run import log_file, result_file, updates
from jaxcl.update import verdict as update_verdict
from jaxcl.weights import encoder, export


class Update(NamedTuple):
    """The outcome of an update."""

    accepted: bool  # else the encoder is that of before
    verdict: dict  # what update.json says: accuracies, drift, limits broken
    folder: str  # run directory of the update

    def __str__(self) -> str:
        """Describe accuracy, index and verdict in sentences, like the command."""
        return update_verdict.write_sentences(self.verdict)


class Check(NamedTuple):
    """The outcome of a check: whether an update is due."""

    advice: str  # "wait", "update" or "look at the data"
    report: dict  # what check.json says
    folder: str  # with check.json and the picture of the images that differ most

    def __str__(self) -> str:
        """Describe the check in sentences, like the command."""
        from jaxcl.update import check

        return check.write_sentences(self.report)


class Result:
    """A run directory: `jaxcl.fit` returns one.

    `jaxcl.Result("runs/mine")` opens any run, even one of the command line.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        stored_sets: Sequence[in_memory.StoredSet] = (),
    ):
        """Read a run.

        Args:
          folder: run directory, of one seed.
          stored_sets: arrays that its config names, see `in_memory.store_set`.

        Raises:
          Refused: it holds no run that has finished a task.
        """
        self.folder = os.fspath(folder)
        self._stored_sets = list(stored_sets)
        self._encoder: tuple[str, encoder.Encoder] | None = None
        file = epath.Path(self.folder) / result_file.RESULTS
        if not file.exists():
            raise Refused(f"{self.folder}: no run in it has finished a task")

    def __repr__(self) -> str:
        """Name the directory, and average accuracies, also those before training."""
        phrases, results = [f"jaxcl.Result({self.folder!r})"], self.results
        for name, measures in results["summary"].items():
            if (value := measures["average_accuracy"]) is None:
                continue
            before = result_file.untrained(results, name)
            was = "" if before is None else f" (untrained {100 * before:.1f} %)"
            phrases.append(f"{name} {100 * value:.1f} %{was}")
        return ", ".join(phrases)

    def _repr_html_(self) -> str:
        """Show accuracies and the picture of `plot` in a notebook."""
        results, rows = self.results, []
        for name, measures in results["summary"].items():
            values = measures["average_accuracy"], result_file.untrained(results, name)
            cells = ("-" if x is None else f"{100 * x:.1f} %" for x in values)
            rows.append("".join(f"<td>{html.escape(x)}</td>" for x in (name, *cells)))
        image = base64.b64encode(plots.to_png(self.plot())).decode()
        return (
            f"<p><code>{html.escape(self.folder)}</code></p><table><tr><th></th>"
            "<th>average accuracy</th><th>untrained</th></tr>"
            + "".join(f"<tr>{row}</tr>" for row in rows)
            + '</table><img alt="accuracy and loss" '
            + f'src="data:image/png;base64,{image}">'
        )

    @property
    def config(self) -> ml_collections.ConfigDict:
        """Return the config as given: every option that it set."""
        saved = storage.read_object(epath.Path(self.folder) / "config.json")
        return ml_collections.ConfigDict(saved)

    @property
    def resolved(self) -> ml_collections.ConfigDict:
        """Return every option with the value that it had, defaults included.

        Raises OSError if there is no resolved.json.
        """
        saved = storage.read_object(epath.Path(self.folder) / options.RESOLVED)
        return ml_collections.ConfigDict(saved)

    @property
    def results(self) -> dict[str, Any]:
        """Return the content of results.json: matrices, measures, scalars, cost."""
        return storage.read_object(epath.Path(self.folder) / result_file.RESULTS)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the logged rows: loss, learning rate, evaluations."""
        return log_file.read_rows(self.folder)

    @property
    def encoder(self) -> encoder.Encoder:
        """The network without projector, of the last accepted update if there is one.

        `.embed(images)` takes one image or many: arrays, PIL images, paths.
        """
        current = updates.find_current(self.folder)
        if self._encoder is None or self._encoder[0] != current:
            with load.exported(self.folder) as place:
                self._encoder = current, encoder.load_encoder(place)
        return self._encoder[1]

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draw the run: accuracy on each task over time, measures, the loss.

        Args:
          path: path of a PNG, SVG or PDF to write; None: none is.

        Returns:
          The matplotlib figure, which a notebook shows.
        """
        if path is not None:
            epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        return plots.overview(self.results, self.rows, path)

    def save(self, folder: str | os.PathLike, *, torch: bool = False) -> dict[str, Any]:
        """Write the encoder to a folder, as `jaxcl export` does.

        Args:
          folder: missing, empty, or with the same encoder; `jaxcl.load_encoder` reads
            it anywhere.
          torch: whether to write also a state dict for PyTorch.

        Returns:
          Its card: the network, its inputs, where it comes from.

        Raises:
          Refused: the folder holds something else.
        """
        return export.export(self.folder, os.fspath(folder), torch=torch)

    def report(self, path: str | os.PathLike | None = None) -> str:
        """Write a page about the run, one HTML file.

        Args:
          path: path of the page; None: report.html in the run directory.

        Returns:
          The path.
        """
        from jaxcl.report import page as report_page

        path = os.path.join(self.folder, "report.html") if path is None else path
        epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        report_page.write_page([self.folder], os.fspath(path))
        return os.fspath(path)

    @errors.shortened
    def update(
        self,
        new_images: inputs.Images,
        *,
        test: tuple | str | os.PathLike | Mapping[str, Any] | None = None,
        old: inputs.Images | None = None,
        limits: Mapping[str, float | str | None] | None = None,
        epochs: int | None = None,
        average: float | str | None = None,
        options: Mapping[str, Any] | None = None,
        join: bool = False,
        again: bool = False,
        select: tuple | str | os.PathLike | Mapping[str, Any] | None = None,
        reference: str | os.PathLike | None = None,
        accept_as_reference: bool = False,
    ) -> Update:
        """Teach the encoder new images, and keep it if it breaks no limit.

        It works like `jaxcl update`: the images are the next task of the run. A
        repeated call resumes a stopped update, and returns a finished one.

        Args:
          new_images: images, as for `jaxcl.fit`; labels are not used.
          test: labelled images for evaluation: (images, labels), or a path or section
            as for `jaxcl.fit`. In arrays and folders without a test part the neighbours
            of a fifth are the other images.
          old: images in the search index; their embeddings before and after are
            compared. None: the run's own, if they are still there.
          limits: {"accuracy_drop": 0.02} and others, see docs/updating.md.
          epochs: number of epochs on the new images; None: as many as of each task
            before.
          average: share of the new weights in an average with the old ones, or "auto".
          options: other values of the update's config: {"train.batch_size": 64}.
          join: whether to train also on the run's images, for methods that read both.
          again: make another update even if the same one is done already.
          select: labelled images that choose the average, as `test`; None: a third of
            `test`.
          reference: run directory or encoder's folder that losses count from; None: the
            encoder before the first update.
          accept_as_reference: count later losses from this update, if it is accepted.

        Returns:
          The verdict. `encoder` is then the new one, if it was accepted.

        Raises:
          Refused: an argument is wrong; the run is not finished.
          jaxcl.run.lock.LockHeldError: another update of the run is going on.
        """
        from jaxcl.update import command as update_command
        from jaxcl.update import plan as update_plan

        config = update_plan.default_options()
        changes = {f"limits.{name}": value for name, value in (limits or {}).items()}
        changes |= {} if epochs is None else {"train.epochs": epochs}
        changes |= {} if average is None else {"average": average}
        recipe.change(config, changes | dict(options or {}))
        new = self._data_section("new", new_images, None, all_rows=True)
        test_section, chooser = (
            None if x is None else self._data_section(role, *inputs.split_pair(x))
            for role, x in (("judge", test), ("select", select))
        )
        index = None
        if old is not None:
            index = self._data_section("old", old, None, all_rows=True)
        work = update_plan.make_plan(
            self.folder,
            new,
            config.to_dict(),
            test=test_section,
            old=index,
            join=join,
            again=again,
            select=chooser,
            reference=None if reference is None else os.fspath(reference),
            becomes_reference=accept_as_reference,
        )
        verdict = updates.read_report(work.workdir)
        if verdict is None:
            verdict = update_command.carry_out(work)
        else:
            print(update_plan.say_nothing_new(work), flush=True)
        return Update(verdict["accepted"], verdict, str(work.workdir))

    @errors.shortened
    def check(
        self,
        new_images: inputs.Images,
        *,
        test: tuple | str | os.PathLike | Mapping[str, Any] | None = None,
        rows: int = 1000,
        limit: float = 0.02,
    ) -> Check:
        """Check whether an update is due; nothing is trained. It is `jaxcl check`.

        Args:
          new_images: images, as for `jaxcl.fit`; labels are not used.
          test: labelled images, as for `update`: has the accuracy fallen?
          rows: most images of each sample.
          limit: most that the accuracy may have fallen.

        Returns:
          The advice and its reasons.

        Raises:
          Refused: an argument is wrong; the run is not finished.
        """
        from jaxcl.update import check

        new = self._data_section("new", new_images, None, all_rows=True)
        if test is not None:
            test = self._data_section("judge", *inputs.split_pair(test))
        report = check.check(self.folder, new, test=test, rows=rows, limit=limit)
        return Check(report["advice"], report, report["folder"])

    def _data_section(self, role, images, labels, all_rows=False) -> str | dict:
        """Return a path as it is, anything else as a section; keep its arrays."""
        if isinstance(images, str | os.PathLike):
            return os.fspath(images)
        name = f"{self.config.name}_{role}"
        read = inputs.make_input(images, name=name, labels=labels)
        self._stored_sets += read.stored_sets
        if not all_rows:
            return read.section
        return read.section | by_name.without_test_split(read.section)
