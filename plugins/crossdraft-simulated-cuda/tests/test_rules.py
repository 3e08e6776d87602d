"""Three seeded mistakes for each rule of the simulated device, found with file and line.

pytest -n0 -p crossdraft_simulated_cuda -m simulated plugins/crossdraft-simulated-cuda/tests
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from crossdraft_simulated_cuda import device
from torch import Tensor

from crossdraft.framework.util.tensors import on_device

pytestmark = pytest.mark.simulated


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, device="cuda", **options)


def line_of(function: Callable) -> str:
    """The line of a function's mistake, marked or the first statement, as messages name it."""
    lines = inspect.getsource(function).splitlines()
    number = next((i for i, line in enumerate(lines) if line.endswith("# mistake")), 1)
    return f"{__file__}:{function.__code__.co_firstlineno + number} in {function.__name__}"


@contextmanager
def captured(graph: Any) -> Any:
    with torch.cuda.graph(graph):
        yield


# -- devices ------------------------------------------------------------------------------------------------


def host_mask() -> Any:
    return ones(3).masked_fill(torch.tensor([True, False, True]), 0)


def host_part() -> Any:
    return torch.cat([ones(2), torch.zeros(1)])


def host_index() -> Any:
    return ones(2, 3).gather(1, torch.zeros(2, 1, dtype=torch.long))


def host_number_in_gather() -> Any:
    return torch.stack([ones(()), torch.tensor(1.0)])


@pytest.mark.parametrize("mistake", [host_mask, host_part, host_index, host_number_in_gather])
def test_devices_are_not_mixed(mistake: Callable) -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu") as error:
        mistake()
    assert line_of(mistake) in str(error.value)


def test_host_numbers_take_part_in_pointwise_operations() -> None:
    half = torch.tensor(0.5)
    assert (ones(2) * half).tolist() == torch.where(ones(2) > 1, ones(2), half).tolist() == [0.5, 0.5]


# -- waits --------------------------------------------------------------------------------------------------


def item_of_verdict() -> Any:
    return int(ones(2).argmax())


def branch_on_value() -> Any:
    return 1 if ones(2).sum() > 1 else 0


def mask_as_index() -> Any:
    return ones(2)[ones(2, dtype=torch.bool)]


def copy_to_host() -> Any:
    return ones(2).cpu()


def tensor_of_host_data() -> Any:
    return torch.tensor([1, 2], device="cuda")


def list_as_index() -> Any:
    return ones(3)[[0, 2]]


WAITS = [item_of_verdict, branch_on_value, mask_as_index, copy_to_host, tensor_of_host_data, list_as_index]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mistake", WAITS)
def test_waits_are_counted_and_forbidden(mistake: Callable, inference: bool, recwarn: Any) -> None:
    with device.counting() as counts, torch.inference_mode(inference):
        mistake()
    assert [line.endswith(line_of(mistake)) for line in counts.waits.elements()] == [True], counts.waits
    with device.no_waits(), pytest.raises(RuntimeError, match="called a synchronizing CUDA operation") as error:
        mistake()
    assert line_of(mistake) in str(error.value)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        mistake()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    warning = recwarn.pop(UserWarning)
    assert (warning.filename, warning.lineno) == (__file__, mistake.__code__.co_firstlineno + 1)


def test_operations_that_do_not_wait() -> None:
    x, index = ones(3, 4), torch.zeros(3, 1, dtype=torch.long).pin_memory()
    with device.counting() as counts, device.no_waits():
        moved = index.to("cuda", non_blocking=True)
        x.gather(1, moved).masked_fill_(x[:, :1] > 0, 0)
        x[0] = 1.0
        x[x > 2] = 3.0
        torch.nn.functional.one_hot(moved, 4)
        torch.arange(3, device="cuda").repeat_interleave(2)
        x.softmax(-1).topk(2)
    assert not counts.waits and [line.partition(" at ")[0] for line in counts.copies] == ["pinned copy to the device"]


def pageable_copy() -> Any:
    return torch.ones(2).to("cuda", non_blocking=True)


def pageable_copy_into() -> Any:
    return ones(2).copy_(torch.ones(2), non_blocking=True)


def pageable_copy_of_a_part() -> Any:
    return torch.ones(4).pin_memory()[:2].clone().to("cuda", non_blocking=True)


@pytest.mark.parametrize("mistake", [pageable_copy, pageable_copy_into, pageable_copy_of_a_part])
def test_unpinned_copies_are_counted(mistake: Callable) -> None:
    with device.counting() as counts:
        mistake()
    (line,) = counts.copies
    assert line.startswith("pageable copy to the device") and line.endswith(line_of(mistake)) and not counts.waits


def test_arrays_are_not_pinned_at_once() -> None:
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(np.ones(2), pin_memory=True)
    with device.counting() as counts:
        assert on_device(np.arange(3), torch.device("cuda")).tolist() == [0, 1, 2]
    assert [line.partition(" at ")[0] for line in counts.copies] == ["pinned copy to the device"]


