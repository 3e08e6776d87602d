"""``crossdraft compare-texts A B --target MODEL``: greedy texts that differ, by rounding or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from crossdraft import Argument, Command, UsageError, quoted
from crossdraft.commands import JsonOptions, TrustOptions
from crossdraft.runs import counted

from ..report import Report, right

if TYPE_CHECKING:
    import numpy as np

    from crossdraft import LoadedModel

    from ..replay.response import Response

MOST_LINES = 20  # most responses in the table


@dataclass(frozen=True)
class TextPair:
    """The two responses to one prompt."""

    id: str
    # ``equal``, ``tie``, ``A``, ``B`` or ``both`` (the texts that are not the target's), ``length`` (equal until one
    # ends), or ``prompt``
    verdict: str
    # index of the first token that differs, or that only one text has; None if the texts are equal
    token: int | None = None
    tokens: tuple[int, int] | None = None  # the two tokens there; None if one text ends
    gaps: tuple[float, float] | None = None  # difference of the logits of each to the greatest, given the text before
    # for A and for B, index and gap of the first token that rounding cannot explain, or None
    beyond: tuple[tuple[int, float] | None, tuple[int, float] | None] = (None, None)


class CompareTexts(TrustOptions, JsonOptions, Command):
    """Comparison of the greedy texts of two engines.

    Raises UsageError: responses that cannot be read or matched, or were sampled.
    """

    name: ClassVar[str] = "compare-texts"

    a: Annotated[str, Argument("A", positional=True)] = Field(
        description="responses at temperature 0: a JSONL file, a run or one of its cells (docs/replay.md)"
    )
    b: Annotated[str, Argument("B", positional=True)] = Field(
        description="responses to the same prompts, without or with another engine"
    )
    target: Annotated[str, Argument("MODEL")] = Field(description="the target, which computes the logits")
    dtype: str = Field("auto", description="dtype of the target; that of the engines")
    device: str = Field("auto", description="device of the target")

    def run(self) -> int:
        """Return 0 if all texts are the target's, up to ties, 1 if one is not, 3 if prompts or lengths differ."""
        from crossdraft import load_model
        from crossdraft.models import tie_of

        trust = self.target in self.trusted([self.target])
        sides = [_responses(source, self.target, trust) for source in (self.a, self.b)]
        pairs = _matched(sides, (self.a, self.b))
        target = load_model(self.target, dtype=self.dtype, device=self.device, trust_remote_code=trust)
        dtype, tie = tie_of(target)
        results, near = compare_texts(pairs, target, tie)
        counts = Counter(result.verdict for result in results)
        data = {"dtype": dtype, "tie": tie, "near_ties": near, "counts": counts, "responses": results}
        Report(lambda: _text(results, target, dtype, tie, near), lambda: data).emit(self)
        if counts["A"] or counts["B"] or counts["both"]:
            return 1
        return 3 if counts["prompt"] or counts["length"] else 0


def _responses(source: str, target: str, trust: bool) -> dict[str, Response]:
    """Responses by id, or by line if they have none; later turns of a conversation have numbers."""
    from ..replay.responses import Reader

    responses: dict[str, Response] = {}
    turns = Counter[str]()
    for number, response in enumerate(Reader(target=target, trust_remote_code=trust).read([source]), 1):
        if response.sampling is not None and response.sampling.temperature != 0:
            raise UsageError(
                f"{response.place}: sampled at temperature {response.sampling.temperature:g}, so texts differ by "
                "chance; give greedy responses, or test draws with crossdraft certify-samples"
            )
        name = f"line {number}" if response.id == response.place else response.id
        turns[name] += 1
        responses[name if turns[name] == 1 else f"{name}, {turns[name]}"] = response
    if not responses:
        raise UsageError(f"{source}: no responses; give a JSONL file or a run with some")
    return responses


def _matched(sides: Sequence[dict[str, Response]], sources: tuple[str, str]) -> dict[str, tuple[Response, Response]]:
    pairs = {name: (response, sides[1][name]) for name, response in sides[0].items() if name in sides[1]}
    if not pairs:
        ids = " and ".join(
            f"{quoted(next(iter(side)))} in {source}" for side, source in zip(sides, sources, strict=True)
        )
        raise UsageError(f"no response of {sources[0]} has the id of one of {sources[1]}: {ids}; give both equal ids")
    if not any(list(a.prompt) == list(b.prompt) for a, b in pairs.values()):
        name, (a, b) = next(iter(pairs.items()))
        raise UsageError(
            f"the prompts differ: {quoted(name)} has {len(a.prompt)} tokens in {sources[0]} and {len(b.prompt)} in "
            f"{sources[1]}; compare the chat templates and the beginning-of-sequence token"
        )
    return pairs


