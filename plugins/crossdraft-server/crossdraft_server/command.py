"""``crossdraft serve``: an OpenAI-compatible server for evaluating a drafter and a verifier interactively."""

from __future__ import annotations

import os
import re
import socket
from functools import cache
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from crossdraft import Argument, Command, Sampling, UsageError
from crossdraft.commands import MOST_ROWS, MOST_TOKENS, PREFILL_TOKENS, SamplingOptions, TrustOptions

if TYPE_CHECKING:
    from crossdraft import LoadedModel
    from crossdraft.models import Decoder

    from .decoder_pool import DecoderPool

#: Printed at startup.
PURPOSE = "For evaluation, not for production: one process, no paged KV cache"
#: The environment variable that holds the API key.
API_KEY = "CROSSDRAFT_API_KEY"


class Serve(SamplingOptions, TrustOptions, Command):
    """The command."""

    name = "serve"

    target: Annotated[str, Argument("MODEL")] = Field(description="target model")
    drafter: Annotated[str, Argument("NAME")] = Field(
        "prompt-lookup", description="drafter: a name, or '{name: .., gamma: 4}'"
    )
    verifier: Annotated[str | None, Argument("NAME")] = Field(
        None, description="verifier (default: the one recommended for the drafter)"
    )
    slots: Annotated[int, MOST_ROWS] = Field(4, ge=1, description="maximum batch size per decoder")
    waiting: int = Field(1024, ge=1, description="maximum queue length")
    max_new_tokens: Annotated[int, MOST_TOKENS] = Field(512, ge=1, description="maximum tokens per response")
    prefill_tokens: int = Field(
        PREFILL_TOKENS,
        ge=0,
        description="prefill chunk: maximum prompt tokens per step; 0 = one whole prompt at a time",
    )
    max_length: Annotated[int | None, MOST_TOKENS] = Field(
        None, ge=1, description="maximum tokens of prompt and response (the context length, up to 4096)"
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="default of requests, as --top-k, --top-p and --min-p; 0 = greedy (the model's "
        "generation_config.json, else OpenAI's defaults)",
    )
    seed: int = Field(0, description="combined with the seed of each request")
    dtype: str = Field("auto", description="dtype of the target's weights")
    host: str = Field("127.0.0.1", description="address to listen on (127.0.0.1: this machine only)")
    api_key: Annotated[str | None, Argument("KEY")] = Field(
        None, description=f"reject requests without this key; prefer {API_KEY}, as other users can see the command line"
    )
    port: int = Field(8000, ge=0, le=65535, description="port; 0 = any free port")

    def run(self) -> int:
        """Return 0 after Ctrl-C or SIGTERM. Raises UsageError for a port in use."""
        from crossdraft.commands import is_loopback

        from .app import server

        key = self.checked_key()
        pool = self.build_pool()
        listener = listen(self.host, self.port)
        host, port = listener.getsockname()[:2]
        print(f"crossdraft: {pool.title}; {self.slots} slots, {pool.max_length} tokens each")
        print(f"crossdraft: {PURPOSE}")
        loopback = is_loopback(host)
        if not loopback and key is None:
            print("crossdraft: warning: other machines can send requests without an API key; set --api-key", flush=True)
        print(f"crossdraft: http://{f'[{host}]' if ':' in host else host}:{port}/v1 (press Ctrl-C to stop)", flush=True)
        try:
            server(pool, max_waiting=self.waiting, loopback=loopback, api_key=key).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn shuts down cleanly, then raises the signal again
            print("crossdraft: server stopped")
        return 0

    def checked_key(self) -> str | None:
        """The API key from the option or the environment. Raises UsageError if it is not valid in a header."""
        key = self.api_key if self.api_key is not None else os.environ.get(API_KEY)
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise UsageError(f"--api-key or {API_KEY} must be printable ASCII without spaces, at least one character")
        return key

    def default_sampling(self, target: LoadedModel) -> Sampling:
        """Default sampling parameters: options, else the model's generation config. Raises UsageError."""
        from crossdraft.framework.api.generate_args import checked_sampling

        config = getattr(target.model, "generation_config", None)
        stored = config.to_diff_dict() if config is not None else {}
        values = {name: stored[name] for name in Sampling.model_fields if stored.get(name) is not None}
        sampling = checked_sampling(**values | self.sampling.model_dump(exclude_unset=True))
        # At temperature 0 the other parameters have no effect: reset them, so that all greedy requests share a decoder.
        return Sampling(temperature=0) if sampling.temperature == 0 else sampling

    def build_pool(self) -> DecoderPool:
        """Load the target and return the decoders for the chosen drafter and verifier. Raises UsageError."""
        from crossdraft import load_model
        from crossdraft.framework.api.generate import compatible_pair
        from crossdraft.models import configured, load_draft_model, pair_decoder
        from crossdraft.runs import Strategy

        from .decoder_pool import DecoderPool

        # Options are checked before anything is loaded.
        drafter = Strategy.parse(self.drafter, "--drafter").model_dump()
        configured("drafters", drafter)
        verifier = None
        if self.verifier is not None:
            verifier = Strategy.parse(self.verifier, "--verifier").model_dump()
            configured("verifiers", verifier)
        trust = self.target in self.trusted([self.target])
        target = load_model(self.target, dtype=self.dtype, trust_remote_code=trust)
        if target.tokenizer is None:
            raise UsageError(f"{target.name} has no tokenizer, which the server needs; choose another --target")
        sampling = self.default_sampling(target)
        pair = compatible_pair(drafter, verifier, sampling)
        max_length = self.max_length or min(4096, target.context_length or 4096)
        if target.context_length is not None and max_length > target.context_length:
            raise UsageError(
                f"--max-length {max_length} exceeds the target's context length of {target.context_length} tokens"
            )

        @cache
        def draft_model(name: str) -> LoadedModel:
            return load_draft_model(name, target)  # shared by all decoders

        def build(sampling: Sampling) -> Decoder:
            return pair_decoder(
                target,
                drafter,
                verifier,
                max_length,
                sampling=sampling,
                batch_size=self.slots,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
                prefill_tokens=self.prefill_tokens,
                mask_drafts=True,
                load=lambda name, _: draft_model(name),
            )

        def check(sampling: Sampling) -> None:
            compatible_pair(drafter, verifier, sampling)

        names = f"drafter {pair[0][0].name}, verifier {pair[1][0].name}"
        title = f"{target.name}, {names}, temperature {sampling.temperature:g}"
        return DecoderPool(target, sampling, check, build, self.max_new_tokens, max_length, title)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError if the address cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on --host {host} --port {port}: {error}") from None
