"""`jaxcl.fit`: a run like any other, and what it leaves for programs."""

import base64
import contextlib
import errno
import itertools
import json
import pathlib
import re
import types

import ml_collections
import numpy as np
import pytest
from PIL import Image
from sklearn import datasets

import jaxcl
from helpers import config_files, run_directories, toy
from jaxcl import errors
from jaxcl.api import fit as fitting
from jaxcl.api import inputs, result
from jaxcl.config import build, own_images
from jaxcl.data.stream import identity
from jaxcl.run import encoder_folder, job, result_file, train, updates
from jaxcl.update import check
from jaxcl.update import plan as update_plan

ROOT = pathlib.Path(__file__).parents[1]
DIGITS = datasets.load_digits()
PIXELS = (DIGITS.images * 255 / 16).astype(np.uint8)
IMAGES, LABELS = PIXELS[:160], DIGITS.target[:160]
# Small everything, of what the call does not name.
OPTIONS = {
    "method.hidden_dim": 16,
    "method.output_dim": 8,
    "method.distill_hidden_dim": 16,
    "evaluators.tsne.skip": True,
    "evaluators.uniformity.skip": True,
    "evaluators.collapse.skip": True,
    "evaluate_untrained": False,
    "devices": 1,
    "log_every": 1,
    "save_every": 1,
    "tensorboard": False,
    "plots": False,
    "duplicates": False,
}
SMALL = {
    "labels": LABELS,
    "strategy": "pnr",
    "tasks": 2,
    "encoder": {"name": "conv_net", "width": 4},
    "epochs": 1,
    "batch_size": 32,
    "options": OPTIONS,
    "quiet": True,
}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return jaxcl.fit(IMAGES, out=tmp_path_factory.mktemp("fit") / "run", **SMALL)


def test_it_leaves_a_run_directory_and_says_what_came_out(fitted):
    matrix = fitted.results["matrices"]["knn/class_incremental"]
    assert np.isfinite(np.array(matrix)).all() and np.shape(matrix) == (2, 2)
    assert "knn/class_incremental" in repr(fitted) and fitted.folder in repr(fitted)
    config = fitted.config
    assert isinstance(config, ml_collections.ConfigDict)
    names = config.method.base.name, config.method.strategy.name
    assert names == ("simclr", "pnr")
    scenario = config.scenario.to_dict()
    assert scenario == {"name": "class", "num_tasks": 2, "evaluation": "test"}
    assert config.data.name == "in_memory" and config.data.test == 0.2
    assert "name: pnr" in str(config)
    assert "temperature" not in config.method
    assert fitted.resolved.method.base.temperature == 0.2
    assert [row["step"] for row in fitted.rows if "loss" in row] == [1, 2, 3, 4]
    assert jaxcl.Result(fitted.folder).results == fitted.results
    known = identity.read_identity(fitted.folder)
    rows = {"train": 130, "test": 30}
    assert fitted.results["data"] == {"digest": known.digest(), "rows": rows}


def test_the_encoder_is_that_of_the_run_in_use(fitted, monkeypatch):
    """Loaded once, and again after an update was accepted."""
    current, loaded = ["first"], []
    monkeypatch.setattr(result.updates, "find_current", lambda folder: current[0])
    monkeypatch.setattr(result.load, "exported", contextlib.nullcontext)

    def load(_):
        loaded.append(current[0])
        return current[0]

    monkeypatch.setattr(result.encoder, "load_encoder", load)
    run = jaxcl.Result(fitted.folder)
    assert [run.encoder, run.encoder] == ["first", "first"]
    current[0] = "second"
    assert [run.encoder, run.encoder] == ["second", "second"]
    assert loaded == ["first", "second"]


def test_nothing_is_printed_where_it_is_to_be_quiet(fitted, capfd):
    jaxcl.fit(IMAGES, out=fitted.folder, **SMALL)
    assert capfd.readouterr().out == ""


