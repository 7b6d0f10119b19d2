"""The site builds without a warning, and every link in it leads somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.commands import PAGES, ROOT

pytest.importorskip("furo", reason="the documentation needs requirements-docs.txt")
pytest.importorskip("myst_parser", reason="the documentation needs requirements-docs.txt")

# Nobody looks outside while tests run; a link has to lead to one of these, and to be well formed.
HOSTS = {
    "arxiv.org": r"/abs/\d{4}\.\d{5}",
    "pytorch.org": r"/memory_viz",
    "ui.perfetto.dev": r"/?",
    "keepachangelog.com": r"/en/[\d.]+/",
    "semver.org": r"/spec/v[\d.]+\.html",
    # The theme's own, at the foot of each page.
    "www.sphinx-doc.org": r"/?",
    "pradyunsg.me": r"",
    "github.com": r"/pradyunsg/furo",
}


class Page(HTMLParser):
    """What a page links to and loads, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])
        elif tag in ("script", "img", "source", "iframe") and found.get("src"):
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Pages of the site by their path, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    command += ["-d", str(folder / "trees"), str(ROOT / "docs"), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    html = folder / "html"
    pages = {str(path.relative_to(html)): Page(path.read_text()) for path in html.rglob("*.html")}
    return html, pages


def test_every_page_is_there(site):
    _, pages = site
    for path in (ROOT / "docs").glob("*.md"):
        assert f"{path.stem}.html" in pages


def test_links_within_the_site_lead_to_a_page_and_to_an_anchor_on_it(site):
    folder, pages = site
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = str(PurePosixPath(name).parent / unquote(parts.path)) if parts.path else name
            assert (folder / target).exists(), f"{name}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{name}: {link}"


def test_links_to_elsewhere_are_well_formed_and_few(site):
    _, pages = site
    links = {link for page in pages.values() for link in page.links if urlsplit(link).scheme}
    markdown = "\n".join(path.read_text() for path in [*PAGES, ROOT / "CHANGELOG.md"])
    links |= set(re.findall(r"\]\((https?:[^)]*)\)", markdown))
    assert any("arxiv.org" in link for link in links)
    for link in links:
        parts = urlsplit(link)
        assert parts.scheme == "https" and parts.hostname in HOSTS, link
        assert re.fullmatch(HOSTS[parts.hostname], parts.path), link


def test_pages_load_nothing_from_elsewhere(site):
    folder, pages = site
    for name, page in pages.items():
        for link in page.loads:
            parts = urlsplit(link)
            assert not parts.netloc and parts.scheme in ("", "data"), f"{name}: {link}"
            if not parts.scheme:
                assert (folder / PurePosixPath(name).parent / parts.path).exists(), (
                    f"{name}: {link}"
                )


def test_files_that_pages_name_are_in_the_repo():
    """Paths in code within sentences, such as `megatron_memo/cli.py`."""
    folders = "megatron_memo|scripts|configs|docs|tests|benchmarks|patches"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_figures_are_there_in_light_and_in_dark_or_not_at_all(site):
    """They are drawn by benchmarks/figures.py; a page without them is whole."""
    folder, _ = site
    drawn = {path.stem for path in (ROOT / "docs" / "figures").glob("*-*.*")}
    for page in (ROOT / "docs").glob("*.md"):
        html = (folder / f"{page.stem}.html").read_text()
        for kind in re.findall(r"\{memo-figure\} (\w+)", page.read_text()):
            variants = {f"{kind}-{theme}" for theme in ("light", "dark")}
            assert not drawn or variants <= drawn, kind
            for name in variants & drawn:
                assert f"_images/{name}." in html, name