# -- asynchronous copies and streams ------------------------------------------------------------------------


def read_too_early() -> Any:
    return ones(2).to("cpu", non_blocking=True)


def wait_for_earlier_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    value = ones(2).to("cpu", non_blocking=True)  # mistake
    event.synchronize()
    return value


def read_pinned_too_early() -> Any:
    return torch.empty(2, pin_memory=True).copy_(ones(2), non_blocking=True)


@pytest.mark.parametrize("mistake", [read_too_early, wait_for_earlier_event, read_pinned_too_early])
def test_copies_arrive_when_waited_for(mistake: Callable) -> None:
    with device.counting() as counts:
        value = mistake()
    assert value.isnan().all()
    assert [line.endswith(line_of(mistake)) for line in counts.copies] == [True], counts.copies
    torch.cuda.current_stream().record_event().synchronize()
    assert value.tolist() == [1, 1]


def other_stream_reads() -> Any:
    x = ones(2) + 1
    with torch.cuda.stream(torch.cuda.Stream()):
        return x * 2  # mistake


def waits_for_too_little() -> Any:
    side = torch.cuda.Stream()
    x = ones(2)
    side.wait_stream(torch.cuda.current_stream())
    x = x + 1
    with torch.cuda.stream(side):
        return x * 2  # mistake


def result_of_other_stream() -> Any:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = ones(2)
    return x + 1  # mistake


@pytest.mark.parametrize("mistake", [other_stream_reads, waits_for_too_little, result_of_other_stream])
def test_streams_wait_for_each_other(mistake: Callable) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        pass  # streams are checked from the second one on
    with pytest.raises(RuntimeError, match="reads a tensor of another stream without waiting") as error:
        mistake()
    assert line_of(mistake) in str(error.value)


def test_waiting_streams_read() -> None:
    side, x = torch.cuda.Stream(), ones(2) + 1
    side.wait_event(torch.cuda.current_stream().record_event())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    assert (y + 1).tolist() == [5, 5]


# -- captures -----------------------------------------------------------------------------------------------


def item_in_capture() -> Any:
    return ones(2).sum().item()


def pageable_copy_in_capture() -> Any:
    return torch.ones(2).to("cuda", non_blocking=True)


def branch_in_capture() -> Any:
    return 1 if ones(2).any() else 0


@pytest.mark.parametrize("mistake", [item_in_capture, pageable_copy_in_capture, branch_in_capture])
def test_captures_refuse(mistake: Callable) -> None:
    with (
        pytest.raises(RuntimeError, match=r"capturing|during CUDA graph capture") as error,
        captured(torch.cuda.CUDAGraph()),
    ):
        mistake()
    assert line_of(mistake) in str(error.value)
    assert ones(1).item() == 1, "the device works on"


def test_capture_computes_nothing_and_freezes_decisions() -> None:
    graph, x, total, factor = torch.cuda.CUDAGraph(), ones(2), torch.zeros(2, device="cuda"), 2
    (total + x).tolist()
    with device.counting() as counts:
        with captured(graph):
            total += x * factor
        assert total.tolist() == [0, 0]
        factor = 3
        x.copy_(ones(2) + 4)  # frozen address, new value
        graph.replay()
        assert total.tolist() == [10, 10], "Python's decision is frozen"
    assert (counts.captures, counts.replays) == (1, 1)


def number_of_python(state: Any, out: Tensor) -> None:
    out.add_(state.calls)


def branch_of_python(state: Any, out: Tensor) -> None:
    if state.calls > 1:
        out.add_(state.calls)
    else:
        out.sub_(1)


def shape_of_python(state: Any, out: Tensor) -> None:
    out[: state.calls] += 1


@pytest.mark.parametrize("mistake", [number_of_python, branch_of_python, shape_of_python])
def test_state_of_python_is_frozen(mistake: Callable) -> None:
    """Found as a difference of results: a graph does not know the line."""
    graph, state = torch.cuda.CUDAGraph(), types.SimpleNamespace(calls=1)
    replayed, repeated, changed = torch.zeros(3, 2, device="cuda")
    with captured(graph):
        mistake(state, replayed)
    mistake(state, repeated)
    state.calls = 2
    graph.replay()
    mistake(state, changed)
    assert replayed.tolist() == repeated.tolist() != changed.tolist()


def rebound_input() -> Any:
    x, graph = ones(2), torch.cuda.CUDAGraph()
    with captured(graph):
        x.add_(1)  # mistake
    x = ones(2) + 5
    return graph


def temporary_input() -> Any:
    graph, out = torch.cuda.CUDAGraph(), ones(2)
    index = torch.arange(2, device="cuda")
    with captured(graph):
        out.copy_(index * 2.0)  # mistake
    return graph


