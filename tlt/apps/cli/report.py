"""`tlt report`; apps/page/ makes the page."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tlt.apps.cli.options import File, Options, Switch, Written
from tlt.apps.cli.summary import Summary
from tlt.base.io.extras import how_to_install
from tlt.base.io.files import Record, check_output_file, with_folder, write_atomically
from tlt.base.kinds import Port
from tlt.base.types import UserError


class Report(Options):
    """Show a run as one HTML page: rewards, where the time went, speculation, responses.

    tlt report RUN [RUN ...] [--out FILE] [--watch]

    Two runs are drawn side by side. The page loads nothing from a network.
    """

    runs: Annotated[tuple[Path, ...], Field(min_length=1, max_length=8), Written("RUN", True, is_many=True)]
    """Folders of runs, finished or going on."""
    out: File = None
    """HTML file to write; default: report.html in the first run's folder."""
    watch: Switch = False
    """Serve the page on this machine instead (127.0.0.1), until Ctrl-C; it follows the run."""
    port: Port = 8765
    """Port of --watch; 0: any that is free."""


def run(options: Report) -> Record | int:
    """With --watch returns the exit code of Ctrl-C."""
    out = options.out or options.runs[0] / "report.html"
    if importlib.util.find_spec("bokeh") is None:
        raise UserError(
            f"tlt report: Bokeh, which draws its charts, is not installed; {how_to_install('report')}"
        )
    from tlt.apps.page.render import make_page

    if options.watch:
        return _serve(options)
    check_output_file(out, "--out")
    page = make_page(options.runs)
    with write_atomically(with_folder(out)) as file:
        file.write(page)
    return {"out": str(out), "bytes": len(page.encode()), "runs": [str(folder) for folder in options.runs]}


def summarize(record: Record) -> Summary:
    return Summary(
        f"open {Path(record['out']).resolve().as_uri()} in a browser", {"MB": record["bytes"] / 1e6}
    )


def _serve(options: Report) -> int:
    from tlt.apps.page.render import make_page
    from tlt.apps.page.watch import PageServer

    def make(stamp: str) -> str:
        return make_page(options.runs, stamp=stamp)

    try:
        server = PageServer(options.runs, options.port, make)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--port: {options.port} cannot be used ({reason}); give another, or 0") from None
    with contextlib.closing(server.socket), contextlib.suppress(KeyboardInterrupt):
        server.page()
        print(f"open {server.url} in a browser; Ctrl-C ends", flush=True)
        server.serve_forever()
    return 130
