"""Formats of ``crossdraft report``: one page of HTML, and charts, which ``crossdraft run`` draws too."""

from crossdraft import hookimpl

_FORMATS = {
    "html": ("html.report:HtmlReport", "one self-contained page for a browser"),
    "png": ("charts.report:PngCharts", "charts for the screen"),
    "svg": ("charts.report:SvgCharts", "charts as outlines"),
    "pdf": ("charts.report:PdfCharts", "charts for papers"),
}


@hookimpl
def crossdraft_register_reports(register):
    for name, (place, summary) in _FORMATS.items():
        register(name, f"{__name__}.{place}", summary)


@hookimpl
def crossdraft_summary_written(summary):
    from .charts.charts import draw

    try:
        summary.charts += draw(summary)
    except Exception as error:
        summary.notes.append(f"no charts: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
