"""Thinking, calls, refusals and parts of a message are replayed as the text that the target generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.replay.jsonl_formats import FINISH_REASONS
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.responses import Reader
from text_models import make_text_tokenizer

from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.tokenizer import TokenizerOf

HEAD = "{% for m in messages %}<{{ m.role }}>"
END = "</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>"
CALL = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
#: Templates in the manner of Qwen3, gpt-oss, DeepSeek-R1 (which drops thinking and opens it in the prompt), and none.
QWEN = (
    f"{HEAD}{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content.strip('\n') }}}}\n</think>\n\n{{% endif %}}"
    f"{{{{ m.content.lstrip('\n') }}}}{CALL}{END}{{% endif %}}"
)
OSS = (
    f"{HEAD}{{% if m.thinking %}}<|channel|>analysis<|message|>{{{{ m.thinking }}}}<|end|><assistant>{{% endif %}}"
    f"{{% if m.role == 'assistant' %}}<|channel|>final<|message|>{{% endif %}}{{{{ m.content }}}}{END}{{% endif %}}"
)
R1 = f"{HEAD}{{{{ m.content.split('</think>')[-1] }}}}{END}<think>\n{{% endif %}}"
TOOLS = f"{{{{ tools | length if tools else 0 }}}}{{{{ mode }}}}{QWEN}"
PLAIN = f"{HEAD}{{{{ m.content }}}}{END}{{% endif %}}"


def reader(template: str) -> tuple[Reader, Any]:
    tokenizer = make_text_tokenizer()
    tokenizer.chat_template = template
    result = Reader(target="tiny")
    result._tokenizer = TokenizerOf("tiny", tokenizer, (2,))
    return result, tokenizer


def read(tmp_path: Path, template: str, *rows: Any) -> tuple[list[Response], list[str], Reader]:
    """The responses of rows, their texts, and the reader."""
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    reading, tokenizer = reader(template)
    responses = list(reading.read([str(path)]))
    return responses, [str(tokenizer.decode(response.tokens)) for response in responses], reading


def chat(message: dict[str, Any], reason: Any = "stop", *, tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
    return (
        {"messages": [{"role": "user", "content": "a?"}], "choices": [choice | fields.pop("choice", {})]}
        | usage
        | fields
    )


def calls(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "arguments": '{"age": 3}'}} for name in names]


CALLED = '<tool_call>\n{"name": "f", "arguments": {"age": 3}}\n</tool_call>'
THOUGHT = {"reasoning_content": "So 3.", "content": "yes"}


@pytest.mark.parametrize(
    "template, message, fields, text",
    [
        (QWEN, THOUGHT, {}, "<think>\nSo 3.\n</think>\n\nyes"),
        (QWEN, {"reasoning": "\nSo 3.\n", "content": "\n\nyes"}, {}, "<think>\nSo 3.\n</think>\n\nyes"),
        (QWEN, {**THOUGHT, "reasoning": "So 3."}, {}, "<think>\nSo 3.\n</think>\n\nyes"),
        (QWEN, {"reasoning_content": "So 3", "content": None}, {"reason": "length"}, "<think>\nSo 3"),
        (QWEN, {"content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]}, {}, "yes"),
        (QWEN, {"content": [{"type": "thinking", "thinking": "So 3."}, {"type": "text", "text": "yes"}]}, {},
         "<think>\nSo 3.\n</think>\n\nyes"),
        (QWEN, {"content": None, "refusal": "no"}, {}, "no"),
        (QWEN, {"content": None, "tool_calls": calls("f")}, {"reason": "tool_calls"}, CALLED),
        (QWEN, {"content": "yes\n", "tool_calls": calls("f", "f")}, {"reason": "tool_calls"}, f"yes\n{CALLED}{CALLED}"),
        (QWEN, {**THOUGHT, "tool_calls": calls("f")}, {}, f"<think>\nSo 3.\n</think>\n\nyes{CALLED}"),
        (QWEN, {"function_call": calls("f")[0]["function"]}, {"reason": "function_call"}, CALLED),
        (QWEN, {"tool_calls": calls("f")}, {"tool_choice": {"function": {"name": "f"}}}, '{"age": 3}'),
        (QWEN, {"content": "<think>\nSo 3.\n</think>\n\nyes"}, {}, "<think>\nSo 3.\n</think>\n\nyes"),
        (OSS, {"reasoning": "So 3.", "content": "yes"}, {},
         "<|channel|>analysis<|message|>So 3.<|end|><assistant><|channel|>final<|message|>yes"),
        (R1, THOUGHT, {}, "So 3.\n</think>\n\nyes"),
        (R1, {"reasoning_content": "So 3.\n", "content": "\n\nyes"}, {}, "So 3.\n</think>\n\nyes"),
        (R1, {"reasoning_content": "So", "content": None}, {"reason": "length"}, "So"),
    ],
)  # fmt: skip
def test_text_is_that_of_the_chat_template(
    tmp_path: Path, template: str, message: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    exact = len(make_text_tokenizer()(text)["input_ids"])
    row = chat(message, tokens=exact + 1, **fields)
    responses, texts, reading = read(tmp_path, template, row)
    # The token more that the server counted is the one that ends the response.
    end = "" if fields.get("reason") == "length" else "</s>"
    assert texts == [text + end] and responses[0].ended == bool(end) and not reading.skipped
    # The number of tokens that the server counted settles whether the text is the whole one.
    row["usage"]["completion_tokens"] += 50
    with pytest.raises(
        UsageError, match=rf"{exact} tokens would be replayed, but usage.completion_tokens is {exact + 51}"
    ):
        read(tmp_path, template, row)
    responses, _, reading = read(tmp_path, template, row, chat({"content": "no"}))
    assert len(responses) == 1 and any("skipped: with more or fewer tokens" in subject for subject in reading.assumed)


@pytest.mark.parametrize(
    "template, message, fields, sentence",
    [
        (PLAIN, THOUGHT, {}, r"has thinking in a field of its own, which the chat template of tiny does not write"),
        (
            QWEN.replace("{% if add_generation_prompt %}", "{% if true %}"),
            {"tool_calls": calls("f")},
            {},
            r"has calls in",
        ),
        (PLAIN, {"tool_calls": calls("f")}, {}, r"has calls in a field of its own, which .*; record token ids"),
        (R1, {**THOUGHT, "tool_calls": calls("f")}, {}, r"has thinking in a field of its own"),
        (QWEN, {**THOUGHT, "reasoning": "other"}, {}, r"has different texts as reasoning_content, reasoning, thinking"),
        (QWEN, {"content": "yes", "refusal": "no"}, {}, r"has content and a refusal"),
        (QWEN, {"content": None, "audio": {"id": "a"}}, {}, r"has 'audio', which replay does not read"),
        (
            QWEN,
            {"content": "yes", "reasoning_details": [{"text": "So"}]},
            {},
            r"has 'reasoning_details', which replay does",
        ),
        (QWEN, {"content": [{"type": "image_url"}]}, {}, r"content must be a string or a list of parts of type text"),
        (QWEN, {"tool_calls": calls("f")}, {"reason": "length"}, r"a truncated response with calls cannot be rendered"),
        (QWEN, {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, {}, r"arguments are a JSON object"),
        (QWEN, {"tool_calls": [{"name": "f"}]}, {}, r"'tool_calls' must be a list of calls"),
        (QWEN, {"tool_calls": calls("f", "f")}, {"tool_choice": "required"}, r"the request required is unknown"),
        (QWEN, {"content": None}, {"tokens": 9}, r"0 tokens would be replayed, but usage.completion_tokens is 9"),
    ],
)
def test_unknown_text_is_skipped_with_its_reason(
    tmp_path: Path, template: str, message: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=rf"responses.jsonl:1.*{sentence}"):
        read(tmp_path, template, chat(message, **fields))
    (one,), _, reading = read(tmp_path, template, chat(message, **fields), chat({"content": "no"}))
    assert one.place.endswith(":2, choices[0]") and len(reading.skipped) == 1


def test_log_probabilities_hold_the_whole_text(tmp_path: Path) -> None:
    """Their tokens are the generated ones, whatever the message's fields leave out, and however it was tokenized."""
    tokenizer = make_text_tokenizer()
    text = f"<think>So</think> yes{CALLED}"
    canonical = [*tokenizer(text)["input_ids"], 2]
    spelt = [token for part in text for token in tokenizer(part)["input_ids"]] + [2]
    assert len(spelt) > len(canonical)
    for ids in (canonical, spelt):
        content = [{"token": str(tokenizer.decode([token])), "logprob": -1.0} for token in ids]
        message = {"reasoning_content": "So", "content": "yes", "tool_calls": calls("f")}
        row = chat(message, "tool_calls", choice={"logprobs": {"content": content}}, temperature=1.0, tokens=len(ids))
        (one,), _, _ = read(tmp_path, QWEN, row)
        assert one.tokens == ids and one.ended and one.log_p is not None
        row["choices"][0]["message"]["content"] = "other"
        with pytest.raises(UsageError, match=r"differ from the .* tokens with log-probabilities"):
            read(tmp_path, QWEN, row)


