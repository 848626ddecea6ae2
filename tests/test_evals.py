"""Evaluators against brute force: probe, neighbours, picture, what they share."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import manifold

from helpers import eval_toy
from jaxcl import core, plots, sharding
from jaxcl.data import stream
from jaxcl.data.stream import splits
from jaxcl.evals import (
    collapse,
    embedding,
    knn,
    linear,
    logistic,
    neighbours,
    objective,
    predict,
    spread,
    svm,
    tsne,
    uniformity,
)
from jaxcl.evals import head as head_lib
from jaxcl.nets import resnet
from jaxcl.run import evaluation


@pytest.mark.parametrize(
    "reading, batch_size, optimizer",
    [
        ("features", 16, "sgd"),
        ("features", 64, "sgd"),  # fewer rows than a batch
        ("augmented", 16, "sgd"),
        ("streamed", 16, "sgd"),
        ("features", 16, "adam"),
        ("streamed", 16, "adam"),
    ],
    ids="features-16 features-64 augmented-16 streamed-16 adam adam-streamed".split(),
)
def test_probe_is_the_sgd_of_the_equations(reading, batch_size, optimizer):
    data = eval_toy.dataset(streams=reading == "streamed")
    parts, state = eval_toy.parts_of(data=data), eval_toy.state_of(0)
    options = eval_toy.options_of(reading, batch_size=batch_size)
    twin = eval_toy.probe_twin
    if optimizer == "adam":  # which has no momentum to be told
        twin = functools.partial(twin, optimizer=eval_toy.adam_twin)
        options |= dict(optimizer="adam", momentum=0.123)
    result = eval_toy.probe(parts, **options)(state, 1)
    scores = eval_toy.check_probe(
        result, parts, state, np.arange(50), batch_size, reading=reading, twin=twin
    )
    right = (scores.argmax(1) == data.test.label).mean()
    assert result.scalars["accuracy"] == pytest.approx(right)
    # Task-aware: the best class among those of the row's task.
    told = np.full(len(scores), -1)
    for task in parts.stream.tasks:
        told[task.test] = task.classes[scores[task.test][:, task.classes].argmax(1)]
    np.testing.assert_allclose(
        result.rows["task_aware"], eval_toy.accuracies(parts, told)
    )
    assert (result.rows["task_aware"] > result.rows["class_incremental"]).any()


def test_epochs_of_a_probe_are_shuffled_anew():
    """Each row is at each place equally often; rows that do not count stay last."""
    rows, count, draws = jnp.array([9, 4, 7, 5, 1, 0, 0]), 5, 3000
    keys = jax.random.split(jax.random.key(0), draws)
    order_of = jax.jit(jax.vmap(lambda key: head_lib.epoch_order(key, rows, count)))
    orders = np.asarray(order_of(keys))
    np.testing.assert_array_equal(orders[:, count:], 0)
    np.testing.assert_array_equal(
        np.sort(orders[:, :count]), np.broadcast_to([1, 4, 5, 7, 9], (draws, count))
    )
    for row in (1, 4, 5, 7, 9):
        share = (orders[:, :count] == row).mean(axis=0)
        assert np.abs(share - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / draws)
    # Neighbours part, too: 120 orders are as likely.
    assert len({tuple(order) for order in orders.tolist()}) == 120


def chosen_twin(x, y, cut, rates):
    """The rate whose head is best on the cut; heads fitted by the SGD of the twin."""
    rest, scores = np.flatnonzero(~cut), {}
    for rate in rates:
        twin = functools.partial(eval_toy.probe_twin, lr=rate)
        w, b, _ = eval_toy.fitted(x[rest], y[rest], 1, 16, twin=twin)
        scores[rate] = ((x[cut] @ w + b).argmax(1) == y[cut]).mean()
    return max(rates, key=lambda rate: scores[rate]), scores


@pytest.mark.parametrize("seed", [0, 4])
def test_the_cut_chooses_the_rate(monkeypatch, seed):
    """By accuracy on rows that its fits did not see; the last fit sees all rows."""
    rates, fitted = (1e-4, 0.3, 0.03), []
    parts, state = eval_toy.parts_of("class"), eval_toy.state_of(0)
    train = parts.stream.dataset.train
    cut = splits.draw_mask(train, 0.4, [seed, 4])
    x = eval_toy.embedded(state, train.images)
    want, scores = chosen_twin(x, train.label, cut, rates)
    assert len({*scores.values()}) == 3  # or the test could not tell them apart
    real = head_lib.make_resident_fit

    def spied(*arguments, **more):
        fit = real(*arguments, **more)

        def run(state, data, rows, task, probe, lr):
            fitted.append((rows.tolist(), lr))
            return fit(state, data, rows, task, probe, lr)

        return run

    monkeypatch.setattr(head_lib, "make_resident_fit", spied)
    options = eval_toy.OPTIONS | {"lr": 0.5, "augment": False}
    evaluate = eval_toy.probe(
        parts, **options, lrs=rates, held_out=0.4, fraction_seed=seed
    )
    result = evaluate(state, 1)
    rest, every = np.flatnonzero(~cut).tolist(), list(range(len(x)))
    assert fitted == [*((rest, rate) for rate in rates), (every, want)]
    assert result.scalars["lr"] == want
    monkeypatch.setattr(head_lib, "make_resident_fit", real)
    fixed = eval_toy.probe(parts, **options | {"lr": want})(state, 1)
    np.testing.assert_array_equal(
        result.rows["class_incremental"], fixed.rows["class_incremental"]
    )


def test_a_rate_whose_fit_is_not_finite_is_passed_over():
    """Though class 0, which nan names, is that of most rows."""
    data = eval_toy.dataset()
    label = np.where(data.train.label < 5, 0, 5).astype(np.int32)
    data = data._replace(train=data.train._replace(label=label))
    parts, state = eval_toy.parts_of("joint", data), eval_toy.state_of(0)
    options = eval_toy.OPTIONS | {"augment": False, "epochs": 1}
    found = eval_toy.probe(parts, **options, lrs=(1e38, 1e-6), held_out=0.4)(state, 0)
    assert found.scalars["lr"] == 1e-6 and np.isfinite(found.scalars["accuracy"])
    assert not any("could be" in words for words in found.warnings)


def test_rates_cannot_be_compared_where_each_class_has_one_row():
    options = eval_toy.OPTIONS | {"augment": False, "fraction": 0.01}
    with pytest.raises(ValueError, match=r"linear\.lrs=\(0\.1, 0\.2\)"):
        eval_toy.probe(eval_toy.parts_of("class"), **options, lrs=(0.1, 0.2))


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_a_fit_that_is_not_finite_has_no_accuracy(scenario):
    """A head of nan named class 0 for every row, and had its share as accuracy."""
    parts, state = eval_toy.parts_of(scenario), eval_toy.state_of(0)
    options = eval_toy.OPTIONS | {"augment": False, "lr": 1e38}
    result = eval_toy.probe(parts, **options)(state, 1)
    assert all(np.isnan(row).all() for row in result.rows.values())
    assert np.isnan(result.scalars["accuracy"])
    assert "lr=1e+38" in result.warnings[0]
    assert len(result.warnings) == (4 if scenario == "domain" else 1)


def test_features_that_are_not_finite_give_no_result_and_a_warning(tmp_path):
    """Of nan no class is the nearest: each evaluator would have had a number."""
    parts, state = eval_toy.parts_of("class"), eval_toy.state_of(0)
    wild = state._replace(params={"w": state.params["w"] * 1e38})
    found = knn.make(parts, k=3)(wild, 1)
    assert all(np.isnan(row).all() for row in found.rows.values())
    assert np.isnan(found.scalars["accuracy"]) and "not finite" in found.warnings[0]
    assert knn.make(parts, k=3)(state, 1).warnings == ()

    def predict_of(state, images):
        return jnp.pad(eval_toy.embed(state, images), ((0, 0), (0, 1)))

    own = predict.make(parts._replace(predict=predict_of))
    found = own(wild, 2)
    assert all(np.isnan(row).all() for row in found.rows.values())
    assert "not finite" in found.warnings[0] and own(state, 2).warnings == ()

    def among(state, images):  # not finite where an image is white
        bright = images.sum(axis=(1, 2, 3)) > 95
        return jnp.where(bright[:, None], jnp.nan, eval_toy.embed(state, images))

    for split in ("train", "test"):
        examples = getattr(eval_toy.dataset(), split)
        images = examples.images.copy()
        images[3] = 255
        given = {split: examples._replace(images=images)}
        some = eval_toy.parts_of(data=eval_toy.dataset()._replace(**given), embed=among)
        judges = [knn.make(some, k=3), logistic.make(some, passes=0)]
        if split == "test":
            judges += [eval_toy.probe(some, augment=False, epochs=1, batch_size=64)]
        for evaluate in judges:
            found = evaluate(state, 1)
            assert np.isnan(found.rows["class_incremental"]).all()
            assert "not finite" in found.warnings[0]

    found = svm.make(parts, folds=2, inner_folds=2, penalties=(1.0,))(wild, 0)
    assert not found.scalars and "not finite" in found.warnings[0]
    found = logistic.make(parts, passes=0)(wild, 0)
    assert np.isnan(found.rows["class_incremental"]).all() and not found.scalars
    assert "not finite" in found.warnings[0]
    for picture in (tsne, neighbours):
        drawn = picture.make(parts, directory=tmp_path)(wild, 0)
        assert drawn.warnings and not [*tmp_path.iterdir()]
    assert uniformity.make(parts)(wild, 0).warnings


def test_probe_of_seen_tasks_knows_only_their_classes():
    parts = eval_toy.parts_of(data=eval_toy.dataset(noise=5))
    options = dict(epochs=20, batch_size=8, milestones=(), augment=False)
    evaluate = eval_toy.probe(parts, train_on="seen", **options)
    first = evaluate(eval_toy.state_of(0), 0).rows
    last = evaluate(eval_toy.state_of(0), 2).rows
    np.testing.assert_allclose(first["class_incremental"], [1, 0, 0])
    assert np.isnan(first["task_aware"][1:]).all() and first["task_aware"][0] == 1
    assert (last["class_incremental"] > 0.8).all()


def test_domain_probe_trains_on_its_domain_alone():
    parts, state = eval_toy.parts_of("domain"), eval_toy.state_of(0)
    evaluate = eval_toy.probe(parts, augment=False, **eval_toy.OPTIONS)
    rows = evaluate(state, 1).rows
    assert set(rows) == {"class_incremental", "domain_aware"}
    train, test = parts.stream.dataset.train, parts.stream.evaluation
    want = []
    for t, task in enumerate(parts.stream.tasks):
        at = task.train.rows
        x, y = eval_toy.embedded(state, train.images[at]), train.label[at]
        w, b, _ = eval_toy.fitted(x, y, 1, 16, domain=t + 1)
        guess = (eval_toy.embedded(state, test.images) @ w + b).argmax(1)
        want.append((guess == test.label)[task.test].mean())
    np.testing.assert_allclose(rows["domain_aware"], want)
    seen = eval_toy.probe(parts, augment=False, train_on="seen", **eval_toy.OPTIONS)
    own = seen(state, 1).rows["domain_aware"]
    np.testing.assert_allclose(own[:2], want[:2])
    assert np.isnan(own[2])


def test_rows_of_every_domain_or_of_no_task_belong_to_none():
    data = eval_toy.dataset()
    domain = np.where(np.arange(31) < 4, -1, data.test.domain).astype(np.int32)
    data = data._replace(test=data.test._replace(domain=domain))
    assert embedding.assign_tasks(eval_toy.parts_of("domain", data)).aware is None
    groups = embedding.TaskMembership(None, np.array([1, -1, 0, 2]), *[np.zeros(0)] * 2)
    seen = embedding.train_mask(groups, "seen", 1)
    assert seen.tolist() == [True, False, True, False]
    # Some evaluation rows may be of classes that no train row has.
    label = np.where(data.train.label == 2, 3, data.train.label).astype(np.int32)
    data = data._replace(train=data.train._replace(label=label))
    embedding.check_learnable(eval_toy.parts_of("joint", data).stream)
    known = splits.unknown_classes(data, data.test)
    label = np.append(data.test.label, [-1, -1])  # rows without a label are of none
    domain = np.append(data.test.domain, [0, 0])
    assert splits.unknown_classes(data, stream.Examples(label, domain))[0] == known[0]


def test_images_that_stream_are_resized_and_cut_as_those_in_memory():
    """By the decoder of their set."""
    images = np.random.default_rng(0).integers(0, 256, (70, 9, 12, 3), np.uint8)
    images = np.sort(images, axis=2)  # smooth enough for any way to resize
    examples = eval_toy.split_of(0, 70)._replace(images=images)
    data = eval_toy.dataset()._replace(train=examples, decoder="pillow")
    parts = eval_toy.parts_of("joint", data, resize=6)._replace(
        embed=lambda state, images: images.reshape(len(images), -1)
    )
    there = np.asarray(embedding.make_embedder(parts, examples)(None))
    lazy = eval_toy.streamed(examples)
    read = np.asarray(embedding.make_embedder(parts, lazy)(None))
    np.testing.assert_allclose(read, there, atol=0.05)
    crop = embedding.make_eval_crop(parts)
    assert crop.decoder == "pillow"
    # As many images as rows, though they come in batches of 64.
    found = embedding.read_images(parts, lazy, np.arange(70))
    np.testing.assert_array_equal(found, [crop(image) for image in images])


def test_keys_of_probes_differ():
    numbers = [(s, t, p) for s in range(2) for t in range(2) for p in range(2)]
    keys = [np.asarray(jax.random.key_data(head_lib.probe_keys(*n))) for n in numbers]
    assert len({key.tobytes() for key in np.concatenate(keys)}) == 16


def test_a_share_of_the_labels_is_stratified_nested_and_seeded():
    rng = np.random.default_rng(0)
    label = rng.permutation(np.repeat(np.arange(5), [400, 200, 57, 3, 1]))
    data = stream.Examples(label.astype(np.int32), np.zeros(661, np.int32))
    found = {
        fraction: np.flatnonzero(
            embedding.draw_stratified(data, fraction=fraction, seed=0)
        )
        for fraction in (0.01, 0.1, 0.5, 1.0)
    }
    counts = {f: np.bincount(label[rows]).tolist() for f, rows in found.items()}
    assert counts == {
        0.01: [4, 2, 1, 1, 1],
        0.1: [40, 20, 6, 1, 1],
        0.5: [200, 100, 28, 2, 1],
        1.0: [400, 200, 57, 3, 1],
    }
    assert set(found[0.01]) < set(found[0.1]) < set(found[0.5])
    other = np.flatnonzero(embedding.draw_stratified(data, fraction=0.1, seed=1))
    assert len(set(other) & set(found[0.1])) < 30
    # Not the first rows of a class, and no matter what the other classes are.
    assert set(np.flatnonzero(label == 0)[:4]) != set(found[0.01][:4])
    few = data._replace(label=np.where(label == 1, 9, label).astype(np.int32))
    kept = embedding.draw_stratified(few, fraction=0.1, seed=0)
    assert set(np.flatnonzero(kept & (label != 1))) == {
        row for row in found[0.1] if label[row] != 1
    }
    domain = rng.integers(0, 3, 661).astype(np.int32)
    both = embedding.draw_stratified(data._replace(domain=domain), fraction=0.1, seed=2)
    assert np.flatnonzero(both).tolist() == eval_toy.share_twin(label, domain, 0.1, 2)


@pytest.mark.parametrize("reading", ["features", "augmented", "streamed"])
@pytest.mark.parametrize("train_on", ["all", "seen"])
def test_semi_supervised_probe_trains_on_its_share_alone(reading, train_on):
    plain = eval_toy.dataset()
    parts = eval_toy.parts_of(
        data=eval_toy.dataset(streams=reading == "streamed"), seed=3
    )
    more = dict(batch_size=4, fraction=0.3, train_on=train_on)
    evaluate = eval_toy.probe(parts, **eval_toy.options_of(reading, **more))
    # 50 rows in 6 classes and 3 domains: about a third, at least one of each pair.
    at = eval_toy.share_twin(plain.train.label, plain.train.domain, 0.3, 0)
    if train_on == "seen":
        met = [c for task in parts.stream.tasks[:2] for c in task.classes]
        at = [row for row in at if plain.train.label[row] in met]
    state = eval_toy.state_of(0)
    eval_toy.check_probe(evaluate(state, 1), parts, state, at, 4, reading=reading)


def knn_twin(x, y, bank, labels, mask, k, temperature, distance):
    guess = []
    for row in range(len(x)):
        if distance == "cosine":
            lengths = np.linalg.norm(bank, axis=1) * np.linalg.norm(x[row])
            closeness = bank @ x[row] / lengths
            weight = np.exp(closeness / temperature)
        else:
            closeness = -np.linalg.norm(bank - x[row], axis=1)
            weight = 1 / (1e-5 - closeness)
        there = [i for i in np.argsort(-closeness) if mask[row, i]][:k]
        votes = np.bincount(labels[there], weight[there], minlength=eval_toy.CLASSES)
        guess.append(votes.argmax() if there else -1)
    return np.array(guess)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_neighbours_are_those_of_brute_force(distance, scenario):
    parts, state = eval_toy.parts_of(scenario), eval_toy.state_of(1)
    train, test = parts.stream.dataset.train, parts.stream.evaluation
    groups = embedding.assign_tasks(parts)
    x = eval_toy.embedded(state, test.images)
    bank = eval_toy.embedded(state, train.images)
    for train_on, met in (("all", 3), ("seen", 2)):
        options = dict(k=9, temperature=0.2, distance=distance, train_on=train_on)
        result = knn.make(parts, batch_size=8, **options)(state, 1)
        rows = result.rows
        there = np.isin(groups.train_task, range(met))
        everyone = np.broadcast_to(there, (len(x), len(bank)))
        own = everyone & (groups.train_task == groups.test_task[:, None])
        twin = functools.partial(
            knn_twin,
            x,
            test.label,
            bank,
            train.label,
            k=9,
            temperature=0.2,
            distance=distance,
        )
        guess = twin(mask=everyone)
        want = eval_toy.accuracies(parts, guess)
        np.testing.assert_allclose(rows["class_incremental"], want)
        right = guess == test.label
        np.testing.assert_array_equal(result.answers["class_incremental"], right)
        assert result.scalars["accuracy"] == pytest.approx(right.mean())
        told = np.array(eval_toy.accuracies(parts, twin(mask=own)))
        told[met:] = np.nan
        np.testing.assert_allclose(rows[f"{groups.aware}"], told)
    assert groups.aware == {"class": "task_aware", "domain": "domain_aware"}[scenario]


def test_votes_weigh_by_distance():
    bank = jnp.asarray([[1.0, 0], [0, 2], [3, 4], [9, 9]])
    labels, mask = jnp.asarray([0, 1, 1, 2]), jnp.asarray([True, True, True, False])
    options = dict(num_classes=3, temperature=0.5)
    found = knn.count_votes(jnp.asarray([[2.0, 0]]), bank, labels, mask, k=2, **options)
    np.testing.assert_allclose(found, [[np.exp(2), np.exp(1.2), 0]], rtol=1e-5)
    found = knn.count_votes(
        jnp.asarray([[1.0, 0], [3, 3]]),
        bank,
        labels,
        mask,
        k=4,
        distance="euclidean",
        **options,
    )
    want = [
        [1e5, 1 / (5**0.5 + 1e-5) + 1 / (20**0.5 + 1e-5), 0],
        [1 / (13**0.5 + 1e-5), 1 / (10**0.5 + 1e-5) + 1 / (1 + 1e-5), 0],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-4)


def evaluators(parts):
    def scores(state, images):
        return jnp.tile(parts.embed(state, images), 2)[:, : eval_toy.CLASSES]

    small = dict(epochs=2, batch_size=16)
    return {
        "features": eval_toy.probe(parts, augment=False, **small),
        "augmented": eval_toy.probe(parts, train_on="seen", **small),
        "knn": knn.make(parts, k=3, train_on="seen", batch_size=16),
        "predict": predict.make(parts._replace(predict=scores)),
    }


def streamed(scenario):
    parts = eval_toy.parts_of(scenario, eval_toy.dataset(streams=True))
    return {"streamed": eval_toy.probe(parts, epochs=1, batch_size=16, train_on="seen")}


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_tasks_share_one_program_and_leave_the_state(scenario, caplog):
    parts = eval_toy.parts_of(scenario)
    state = eval_toy.state_of(0)
    before = jax.tree.map(lambda x: np.array(x, copy=True), state)
    for name, evaluate in (evaluators(parts) | streamed(scenario)).items():
        evaluate(state, 0)
        later = [
            eval_toy.state_of(task) for task in (1, 2)
        ]  # makes its arrays beforehand
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            caplog.clear()
            for task in (1, 2):
                evaluate(later[task - 1], task)
            found = [r.message for r in caplog.records if "ompil" in r.message]
            assert not found, name
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.jit(lambda x: x * 3.25)(before.params["w"])
        assert "ompil" in caplog.text  # the log is seen at all
    np.testing.assert_array_equal(state.params["w"], before.params["w"])


def conv_state():
    net = resnet.conv_net(width=2)
    images = jnp.zeros((1, eval_toy.SIZE, eval_toy.SIZE, 3))
    variables = jax.jit(functools.partial(net.init, train=False))(
        jax.random.key(0), images
    )

    def embed_conv(state, images):
        return net.apply(state.params, images, train=False)

    return eval_toy.State(variables), embed_conv


def test_devices_do_not_matter():
    state, embed_conv = conv_state()
    found = []
    for devices in (1, 2):
        parts = eval_toy.parts_of(devices=devices, embed=embed_conv)
        everywhere = sharding.replicate(state, parts.mesh)
        held = embedding.make_embedder(parts, parts.stream.evaluation)(everywhere)
        made = evaluators(parts)
        results = {name: run(everywhere, 1) for name, run in made.items()}
        found.append((np.asarray(held), results))
    (one, results_one), (two, results_two) = found
    assert one.shape == (31, 8) and np.abs(one).max() > 0
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    for name, result in results_one.items():
        other = results_two[name]
        for row in result.rows:
            gap = np.abs(result.rows[row] - other.rows[row])
            assert np.nanmax(gap) < 0.15, (name, row)  # one row of a task of nine
        if "train_loss" in result.scalars:
            loss = result.scalars["train_loss"]
            np.testing.assert_allclose(loss, other.scalars["train_loss"], rtol=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_rows_beyond_the_first_are_left_out(streams, devices, caplog):
    """Whole batches of them; how many there are compiles nothing."""
    parts = eval_toy.parts_of(data=eval_toy.dataset(streams=streams), devices=devices)
    state, order = eval_toy.state_of(0), np.random.default_rng(1).permutation(31)
    run = embedding.make_embedder(
        parts, parts.stream.evaluation, rows=order, batch_size=8
    )
    whole = np.asarray(run(state))
    want = eval_toy.embedded(state, eval_toy.dataset().test.images[order])
    np.testing.assert_allclose(whole, want, atol=1e-5)
    for first, there in {31: 31, 25: 31, 16: 16, 9: 16, 1: 8, 0: 8}.items():
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            caplog.clear()
            found = np.asarray(run(state, first=first))
            assert "ompil" not in caplog.text
        at = first if streams else there  # the last batch of a reader is padded
        np.testing.assert_array_equal(found[:at], whole[:at])
        assert found.shape == whole.shape and not found[there:].any()


@pytest.mark.parametrize("out", [-np.inf, np.inf, np.nan])
def test_a_class_at_minus_infinity_is_left_out_and_no_mistake(out):
    """So methods predict among the classes that they have met."""
    layer = np.float32(
        np.random.default_rng(5).normal(size=(eval_toy.DIM, eval_toy.CLASSES))
    )

    def among(state, images):
        scores = eval_toy.embed(state, images) @ layer
        return jnp.where(np.arange(eval_toy.CLASSES) < 3, scores, out)

    parts, state = eval_toy.parts_of(predict=among), eval_toy.state_of(3)
    test, rows = parts.stream.evaluation, parts.stream.tasks[0].test
    scores = eval_toy.embedded(state, test.images[rows]) @ layer
    accuracy = (scores[:, :3].argmax(axis=1) == test.label[rows]).mean()
    result = predict.make(parts)(state, 0)
    if out == -np.inf:
        assert result.warnings == () and 0 < accuracy < 1
        np.testing.assert_allclose(result.scalars["accuracy"], accuracy)
    else:
        assert np.isnan(result.scalars["accuracy"])
        assert "not finite" in result.warnings[0]

    def nothing(state, images):  # for one row
        return among(state, images).at[0].set(-jnp.inf)

    result = predict.make(parts._replace(predict=nothing))(state, 0)
    assert np.isnan(result.scalars["accuracy"]) and "finite" in result.warnings[0]


@pytest.mark.parametrize("max_rows", [None, 10])
def test_the_objective_is_the_mean_over_batches_of_the_tasks_so_far(max_rows):
    """Each row at most once, in batches that never change, under keys of their own."""
    words = []

    def loss(state, key, batch):
        jax.debug.callback(
            lambda *x: words.append([np.asarray(n).tolist() for n in x]),
            jax.random.key_data(key),
            batch["index"],
        )
        bright = batch["image"].astype(jnp.float32).mean() / 255
        return state.params["w"].sum() * bright

    parts = eval_toy.parts_of(objective=loss)
    train, tasks = parts.stream.dataset.train, parts.stream.tasks
    evaluate = objective.make(parts, batch_size=8, max_rows=max_rows)
    state, sizes = eval_toy.state_of(2), [len(task.train.rows) for task in tasks]
    whole = [size if max_rows is None else min(size, max_rows) for size in sizes]
    for done in (2, 0, 1):
        words.clear()
        value = evaluate(state, done).scalars["loss"]
        jax.effects_barrier()
        keys, batches = zip(*words, strict=True)
        rows = np.concatenate(batches)
        assert len(set(rows.tolist())) == len(rows) == sum(whole[: done + 1]) // 8 * 8
        owners = [np.isin(rows, task.train.rows).sum() for task in tasks]
        assert all(owners[: done + 1]) and not any(owners[done + 1 :])
        assert all(n <= most for n, most in zip(owners, whole, strict=True))
        assert len(set(map(tuple, keys))) == len(batches)
        bright = [train.images[list(batch)].mean() / 255 for batch in batches]
        total = np.asarray(state.params["w"], np.float64).sum()
        np.testing.assert_allclose(value, total * np.mean(bright), rtol=1e-4)
        again = evaluate(state, done).scalars["loss"]
        assert again == value
        jax.effects_barrier()
        assert words[len(batches) :] == words[: len(batches)]  # same rows, same keys
        owned = [np.isin(batches[0], task.train.rows).any() for task in tasks]
        assert all(owned[: done + 1])
    other = objective.make(parts._replace(seed=4), batch_size=8, max_rows=max_rows)
    words.clear()
    other(state, 1)
    jax.effects_barrier()
    assert [batch for _, batch in words] != [list(batch) for batch in batches]
    assert not {tuple(key) for key, _ in words} & {*map(tuple, keys)}
    # Fewer rows than a batch are one batch; as many as a batch are enough.
    words.clear()
    objective.make(parts, batch_size=64)(state, 0)
    objective.make(parts, batch_size=8, max_rows=8)(state, 0)
    jax.effects_barrier()
    (_, every), (_, some) = words
    assert sorted(every) == sorted(tasks[0].train.rows) and len(some) == 8
    # They are drawn, and batches mix the tasks.
    assert {*some} != {*tasks[0].train.rows[:8].tolist()}


def test_what_all_evaluators_say_is_one_result(tmp_path):
    """Their seconds go to the clock's place of the log alone."""
    said = []

    class Log:
        def log(self, step, task, **given):
            said.append((step, task, given))

    def judge(score):
        def evaluate(state, task):
            row = np.array([score, np.nan])
            said.append(score)
            return core.Result({"x": row, "y": 2 * row}, {"s": score})

        return evaluate

    class At(core.NamedTuple):
        step: np.ndarray

    judges = {"one": judge(0.5), "two": judge(0.25), "silent": lambda *_: NOTHING}

    def stop():
        said.append("asked")
        return said.count(0.25) == 2

    found = evaluation.run_evaluators(judges, At(np.int32(7)), 3, Log(), stop=stop)
    assert said[:5] == ["asked", 0.5, "asked", 0.25, "asked"]
    assert list(found.rows) == ["one/x", "one/y", "two/x", "two/y"]
    np.testing.assert_array_equal(found.rows["two/y"], [0.5, np.nan])
    assert found.scalars == {"one/s": 0.5, "two/s": 0.25}
    ((step, task, logged),) = said[5:]
    assert (step, task, logged["eval"]) == (7, 3, found.rows | found.scalars)
    seconds = logged["time"]["evaluation"]
    assert [*seconds] == ["one/seconds", "two/seconds", "silent/seconds"]
    assert all(x >= 0 for x in seconds.values())
    assert (
        evaluation.run_evaluators(judges, At(np.int32(7)), 3, Log(), stop=stop) is None
    )
    assert said[6:] == ["asked", 0.5, "asked", 0.25, "asked"]  # and nothing is logged


