"""The live page in a real browser: what headless Chromium makes of page.html and of the JSON of a
simulated run.

Owns a small server that plays /cache as docs/inspecting.md describes it, and how a rendered page is
read. The oracle is the
snapshot: every page, request and explanation in it must be found in the drawing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.inspect import MAX_PAGES, inspect
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepResult
from tests.cache.drive import gemma_layout, make_request

PAGE = Path(__file__).parents[2] / "octavo" / "server" / "page.html"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1280,900",
)
EVIL = "<img src=x onerror=\"document.title='owned'\">"
KEY = "let-me-in"
# A page that logs in as a reader would, by what the login form leaves behind.
DOOR = (
    f"<!doctype html><script>sessionStorage.setItem('octavo-key', '{KEY}');"
    " location.replace('/')</script>"
)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")


class Served:
    """A scheduler without a model: one shared prompt, then requests in all states. One more step
    whenever it is asked.
    """

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            gemma_layout(arena_bytes=64 << 20), max_num_batched_tokens=1024, max_num_seqs=3
        )
        self.requests = [make_request("first", range(900), max_tokens=2)]
        self.scheduler.add(self.requests[0])
        while self.scheduler.has_work:
            self.step()
        later = [
            ("branch", [*range(600), *range(5000, 5200)]),
            (EVIL, [*range(900), 1, 2, 3]),
            ("new", range(7000, 7300)),
        ]
        for name, tokens in [*later, ("last", range(8000, 8100))]:
            self.requests.append(make_request(name, tokens, max_tokens=5000))
            self.scheduler.add(self.requests[-1])
        for _ in range(3):
            self.step()
        # A request that ends while a step is in flight leaves its pages in limbo.
        self.plan = self.scheduler.schedule()
        self.scheduler.abort("new")

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        names = [
            name
            for name, samples in zip(plan.request_ids, plan.samples.tolist(), strict=True)
            if samples
        ]
        self.scheduler.commit(StepResult(step=plan.step, tokens=dict.fromkeys(names, 7)))

    def data(self, *, max_pages: int = MAX_PAGES) -> dict[str, Any]:
        """What GET /cache says."""
        cache = inspect(self.scheduler.cache, max_pages=max_pages)
        held = {request.request_id: vars(request) for request in cache.requests}
        explanations = {
            request.request_id: self.scheduler.explain(request.request_id)
            for request in self.requests
        }
        data = {
            "model": "toy",
            "uptime_seconds": 75.0,
            "stats": {
                "running": self.scheduler.num_running,
                "waiting": self.scheduler.num_waiting,
                "prompt_tokens": 2000,
                "cached_tokens": 500,
                "generated_tokens": 3000,
                "preemptions": 0,
                "finished": 1,
            },
            "cache": cache,
            "requests": [
                {
                    "request_id": one.request_id,
                    "tokens": one.num_tokens,
                    **held.get(one.request_id, {}),
                    "state": one.state,
                    "priority": one.priority,
                }
                for one in self.requests
                if not one.finished
            ],
            "explanations": [
                {"request_id": name, **vars(why)}
                for name, why in reversed(explanations.items())
                if why
            ],
        }
        return json.loads(json.dumps(data, default=vars))


@dataclass
class Answers:
    """What the small server says to GET /cache, and what it was asked. good: answers before it
    breaks.
    """

    data: dict[str, Any]
    key: str | None = None
    good: int = 10**9
    paths: list[str] = field(default_factory=list)

    def to(self, path: str, authorization: str | None) -> tuple[int, str, str]:
        """Status, type and body."""
        self.paths.append(path)
        if path in ("/", "/door"):
            return 200, "text/html; charset=utf-8", PAGE.read_text() if path == "/" else DOOR
        if path != "/cache":
            return 404, "text/plain", ""
        if self.key and authorization != f"Bearer {self.key}":
            return 401, "application/json", "{}"
        self.good -= 1
        self.data["uptime_seconds"] += 1.0
        self.data["stats"]["generated_tokens"] += 40
        return (
            (200, "application/json", json.dumps(self.data))
            if self.good >= 0
            else (500, "text/plain", "")
        )


@contextmanager
def serve(answers: Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, text = answers.to(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Node:
    """An element of the rendered page."""

    tag: str
    given: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return self.given.get("class", "").split()

    def all(self, tag: str) -> list[Node]:
        """Every element of that name below this one, in order."""
        inner = [child for child in self.children if isinstance(child, Node)]
        return [
            found
            for child in inner
            for found in ([child] if child.tag == tag else []) + child.all(tag)
        ]

    def find(self, name: str) -> Node:
        """The element with that id."""
        (found,) = [node for tag in TAGS for node in self.all(tag) if node.given.get("id") == name]
        return found


TAGS = ("div", "p", "form", "span", "ul", "ol", "tbody", "svg")
VOID = frozenset({"meta", "link", "input", "img", "br"})


class Tree(HTMLParser):
    """Parses what the browser dumped."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Node("root", {})
        self.path = [self.root]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.path[-1].children.append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().tag == tag, tag

    def handle_data(self, data: str) -> None:
        self.path[-1].children.append(data)