def test_prompt_has_tools_and_variables_of_the_request(tmp_path: Path) -> None:
    tokenizer = make_text_tokenizer()
    row = chat({"content": "yes"}, tools=[{"type": "function"}], chat_template_kwargs={"mode": "no"})
    row["messages"] += [
        {"role": "assistant", "content": None, "reasoning_content": "So 3.", "tool_calls": calls("f")},
        {"role": "tool", "content": [{"type": "text", "text": "3"}]},
    ]
    (one,), _, _ = read(tmp_path, TOOLS, row)
    assert tokenizer.decode(one.prompt) == (
        f"1no<user>a?</s>\n<assistant><think>\nSo 3.\n</think>\n\n{CALLED}</s>\n<tool>3</s>\n<assistant>"
    )
    words = "tools that the target's chat template does not write"
    assert [words in str(read(tmp_path, template, row)[2].assumed) for template in (TOOLS, QWEN)] == [False, True]


@pytest.mark.parametrize("reason", [*FINISH_REASONS, "STOP", "maybe", {"type": "length"}, {"type": "stop"}], ids=str)
def test_every_finish_reason_is_an_end_or_a_cut(tmp_path: Path, reason: Any) -> None:
    """The ids are replayed in any case; what differs is whether the response may go on."""
    key = reason["type"] if isinstance(reason, dict) else reason.lower()
    row = chat({"content": None}, reason, choice={"token_ids": [7, 5, 2]}, prompt_token_ids=[5, 6], max_tokens=9)
    (one,), _, reading = read(
        tmp_path,
        QWEN,
        row,
    )
    ends = FINISH_REASONS.get(key, False)
    assert (one.tokens, one.ended, one.limit) == ([7, 5, 2], ends, 9 if ends else 3)
    assert any("unknown finish_reason 'maybe', treated as truncated" in subject for subject in reading.assumed) == (
        key == "maybe"
    )
    row["choices"][0] |= {"finish_reason": "stop", "stop_reason": "\n\n", "token_ids": [7, 5]}
    assert not read(tmp_path, QWEN, row)[0][0].ended