NOTHING = core.Result({}, {})


class Stepped(core.NamedTuple):
    params: dict
    step: np.ndarray


def test_evaluators_of_one_state_share_their_passes_over_a_split():
    """Each embeds by itself when alone; a few rows are taken from a pass over all."""
    rows = []

    def embed(state, images):
        jax.debug.callback(lambda x: rows.append(len(x)), images[:, 0, 0, 0])
        return eval_toy.embed(state, images)

    class Log:
        def log(self, *_, **__): ...

    def project(state, images):  # passes of its own
        return jnp.flip(eval_toy.embed(state, images), axis=1) ** 3

    parts = eval_toy.parts_of(embed=embed)._replace(project=project)
    judges = {
        "few": collapse.make(parts, max_rows=9),
        "spread": spread.make(parts, features="projection"),
        "knn": knn.make(parts, k=3),
        "linear": eval_toy.probe(parts, augment=False, epochs=1, batch_size=16),
        "collapse": collapse.make(parts, max_rows=20),
    }
    for seed in range(2):
        state = Stepped(eval_toy.state_of(seed).params, np.int32(seed))
        alone = {name: judge(state, 1) for name, judge in judges.items()}
        jax.effects_barrier()
        assert sorted(rows) == [9, 20, 31, 31, 50, 50]
        rows.clear()
        found = evaluation.run_evaluators(judges, state, 1, Log())
        jax.effects_barrier()
        assert sorted(rows) == [9, 31, 50]
        rows.clear()
        for name, result in alone.items():
            for kind in ("rows", "scalars"):
                for key, value in getattr(result, kind).items():
                    same = getattr(found, kind)[f"{name}/{key}"]
                    np.testing.assert_allclose(same, value, rtol=1e-5)

    embed = embedding.make_embedder(parts, parts.stream.evaluation)
    with embedding.share_passes():  # by one state alone
        one, two = (np.asarray(embed(eval_toy.state_of(seed))) for seed in range(2))
    assert np.abs(one - two).max() > 0.1


