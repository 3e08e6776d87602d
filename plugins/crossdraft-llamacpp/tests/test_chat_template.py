"""The chat template of a GGUF file; llama.cpp itself is not needed."""

from __future__ import annotations

from crossdraft_llamacpp.tokenizer import GGUFTokenizer

from crossdraft.framework.models.chat import encode_messages


class Bare(GGUFTokenizer):
    chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    bos_token_id = eos_token_id = None

    def __init__(self) -> None:
        pass

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def test_template_reads_tools() -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert bytes(encode_messages(Bare(), messages)) == b"hi"
    assert bytes(encode_messages(Bare(), messages, tools=tools)) == b"look hi"
