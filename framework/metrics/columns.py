"""Descriptions of the columns of a run's files.

Used by the README of a run, the hovers of the HTML report and pivot tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..util.estimate import ENDS


@dataclass(frozen=True)
class Quantity:
    """A column of ``summary.csv``, or a family of columns.

    Attributes:
        name: column name; ``<...>`` is a placeholder for a number or a name.
        meaning: description, a sentence.
        label: label in tables and on axes; by default the name.
        estimate: True if the columns ``<name>_low`` and ``<name>_high`` hold its 95 % interval.
        setting: True for inputs of the measurement, False for results.
    """

    name: str
    meaning: str
    label: str = ""
    estimate: bool = False
    setting: bool = False

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ")


def _setting(name: str, meaning: str) -> Quantity:
    return Quantity(name, meaning, setting=True)


QUANTITIES = (
    _setting("cell", "Hash of the cell: the last part of its directory's name under cells/."),
    _setting("drafter", "Name of the drafter; none is plain decoding, the baseline."),
    _setting("drafter_label", "Label of the drafter in tables, with the options in which it differs from the others."),
    _setting("drafter_config", "Options of the drafter as JSON, defaults included."),
    _setting(
        "verifier", "Name of the verifier, which accepts or rejects drafted tokens; lossy ones change the output."
    ),
    _setting("verifier_label", "Label of the verifier in tables."),
    _setting("verifier_config", "Options of the verifier as JSON."),
    _setting("engine", "Engine that decoded: crossdraft's own loop, or the server of an engine."),
    _setting("engine_config", "Options of the engine as JSON."),
    _setting("temperature", "Sampling temperature; 0 is greedy decoding."),
    _setting("top_k", "Sample from the k most likely tokens only; 0 is off."),
    _setting("top_p", "Sample from the most likely tokens with this total probability only; 1 is off."),
    _setting("min_p", "Exclude tokens below this fraction of the most likely token's probability; 0 is off."),
    _setting("prompts", "Prompt source and selection as JSON."),
    _setting("target", "Target model, whose distribution lossless verifiers preserve."),
    _setting("dtype", "Requested dtype of target and draft models."),
    _setting("device", "Requested device; environment.json holds the actual one."),
    _setting(
        "attn_implementation", "Requested attention implementation of the target; empty is transformers' default."
    ),
    _setting("max_new_tokens", "Maximum number of tokens of a response."),
    _setting("batch_size", "B: sequences decoded in one batch."),
    _setting("seed", "Seed of all random numbers; cells with the same seed share them."),
    _setting("compile_verifier", "True if the verifier was compiled with torch.compile."),
    _setting(
        "prefill_tokens", "Maximum number of tokens of a prefill pass shared by prompts; 0 = one prompt per pass."
    ),
    _setting("constraint", "Language of the responses as JSON; empty without a constraint."),
    _setting("lossless", "True if the verifier claims to preserve the target's distribution."),
    _setting(
        "certificate",
        "Mark of the pair: lossless, certified; not exercised; not certified; FAILED, with its TV; or lossy.",
    ),
    Quantity("error", "Reason why the cell failed; empty if it finished. The columns below are empty if it failed."),
    Quantity("tokens", "Number of tokens emitted."),
    Quantity("steps", "Target calls of a sequence after prefill: each drafts, scores and verifies once."),
    Quantity("sequences", "Number of turns answered."),
    Quantity("depth", "Length of the longest path in a draft of this drafter."),
    Quantity(
        "block_efficiency",
        "Block efficiency (vLLM: mean acceptance length): tokens emitted per target call, correction or bonus "
        "included, over the steps that were not cut short by the end of the sequence, or over all steps if all were "
        "(steps_cut equals steps); with its 95 % interval.",
        "block efficiency",
        estimate=True,
    ),
    Quantity("steps_cut", "Steps cut short by the end of the sequence: fewer tokens were left than a draft can have."),
    Quantity("block_efficiency_all_steps", "Tokens emitted per target call over all steps."),
    Quantity(
        "block_efficiency_expected",
        "1 + the mean of the verifier's own expectation of tau, which is less noisy; empty if the verifier does not "
        "compute it.",
    ),
    Quantity("mean_tau", "Accepted draft tokens per step, over the same steps as block_efficiency."),
    Quantity(
        "acceptance_<i>",
        "Pr(τ ≥ i): share of the steps in which the first i drafted tokens were all accepted, over the same steps as "
        "block_efficiency.",
        "Pr(τ ≥ i)",
    ),
    Quantity("nodes_per_step", "Drafted tokens of a sequence in a step."),
    Quantity("target_rows_per_token", "Positions evaluated by the target per token emitted.", "rows/tok"),
    Quantity("drafter_passes", "Forward passes of the draft model, prefill not counted."),
    Quantity("draft_share", "Share of the decoding time spent in drafting, the drafter's prefill included.", "draft"),
    Quantity("target_share", "Share of the decoding time spent in the target's passes.", "target"),
    Quantity("verify_share", "Share of the decoding time spent in verification.", "verify"),
    Quantity("rest_share", "Share of the decoding time spent in everything else.", "rest"),
    Quantity("decode_seconds", "Seconds of decoding by the clock, without the tail and the target's prefill."),
    Quantity("prefill_seconds", "Seconds of the target's prefill by the clock."),
    Quantity(
        "tail_seconds", "Seconds of the tail: steps with empty slots, because fewer prompts were left than slots."
    ),
    Quantity(
        "tokens_per_second",
        "Tokens per second of all sequences, estimated from the undisturbed steps of the group; without tail and "
        "prefill. By the clock if the speed-up is withheld.",
        "tok/s",
    ),
    Quantity(
        "tokens_per_second_wall", "Tokens per second by the clock, without tail and prefill.", "tok/s by the clock"
    ),
    Quantity(
        "tokens_per_second_with_prefill",
        "Tokens per second by the clock, with tail and prefill.",
        "tok/s with prefill",
    ),
    Quantity("undisturbed", "Share of the steps that no other program disturbed."),
    Quantity(
        "speed_up",
        "tok/s over that of plain decoding in the same group, measured in turns; with its 95 % interval over prompts "
        "and component times.",
        "speed-up",
        estimate=True,
    ),
    Quantity(
        "speed_up_wall",
        "Ratio of tok/s by the clock, which includes the disturbances by other programs; not a speed-up to report.",
        "speed-up by the clock",
    ),
    Quantity(
        "first_token_seconds",
        "Mean seconds from a request to its first token; only of engines.",
        "first token",
        estimate=True,
    ),
    Quantity(
        "token_seconds",
        "Mean seconds per token of a response after its first; only of engines.",
        "time per token",
        estimate=True,
    ),
    Quantity("withheld", "Reason why the speed-up is missing and tok/s is by the clock; empty if neither."),
    Quantity(
        "prompts_<category>",
        "Number of prompts of a category that were answered. A category such as high, whose columns would be others "
        "of this table, is written category_high.",
    ),
    Quantity("block_efficiency_<category>", "Block efficiency on the prompts of a category.", estimate=True),
    Quantity(
        "speed_up_<category>",
        "Speed-up on the prompts of a category; empty if pieces of prompts mix categories.",
        estimate=True,
    ),
    Quantity(
        "same_as_baseline", "At temperature 0: share of the responses that equal plain decoding's, token for token."
    ),
    Quantity(
        "ties", "At temperature 0: responses that differ from plain decoding's at or after a tie within rounding."
    ),
    Quantity("faults", "At temperature 0: responses that differ at or after a token that rounding cannot explain."),
    Quantity("largest_gap", "Largest difference of the target's logits of the two tokens at a first difference."),
    Quantity(
        "peak_memory",
        "Peak memory in bytes: on CUDA of tensors while the cell ran, elsewhere of the process since it began; memory "
        "held by other cells of the group is included.",
    ),
    Quantity(
        "missed_graphs",
        "On CUDA: passes that ran without a graph because the warm-up did not record one; the cell is faster than "
        "measured.",
    ),
    Quantity(
        "other_traffic",
        "Numbers that a server counted while the cell ran, and those of the cell's responses, if it served other "
        "requests, too; otherwise empty.",
    ),
    Quantity(
        "predicted_tokens_per_second", "Tokens per second predicted from measured cost curves.", "predicted tok/s"
    ),
    Quantity("predicted_speed_up", "Speed-up predicted from measured cost curves.", "predicted speed-up"),
)
#: Columns of a cell's ``steps.parquet``: one row per step of each sequence.
STEP_COLUMNS = {
    "cell": "Hash of the cell.",
    "prompt": "Position of the prompt in its source, before any selection.",
    "question_id": "Name of the prompt in its source.",
    "category": "Category of the prompt.",
    "turn": "Turn of the conversation, from 0.",
    "step": "Step of the turn, from 0.",
    "tau": "Accepted draft tokens.",
    "emitted": "Tokens emitted by the step, correction or bonus included.",
    "nodes": "Drafted tokens of this sequence.",
    "width": "Drafted tokens of the batch's widest sequence; the target evaluated width + 1 positions for this one.",
    "limit": "Maximum depth of the draft: the tokens left to generate, minus one.",
    "survival": "Sum over i of Pr(τ ≥ i | the first i drafted tokens); empty if the verifier does not compute it.",
}
#: Keys of a line of a cell's ``responses.jsonl``.
RESPONSE_KEYS = {
    "question_id, turn, category": "As in steps.parquet.",
    "prompt_tokens": "Length of the prompt in tokens, earlier turns included.",
    "text": "Text of the response.",
    "tokens": "Token ids of the response, in the target's vocabulary.",
    "logprobs": "Natural logarithms of the target's probabilities of these tokens, after temperature, top-k, top-p and "
    "min-p; null is probability 0. Absent at temperature 0.",
    "difference": "At temperature 0, of a response that differs from plain decoding's: index of the first token that "
    "differs, the gap of the target's logits of the two tokens (null if one text ends there), the largest gap that is "
    "a tie within rounding, and fault, true for a larger one. Absent after a turn that differs, and from engines.",
    "finish_reason": "stop (an end-of-sequence token) or length (max_new_tokens, or a full context).",
}
_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
_FAMILIES = [
    (re.compile(re.sub("<.*>", "(.+)", quantity.name)), quantity) for quantity in QUANTITIES if "<" in quantity.name
]


def quantity_of(column: str) -> Quantity | None:
    """Look up a column of ``summary.csv``; None if this version does not write it."""
    if column in _BY_NAME:
        return _BY_NAME[column]
    for end in ENDS:
        base = column.removesuffix(end)
        if base != column and (quantity := quantity_of(base)) is not None and quantity.estimate:
            return quantity
    return next((quantity for pattern, quantity in _FAMILIES if pattern.fullmatch(column)), None)


def meaning(name: str) -> str:
    """Description of a quantity, by its name in `QUANTITIES`."""
    return _BY_NAME[name].meaning
