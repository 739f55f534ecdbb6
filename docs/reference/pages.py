"""Fill the pages of the reference, and set formulas, while the site is built.

mkdocs calls the functions that begin with `on_` (`hooks` of mkdocs.yml). Each folder's page gets
all modules of the folder, which mkdocstrings turns into what their docstrings say: a new module is
on its page without anybody listing it. `Drawings` (`extensions` of mkdocstrings) keeps the drawings
of masks as they are typed.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[2]
PACKAGE = "transformer_jax"
SEARCH = {"reference/": 0.2, "design_": 0.5, "howto_": 0.5, "attention.md": 3.0}
"""Weights of pages in a search, by the beginning of their name; 1 for the others."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Put in what is generated: modules, public names, links to notebooks, marks of formulas."""
    weights = [w for name, w in SEARCH.items() if page.file.src_uri.startswith(name)]
    page.meta["search"] = {"boost": weights[0] if weights else 1.0}
    opened = functools.partial(notebook_links, repository=config.repo_url)
    markdown = re.sub(r"<!-- notebook (\w+) -->", opened, markdown)
    markdown = stash_formulas(markdown)
    markdown = re.sub(r"<!-- modules of (\S+) -->", lambda found: modules(found[1]), markdown)
    return markdown.replace("<!-- public names -->", "\n".join(public_names()))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put formulas and pages of HTML in; a reference page's contents name no members of modules."""
    html = re.sub(r"<!-- the page (\w+\.html) -->", lambda found: inner(page, found[1]), html)
    html = re.sub(r"(?:<p>)?@formula(\d+)@(?:</p>)?", lambda found: _FORMULAS[int(found[1])], html)
    html = re.sub(r"(?<!</span>)<code>[^<]*</code>", lambda found: whole_flags(found[0]), html)
    if page.file.src_uri.startswith("reference/"):
        for top in page.toc:
            for module in top.children:
                module.children = []
    return html


def whole_flags(code: str) -> str:
    """Return code within a line whose flags are not broken after their dashes."""
    return re.sub(r"--[A-Za-z][\w.-]*", r'<span class="flag">\g<0></span>', code)


def inner(page: Any, name: str) -> str:
    """Return the styles of a page of HTML that lies next to a page, and what is in its `main`."""
    text = Path(page.file.abs_src_path).with_name(name).read_text()
    (styles,) = re.findall(r"^<link .*>$", text, re.M)
    return styles + text.partition("<main>")[2].partition("</main>")[0]


def notebook_links(found: re.Match[str], repository: str | None) -> str:
    """Return links to a page's notebook: the file; in Colab where mkdocs.yml has a `repo_url`."""
    path = f"notebooks/{found[1]}.ipynb"
    links = f"[This page as a notebook]({path}){{ download }}"
    if repository and repository.startswith("https://github.com/"):
        name = repository.removeprefix("https://github.com/").strip("/")
        there = f"https://colab.research.google.com/github/{name}/blob/main/docs/{path}"
        links += f" · [Open in Colab]({there})"
    return links


