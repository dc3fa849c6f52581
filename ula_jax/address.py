"""Logical addresses on the host: pages, page tables, and who holds them."""

from collections import deque

import numpy as np

from ula_jax.types import EMPTY


class PageAllocator:
    """Hands out pages of `page_size` consecutive addresses. Plain Python: it runs between steps.

    Freed pages are reused in the order in which they came back.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._free: deque[int] = deque(range(num_pages))
        self._held: set[int] = set()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def can_allocate(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Pages for `tokens` positions, or ValueError and nothing taken."""
        need = self.pages_for(tokens)
        if need > len(self._free):
            raise ValueError(
                f"pages: expected at most {len(self._free)} free, found a need of {need}; "
                "wait for a request to finish or raise the budget"
            )
        pages = [self._free.popleft() for _ in range(need)]
        self._held.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. A page that is not held (a double free) is an error and nothing is freed."""
        wrong = [p for p in pages if p not in self._held]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages: expected pages that are held, each once, found {pages}; {wrong} are free")
        self._held.difference_update(pages)
        self._free.extend(pages)


def page_table(pages: list[int], width: int) -> np.ndarray:
    """int32 [width] row of the page table, EMPTY beyond the request's pages."""
    row = np.full(width, EMPTY, np.int32)
    row[: len(pages)] = pages
    return row


def addresses_of(pages: list[int], page_size: int, start: int, stop: int) -> np.ndarray:
    """int32 addresses of positions start..stop-1."""
    positions = np.arange(start, stop)
    return (np.asarray(pages, np.int32)[positions // page_size] * page_size + positions % page_size).astype(np.int32)
