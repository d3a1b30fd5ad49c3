"""The page of a prediction: whole in itself, and what a browser shows is what the JSON says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy.result import Memory
from featherweight.errors import MissingExtraError
from featherweight.report import memory_tables as tables
from featherweight.report.memory_page import COLORS, page, plotly_js, write_page

GIB = 2**30
# What the plot was given, written where a dump of the page shows it.
PROBE = """<script>
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify(document.getElementById("plot").data.map(
  function (trace) { return {name: trace.name, x: trace.x, y: trace.y}; }));
document.body.append(probe);
</script></body>"""


@pytest.fixture(scope="module")
def found() -> Memory:
    """A step of training of a small BERT on a GPU, with a name that is no HTML."""
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "_name_or_path": "</script><b>&\u2028$x",
        "vocab_size": 3000,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "dtype": "float32",
    }
    return fw.memory(config, "fp32+eager", train=True, batch_size=8, seq_len=128, gpu="t4")


class Reader(HTMLParser):
    """Text by id, rows of tables, and the parts of a plot."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.classes: list[str] = []
        self.legend: list[str] = []
        self.texts: list[str] = []
        self._open: list[tuple[str, str, str]] = []  # of elements that have text of their own

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.classes.append(f"{tag} {given.get('class', '')}")
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag in ("p", "td", "text", "script", "span", "pre", "title"):
            self._open.append((tag, given.get("id", ""), given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, name, kind = self._open[-1]
        if name:
            self.ids[name] = self.ids.get(name, "") + data
        if any(tag == "td" for tag, *_ in self._open):
            self.rows[-1][-1] += data
        if tag == "text":
            (self.legend if "legendtext" in kind else self.texts).append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def shown(found: Memory, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """The page after Chromium has run its scripts, with no network."""
    pytest.importorskip("plotly")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium to show the page in")
    folder = tmp_path_factory.mktemp("page")
    written = folder / "memory.html"
    written.write_text(page(found).replace("</body>", PROBE), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--window-size=1200,1600", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*command, written.as_uri()], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def used(found: Memory) -> list[str]:
    return [name for name in COLORS if any(m.categories.get(name) for m in found.timeline)]


def test_the_json_in_the_page_is_the_result(shown: Reader, found: Memory) -> None:
    assert Memory.from_json(json.loads(shown.ids["memory"])) == found


def test_the_headline_is_what_the_json_says(shown: Reader) -> None:
    document = json.loads(shown.ids["memory"])
    assert shown.ids["process"] == tables.amount(document["peak"]["process"])
    assert shown.ids["allocated"] == tables.amount(document["peak"]["allocated"])
    assert "nvidia-smi" in shown.ids["seen"]


def test_the_tables_show_what_the_json_says(shown: Reader) -> None:
    document = json.loads(shown.ids["memory"])
    cells = [row[:2] for row in shown.rows]
    for name, nbytes in (document["categories"] | document["phases"]).items():
        assert [name, tables.amount(nbytes)] in cells
    holders = [row for row in shown.rows if len(row) == 5]
    assert len(holders) == min(25, len(document["holders"]))
    for row, holder in zip(holders, document["holders"], strict=False):
        assert row[1:] == [
            holder["operation"] or "–",
            holder["category"],
            tables.amount(holder["nbytes"]),
            f"{holder['count']:,}",
        ]


def test_the_plot_is_drawn_with_an_area_for_each_category(shown: Reader, found: Memory) -> None:
    drawn = [name for name in shown.classes if name.startswith("g trace scatter")]
    assert len(drawn) == len(used(found)) + 1  # and the outline
    assert shown.legend == used(found)
    assert f"peak {tables.amount(found.peak.allocated)}" in shown.texts
    assert {"forward", "backward"} <= set(shown.texts)


def test_the_plot_is_given_the_timeline(shown: Reader, found: Memory) -> None:
    *areas, outline = json.loads(shown.ids["probe"])
    unit = GIB if found.peak.allocated >= GIB else 2**20
    for area in areas:
        expected = [moment.categories.get(area["name"], 0) / unit for moment in found.timeline]
        assert area["y"] == pytest.approx(expected)
        assert area["x"] == [moment.event for moment in found.timeline]
    assert outline["y"] == pytest.approx([moment.allocated / unit for moment in found.timeline])
    sums = [sum(values) for values in zip(*(area["y"] for area in areas), strict=True)]
    assert sums == pytest.approx(outline["y"])
    assert max(outline["y"]) * unit == pytest.approx(found.peak.allocated)


def test_the_page_asks_for_nothing(found: Memory) -> None:
    pytest.importorskip("plotly")
    own = page(found).replace(plotly_js(), "")
    assert "src=" not in own
    assert "href=" not in own
    assert "http" not in own
    assert "url(" not in own


def test_names_are_text(found: Memory) -> None:
    pytest.importorskip("plotly")
    own = page(found).replace(plotly_js(), "")
    assert "<b>&\u2028" not in own
    assert own.count("</script>") == 4  # two of data, two of code
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in own


def test_what_does_not_fit_is_marked(found: Memory) -> None:
    pytest.importorskip("plotly")
    over = replace(found, peak=replace(found.peak, process=30 * GIB))
    assert '<i class="limit" style="left:50.000%"></i>' in page(over)
    assert 'class="warn" id="seen"' in page(over)
    assert 'class="limit"' not in page(found)


def test_every_category_has_a_colour_of_its_own() -> None:
    assert len(set(COLORS.values())) == len(COLORS)


def test_a_page_is_written_whole_or_not_at_all(found: Memory, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    written = tmp_path / "memory.html"
    write_page(written, found)
    assert written.read_text("utf-8") == page(found)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_page(tmp_path / "folder.html", found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "memory.html"]


def test_without_plotly_the_extra_is_named(found: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'featherweight\[html\]'"):
        page(found)
