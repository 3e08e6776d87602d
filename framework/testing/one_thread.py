"""`OneThread`: what the contract tests inherit so that they take as little processor time as they can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..models.threads import one_thread


class OneThread:
    """Tests whose tensors are tiny: PyTorch's threads take longer to hand them over than to compute them."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        with one_thread():
            yield
