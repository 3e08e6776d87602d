"""Logits processors of transformers, applied to the target's logits at every node of a draft.

A step scores all nodes in one pass, so a processor is called once per node, with the tokens on its path; the target
distribution is computed from its output. A processor must therefore be a pure function of tokens and logits: one that
counts its calls, or keeps state between them, would count rejected tokens too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..contracts.draft import DraftLists
from ..errors import ContractError, CrossdraftError, first_line
from ..util.tensors import on_device

#: ``processor(ids [1, T] int64, logits [1, V] float32) -> [1, V]``: tokens so far and logits of the next one.
Processor = Callable[[Tensor, Tensor], Tensor]


class LogitsProcessors:
    """A chain of processors for each prompt.

    Args:
        processors_of: returns the processors of a prompt, given its index; see `Processor`.
        prefixes: by prompt index, ids before the prompt: the left padding that transformers includes.
    """

    def __init__(
        self, processors_of: Callable[[int], Sequence[Processor]], prefixes: Mapping[int, Sequence[int]] | None = None
    ):
        self._processors_of, self._prefixes = processors_of, prefixes or {}

    def __call__(
        self,
        logits: Tensor,
        nodes: DraftLists,
        texts: Sequence[Sequence[int]],
        prompts: Sequence[int | None],
        twice: bool,
    ) -> Tensor:
        """Process the target's logits after the root and each node of a draft: ``[B, N + 1, V]`` float32.

        The texts of all nodes are copied to the device at once, which does not wait for it.

        Args:
            texts: committed tokens of each row, the root last.
            prompts: index of each row's prompt, None for a free slot.
            twice: call the processors twice at the root and compare the results.

        Raises:
            ContractError: a processor raises, returns another shape, or is not deterministic.
        """
        logits = logits.float().clone() if logits.dtype != torch.float64 else logits.clone()
        calls, ids, end = [], list[int](), 0
        for row, prompt in enumerate(prompts):
            if prompt is None:
                continue
            paths = [[*self._prefixes.get(prompt, ()), *texts[row]]]
            for token, parent in zip(nodes.tokens[row], nodes.parents[row], strict=True):
                paths.append([*paths[parent + 1], token])
            for node, (path, valid) in enumerate(zip(paths, [True, *nodes.valid[row]], strict=True)):
                if valid:
                    calls.append((self._processors_of(prompt), logits[row, node], len(path), twice and not node))
                    ids += path
        on_device_ids = on_device(ids, logits.device)
        for processors, row_logits, length, repeat in calls:
            start, end = end, end + length
            _process_in_place(processors, row_logits, on_device_ids[None, start:end], repeat)
        return logits


def _process_in_place(processors: Sequence[Processor], logits: Tensor, ids: Tensor, twice: bool) -> None:
    """Process ``logits [V]`` of the text ``ids [1, T]`` in place."""
    result = _process(processors, ids, logits)
    if twice and not torch.equal(result, _process(processors, ids, logits)):
        which = "the logits processor" if len(processors) == 1 else "one of the logits processors"
        raise ContractError(
            f"{which} {', '.join(map(_name, processors))} returned different logits for the same text; a logits "
            "processor must be a pure function of tokens and logits, because it is also called for rejected tokens"
        )
    logits.copy_(result[0])


def _process(processors: Sequence[Processor], ids: Tensor, logits: Tensor) -> Tensor:
    result = logits[None].clone()
    for processor in processors:
        try:
            result = processor(ids.clone(), result)
        except CrossdraftError:
            raise
        except Exception as error:
            raise ContractError(f"the logits processor {_name(processor)} raised {first_line(error)}") from error
        if not isinstance(result, Tensor) or result.shape != (1, len(logits)):
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ContractError(
                f"the logits processor {_name(processor)} returned {shape}; it must return logits of shape "
                f"(1, {len(logits)})"
            )
    return result


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