def test_normalised_features_are_of_length_one():
    parts, state = eval_toy.parts_of(), eval_toy.state_of(0)
    train, key = parts.stream.dataset.train, jax.random.key(0)
    settings = head_lib.ProbeSettings(normalize_features=True)
    embed = jax.jit(linear._embed_augmented(parts, settings))
    views = embed(state, train.images[:2], key)
    whole, plain = (linear._embed_plain(parts, train, x)(state) for x in (True, False))
    np.testing.assert_allclose(np.linalg.norm(views, axis=1), 1, atol=1e-5)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(whole * lengths, plain, atol=1e-5)
    assert np.ptp(lengths) > 0.1


def test_points_of_a_picture_are_drawn_evaluation_rows(tmp_path, monkeypatch):
    told, drawn = {}, []

    def embedder(**options):
        told.update(options)
        return types.SimpleNamespace(fit_transform=lambda features: features[:, :2])

    monkeypatch.setattr(manifold, "TSNE", embedder)
    monkeypatch.setattr(plots, "scatter", lambda *given, **_: drawn.append(given))
    parts, state = eval_toy.parts_of(), eval_toy.state_of(0)
    tsne.make(parts, directory=tmp_path, max_points=10)(state, 1)
    ((points, labels, path),), test = drawn, parts.stream.evaluation
    rows = tsne.draw_rows(test.label, 10, parts.seed)
    want = eval_toy.embedded(state, test.images[rows])[:, :2]
    np.testing.assert_allclose(points, want, atol=1e-5)
    assert labels.tolist() == test.label[rows].tolist()
    assert path == tmp_path / "tsne_task2.png"
    assert told == {"perplexity": 3.0, "init": "pca", "random_state": parts.seed}
    tsne.project(np.ones((9, 3)), perplexity=1.0, seed=0)
    assert told["init"] == "random" and told["perplexity"] == 1
    four, five = (
        parts.stream._replace(evaluation=eval_toy.split_of(1, n)) for n in (4, 5)
    )
    tsne.make(parts._replace(stream=five), directory=tmp_path)
    with pytest.raises(ValueError, match="tsne.*has 4"):
        tsne.make(parts._replace(stream=four), directory=tmp_path)