def compare_texts(
    pairs: dict[str, tuple[Response, Response]], target: LoadedModel, tie: float
) -> tuple[list[TextPair], int]:
    """Compare pairs of responses; also return the number of tokens of A whose second logit is within ``tie``."""
    from crossdraft.models import make_slots

    from ..replay.response import check_text
    from ..samples.token_tree import token_gaps

    same = {name: pair for name, pair in pairs.items() if list(pair[0].prompt) == list(pair[1].prompt)}
    responses = [response for side in (0, 1) for response in (pair[side] for pair in same.values())]
    size = make_slots(target, 1, 1).vocab_size
    for response in responses:
        check_text(response.place, response.prompt, response.tokens, size, target.context_length)
    gaps = token_gaps([r.prompt for r in responses], [r.tokens for r in responses], target)
    by_name = dict(zip(same, zip(gaps[: len(same)], gaps[len(same) :], strict=True), strict=True))
    results = [
        _compared(name, pair, by_name[name], tie) if name in same else TextPair(name, "prompt")
        for name, pair in pairs.items()
    ]
    return results, sum(int((of_a[:, 1] <= tie).sum()) for of_a, _ in by_name.values())


def _compared(name: str, pair: tuple[Response, Response], gaps: tuple[np.ndarray, np.ndarray], tie: float) -> TextPair:
    from ..samples.token_tree import first_beyond

    a, b = (list(response.tokens) for response in pair)
    token = next((t for t, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)
    ends = token == min(len(a), len(b))
    first = [first_beyond(side[:, 0], tie) for side in gaps]
    beyond = [None if t is None else (t, float(side[t, 0])) for t, side in zip(first, gaps, strict=True)]
    wrong = ["both"] if None not in beyond else [letter for letter, at in zip("AB", beyond, strict=True) if at]
    verdict = wrong[0] if wrong else "equal" if token is None else "length" if ends else "tie"
    if token is None or ends:
        return TextPair(name, verdict, token, beyond=(beyond[0], beyond[1]))
    at = (float(gaps[0][token, 0]), float(gaps[1][token, 0]))
    return TextPair(name, verdict, token, (a[token], b[token]), at, (beyond[0], beyond[1]))


def _text(results: Sequence[TextPair], target: LoadedModel, dtype: str, tie: float, near: int) -> str:
    from crossdraft import Table

    rows = [_row(result, target) for result in results if result.verdict != "equal"]
    columns = ["response", *right("token"), "A", "B", *right("gap A", "gap B"), "verdict"]
    parts = [Table(columns, rows[:MOST_LINES]).text()] if rows else []
    counts = Counter(result.verdict for result in results)
    wrong = counts["A"] + counts["B"] + counts["both"]
    lines = [f"... and {len(rows) - MOST_LINES} more"] * (len(rows) > MOST_LINES)
    if rows:
        lines += [
            f"gap: difference to the greatest logit of {target.name} in {dtype}, given the text before; a tie: at most "
            f"{tie:g}, as far as rounding can turn two logits around",
            f"near ties: {near} tokens of A have a second token within {tie:g}",
        ]
    lines.append(
        f"{counted(len(results), 'response')}: {counts['equal']} equal, {counts['tie']} differ by ties, "
        f"{wrong} not the target's"
        + (f", {counts['length']} equal until one ends" if counts["length"] else "")
        + (f", {counts['prompt']} not compared: other prompts" if counts["prompt"] else "")
    )
    if wrong:
        sides = [f"{counts[side] + counts['both']} of {side}" for side in "AB" if counts[side] + counts["both"]]
        lines.append(f"not rounding: {', '.join(sides)} are not the greedy text of {target.name}")
    elif counts["tie"]:
        lines.append("rounding: every text is the target's, up to ties")
    return "\n\n".join([*parts, "\n".join(lines)])


def _row(result: TextPair, target: LoadedModel) -> list[str]:
    if result.verdict == "prompt":
        return [result.id, "", "", "", "", "", "other prompt"]
    verdict = "tie" if result.verdict == "tie" else "one text ends there"
    if result.verdict in ("A", "B", "both"):
        places = zip("AB", result.beyond, strict=True)
        verdict = "; ".join(f"{side} is not the target's: token {at[0]}, gap {at[1]:.3g}" for side, at in places if at)
    if result.token is None or result.tokens is None or result.gaps is None:
        return [result.id, "" if result.token is None else str(result.token), "", "", "", "", verdict]
    words = [quoted(target.tokenizer.decode([token]), 20) for token in result.tokens]
    return [result.id, str(result.token), *words, *(f"{gap:.3g}" for gap in result.gaps), verdict]
