"""Sort, spread and combine against their plain-torch twins."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from bmoe.kernels import rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ids_of(pattern: str, tokens: int, experts: int, k: int) -> torch.Tensor:
    torch.manual_seed(tokens + experts + k)
    if pattern == "one":
        return torch.full((tokens, k), experts // 2, device=DEVICE)
    if pattern == "none":
        return torch.full((tokens, k), experts, device=DEVICE)
    return torch.randint(experts + (pattern == "tail"), (tokens, k), device=DEVICE)


def assert_same_order(actual: rows.Order, expected: rows.Order) -> None:
    for name, value in expected._asdict().items():
        assert torch.equal(getattr(actual, name), value), name


def sort_both(ids_TK: torch.Tensor, experts: int) -> tuple[rows.Order, rows.Order]:
    weights_TK = torch.rand(ids_TK.shape, device=DEVICE)
    return rows.sort_slots(ids_TK, weights_TK, experts), rows.sort_slots_reference(ids_TK, weights_TK, experts)


@pytest.mark.parametrize("few", [0, 2048])
@pytest.mark.parametrize("pattern", ["all", "tail", "one", "none"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (37, 3, 2), (257, 8, 2), (130, 64, 8), (1030, 5, 2)])
def test_sort_is_the_stable_sort(pattern, tokens, experts, k, few, monkeypatch):
    monkeypatch.setattr(rows, "FEW_COUNTS", few)
    ids_TK = ids_of(pattern, tokens, experts, k)
    assert_same_order(*sort_both(ids_TK, experts))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sort_of_any_ids(data):
    experts = data.draw(st.integers(1, 9))
    ids = data.draw(st.lists(st.integers(0, experts), min_size=1, max_size=80))
    ids_TK = torch.tensor(ids, device=DEVICE)[:, None]
    assert_same_order(*sort_both(ids_TK, experts))


def test_sort_of_no_token():
    order, _ = sort_both(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 4)
    assert order.bounds_E1.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("width", [1, 5, 64, 80, 160])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 1), (33, 4, 3), (70, 8, 8)])
def test_spread_and_combine_equal_their_twins(width, tokens, experts, k):
    _, order = sort_both(ids_of("tail", tokens, experts, k), experts)
    x_TD = torch.randn(tokens, width, device=DEVICE)
    used = int(order.bounds_E1[-1])
    spread_ND = rows.spread(x_TD, order.row_of_slot_N, k)
    assert torch.equal(spread_ND[:used], rows.spread_reference(x_TD, order.row_of_slot_N, k)[:used])
    gaps_RD = rows.spread(x_TD, order.row_of_slot_N, k, rows=tokens * k + 7)
    assert torch.equal(gaps_RD[:used], spread_ND[:used]) and (gaps_RD[used:] == 0).all()
    rows_ND = torch.randn(tokens * k, width, device=DEVICE)
    rows_ND[used:] = float("nan")  # rows of no slot must not be read
    for weights_TK, residual_TD in itertools.product((None, torch.rand(tokens, k, device=DEVICE)), (None, x_TD)):
        torch.testing.assert_close(
            rows.combine(rows_ND, order.row_of_slot_N, k, weights_TK, residual_TD),
            rows.combine_reference(rows_ND, order.row_of_slot_N, k, weights_TK, residual_TD),
        )
    values_N = rows_ND[:, 0].contiguous()
    assert torch.equal(rows.to_slots(values_N, order.row_of_slot_N), rows.to_slots_reference(values_N, order.row_of_slot_N))


def test_combine_is_the_transpose_of_spread():
    _, order = sort_both(ids_of("tail", 41, 5, 2), 5)
    x_TD, r_ND = torch.randn(41, 16, device=DEVICE), torch.randn(82, 16, device=DEVICE)
    used = int(order.bounds_E1[-1])
    left = (rows.spread(x_TD, order.row_of_slot_N, 2)[:used] * r_ND[:used]).sum()
    torch.testing.assert_close(left, (x_TD * rows.combine(r_ND, order.row_of_slot_N, 2)).sum())


@pytest.mark.parametrize("width", [1, 5, 80, 768, 1024, 1280, 2048, 2816, 3584, 5632])
def test_tiles_cover_the_width_without_waste(width):
    tile_rows, columns = rows.row_tile(width)
    assert tile_rows & (tile_rows - 1) == 0 and columns & (columns - 1) == 0
    assert columns <= 1024 and tile_rows * columns <= 2048
    if width % 64 == 0:
        assert width % columns == 0