def render(answers: Answers, tmp_path: Path, *, start: str = "/", seconds: int = 4) -> Node:
    """The page as it stands after some virtual seconds. The browser must not have complained about
    its script.
    """
    assert BROWSER is not None
    with serve(answers) as url:
        done = subprocess.run(
            [
                BROWSER,
                *FLAGS,
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--virtual-time-budget={seconds * 1000}",
                "--dump-dom",
                url + start,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert "Uncaught" not in done.stderr and "Content Security Policy" not in done.stderr, (
        done.stderr
    )
    assert set(answers.paths) <= {"/", "/cache", start}, "the page loads nothing else"
    return Tree(done.stdout).root


def widths(path: str) -> list[float]:
    """Widths of the boxes of a path."""
    return [float(width) for width in re.findall(r"M[^h]*h([\d.]+)", path)]


def check_arena(page: Node, cache: dict[str, Any]) -> None:
    """Every slab is drawn, and every page in its group's and state's path."""
    (svg,) = page.find("arena").all("svg")
    paths = [node for node in svg.all("path") if node.classes]
    drawn = {
        (path.classes[0], path.given.get("data-group")): path.given["d"].count("M")
        for path in paths
    }
    assert svg.given["data-slabs"] == str(cache["arena"]["num_slabs"])
    assert drawn.pop(("slab-free", None), 0) == cache["arena"]["free_slabs"]
    assert (
        drawn.pop(("slab-used", None)) == cache["arena"]["num_slabs"] - cache["arena"]["free_slabs"]
    )
    assert drawn.pop(("page-free", None), 0) == sum(bucket["free"] for bucket in cache["buckets"])
    pages = {
        (state, str(group["index"])): group[state]
        for group in cache["groups"]
        for state in ("held", "cached", "limbo")
    }
    assert drawn == {key: number for key, number in pages.items() if number}
    assert {state for state, _ in drawn} == {
        "held",
        "cached",
        "limbo",
    }, "the run must show every state"


def check_tables(page: Node, data: dict[str, Any]) -> None:
    """Groups, requests and explanations are there, word for word."""
    groups = data["cache"]["groups"]
    for row, group in zip(page.find("groups").all("tr"), groups, strict=True):
        assert group["law"] in row.all("th")[0].text
        numbers = [str(cell.children[-2]) for cell in row.all("td")[2:]]
        assert numbers == [str(group[state]) for state in ("held", "cached", "limbo")]
    rows = {row.all("th")[0].all("div")[0].text: row for row in page.find("requests").all("tr")}
    assert set(rows) == {request["request_id"] for request in data["requests"]} and EVIL in rows
    for request in data["requests"]:
        row, held = rows[request["request_id"]], request.get("groups", ())
        assert request["state"] in row.text and f"of {request['tokens']:,}" in row.text
        bars = [node for node in row.all("div") if "bar" in node.classes]
        assert len(bars) == bool(held)
        for one in held:
            assert (
                f"{groups[one['group']]['law']}: {one['pages']} page" in bars[0].given["aria-label"]
            )
    for item, why in zip(page.find("hits").all("li"), data["explanations"], strict=True):
        assert why["request_id"] in item.text and why["reason"].lower() in item.text.lower()
        assert f"{why['hit_tokens']:,} of {why['prompt_tokens']:,} tokens" in item.text


@needs_browser
def test_the_page_draws_what_the_snapshot_says(tmp_path: Path) -> None:
    answers = Answers(Served().data())
    page = render(answers, tmp_path)
    check_arena(page, answers.data["cache"])
    check_tables(page, answers.data)
    assert answers.paths.count("/cache") >= 3, "it asks again and again"
    assert page.all("title")[0].text == "toy – octavo" and not page.all("img"), (
        "names are text, whatever they contain"
    )
    assert "hidden" not in page.find("view").given and {"hidden"} <= set(page.find("alert").given)
    tiles = [tile.all("b")[0].text for tile in page.find("tiles").all("li")]
    assert tiles[:3] == [
        str(answers.data["stats"]["running"]),
        str(answers.data["stats"]["waiting"]),
        "40",
    ]
    assert len(page.find("memory").all("path")) >= 3
    assert page.find("status").text.startswith("live, up 1 min")


@needs_browser
def test_large_arenas_are_drawn_from_counts_per_slab(tmp_path: Path) -> None:
    answers = Answers(Served().data(max_pages=0))
    cache = answers.data["cache"]
    assert cache["slabs"]["detail"] == "counts"
    (svg,) = render(answers, tmp_path).find("arena").all("svg")
    (used,) = [path.given["d"] for path in svg.all("path") if path.classes == ["slab-used"]]
    slab = widths(used)[0]
    parts = [path for path in svg.all("path") if "data-group" in path.given]
    drawn = {
        (path.classes[0], int(path.given["data-group"])): sum(widths(path.given["d"]))
        for path in parts
    }
    share = {
        (state, group["index"]): group[state] * group["page_bytes"] / cache["arena"]["slab_bytes"]
        for group in cache["groups"]
        for state in ("held", "cached", "limbo")
        if group[state]
    }
    assert drawn == {key: pytest.approx(slab * part, rel=0.02) for key, part in share.items()}, (
        "widths are bytes"
    )


@needs_browser
def test_a_locked_server_asks_for_its_key_and_takes_it(tmp_path: Path) -> None:
    locked = render(Answers(Served().data(), key=KEY), tmp_path / "out")
    assert "hidden" not in locked.find("login").given and "hidden" in locked.find("view").given
    assert locked.find("status").text == "locked"
    opened = render(Answers(Served().data(), key=KEY), tmp_path / "in", start="/door")
    assert "hidden" in opened.find("login").given and "hidden" not in opened.find("view").given
    assert opened.find("status").text.startswith("live")


@needs_browser
def test_a_server_that_is_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    page = render(Answers(Served().data(), good=2), tmp_path, seconds=6)
    assert page.find("status").text == "no connection" and page.find("status").classes == ["gone"]
    assert "hidden" not in page.find("alert").given and "it answers 500" in page.find("alert").text
    assert "from before" in page.find("alert").text and "stale" in page.find("view").classes
    assert page.find("requests").all("tr"), "what was last known stays"


def test_the_page_is_one_file_that_enters_text_as_text() -> None:
    text = PAGE.read_text()
    code = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|//cdn|@import|<script src|stylesheet", code)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code)
    assert "default-src 'none'" in text
