"""tests/soak.py: what counts as growing."""

import soak


def samples(megabytes):
    return [soak.Sample(step, mb, 9, 20) for step, mb in enumerate(megabytes)]


def test_what_rises_in_the_second_half_is_told():
    level = [100, 200, 300, 400] + [500] * 15 + [505]
    assert soak.growing(samples(level)) == []
    leak = [500 + 5 * i for i in range(20)]
    assert soak.growing(samples(leak)) == ["megabytes: 570 in the third quarter, 595"]
    more = [one._replace(files=10 + one.step) for one in samples([500] * 20)]
    assert soak.growing(more) == ["files: 20 in the third quarter, 25"]
    more = [one._replace(threads=one.step) for one in samples([500] * 20)]
    assert soak.growing(more) == ["threads: 10 in the third quarter, 15"]
    uneven = [one._replace(threads=25 + one.step % 7) for one in samples([500] * 20)]
    assert soak.growing(uneven) == []


def test_it_knows_its_own_process():
    one = soak.sample(7)
    assert one.step == 7 and one.megabytes > 10 and one.files > 2 and one.threads > 0
