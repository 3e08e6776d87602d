"""The tokenizer of a GGUF file, with the methods of transformers' tokenizers that crossdraft calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from crossdraft import ModelError

from .library import GGUFModel, library

_NO_VOCABULARY, _SENTENCEPIECE = 0, 1  # of llama_vocab_type
_UNUSED = 2  # of llama_token_attr: ids that only pad the table


def tokenizer_of(model: GGUFModel, name: str) -> GGUFTokenizer | None:
    """Return the tokenizer of the file, or None."""
    if library().llama_vocab_type(model.vocab) == _NO_VOCABULARY:
        return None
    return GGUFTokenizer(model, name)


class GGUFTokenizer:
    """llama.cpp's tokenizer, with the same ids as its server.

    `decode` concatenates the pieces of tokens without cleaning up spaces. `get_vocab` has transformers' token names, so
    tokenizers can be compared across backends.
    """

    def __init__(self, model: GGUFModel, name: str):
        api = library()
        self._model, self.name_or_path = model, name
        self.chat_template = model.chat_template
        self.bos_token_id, self.eos_token_id = (
            token if token >= 0 else None
            for token in (api.llama_vocab_bos(model.vocab), api.llama_vocab_eos(model.vocab))
        )
        prefix = model.text("tokenizer.ggml.add_space_prefix") != "false"
        self._strips = api.llama_vocab_type(model.vocab) == _SENTENCEPIECE and prefix
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def __len__(self) -> int:
        return self._model.vocab_size

    @cached_property
    def _texts(self) -> list[str]:
        api, vocab = library(), self._model.vocab
        return [api.llama_vocab_get_text(vocab, i).decode("utf-8", "replace") for i in range(len(self))]

    @cached_property
    def _ids(self) -> dict[str, int]:
        api, vocab = library(), self._model.vocab
        return {text: i for i, text in enumerate(self._texts) if not api.llama_vocab_get_attr(vocab, i) & _UNUSED}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return self._texts[ids] if isinstance(ids, int) else [self._texts[i] for i in ids]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids; special tokens in the text are parsed, as in transformers."""
        api, data = library(), text.encode("utf-8")
        capacity = len(data) + 8
        while True:
            ids = (api.llama_token * capacity)()
            n = api.llama_tokenize(self._model.vocab, data, len(data), ids, capacity, add_special_tokens, True)
            if 0 <= n <= capacity:
                return {"input_ids": list(ids[:n])}
            if -n <= capacity:
                raise ModelError(f"the tokenizer of {self.name_or_path} cannot encode a text of {len(data)} bytes")
            capacity = -n

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        data = b"".join(self._piece(int(token), not skip_special_tokens) for token in tokens)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips else text

    def _piece(self, token: int, special: bool) -> bytes:
        if (piece := self._pieces.get((token, special))) is None:
            api, capacity = library(), 64
            buffer = ctypes.create_string_buffer(capacity)
            size = api.llama_token_to_piece(self._model.vocab, token, buffer, capacity, 0, special)
            if size < 0:
                buffer = ctypes.create_string_buffer(-size)
                size = api.llama_token_to_piece(self._model.vocab, token, buffer, -size, 0, special)
            piece = self._pieces[token, special] = buffer.raw[:size]
        return piece

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """Render the messages with the file's template, by transformers' renderer; ``options``: of it, as ``tools``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise ModelError(f"{self.name_or_path} has no chat template")
        special = {
            name: self._texts[token]
            for name, token in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id))
            if token is not None
        }
        rendered, _spans = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **special,
            **options,
        )
        return self(rendered[0], add_special_tokens=False)["input_ids"] if tokenize else rendered[0]
