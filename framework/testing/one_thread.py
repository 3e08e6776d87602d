"""`OneThread`: base class of tests on tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..models.threads import one_thread


class OneThread:
    """Tests that run with one PyTorch thread, which is faster for tiny tensors."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        with one_thread():
            yield
