"""Links between the markdown files of the repository lead somewhere, and every page is in the site's contents."""

import ast
from pathlib import Path

import pytest

from tests.documentation.markdown import anchors, broken, links

ROOT = Path(__file__).parents[2]
SKIPPED = ("node_modules", ".venv", "build", "smollm2")
PAGES = sorted(path for path in ROOT.rglob("*.md") if not set(SKIPPED) & set(path.relative_to(ROOT).parts))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_there_are_links() -> None:
    assert sum(len(links(page.read_text())) for page in PAGES) > 100


@pytest.mark.parametrize("link", ["[x](no.md)", "[x](#no)", "[x](test.md#no)", '<img src="no.svg">', "![x](no.png)"])
def test_a_broken_link_is_seen(link: str, tmp_path: Path) -> None:
    page = tmp_path / "test.md"
    page.write_text(f"# Yes\n\n[y](#yes) [y](test.md#yes) {link}\n")
    assert len(list(broken(page, page.read_text()))) == 1


def test_anchors_are_githubs() -> None:
    text = "# A `b`, c's\n## A `b`, c's\n```\n# no\n```\n### [x](y) -- z\n"
    assert anchors(text) == {"a-b-cs", "a-b-cs-1", "x----z"}


def test_every_page_is_in_the_contents() -> None:
    """Of the index, and of the site."""
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {Path(link).stem for link in links((ROOT / "docs/index.md").read_text())} - {"README"} == names
    tree = ast.parse((ROOT / "documentation/conf.py").read_text())
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "PAGES"
    ]
    assert sorted(page for pages in ast.literal_eval(value).values() for page in pages) == sorted(names)
