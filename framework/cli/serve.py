"""``crossdraft serve``: an OpenAI-compatible endpoint over the decode loop, for trying a pair by hand."""

from __future__ import annotations

import argparse
import os
import re
import socket
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..util.extras import need
from ..util.limits import MOST_ROWS, MOST_TOKENS, PREFILL_TOKENS, Limit
from .sampling_args import sampling_from
from .trust_args import add_consent, trusted

if TYPE_CHECKING:
    from ..contracts.models import LoadedModel
    from ..contracts.sampling import Sampling
    from ..engine.decoder import Decoder

#: What it is for; said in --help and when it starts.
PURPOSE = "It is for evaluation, not for production: one process, no paged cache"

#: Parameters of a request that a server has defaults for.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: The environment variable that holds the API key.
API_KEY = "CROSSDRAFT_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{PURPOSE}."
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that answers")
    parser.add_argument("--drafter", default="prompt-lookup", metavar="NAME", help="a name, or '{name: .., gamma: 4}'")
    parser.add_argument("--verifier", metavar="NAME", help="the rule; by default the one advised for such drafts")
    parser.add_argument("--slots", type=int, default=4, metavar="N", help="answers decoded at once (4)")
    parser.add_argument("--waiting", type=int, default=1024, metavar="N", help="most requests that wait (1024)")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="most tokens of an answer (512)")
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=PREFILL_TOKENS,
        metavar="N",
        help=f"most tokens of prompts fed between two steps; 0: each prompt whole and alone ({PREFILL_TOKENS})",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of prompt and answer (the context, up to 4096)",
    )
    defaults = parser.add_argument_group(
        "sampling of requests that do not set it (the model's generation_config.json, else OpenAI's)"
    )
    defaults.add_argument("--temperature", type=float, help="0 is greedy (1)")
    defaults.add_argument("--top-k", type=int, help="keep the k most probable tokens; 0 = off (0)")
    defaults.add_argument("--top-p", type=float, help="keep the smallest set of tokens with this much mass (1)")
    defaults.add_argument("--min-p", type=float, help="drop tokens below this share of the likeliest (0)")
    parser.add_argument("--seed", type=int, default=0, help="beside the seed of each request (0)")
    parser.add_argument("--dtype", default="auto", help="of the target's weights (auto)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (127.0.0.1: this machine alone)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"refuse requests without it; better set {API_KEY}, because other users can see a command line",
    )
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 takes a free one (8000)")
    add_consent(parser)


def main(args: argparse.Namespace) -> int:
    """0: ended by Ctrl-C or SIGTERM; 2 (as UsageError): an option that cannot be, or a port that is taken."""
    limits: dict[str, Limit] = {"slots": MOST_ROWS, "max_new_tokens": MOST_TOKENS, "max_length": MOST_TOKENS}
    for name in ("slots", "waiting", "max_new_tokens", "max_length"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise UsageError(f"{option} {value} must be at least 1")
        if value is not None and name in limits and (reason := limits[name].refusal(value)):
            raise UsageError(f"{option} {value}: {reason}")
    if args.prefill_tokens < 0:
        raise UsageError(f"--prefill-tokens {args.prefill_tokens} must be at least 1, or 0 for each prompt by itself")
    need("crossdraft serve", "serve", "starlette", "uvicorn")
    from ..serve.access import is_loopback
    from ..serve.app import server

    key = api_key(args)
    served = offered(args)
    taken = listening(args.host, args.port)
    host, port = taken.getsockname()[:2]
    print(f"crossdraft: {served.title}; {args.slots} slots, {served.length} tokens each")
    print(f"crossdraft: {PURPOSE}")
    loopback = is_loopback(host)
    if not loopback and key is None:
        print("crossdraft: warning: other machines can send requests without an API key; set --api-key", flush=True)
    print(f"crossdraft: http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends it)", flush=True)
    try:
        server(served, most_waiting=args.waiting, loopback=loopback, api_key=key).run(sockets=[taken])
    except KeyboardInterrupt:  # uvicorn has ended in good order, and raises the signal again
        print("crossdraft: the server has ended")
    return 0


def api_key(args: argparse.Namespace) -> str | None:
    """The key that requests must send, of the option or the environment. UsageError if no header can hold it."""
    key = args.api_key if args.api_key is not None else os.environ.get(API_KEY)
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UsageError(f"--api-key or {API_KEY} must be printable ASCII without blanks, at least one character")
    return key


def default_sampling(args: argparse.Namespace, target: LoadedModel) -> Sampling:
    """The sampling parameters of requests that set none: options, else the model's generation config, else `Sampling`.

    Raises UsageError.
    """
    from ..api.generate_args import checked_sampling

    config = getattr(target.model, "generation_config", None)
    stored = config.to_diff_dict() if config is not None else {}
    given = {name: stored[name] for name in SAMPLING if stored.get(name) is not None}
    given |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    sampling = checked_sampling(**given)
    # The other parameters change nothing then: one setting, however it is requested.
    return type(sampling)(temperature=0) if sampling.temperature == 0 else sampling


def offered(args: argparse.Namespace) -> Any:
    """The pair over the target, with its slots."""
    from ..api.build import configured, load_draft_model
    from ..api.generate import compatible_pair, pair_decoder
    from ..models.load import load_model
    from ..recipe.recipe import Strategy
    from ..serve.decoder_pool import Served

    def strategy(option: str, text: str) -> dict[str, Any]:
        return Strategy.parse(text, option).model_dump()

    sampling_from(args)  # before anything is loaded
    drafter = strategy("--drafter", args.drafter)
    rule = None if args.verifier is None else strategy("--verifier", args.verifier)
    for kind, chosen in (("drafters", drafter), ("verifiers", rule)):  # before the target is loaded
        if chosen is not None:
            configured(kind, chosen)
    target = load_model(args.target, dtype=args.dtype, trust_remote_code=args.target in trusted(args, (args.target,)))
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; a server answers in text")
    sampling = default_sampling(args, target)
    pair = compatible_pair(drafter, rule, sampling)
    most = args.max_length or min(4096, target.context_length or 4096)
    if target.context_length is not None and most > target.context_length:
        raise UsageError(f"--max-length {most} is more than the target's context of {target.context_length} tokens")

    @cache
    def drafting(name: str) -> LoadedModel:
        return load_draft_model(name, target)  # once for all laws

    def build(law: Sampling) -> Decoder:
        options: dict[str, Any] = {"batch_size": args.slots, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
        options["prefill_tokens"] = args.prefill_tokens
        return pair_decoder(target, drafter, rule, most, sampling=law, load=lambda name, _: drafting(name), **options)

    def check(law: Sampling) -> None:
        compatible_pair(drafter, rule, law)

    title = (
        f"{target.name}, drafter {pair[0][0].name}, verifier {pair[1][0].name}, temperature {sampling.temperature:g}"
    )
    return Served(target, sampling, check, build, args.max_new_tokens, most, title)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; UsageError where it cannot."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen at --host {host} --port {port}: {error}") from None
