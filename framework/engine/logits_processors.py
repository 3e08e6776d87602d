"""Logits processors of transformers, applied to the target's logits at every node of a draft.

A step scores all nodes in one pass, so a processor is called once per node, with the tokens on its path; the target
distribution is computed from its output. A processor must therefore be a pure function of tokens and logits: one that
counts its calls, or keeps state between them, would count rejected tokens too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..contracts.draft import Draft
from ..errors import ContractError, CrossdraftError, first_line

#: ``processor(ids [1, T] int64, logits [1, V] float32) -> [1, V]``: tokens so far and logits of the next one.
Processor = Callable[[Tensor, Tensor], Tensor]


class LogitsProcessors:
    """A chain of processors for each prompt.

    Args:
        processors_of: returns the processors of a prompt, given its index; see `Processor`.
        prefixes: by prompt index, ids before the prompt: the left padding that transformers includes.
    """

    def __init__(
        self,
        processors_of: Callable[[int], Sequence[Processor]],
        prefixes: Mapping[int, Sequence[int]] | None = None,
    ):
        self._processors_of, self._prefixes = processors_of, prefixes or {}

    def __call__(
        self, logits: Tensor, draft: Draft, texts: Sequence[Sequence[int]], prompts: Sequence[int | None], twice: bool
    ) -> Tensor:
        """Process the target's logits after the root and each node of a draft: ``[B, N + 1, V]`` float32.

        Args:
            texts: committed tokens of each row, the root last.
            prompts: index of each row's prompt, None for a free slot.
            twice: call the processors twice at the root and compare the results.

        Raises:
            ContractError: a processor raises, returns another shape, or is not deterministic.
        """
        logits = logits.float().clone() if logits.dtype != torch.float64 else logits.clone()
        tokens, valid = draft.tokens.tolist(), draft.valid.tolist()
        parents = draft.parents.tolist()
        for row, prompt in enumerate(prompts):
            if prompt is None:
                continue
            processors = self._processors_of(prompt)
            paths = [[*self._prefixes.get(prompt, ()), *texts[row]]]
            _process_in_place(processors, logits[row, 0], paths[0], twice)
            for node, (token, parent) in enumerate(zip(tokens[row], parents[row], strict=True), 1):
                paths.append([*paths[parent + 1], token])
                if valid[row][node - 1]:
                    _process_in_place(processors, logits[row, node], paths[node], False)
        return logits


def _process_in_place(processors: Sequence[Processor], logits: Tensor, text: Sequence[int], twice: bool) -> None:
    """Process ``logits [V]`` in place."""
    ids = torch.tensor([text], device=logits.device)
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
