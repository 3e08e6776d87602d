"""vLLM's plug-in, group ``vllm.general_plugins``: crossdraft's verifiers in place of vLLM's rejection sampling.

vLLM calls `register` in every process. `RejectionSampler` is patched: a defect of its CPU build is mended, see `mend`,
and ``rejection_sample`` calls the verifier of ``CROSSDRAFT_VLLM`` if there is one.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

from crossdraft import UsageError, Verifier

from .guards import EngineMismatch, check_signature, check_version
from .settings import VARIABLE, Settings, read_settings
from .verification import verify_flat

logger = logging.getLogger("vllm.crossdraft")

#: The minor version of vLLM that this was tested with, and the parameters of what is patched there.
TESTED = "0.32"
PARAMETERS = {
    "rejection_sample": (
        "draft_token_ids",
        "num_draft_tokens",
        "max_spec_len",
        "cu_num_draft_tokens",
        "draft_probs",
        "target_logits",
        "bonus_token_ids",
        "sampling_metadata",
        "synthetic_mode",
        "synthetic_conditional_rates",
        "use_fp64_gumbel",
    ),
    "apply_sampling_constraints": ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
}
SAMPLER = ("self", "sampler", "spec_config", "device")


def register() -> None:
    """Patch vLLM. Without `VARIABLE`, an untested vLLM is left alone, with a warning.

    Raises:
        UsageError: `VARIABLE` is wrong, or cannot be followed by this vLLM.
    """
    # `Proposer` loads the drafter: the CPU build fails to replace its kernels once numba (of `suffix`) is imported.
    settings = read_settings(load_drafter=False)
    try:
        sampler = _checked_sampler()
    except EngineMismatch as error:
        if settings != Settings():
            raise
        logger.warning("crossdraft-vllm is not active: %s", error)
        return
    if settings.verifier is not None:
        _require_first_runner()
    _patch(sampler, settings)


def _checked_sampler() -> Any:
    """The module ``rejection_sampler``. Raises EngineMismatch if it is not the tested one."""
    import vllm  # pyright: ignore[reportMissingImports]

    check_version("vLLM", vllm.__version__, TESTED)
    try:
        from vllm.v1.sample import rejection_sampler as sampler  # pyright: ignore[reportMissingImports]

        for name, parameters in PARAMETERS.items():
            check_signature(f"rejection_sampler.{name}", getattr(sampler, name), parameters)
        check_signature("RejectionSampler", sampler.RejectionSampler.__init__, SAMPLER)
    except (ImportError, AttributeError) as error:
        raise EngineMismatch(f"vLLM {vllm.__version__} lacks code that crossdraft replaces ({error})") from None
    return sampler


def _require_first_runner() -> None:
    """Select vLLM's first model runner: the second has another rejection sampler, which is not replaced."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    if os.environ.get(name, "0").strip().lower() in ("1", "true"):
        raise UsageError(
            f"{name}={os.environ[name]} selects a model runner whose rejection sampler crossdraft does not replace; "
            f"unset it, or leave out the verifier of {VARIABLE}"
        )
    os.environ[name] = "0"


def _patch(sampler: Any, settings: Settings) -> None:
    """Wrap `RejectionSampler.__init__`, `rejection_sample` and `apply_sampling_constraints`, once per process."""
    if hasattr(sampler.RejectionSampler.__init__, "__wrapped__"):
        return
    create = sampler.RejectionSampler.__init__
    constrain = sampler.apply_sampling_constraints

    @functools.wraps(create)
    def initialize(self: Any, sampler_: Any, spec_config: Any = None, device: Any = None) -> None:
        method = getattr(spec_config, "method", None)
        if settings.drafter is not None and method != "custom_class":
            raise UsageError(
                f"{VARIABLE} has a drafter, but the speculative method is {method!r}; set method to custom_class and "
                "model to crossdraft_vllm.Proposer, or leave out the drafter"
            )
        create(self, sampler_, spec_config, device)
        mend(sampler, torch.device("cpu") if device is None else device)

    @functools.wraps(constrain)
    def apply_sampling_constraints(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        if not len(logits):  # top-k of vLLM 0.32 computes the maximum of an empty tensor
            return logits
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    sampler.RejectionSampler.__init__ = initialize
    sampler.apply_sampling_constraints = apply_sampling_constraints
    if settings.verifier is not None:
        sampler.rejection_sample = rejection_sample_with(settings.verifier, sampler.rejection_sample)
        logger.info("crossdraft's verifier '%s' replaces vLLM's rejection sampling", settings.verifier.name)


def mend(sampler: Any, device: torch.device) -> None:
    """Replace ``expand_batch_to_tokens`` if it does not expand: in vLLM 0.32 on a CPU it returns uninitialised memory.

    The drafted positions are then sampled at an arbitrary temperature.
    """
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    for last in (4.0, 0.5):  # uninitialised memory cannot be right twice
        values = torch.tensor([0.0, 0.25, last], device=device)
        expanded = sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
        if expanded.tolist() != [1.0, 1.0, last, last, last]:
            break
    else:
        return
    logger.warning(
        "vLLM's expand_batch_to_tokens returns wrong values on %s: temperature, top-k and top-p of drafted tokens would"
        " be arbitrary; crossdraft replaces it",
        device,
    )
    sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """``[num_tokens]``: the entry of ``x [B]`` of each token, with ``replace_from`` replaced.

    ``cu_num_tokens``: ``[B]``, the running sum of the tokens of each row.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts.long(), output_size=num_tokens)


def rejection_sample_with(verifier: Verifier, original: Any) -> Any:
    """Return vLLM's ``rejection_sample`` with ``verifier`` in place of its rule.

    vLLM's own code stays in use for synthetic acceptance rates, for batches at temperature 0 (all lossless verifiers
    accept the same tokens there), and, if ``verifier`` is ``greedy``, for batches at other temperatures.
    """
    zero_only = verifier.traits(verifier.config).temperature_zero_only
    warned = False

    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        nonlocal warned
        all_greedy = sampling_metadata.all_greedy
        if synthetic_mode or zero_only != all_greedy:
            if zero_only and not all_greedy and not warned:
                warned = True
                logger.warning("verifier '%s' needs temperature 0; vLLM's rule verifies other batches", verifier.name)
            return original(
                draft_token_ids,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                synthetic_mode,
                synthetic_conditional_rates,
                use_fp64_gumbel,
            )
        if all_greedy:
            target_probs, draft_probs = one_hot_argmax(target_logits), None
        else:
            target_probs = target_logits.softmax(dim=-1, dtype=torch.float32)
            if not sampling_metadata.all_random:
                temperature = expand_batch_to_tokens(
                    sampling_metadata.temperature, cu_num_draft_tokens, len(target_logits)
                )
                target_probs = torch.where(temperature[:, None] == 0, one_hot_argmax(target_logits), target_probs)
        tokens = verify_flat(
            verifier,
            draft_token_ids,
            num_draft_tokens,
            draft_probs,
            target_probs,
            bonus_token_ids,
            sampling_metadata.generators,
        )
        output = draft_token_ids.new_full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
        output[:, : tokens.shape[1]] = tokens
        return output

    return rejection_sample


def one_hot_argmax(logits: Tensor) -> Tensor:
    """``[.., V]`` float32: 1 at the argmax of ``logits [.., V]``."""
    best = logits.argmax(-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
