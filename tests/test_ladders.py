import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashproof.fuzz import ladders

BYTES = st.integers(0, 255)


@given(BYTES, BYTES, st.integers(1, 400))
def test_a_size_within_a_bound_is_within_it(byte, low, most):
    assert ladders.pick_within(ladders.lengths(0, 300), most, byte, low) <= most


@given(BYTES, BYTES)
def test_a_size_that_fits_does_not_depend_on_the_bound(byte, low):
    table = ladders.lengths(0, 300)
    size = ladders.pick(table, byte, low)
    assert {ladders.pick_within(table, most, byte, low) for most in range(size, 301)} == {size}


@given(st.lists(st.integers(), min_size=1, max_size=256))
def test_one_byte_reaches_every_entry_of_a_table_in_order(table):
    entries = [ladders.pick(range(len(table)), byte) for byte in range(256)]
    assert entries == sorted(entries) and set(entries) == set(range(len(table)))


@pytest.mark.parametrize("percent", [8, 25, 62])
def test_a_gate_is_open_in_its_share_of_bytes_and_reaches_every_entry(percent):
    values = [ladders.gate(percent, byte) for byte in range(256)]
    opened = [v for v in values if v is not None]
    assert abs(len(opened) - 2.56 * percent) <= 0.5 and values[0] is None and opened == sorted(opened)
    assert opened[0] == 0 and {v * 8 >> 8 for v in opened} == set(range(8))


@pytest.mark.parametrize(("least", "most"), [(0, 1), (0, 300), (7, 20), (128, 128), (0, 4000)])
def test_a_table_of_lengths_holds_every_length_in_order(least, most):
    table = ladders.lengths(least, most)
    assert list(table) == sorted(table) and set(table) == set(range(max(least, 1), most + 1))


@pytest.mark.parametrize("most", [300, 4000, 50_000])
def test_half_of_a_table_of_lengths_is_small_or_beside_a_tile_edge(most):
    table = ladders.lengths(0, most)
    near = set(range(18)).union(*ladders.EDGES.values())
    assert 0.4 < sum(n in near for n in table) / len(table) < 0.75