def rebound_attribute() -> Any:
    model, graph = types.SimpleNamespace(weight=ones(2)), torch.cuda.CUDAGraph()
    with captured(graph):
        model.weight[:1] *= 2  # mistake
    model.weight = model.weight.clone()
    return graph


@pytest.mark.parametrize("mistake", [rebound_input, temporary_input, rebound_attribute])
def test_replays_need_the_memory_of_their_inputs(mistake: Callable) -> None:
    with pytest.raises(RuntimeError, match="uses memory that was freed after its capture") as error:
        mistake().replay()
    assert line_of(mistake) in str(error.value)


CACHE: dict[str, Any] = {}


def cached_constant() -> None:
    CACHE["mask"] = torch.ones(3, device="cuda")


def output_without_copy() -> None:
    CACHE["output"] = ones(2) * 2


def list_of_hidden_states() -> None:
    CACHE["hidden"] = [ones(1) + 1]


@pytest.mark.parametrize("mistake", [cached_constant, output_without_copy, list_of_hidden_states])
def test_tensors_of_captures_that_outlive_them(mistake: Callable) -> None:
    device.forget()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        mistake()
    ((line, count),) = device.kept().items()
    assert count == 1 and line_of(mistake) in line
    values = [value[0] if isinstance(value, list) else value for value in CACHE.values()]
    assert values[0].isnan().all(), "garbage until the first replay"
    CACHE.clear()
    del values
    assert not device.kept()


# -- values and types ---------------------------------------------------------------------------------------


def uninitialised() -> Any:
    return torch.empty(2, device="cuda")


def uninitialised_like() -> Any:
    return torch.empty_like(ones(2))


def uninitialised_new() -> Any:
    return ones(2).new_empty(2)


@pytest.mark.parametrize("mistake", [uninitialised, uninitialised_like, uninitialised_new])
def test_uninitialised_memory_is_garbage(mistake: Callable) -> None:
    with device.counting() as counts:
        assert mistake().isnan().all()
    assert [line.endswith(line_of(mistake)) for line in counts.uninitialised] == [True], counts.uninitialised


def integer_product() -> Any:
    return ones(2, 2, dtype=torch.long) @ ones(2, 2, dtype=torch.long)


def integer_einsum() -> Any:
    return torch.einsum("ij,jk->ik", ones(2, 2, dtype=torch.int32), ones(2, 2, dtype=torch.int32))


def batched_integer_product() -> Any:
    return torch.bmm(ones(1, 2, 2, dtype=torch.long), ones(1, 2, 2, dtype=torch.long))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mistake", [integer_product, integer_einsum, batched_integer_product])
def test_operations_without_kernel(mistake: Callable, inference: bool) -> None:
    with (
        pytest.raises(RuntimeError, match=r'_cuda" not implemented for torch.int') as error,
        torch.inference_mode(inference),
    ):
        mistake()
    assert line_of(mistake) in str(error.value)


def double_softmax(logits: Tensor) -> Any:
    return logits.double().softmax(-1)


def double_sum(logits: Tensor) -> Any:
    return logits.sum(0, dtype=torch.float64)


def double_zeros(logits: Tensor) -> Any:
    return torch.zeros_like(logits, dtype=torch.float64)


@pytest.mark.parametrize("mistake", [double_softmax, double_sum, double_zeros])
def test_wide_float64_is_counted(mistake: Callable) -> None:
    with device.counting() as counts:
        mistake(ones(2, device.vocabulary))
        mistake(ones(2, 5))
    assert counts.float64.total() >= device.vocabulary and all(line_of(mistake) in line for line in counts.float64)


# -- modules ------------------------------------------------------------------------------------------------


def test_modules_keep_shared_weights_and_gradients() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])
    model[1].weight = model[0].weight
    model.to("cuda")
    assert model[0].weight is model[1].weight and model[0].weight.device.type == "cuda"
    x = ones(1, 2)
    (model[0](x) + model[1](x)).sum().backward()
    assert model[0].weight.grad.tolist() == [[2, 2]] * 3
    assert isinstance(model[0].weight, torch.nn.Parameter) and len(list(model.parameters())) == 3


def test_table_is_that_of_pytorch(monkeypatch: Any) -> None:
    """Every gap of PyTorch's op database for matrix products is in the table."""
    if torch.__version__.partition("+")[0] != simulated().NO_KERNEL_VERSION:
        pytest.skip(f"the table is that of PyTorch {simulated().NO_KERNEL_VERSION}")
    pytest.importorskip("hypothesis")
    stub = types.ModuleType("expecttest")
    stub.TestCase = __import__("unittest").TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    for operation in op_db:
        name = operation.name.rpartition(".")[2]
        gaps = (set(operation.dtypes) - set(operation.dtypesIfCUDA)) & {torch.int64, torch.int32}
        if gaps and hasattr(torch.ops.aten, name):
            assert gaps <= set(simulated().NO_KERNEL.get(name, ())), (name, gaps)


def simulated() -> Any:
    return sys.modules[type(device).__module__]
