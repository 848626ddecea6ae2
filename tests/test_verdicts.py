"""docs/verdicts.md: its verdicts are words of its own, its numbers stand elsewhere."""

import re

import pytest

from helpers import config_files, pages

DOCS = config_files.ROOT / "docs"
PAGE = (DOCS / "verdicts.md").read_text()
HEAD = ["claim", "run", "verdict", "numbers"]
LINK = re.compile(r"\]\((\w+\.md)(?:#([\w-]+))?\)")
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")


def rows():
    """(paper, cells) of every line about a claim."""
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        title = part.partition("\n")[0]
        lines = [pages.cells(line) for line in re.findall(r"^\|.*$", part, re.M)]
        if lines[0] == HEAD:
            yield from ((title, line) for line in lines[2:])


ROWS = list(rows())
IDS = [f"{title}: {cells[0][:40]}" for title, cells in ROWS]


def section(path, anchor):
    """The text of a page from a heading to the next of its rank; without one, all."""
    text = path.read_text()
    if anchor is None:
        return text
    for found in re.finditer(r"^(#+) (.+)$", text, re.M):
        title = re.sub(r"[^\w\- ]", "", found[2]).strip().lower().replace(" ", "-")
        if title == anchor:
            rest = text[found.end() :]
            following = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
            return rest[: following.start()] if following else rest
    raise AssertionError(f"{path.name} has no {anchor}")


def test_every_paper_has_claims():
    papers = {title for title, _ in ROWS}
    assert papers == {"ER-ACE and ER-AML", "CCLIS", "PNR", "DUEL", "ICL"}


@pytest.mark.parametrize("cells", [cells for _, cells in ROWS], ids=IDS)
def test_a_verdict_is_one_of_three_and_its_numbers_stand_in_the_docs(cells):
    _, _, verdict, numbers = cells
    assert re.match(r"(held|did not hold|undecided)\b", verdict), verdict
    (link,) = LINK.findall(numbers)
    text = section(DOCS / link[0], link[1] or None)
    known = set(NUMBER.findall(text))
    missing = [number for number in NUMBER.findall(numbers) if number not in known]
    assert not missing, f"{numbers}: {missing} not in {'#'.join(link)}"


def test_the_head_counts_the_verdicts():
    words = ("held", "did not hold", "undecided")
    counts = [sum(cells[2].startswith(word) for _, cells in ROWS) for word in words]
    told = re.search(
        r"Of (\d+) claims (\d+) held.*?(\d+) did not.*?(\d+) are", PAGE, re.S
    )
    assert [int(x) for x in told.groups()] == [sum(counts), *counts]


def test_a_number_that_stands_nowhere_would_be_noticed():
    cells = ["x", "x", "held", "[12.3](results.md#not-reached)"]
    with pytest.raises(AssertionError, match=r"\['12\.3'\] not in"):
        test_a_verdict_is_one_of_three_and_its_numbers_stand_in_the_docs(cells)
