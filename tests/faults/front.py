"""Faults of jaxcl.fit, of the command, and of what they are made from."""

from faults import fault

_WORDS = "test_configs.py::test_words"

FAULTS = [
    *fault.of(
        "data/in_memory.py",
        "test_in_memory.py",
        (
            "in memory: labels are not among the bytes",
            "for array in (examples.images, examples.label, examples.domain):",
            "for array in (examples.images, examples.domain):",
        ),
        (
            "in memory: any set of the name will do",
            "held = _SETS.get(sha256 + set)",
            "held = next((x for x in _SETS.values() if x.name == set), None)",
        ),
        (
            "in memory: rows without a label are held out",
            "mask = splits.drawn(whole, test, [test_seed, 2]) & (whole.label >= 0)",
            "mask = splits.drawn(whole, test, [test_seed, 2])",
        ),
        (
            "in memory: sets are kept for ever",
            "weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()",
            "dict[str, Held] = {}",
        ),
    ),
    *fault.of(
        "export/encoder.py",
        "test_fit.py::test_the_encoder_takes_one_image_or_many",
        (
            "encoder: PIL images of 16 bits are cut off to white",
            'return files_lib.from_pillow(image, "images", channels=channels)',
            'image = np.asarray(image.convert("RGB" if channels == 3 else "L"))',
        ),
    ),
    *fault.of(
        "front/given.py",
        "test_fit.py::test_pil_images_are_read_as_the_pictures_that_they_are",
        (
            "fit: the numbers of a palette are grey levels",
            'if all(hasattr(image, "convert") for image in images):',
            "if False:",
        ),
    ),
    *fault.of(
        "front/given.py",
        "test_fit.py::test_a_photograph_of_a_dataset_is_not_turned",
        (
            "fit: photographs of a Dataset are turned, those of a folder are not",
            "return image if mode is None else image.convert(mode)",
            "return __import__('PIL.ImageOps').ImageOps.exif_transpose(image)",
        ),
    ),
    *fault.of(
        "data/sources.py",
        "test_in_memory.py",
        (
            "judged by: test images are of the first domain",
            "test=judge._replace(domain=np.full_like(judge.domain, -1)),",
            "test=judge,",
        ),
    ),
    *fault.of(
        "evals/uniformity.py",
        "test_uniformity.py",
        (
            "uniformity: rows are pairs of themselves",
            "jnp.triu(jnp.exp(-2 * squares), k=1)",
            "jnp.triu(jnp.exp(-2 * squares), k=0)",
        ),
    ),
    *fault.of(
        "evals/features.py",
        "test_uniformity.py",
        (
            "uniformity: both views are one",
            "return [parts.embed(state, views[:, view]) for view in range(count)]",
            "return [parts.embed(state, views[:, 0]) for view in range(count)]",
        ),
        (
            "uniformity: filled rows are measured",
            "return [np.concatenate(view)[: len(images)] for view in views]",
            "return [np.concatenate(view) for view in views]",
        ),
    ),
    *fault.of(
        "evals/neighbours.py",
        "test_neighbours.py",
        (
            "neighbours: an image is its own neighbour",
            "others[np.arange(len(queries)), queries] = -np.inf",
            "others[np.arange(len(queries)), queries] = 1.0",
        ),
        (
            "neighbours: long rows are near",
            "rows = features / np.where(lengths > 0, lengths, 1.0)",
            "rows = features",
        ),
        (
            "neighbours: images of other rows are drawn",
            "images[chosen],",
            "images[np.sort(chosen)],",
        ),
        (
            "neighbours: of equal ones the later comes first",
            'np.argsort(-others, axis=1, kind="stable")[:, :k]',
            "np.argsort(others, axis=1)[:, ::-1][:, :k]",
        ),
    ),
    *fault.of(
        "evals/knn.py",
        "test_evals.py::test_neighbours_may_be_the_other_evaluation_rows_or_the_"
        "labelled_ones",
        (
            "knn: a row is its own neighbour",
            "known = mask & (jnp.arange(count) != itself[:, None]) if others else mask",
            "known = mask",
        ),
        (
            "knn: rows without a label vote",
            "            return known\n",
            "            return known | True\n",
        ),
    ),
    *fault.of(
        "front/fitting.py",
        "test_fit.py::test_a_wrong_argument_is_named",
        (
            "fit: a strategy with nothing to keep trains as if it were none",
            "if strategy.teacher or strategy.consolidates:",
            "if strategy.teacher and strategy.consolidates:",
        ),
        (
            "fit: half a task is the task of each image",
            "if by_image is not None and np.ndim(by_image) != 1:",
            "if False:",
        ),
    ),
    *fault.of(
        "front/result.py",
        "test_fit.py::test_an_update_is_kept_or_rolled_back",
        (
            "update: an option of what has none is a traceback",
            "if not isinstance(section, dict):",
            "if False:",
        ),
        (
            "update: the images of the index are those of the run, whatever is given",
            "index = None if old is None else",
            "index = None if True else",
        ),
        slow=True,
    ),
    *fault.of(
        "export/encoder.py",
        "test_fit.py::test_the_encoder_takes_one_image_or_many",
        (
            "embed: what has no length is a traceback",
            'if not hasattr(images, "__getitem__") or not hasattr(images, "__len__"):',
            "if False:",
        ),
    ),
    *fault.of(
        "run/finish.py",
        "test_record.py::test_the_last_table_has_a_dash_where_nothing_was_measured",
        (
            "finish: a run without labels ends with the head of an empty table",
            'if results["matrices"]:',
            "if True:",
        ),
        (
            "finish: what was not judged before training is a number",
            "if judged.size else None",
            "",
        ),
    ),
    *fault.of(
        "config/own_images.py",
        "test_own_images.py",
        (
            "own images: statistics are of one image",
            "    for image in images:\n        pixels",
            "    for image in images[:1]:\n        pixels",
        ),
        (
            "own images: what the section reads is taken for squares",
            "cut=read != dict(data)",
            'cut="resident" in read',
        ),
        (
            "own images: a size that is no number is a traceback",
            'schema.check_value(size, schema.Pixels | None, "size")',
            "pass",
            "test_fit.py::test_a_wrong_argument_is_named",
        ),
        (
            "own images: every strategy is continual",
            'table = {"finetune": joint} if by_strategy else {}',
            "table = {}",
        ),
        (
            "own images: a batch is as large as the set",
            "np.clip(np.log2(max(rows // 4, 2)), 1, 8)",
            "np.clip(np.log2(max(rows, 2)), 1, 8)",
        ),
        (
            "own images: patches do not divide the image",
            "return max(side // patch, 1) * patch",
            "return side",
        ),
        (
            "own images: an encoder's folder gives its network alone",
            "    if start is not None:\n        made.start = start\n",
            "",
        ),
    ),
    *fault.of(
        "plots/runs.py",
        "test_plots.py::test_a_notebook_shows_the_picture_of_a_run",
        (
            "plots: a notebook shows the name of a figure",
            "    figure._repr_png_ = lambda: _png(figure)\n",
            "",
        ),
    ),
    *fault.of(
        "config/recipe.py",
        "test_own_images.py::test_epochs_and_batch_follow_the_number_of_images",
        (
            "recipe: a function is asked once",
            "look = _Lookup(lambda value, *held: function(*held), list(fields))",
            "look = _Lookup(lambda value, *held: value, list(fields))",
        ),
    ),
    *fault.of(
        "config/recipe.py",
        f"{_WORDS}_name_the_argument_and_what_is_allowed",
        (
            "recipe: of two words that exclude one another one is passed over",
            'f"{pair} exclude one another" for pair in rivals]',
            'f"{pair} exclude one another" for pair in ()]',
        ),
        (
            "recipe: unknown words are passed over",
            "sorted(asked.difference(*said))]",
            "()]",
        ),
        (
            "recipe: a number is its form",
            '.replace("=N", "=[1-9][0-9]*")',
            '.replace("=N", "=[N0-9]+")',
        ),
        (
            "recipe: a word that is not said is the last of its choice",
            "(own or table)[0] for own,",
            "(own or table)[-1] for own,",
            f"{_WORDS}_of_an_argument_in_any_order",
        ),
    ),
    *fault.of(
        "config/files.py",
        "test_front.py",
        (
            "files: a file counts less than a name",
            "    if pathlib.Path(file).is_file():\n        return name\n",
            "",
        ),
        (
            "files: the word behind the colon is lost",
            'return f"{path}{colon}{word}"',
            'return f"{path}"',
        ),
    ),
    *fault.of(
        "front/command.py",
        "test_front.py",
        (
            "command: a config wants its flag",
            'rest[0] = f"--config={rest[0]}"',
            "pass",
        ),
    ),
    *fault.of(
        "front/shown.py",
        "test_front.py",
        (
            "show: nothing is from the command",
            'if ".".join([*path, name]) in given',
            "if name in given",
        ),
        (
            "show: meanings end with their line",
            "elif line.strip() and names and indent > depth:",
            "elif False:",
            "test_front.py::test_what_is_shown_says_where_it_is_from",
        ),
    ),
    *fault.of(
        "front/fitting.py",
        "test_fit.py",
        (
            "fit: labels are tasks of slices",
            'scenario, count = ("class" if labelled else "data"), int(tasks)',
            'scenario, count = "data", int(tasks)',
            "test_fit.py::test_it_leaves_a_run_directory_and_says_what_came_out",
        ),
        (
            "fit: images are held out although others judge",
            'sections = {"train": given.whole(train), "test": given.whole(judge)}',
            'sections = {"train": train.section, "test": given.whole(judge)}',
            "test_fit.py::test_labels_judge_as_far_as_there_are_any",
        ),
        (
            "fit: a machine is part of what is run",
            "if k not in claim.MACHINE}",
            "}",
            "test_fit.py::test_a_directory_is_made_from_what_is_run",
        ),
        (
            "fit: another encoder in memory comes into the same directory",
            "    kept |= export_command.hashes(start)\n",
            "",
            "test_fit.py::test_another_encoder_in_memory_makes_another_directory",
        ),
        (
            "fit: the second Ctrl-C is not heard",
            "            raise KeyboardInterrupt\n",
            "            return\n",
            "test_fit.py::test_ctrl_c_saves_and_the_second_one_ends",
        ),
    ),
    *fault.of(
        "front/result.py",
        "test_fit.py",
        (
            "result: the encoder of before an update stays",
            "if self._encoder is None or self._encoder[0] != now:",
            "if self._encoder is None:",
            "test_fit.py::test_an_update_is_kept_or_rolled_back",
        ),
        (
            "result: limits are not asked for",
            'config["limits"] |= dict(limits or {})',
            "pass",
            "test_fit.py::test_an_update_is_kept_or_rolled_back",
        ),
        slow=True,
    ),
    *fault.of(
        "export/encoder.py",
        "test_fit.py::test_the_encoder_takes_one_image_or_many",
        (
            "encoder: of one image there are rows",
            "return self.embed(inputs, batch_size=1)[0]",
            "return self.embed(inputs, batch_size=1)",
        ),
    ),
    *fault.of(
        "plots/runs.py",
        "test_fit.py::test_it_is_drawn_reported_and_saved",
        (
            "front: the picture of a result tells its time",
            "        canvas.save(figure, path)\n    # Jupyter",
            "        figure.savefig(path)\n    # Jupyter",
        ),
        slow=True,
    ),
]
