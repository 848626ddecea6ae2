"""A budget of FLOPs: the updates that it pays for, and jobs that keep within it."""

import pytest

from helpers import run_directories, toy
from jaxcl.config import budget
from jaxcl.run import cost, job


@pytest.mark.parametrize(
    ("per_image", "want"), [(4.0, 1), (6.9, 1), (7.0, 2), (12.9, 3), (13.0, 4)]
)
def test_the_most_updates_that_are_paid_for(per_image, want):
    """A step of 10 images costs 10 and 30 for each update: 40, 70, 100, 130."""
    found = budget.updates(per_image, 10, lambda n: 10 + 30 * n, "er")
    assert found == want


@pytest.mark.parametrize(
    ("flops", "said"),
    [
        (lambda n: 10 + 40 * n, "'er'.* 5 "),
        (lambda n: None, ""),
        (lambda n: 10, "'er'"),
    ],
)
def test_what_is_paid_for_by_nothing_is_refused(flops, said):
    with pytest.raises(ValueError, match=rf"config\.replay\.flops=4: .*{said}"):
        budget.updates(4.0, 10, flops, "er")


def made(folder, name, **replay):
    changes = {"method": {"name": name}, "replay": toy.ONLINE["replay"] | replay}
    return toy.job(folder, tasks=2, **toy.ONLINE | changes)


def flops(work):
    return cost.count_flops(work.method.step, *job.shapes(work.method, work.data), 1)


def test_a_job_makes_as_many_updates_as_its_budget_pays_for(tmp_path, capsys):
    """SS-IL's teacher is paid for, too."""
    three = flops(made(tmp_path / "3", "ss_il", updates=3))
    within = made(tmp_path / "within", "ss_il", flops=1.001 * three / 48)
    below = made(tmp_path / "below", "ss_il", flops=0.999 * three / 48)
    assert flops(within) == three
    assert flops(below) == flops(made(tmp_path / "2", "ss_il", updates=2)) < three
    output = capsys.readouterr().out
    assert "updates=3" in output and "updates=2" in output


def test_methods_of_other_cost_make_other_numbers_of_updates(tmp_path, capsys):
    allowed = 1.001 * flops(made(tmp_path / "er", "er", updates=2)) / 48
    made(tmp_path / "alone", "finetune", flops=allowed)
    assert "updates=4" in capsys.readouterr().out  # without replay half the cost
    with pytest.raises(ValueError, match="'mir'"):
        made(tmp_path / "mir", "mir", flops=allowed / 2)


def test_updates_and_a_budget_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="replay.updates=2"):
        made(tmp_path, "er", updates=2, flops=1e9)


def test_a_run_makes_the_updates_that_were_found(tmp_path, monkeypatch, capsys):
    asked = []

    def found(*given):
        asked.append(given)
        return 3

    monkeypatch.setattr(budget, "updates", found)
    with run_directories.untraced():
        work = made(tmp_path, "er", flops=1e5)
    assert work.loop.replay.updates == 3 and "updates=3" in capsys.readouterr().out
    ((per_image, images, count, name),) = asked
    assert (per_image, images, name) == (1e5, 48, "er")
    monkeypatch.setattr(cost, "count_flops", lambda step, *shapes, task: task)
    assert count(1) == 7  # the last of eight tasks
