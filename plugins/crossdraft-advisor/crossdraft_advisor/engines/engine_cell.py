"""Measurement of a cell by an engine's server, beside the cells of this process.

B requests run at a time; the next prompt is sent when a response ends. A step of a sequence is what the engine emits at
once after the prefill, whose token belongs to no step: in these engines the first draft follows it. Each of the B slots
is, at any time, waiting for a first token or decoding, so the mean over the slots divides the time into prefill and
decoding. Waiting for the prefill of other requests is part of either. The tail begins when the prompts run out.

The settings and counters of a running server are compared with those of the cell. Counters are those of the
`CounterDefinition` with a prefix (vLLM, llama.cpp). A server without them, or with those of an unknown engine, reveals
nothing.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from crossdraft import (
    CrossdraftError,
    LoadedModel,
    Response,
    SequenceStep,
    UsageError,
    load_model,
    load_tokenizer,
    quoted,
)
from crossdraft.commands import parse_json
from crossdraft.framework import plugins
from crossdraft.framework.api.cell_runner import CellRunner, Conversation
from crossdraft.framework.engine.stopwatch import PHASES
from crossdraft.framework.metrics.pieces import PREFILL
from crossdraft.models import (
    configured,
    model_sha256,
    read_config,
    refuse_adapter,
    resolve,
    shared_embedding_of,
)
from crossdraft.runs import CellConfig, Piece, PieceResult, counted

from ..prompt_lookup import response_drafts
from .acceptance import Acceptance
from .builtin.sglang import Sglang
from .counter_definitions import DEFINITIONS
from .engine import Range, Schedule
from .engine_log import Source
from .http_response import NetworkError, fetch, same_server
from .prometheus import ACCEPTED, DRAFTED, DRAFTS, POSITIONS, REQUESTS, TOKENS, Sample, summed, totals_by_model
from .server import EngineServer, ServedCell, ServedResponse, without_plain_decoding

_WARM_UP = 16  # tokens of a warm-up response
#: Scrapes until a server's counters are those of its finished responses, and seconds between two.
_SCRAPES, _SCRAPE_SECONDS = 5, 0.1
#: Scrapes of the server's counters before and after the responses of a cell.
BEFORE, AFTER = "counters-before.txt", "counters-after.txt"
#: Comment in the second: the number of responses between them, fewer than those of the cell if the run was resumed.
RESPONSES = "# responses: "


def served_flags(config: CellConfig, directory: Path | None) -> tuple[list[str], tuple[str, ...]]:
    """Arguments of the server for a cell's drafter and verifier, and remarks on what the engine does differently.

    ``directory``: for draft models written in the layout that engines load; None to check the cell only. Raises
    UsageError: the engine does not support the pair.
    """
    server = plugins.get("servers", _engine(config).name)
    if config.is_baseline or not server.settings:
        return [], ()
    engine = plugins.get("engines", server.settings)()
    drafter, options = configured("drafters", config.drafter)
    traits = drafter.traits(options, config.sampling)
    plain = {key: value for key, value in config.drafter.config.items() if key not in ("model", "gamma")}
    acceptance = Acceptance(
        (),
        "the recipe",
        length=1.0,
        drafter=config.drafter.name,
        verifier=config.verifier.name,
        model=_servable(config, directory) if directory else str(config.drafter.config.get("model") or ""),
        temperature=config.sampling.temperature,
        point_mass=traits.point_mass,
        chain=traits.is_chain,
        options=plain,
    )
    if reason := engine.cannot(acceptance):
        raise UsageError(
            f"engine {server.name} does not run {config.drafter.name} with {config.verifier.name}: {reason}"
        )
    settings = engine.export(Schedule(acceptance, (Range(1, max(config.batch_size, 1), depth_of(config)),), {}))
    return shlex.split(settings.text.replace("\\\n", " ")), settings.remarks


def depth_of(config: CellConfig) -> int:
    """Maximum depth of the drafts of a cell; 0 for the baseline."""
    if config.is_baseline:
        return 0
    drafter, options = configured("drafters", config.drafter)
    return drafter.traits(options, config.sampling).depth


def _servable(config: CellConfig, directory: Path) -> str:
    """Path of the cell's draft model for an engine, written to ``directory`` unless it can be loaded as it is."""
    name = config.drafter.config.get("model")
    if not isinstance(name, str) or not name:
        return ""
    resolved = resolve(name, heads=True)
    kind = "trainers", config.drafter.name
    if kind[1] not in plugins.entries("trainers") and kind not in plugins.COMPANIONS:
        return str(resolved.path)
    if config.drafter.name == "draft-model" and shared_embedding_of(resolved.path) is None:
        return str(resolved.path)
    trainer = plugins.get(*kind)
    out = directory / "draft-model"
    out.mkdir(parents=True, exist_ok=True)
    trainer.export_servable(name, load_model(config.target, dtype=config.dtype, device="cpu"), out)
    return str(out)


