"""Logits processors: functions of a text and of what the target says after it, as transformers has them.

A step scores all nodes of a draft in one pass, so a processor is asked about every one of them, each behind the tokens
on its path. What it answers is what the target says: drafts are judged by the law that it leaves. So a processor must
be a function of the text alone. One that counts its calls, or remembers the last one, would be told of texts that are
never said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..contracts.draft import Draft
from ..errors import ContractError, CrossdraftError, first_line

#: ``processor(ids [1, T] int64, logits [1, V] float32) -> [1, V]``: the text so far, and what may follow.
Processor = Callable[[Tensor, Tensor], Tensor]


class LogitsProcessors:
    """Some processors for each prompt, one after the other.

    Args:
        of: the processors of a prompt, by its index; see `Processor`.
        before: of prompts, by their index, ids that stand before the text: the padding that transformers shows.
    """

    def __init__(self, of: Callable[[int], Sequence[Processor]], before: Mapping[int, Sequence[int]] | None = None):
        self._of, self._before = of, before or {}

    def __call__(
        self, logits: Tensor, draft: Draft, texts: Sequence[Sequence[int]], prompts: Sequence[int | None], twice: bool
    ) -> Tensor:
        """Process the target's logits after the root and each node of a draft: ``[B, N + 1, V]`` float32.

        Args:
            texts: what each row has said, the root last.
            prompts: the index of each row's prompt, None for a free slot.
            twice: ask again, and see that the answers are the same.

        Raises:
            ContractError: a processor raises, answers in another shape, or differently when it is asked again.
        """
        logits = logits.float().clone() if logits.dtype != torch.float64 else logits.clone()
        tokens, valid = draft.tokens.tolist(), draft.valid.tolist()
        parents = draft.parents.tolist()
        for row, prompt in enumerate(prompts):
            if prompt is None:
                continue
            processors = self._of(prompt)
            paths = [[*self._before.get(prompt, ()), *texts[row]]]
            _say(processors, logits[row, 0], paths[0], twice)
            for node, (token, parent) in enumerate(zip(tokens[row], parents[row], strict=True), 1):
                paths.append([*paths[parent + 1], token])
                if valid[row][node - 1]:
                    _say(processors, logits[row, node], paths[node], False)
        return logits


def _say(processors: Sequence[Processor], logits: Tensor, text: Sequence[int], twice: bool) -> None:
    """Write what the processors leave of ``logits [V]`` into them."""
    ids = torch.tensor([text], device=logits.device)
    found = _processed(processors, ids, logits)
    if twice and not torch.equal(found, _processed(processors, ids, logits)):
        one = "the logits processor" if len(processors) == 1 else "one of the logits processors"
        raise ContractError(
            f"{one} {', '.join(map(_name, processors))} answered in two ways when asked twice about the same text; a "
            "logits processor must be a function of the text and the logits alone, because it is asked about texts "
            "that are never said"
        )
    logits.copy_(found[0])


def _processed(processors: Sequence[Processor], ids: Tensor, logits: Tensor) -> Tensor:
    found = logits[None].clone()
    for processor in processors:
        try:
            found = processor(ids.clone(), found)
        except CrossdraftError:
            raise
        except Exception as error:
            raise ContractError(f"the logits processor {_name(processor)} raised {first_line(error)}") from error
        if not isinstance(found, Tensor) or found.shape != (1, len(logits)):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ContractError(
                f"the logits processor {_name(processor)} returned {shape}; it must return logits of shape "
                f"(1, {len(logits)}), as it was given"
            )
    return found


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
