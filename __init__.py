"""crossdraft: any speculative-decoding drafter x any verifier, compared and certified.

The public face. Nothing is defined here: each name is imported from its module when it is first used
(PEP 562), so that ``import crossdraft`` and the command line stay fast and do not load PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafters.autoregressive.draft_model import DraftModel
    from .framework.api.build import find_drafter, make_verifier
    from .framework.api.custom_generate import custom_generate
    from .framework.api.generate import generate, stream
    from .framework.bench.matrix import load_recipe
    from .framework.bench.run import run
    from .framework.contracts.command import Argument, Command
    from .framework.contracts.constraint import Constraint
    from .framework.contracts.draft import DenseScores, Draft, Scores, Sequences, Verdict
    from .framework.contracts.draft_kind import (
        ANY_TREE,
        CHAIN,
        CONDITIONAL_SIBLINGS,
        DELAYED_IID,
        DELAYED_SEQUENCES,
        DETERMINISTIC,
        DRAFT_KINDS,
        GREEDY_DRAFT,
        IID,
        INDEPENDENT_SEQUENCES,
        ONE_SAMPLED_SIBLING,
        POINT_MASSES,
        SAMPLED_SIBLINGS,
        SINGLE_CHILD,
        WITHOUT_REPLACEMENT,
        DraftKind,
    )
    from .framework.contracts.drafter import (
        DraftContext,
        Drafter,
        DraftTraits,
        Learner,
        StrategyConfig,
        TextDistribution,
    )
    from .framework.contracts.hookspecs import Register, hookimpl
    from .framework.contracts.launcher import Launcher, LauncherConfig, Work, Worker
    from .framework.contracts.lm import LM, Fork
    from .framework.contracts.misconfiguration import Misconfiguration
    from .framework.contracts.models import (
        Backend,
        Checkpoint,
        LoadedModel,
        ModelPreparation,
        ModelSource,
        ResolvedModel,
    )
    from .framework.contracts.rng import StepRng, UniformStepRng, accept_each, draw_each, first_accepted
    from .framework.contracts.sampling import Sampling
    from .framework.contracts.steps import Chunk, Response, SequenceStep, StepEvent
    from .framework.contracts.verifier import Verifier, VerifierTraits
    from .framework.errors import (
        ContractError,
        CrossdraftError,
        ModelError,
        NumericalError,
        UnknownNameError,
        UsageError,
    )
    from .framework.models.digests import file_sha256
    from .framework.models.load import load_model
    from .framework.models.resolve import from_directory, from_hub
    from .framework.models.tokenizer import load_tokenizer
    from .framework.recipe.prompts import Prompt, load_prompts
    from .framework.report.report import Report
    from .framework.util.estimate import Estimate
    from .framework.util.limits import MOST_LEVELS, MOST_NODES, MOST_SIBLINGS, Limit
    from .framework.util.output_files import cache_dir
    from .framework.util.static_trees import TreeShape, tree_constant, tree_families
    from .framework.util.stored_code import own_path
    from .framework.util.table import Table
    from .framework.util.tensors import Gathered, at_once, columns, counting, eager_on_cpu, on_device, take_rows

    __version__: str

__all__ = [
    "ANY_TREE",
    "CHAIN",
    "CONDITIONAL_SIBLINGS",
    "DELAYED_IID",
    "DELAYED_SEQUENCES",
    "DETERMINISTIC",
    "DRAFT_KINDS",
    "GREEDY_DRAFT",
    "IID",
    "INDEPENDENT_SEQUENCES",
    "LM",
    "MOST_LEVELS",
    "MOST_NODES",
    "MOST_SIBLINGS",
    "ONE_SAMPLED_SIBLING",
    "POINT_MASSES",
    "SAMPLED_SIBLINGS",
    "SINGLE_CHILD",
    "WITHOUT_REPLACEMENT",
    "Argument",
    "Backend",
    "Checkpoint",
    "Chunk",
    "Command",
    "Constraint",
    "ContractError",
    "CrossdraftError",
    "DenseScores",
    "Draft",
    "DraftContext",
    "DraftKind",
    "DraftModel",
    "DraftTraits",
    "Drafter",
    "Estimate",
    "Fork",
    "Gathered",
    "Launcher",
    "LauncherConfig",
    "Learner",
    "Limit",
    "LoadedModel",
    "Misconfiguration",
    "ModelError",
    "ModelPreparation",
    "ModelSource",
    "NumericalError",
    "Prompt",
    "Register",
    "Report",
    "ResolvedModel",
    "Response",
    "Sampling",
    "Scores",
    "SequenceStep",
    "Sequences",
    "StepEvent",
    "StepRng",
    "StrategyConfig",
    "Table",
    "TextDistribution",
    "TreeShape",
    "UniformStepRng",
    "UnknownNameError",
    "UsageError",
    "Verdict",
    "Verifier",
    "VerifierTraits",
    "Work",
    "Worker",
    "__version__",
    "accept_each",
    "at_once",
    "cache_dir",
    "columns",
    "counting",
    "custom_generate",
    "draw_each",
    "eager_on_cpu",
    "file_sha256",
    "find_drafter",
    "first_accepted",
    "from_directory",
    "from_hub",
    "generate",
    "hookimpl",
    "load_model",
    "load_prompts",
    "load_recipe",
    "load_tokenizer",
    "make_verifier",
    "on_device",
    "own_path",
    "run",
    "stream",
    "take_rows",
    "tree_constant",
    "tree_families",
]

#: Where each public name is defined.
_HOME = {
    "ANY_TREE": ".framework.contracts.draft_kind",
    "CHAIN": ".framework.contracts.draft_kind",
    "CONDITIONAL_SIBLINGS": ".framework.contracts.draft_kind",
    "DELAYED_IID": ".framework.contracts.draft_kind",
    "DELAYED_SEQUENCES": ".framework.contracts.draft_kind",
    "DETERMINISTIC": ".framework.contracts.draft_kind",
    "DRAFT_KINDS": ".framework.contracts.draft_kind",
    "GREEDY_DRAFT": ".framework.contracts.draft_kind",
    "IID": ".framework.contracts.draft_kind",
    "INDEPENDENT_SEQUENCES": ".framework.contracts.draft_kind",
    "LM": ".framework.contracts.lm",
    "MOST_LEVELS": ".framework.util.limits",
    "MOST_NODES": ".framework.util.limits",
    "MOST_SIBLINGS": ".framework.util.limits",
    "ONE_SAMPLED_SIBLING": ".framework.contracts.draft_kind",
    "POINT_MASSES": ".framework.contracts.draft_kind",
    "SAMPLED_SIBLINGS": ".framework.contracts.draft_kind",
    "SINGLE_CHILD": ".framework.contracts.draft_kind",
    "WITHOUT_REPLACEMENT": ".framework.contracts.draft_kind",
    "Argument": ".framework.contracts.command",
    "Backend": ".framework.contracts.models",
    "Checkpoint": ".framework.contracts.models",
    "Chunk": ".framework.contracts.steps",
    "Command": ".framework.contracts.command",
    "Constraint": ".framework.contracts.constraint",
    "ContractError": ".framework.errors",
    "CrossdraftError": ".framework.errors",
    "DenseScores": ".framework.contracts.draft",
    "Draft": ".framework.contracts.draft",
    "DraftContext": ".framework.contracts.drafter",
    "DraftKind": ".framework.contracts.draft_kind",
    "DraftModel": ".drafters.autoregressive.draft_model",
    "DraftTraits": ".framework.contracts.drafter",
    "Drafter": ".framework.contracts.drafter",
    "Estimate": ".framework.util.estimate",
    "Fork": ".framework.contracts.lm",
    "Gathered": ".framework.util.tensors",
    "Launcher": ".framework.contracts.launcher",
    "LauncherConfig": ".framework.contracts.launcher",
    "Learner": ".framework.contracts.drafter",
    "Limit": ".framework.util.limits",
    "LoadedModel": ".framework.contracts.models",
    "Misconfiguration": ".framework.contracts.misconfiguration",
    "ModelError": ".framework.errors",
    "ModelPreparation": ".framework.contracts.models",
    "ModelSource": ".framework.contracts.models",
    "NumericalError": ".framework.errors",
    "Prompt": ".framework.recipe.prompts",
    "Register": ".framework.contracts.hookspecs",
    "Report": ".framework.report.report",
    "ResolvedModel": ".framework.contracts.models",
    "Response": ".framework.contracts.steps",
    "Sampling": ".framework.contracts.sampling",
    "Scores": ".framework.contracts.draft",
    "SequenceStep": ".framework.contracts.steps",
    "Sequences": ".framework.contracts.draft",
    "StepEvent": ".framework.contracts.steps",
    "StepRng": ".framework.contracts.rng",
    "StrategyConfig": ".framework.contracts.drafter",
    "Table": ".framework.util.table",
    "TextDistribution": ".framework.contracts.drafter",
    "TreeShape": ".framework.util.static_trees",
    "UniformStepRng": ".framework.contracts.rng",
    "UnknownNameError": ".framework.errors",
    "UsageError": ".framework.errors",
    "Verdict": ".framework.contracts.draft",
    "Verifier": ".framework.contracts.verifier",
    "VerifierTraits": ".framework.contracts.verifier",
    "Work": ".framework.contracts.launcher",
    "Worker": ".framework.contracts.launcher",
    "accept_each": ".framework.contracts.rng",
    "at_once": ".framework.util.tensors",
    "cache_dir": ".framework.util.output_files",
    "own_path": ".framework.util.stored_code",
    "columns": ".framework.util.tensors",
    "counting": ".framework.util.tensors",
    "custom_generate": ".framework.api.custom_generate",
    "draw_each": ".framework.contracts.rng",
    "eager_on_cpu": ".framework.util.tensors",
    "file_sha256": ".framework.models.digests",
    "find_drafter": ".framework.api.build",
    "first_accepted": ".framework.contracts.rng",
    "from_directory": ".framework.models.resolve",
    "from_hub": ".framework.models.resolve",
    "generate": ".framework.api.generate",
    "hookimpl": ".framework.contracts.hookspecs",
    "load_model": ".framework.models.load",
    "load_prompts": ".framework.recipe.prompts",
    "load_recipe": ".framework.bench.matrix",
    "load_tokenizer": ".framework.models.tokenizer",
    "make_verifier": ".framework.api.build",
    "on_device": ".framework.util.tensors",
    "run": ".framework.bench.run",
    "stream": ".framework.api.generate",
    "take_rows": ".framework.util.tensors",
    "tree_constant": ".framework.util.static_trees",
    "tree_families": ".framework.util.static_trees",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("crossdraft")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