SCHEDULE = {"milestones": (60, 80), "factor": 0.1}
ADAM = {"optimizer": "adam", "weight_decay": 1e-6, "augment": False}
BALANCED = {"train_on": "visible", "balanced": True, "factor": 0.2}
COLOURS = {"scale": (0.2, 1.0), "jitter_probability": 0.8, "grayscale": 0.2}


@pytest.mark.parametrize(
    "options, want",
    [
        ({}, {"lr": 0.1, "train_on": "all", "augment": True} | SCHEDULE),
        ({"epochs": 60, "lr": 3.0}, {"lr": 3.0, "milestones": (36, 48)}),
        ({"epochs": 15}, {"milestones": (9, 12), "optimizer": "sgd"}),
        ({"preset": "duel", "epochs": 50}, ADAM | {"lr": 1e-3, "milestones": ()}),
        (
            {"preset": "duel_longtail"},
            ADAM | {"milestones": tuple(range(10, 100, 10)), "factor": 0.5},
        ),
        (
            {"preset": "cclis", "lr": 0.5},
            {"lr": 0.5, "milestones": (60, 75, 90)} | BALANCED | COLOURS,
        ),
        (
            {"preset": "cclis", "scale": (0.1, 1.0), "blur": 0.5, "augment": False},
            BALANCED | {"scale": (0.1, 1.0), "blur": 0.5, "augment": False},
        ),
    ],
)
def test_presets_are_the_protocols_of_the_papers(options, want, monkeypatch):
    monkeypatch.setattr(linear, "make_evaluator", lambda parts, settings: settings)
    found = linear.make(eval_toy.parts_of(), **options)._asdict()
    assert {name: found[name] for name in want} == want


