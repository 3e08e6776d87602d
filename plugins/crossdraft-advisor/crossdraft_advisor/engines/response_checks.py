"""Checks of an engine's response, before it counts: what no server can return that decodes as the cell defines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from crossdraft.framework.errors import quoted

FINISH_REASONS = ("stop", "length")


def response_flaw(
    tokens: Sequence[Any],
    steps: Sequence[int],
    finish_reason: Any,
    *,
    gamma: int,
    max_tokens: int,
    end_tokens: Collection[int],
    vocab_size: int | None,
) -> str | None:
    """The reason why a response is impossible, and what to do about it; None if it is possible.

    Args:
        tokens: ids of the response, a final end-of-sequence id included.
        steps: number of tokens of each step, the prefill included.
        gamma: maximum number of drafted tokens of a step; 0 without speculation.
        max_tokens: number of tokens that were requested.
        end_tokens: end-of-sequence ids; empty if unknown.
        vocab_size: number of token ids; None if unknown.
    """
    beyond = [t for t in tokens if type(t) is not int or not 0 <= t < (t + 1 if vocab_size is None else vocab_size)]
    if beyond:
        size = f" of {vocab_size} tokens" if vocab_size else ""
        return f"{quoted(beyond[0])} is not an id of the target's vocabulary{size}; does it serve this target?"
    if max(steps, default=0) > gamma + 1:
        if not gamma:
            return (
                f"{max(steps)} tokens at once, but without speculation a step has one; it speculates, or sends several "
                "steps together: give the address of a server without speculation, or put less load on it"
            )
        return (
            f"{max(steps)} tokens at once, but a step with {gamma} drafted tokens has at most {gamma + 1}; it drafts "
            "more tokens, or sends several steps together: set gamma to the server's, or put less load on it"
        )
    if len(tokens) > max_tokens:
        return f"more than the {max_tokens} tokens of the request; the server ignores the limit"
    if sum(steps) != len(tokens):
        return (
            f"its text has {len(tokens)} tokens when encoded again, but the server emitted {sum(steps)}; use an engine "
            "that returns token ids (option token_ids)"
        )
    if finish_reason not in FINISH_REASONS:
        return f"the finish reason {quoted(finish_reason)}; expected stop or length"
    if early := [i for i, token in enumerate(tokens[:-1]) if token in end_tokens]:
        return (
            f"the end-of-sequence token {tokens[early[0]]} at token {early[0] + 1} of {len(tokens)}; responses must "
            "end there: start the server without ignore_eos, and with the target's end-of-sequence tokens"
        )
    if finish_reason == "stop" and end_tokens and tokens[-1] not in end_tokens:
        return (
            f"the finish reason 'stop' after token {tokens[-1]}, which is not an end-of-sequence token of the target "
            f"({', '.join(map(str, sorted(end_tokens)))}); remove stop words from the server's settings"
        )
    if finish_reason == "length" and len(tokens) < max_tokens:
        return (
            f"the finish reason 'length' after {len(tokens)} of {max_tokens} tokens; give the server a longer context, "
            "or lower max_new_tokens"
        )
    return None


def counts_flaw(drafted: Any, accepted: Any, totals: Any, *, emitted: int, gamma: int) -> str | None:
    """The reason why the numbers of drafted and accepted tokens of a response are impossible; None if they are not.

    Args:
        drafted, accepted, totals: as in `ServerEvent`.
        emitted: number of tokens of the response.
    """
    for numbers in (drafted, accepted, totals):
        if numbers is not None and not (
            isinstance(numbers, list | tuple) and all(type(n) is int and n >= 0 for n in numbers)
        ):
            return f"{quoted(numbers)} as numbers of drafted or accepted tokens; expected lists of counts"
    if totals is not None and (
        len(totals) != 2 or totals[1] > totals[0] or totals[0] > gamma * emitted or totals[1] >= emitted
    ):
        return (
            f"{quoted(list(totals))} as the numbers of drafted and accepted tokens of {emitted}, with at most {gamma} "
            "drafted in a step; does the server draft otherwise than the recipe?"
        )
    if drafted is None and accepted is None:
        return None
    if drafted is None or accepted is None or len(drafted) != len(accepted):
        return "other numbers of steps for drafted and for accepted tokens"
    for n, tau in zip(drafted, accepted, strict=True):
        if not tau <= n <= gamma:
            return (
                f"a step with {n} drafted and {tau} accepted tokens, but the recipe drafts {gamma}; does the server "
                "draft otherwise than the recipe?"
            )
    if len(drafted) + sum(accepted) > emitted - 1 + gamma:
        return f"{len(drafted)} steps with {sum(accepted)} accepted tokens in a response of {emitted} tokens"
    return None


def account_flaw(account: Mapping[str, Any], model: Any, emitted: int) -> str | None:
    """The reason why a server's own account of a response contradicts the response; None if it does not.

    Args:
        account: ``model``, ``usage`` and ``timings`` of its events, as far as they have them.
        model: name of the model that was requested; None if the request has none.
        emitted: number of streamed tokens; an end-of-sequence token may count without being streamed.
    """
    served = account.get("model")
    if isinstance(served, str) and isinstance(model, str):
        names = [name.rstrip("/").rpartition("/")[2].casefold() for name in (served, model)]
        if not (names[0].startswith(names[1]) or names[1].startswith(names[0])):
            return (
                f"it is of the model {quoted(served)}, not {quoted(model)}; set the option model to the target's name"
            )
    usage, timings = (account.get(key) for key in ("usage", "timings"))
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if count is not None and (type(count) is not int or not emitted <= count <= emitted + 1):
        return (
            f"its usage has {quoted(count)} completion tokens, but {emitted} were streamed; use the plug-in of its "
            "engine, or an engine that streams all tokens"
        )
    if isinstance(timings, Mapping):
        drafted, accepted = (timings.get(key, 0) for key in ("draft_n", "draft_n_accepted"))
        if not (type(drafted) is type(accepted) is int and 0 <= accepted <= min(drafted, max(emitted - 1, 0))):
            return (
                f"its timings have {quoted(accepted)} accepted of {quoted(drafted)} drafted tokens in {emitted} tokens"
            )
    return None
