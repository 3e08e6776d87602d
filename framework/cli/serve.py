"""``crossdraft serve``: an OpenAI-compatible server for evaluating a drafter and a verifier interactively."""

from __future__ import annotations

import argparse
import os
import re
import socket
from functools import cache
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..util.extras import need
from ..util.limits import MOST_ROWS, MOST_TOKENS, PREFILL_TOKENS, Limit
from .options.sampling import sampling_from
from .options.trust import add_trust_argument, trusted

if TYPE_CHECKING:
    from ..contracts.models import LoadedModel
    from ..contracts.sampling import Sampling
    from ..engine.decoder import Decoder
    from ..serve.decoder_pool import DecoderPool

#: Shown in --help and at startup.
PURPOSE = "For evaluation, not for production: one process, no paged KV cache"

#: Sampling parameters with server-wide defaults.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: The environment variable that holds the API key.
API_KEY = "CROSSDRAFT_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{PURPOSE}."
    parser.add_argument("--target", required=True, metavar="MODEL", help="target model")
    parser.add_argument(
        "--drafter", default="prompt-lookup", metavar="NAME", help="drafter: a name, or '{name: .., gamma: 4}'"
    )
    parser.add_argument("--verifier", metavar="NAME", help="verifier (default: the one recommended for the drafter)")
    parser.add_argument("--slots", type=int, default=4, metavar="N", help="maximum batch size per decoder (4)")
    parser.add_argument("--waiting", type=int, default=1024, metavar="N", help="maximum queue length (1024)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="maximum tokens per response (512)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=PREFILL_TOKENS,
        metavar="N",
        help=f"prefill chunk: maximum prompt tokens per step; 0 = one whole prompt at a time ({PREFILL_TOKENS})",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="maximum tokens of prompt and response (the context length, up to 4096)",
    )
    defaults = parser.add_argument_group(
        "default sampling parameters (from the model's generation_config.json, else OpenAI's defaults)"
    )
    defaults.add_argument("--temperature", type=float, help="0 = greedy (1)")
    defaults.add_argument("--top-k", type=int, help="keep the k most probable tokens; 0 = off (0)")
    defaults.add_argument("--top-p", type=float, help="keep the smallest set of tokens with this total probability (1)")
    defaults.add_argument(
        "--min-p", type=float, help="drop tokens less probable than this fraction of the most probable one (0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="combined with the seed of each request (0)")
    parser.add_argument("--dtype", default="auto", help="dtype of the target's weights (auto)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"reject requests without this key; prefer {API_KEY}, as other users can see the command line",
    )
    parser.add_argument("--port", type=int, default=8000, help="port; 0 = any free port (8000)")
    add_trust_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Return 0 after Ctrl-C or SIGTERM. Raises UsageError (exit status 2) for an invalid option or a port in use."""
    limits: dict[str, Limit] = {"slots": MOST_ROWS, "max_new_tokens": MOST_TOKENS, "max_length": MOST_TOKENS}
    for name in ("slots", "waiting", "max_new_tokens", "max_length"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise UsageError(f"{option} {value} must be at least 1")
        if value is not None and name in limits and (reason := limits[name].refusal(value)):
            raise UsageError(f"{option} {value}: {reason}")
    if args.prefill_tokens < 0:
        raise UsageError(
            f"--prefill-tokens {args.prefill_tokens} must be at least 1, or 0 for one whole prompt at a time"
        )
    need("crossdraft serve", "serve", "starlette", "uvicorn")
    from ..serve.app import server
    from ..util.loopback import is_loopback

    key = api_key(args)
    pool = build_pool(args)
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    print(f"crossdraft: {pool.title}; {args.slots} slots, {pool.max_length} tokens each")
    print(f"crossdraft: {PURPOSE}")
    loopback = is_loopback(host)
    if not loopback and key is None:
        print("crossdraft: warning: other machines can send requests without an API key; set --api-key", flush=True)
    print(f"crossdraft: http://{f'[{host}]' if ':' in host else host}:{port}/v1 (press Ctrl-C to stop)", flush=True)
    try:
        server(pool, max_waiting=args.waiting, loopback=loopback, api_key=key).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn shuts down cleanly, then raises the signal again
        print("crossdraft: server stopped")
    return 0


def api_key(args: argparse.Namespace) -> str | None:
    """The API key from the option or the environment. Raises UsageError if it is not valid in a header."""
    key = args.api_key if args.api_key is not None else os.environ.get(API_KEY)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UsageError(f"--api-key or {API_KEY} must be printable ASCII without spaces, at least one character")
    return key


def default_sampling(args: argparse.Namespace, target: LoadedModel) -> Sampling:
    """Default sampling parameters: options, else the model's generation config, else `Sampling`. Raises UsageError."""
    from ..api.generate_args import checked_sampling

    config = getattr(target.model, "generation_config", None)
    stored = config.to_diff_dict() if config is not None else {}
    values = {name: stored[name] for name in SAMPLING if stored.get(name) is not None}
    values |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    sampling = checked_sampling(**values)
    # At temperature 0 the other parameters have no effect: reset them, so that all greedy requests share a decoder.
    return type(sampling)(temperature=0) if sampling.temperature == 0 else sampling


def build_pool(args: argparse.Namespace) -> DecoderPool:
    """Load the target and return the decoders for the chosen drafter and verifier. Raises UsageError."""
    from ..api.build import configured, load_draft_model
    from ..api.generate import compatible_pair, pair_decoder
    from ..models.load import load_model
    from ..recipe.recipe import Strategy
    from ..serve.decoder_pool import DecoderPool

    # Options are checked before anything is loaded.
    sampling_from(args)
    drafter = Strategy.parse(args.drafter, "--drafter").model_dump()
    configured("drafters", drafter)
    verifier = None
    if args.verifier is not None:
        verifier = Strategy.parse(args.verifier, "--verifier").model_dump()
        configured("verifiers", verifier)
    target = load_model(args.target, dtype=args.dtype, trust_remote_code=args.target in trusted(args, (args.target,)))
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer, which the server needs; choose another --target")
    sampling = default_sampling(args, target)
    pair = compatible_pair(drafter, verifier, sampling)
    max_length = args.max_length or min(4096, target.context_length or 4096)
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
            batch_size=args.slots,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            prefill_tokens=args.prefill_tokens,
            mask_drafts=True,
            load=lambda name, _: draft_model(name),
        )

    def check(sampling: Sampling) -> None:
        compatible_pair(drafter, verifier, sampling)

    title = (
        f"{target.name}, drafter {pair[0][0].name}, verifier {pair[1][0].name}, temperature {sampling.temperature:g}"
    )
    return DecoderPool(target, sampling, check, build, args.max_new_tokens, max_length, title)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError if the address cannot be bound."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on --host {host} --port {port}: {error}") from None
