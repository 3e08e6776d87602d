"""crossdraft for transformers: ``model.generate(..., custom_generate=custom_generate)``.

``generate`` takes some eighty settings and arguments. Each of them is honoured, harmless (it changes no token here) or
refused with an error; `FIELDS` and `ARGUMENTS` list which. Settings that a later transformers adds are refused until
they are listed.
"""

from __future__ import annotations

import copy
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from crossdraft import LoadedModel, Sampling, StepEvent, UsageError
from crossdraft.framework.api.generate_args import as_int, checked_sampling
from crossdraft.heads import Key, read_keys, refused_keys, unused_keys
from crossdraft.models import LogitsProcessors, StrategyLike, check_ids, pair_decoder

_BATCH = "it reads the whole batch, but crossdraft scores each text separately"
_WARPER = "only temperature, top_k, top_p and min_p can warp the distribution"
_STOP = "a sequence ends only at eos_token_id or at its length"
_MODE = "it requests another decoding method than sampling or greedy decoding"
_DRAFTING = "it configures drafting by transformers, but the drafter of crossdraft drafts"

#: Fields of the generation config.
FIELDS: dict[str, Key] = {
    **read_keys(
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
        *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
        *("exponential_decay_length_penalty", "num_return_sequences", "return_dict_in_generate"),
    ),
    **unused_keys("crossdraft has its own cache", "use_cache", "max_cache_len"),
    **unused_keys("prompts are prefilled in chunks in any case", "prefill_chunk_size"),
    **unused_keys("used only by transformers' own loop", "compile_config", "disable_compile"),
    **unused_keys("used only by generate_batch", "continuous_batching_config"),
    **unused_keys("used only by beam search", "early_stopping", "length_penalty", "diversity_penalty"),
    **unused_keys("used only by contrastive search", "low_memory"),
    **unused_keys("the softmax of normalised logits is the same distribution", "renormalize_logits"),
    **unused_keys("used only by encoder-decoder models", "decoder_start_token_id"),
    **unused_keys(
        "used only by assistant models",
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind"),
    ),
    **unused_keys("used only with prompt_lookup_num_tokens", "max_matching_ngram_size"),
    **unused_keys("records which version wrote the file", "transformers_version"),
    **refused_keys(_BATCH, encoder_repetition_penalty=(1.0,), encoder_no_repeat_ngram_size=(0,)),
    **refused_keys("it needs further passes of the model", guidance_scale=(1.0,)),
    **refused_keys("only transformers can check its watermarks", watermarking_config=()),
    **refused_keys("NaN or infinite logits raise an error", remove_invalid_values=(False,)),
    **refused_keys("prompts are not changed", token_healing=(False,)),
    **refused_keys(_WARPER, top_h=(), typical_p=(1.0,), epsilon_cutoff=(0.0,), eta_cutoff=(0.0,)),
    **refused_keys(_STOP, max_time=(), stop_strings=()),
    **refused_keys(_MODE, num_beams=(1,), num_beam_groups=(1,), penalty_alpha=(0.0,), dola_layers=()),
    **refused_keys(_MODE, constraints=(), force_words_ids=()),
    **refused_keys(_DRAFTING, use_mtp=(False,), is_assistant=(False,), prompt_lookup_num_tokens=()),
    **refused_keys(_DRAFTING, assistant_early_exit=(), assistant_ensemble_weight=(), speculation_type=()),
    **refused_keys(
        "crossdraft has its own cache, on the model's device and in its dtype",
        cache_implementation=("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"),
        cache_config=({},),
    ),
    **refused_keys(
        "only sequences are returned",
        output_attentions=(False,),
        output_hidden_states=(False,),
        output_scores=(False,),
        output_logits=(False,),
    ),
}

