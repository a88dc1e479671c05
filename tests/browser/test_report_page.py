"""The report in headless Chromium: it draws without a word on the console, shows metrics.jsonl's numbers, and a
response is text. Skipped where playwright or Chromium is missing; `make browser-test` installs the first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.apps.page.synthetic import DRAFTS, make_coloured, make_conversation, make_hostile, make_run
from tlt.apps.page.render import make_page
from tlt.training.report.step_record import read_metrics

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("TLT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; name it by TLT_CHROMIUM")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ATTACK = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
NUM_STEPS = 20
FIND = "name => Bokeh.documents.map(one => one.get_model_by_name(name)).find(Boolean)"


class Opened:
    """A page in the browser, and what it said and asked for while it was open."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())
        page.set_default_timeout(10_000)

    def draw_all(self) -> Opened:
        """Draws also the charts that are not in view."""
        self.page.click("#draw-all")
        self.page.locator("[data-plot]:not([data-drawn])").first.wait_for(state="detached")
        return self

    def values(self, name: str) -> list[list[float]]:
        """Returns x and y of a line, as Bokeh holds them."""
        read = f"name => {{ const {{ x, y }} = ({FIND})(name).data; return [[...x], [...y]]; }}"
        found: list[list[float]] = self.page.evaluate(read, name)
        return found

    @property
    def complaints(self) -> list[str]:
        """Returns what the browser said, but for Bokeh's own notes."""
        return [said for said in self.said if not said.startswith(("log: [bokeh", "info: [bokeh"))]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", NUM_STEPS, text=ATTACK)


@pytest.fixture(scope="module")
def opened(browser: Any, run: Path) -> Opened:
    (run / "report.html").write_text(make_page([run]), encoding="utf-8")
    return Opened(
        browser.new_page(viewport={"width": 1400, "height": 1000}, offline=True), run / "report.html"
    )


def test_charts_are_drawn_when_they_come_into_view(opened: Opened) -> None:
    drawn, page = "[data-plot][data-drawn]", opened.page
    num_first = page.locator(drawn).count()
    assert num_first < page.locator("[data-plot]").count() / 3
    page.locator("#chart-loss").scroll_into_view_if_needed()
    page.locator(f"#chart-loss {drawn}").wait_for()
    assert num_first < page.locator(drawn).count()
    page.evaluate("window.scrollTo(0, 0)")


def test_it_draws_without_an_error_and_asks_for_nothing(opened: Opened) -> None:
    opened.draw_all()
    assert opened.complaints == []
    assert len(opened.asked) == 1
    sizes = opened.page.eval_on_selector_all(
        ".panel:not([hidden]) .plot, .charts .plot",
        "plots => plots.map(plot => plot.getBoundingClientRect()).map(({ width, height }) => [width, height])",
    )
    assert len(sizes) > 20
    assert all(width > 300 and height > 200 for width, height in sizes)


def test_lines_and_tables_hold_the_numbers_of_metrics(opened: Opened, run: Path) -> None:
    records = read_metrics(run / "metrics.jsonl")
    steps = [float(record.step) for record in records]
    lines = {
        "chart-step-seconds|step": "step_seconds",
        "chart-entropy|entropy": "update/entropy",
        "chart-reward|reward, each step": "rewards/mean",
        "chart-accept-length|accept length, each step": "rollout/accept_length",
        "chart-lengths|longest": "rollout/response_tokens/max",
    }
    for name, figure in lines.items():
        assert opened.values(f"data|{name}") == [steps, [record.figures()[figure] for record in records]]
    cells = opened.page.eval_on_selector_all(
        "td[data-figure='rewards/mean']",
        "cells => cells.map(cell => [cell.dataset.at, Number(cell.dataset.value)])",
    )
    expected = [[str(record.step), record.rewards.mean] for record in records]
    assert [cell for cell in cells if cell[0].isdigit()] == expected


def test_a_response_is_text_and_the_table_sorts_and_searches(opened: Opened) -> None:
    page = opened.page
    rows = page.locator("#response-table tbody tr")
    assert rows.count() == 8 * 4  # of eight steps
    rows.first.locator("summary").click()
    assert rows.first.locator("pre").nth(1).inner_text() == f"{ATTACK} {NUM_STEPS}.0"
    assert page.evaluate("window.hacked") is None
    assert page.locator("#response-table img, #response-table script").count() == 0
    page.get_by_role("button", name="tokens").click()
    assert rows.first.locator("td").nth(6).inner_text() == "1"
    page.locator("input[type=search]").fill(f"{NUM_STEPS}.3")
    assert rows.count() == 1
    page.locator("input[type=search]").fill("")


