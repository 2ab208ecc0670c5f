"""Nothing that the project has is missing from the documentation's site, and no page of it says what is not so."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import typer.main
from zerosim_site import pages
from zerosim_site.notebook_pages import notebook_page
from zerosim_site.page import Page
from zerosim_site.readme_pages import document_pages

from tests.architecture.source import ROOT
from tests.documentation.reader import imported_by_readers, is_described, notebook_files, public, resolved
from zerosim.cli import app
from zerosim.course import figures

PACKAGES = ["zerosim", "zerosim.ranks", "zerosim.zero", "zerosim.models", "zerosim.optim", "zerosim.planning",
            "zerosim.course.museum", "zerosim.course.puzzles", "zerosim.course.figures"]
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n?)*)", re.M)
MEMBER = re.compile(r"^ {8}- (\w+)$", re.M)
ANCHOR = re.compile(r"^## .*\{ #([\w.]+) ", re.M)


def undrawn(text: str) -> str:
    """Formulas stay as they are written."""
    return text


@pytest.fixture(scope="module")
def site() -> dict[str, Page]:
    """The pages by their place."""
    return {page.uri: page for page in pages.finished(undrawn, "ada")}


@pytest.fixture(scope="module")
def documented(site) -> set[str]:
    """Every name that the reference describes."""
    found = set()
    for page in site.values():
        if page.section == "Reference":
            found |= set(ANCHOR.findall(page.text))
            for name, options in DIRECTIVE.findall(page.text):
                found |= {name, *(f"{name}.{member}" for member in MEMBER.findall(options))}
    return found


def in_navigation(nav) -> list[str]:
    """The pages that a navigation leads to."""
    return [nav] if isinstance(nav, str) else [uri for part in (nav.values() if isinstance(nav, dict) else nav)
                                               for uri in in_navigation(part)]


def test_every_page_stands_in_the_navigation_once(site):
    assert Counter(in_navigation(pages.navigation(list(site.values())))) == Counter(list(site))


def test_every_notebook_has_a_page_in_order_and_its_copies_lie_beside_it(site):
    everywhere = in_navigation(pages.navigation(list(site.values())))
    index, *listed = [Path(uri).stem for uri in everywhere if uri.startswith("notebooks/")]
    numbered = sorted(path.stem for path in notebook_files() if path.name[0].isdigit())
    assert (index, listed[:len(numbered)]) == ("index", numbered)
    for path in notebook_files():
        assert site[f"notebooks/{path.stem}.md"].section == "Notebooks"
        assert {f"notebooks/{path.name}", f"notebooks/texts/{path.stem}.py"} <= pages.copies().keys()


def test_a_notebooks_page_has_its_words_its_code_its_output_and_its_picture(site):
    text = site["notebooks/04_rings.md"].text
    assert "```python\nimport numpy as np" in text
    assert 'rank 0: [2050.0, 2048.0, 2048.0]\n' in text
    drawn = re.findall(r"!\[(.+)\]\((04_rings_files/[^)]+\.png)\)", text)
    assert [words for words, _ in drawn if "N = 4" in words or "4 ranks" in words]
    assert {f"notebooks/{name}" for _, name in drawn} <= pages.drawn().keys()


def test_every_figure_is_in_the_gallery_and_the_first_screen_shows_memory_and_the_page_that_moves(site):
    committed = {path.stem for path in (ROOT / "figures").glob("*.svg") if not path.stem.endswith("-dark")}
    gallery = site["figures/index.md"].text
    assert committed >= figures.FIGURES.keys()
    for name in committed:
        assert f"]({name}.svg#only-light)" in gallery
        assert f"]({name}-dark.svg#only-dark)" in gallery
    for name in ("memory.svg", "memory-dark.svg"):
        assert f"](figures/{name}#only-" in site["index.md"].text
    assert '<iframe class="explore" src="assets/explore.html"' in site["index.md"].text


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_stands_in_the_reference_and_those_of_zs_in_its_table(package, documented, site):
    assert [name for name, value in public(package) if not is_described(name, value, documented)] == []
    table = site["reference/index.md"].text
    assert package != "zerosim" or [name for name, _ in public(package) if f"[`zs.{name}`](" not in table] == []


def test_what_readers_import_from_a_floor_stands_in_the_reference(documented):
    wanted = imported_by_readers()
    assert ("zerosim.numerics.loss_scale", "Dynamic") in wanted
    values = {(module, name): resolved(f"{module}.{name}") for module, name in wanted}
    assert [key for key, value in values.items() if not is_described(key[1], value, documented)] == []


def test_every_command_and_every_option_is_in_the_reference_of_commands(site):
    text, group = site["commands.md"].text, typer.main.get_command(app)
    assert len(group.commands) >= 12
    for name, command in group.commands.items():
        _, _, told = text.partition(f"\n## {name} ")
        told = told.partition("\n## ")[0]
        assert told, name
        for parameter in command.params:
            is_shown = parameter.param_type_name == "option" and not parameter.hidden
            for option in parameter.opts if is_shown else ():
                assert f"`{option}`" in told or f"`{option} " in told, (name, option)


def test_the_readme_has_at_most_150_lines_and_lists_every_notebook_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    rows = re.findall(r"^\| \[.+?\]\(notebooks/([\w.]+)\) \| .+\? \|$", text, re.M)
    assert rows == [path.name for path in notebook_files()]


def test_every_link_to_the_repository_has_the_owner_of_pyproject_and_opens_a_notebook_that_there_is(site):
    written = "".join(page.text for page in site.values())
    assert written.count("git+https://github.com/ada/zerosim") == 2
    assert pages.PLACEHOLDER not in written
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    assert address == f"https://github.com/{pages.owner()}/zerosim"
    repository = f"{pages.PLACEHOLDER}/zerosim"
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert text.count(f"git+https://github.com/{repository}") == 2
    assert set(re.findall(r"(?:github\.com|github|gh)/([\w-]+/zerosim)\b", text)) == {repository}
    opened = re.findall(rf"/{repository}/\S*?(notebooks/[\w.]+)\)", text)
    assert len(opened) == 2
    assert [name for name in opened if not (ROOT / name).is_file()] == []


def test_the_guide_has_the_groups_of_the_list_in_its_order(site):
    _, guide, *_ = pages.navigation(list(site.values()))
    first, *groups = guide["Guide"]
    assert first == "guide/index.md"
    listed = re.findall(r"^## (.+)$", INDEX, re.M)
    assert [name for group in groups for name in group] == listed
    assert {"Speed, measured": "measured.md"} in guide["Guide"][1 + listed.index("What to rely on")]["What to rely on"]


INDEX = (ROOT / "docs/README.md").read_text(encoding="utf-8")
ITEM = "- [Speed, measured](measured.md): each"


@pytest.mark.parametrize(("new", "said"), [
    ("", "does not list measured.md; add"),
    (f"{ITEM}\n{ITEM}", "lists measured.md, which there is not, or twice"),
    ("- [Speed](measured.md): each", "calls measured.md 'Speed'; its heading is 'Speed, measured'"),
    (f"- [Gone](gone.md): each\n{ITEM}", "lists gone.md, which there is not"),
])
def test_a_text_of_docs_that_the_list_lacks_or_misnames_is_refused(new, said):
    assert INDEX.count(ITEM) == 1
    with pytest.raises(ValueError, match=re.escape(said)):
        document_pages(INDEX.replace(ITEM, new))


@pytest.mark.parametrize(("field", "value", "said"), [
    ("execution_count", None, "was not executed"),
    ("outputs", [{"output_type": "error", "ename": "ValueError", "evalue": "no"}], "failed with ValueError"),
])
def test_a_notebook_that_was_not_run_or_that_failed_is_refused(tmp_path, field, value, said):
    notebook = json.loads(notebook_files()[0].read_text(encoding="utf-8"))
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")[field] = value
    copy = tmp_path / "00_broken.ipynb"
    copy.write_text(json.dumps(notebook), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        notebook_page(copy, undrawn)
