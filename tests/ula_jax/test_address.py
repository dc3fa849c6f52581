"""Pages and page tables on the host."""

import numpy as np
import pytest

from ula_jax.address import PageAllocator, addresses_of, page_table


def test_pages_are_whole_and_reused_in_the_order_they_came_back():
    pages = PageAllocator(5, 4)
    assert [pages.pages_for(n) for n in (0, 1, 4, 5, 20)] == [0, 1, 1, 2, 5]
    first, second = pages.allocate(5), pages.allocate(8)
    assert (first, second, pages.free_pages) == ([0, 1], [2, 3], 1)
    pages.free([3, 2])
    pages.free([0, 1])
    assert pages.allocate(20) == [4, 3, 2, 0, 1]


def test_exhaustion_takes_nothing():
    pages = PageAllocator(3, 4)
    pages.allocate(4)
    assert pages.can_allocate(8)
    assert not pages.can_allocate(9)
    with pytest.raises(ValueError, match="expected at most 2 free, found a need of 3"):
        pages.allocate(9)
    assert pages.free_pages == 2
    assert sorted(pages.allocate(8)) == [1, 2]


@pytest.mark.parametrize("wrong", [[0, 0], [0, 2], [7], [2]])
def test_a_double_free_frees_nothing(wrong):
    pages = PageAllocator(4, 4)
    assert pages.allocate(8) == [0, 1]
    with pytest.raises(ValueError, match="expected pages that are held, each once"):
        pages.free(wrong)
    assert pages.free_pages == 2
    pages.free([0, 1])
    with pytest.raises(ValueError, match="held"):
        pages.free([0])
    assert sorted(pages.allocate(16)) == [0, 1, 2, 3]


def test_page_table_and_addresses():
    assert page_table([7, 2], 4).tolist() == [7, 2, -1, -1]
    assert page_table([], 2).tolist() == [-1, -1]
    found = addresses_of([7, 2, 9], 4, 2, 9)
    assert found.tolist() == [30, 31, 8, 9, 10, 11, 36]
    assert found.dtype == np.int32
    assert addresses_of([7], 4, 3, 3).tolist() == []
