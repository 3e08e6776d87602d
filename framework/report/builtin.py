"""The built-in formats of ``crossdraft report``, registered through the hook that third parties use."""

from ..contracts.hookspecs import Register, hookimpl

_FORMATS = {
    "markdown": ("formats:MarkdownReport", "everything on one page; with --rows, --cols or --value a table"),
    "text": ("formats:TextReport", "the tables that crossdraft run prints; with --rows, --cols or --value a table"),
    "csv": ("formats:CsvReport", "all numbers of all cells; with --rows, --cols or --value a table"),
    "json": ("formats:JsonReport", "as csv, a list of objects"),
    "latex": ("formats:LatexReport", "a table for booktabs"),
}


@hookimpl
def crossdraft_register_reports(register: Register) -> None:
    for name, (place, summary) in _FORMATS.items():
        register(name, f"{__package__}.{place}", summary)
