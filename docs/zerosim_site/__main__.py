"""Writes the site's pages, files and configuration into a folder, for MkDocs: ``python -m zerosim_site FOLDER``.

MkDocs' settings stand in ``mkdocs.yml``; the navigation, which depends on what there is, is added here.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from zerosim_site import pages
from zerosim_site.formulas import with_formulas
from zerosim_site.page import ROOT


def write(folder: Path) -> int:
    """Writes ``folder/pages`` and ``folder/mkdocs.yml``, in place of what was there; returns the number of pages."""
    found, root = pages.finished(with_formulas, pages.owner()), folder / "pages"
    if root.exists():
        shutil.rmtree(root)
    for page in found:
        _write(root / page.uri, page.text.encode("utf-8"))
    for place, content in pages.drawn().items():
        _write(root / place, content)
    for place, path in pages.copies().items():
        _write(root / place, path.read_bytes())
    settings = {"INHERIT": os.path.relpath(ROOT / "mkdocs.yml", folder), "docs_dir": root.name,
                "site_dir": "site", "nav": pages.navigation(found)}
    _write(folder / "mkdocs.yml", json.dumps(settings, indent=1, ensure_ascii=False).encode("utf-8"))
    return len(found)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    try:
        print(f"{write(place)} pages in {place / 'pages'}")
    except ValueError as error:
        sys.exit(f"the documentation cannot be made: {error}")
