"""Docstrings of public names describe their arguments, for help(), editors and the website."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap

import pytest
from flax import linen as nn

import transformer_jax as tj
from transformer_jax import (
    attention,
    cache,
    checkpoints,
    config,
    corpus,
    decoding,
    interpret,
    models,
    pretrained,
    tokenizers,
    training,
)
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.training import tasks

FOLDERS = (
    attention, cache, checkpoints, config, corpus, decoding, interpret, models, pretrained,
    tokenizers, training, tasks, tj,
)  # fmt: skip
PUBLIC = {name: getattr(folder, name) for folder in FOLDERS for name in folder.__all__}
PUBLIC["LanguageModel"] = LanguageModel
CLASSES = {name: kind for name, kind in PUBLIC.items() if inspect.isclass(kind)}
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def functions():
    """Return public functions, methods, and calls of models, by name, with their docstrings.

    A method may inherit its documentation from the method that it overrides.
    """
    found = {name: (x, inspect.getdoc(x)) for name, x in PUBLIC.items() if inspect.isfunction(x)}
    for name, kind in CLASSES.items():
        for method, x in vars(kind).items():
            function = inspect.unwrap(getattr(x, "__func__", x))
            called = method == "__call__" and issubclass(kind, nn.Module)
            if inspect.isfunction(function) and (called or not method.startswith("_")):
                docs = [
                    getattr(base, method).__doc__ or ""
                    for base in kind.mro()
                    if hasattr(base, method)
                ]
                full = [inspect.cleandoc(one) for one in docs if "Args:" in one]
                found[f"{name}.{method}"] = function, (full or docs)[0]
    return found


def section(docstring, title):
    """Return the names that a section of a docstring describes, in order."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", f"{docstring}\n", re.M)
    return re.findall(r"^    (\w+): \S", found[1], re.M) if found else []


FUNCTIONS = functions()
FLAX = "parent", "name"
"""Fields that flax adds to every module."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_describes_every_argument(name):
    function, docstring = FUNCTIONS[name]
    taken = inspect.signature(function).parameters.values()
    arguments = [x.name for x in taken if x.kind not in VARIADIC and x.name not in ("self", "cls")]
    described = section(docstring, "Args")
    if len(arguments) > 1 or described:
        assert described == arguments


@pytest.mark.parametrize(
    "name", [n for n, kind in CLASSES.items() if dataclasses.is_dataclass(kind)]
)
def test_docstring_describes_every_field(name):
    kind = CLASSES[name]
    described = section(inspect.getdoc(kind), "Attributes")
    annotations = kind.__annotations__  # inherited fields are described where they are declared
    excluded = FLAX if issubclass(kind, nn.Module) else ()
    fields = [x.name for x in dataclasses.fields(kind) if x.name in annotations]
    fields = [name for name in fields if name not in excluded]
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    texts = {
        one.target.id
        for one, after in itertools.pairwise(body)
        if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    assert described in ([], fields)
    assert texts == (set() if described else set(fields))
