"""The Markdown report of finished runs.

All numbers are from the records of `crossdraft run`: the tables of each run, a comparison of its verifiers in the
format of papers, and the measurement conditions.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..cost.load_run import FinishedRun, portable, titles_of
from ..recipe.builtin_recipes import builtin_recipes
from ..recipe.recipe import read_recipe
from ..runs.labels import verifier_title
from ..runs.threads import describe_threads
from ..util.table import Table
from .metrics_text import speed_up_text
from .segments import segment_tables
from .tables import summary_markdown

if TYPE_CHECKING:
    from ..cost.summary import Summary
    from ..recipe.recipe import Recipe
    from ..runs.records import CellResult

_INTRODUCTION = "Every number on this page was written by `crossdraft report` from the records of runs; none was typed."

#: Marks reports, so that `util.output_files.check_output` recognises them.
MARK = _INTRODUCTION.encode()


def page(runs: Sequence[FinishedRun]) -> str:
    """The report: contents if there are several runs, then a section per run."""
    titles = titles_of(runs)
    parts = ["# Results", _INTRODUCTION]
    if len(runs) > 1:
        # GitHub's anchor of a heading: lower case, without dots.
        links = [f"[{title}](#{title.lower().replace('.', '')})" for title in titles]
        questions = [run.summary.recipe.question for run in runs]
        parts.append("\n".join(f"- {link}: {q}".removesuffix(": ") for link, q in zip(links, questions, strict=True)))
    for title, run in zip(titles, runs, strict=True):
        parts += _section(title, run)
    return "\n\n".join(parts) + "\n"


def _section(title: str, run: FinishedRun) -> list[str]:
    summary = summary_markdown(run.summary).partition("\n")[2]
    parts = [
        f"## {title}",
        *([f"**Partial results.** {run.partial}"] if run.partial else []),
        re.sub(r"^#", "##", summary, flags=re.MULTILINE).strip(),
    ]
    if run.remarks:
        parts.append("\n".join(run.remarks))
    parts += [table.markdown(level=3) for table in segment_tables(run)]
    if table := verifier_table(run.summary):
        parts += ["### Verifiers compared", "In brackets: the gain over the first verifier of the row.", table]
    parts += [Table((("", "left"), ("", "left")), conditions(run), title="How it was measured").markdown(level=3)]
    return parts


def verifier_table(summary: Summary) -> str:
    """Block efficiency and speed-up with a column per verifier, in the format of papers.

    A row is a group and a drafter, or several drafters that share no verifier, such as single and multi-draft ones.
    Empty if no row has two verifiers.
    """
    rows = _rows(summary)
    if all(len(row) < 2 for row in rows.values()):
        return ""
    has_groups = len({title for title, _ in rows}) > 1
    verifiers = list(dict.fromkeys(name for row in rows.values() for name in row))
    values = {"BE": lambda m: m.block_efficiency, "speed-up": lambda m: m.speed_up}
    marked = {"BE": lambda m: " *" * m.all_cut, "speed-up": lambda m: speed_up_text(m) if m.withheld else ""}
    table = []
    for (title, drafters), row in rows.items():
        line = [title, drafters] if has_groups else [drafters]
        for quantity, value in values.items():
            estimates = {name: value(result.metrics) for name, result in row.items()}
            first = next(iter(estimates.values()))
            for name in verifiers:
                estimate = estimates.get(name)
                text = f"{estimate.value:.2f}" if estimate else ""
                if estimate and first and estimate is not first:
                    text += f" ({100 * (estimate.value / first.value - 1):+.1f} %)"
                line.append(text + (marked[quantity](row[name].metrics) if name in row else ""))
        table.append(line)
    columns = [*(["group"] if has_groups else []), "drafter"]
    columns += [f"{quantity} {name}" for quantity in values for name in verifiers]
    return Table(columns, table).markdown()


def _rows(summary: Summary) -> dict[tuple[str, str], dict[str, CellResult]]:
    """Cells by verifier, by group and drafters."""
    rows = {}
    for title, results in summary.groups:
        drafters: dict[str, dict[str, CellResult]] = {}
        for result in results:
            if not result.config.is_baseline:
                drafters.setdefault(result.config.drafter.title, {})[verifier_title(result)] = result
        merged: list[tuple[list[str], dict[str, CellResult]]] = []
        for drafter, row in drafters.items():
            names, cells_of_row = next((m for m in merged if not m[1].keys() & row.keys()), ([], {}))
            if not names:
                merged.append((names, cells_of_row))
            names.append(drafter)
            cells_of_row.update(row)
        rows |= {(title, ", ".join(names)): row for names, row in merged}
    return rows


# -- conditions ---------------------------------------------------------------------------------------------------


def conditions(run: FinishedRun) -> list[tuple[str, str]]:
    """The conditions under which the run was measured, to reproduce it."""
    environment, results = run.environment, run.summary.results
    versions = environment.get("versions", {})
    commit, _, changes = str(environment.get("git_commit") or "").partition("+")
    software = [f"{name} {versions[name]}" for name in ("crossdraft", "torch", "transformers") if name in versions]
    software += [f"Python {environment['python']}"] if "python" in environment else []
    software += [f"commit {commit[:12]}{' with changes' if changes else ''}"] if commit else []
    machine = [text for item in (environment, *environment.get("elsewhere", [])) for text in _machine(item)]
    measured = sorted({result.measured[:10] for result in results})
    devices = {", ".join(str(r.provenance[key]) for key in ("device", "dtype")): None for r in results}
    threads = dict.fromkeys(text for r in results for text in _threads(r.provenance))
    counts = {f"{r.prompts} of {r.planned} (time budget {r.budget})" if r.planned else str(r.prompts) for r in results}
    models = {name: model["sha256"] for result in results for name, model in result.provenance["models"].items()}
    rows = [
        ("command", f"`{_command(run.summary.recipe)}`"),
        ("measured", " to ".join(dict.fromkeys((measured[0], measured[-1])))),
        ("machine", "; ".join(dict.fromkeys(machine))),
        ("device, dtype", "; ".join(devices)),
        ("threads", "; ".join(threads)),
        ("passes", "; ".join(dict.fromkeys(r.provenance["passes"] for r in results if "passes" in r.provenance))),
        ("software", ", ".join(software)),
        ("prompts", f"{', '.join(sorted(counts))} of {run.summary.recipe.prompts.source}"),
        *((f"SHA-256 of {name}", f"`{sha256}`") for name, sha256 in models.items()),
    ]
    return [(name, text) for name, text in rows if text]


def _threads(provenance: Mapping[str, Any]) -> list[str]:
    """Thread settings of a cell; several if it was resumed with others."""
    recorded = provenance.get("decoding_threads")
    settings = (
        [describe_threads(item) for item in recorded if isinstance(item, dict)] if isinstance(recorded, list) else []
    )
    return list(filter(None, settings)) or ([str(provenance["threads"])] if "threads" in provenance else [])


def _machine(environment: Mapping[str, Any]) -> list[str]:
    cpu = environment.get("cpu", {})
    gpus = [f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in environment.get("gpus", [])]
    return gpus + (
        [f"{cpu.get('model')}, {cpu.get('cores')} cores, {environment.get('memory_gib')} GiB"] if cpu else []
    )


def _command(recipe: Recipe) -> str:
    """The command that reruns the recipe: an installed recipe with the settings that differ."""
    installed = next((name for name in builtin_recipes() if name.rpartition("/")[2] == recipe.name), None)
    if installed is None:
        return f"crossdraft run {recipe.name}.yaml"
    base = read_recipe(installed)
    base = base.model_copy(update={"prompts": portable(base.prompts)})
    values, base_values = recipe.model_dump(mode="json"), base.model_dump(mode="json")
    settings: dict[str, Any] = {}
    for key in values:
        if values[key] == base_values[key] or key in ("description", "question"):
            continue
        if key == "prompts":
            spec = recipe.prompts.model_dump(mode="json", exclude_defaults=True)
            settings[key] = spec["name"] if spec.keys() == {"name"} else spec
        elif key in ("matrix", "sampling") and values[key].keys() >= base_values[key].keys():
            settings |= {f"{key}.{k}": value for k, value in values[key].items() if base_values[key].get(k) != value}
        else:
            settings[key] = values[key]
    words = ["crossdraft", "run", installed]
    for key, value in settings.items():
        if key == "limit" and value is not None:
            words += ["--limit", str(value)]
            continue
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"]
    return shlex.join(words)
