"""Images that a set holds more than once, within a split and in two of them.

A test image that is also trained on flatters every method, and a link or a copied
folder puts thousands of them there unseen. Images are the same where their bytes are:
those of the file or record, of pixels in memory otherwise. What was saved twice in
other bytes, or cut a little differently, is not found.
"""

import os
from typing import NamedTuple

from jaxcl.data import identity


class Found(NamedTuple):
    """How many rows of a set are not there for the first time."""

    within: dict[str, int]  # split -> rows whose image is in an earlier row of it
    trained: dict[str, int]  # validation, test -> rows whose image is in train
    example: str  # names two rows with one image

    def words(self, name: str) -> str:
        """One line that tells it, "" where there are none."""
        said = [
            f"{count} rows of {split} repeat an image of {split}"
            for split, count in self.within.items()
            if count
        ]
        said += [
            f"{count} rows of {split} are in train, too"
            for split, count in self.trained.items()
            if count
        ]
        return f"{name}: {'; '.join(said)} (such as {self.example})" if said else ""


def find_duplicates(known: identity.Identity) -> Found:
    """Compare all images of a set, by a digest of their bytes.

    A row that cannot be read is no duplicate. Sets of graphs have no images.
    """
    first: dict[int, tuple[str, int]] = {}  # digest -> where it is met first
    within, trained, example = {}, {}, ""
    for split in known.splits():
        seen, again, count = set(), 0, 0
        for row in known.rows(split).tolist():
            digest = int(known.marks[row])
            if digest == 0:
                continue
            where = first.setdefault(digest, (split, row))
            again += digest in seen
            count += digest not in seen and where[0] == "train" != split
            if where[1] != row and not example:
                pair = (os.fsdecode(known.names[x]) for x in (row, where[1]))
                example = " and ".join(pair)
            seen.add(digest)
        within[split] = again
        if split != "train":
            trained[split] = count
    return Found(within, trained, example)