@pytest.mark.parametrize(
    ("make", "split"),
    [
        (linear.make, "train"),
        (knn.make, "train"),
        (functools.partial(tsne.make, directory="x"), "test"),
    ],
)
def test_labels_and_evaluation_rows_are_needed(make, split):
    data = eval_toy.dataset()
    examples = getattr(data, split)
    label = examples.label.copy()
    label[:4] = -1
    examples = examples._replace(label=label)
    parts = eval_toy.parts_of("data", data._replace(**{split: examples}))
    with pytest.raises(ValueError, match=r"4 of \d+ \w+ rows of toy"):
        make(parts)
    parts = eval_toy.parts_of()
    parts = parts._replace(stream=parts.stream._replace(evaluation=None))
    with pytest.raises(ValueError, match="config.scenario.evaluation"):
        make(parts)


def test_a_train_row_of_several_tasks_is_of_the_first():
    parts = eval_toy.parts_of("domain")
    want = embedding.assign_tasks(parts).train_task
    *tasks, last = parts.stream.tasks
    again = last._replace(train=last.train._replace(rows=np.arange(50)))
    more = parts._replace(stream=parts.stream._replace(tasks=(*tasks, again)))
    np.testing.assert_array_equal(embedding.assign_tasks(more).train_task, want)


def test_each_batch_of_a_probe_is_read_by_a_key_of_its_own():
    keys = []

    def read(state, data, rows, key):
        data = jax.random.key_data(key)
        jax.debug.callback(lambda x: keys.append(np.asarray(x).tobytes()), data)
        return jnp.zeros((len(rows), 2))

    rule = head_lib.ProbeSettings(epochs=3, batch_size=8)
    labels = np.arange(24) % eval_toy.CLASSES
    fit = head_lib.make_resident_fit(rule, eval_toy.parts_of(), labels, read)
    jax.block_until_ready(fit(None, None, np.arange(24), 0, 0, 0.1))
    assert len({*keys}) == len(keys) == 3 * 3
    keys.clear()
    parts = eval_toy.parts_of(data=eval_toy.dataset(streams=True))

    def embed(state, images, key):
        return read(state, None, images, key)

    fit = head_lib.make_streamed_fit(
        rule, parts, embedding.make_eval_crop(parts), embed
    )
    jax.block_until_ready(fit(None, 2, np.arange(24), 0, 0, 0.1))
    jax.effects_barrier()
    assert len({*keys}) == len(keys) == 3 * 3