@pytest.mark.parametrize(
    "tokens, message", [(3, ""), (4, ""), (5, "skipped"), (2, "few"), (1, "skipped"), (0, "skipped")]
)
def test_ids_are_as_many_as_the_server_counted(tmp_path: Path, tokens: int, message: str) -> None:
    row = {"prompt": [5], "usage": {"completion_tokens": tokens}}
    plain, choice = (
        {"tokens": [5, 6, 7], "finish_reason": "length"},
        {"token_ids": [5, 6, 7], "finish_reason": "length"},
    )
    for one in (row | plain, row | {"choices": [choice]}):
        result, _, reading = read(tmp_path, PLAIN, one, {"prompt": [5], "tokens": [5]})
        assert len(result) == (1 if message == "skipped" else 2)
        assert any("server counted" in subject and message in subject for subject in reading.assumed) == bool(message)
    with pytest.raises(UsageError, match=r"3 tokens, but max_tokens is 2"):
        read(tmp_path, PLAIN, {"prompt": [5], "max_tokens": 2} | plain)
    with pytest.raises(UsageError, match=r"3 tokens, but max_tokens is 2"):
        read(tmp_path, PLAIN, {"prompt": [5], "max_tokens": 2, "choices": [choice]})
    with pytest.raises(UsageError, match=r"'usage.completion_tokens' is '3'; it must be a number"):
        read(tmp_path, PLAIN, row | plain | {"usage": {"completion_tokens": "3"}})
