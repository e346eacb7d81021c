"""What MkDocs is told of casnap's pages: hooks of mkdocs.yml, which `make docs` runs.

README.md is the first page of the site. The API reference, the examples and what lies outside of
docs/ get pages too, which no folder has. Links are written for a reader of the files; here they
lead to these pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from casnap import extending

ROOT = Path(__file__).resolve().parent.parent
APIS = {
    "casnap": "Snapshot, Store and all else of `import casnap`",
    "casnap.errors": "errors",
    "casnap.backends": "backends",
    "casnap.extending": "what a trainer of your own stands on",
    "casnap.serving": "followers",
    "casnap.integrations.dcp": "torch.distributed.checkpoint",
    "casnap.integrations.folders": "folders of snapshots that somebody deletes",
    **{
        f"casnap.integrations.{name}": name
        for name in (
            "accelerate",
            "checkpoint_io",
            "deepspeed",
            "engines",
            "lightning",
            "megatron",
            "pytorch_lightning",
            "torch_checkpointing",
            "torchtitan",
            "transformers",
        )
    },
    "casnap.testing.backend_suite": "tests of backends",
}
EXAMPLES = [path.stem for path in sorted((ROOT / "docs/examples").glob("*.py"))]
# Where the files outside of docs/ stand on the site, and the examples.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    **{f"docs/examples/{name}.py": f"examples/{name}.md" for name in EXAMPLES},
}
LINK = re.compile(r"\[([^][]+|[^][]*\[[^][]*\][^][]*)\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:meth|class|func|attr|exc|mod|data):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the lists of pages that are made here: `examples/*` in the nav, and the like."""
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    pages = {
        "examples/*": [f"examples/{name}.md" for name in EXAMPLES],
        "api/*": [f"api/{name}.md" for name in APIS],
        # README.md, the index, is the last one by its name.
        "decisions/*": [f"decisions/{name}" for name in (decisions[-1], *decisions[:-1])],
    }

    def filled(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: filled(below) for title, below in item.items()}
        if isinstance(item, list):
            return [filled(each) for each in item] if item[0] not in pages else pages[item[0]]
        return item

    config.nav = [filled(item) for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no folder has."""
    pages = {MOVED[name]: (ROOT / name).read_text() for name in MOVED if name.endswith(".md")}
    for name in EXAMPLES:
        code = (ROOT / f"docs/examples/{name}.py").read_text()
        pages[f"examples/{name}.md"] = f"# {name}.py\n\n```python\n{code}```\n"
    for name, what in APIS.items():
        pages[f"api/{name}.md"] = f"# {name}\n\n{what[0].upper()}{what[1:]}.\n\n::: {name}\n"
    # Its names are known only when it is imported.
    pages[f"api/{extending.__name__}.md"] += (
        f"    options:\n      members: [{', '.join(extending.__all__)}]\n"
    )
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Have links lead to pages of the site; what has no page there stays as text."""
    here = {site: file for file, site in MOVED.items()}.get(page.file.src_uri)
    source = here or f"docs/{page.file.src_uri}"

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if not target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = MOVED.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
        if site == "decisions":
            site = "decisions/README.md"
        if not site:
            return text
        start = posixpath.dirname(page.file.src_uri)
        return f"[{text}]({posixpath.relpath(site, start or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def on_page_content(html: str, **_: object) -> str:
    """Docstrings name things by roles, such as :meth:`Store.take`."""
    return ROLE.sub(r"<code>\1</code>", html)