def test_neighbours_may_be_the_other_evaluation_rows_or_the_labelled_ones():
    data = eval_toy.dataset()
    some = np.where(np.arange(50) % 3 == 0, data.train.label, -1).astype(np.int32)
    none = np.full_like(some, -1)
    first = np.where(data.train.domain == 0, data.train.label, -1).astype(np.int32)
    state = eval_toy.state_of(1)
    x = eval_toy.embedded(state, data.test.images)
    bank = eval_toy.embedded(state, data.train.images)
    options = dict(k=3, temperature=0.2, distance="cosine")
    for label, train_on, rows, mask in (
        (none, "evaluation", x, ~np.eye(len(x), dtype=bool)),
        (some, "labelled", bank, np.broadcast_to(some >= 0, (len(x), len(bank)))),
        # Within two domains no row has a label, so that no guess is right.
        (first, "labelled", bank, np.broadcast_to(first >= 0, (len(x), len(bank)))),
    ):
        given = data._replace(train=data.train._replace(label=label))
        parts = eval_toy.parts_of("joint", given)
        found = knn.make(parts, batch_size=8, train_on=train_on, **options)(state, 0)
        known = data.test.label if train_on == "evaluation" else label
        guess = knn_twin(x, data.test.label, rows, known, mask, **options)
        want = (guess == data.test.label).mean()
        assert found.rows["class_incremental"] == pytest.approx([want])
        # Within a domain neither is a row its own neighbour.
        parts = eval_toy.parts_of("domain", given)
        made = knn.make(parts, batch_size=8, train_on=train_on, **options)
        rows_of = embedding.assign_tasks(parts)
        bank_task = rows_of.train_task if rows is bank else rows_of.test_task
        inside = mask & (bank_task == rows_of.test_task[:, None])
        guess = knn_twin(x, data.test.label, rows, known, inside, **options)
        right = guess == data.test.label
        want = [right[rows_of.test_task == i].mean() for i in range(3)]
        assert made(state, 0).rows["domain_aware"] == pytest.approx(want)
        with pytest.raises(ValueError, match="label"):
            knn.make(parts, k=3)
    given = data._replace(train=data.train._replace(label=some))
    parts = eval_toy.parts_of("joint", given)
    with pytest.raises(ValueError, match="from 1.* 30 "):
        knn.make(parts, k=31, train_on="evaluation")
    with pytest.raises(ValueError, match="from 1.* 17 "):
        knn.make(parts, k=18, train_on="labelled")


