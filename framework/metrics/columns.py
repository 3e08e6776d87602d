"""What every column of ``summary.csv`` means: the one place that says so.

The README of a run, the page's hovers, charts and pivot tables take their words from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What follows an estimate in columns of its own: the ends of its interval.
ENDS = ("_low", "_high")


@dataclass(frozen=True)
class Quantity:
    """A column, or a family of columns.

    Attributes:
        name: the column; what stands in ``<>`` is a number or a name in the file.
        meaning: a sentence.
        label: what tables and axes call it, if not by its name.
        estimate: its 95 % interval stands in ``<name>_low`` and ``<name>_high``, where there is one.
        setting: part of the question, not of the answer.
    """

    name: str
    meaning: str
    label: str = ""
    estimate: bool = False
    setting: bool = False

    @property
    def title(self) -> str:
        return self.label or self.name.replace("_", " ")


def _asked(name: str, meaning: str) -> Quantity:
    return Quantity(name, meaning, setting=True)


QUANTITIES = (
    _asked("cell", "The cell's hash: the last part of its directory's name under cells/."),
    _asked("drafter", "What proposes tokens; none is plain decoding, the baseline."),
    _asked(
        "drafter_label", "What tables call the drafter: its label, and the options in which it differs from others."
    ),
    _asked("drafter_config", "Its options, as JSON, defaults included."),
    _asked("verifier", "The rule that accepts or rejects them; lossy ones change what is said."),
    _asked("verifier_label", "What tables call the rule."),
    _asked("verifier_config", "Its options, as JSON."),
    _asked("temperature", "Of sampling; 0 is greedy decoding."),
    _asked("top_k", "Sampling is among the so many likeliest tokens; 0 is all."),
    _asked("top_p", "Sampling is among the likeliest tokens that have so much mass; 1 is all."),
    _asked("min_p", "Tokens below this share of the likeliest one's probability are left out; 0 is none."),
    _asked("prompts", "Which prompts were asked for, as JSON."),
    _asked("target", "The model whose distribution is kept."),
    _asked("dtype", "Of target and draft models, as asked for."),
    _asked("device", "As asked for; environment.json tells which it was."),
    _asked("attn_implementation", "Of the target, as asked for; empty is transformers' own choice."),
    _asked("max_new_tokens", "Most tokens of an answer."),
    _asked("batch_size", "B: sequences that are decoded together."),
    _asked("seed", "Of all random numbers; cells of one seed share them."),
    _asked("compile_verifier", "Was the rule handed to PyTorch's compiler?"),
    _asked("prefill_tokens", "Most tokens of a prefill pass that prompts share; 0 = each prompt by itself."),
    _asked("lossless", "Does the rule promise to keep the target's distribution?"),
    _asked("certificate", "The rule's mark: lossless, certified; not certified; FAILED, with its TV; or lossy."),
    Quantity("error", "Why the cell failed; empty if it did not, and then the numbers below are there."),
    Quantity("tokens", "Tokens emitted in all."),
    Quantity("steps", "Target calls of a sequence after prefill: each drafts, scores and verifies once."),
    Quantity("sequences", "Turns answered."),
    Quantity("depth", "Length of the longest path that a draft of this drafter can have."),
    Quantity(
        "block_efficiency",
        "Block efficiency: tokens emitted per target call, bonus or correction included, over the steps that had room "
        "for a whole draft; with its 95 % interval.",
        "block efficiency",
        estimate=True,
    ),
    Quantity(
        "steps_cut", "Rounds that this leaves out, because the end of the sequence was nearer than a whole draft."
    ),
    Quantity("block_efficiency_all_steps", "Tokens emitted per target call with those steps."),
    Quantity(
        "block_efficiency_expected",
        "1 + the mean of the rule's own expectation of tau, which is less noisy; empty for rules that have none.",
    ),
    Quantity("mean_tau", "Accepted draft tokens per step, over the same steps as block_efficiency."),
    Quantity(
        "acceptance_<i>",
        "Pr(τ ≥ i): the share of the steps that block_efficiency counts in which the first i drafted tokens were all "
        "accepted.",
        "Pr(τ ≥ i)",
    ),
    Quantity("nodes_per_step", "Drafted tokens of a sequence in a step."),
    Quantity("target_rows_per_token", "Positions that the target evaluates per token emitted.", "rows/tok"),
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
        "Tokens per second of all sequences together, by the undisturbed steps of the group; without tail and prefill. "
        "By the clock if there are too few of these.",
        "tok/s",
    ),
    Quantity("tokens_per_second_wall", "The same by the clock.", "tok/s by the clock"),
    Quantity("tokens_per_second_with_prefill", "The same by the clock, with tail and prefill.", "tok/s with prefill"),
    Quantity("undisturbed", "Share of the steps that no other program disturbed."),
    Quantity(
        "speed_up",
        "Of tok/s over plain decoding of the same group, measured side by side; with its 95 % interval, of prompts and "
        "component times.",
        "speed-up",
        estimate=True,
    ),
    Quantity("speed_up_wall", "The same by the clock.", "speed-up by the clock"),
    Quantity("withheld", "Why there is no speed-up; empty if there is, or if there is no baseline."),
    Quantity("prompts_<category>", "How many prompts of a category were answered."),
    Quantity("block_efficiency_<category>", "Block efficiency on the prompts of a category.", estimate=True),
    Quantity(
        "speed_up_<category>",
        "Speed-up on the prompts of a category; empty where pieces of prompts mix categories.",
        estimate=True,
    ),
    Quantity(
        "same_as_baseline", "At temperature 0: share of the responses that equal plain decoding's, token for token."
    ),
    Quantity(
        "peak_memory",
        "Most bytes held at once: on CUDA by tensors while the cell ran, elsewhere by the process since it began; what "
        "the other cells of the group hold is in it.",
    ),
    Quantity("predicted_tokens_per_second", "Tokens per second that measured cost curves predict.", "predicted tok/s"),
    Quantity("predicted_speed_up", "Speed-up that measured cost curves predict.", "predicted speed-up"),
)
#: The columns of a cell's ``steps.parquet``, a line for each step of each sequence.
STEP_COLUMNS = {
    "cell": "The cell's hash.",
    "prompt": "Position of the prompt in its source, whatever was selected from it.",
    "question_id": "What the source calls the prompt.",
    "category": "The prompt's category.",
    "turn": "Which turn of the conversation, from 0.",
    "step": "Which step of the turn, from 0.",
    "tau": "Accepted draft tokens.",
    "emitted": "Tokens that the step added to the text, correction or bonus included.",
    "nodes": "Drafted tokens of this sequence.",
    "width": "Drafted tokens of the batch's widest sequence: the target evaluated width + 1 positions for this one.",
    "limit": "How deep the draft was allowed to be: the tokens left to generate, less one.",
    "survival": "Sum over i of Pr(tau ≥ i | the first i drafted tokens), where the rule knows it.",
}
#: What a line of a cell's ``responses.jsonl`` holds.
RESPONSE_KEYS = {
    "question_id, turn, category": "As in steps.parquet.",
    "prompt_tokens": "Length of the prompt, earlier turns included, in tokens.",
    "text": "The answer.",
    "tokens": "Its tokens, by their numbers in the target's vocabulary.",
    "logprobs": "Natural logarithms of the target's probabilities of these tokens under the sampling; null is "
    "probability 0. Not there at temperature 0.",
    "finish_reason": "Why it ended: stop (an end-of-sequence token) or length (max_new_tokens, or a full context).",
}
_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}
_FAMILIES = [
    (re.compile(re.sub("<.*>", "(.+)", quantity.name)), quantity) for quantity in QUANTITIES if "<" in quantity.name
]


def explained(column: str) -> Quantity | None:
    """What a column of ``summary.csv`` holds; None for one that no run of this version writes."""
    if column in _BY_NAME:
        return _BY_NAME[column]
    for end in ENDS:
        of = column.removesuffix(end)
        if of != column and (found := explained(of)) is not None and found.estimate:
            return found
    return next((quantity for pattern, quantity in _FAMILIES if pattern.fullmatch(column)), None)


def meaning(name: str) -> str:
    """The sentence on one quantity, by its name in `QUANTITIES`."""
    return _BY_NAME[name].meaning
