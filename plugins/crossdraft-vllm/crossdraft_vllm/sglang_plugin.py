"""SGLang's plug-in, group ``sglang.srt.plugins``: crossdraft's strategies through SGLang's hook registry.

Written against SGLang's public code and tested on its recorded shapes; it has not run inside SGLang.

The verifier replaces the sampling kernels of chains (``--speculative-eagle-topk 1``): those of sampled drafts
(``--speculative-use-rejection-sampling``) and of point masses. The drafter replaces the drafts of
``--speculative-algorithm NGRAM`` by point-mass chains of the same length. Steps at temperature 0 stay SGLang's.

SGLang logs exceptions of plug-ins and continues without them, so `register` exits instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft import CrossdraftError, Draft, DraftContext, Sampling, Verifier

from .guards import check_signature
from .settings import SGLANG_VARIABLE, read_settings
from .slots import DrafterSlots, Row
from .verification import step_rng

logger = logging.getLogger("sglang.crossdraft")

KERNELS = (
    "sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only",
    "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
)
WORKER = "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens"
#: Parameters of both kernels.
PARAMETERS = (
    "predicts",
    "accept_index",
    "accept_token_num",
    "candidates",
    "retrive_index",
    "retrive_next_token",
    "retrive_next_sibling",
    "uniform_samples",
    "uniform_samples_for_final_sampling",
    "target_probs",
    "draft_probs",
    "threshold_single",
    "threshold_acc",
    "deterministic",
)


def register() -> None:
    """Register the hooks of ``CROSSDRAFT_SGLANG``. Exits if it is wrong, or cannot be followed by this SGLang."""
    try:
        _register()
    except (CrossdraftError, ImportError, AttributeError) as error:
        raise SystemExit(f"crossdraft cannot run its strategies in this SGLang: {error}") from error


def _register() -> None:
    settings = read_settings(SGLANG_VARIABLE)
    if settings.verifier is None and settings.drafter is None:
        return
    from pkgutil import resolve_name

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    if settings.verifier is not None:
        for kernel in KERNELS:
            check_signature(kernel, resolve_name(_reference(kernel)), PARAMETERS)
            HookRegistry.register(kernel, verification_hook(settings.verifier), HookType.AROUND)
    if settings.drafter is not None:
        check_signature(WORKER, resolve_name(_reference(WORKER)), ("self", "batch"))
        HookRegistry.register(WORKER, drafting_hook(settings.drafter), HookType.AROUND)


def _reference(path: str) -> str:
    """The path as ``pkgutil.resolve_name`` reads it: the module, a colon, and the object."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return f"{'.'.join(parts[:first])}:{'.'.join(parts[first:])}"


def verification_hook(verifier: Verifier) -> Callable[..., None]:
    """An AROUND hook of the kernels: chains are verified by ``verifier``, trees by the kernel.

    B rows, S slots of each (the root and S - 1 drafted tokens), V tokens of the vocabulary. The kernels write
    ``predicts [B S]``, ``accept_index [B, S]`` and ``accept_token_num [B]``: slot i of a row predicts the token after
    it, at the index that ``retrive_index [B, S]`` has for the slot.
    """

    def verify(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        if arguments["candidates"].shape[1] > 1 and bool((arguments["retrive_next_sibling"] >= 0).any()):
            return original(*args, **kwargs)
        probs = arguments["target_probs"], arguments["draft_probs"]
        tau, tokens = verify_slots(verifier, arguments["candidates"], *probs)
        index = arguments["retrive_index"]
        inside = torch.arange(index.shape[1], device=index.device) <= tau[:, None]
        arguments["predicts"][index[inside]] = tokens[inside].to(arguments["predicts"].dtype)
        accepted = torch.where(inside, index, -1).to(arguments["accept_index"].dtype)
        width = min(accepted.shape[1], arguments["accept_index"].shape[1])
        arguments["accept_index"][:, :width] = accepted[:, :width]
        arguments["accept_token_num"].copy_(tau)
        return None

    return verify


def verify_slots(
    verifier: Verifier, candidates: Tensor, target_probs: Tensor, draft_probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Accepted drafted tokens ``[B]``, and the tokens ``[B, S]`` that follow each slot, as far as they are accepted.

    Args:
        candidates: ``[B, S]``, the root and the drafted tokens.
        target_probs: ``[B, S, V]`` distributions after each slot.
        draft_probs: ``[B, S - 1, V]`` distributions of the drafted tokens; ``[B, S, V]`` (unused by SGLang) or None =
            point masses.
    """
    (b, slots), device = candidates.shape, candidates.device
    sampled = draft_probs is not None and draft_probs.shape[1] == slots - 1
    tokens, lengths = candidates[:, 1:].long(), [slots - 1] * b
    draft = Draft.chain(tokens, lengths, draft_probs if sampled else None)
    verdict = verifier.verify(draft, target_probs, step_rng(b, slots - 1, lengths, None, device))
    following = torch.cat([tokens, tokens.new_zeros(b, 1)], 1)
    order = torch.arange(slots, device=device)
    return verdict.length, torch.where(order == verdict.length[:, None], verdict.token[:, None], following)


def drafting_hook(drafter: tuple[Any, Any]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """An AROUND hook of ``NGRAMWorker._prepare_draft_tokens``: crossdraft's chains in place of its trees.

    SGLang's drafts have a fixed number of slots, the root included; a shorter chain ends with tokens 0.
    """
    drafters: list[DrafterSlots] = []

    def prepare(original: Callable[..., Any], worker: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        if not drafters:
            drafters.append(DrafterSlots(drafter, _context(worker)))
        flat, masks = original(worker, batch)
        slots = worker.draft_token_num
        drafts = flat.reshape(-1, slots).copy()
        mask = masks.reshape(-1, slots, slots).copy()
        rows = [_row(request, slots - 1) for request in batch.reqs]
        chains = drafters[0].propose(rows, {row.request for row in rows})
        for index, (row, chain) in enumerate(zip(rows, chains, strict=True)):
            if row.tokens[-1] != drafts[index, 0]:  # the worker's text is ahead of the request's
                continue
            drafts[index, 1:] = [*chain, *[0] * (slots - 1 - len(chain))]
            mask[index] = np.tril(np.ones((slots, slots), dtype=bool))
        return drafts.reshape(flat.shape), mask.reshape(masks.shape)

    return prepare


def _row(request: Any, limit: int) -> Row:
    """The row of SGLang's ``Req``; all tokens after those that the drafter has seen are new."""
    tokens = [*request.origin_input_ids, *request.output_ids]
    prompt_len = len(request.origin_input_ids)
    return Row(str(request.rid), tokens, len(tokens), prompt_len, None, limit)


def _context(worker: Any) -> DraftContext:
    config = worker.model_runner.model_config
    return DraftContext(
        sampling=Sampling(temperature=1),
        batch_size=worker.max_batch_size,
        max_length=config.context_len + worker.draft_token_num,
        vocab_size=config.vocab_size,
        device=torch.device("cpu"),
        target_name=str(config.model_path),
    )
