"""The gate of updates: exact bounds of a paired loss, and an error budget for life."""

import itertools

import numpy as np
import pytest
from scipy import optimize, stats

from jaxcl.update import gate


def trinomial(total, loss, change):
    """Probability of each (lost, gained), f64[total + 1, total + 1]."""
    lost, gained = (change + loss) / 2, (change - loss) / 2
    a, b = np.meshgrid(*2 * [np.arange(total + 1)], indexing="ij")
    cells = np.stack([a, b, total - a - b], axis=-1).reshape(-1, 3)
    chances = np.zeros(len(cells))
    real = cells[:, 2] >= 0
    law = stats.multinomial(total, [lost, gained, 1 - change])
    chances[real] = law.pmf(cells[real])
    return chances.reshape(total + 1, -1)


def every_pair(total):
    for lost in range(total + 1):
        for gained in range(total + 1 - lost):
            yield gate.Pairs(total, lost, gained)


@pytest.mark.parametrize("pairs", [(40, 7, 2), (40, 0, 0), (40, 0, 9), (9, 5, 4)])
@pytest.mark.parametrize("loss", [-0.3, 0.0, 0.02, 0.4])
def test_the_score_is_of_the_most_likely_rates(pairs, loss):
    total, lost, gained = pairs

    def surprise(change):
        rates = (change + loss) / 2, (change - loss) / 2, 1 - change
        pairs = zip((lost, gained, total - lost - gained), rates, strict=True)
        return -sum(n * np.log(max(p, 1e-300)) for n, p in pairs if n)

    best = optimize.minimize_scalar(
        surprise, bounds=(abs(loss), 1), method="bounded", options={"xatol": 1e-10}
    ).x
    spread = total * (best - loss**2)
    if spread > 1e-6:
        twin = (lost - gained - total * loss) / np.sqrt(spread)
        found = gate.score(np.array(lost), np.array(gained), total, loss)
        np.testing.assert_allclose(found, twin, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("total, lost, gained", [(12, 0, 0), (12, 2, 4), (12, 5, 1)])
@pytest.mark.parametrize("loss", [0.05, 0.3])
def test_a_p_value_is_what_all_outcomes_sum_to(total, lost, gained, loss):
    error, found = 0.05, {}
    scores = {
        pairs: float(
            gate.score(np.array(pairs.lost), np.array(pairs.gained), total, loss)
        )
        for pairs in every_pair(total)
    }
    seen = scores[gate.Pairs(total, lost, gained)]
    least, most = stats.binomtest(lost + gained, total).proportion_ci(1 - 0.1 * error)
    for change in np.linspace(max(least, loss), most, 32):
        chances = trinomial(total, loss, change)
        low = [chances[x.lost, x.gained] for x, z in scores.items() if z <= seen + 1e-9]
        found[change] = sum(low)
    twin = max(found.values()) + 0.1 * error
    p = gate.loss_p_value(gate.Pairs(total, lost, gained), loss, error)
    np.testing.assert_allclose(p, twin, rtol=1e-6)


@pytest.mark.parametrize("error", [0.2, 0.025])
@pytest.mark.parametrize("total", [1, 8, 15])
def test_a_bound_is_too_low_no_more_often_than_it_says(total, error):
    """Over all outcomes, at true losses and shares of changed answers of all sizes."""
    for loss in (-0.4, 0.0, 0.02, 0.1, 0.5):
        rejected = [
            x for x in every_pair(total) if gate.loss_p_value(x, loss, error) <= error
        ]
        for change in (abs(loss), (1 + 3 * abs(loss)) / 4, 0.97, 1.0):
            chances = trinomial(total, loss, max(change, abs(loss)))
            assert sum(chances[x.lost, x.gained] for x in rejected) <= error


@pytest.mark.parametrize(
    "total, lost, gained", [(1, 0, 0), (1, 1, 0), (50, 0, 0), (50, 50, 0), (50, 20, 30)]
)
def test_ends_of_an_interval(total, lost, gained):
    pairs = gate.Pairs(total, lost, gained)
    low, high = gate.interval(pairs)
    assert -1 <= low <= pairs.loss <= high <= 1
    if high < 1:
        assert gate.loss_p_value(pairs, high + 1e-4, 0.025) <= 0.025
        assert gate.loss_p_value(pairs, high - 1e-3, 0.025) > 0.025
    assert gate.interval(gate.Pairs(total, gained, lost)) == (-high, -low)
    # More images of the same kind say more.
    wider = gate.interval(gate.Pairs(4 * total, 4 * lost, 4 * gained))
    assert wider[1] - wider[0] < high - low or abs(pairs.loss) == 1


def test_words():
    harmless, harmful = gate.Pairs(3000, 20, 25), gate.Pairs(300, 40, 5)
    assert gate.decide(harmless, 0.02, 0.01) == gate.HARMLESS
    assert gate.decide(harmful, 0.02, 0.01) == gate.HARMFUL
    # Each decision has an error of its own.
    assert gate.decide(harmful, 0.02, 1e-9) == gate.HARMFUL
    assert gate.decide(harmful, 0.02, 0.01, 1e-9) == gate.UNDECIDED
    for unsure in ((300, 15, 15), (300, 20, 10), (1, 0, 0), (1, 1, 0)):
        assert gate.decide(gate.Pairs(*unsure), 0.02, 0.01) == gate.UNDECIDED
    assert gate.decide(gate.Pairs(300, 0, 0), 0.02, 0.01) == gate.HARMLESS
    assert gate.decide(harmful, 1.0, 0.01) == gate.HARMLESS  # anything may be lost
    assert gate.decide(harmless, -1.0, 0.01) == gate.HARMFUL
    assert gate.decide(gate.Pairs(1000, 20, 25), 0.02, 1e-9) == gate.UNDECIDED


def spent(is_bad, past, depth, renewed):
    """The most error that ways to a first wrong verdict have together."""
    if len(past) == depth:
        return 0.0
    fresh = len(past) in renewed
    share = gate.share_budget(past, 1.0, on_trust=True, renewed=fresh)
    bad = is_bad(past)
    right = gate.REJECTED if bad else gate.ACCEPTED
    parts = [
        spent(is_bad, [*past, gate.PastUpdate(word, True, fresh)], depth, renewed)
        for word in (right, gate.ON_TRUST, gate.ROLLED_BACK)
    ]
    wrong = share.error if bad else share.alarm
    # What comes has no image in common with this update, or depends on it.
    return wrong + (max(parts) if len(past) + 1 in renewed else sum(parts))


@pytest.mark.parametrize(
    "renewed", [(), range(1, 5), (2, 4)], ids=["same", "renewed", "in pairs"]
)
def test_whatever_is_bad_the_budget_holds(renewed):
    """Bad encoders may depend on all outcomes so far: each tree of them is tried."""
    rng, depth = np.random.default_rng(0), 5
    for share in (0.0, 0.3, 0.7, 1.0):
        chosen: dict = {}

        def is_bad(past, share=share, chosen=chosen):
            key = tuple(update.outcome for update in past)
            return chosen.setdefault(key, bool(rng.random() < share))

        total = spent(is_bad, [], depth, renewed)
        assert total <= 1 + 1e-9 and (total > 0.3 or share < 0.5)
        assert total > 0


def test_a_renewed_judge_spends_less():
    def error(words, renewed):
        past = [
            gate.PastUpdate(word, False, renewed and i > 0)
            for i, word in enumerate(words)
        ]
        return gate.share_budget(past, 0.05, renewed=renewed).error

    for word in (gate.ACCEPTED, gate.ROLLED_BACK):
        same, new = ([error([word] * n, r) for n in range(9)] for r in (False, True))
        assert same[0] == new[0] and (np.array(same) <= new).all()
    assert error([gate.ACCEPTED] * 8, True) > 3 * error([gate.ACCEPTED] * 8, False)
    assert all(a > b for a, b in itertools.pairwise(same))


def test_the_number_of_images():
    """A loss of 2 points, 10 % changed, an error of 2.5 %: about 1,960 images."""
    assert gate.count_images(0.02, 0.025, 0.1) == 1963
    assert gate.smallest_limit(300, 0.025, 0.1) == pytest.approx(0.05115, abs=1e-5)


def split_budget(words, on_trust):
    """Parts of the next update, and the chance of a proven outcome."""
    count = {word: words.count(word) for word in gate.OUTCOMES}
    chance = (count[gate.ACCEPTED] + count[gate.REJECTED] + 1) / (len(words) + 1.5)
    back, trust = count[gate.ROLLED_BACK] + 0.5, on_trust * (count[gate.ON_TRUST] + 0.5)
    rest = (1 - chance) / (back + trust)
    parts = {gate.ACCEPTED: 0.99 * chance, gate.REJECTED: 0.25 * chance}
    parts |= {gate.ROLLED_BACK: rest * back}
    return parts | ({gate.ON_TRUST: rest * trust} if on_trust else {}), chance


@pytest.mark.parametrize("on_trust", [True, False])
def test_an_update_has_the_part_that_is_predicted(on_trust):
    """What is left after each outcome of the first, second and third update."""
    words, here = [], 0.08
    for word in (gate.ACCEPTED, gate.REJECTED, gate.ROLLED_BACK, gate.ACCEPTED):
        past = [gate.PastUpdate(x, on_trust) for x in words]
        share = gate.share_budget(past, 0.08, on_trust=on_trust)
        parts, chance = split_budget(words, on_trust)
        assert share.error == pytest.approx(here * chance * 0.75)
        assert share.alarm == pytest.approx(here * chance * 0.01)
        assert share.left == pytest.approx({x: here * y for x, y in parts.items()})
        words, here = [*words, word], here * parts[word]
    # New labelled images after one update give back all but what it used.
    for word, used in ((gate.ACCEPTED, 0.01), (gate.ROLLED_BACK, 0.75)):
        past = [gate.PastUpdate(word, on_trust)]
        share = gate.share_budget(past, 0.08, on_trust=on_trust, renewed=True)
        chance = split_budget([word], on_trust)[1]
        want = 0.08 * (1 - used / 1.5) * chance * 0.75
        assert share.error == pytest.approx(want)
    # After several they give nothing back: what is left is that of `words`.
    past = [gate.PastUpdate(x, on_trust) for x in words]
    share = gate.share_budget(past, 0.08, on_trust=on_trust, renewed=True)
    chance = split_budget(words, on_trust)[1]
    assert share.error == pytest.approx(here * chance * 0.75)