def test_what_waits_for_the_end_runs_after_the_last_step_of_the_last_task():
    late = evaluation.AtTheEnd(lambda state, task: core.Result({}, {"a": 1.0}), 1)
    judges = {"now": lambda state, task: core.Result({}, {}), "late": late}
    for task, steps, runs in (
        (0, 6, False),
        (1, 0, False),
        (1, 5, False),
        (1, 6, True),
    ):
        state = types.SimpleNamespace(step=10 + steps, task_start=10, task_steps=6)
        due = evaluation.due_evaluators(judges, state, task)
        assert due == ["now", "late"][: 1 + runs]
        assert late(state, task).scalars == ({"a": 1.0} if runs else {})


@pytest.mark.parametrize(
    ("preset", "epochs", "milestones"),
    [
        ("cassle", 3, (2, 2)),
        ("cclis", 7, (4, 5, 6)),
        ("duel", 5, ()),
        ("duel_longtail", 10, (1, 2, 3, 4, 5, 6, 7, 8, 9)),
    ],
)
def test_rates_fall_at_rounded_shares_of_the_epochs(
    monkeypatch, preset, epochs, milestones
):
    monkeypatch.setattr(linear, "make_evaluator", lambda parts, settings: settings)
    parts = eval_toy.parts_of(embed=eval_toy.embed)
    found = linear.make(parts, preset=preset, epochs=epochs)
    assert (found.milestones, found.epochs) == (milestones, epochs)
    asked = linear.make(parts, preset=preset, lr=0.5, augment=True, blur=0.25)
    assert (asked.lr, asked.augment, asked.blur) == (0.5, True, 0.25)
