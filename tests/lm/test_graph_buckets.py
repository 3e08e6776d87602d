"""Bucket sizes of CUDA graphs, and padding to them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.framework.lm.graph_buckets import at_width, kv_lens, stepped, wider, widths


def test_steps() -> None:
    assert [stepped(n, 1) for n in (1, 2, 7, 8, 9, 10, 11, 16, 17, 33)] == [1, 2, 7, 8, 10, 10, 12, 16, 20, 40]
    assert [stepped(n, 256) for n in (1, 256, 257, 2048, 2049)] == [256, 256, 512, 2048, 2560]
    assert kv_lens(256, 3000) == [3000, 2560, 2048, 1792, 1536, 1280, 1024, 768, 512, 256]
    assert kv_lens(16, 16) == [16] and kv_lens(16, 5) == [5]


@given(st.integers(1, 100_000), st.integers(1, 300), st.integers(0, 5000))
def test_step_is_near_and_among_kv_lens(n: int, minimum: int, more: int) -> None:
    step = stepped(n, minimum)
    assert n <= step < max(n + minimum, 1.25 * n + minimum) and step % minimum == 0 and stepped(step, minimum) == step
    assert min(step, n + more) in kv_lens(minimum, n + more)


def test_widths() -> None:
    assert widths(6, 1) == widths(2, 6) == [6, 4, 2, 1] and widths(1, 1) == [1]
    assert widths(3, 12) == [12, 8, 4, 3, 2, 1]
    assert wider(2, 5) == [7, 6, 4, 3, 2] and wider(9, 0) == [9] and wider(1, 1) == [2, 1]


def test_padding() -> None:
    tensors = {"tokens": torch.ones(2, 3, dtype=torch.long), "parents": torch.zeros(2, 3, dtype=torch.long)}
    wide = at_width(tensors | {"features": torch.ones(2, 3, 4)}, 5)
    assert wide["tokens"].tolist() == [[1, 1, 1, 0, 0]] * 2 and wide["parents"].tolist() == [[0, 0, 0, -1, -1]] * 2
    assert wide["features"].shape == (2, 5, 4) and wide["features"][:, 3:].sum() == 0
    assert at_width(tensors, 2)["tokens"].shape == (2, 2)
