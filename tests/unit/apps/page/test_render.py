"""The page holds the runs' numbers, nothing of a response is markup, and it stays small."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.unit.apps.page.synthetic import make_conversation, make_run, response
from tlt.apps.page import settings, summary
from tlt.apps.page.gather import WAIT_SHARE, read_run, read_runs
from tlt.apps.page.render import in_script, make_page
from tlt.apps.page.response_sample import MAX_RESPONSES, show_responses
from tlt.apps.page.shapes import mean_interval
from tlt.apps.page.tokens import MAX_CHARACTERS
from tlt.base.io.files import write_jsonl
from tlt.base.types import UserError
from tlt.training.report.step_record import read_metrics


class Page(HTMLParser):
    """The cells of a page's tables, by figure and place, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: dict[tuple[str, str], float] = {}
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if value := found.get("data-value"):
            self.values[found["data-figure"] or "", found["data-at"] or ""] = float(value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", text="</script><script>alert(1)</script><!--")


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    return make_page([run])


def test_the_pages_numbers_are_those_of_metrics(run: Path, text: str) -> None:
    values = Page(text).values
    records = read_metrics(run / "metrics.jsonl")
    for record in records:
        figures = record.figures()
        for name in summary.PRINCIPAL:
            assert values[name, str(record.step)] == figures[name]
    by_step = [record.figures()["rollout/response_tokens/max"] for record in records]
    name = "rollout/response_tokens/max"
    assert values[name, "mean"] == pytest.approx(sum(by_step) / len(by_step))
    assert (values[name, "first"], values[name, "highest"]) == (by_step[0], max(by_step))
    assert {name for name, _ in values} == set(records[0].figures())
    assert "0.2000 → 0.5000, means of the first and last 3 steps" in text  # rewards 0.1 to 0.6


def test_a_response_with_markup_is_text_and_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    assert page.tags.count("script") == 4  # responses, charts, library, the page's own
    assert "</script><script>alert" not in text
    assert all(source.startswith("#") for source in page.sources)
    assert re.match("default-src 'none'; script-src 'nonce-[A-Za-z0-9_-]{20,}'; ", page.policy)
    assert "connect-src 'none'" in page.policy
    data = re.search(r'id="response-data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["text"].startswith("</script><script>alert(1)</script><!-- ")


def test_json_in_a_script_holds_no_character_that_could_end_it() -> None:
    assert re.search("[<>&\u2028\u2029]", in_script(value := {"a": "</script>&\u2028<!--"})) is None
    assert json.loads(in_script(value)) == value


def test_two_runs_lie_over_each_other_and_their_differences_are_a_table(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", num_steps=4)
    text = make_page([run, other])
    values = Page(text).values
    assert values["rollout/accept_length", "difference"] == 0.0
    assert "Means over the 4 steps that both runs have." in text
    assert "The runs have different tasks" not in text
    assert "run: reward" in text
    assert "other: reward" in text


def test_what_is_left_out_of_the_responses_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=30)
    long = [response(30, sample, "x" * 10_000) for sample in range(1000)]
    write_jsonl(folder / "responses" / "rollout-00000030.jsonl", long)
    shown, (note,) = show_responses([read_run(folder, "run")])
    assert len(shown) <= MAX_RESPONSES
    assert max(len(one["text"]) for one in shown) < MAX_CHARACTERS + 50
    assert "[… 8,000 characters …]" in shown[-1]["text"]
    assert note.startswith(f"run: {len(shown)} of 1028 responses of 8 of 30 steps and evaluations")
    assert "tokenizer is not at hand" in note


def test_a_run_without_timeline_responses_or_steps_is_shown_and_says_what_is_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "bare", num_steps=3)
    for path in [*folder.glob("timeline*"), *folder.glob("responses/*")]:
        path.unlink()
    text = make_page([folder])
    assert "bare has no timeline files" in text
    assert "bare has kept no responses" in text
    (folder / "metrics.jsonl").write_text("")
    (folder / "failures.log").write_text("attempt 1: rank 0 failed <b>\n")
    text = make_page([folder])
    assert "bare has done no step yet" in text
    assert "rank 0 failed &lt;b&gt;" in text


def test_a_folder_without_a_run_and_a_broken_configuration_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no metrics.jsonl; give the folder of a run"):
        read_run(tmp_path, "run")
    folder = make_run(tmp_path / "run")
    (folder / "config.json").write_text("[")
    with pytest.raises(UserError, match=r"config.json: cannot be read"):
        read_run(folder, "run")


def test_the_page_tells_configuration_versions_and_machine(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    config = {"optimizer": {"learning_rate": 3e-5, "warmup_steps": 0}, "sampling": {"temperature": 0.7}}
    (folder / "config.json").write_text(json.dumps(config))
    first = {"began": 1.0, "commit": "abc", "torch": "2.12.0", "cpu": "one <b>", "ranks": 2}
    write_jsonl(folder / "environment.jsonl", [first, first | {"commit": "def", "began": 2.0}])
    (run,) = read_runs([folder])
    changed = {key: [cell.text for cell in cells] for key, cells in settings.changed_keys([run]).rows}
    assert changed == {
        "optimizer.learning_rate": ["3e-05", "1e-06"],
        "sampling.temperature": ["0.7", "1.0"],
    }
    assert [key for key, _ in settings.default_keys([run]).rows] == ["optimizer.warmup_steps"]
    machines = settings.machines([run])
    assert machines is not None
    assert {name: cells[0].text for name, cells in machines.rows} == {
        "commit": "abc → def",
        "torch": "2.12.0",
        "cpu": "one <b>",
        "ranks": "2",
    }
    text = make_page([folder])
    assert "one &lt;b&gt;" in text
    assert text.index("2 keys that differ from TLT's defaults") < text.index("1 keys at their defaults")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0] * 10, (0.0, 0.0, 0.2775)),  # Wilson's interval of 0 of 10, 5 of 10 and 10 of 10
        ([1.0] * 10, (1.0, 0.7225, 1.0)),
        ([0.0, 1.0] * 5, (0.5, 0.2366, 0.7634)),
        ([0.0] * 49 + [1.0], (0.02, 0.0035, 0.1050)),
        ([0.5] * 4, (0.5, 0.15, 0.85)),
    ],
)
def test_the_interval_of_a_share_is_wilsons(
    values: list[float], expected: tuple[float, float, float]
) -> None:
    assert mean_interval(np.array(values), is_share=True) == pytest.approx(expected, abs=1e-3)


def test_the_interval_of_few_values_is_students() -> None:
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), is_share=False)
    half = 2.776 * (2.5 / 5) ** 0.5  # the 97.5 % quantile of 4 degrees of freedom
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), abs=0.01)


def test_turns_have_a_section_where_responses_have_several(text: str, tmp_path: Path) -> None:
    page = make_page([make_conversation(tmp_path / "run")])
    for key in ("turns", "calls", "tool-seconds", "waiting", "turn-drafts"):
        assert f'id="chart-{key}"' in page
    run = read_run(tmp_path / "run", "run")
    assert run.values(WAIT_SHARE) == pytest.approx([1.2 / (4 * 6.0)] * 2)
    assert 'id="chart-calls"' not in text


def test_an_environment_that_is_not_deterministic_is_told(text: str, tmp_path: Path) -> None:
    told = "another run with its seed, with speculation or without, may have other tokens"
    folder = make_run(tmp_path / "run", num_steps=1)
    config = json.loads((folder / "config.json").read_text()) | {"environment": {"deterministic": False}}
    (folder / "config.json").write_text(json.dumps(config))
    assert told in make_page([folder])
    assert told not in text
