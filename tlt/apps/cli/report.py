"""`tlt report`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tlt.apps.cli.options import File, Options, Written
from tlt.apps.cli.summary import Summary
from tlt.base.io.extras import how_to_install
from tlt.base.io.files import Record, check_output_file, with_folder, write_atomically
from tlt.base.types import UserError


class Report(Options):
    """Show a run as one HTML page: rewards, where the time went, speculation, responses.

    tlt report RUN [RUN ...] [--out FILE]

    Two runs are drawn side by side. The page loads nothing from a network.
    """

    runs: Annotated[tuple[Path, ...], Field(min_length=1, max_length=8), Written("RUN", True, is_many=True)]
    """Folders of runs, finished or going on."""
    out: File = None
    """HTML file to write; default: report.html in the first run's folder."""


def run(options: Report) -> Record:
    out = options.out or options.runs[0] / "report.html"
    if importlib.util.find_spec("bokeh") is None:
        raise UserError(
            f"tlt report: Bokeh, which draws its charts, is not installed; {how_to_install('report')}"
        )
    from tlt.apps.page.render import make_page

    check_output_file(out, "--out")
    page = make_page(options.runs)
    with write_atomically(with_folder(out)) as file:
        file.write(page)
    return {"out": str(out), "bytes": len(page.encode()), "runs": [str(folder) for folder in options.runs]}


def summarize(record: Record) -> Summary:
    return Summary(
        f"open {Path(record['out']).resolve().as_uri()} in a browser", {"MB": record["bytes"] / 1e6}
    )