#: Named arguments of transformers' ``generate``; its keywords are fields, or inputs of the model.
ARGUMENTS: dict[str, Key] = {
    **read_keys("self", "inputs", "generation_config", "custom_generate", "streamer", "logits_processor"),
    **refused_keys(_BATCH, prefix_allowed_tokens_fn=()),
    **refused_keys(_STOP, stopping_criteria=([],)),
    **refused_keys("devices that decode different texts make different numbers of steps", synced_gpus=(False,)),
    **refused_keys(_DRAFTING, assistant_model=()),
    **refused_keys("guidance is not supported", negative_prompt_ids=(), negative_prompt_attention_mask=()),
}
#: Inputs of the model that are honoured or (the last two) harmless.
_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep"})
#: Warpers of `Sampling` besides the temperature.
_TOP = logits_process.TopKLogitsWarper | logits_process.TopPLogitsWarper | logits_process.MinPLogitsWarper
_UNKNOWN = Key("refused", "this version of crossdraft does not support it")


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: StrategyLike = "prompt-lookup",
    verifier: StrategyLike | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode for ``model.generate(..., custom_generate=custom_generate, drafter=..., verifier=...)``.

    Honours the following fields of the generation config (the model's own one included): max_length, max_new_tokens,
    eos_token_id, pad_token_id, do_sample, temperature, top_k, top_p, min_p, num_return_sequences and
    return_dict_in_generate; logits processors, and the fields that transformers turns into some (min_length,
    repetition_penalty, ...); left-padded prompts; and a streamer, for one sequence. Every other setting that would
    change the output is refused. Samples follow torch's generator (``torch.manual_seed``). The model's modules are not
    changed. Drafters that load another model need :func:`generate`.

    Args:
        drafter, verifier: as for :func:`generate`.
        seed: an integer that seeds the samples instead of torch's generator.

    Returns:
        ``[B, longest]``: prompt and output, padded on the right with the pad (or first EOS) id; with
        return_dict_in_generate a ``GenerateDecoderOnlyOutput`` whose only entry is ``sequences``.

    Raises:
        UsageError: a setting cannot be honoured; the message gives its name, its value and what to do.
    """
    config, streamer = generation_config, _checked_call(model, generation_config).get("streamer")
    sampling = sampling_of(config)
    processors = _processors(logits_processor or (), sampling)
    _check_criteria(stopping_criteria or (), config)
    prompts, padding = _prompts(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    budget, ends = config.max_length - input_ids.shape[1], _listed(config.eos_token_id)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and (longest := max(map(len, prompts))) + budget > context:
        raise UsageError(
            f"a prompt of {longest} tokens and {budget} new ones exceed the model's context of {context} tokens; "
            "reduce max_new_tokens or shorten the prompt"
        )
    target = LoadedModel(model, None, type(model).__name__, "given", "", ends, None)
    budget = as_int("max_new_tokens", budget, 1)
    decoder = pair_decoder(
        target,
        drafter,
        verifier,
        max(map(len, prompts)) + budget,
        sampling=sampling,
        batch_size=len(prompts),
        max_new_tokens=budget,
        seed=_drawn_seed(sampling) if seed is None else as_int("seed", seed),
        load=_no_model,
        on_step=None if streamer is None else _streamed(streamer, len(prompts)),
        processors=LogitsProcessors(_by_row(processors, len(prompts)), padding) if processors else None,
    )
    for i, prompt in enumerate(prompts):
        check_ids(decoder, f"prompt {i}", prompt, target.name)
    outputs = {response.index: response.tokens for response in decoder.run(prompts)}
    if streamer is not None:
        streamer.end()
    pad = (*_listed(config.pad_token_id), *ends, 0)[0]
    new = [input_ids.new_tensor(outputs[i]) for i in range(len(prompts))]
    sequences = torch.cat([input_ids, pad_sequence(new, batch_first=True, padding_value=pad)], 1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # type: ignore


def check_fields(config: GenerationConfig) -> None:
    """Raise UsageError for the first field that cannot be honoured; ``config`` as transformers merged it."""
    for name, setting in FIELDS.items():
        _check_setting(name, getattr(config, name, None), setting)
    # Model files may contain entries that transformers itself ignores, so only its own fields are checked.
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    for name in defaults.keys() - FIELDS.keys():
        if not name.startswith("_"):
            _check_setting(name, getattr(config, name, None), _UNKNOWN._replace(neutral=(defaults[name],)))


def sampling_of(config: GenerationConfig) -> Sampling:
    """The sampling parameters of a generation config, as transformers reads it; UsageError if they are invalid."""
    if not config.do_sample:
        return Sampling(temperature=0.0)
    for name in ("temperature", "top_p"):  # transformers keeps one token at top_p=0 and rejects temperature 0
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise UsageError(
                f"custom_generate cannot sample with {name}={value!r}; for greedy decoding pass do_sample=False"
            )
    return checked_sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else min(config.top_p, 1.0),
        min_p=config.min_p or 0.0,
    )


# -- settings that are refused ----------------------------------------------------------------------------


def _check_setting(name: str, value: Any, setting: Key) -> None:
    if setting.effect == "refused" and value is not None and not any(_equal(value, v) for v in setting.neutral):
        _refuse(name, value, setting.reason)


def _refuse(name: str, value: Any, reason: str) -> None:
    """Raise UsageError for a setting, unless its value is None."""
    if value is None:
        return
    plain = isinstance(value, bool | int | float | str | list | tuple | dict)
    shown = reprlib.repr(value).replace("\n", " ") if plain else f"<{type(value).__name__}>"
    raise UsageError(
        f"custom_generate cannot honour {name}={shown}: {reason}; leave it out (the model's own "
        "generation_config counts, too), or call generate without custom_generate"
    )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # tensors of several numbers
        return False


def _processors(configured: Iterable[Any], sampling: Sampling) -> list[Any]:
    """The processors that transformers runs before the warpers of ``sampling``, which are checked and dropped."""
    warpers, processors = sampling.warpers(), list[Any]()
    count = len(warpers)
    for processor in configured:
        if warpers and type(processor) is type(warpers[0]) and vars(processor) == vars(warpers[0]):
            warpers.pop(0)
        elif isinstance(processor, logits_process.TemperatureLogitsWarper | _TOP) or len(warpers) < count:
            if not _does_nothing(processor):
                _refuse("logits_processor", [type(processor).__name__], _WARPER)
        elif not _does_nothing(processor):
            processors.append(processor)
    return processors


def _by_row(processors: Sequence[Any], rows: int) -> Callable[[int], list[Any]]:
    """The processors by row; a processor with the padding lengths of all rows gets that of its row."""

    def processors_of(row: int) -> list[Any]:
        selected = []
        for processor in processors:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if isinstance(ignored, Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = int(ignored[row * len(ignored) // rows])
            selected.append(processor)
        return selected

    return processors_of


def _does_nothing(processor: Any) -> bool:
    match processor:
        case logits_process.LogitNormalization():
            return True
        case logits_process.MinPLogitsWarper():
            return processor.min_p == 0
        case logits_process.SuppressTokensLogitsProcessor():
            return len(processor.suppress_tokens) == 0
        case logits_process.SuppressTokensAtBeginLogitsProcessor():
            return len(processor.begin_suppress_tokens) == 0
    return False


def _check_criteria(criteria: Iterable[Any], config: GenerationConfig) -> None:
    ends = set(_listed(config.eos_token_id))
    for criterion in criteria:
        match criterion:
            case MaxLengthCriteria() if criterion.max_length == config.max_length:
                continue
            case EosTokenCriteria() if set(_listed(criterion.eos_token_id)) == ends:
                continue
        _refuse("stopping_criteria", [type(criterion).__name__], _STOP)


def _prompts(
    input_ids: Tensor, mask: Tensor | None, positions: Tensor | None
) -> tuple[list[list[int]], dict[int, list[int]]]:
    """Split rows into prompts and their left padding; UsageError for other masks or positions."""
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if seen.shape != input_ids.shape or not (seen[:, 1:] >= seen[:, :-1]).all() or not seen[:, -1:].all():
        raise UsageError(
            "custom_generate cannot honour this attention_mask: prompts may only be padded on the left; set "
            "tokenizer.padding_side='left', and remove tokens that the model must not attend to"
        )
    if positions is not None:
        usual = seen.long().cumsum(1) - 1
        try:
            moved = bool(((positions != usual) & seen).any())
        except RuntimeError:  # of another shape
            moved = True
        if moved:
            _refuse("position_ids", positions.tolist(), "positions count the tokens of a prompt from 0")
    rows = list(zip(input_ids, seen, strict=True))
    return [row[keep].tolist() for row, keep in rows], {i: row[~keep].tolist() for i, (row, keep) in enumerate(rows)}


# -- helpers ----------------------------------------------------------------------------------------------


def _checked_call(model: Any, config: GenerationConfig) -> dict[str, Any]:
    """The arguments of the calling ``model.generate``; UsageError if one, or a further keyword, cannot be honoured.

    Read from its stack frame: transformers passes only some of them on, not a streamer or an assistant for example.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate":
            names, _, keywords, values = inspect.getargvalues(frame)
            if "custom_generate" in names and keywords and values.get("self") is model:
                break
        frame = frame.f_back
    else:
        raise UsageError(
            "custom_generate was not called by transformers; call model.generate(..., custom_generate=custom_generate)"
        )
    check_fields(config)
    for name in names:
        _check_setting(name, values[name], ARGUMENTS.get(name, _UNKNOWN))
    for name in values[keywords].keys() - _INPUTS - vars(config).keys():
        _refuse(name, values[keywords][name], "the target receives only token ids and their attention_mask")
    return {name: values[name] for name in names}


def _streamed(streamer: Any, rows: int) -> Callable[[StepEvent], None]:
    if rows != 1:
        raise UsageError(f"custom_generate streams only one sequence, but there are {rows}; leave out the streamer")

    def put(event: StepEvent) -> None:
        with torch.inference_mode(False):  # the streamer gets ordinary tensors
            for token in event.emitted[0]:
                streamer.put(torch.tensor([token]))

    return put


def _drawn_seed(sampling: Sampling) -> int:
    """Draw a seed from torch's generator; greedy decoding does not advance it."""
    return int(torch.empty((), dtype=torch.long, device="cpu").random_()) if sampling.temperature > 0 else 0


def _no_model(*_: Any) -> LoadedModel:
    raise UsageError("this drafter loads a model of its own; use crossdraft.generate instead of custom_generate")


def _listed(ids: Any) -> tuple[int, ...]:
    """Token ids from None, an integer, a list or a tensor."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    return () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