def test_responses_are_filtered_and_seen_by_group(opened: Opened) -> None:
    page, rows = opened.page, opened.page.locator("#response-table tbody tr")
    page.select_option("[name=solved]", "yes")
    assert rows.count() == 8 * 2
    page.select_option("[name=step]", "1")
    assert rows.count() == 2
    page.fill("[name=least]", "3")
    assert rows.count() == 1
    assert page.locator("#response-table td[data-head=tokens]").inner_text() == "4"
    page.fill("[name=least]", "")
    page.select_option("[name=solved]", "")
    page.select_option("[name=view]", "groups")
    assert rows.count() == 1
    rows.locator("summary").click()
    texts = page.locator("#response-table .card pre").all_inner_texts()
    assert texts == [f"{ATTACK} 1.{sample}" for sample in range(4)]
    tops = page.eval_on_selector_all(".card", "all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) < 4  # side by side
    assert page.evaluate("window.hacked") is None
    page.select_option("[name=view]", "responses")
    page.select_option("[name=step]", "")


HOSTILE = (
    "<img src=x onerror='window.hacked=1'>",
    "<script>window.hacked=1</script>",
    "$$\\alpha$$ \\(x\\)",
    "@{x}{safe} $x @y",
    "'\" onmouseover=window.hacked=1 x='",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_runs_files_becomes_markup(browser: Any, tmp_path: Path, text: str) -> None:
    """In a label, a tooltip, a name of a figure, a key, a table, a note or a response."""
    folders = [make_hostile(tmp_path / f"{number}{text.replace('/', '⁄')}", text) for number in range(2)]
    (tmp_path / "report.html").write_text(make_page(folders), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, offline=True)
    opened = Opened(page, tmp_path / "report.html").draw_all()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    for chart in page.locator("figure.chart:visible").all():
        chart.locator(".plot").scroll_into_view_if_needed()
        box = chart.locator(".plot").bounding_box()
        for share in (0.2, 0.4, 0.6, 0.8):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.6 * box["height"])
    page.wait_for_timeout(100)
    inside = """() => {
        const found = [], visit = root => root.querySelectorAll("*").forEach(one => {
            if (one.localName === "img" || one.onerror || one.onmouseover || one.hasAttribute("onmouseover")
                || (one.localName === "script" && one.textContent.startsWith("window.hacked"))) found.push(one.outerHTML);
            if (one.shadowRoot) visit(one.shadowRoot);
        });
        visit(document);
        return found;
    }"""
    assert page.evaluate(inside) == []
    assert page.evaluate("window.hacked") is None
    assert opened.complaints == []
    assert len(opened.asked) == 1
    page.close()


def test_tokens_are_coloured_as_their_drafts_were_recorded(browser: Any, tmp_path: Path) -> None:
    run = make_coloured(tmp_path / "run")
    kept = json.loads((run / "responses" / "rollout-00000001.jsonl").read_text("utf-8"))
    (run / "report.html").write_text(make_page([run]), encoding="utf-8")
    opened = Opened(browser.new_page(offline=True), run / "report.html")
    page = opened.page
    assert page.locator("#drafters").is_visible()
    page.locator("#response-table summary").click()
    page.locator("#response-table .token").first.wait_for()
    read = """tokens => tokens.map(({ textContent, dataset, title }) =>
        [textContent, dataset.drafter, dataset.rejected ?? null, title])"""
    tokens = page.eval_on_selector_all("#response-table .token", read)
    assert len(tokens) == len(kept["token_ids"])
    assert "".join(text for text, *_ in tokens) == kept["text"]
    expected = [""] * len(tokens)
    for place, drafter, _, accepted, _ in DRAFTS:
        expected[place : place + accepted] = [drafter] * accepted
    assert [drafter for _, drafter, *_ in tokens] == expected
    rejected = {index: int(num) for index, (_, _, num, _) in enumerate(tokens) if num is not None}
    assert rejected == {
        place + accepted: drafted - accepted for place, _, drafted, accepted, token in DRAFTS if token
    }
    assert (
        tokens[2][3]
        == 'token 3: not drafted; rejected here: 2 of 4 tokens of the learned drafter, the first "7"'
    )
    backgrounds = page.eval_on_selector_all(
        "#drafters .token", "all => all.map(one => getComputedStyle(one).background)"
    )
    assert len(set(backgrounds)) == 4
    assert [said for said in opened.said if said.startswith(("error", "warning"))] == []


def test_a_conversation_tells_model_and_environment_apart(browser: Any, tmp_path: Path) -> None:
    run = make_conversation(tmp_path / "run")
    (run / "report.html").write_text(make_page([run]), encoding="utf-8")
    opened = Opened(browser.new_page(offline=True), run / "report.html")
    page = opened.page
    page.locator("#response-table summary").click()
    page.locator("#response-table .turn").first.wait_for()
    turns = page.eval_on_selector_all(
        "#response-table .turn",
        "all => all.map(one => [one.dataset.by, one.querySelector('pre').textContent])",
    )
    assert turns == [
        ["model", "12+34="],
        ["tool", "46"],
        ["model", "7*8="],
        ["error", '{"error": "no"}'],
        ["model", "56"],
    ]
    drafters = page.eval_on_selector_all(
        "#response-table .token", "all => all.map(one => one.dataset.drafter)"
    )
    assert drafters == ["learned"] * 3 + [""] + ["ahead"] * 2 + ["ngram"] + [""] * 3 + ["ngram"] * 2 + [""]
    assert page.locator("#drafters").is_visible()
    left, right = (
        page.locator(f"#response-table .turn[data-by={by}]").first.bounding_box()["x"]
        for by in ("model", "tool")
    )
    assert left + 20 < right
    assert page.locator("#response-table td[data-head=turns]").inner_text() == "3"
    assert [said for said in opened.said if said.startswith(("error", "warning"))] == []
