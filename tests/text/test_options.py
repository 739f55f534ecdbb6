"""GenerateOptions: each field is validated when the options are created."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from transformer_jax.config.keywords import field_docs
from transformer_jax.decoding.samplers import Greedy, Sample
from transformer_jax.text.options import GenerateOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_tokens="x"), "num_tokens is 'x': must be an integer of at least 1"),
        (dict(num_tokens=2.0), "num_tokens is 2.0: must be an integer of at least 1"),
        (dict(num_tokens=2**31), "num_tokens is 2147483648: must be at most 2147483647"),
        (dict(temperature=None), r"no field 'temperature'; use sampler=Sample\(Temperature"),
        (dict(max_new_tokens=3), r"no field 'max_new_tokens'; use num_tokens"),
        (dict(stop=3), "stop is 3: must be"),
        (dict(stream=1), "stream is 1: must be True or False"),
        (dict(sampler=Sample), r"sampler is <class .*>: must be Greedy\(\) or a Sample\(...\)"),
        (dict(key="x"), "key is 'x': must be a single key"),
        (dict(processors=None), "processors is None: must be a tuple"),
        (dict(beams=True), "beams is True: must be an integer of at least 1"),
        (dict(results=None), "results is None: must be an integer of at least 1"),
        (dict(results=2), "results is 2: must be at most beams, 1"),
        (dict(beams=2, length_penalty="a"), "length_penalty is 'a': must be finite"),
        (dict(beams=2, length_penalty=True), "length_penalty is True: must be a number"),
        (dict(length_penalty=1.0), "length_penalty is 1.0: needs beams"),
        (dict(samples="2"), "samples is '2': must be an integer of at least 1"),
        (dict(slots=0), "slots is 0: must be an integer of at least 1"),
        (dict(cache_dtype="float33"), "cache_dtype is 'float33': must be int8 or a"),
        (dict(cache_dtype=3), "cache_dtype is 3: must be int8 or a floating-point"),
        (dict(cache_dtype="int32"), "cache_dtype is 'int32': must be int8 or a floating-point"),
        (dict(schema=3), "schema is 3: must be an object, such as a dict"),
        (dict(regex=3), "regex is 3: must be a string"),
        (dict(grammar=b"a"), "grammar is b'a': must be a string"),
        (dict(regex="a", grammar="b"), "pass only one of regex and grammar"),
        (dict(stream=True, samples=2), "pass only one of stream and samples"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_generation_option_raises_one_line_error(fields, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        GenerateOptions(**fields)
    assert "\n" not in str(caught.value)


def test_valid_options_are_stored_in_canonical_form():
    options = GenerateOptions(stop="a", processors=[], sampler=Greedy(), cache_dtype=jnp.bfloat16)
    assert (options.stop, options.processors) == (("a",), ())
    assert options == GenerateOptions(stop=["a"], sampler=Greedy(), cache_dtype=jnp.bfloat16)


def test_each_generation_option_is_documented():
    assert list(field_docs(GenerateOptions)) == [
        x.name for x in dataclasses.fields(GenerateOptions)
    ]