def on_post_build(config: Any, **_: Any) -> None:
    """Put the text of each page next to it, where llms.txt leads."""
    for page in (ROOT / "docs").rglob("*.md"):
        target = Path(config.site_dir) / page.relative_to(ROOT / "docs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)


_FORMULAS: list[str] = []


def stash_formulas(markdown: str) -> str:
    """Turn the formulas of a page, ```math fences and $`...`$, into MathML; a mark stands for each.

    Browsers set MathML by themselves: the site needs no script for it, and no request leaves it.
    """

    def stash(found: re.Match[str]) -> str:
        block = found[0].startswith("```")
        lines = [line for line in found[1].split("\n\n") if line.strip()]
        made = [convert(x.strip(), display="block" if block else "inline") for x in lines]
        _FORMULAS.append(f'<div class="formula">{"".join(made)}</div>' if block else made[0])
        return f"@formula{len(_FORMULAS) - 1}@"

    markdown = re.sub(r"^```math\n(.*?)^```$", stash, markdown, flags=re.M | re.S)
    return re.sub(r"\$`(.+?)`\$", stash, markdown)


def modules(folder: str) -> str:
    """Return a folder's docstring, and a section for each of its modules."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    found = exported()
    public = list(dict.fromkeys(found[name][1] for _, known in groups() for name in known))
    names = [".".join(path.with_suffix("").parts) for path in paths]
    names.sort(key=lambda name: public.index(name) if name in public else len(public))
    whole = folder.replace("/", ".")
    said = [f"::: {whole}\n    options:\n      members: false\n"]
    for name in names:
        if not name.endswith("__init__"):
            said.append(f"## {name.removeprefix(f'{whole}.')}\n\n{module(name, name in public)}")
    return "\n".join(said)


def module(name: str, has_public: bool) -> str:
    """Return what fills the section of a module: if it has public names, these first."""
    if not has_public:
        return f"::: {name}\n    options:\n      heading_level: 3\n"
    names = [known for known, (_, where) in exported().items() if where == name]
    members = package()[name.removeprefix(f"{PACKAGE}.")].members
    for other, value in members.items():
        if not (other in names or other[0] == "_" or value.is_alias) and value.docstring:
            names.append(other)
    options = "heading_level: 3\n      show_root_heading: true\n      show_root_full_path: false"
    own = [f"::: {name}.{x}\n    options:\n      {options}\n" for x in names]
    return "\n".join([f"::: {name}\n    options:\n      members: false\n", *own])


def public_names() -> Iterator[str]:
    """Give the lines of a table of public names for each group of the package's docstring.

    Raises:
        ValueError: the groups of the docstring are not exactly the public names.
    """
    found = exported()
    grouped = [name for _, names in groups() for name in names]
    if sorted(grouped) != sorted(found):
        wrong = sorted({*grouped} ^ {*found}) or "a name that is listed twice"
        raise ValueError(f"{PACKAGE}.__doc__ must list each public name once: {wrong}")
    for group, names in groups():
        yield f"\n## {group}\n\n| name | meaning |\n|---|---|"
        for name in names:
            path, module = found[name]
            page = module.removeprefix(f"{PACKAGE}.").split(".")[0]
            yield f"| [`{name}`]({page}.md#{path}) | {first_sentence(module, name)} |"


def groups() -> list[tuple[str, list[str]]]:
    """Return the groups of public names in the docstring of the package, in its order."""
    text = ast.get_docstring(ast.parse((ROOT / PACKAGE / "__init__.py").read_text())) or ""
    table = text[text.index("The public names ") :].split("\n\n")[1]
    rows = re.findall(r"^ {4}(\S.*?)  +(\S.*(?:\n {10,}\S.*)*)", table, re.M)
    return [(group, re.findall(r"\w+", names)) for group, names in rows]


@functools.cache
def package() -> Any:
    """Return the package as griffe reads it, without importing it."""
    return griffe.load("transformer_jax", search_paths=[ROOT])


@functools.cache
def exported() -> dict[str, tuple[str, str]]:
    """Return for each public name where it is defined: its whole path, and its module."""
    later = ast.literal_eval(str(package()["_LATER"].value))
    found = {}
    for name in ast.literal_eval(str(package()["__all__"].value)):
        there = name in later
        path = f"{PACKAGE}.{later[name]}.{name}" if there else package()[name].final_target.path
        found[name] = path, path.rpartition(".")[0]
    return found


def first_sentence(module: str, name: str) -> str:
    """Return the first line of a name's docstring."""
    docstring = package()[f"{module}.{name}".removeprefix(f"{PACKAGE}.")].docstring
    text = docstring.value.split("\n\n")[0] if docstring else ""
    return text.replace("\n", " ").replace("|", "\\|")


class Drawings(griffe.Extension):
    """Indent the drawings in docstrings, so that they become code, and keep names such as <eos>."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class or function."""
        if obj.docstring:
            obj.docstring.value = keep_tokens(indent_drawings(obj.docstring.value))


def indent_drawings(text: str) -> str:
    """Return a text whose lines of `#`, `.` and spaces are indented by four spaces."""
    return re.sub(r"^(?=[#.] [#. ]+$)", "    ", text, flags=re.M)


def keep_tokens(text: str) -> str:
    """Return a text whose special tokens, <eos> and the like, are no tags of HTML.

    Code needs no such mark: what stands in backticks, or is indented and not in a section.
    """
    lines, section = [], False
    for line in text.split("\n"):
        section = bool(line) and (section or re.fullmatch(r"[A-Z]\w+:", line) is not None)
        if section or not line.startswith("    "):
            line = re.sub(r"(`[^`]*`)|<(?=/?\w+>)", lambda found: found[1] or "&lt;", line)
        lines.append(line)
    return "\n".join(lines)
