"""Write llms.txt, the list of pages for language models (https://llmstxt.org), from mkdocs.yml.

    python docs/llms.py

Each page is listed under its section of the navigation, with its title and first sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
SUMMARY = """# transformer_jax

> Train, load, inspect and serve transformers in JAX: one attention function with masks as values,
> an immutable KV cache, published checkpoints, and every value visible and editable. Measured on
> CPUs and on one H100; the kernels for other GPUs and for TPUs have not run on such devices.

Python 3.11 to 3.13, JAX 0.10.2 or later. Import it as `import transformer_jax as tj`; the public
names are in [groups](reference/index.md). Code on a page runs in the tests; the indented text below
it is its output.
"""


def llms_txt() -> str:
    """Return the text of llms.txt."""
    text = (DOCS.parent / "mkdocs.yml").read_text()
    lines = [SUMMARY]
    for entry in text[text.index("\nnav:\n") + 6 :].splitlines():
        if part := re.fullmatch(r"  - ([^:]+):", entry):
            lines.append(f"\n## {part[1]}\n")
        elif page := re.search(r"([\w/]+\.md)$", entry):
            lines.append(line_of(page[1]))
    return "\n".join(lines) + "\n"


def line_of(page: str) -> str:
    """Return the line of a page: its title, its path and its first sentence if it has one."""
    text = re.sub(r"\A---\n.*?\n---\n", "", (DOCS / page).read_text(), flags=re.S).strip()
    title, *rest = re.split(r"\n\n+", text)
    plain = (p for p in rest if re.match(r"(?!```)[\w`*\[(]", p))
    first = re.split(r"(?<!al\.)(?<=\.)\s", next(plain, ""))[0].rstrip(":.").replace("\n", " ")
    first = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first)
    first = re.sub(r"\$`([^`]*)`\$", r"\1", first)
    return f"- [{title.removeprefix('# ')}]({page})" + (f": {first}" if first else "")


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(llms_txt())
