"""Image files named in list files, one `relative/path.jpg LABEL` a line."""

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import readers
from jaxcl.data.sources import shared
from jaxcl.errors import Refused

MARK = b"\xef\xbb\xbf"  # some editors put it before utf-8


@shared.image_source
def image_lists(
    *,
    path: str,
    train: str = "{domain}_train.txt",
    validation_list: str | None = None,
    test: str | None = "{domain}_test.txt",
    domains: Annotated[Sequence[str], schema.Entries(once=True)] | None = None,
    lists: str | None = None,
    class_names: str | None = None,
    images: shared.ImageOptions,
) -> stream.Dataset:
    """Read image files and labels from list files, decoded row by row.

    A line is a path and, last, its label, an integer from 0; blank lines are
    skipped. Labels are never renumbered, even where a list lacks a class.

    path: folder that the paths in the lists are relative to.
    train, validation_list, test: names of list files in the folder `lists`, with
      {domain} for each of `domains`; None or "": no such list.
    lists: folder of the lists; None: `path`.
    domains: names of the domains, in the order of their numbers; None: one, "all".
    class_names: path of a text file, one name a line, label 0 first. None: the folder
      that holds all train files of a label, or else the label itself.

    Raises Refused for a missing list, a line that is not a path and a label, a path
    that leads out of `path`, and a missing image, unless on_corrupt is "skip".
    """
    if not os.path.isdir(path):
        raise Refused("path", path, "no such directory")
    names = None
    if class_names is not None:
        names = shared.class_list(class_names, option="class_names")
    limit = stream.LABELS if names is None else len(names)
    patterns = {"train": train, "validation_list": validation_list, "test": test}
    by_split = {}
    for option, pattern in patterns.items():
        if pattern or option == "train":
            list_files = _list_files(option, pattern, domains, lists or path)
            by_split[option] = _examples(path, option, list_files, limit, images)
    return stream.Dataset(
        name=os.path.basename(os.path.abspath(path)),
        class_names=_folder_names(by_split) if names is None else names,
        domain_names=tuple(domains or ("all",)),
        train=by_split["train"],
        validation=by_split.get("validation_list"),
        test=by_split.get("test"),
    )


def _examples(path, option, list_files, limit, images) -> stream.Examples:
    """Return the images of one split.

    Args:
      list_files: lists of the split, one for each domain.
      limit: number above all labels.
    """
    lists = [_read_list(file, option, limit) for file in list_files]
    files = np.array([file for of_list, _ in lists for file in of_list], bytes)
    label = np.array([number for _, of_list in lists for number in of_list], np.int32)
    domain = np.repeat(np.arange(len(lists)), [len(of_list) for of_list, _ in lists])
    if images.on_corrupt != "skip":
        _check_there(option, path, files.tolist())
    reader = readers.of_files(path, files, images.decoding)
    return shared.read_by_row(reader, label, domain)


def _list_files(option, pattern, domains, folder) -> list[str]:
    """Return paths of the lists of one split, one of each domain."""
    named = "{domain}" in pattern
    if named and domains is None:
        raise Refused(option, pattern, "give domains, or one list's name")
    domains = domains or [""]
    if len(domains) > 1 and not named:
        raise Refused(
            option, pattern, f"must hold {{domain}}: there are {len(domains)}"
        )
    return [os.path.join(folder, pattern.replace("{domain}", x)) for x in domains]


def _read_list(file: str, option: str, limit: int) -> tuple[list[bytes], list[int]]:
    """Return paths and labels of one list; bytes, since a set has 10^6 of them."""
    with storage.reading(f"{option}: {file}"):
        data = storage.read_bytes(file)
        data.decode()
    files, label = [], []
    for number, line in enumerate(data.removeprefix(MARK).splitlines(), 1):
        words = line.rsplit(None, 1)
        if not words:
            continue
        # Python reads no number of more than 4,300 digits.
        has_label = len(words) > 1 and words[1].isdigit() and len(words[1]) < 1000
        if not has_label or int(words[1]) >= limit:
            raise Refused(
                f"{file}, line {number}: {line.decode()[:200]!r} must be a path and a "
                f"label from 0 to {limit - 1}"
            )
        name = words[0].lstrip()
        if os.path.isabs(name) or os.path.normpath(name).split(b"/")[0] == b"..":
            raise Refused(
                f"{file}, line {number}: {name.decode()[:200]!r} is outside the "
                "folder of the images; must be relative to it"
            )
        files.append(name)
        label.append(int(words[1]))
    if not files:
        raise Refused(f"{option}: {file} names no images")
    return files, label


def _check_there(option: str, path: str, files: list[bytes]) -> None:
    """Refuse a list that names missing images."""
    root = os.fsencode(path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        there = pool.map(lambda file: os.path.exists(os.path.join(root, file)), files)
        lost = [file for file, exists in zip(files, there, strict=True) if not exists]
    if lost:
        names = [file.decode() for file in lost[:5]]
        raise Refused(
            f"{option}: {len(lost)} of {len(files)} images are not in {path}: {names}; "
            'with on_corrupt="skip" others of their class take their place'
        )


def _folder_names(by_split: dict[str, stream.Examples]) -> tuple[str, ...]:
    """Name classes by the folder that their train files share, else by label.

    If two classes share a folder, every class is named by its label.
    """
    train, folders = by_split["train"], {}
    files, labels = train.reader.reader.files.tolist(), train.label.tolist()
    for file, label in zip(files, labels, strict=True):
        folder = file.rsplit(b"/", 2)[-2] if b"/" in file else b""
        if folders.setdefault(label, folder) != folder:
            folders[label] = b""
    count = 1 + max(int(part.label.max()) for part in by_split.values())
    names = tuple(folders.get(n, b"").decode() or str(n) for n in range(count))
    return names if len({*names}) == count else tuple(map(str, range(count)))