def test_the_same_call_trains_nothing_more_and_another_is_refused(fitted):
    before = toy.untimed_rows(fitted.folder)
    again = jaxcl.fit(IMAGES, out=fitted.folder, **SMALL)
    assert again.results == fitted.results and toy.untimed_rows(fitted.folder) == before
    with pytest.raises(ValueError, match=r"config\.data\.sha256"):
        jaxcl.fit(PIXELS[1:161], out=fitted.folder, **SMALL)
    with pytest.raises(ValueError, match=r"config\.method\.base"):
        jaxcl.fit(IMAGES, out=fitted.folder, **SMALL, base="byol")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    fitted, steps, tmp_path, monkeypatch
):
    calls = []

    class Stopping:
        def __enter__(self):
            return lambda: calls.append(0) or len(calls) >= steps

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(fitting, "_stopping", Stopping)
    with pytest.raises(train.Interrupted, match="stopped"):
        jaxcl.fit(IMAGES, out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    whole = jaxcl.fit(IMAGES.copy(), out=tmp_path / "run", **SMALL)
    assert whole.results["matrices"] == fitted.results["matrices"]
    assert toy.untimed_rows(whole.folder) == toy.untimed_rows(fitted.folder)
    work = build.build(_config(fitted), fitted.folder)
    ours, theirs = (toy.saved(work, pathlib.Path(x.folder)) for x in (whole, fitted))
    toy.check_same_bits(ours.state, theirs.state)


def _config(run):
    saved = run.config.to_dict()
    return ml_collections.ConfigDict(
        {name: value for name, value in saved.items() if name != "resident"}
    )


def test_without_its_arrays_a_run_says_which_it_needs(fitted, tmp_path):
    config = _config(fitted)
    config.data.sha256 = "0" * 64
    with pytest.raises(ValueError, match=r"config\.data\.set='images'.*jaxcl\.fit"):
        build.build(config, tmp_path)


def test_the_encoder_takes_one_image_or_many(fitted, tmp_path):
    encoder = fitted.encoder
    whole = encoder.embed(IMAGES[:3])
    assert "conv_net" in repr(encoder) and "8 x 8 x 1" in repr(encoder)
    assert f"{encoder.num_features} features" in repr(encoder)
    assert whole.shape == (3, encoder.num_features) and whole.dtype == np.float32
    pictures = [Image.fromarray(image) for image in IMAGES[:3]]
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    for many in (IMAGES[:3, ..., None], list(IMAGES[:3]), pictures, paths):
        np.testing.assert_allclose(encoder.embed(many), whole, rtol=1e-5, atol=1e-6)
    for one in (IMAGES[0], IMAGES[0, ..., None], pictures[0], paths[0], str(paths[0])):
        np.testing.assert_allclose(encoder.embed(one), whole[0], rtol=1e-5, atol=1e-6)
    assert encoder.embed(PIXELS[0].repeat(2, 0).repeat(2, 1)).shape == whole[0].shape
    deep = Image.fromarray(IMAGES[0].astype(np.uint16) * 257)  # 16 bits
    np.testing.assert_allclose(encoder.embed(deep), whole[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="16-bit"):  # 12 bits, or dark?
        encoder.embed(Image.fromarray(IMAGES[0].astype(np.uint16) * 16))
    with pytest.raises(ValueError, match=r"no\.png"):
        (tmp_path / "no.png").write_text("no")
        encoder.embed(tmp_path / "no.png")
    with pytest.raises(ValueError, match="uint8"):
        encoder.embed(IMAGES[:2].astype(float))
    with pytest.raises(ValueError, match="images.*generator"):
        encoder.embed(path for path in paths)


def test_it_is_drawn_reported_and_saved(fitted, tmp_path):
    shown = fitted._repr_html_()
    (picture,) = re.findall(r"base64,([\w+/=]+)", shown)
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    accuracy = fitted.results["summary"]["knn/class_incremental"]["average_accuracy"]
    assert f"{100 * accuracy:.1f} %" in shown and fitted.folder in shown
    figure = fitted.plot(tmp_path / "new" / "run.svg")
    panels = figure.axes
    assert panels[0].get_title() == "Nearest neighbours, class incremental"
    assert len(panels[1].lines[0].get_xdata()) == 4
    drawn = (tmp_path / "new" / "run.svg").read_text()
    assert "<svg" in drawn and "<dc:date>" not in drawn
    with pytest.raises(ValueError, match=r"run\.gif"):
        fitted.plot(tmp_path / "run.gif")
    page = pathlib.Path(fitted.report())
    assert page == pathlib.Path(fitted.folder) / "report.html"
    assert "knn/class_incremental" in page.read_text()
    page = tmp_path / "other" / "a.html"
    assert fitted.report(page) == str(page) and page.exists()
    card = fitted.save(tmp_path / "encoder")
    assert card["num_features"] == fitted.encoder.num_features
    there = jaxcl.load_encoder(tmp_path / "encoder").embed(IMAGES[:2])
    np.testing.assert_array_equal(there, fitted.encoder.embed(IMAGES[:2]))


def test_an_update_is_kept_or_rolled_back(fitted, tmp_path):
    run = jaxcl.fit(IMAGES, out=tmp_path / "run", **SMALL)
    before = run.encoder.embed(IMAGES[:2])
    judge = (PIXELS[400:480], DIGITS.target[400:480])
    refused = run.update(
        PIXELS[200:264], test=judge, limits={"accuracy": 1.0}, epochs=1
    )
    assert not refused.accepted and "Rolled back" in str(refused)
    assert "--average=0.5" in str(refused) and "lwf_features" in str(refused)
    np.testing.assert_array_equal(run.encoder.embed(IMAGES[:2]), before)

    def accept():
        return run.update(
            PIXELS[200:264],
            test=judge,
            limits={"accuracy_drop": 1.0},
            epochs=1,
            options={"rows": 64},
        )

    kept = accept()
    assert kept.accepted and kept.verdict["drift"]["rows"] == 64
    assert "--average" not in str(kept)
    assert kept.folder != refused.folder
    moved = run.encoder.embed(IMAGES[:2])
    assert (moved != before).any()
    assert accept().folder == kept.folder  # it is done already
    saved = json.loads((pathlib.Path(kept.folder) / "config.json").read_text())
    assert saved["data"]["set"] == "images_new"
    # The index may hold other images than those of the run.
    plain, index = {"epochs": 1, "options": {"rows": 64}}, PIXELS[300:400]
    drifts = [
        run.update(PIXELS[264:328], old=old, **plain).verdict["drift"]
        for old in (None, index)
    ]
    assert drifts[0] != drifts[1] and {drift["rows"] for drift in drifts} == {64}
    with pytest.raises(ValueError, match="accuracy_dorp"):
        run.update(PIXELS[:64], limits={"accuracy_dorp": 1.0})
    with pytest.raises(ValueError, match=r"config\.rows"):
        run.update(PIXELS[:64], options={"rows.x": 1})
    with pytest.raises(ValueError, match=r"test: 3 entries"):
        run.update(PIXELS[:64], test=(*judge, 0))


# What a call makes of its arguments; nothing is trained.


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(images, arguments) -> the config, the directory and the job of a call."""

    folders = (tmp_path / f"asked_{number}" for number in itertools.count())

    def ask(images, **arguments):
        def stop(config, where):
            raise Asked(config, where, build.build(config, where))

        monkeypatch.setattr(fitting, "build", _With(build=stop))
        monkeypatch.setattr(job, "trace_step", lambda work: work)
        arguments = {"encoder": {"name": "conv_net", "width": 4}} | arguments
        arguments["options"] = {"devices": 1} | arguments.get("options", {})
        with pytest.raises(Asked) as found:
            jaxcl.fit(images, out=next(folders), quiet=True, **arguments)
        return found.value.args

    return ask


class Asked(Exception):
    """Carries what would be run."""


class _With:
    """A module with other contents."""

    def __init__(self, **contents):
        vars(self).update(contents)


def test_tasks_are_classes_slices_or_what_each_image_is_of(asked):
    config, _, work = asked(IMAGES, tasks=4)
    assert config.scenario.name == "data" and config.batch_size == 8
    assert [len(task.train.rows) for task in work.stream.tasks] == [40] * 4
    assert set(config.evaluators) == {"collapse", "uniformity", "neighbours"}
    year = np.repeat([2020, 2018, 2019, 2018], 40)
    config, _, work = asked(IMAGES, tasks=year, labels=LABELS)
    assert config.scenario.name == "domain"
    assert [task.name for task in work.stream.tasks] == ["2018", "2019", "2020"]


def test_a_folder_and_arrays_are_cut_alike(asked, tmp_path):
    three, label = IMAGES[LABELS < 3], LABELS[LABELS < 3]
    for i, image in enumerate(three):
        path = tmp_path / "images" / str(label[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    for images, more in ((three, {"labels": label}), (tmp_path / "images", {})):
        config, _, work = asked(images, tasks=3, **more)
        assert config.scenario.name == "class"
        assert [task.name for task in work.stream.tasks] == ["0", "1", "2"]
        with pytest.raises(ValueError, match=r"tasks=7: .* 3"):
            jaxcl.fit(images, tasks=7, **more)
        slices = {"options": {"scenario.name": "data"}}
        config, _, work = asked(images, tasks=4, **more, **slices)
        assert all(len(task.classes) == 3 for task in work.stream.tasks)
    some = np.where(np.arange(len(label)) > 0, label, -1)
    config, *_ = asked(three, labels=some, tasks=2)
    assert config.scenario.name == "data"


@pytest.mark.parametrize(
    "count, more, wanted",
    [
        (40, {}, ["config.batch_size=4"]),
        (40, {"base": "byol", "test": (IMAGES[:50], LABELS[:50])}, []),
        (160, {"test": 0.4}, []),
    ],
)
def test_sizes_that_tell_little_are_warned_about(asked, caplog, count, more, wanted):
    with caplog.at_level("WARNING"):
        asked(IMAGES[:count], labels=LABELS[:count], **more)
    assert all(words in caplog.text for words in wanted)
    assert ("config.batch_size=" in caplog.text) == bool(wanted)


@pytest.mark.parametrize(
    "more, train_on, trained, judged",
    [
        ({"labels": LABELS, "test": 0.25}, "all", 120, 40),
        ({"labels": np.where(LABELS < 3, LABELS, -1)}, "labelled", None, None),
        ({"test": (PIXELS[200:240], DIGITS.target[200:240])}, "evaluation", 160, 40),
        ({"labels": LABELS, "test": (PIXELS[200:240], DIGITS.target[200:240])},
         "all", 160, 40),
        ({"test": "digits"}, "evaluation", 160, 1438),
    ],
)  # fmt: skip
def test_labels_judge_as_far_as_there_are_any(asked, more, train_on, trained, judged):
    config, _, work = asked(IMAGES, **more)
    assert config.scenario.name == "joint"
    assert config.evaluators.knn.train_on == train_on
    data = work.stream.dataset
    if trained:
        assert len(data.train.label) == trained
        assert abs(len(data.test.label) - judged) < 5
    else:
        assert (data.test.label >= 0).all() and (data.train.label < 0).sum() > 90


def test_validation_images_judge_in_place_of_test_images(asked):
    config, _, work = asked(IMAGES, labels=LABELS, validation=0.25)
    assert config.scenario.evaluation == "validation"
    assert work.stream.evaluation is work.stream.dataset.validation is not None


def test_a_folder_and_the_name_of_a_source(asked, tmp_path):
    for i, image in enumerate(IMAGES[:60]):
        path = tmp_path / "images" / str(LABELS[i])
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path / f"{i}.png")
    config, _, work = asked(tmp_path / "images")
    assert config.data.to_dict() == {
        "name": "image_folder",
        "path": str(tmp_path / "images"),
        "size": 8,
        "resident": True,
    }
    assert work.stream.dataset.train.images.shape[1:] == (8, 8, 3)
    with pytest.raises(ValueError, match="labels"):
        jaxcl.fit(tmp_path / "images", labels=LABELS)
    # The config is that of the command.
    command = config_files.parse(
        [f"--config={ROOT}/configs/own_images.py:{tmp_path / 'images'}"]
    ).to_dict()
    ours = config.to_dict()
    command |= {"name": "images", "seed": 0, "encoder": ours["encoder"]}
    only_here = {"progress": False, "devices": 1}
    assert ours == command | only_here


def test_a_dataset_of_hugging_face_in_memory_and_on_a_disk(asked, tmp_path):
    datasets = pytest.importorskip("datasets", reason="`datasets` is not installed")
    names = [f"digit {i}" for i in range(10)]
    features = datasets.Features(
        {"fine": datasets.ClassLabel(names=names), "img": datasets.Image()}
    )
    pictures = [Image.fromarray(image) for image in IMAGES]
    whole = datasets.Dataset.from_dict(
        {"img": pictures, "fine": LABELS.tolist()}, features=features
    )
    config, _, work = asked(whole, tasks=2, test=whole.select(range(150, 160)))
    data = work.stream.dataset
    assert config.scenario.name == "class"  # as of arrays with labels
    np.testing.assert_array_equal(data.train.images[..., 0], IMAGES)
    assert data.class_names == (*names,) and data.train.label.tolist() == [*LABELS]
    assert data.test.label.tolist() == [*LABELS[150:]]
    whole.save_to_disk(tmp_path / "saved")
    config, _, work = asked(tmp_path / "saved", test=0.25)
    assert config.data.name == "huggingface" and config.data.test == 0.25
    assert config.data.resident and config.data.image_key == "img"
    data = work.stream.dataset
    assert abs(len(data.test.label) - 40) < 5 and data.class_names == (*names,)
    image = data.train.images[0]  # one of the images, in colour
    assert image.shape == (8, 8, 3) and (IMAGES == image[..., 0]).all((1, 2)).any()
    section = own_images.make_section(
        str(tmp_path / "saved"), parent_config={"augment": {"mean": (0.5,)}}
    )
    assert (section["name"], section["channels"]) == ("huggingface", 1)
    with pytest.raises(ValueError, match="transform"):
        inputs.make_input(whole.with_transform(lambda rows: rows), name="x")
    both = datasets.DatasetDict({"train": whole, "test": whole})
    for images, words in (
        (both, "a DatasetDict of train, test: give one"),
        (whole.to_iterable_dataset(), "datasets.IterableDataset"),
        (whole.select_columns(["fine"]), "fine"),
        (datasets.concatenate_datasets([whole, whole.map(_larger)]), "save_to_disk"),
    ):
        with pytest.raises(ValueError, match=words):
            jaxcl.fit(images, encoder="conv_net")


def _larger(row):
    return {"img": row["img"].resize((9, 9))}


def test_a_directory_is_made_from_what_is_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    places = []
    fake = _With(build=lambda config, where: places.append(str(where)) or 1 / 0)
    monkeypatch.setattr(fitting, "build", fake)
    for images, more in ((IMAGES, {}), (IMAGES, {}), (IMAGES[1:], {}),
                         (IMAGES, {"seed": 1}), (IMAGES, {"options": {"devices": 1}}),
                         (IMAGES, {"name": "mine"})):  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            jaxcl.fit(images, encoder="conv_net", **more)
    first, same, other, seed, machine, named = places
    assert first == same == machine and len({first, other, seed, named}) == 4
    assert first.startswith("runs/images-") and named.startswith("runs/mine-")


def test_training_begins_with_an_encoder_in_memory_or_in_a_folder(
    fitted, asked, tmp_path
):
    fitted.save(tmp_path / "encoder")
    for encoder in (tmp_path / "encoder", jaxcl.load_encoder(tmp_path / "encoder")):
        config, where, work = asked(IMAGES, encoder=encoder, strategy="cassle")
        card = encoder_folder.read_card(config.start)
        assert card["encoder"]["name"] == "conv_net"
        assert work.config["encoder"]["width"] == 4
    assert config.start == str(where / "start")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        jaxcl.fit(IMAGES, encoder=tmp_path)


def test_images_of_five_channels_go_all_the_way(tmp_path, caplog):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (96, 8, 8, 5), np.uint8)
    options = SMALL["options"] | {"plots": True, "evaluators.neighbours.skip": False}
    arguments = SMALL | {"labels": LABELS[:96], "options": options}
    fitted = jaxcl.fit(images, out=tmp_path / "run", **arguments)
    assert "5 channels" in caplog.text and "could not be drawn" not in caplog.text
    fitted.save(tmp_path / "encoder")
    encoder = jaxcl.load_encoder(tmp_path / "encoder")
    assert encoder.card["input"]["channels"] == 5
    np.testing.assert_allclose(
        encoder.embed(images[:4]), fitted.encoder.embed(images[:4]), rtol=1e-5
    )
    with pytest.raises(ValueError, match=r"8, 8, 3\].*, 5\]"):
        encoder.embed(images[..., :3])
    updated = fitted.update(rng.integers(0, 256, (64, 8, 8, 5), np.uint8))
    assert updated is not None


def test_pil_images_are_read_as_the_pictures_that_they_are():
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    coloured = np.stack([ramp, ramp.T, ramp[::-1]], -1)
    with_palette = Image.fromarray(coloured).quantize(256)
    shown = np.asarray(with_palette.convert("RGB"))
    grey = Image.fromarray(ramp)
    cases = [
        ([with_palette] * 4, shown),
        ([with_palette.convert("RGBA")] * 4, shown),
        ([grey] * 4, ramp[..., None]),
        ([grey, grey.convert("RGB")] * 2, ramp[..., None].repeat(3, -1)),
    ]
    for images, want in cases:
        read = inputs.make_input(images, name="images")
        np.testing.assert_array_equal(read.stored_sets[0].examples.images, [want] * 4)


@pytest.mark.parametrize(
    "images, more, words",
    [
        (IMAGES / 255, {}, "images.*float64"),
        ([], {}, "images: list"),
        ([IMAGES[0], IMAGES[0][1:]], {}, "images of 2 shapes"),
        ("nowhere", {}, "'nowhere'"),
        ({"name": "digitz"}, {}, "config.data.name='digitz'"),
        ("rings_and_trees", {}, "graphs"),
        (IMAGES, {"tasks": 0}, "tasks=0"),
        (IMAGES, {"tasks": LABELS[:3]}, r"domains have shape \[3\]"),
        (IMAGES, {"encoder": "resnet19"}, "encoder='resnet19'"),
        (IMAGES, {"base": "simclear"}, "config.method.base='simclear'"),
        (IMAGES, {"strategy": "pnr"}, "strategy='pnr'"),
        (IMAGES, {"test": 1.5}, "test=1.5"),
        (IMAGES, {"options": {"method.temprature": 1}}, "config.method.temprature"),
        (IMAGES, {"options": {"seeds": 2}}, "config.seeds=2"),
        (IMAGES[:2], {}, "2 train images"),
    ],
)
def test_a_wrong_argument_is_named(images, more, words, tmp_path):
    arguments = {"encoder": "conv_net", "out": tmp_path} | more
    with pytest.raises(ValueError, match=words) as refused:
        jaxcl.fit(images, **arguments)
    # The line of the caller, and one of ours: a notebook shows the message.
    assert len(refused.traceback) == 2


def test_an_error_of_another_package_keeps_its_frames():
    call = errors.shortened(lambda: json.loads("{"))
    with pytest.raises(ValueError) as raised:
        call()
    assert pathlib.Path(str(raised.traceback[-1].path)).parent.name == "json"


def test_ctrl_c_saves_and_the_second_one_ends():
    import signal

    before = signal.getsignal(signal.SIGINT)
    with fitting._stopping() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_run_has_no_result(tmp_path):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        jaxcl.Result(tmp_path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_encoder_goes_elsewhere_from_a_run_that_may_only_be_read(
    code, tmp_path, monkeypatch
):
    """A full disk is no such run: its error is raised."""
    result_file.write_results(tmp_path, result_file.empty_results(1))
    places = []

    def export(run, place, force=False):
        places.append(place)
        if pathlib.Path(place).is_relative_to(tmp_path):
            raise OSError(code, "no", place)

    monkeypatch.setattr(result.export, "export", export)
    monkeypatch.setattr(result.encoder, "load_encoder", lambda place: place)
    run = result.Result(tmp_path)
    if code == errno.ENOSPC:
        with pytest.raises(OSError):
            run.encoder  # noqa: B018
        assert len(places) == 1
    else:
        assert run.encoder == places[1] and len(places) == 2


def test_updates_and_checks_are_told_all_that_a_program_says(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_directories.write(folder, {"name": "x"}, [], result_file.empty_results(1))
    (folder / "resolved.json").write_text('{"seed": 7}')
    run, told = jaxcl.Result(folder), []
    assert run.resolved.seed == 7 and run.config.name == "x"
    work, report = types.SimpleNamespace(workdir="w"), {"accepted": True}
    monkeypatch.setattr(
        update_plan, "make_plan", lambda *x, **named: told.append((*x, named)) or work
    )
    monkeypatch.setattr(update_plan, "say_nothing_new", lambda work: "")
    monkeypatch.setattr(updates, "read_report", lambda place: report)
    named = {"test": "t", "old": "o", "join": True, "again": True, "select": "s"}
    options = {"limits": {"accuracy": 0.5}, "epochs": 3, "average": 0.25}
    more = {"reference": "r", "options": {"rows": 9}, "accept_as_reference": True}
    run.update("new", **named, **options, **more)
    ((place, new, config, asked),) = told
    assert (place, new) == (str(folder), "new")
    assert asked == named | {"reference": "r", "becomes_reference": True}
    assert config["limits"]["accuracy"] == 0.5 and config["train"]["epochs"] == 3
    assert config["average"] == 0.25 and config["rows"] == 9
    answer = {"advice": "wait", "folder": "c"}
    monkeypatch.setattr(check, "check", lambda *_, **now: told.append(now) or answer)
    assert run.check("new", test="t", rows=30, limit=0.1).advice == "wait"
    assert told[-1] == {"test": "t", "rows": 30, "limit": 0.1}