def _engine(config: CellConfig) -> Any:
    assert config.engine is not None
    return config.engine


class EngineCell(CellRunner):
    """A cell whose prompts an engine's server decodes.

    ``target`` (from `load_target`) has no weights, ``length`` is the maximum number of tokens of a sequence, ``logs``
    is for the server's log, and ``on_step`` is called when a response has ended. Raises UsageError if the engine does
    not support the pair or cannot be started, ModelError if the server ends before it is ready.
    """

    def __init__(self, config: CellConfig, target: LoadedModel, length: int, logs: Path, on_step: Callable[[], Any]):
        super().__init__(config, target.tokenizer)
        self.models, self.depth, self._on_step = _digests(config), depth_of(config), on_step
        self._served = 0
        self._context = target.context_length
        self._folder = tempfile.TemporaryDirectory(prefix="crossdraft-engine-", ignore_cleanup_errors=True)
        directory, engine = Path(self._folder.name), _engine(config)
        cls = plugins.get("servers", engine.name)
        flags, _ = served_flags(config, directory)
        # vLLM drafts for no row of a batch if the longest one, its draft and another draft do not fit.
        maximum = length + (self.depth + 1 if self.depth else 0)
        path = resolve(config.target).path
        settings = read_config(path) if path.is_dir() else {}
        size, has_length = settings.get("text_config", settings).get("vocab_size"), hasattr(target.tokenizer, "__len__")
        served = ServedCell(
            target=path,
            dtype=config.dtype,
            sampling=config.sampling,
            seed=config.seed,
            batch_size=config.batch_size,
            length=maximum if self._context is None else min(maximum, self._context),
            gamma=self.depth,
            flags=flags,
            end_tokens=target.eos_token_ids,
            tokenizer=target.tokenizer,
            vocab_size=size if isinstance(size, int) else len(target.tokenizer) if has_length else None,
        )
        self.server: EngineServer = cls(cls.Config(**engine.config), served, logs)
        try:
            self.server.start()
        except BaseException:
            self.close()
            raise

    @classmethod
    def load_target(cls, config: CellConfig, *, trust_remote_code: bool) -> LoadedModel:
        """The target of a cell without its weights."""
        return without_weights(config.target, trust_remote_code=trust_remote_code)

    @classmethod
    def check_pair(cls, config: CellConfig) -> None:
        """Raise UsageError if the engine does not support the drafter with the verifier; no file is read."""
        options = _engine(config).config
        if config.is_baseline and options.get("url") and not (options.get("baseline_url") or options.get("plain")):
            reason = without_plain_decoding(_engine(config).name)
            raise UsageError(f"plain decoding and speed-ups are left out: {reason}")
        served_flags(config, None)

    @classmethod
    def check_cells(cls, configs: Sequence[CellConfig]) -> None:
        _check_addresses(configs)

    @classmethod
    def remarks(cls, config: CellConfig) -> tuple[str, ...]:
        """Remarks on differences of the engine. Raises UsageError or ModelError if it cannot measure the cell."""
        _digests(config)
        options = _engine(config).config
        if config.is_baseline and options.get("plain") and not options.get("baseline_url"):
            return (
                f"plain decoding is that of {options.get('url')} with {quoted(options['plain'])} in its requests; a "
                "server without a drafter may be faster",
            )
        return served_flags(config, None)[1]

    def close(self) -> None:
        if self._served:
            self._save_scrape(AFTER, f"{RESPONSES}{self._served}\n")
        self.server.stop()
        self._folder.cleanup()

    def warm_up(self, length: int) -> None:
        random, vocabulary = Random(self.config.seed), len(self._tokenizer)
        prompts = [[random.randrange(vocabulary) for _ in range(length)] for _ in range(self.config.batch_size)]
        before = self._counters()
        self._run(prompts, min(_WARM_UP, self.config.max_new_tokens))
        if self.server.given_url:
            self._check_growth(before, self._counters())
        self._save_scrape(BEFORE)

    def _save_scrape(self, name: str, comment: str = "") -> None:
        if text := self.server.scrape():
            self.server.directory.mkdir(parents=True, exist_ok=True)
            (self.server.directory / name).write_text(comment + text, encoding="utf-8")

    def _run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[ServedResponse]:
        def complete(prompt: list[int]) -> ServedResponse:
            room = max_tokens if self._context is None else self._context - len(prompt)
            return self.server.complete(prompt, min(max_tokens, room))

        responses = []
        with ThreadPoolExecutor(self.config.batch_size) as pool:
            try:
                for response in pool.map(complete, prompts):
                    self._on_step()
                    responses.append(response)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return responses

    def run(self, conversations: Sequence[Conversation]) -> PieceResult:
        """Measure a piece. Adds ``arrivals`` to its responses: of each step, in microseconds since the epoch."""
        result, epoch = super().run(conversations), time.time() - time.perf_counter()
        served = [response for turn in self._turns for response in turn]
        for line, response in zip(result.responses, served, strict=True):
            start = epoch + response.sent
            line["arrivals"] = [round(1e6 * (start + step.seconds)) for step in response.steps]
        return result

    @contextmanager
    def _measured(self, result: PieceResult) -> Iterator[None]:
        self._turns: list[list[ServedResponse]] = []
        before = self._counters()
        yield
        result.piece = piece_of(self._turns, self.config.batch_size)
        if self.server.given_url:
            result.other_traffic = self._other_traffic(before)

    def _counters(self) -> ServerCounters:
        """The counters of a server that others may use, too, once they no longer change."""
        if not self.server.given_url:
            return ServerCounters()
        name = self.server.url + self.server.metrics
        counters = ServerCounters.parse(self.server.scrape(), name)
        for _ in range(_SCRAPES if counters.totals else 0):
            time.sleep(_SCRAPE_SECONDS)
            earlier, counters = counters, ServerCounters.parse(self.server.scrape(), name)
            if counters.totals == earlier.totals:
                break
        return counters

    def _other_traffic(self, before: ServerCounters) -> dict[str, tuple[float, float]]:
        """Numbers since ``before`` that are not those of the piece's responses, see `Metrics.other_traffic`.

        Raises UsageError: the server does not draft as the cell assumes.
        """
        responses = [response for turn in self._turns for response in turn]
        own: dict[str, float] = {
            REQUESTS: len(responses),
            TOKENS: sum(step.tokens for response in responses for step in response.steps),
        }
        if all(response.totals is not None for response in responses):
            own |= {name: sum(r.totals[i] for r in responses if r.totals) for i, name in enumerate((DRAFTED, ACCEPTED))}
        after = self._counters()
        self._check_growth(before, after)
        return other_traffic(after.since(before), own)

    def _check_growth(self, before: ServerCounters, after: ServerCounters) -> None:
        """Raise UsageError if drafts between two scrapes contradict the length of the cell's."""
        growth = after.since(before)
        drafts, drafted, accepted = (growth[n].value if n in growth else 0 for n in (DRAFTS, DRAFTED, ACCEPTED))
        rounding = sum(growth[name].rounding for name in (DRAFTED, ACCEPTED) if name in growth)
        if {DRAFTED, ACCEPTED} <= growth.keys() and accepted > drafted + rounding:
            raise UsageError(
                f"engine {self.server.name}: {self.server.url} counted {accepted:.0f} accepted of {drafted:.0f} "
                f"drafted tokens during {self.config.drafter.title}; give the address of a server whose counters agree"
            )
        if drafts > 0 and drafted > drafts * self.depth:
            raise UsageError(
                f"engine {self.server.name}: {self.server.url} counted {drafted:.0f} tokens in {drafts:.0f} drafts "
                f"during {self.config.drafter.title}, which drafts "
                + (f"at most {self.depth} tokens in a step; " if self.depth else "nothing; ")
                + (
                    f"{quoted(self.server.plain_fields)} does not switch speculation off, or others use the server"
                    if self.server.plain_fields
                    else "give the address of a server with these settings"
                )
            )

    def _decode(
        self, conversations: Sequence[Conversation], prompts: Sequence[list[int]], turn: int
    ) -> Sequence[Response]:
        self._turns.append(self._run(prompts, self.config.max_new_tokens))
        self._served += len(prompts)
        return [self._response(i, *pair) for i, pair in enumerate(zip(prompts, self._turns[-1], strict=True))]

    def _response(self, index: int, prompt: Sequence[int], response: ServedResponse) -> Response:
        """Steps after the prefill's token, with the drafted tokens that the engine reports, or those of `_lengths`."""
        if response.finish_reason not in ("stop", "length"):
            raise UsageError(f"the engine ended a response with {response.finish_reason!r}; expected stop or length")
        drafted = list(response.drafted) if response.drafted is not None else None
        accepted = list(response.accepted or ())
        lengths = self._lengths(prompt, response.tokens) if drafted is None else []
        steps, emitted = [], response.steps[0].tokens
        for step in response.steps[1:]:
            limit = self.config.max_new_tokens - emitted - 1
            tau, nodes = step.tokens - 1, 0
            ends = emitted + step.tokens >= len(response.tokens)
            if drafted is None:
                nodes = max(min(lengths[emitted], max(limit, 0)), tau if self.depth else 0)
            elif drafted and (accepted[0] == tau or ends):  # steps without a draft are not reported
                nodes = drafted.pop(0)
                tau = min(accepted.pop(0), step.tokens)
            emitted += step.tokens
            step.nodes = nodes
            steps.append(SequenceStep(tau, step.tokens, nodes, nodes, max(limit, 0)))  # engines do not pad
        return Response(index, response.tokens, response.finish_reason, steps)

    def _lengths(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Tokens drafted after 0, 1, .. of ``tokens``: those of drafters that derive them from the text, else all."""
        full = [self.depth] * len(tokens)
        if self.config.is_baseline:
            return full
        drafter, options = configured("drafters", self.config.drafter)
        if drafter.remembers(options):
            return full
        with plugins.guarded("drafters", drafter.name, "response_drafts()"):
            drafts = response_drafts(drafter, options, [(prompt, tokens)], self.depth)
            return full if drafts is None else (next(iter(drafts)) >= 0).sum(1).tolist()


def piece_of(turns: Sequence[Sequence[ServedResponse]], batch_size: int) -> Piece:
    """Times of responses that ran ``batch_size`` at a time; ``turns`` ran one after another."""
    seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    emitted = tail_emitted = 0
    tail_seconds = 0.0
    requests = []
    for turn in turns:
        positions = iter(_positions(turn))
        ends = sorted(r.sent + r.steps[-1].seconds for r in turn)
        full = len(turn) >= batch_size
        until = ends[len(turn) - batch_size] if full else ends[-1]  # a slot is empty from then on
        for r in turn:
            first, *later = r.steps
            slot = min(r.sent + later[-1].seconds, until) - (r.sent + first.seconds) if later else 0.0
            seconds[PREFILL] += min(first.seconds, max(until - r.sent, 0.0)) / batch_size
            seconds["rest"] += max(slot, 0.0) / batch_size
            for step in later:
                if r.sent + step.seconds <= until:
                    emitted += step.tokens
                else:
                    tail_emitted += step.tokens
            arrivals = [round(1e6 * step.seconds) for step in r.steps]
            flat = [value for before, after in pairwise(arrivals) for value in (next(positions), after - before)]
            requests.append([sum(step.tokens for step in later), arrivals[0], arrivals[-1] - arrivals[0], *flat])
        tail_seconds += ends[-1] - until
    return Piece(emitted, seconds, tail_emitted, tail_seconds, requests=requests)


def _positions(turn: Sequence[ServedResponse]) -> list[int]:
    """Positions that the target evaluates in each step of all responses: those of all steps under way at its middle."""
    starts, ends, evaluated = (
        np.array(
            [
                (r.sent + before.seconds, r.sent + step.seconds, 1 + step.nodes)
                for r in turn
                for before, step in pairwise(r.steps)
            ]
        )
        .reshape(-1, 3)
        .T
    )
    middles = (starts + ends) / 2

    def until(times: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        """Sum of ``evaluated`` over the times before each middle."""
        order = np.argsort(times)
        return np.concatenate([[0], np.cumsum(evaluated[order])])[np.searchsorted(times[order], middles, side)]

    others = until(starts, "left") - until(ends, "right")
    return np.where(starts < ends, others, evaluated).astype(int).tolist()


def _digests(config: CellConfig) -> dict[str, dict[str, Any]]:
    """Digest and source of the models of a cell, which are not loaded here."""
    names = [config.target, *([config.drafter.config.get("model")] if not config.is_baseline else [])]
    digests = {}
    for name in names:
        if isinstance(name, str) and name:
            resolved = resolve(name, heads=name != config.target)
            refuse_adapter(name, f"the engine {_engine(config).name} loads the weights itself, without an adapter")
            heads = {"heads": True} if name != config.target else {}
            digests[name] = {"sha256": model_sha256(resolved), "source": resolved.source, **heads}
    return digests


def without_weights(name: str, *, trust_remote_code: bool) -> LoadedModel:
    """The model ``name`` without its weights, for an engine that loads them itself."""
    resolved, tokenizer = resolve(name), load_tokenizer(name, trust_remote_code=trust_remote_code)
    settings = read_config(resolved.path) if resolved.path.is_dir() else {}
    return LoadedModel(
        model=None,
        tokenizer=tokenizer.tokenizer,
        name=name,
        source=resolved.source,
        sha256=model_sha256(resolved),
        eos_token_ids=tokenizer.eos_token_ids,
        context_length=settings.get("text_config", settings).get("max_position_embeddings"),
        backend=resolved.backend,
    )


def _check_addresses(cells: Sequence[CellConfig]) -> None:
    """Check that every running server has the drafter, the length and the verifier of all cells that it is to serve.

    Raises UsageError if two cells with other settings share an address, or a server's account of its settings differs.
    """
    shared: dict[str, list[CellConfig]] = {}
    for cell in cells:
        if cell.engine is not None and (url := cell.engine.config.get("baseline_url" if not depth_of(cell) else "url")):
            shared.setdefault(url, []).append(cell)
    for url, other in combinations(shared, 2):
        if shared[url] and same_server(url, other):  # merged with the last of its spellings
            shared[other] = [*shared[url], *shared[other]]
            shared[url] = []
    for url, members in shared.items():
        distinct = {(cell.sampling.temperature == 0, _server_settings(cell)): None for cell in members}
        for (greedy, one), (other_greedy, two) in combinations(distinct, 2):
            # All verifiers are equal in greedy decoding, so they may differ between temperature 0 and others.
            if one[:-1] != two[:-1] or (one != two and greedy == other_greedy):
                raise UsageError(
                    f"the server at {url} is to serve {' '.join(one)}, and {' '.join(two)}, but a server has one "
                    "target, drafter, draft length and verifier; start a server for each, measure each drafter by a "
                    "recipe of its own, and give url and baseline_url of different servers"
                )
        if members:
            cell = members[0]
            metrics = plugins.get("servers", _engine(cell).name).metrics
            if reason := contradiction(url, metrics, cell.drafter.name, depth_of(cell)):
                raise UsageError(
                    f"the server at {url} is to serve {' '.join(_server_settings(cell))}, but {reason}; give the "
                    "address of a server with these settings"
                )


def _server_settings(config: CellConfig) -> tuple[str, ...]:
    """The settings of a cell that a server has for all requests; the last is the verifier."""
    served = _engine(config).name, f"{config.target} ({config.dtype})"
    if not depth_of(config):
        return (*served, "without speculation", "")
    options = ", ".join(f"{key} {quoted(value)}" for key, value in sorted(config.drafter.config.items()) if value)
    return (*served, f"with {config.drafter.name} ({options})", f"and {config.verifier.title}")


_NAMES = (DRAFTS, DRAFTED, ACCEPTED, TOKENS, REQUESTS)  # counters that are compared
_ACCOUNT_SECONDS = 5.0  # seconds for an account of a server's settings
_PAIR = re.compile(r"drafter (\S+), verifier (\S+),")  # the pair of ``crossdraft serve``
_ALIASES = {"NEXTN": "EAGLE"}  # SGLang's own name of the method NEXTN
_EXACT = "vllm"  # engine whose counters exist only with speculation, one for each position of a draft


@dataclass(frozen=True)
class ServerCounters:
    """One scrape."""

    engine: str = ""  # whose counters they are; empty if the scrape has none
    totals: Mapping[str, Sample] | None = None  # by name (`DRAFTS`, ...), summed over models and engines
    positions: int = 0  # number of positions in a draft that are counted

    @classmethod
    def parse(cls, text: str, name: str) -> ServerCounters:
        """Parse a scrape. Raises UsageError if one of the counters is not valid."""
        for definition in DEFINITIONS.values():
            if not definition.prefix:
                continue
            models = totals_by_model(definition, Source(text, name))
            totals = {c: s for c in _NAMES if (s := summed(models, c)) is not None}
            if totals:
                positions = {p for of_model in models.values() for p in of_model.get(POSITIONS, {})}
                return cls(definition.engine, totals, len(positions))
        return cls()

    def since(self, earlier: ServerCounters) -> dict[str, Sample]:
        """The growth of every counter; negative if the server was started again in between."""
        before = earlier.totals or {}
        return {name: sample.since(before.get(name)) for name, sample in (self.totals or {}).items()}

    def contradiction(self, gamma: int) -> str | None:
        """The reason why the server does not draft ``gamma`` tokens (0 = it does not speculate); None if it may."""
        totals = self.totals or {}
        drafts = totals[DRAFTS].value if DRAFTS in totals else 0
        if not gamma:
            if drafts or self.positions or (self.engine == _EXACT and DRAFTS in totals):
                return f"it has counters of drafts ({drafts:.0f} until now), so it speculates"
            return None
        if self.engine == _EXACT and DRAFTS not in totals:
            return "it has no counters of drafts, so it does not speculate"
        if self.positions > gamma or (self.engine == _EXACT and self.positions and self.positions != gamma):
            return f"it drafts {counted(self.positions, 'token')}, and the recipe {gamma}"
        return None


def other_traffic(counted: Mapping[str, Sample], own: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Numbers of the server's counters and of our responses, by name, that are not equal within rounding."""
    return {
        name: (counted[name].value, value)
        for name, value in own.items()
        if name in counted and abs(counted[name].value - value) > counted[name].rounding + 1e-6
    }


def contradiction(url: str, metrics: str, drafter: str, gamma: int) -> str | None:
    """The reason why a running server has other settings than a cell, by its own account; None if it may have them.

    Read are its counters at ``metrics``, SGLang's ``/get_server_info`` and the pair of ``crossdraft serve``. A server
    that does not answer reveals nothing. Raises UsageError if a counter is not valid.
    """
    url = url.rstrip("/")
    try:
        status, text = fetch(url + metrics, _ACCOUNT_SECONDS)
    except NetworkError:
        return None
    if status == 200 and (reason := ServerCounters.parse(text, url + metrics).contradiction(gamma)):
        return reason
    if reason := _sglang_differs(_object_at(f"{url}/get_server_info"), drafter, gamma):
        return reason
    entries = _object_at(f"{url}/v1/models").get("data")
    entry = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    pair = _PAIR.search(str(entry.get("pair", "")))  # of crossdraft serve
    if pair and pair[1] != (drafter if gamma else "none"):
        return f"its drafter is {quoted(pair[1])}"
    return None


def _object_at(url: str) -> dict[str, Any]:
    """The JSON object at an address; empty for anything else."""
    try:
        status, text = fetch(url, _ACCOUNT_SECONDS)
        value = parse_json(text, url) if status == 200 else None
    except CrossdraftError:
        return {}
    return value if isinstance(value, dict) else {}


def _sglang_differs(settings: Mapping[str, Any], drafter: str, gamma: int) -> str | None:
    if "speculative_algorithm" not in settings:
        return None
    algorithm, steps = str(settings["speculative_algorithm"] or ""), settings.get("speculative_num_steps")
    expected = Sglang.methods.get(drafter, algorithm) if gamma else ""
    names = {_ALIASES.get(name, name) for name in (algorithm, expected)}
    if bool(algorithm) != bool(gamma) or len(names) > 1:
        return f"its speculative_algorithm is {quoted(algorithm)}"
    if gamma and algorithm != "NGRAM" and isinstance(steps, int) and steps != gamma:
        return f"its speculative_num_steps is {steps}, and the recipe drafts {counted(gamma, 'token')}"
    return None
