"""Docstrings and pages follow the writing rules of CONTRIBUTING.md.

The patterns mark phrases that technical writers avoid. A marked phrase can be correct English, so
the tests limit the share of marked sentences instead of forbidding the phrases.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 0.02
FEWEST_WORDS = 4
"""Shorter pieces, such as cells of tables, are not sentences."""

PATTERNS = {
    "name the noun, such as 'the values that', instead of a clause with 'what'": (
        r"\bwhat (?:is|are|was|were|has|have|it|they|its|an?|the|each|every|of|that|one|no|"
        r"others?|[a-z]+s)\b"
    ),
    "split the sentence instead of 'of which'": (
        r"\b(?:of|in|for|from|by|after|with|over|at|to) (?:which|whom)\b"
    ),
    "'with', 'next to' or 'in addition to' instead of 'beside'": r"\bbesides?\b",
    "'continue' instead of 'go on'": r"\b(?:go|goes|going|gone|went) on\b",
    "'is' instead of 'stands'": r"\b(?:stands?|stood|standing)\b",
    "a number or 'as long as' instead of 'so many'": r"\bso (?:many|much|long)\b|\bof so\b",
    "'instead of' for 'in the place of'": r"\bin (?:the|its|their) places? of\b",
    "'its own' or 'your' instead of 'of its own' and 'of yours'": (
        r"\bof (?:its|their|one's|his|your|a user's) own\b|\bof (?:yours|ours|theirs)\b"
    ),
    "'again', 'the same' or 'any' instead of an old word": (
        r"\b(?:anew|alike|thereby|whatever|whoever|whichever)\b"
    ),
    "the subject first, instead of 'Of a ...'": (
        r"^of (?:an?|the|its|several|each|all|what|those|these|one|more|many|two|[a-z]+s)\b"
    ),
    "'equals' or 'results in' instead of 'comes to'": r"\b(?:comes?|came) to\b",
}
MARKED = {rule: re.compile(pattern, re.IGNORECASE) for rule, pattern in PATTERNS.items()}

EXAMPLES = (
    "Return what the model has read.",
    "A list, of which the first item counts.",
    "It keeps an average beside the parameters.",
    "The run goes on after a restart.",
    "The name stands in the first line.",
    "It takes so many tokens at once.",
    "A mask in the place of an array.",
    "Each row has a key of its own.",
    "The rest of the text is read anew.",
    "Of two equal choices the first wins.",
    "The sum comes to one.",
)


def sentences(text: str) -> list[str]:
    """Split a paragraph, without its inline code and link targets."""
    text = re.sub(r"`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", text))
    found = re.split(r"(?<=[.;:?!])\s+", " ".join(text.split()))
    return [sentence for sentence in found if len(sentence.split()) >= FEWEST_WORDS]


def docstring_sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of the docstrings of a module, a class, a function or an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                for paragraph in re.split(r"\n\s*\n", node.value.value):
                    yield from sentences(paragraph)


def page_sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a page, without code, output, front matter and HTML."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|<[^>]+>|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    # A cell, a heading or an item is its own piece of text.
    for piece in re.split(r"\n\s*\n|\n(?=[-*#|]|\d+\.)|(?<!\\)\|", text):
        yield from sentences(re.sub(r"^\s*(?:[-*#]+|\d+\.)\s+", "", piece))


def marked(sentence: str) -> list[str]:
    return [rule for rule, pattern in MARKED.items() if pattern.search(sentence)]


MODULES = sorted({*(ROOT / "transformer_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "reference"
]


@pytest.mark.parametrize(
    ("paths", "read"),
    [(MODULES, docstring_sentences), (PAGES, page_sentences)],
    ids=["docstrings", "pages"],
)
def test_few_sentences_contain_flagged_phrases(paths, read):
    found = [(path.relative_to(ROOT), sentence) for path in paths for sentence in read(path)]
    odd = [(path, sentence) for path, sentence in found if marked(sentence)]
    assert len(found) > 1000
    share = len(odd) / len(found)
    listed = "\n".join(f"{path}: {sentence} ({marked(sentence)[0]})" for path, sentence in odd)
    assert share <= LIMIT, f"{share:.1%} of {len(found)} sentences:\n{listed}"


@pytest.mark.parametrize(("rule", "example"), [*zip(PATTERNS, EXAMPLES, strict=True)])
def test_each_prose_pattern_matches_its_example(rule, example):
    assert rule in marked(example)


def test_prose_check_ignores_code_and_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title of four words\n\nThe code `what is it` runs first.\n\n"
        "```py\n# what is here is code\n```\n\n    what is printed by the code\n\n"
        "| a cell with some words | another cell with words |\n"
    )
    assert list(page_sentences(page)) == [
        "A title of four words",
        "The code `code` runs first.",
        "a cell with some words",
        "another cell with words",
    ]
