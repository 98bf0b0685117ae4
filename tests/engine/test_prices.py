"""What calls cost, learnt while running, and how many rows that says a call should have."""

import pytest

from loopwright.engine.job import Job
from loopwright.engine.prices import SETTLED, Prices, bucket, label
from loopwright.loop import Unit


def learnt(cost, sizes, prices=None):
    """Prices after enough calls of each size at `cost(rows)` seconds."""
    prices = Prices() if prices is None else prices
    for size in sizes:
        for _ in range(SETTLED + 1):
            prices.learn("step", size, cost(size))
    return prices


def test_the_first_measurement_of_a_call_is_replaced_because_it_pays_for_compiling():
    prices = Prices()
    prices.learn("step", 1, 9.0)
    assert prices.seconds("step", 1) == 9.0
    prices.learn("step", 1, 0.5)
    assert prices.seconds("step", 1) == pytest.approx(0.5)


def test_a_price_follows_a_change_and_is_not_moved_by_one_outlier():
    prices = learnt(lambda rows: 1.0, [1])
    prices.learn("step", 1, 2.0)
    assert prices.seconds("step", 1) < 1.4
    for _ in range(30):
        prices.learn("step", 1, 2.0)
    assert prices.seconds("step", 1) == pytest.approx(2.0, rel=0.01)


def test_what_was_never_run_has_no_price():
    prices = learnt(lambda rows: 1.0, [1])
    assert prices.seconds("step", 2) is None and prices.seconds("other", 1) is None
    assert prices.stage("kind", "denoise") is None


@pytest.mark.parametrize(("rows", "filed"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (32, 32)])
def test_rows_are_filed_under_powers_of_two(rows, filed):
    assert bucket(rows) == filed


def test_a_batch_grows_by_doubling_while_nothing_is_known():
    prices = Prices()
    sizes = []
    for _ in range(8):
        sizes.append(prices.rows("step", 32, 32))
        prices.learn("step", sizes[-1], 0.01)
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]


def test_a_batch_stops_growing_where_the_device_is_full():
    """A call costs as much as four rows at least, and then as many as it has: four rows fill the device."""
    prices = Prices()
    for _ in range(60):
        rows = prices.rows("step", 32, 32)
        prices.learn("step", rows, max(4, rows) * 0.01)
    assert prices.rows("step", 32, 32) == 4
    assert prices.rows("step", 3, 32) == 3 and prices.rows("step", 32, 2) == 2


def test_one_row_that_fills_the_device_stays_alone():
    prices = Prices()
    for _ in range(20):
        rows = prices.rows("step", 32, 32)
        prices.learn("step", rows, rows * 0.5)
    assert prices.rows("step", 32, 32) == 1


def test_prices_are_kept_and_read_again(tmp_path):
    path = tmp_path / "prices" / "cuda.json"
    prices = learnt(lambda rows: max(4, rows) * 0.01, [1, 2, 4, 8, 16], Prices(path))
    prices.learn_stage("kind", "denoise", 20, 4.0)
    prices.save()
    again = Prices(path)
    assert again.rows("step", 32, 32) == prices.rows("step", 32, 32) == 4
    assert again.stage("kind", "denoise") == (20, pytest.approx(0.2))
    assert again.seconds("step", 8) == prices.seconds("step", 8)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [[1]], "stages": []}'])
def test_a_damaged_file_of_prices_is_told_and_learnt_again(tmp_path, text):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"prices.json holds no prices .*: they are learnt again"):
        prices = Prices(path)
    prices.learn("step", 1, 2.0)
    prices.save()
    assert Prices(path).seconds("step", 1) == 2.0


def test_labels_are_the_same_whatever_the_weights_version_and_differ_with_sizes(ask):
    labels = []
    for changes in ({}, {"seed": 9}, {"height": 48}, {"guidance_scale": 1.0}):
        model, request = ask("t2v", "unipc", **changes)
        job = Job(model.instance, request)
        while (call := job.pending()).step.unit is not Unit.DENOISE:
            job.step()
        labels.append(label(call.key))
    assert labels[0] == labels[1] and len(set(labels)) == 3
    assert "denoise_step" in labels[0] and "0x" not in labels[0]
    versions = (*call.key[:1], tuple((name, version + 1) for name, version in call.key[1]), *call.key[2:])
    assert label(versions) == labels[-1]


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_result(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="prices are not kept in"):
        Prices(tmp_path / "file" / "prices.json").save()
