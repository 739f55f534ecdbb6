"""Calls with foreign code use the values that the code reads now, not those of earlier calls.

The expected values follow from definitions: the average of the visible values, or the token that a
custom step, processor or sampler chooses. For an intercepted model they are those of a new function
under its own `jax.jit`, which JAX has not traced before.
"""

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax._src.config import trace_context

import transformer_jax as tj
from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.attention.reference import Xla
from transformer_jax.config import TrainConfig
from transformer_jax.decoding.step import count_vocab
from transformer_jax.kernels import cpu
from transformer_jax.models import block
from transformer_jax.programs import brings_code, program, retraces
from transformer_jax.training.compiled import cached_programs

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = 7


class Settable:
    """Places from which a function may read a number, each with a way to change it."""

    @staticmethod
    def global_name():
        global _number
        _number = 1

        def put(n):
            global _number
            _number = n

        return lambda: _number, put

    @staticmethod
    def closure():
        n = 1

        def put(new):
            nonlocal n
            n = new

        return lambda: n, put

    @staticmethod
    def array_in_place():
        array = np.ones((), np.int32)
        return lambda: jnp.asarray(array.copy()), lambda n: array.fill(n)

    @staticmethod
    def attribute_of_bound_object():
        @dataclass(eq=True, unsafe_hash=True)
        class Reader:
            n: int = field(default=1, compare=False)

            def read(self):
                return self.n

        reader = Reader()
        return reader.read, lambda n: setattr(reader, "n", n)

    @staticmethod
    def method():
        class Reader:
            def __eq__(self, other):
                return True

            def __hash__(self):
                return 0

            def __call__(self):
                return 1

        return Reader(), lambda n: setattr(Reader, "__call__", lambda self: n)

    @staticmethod
    def mutable_default():
        def read(found=[1]):  # noqa: B006
            return found[0]

        return read, lambda n: read.__defaults__[0].__setitem__(0, n)

    @staticmethod
    def partial():
        table = {"n": 1}
        return functools.partial(dict.get, table, "n"), lambda n: table.update(n=n)


KINDS = [name for name in vars(Settable) if not name.startswith("__")]


@pytest.fixture(params=KINDS)
def number(request):
    read, put = getattr(Settable, request.param)()
    return SimpleNamespace(read=read, put=put)


@dataclass(frozen=True)
class StepOf:
    """A step that chooses the token that a function returns."""

    read: object

    def __call__(self, params, tokens, state, *, valid=None):
        return jax.nn.one_hot(jnp.full(tokens.shape, self.read()), WORDS), state


def changed(number, call):
    """Return the results of a call before and after its number changes from 1 to 5."""
    first = call()
    number.put(5)
    return [np.asarray(first).ravel()[0], np.asarray(call()).ravel()[0]]


def plain(params, tokens, state, *, valid=None):
    return jnp.zeros((*tokens.shape, WORDS)), state


PROMPT = jnp.array([[3, 2]])


def state():
    return jnp.zeros((1, 1))


@pytest.mark.slow
def test_changed_predicate_is_retraced(number, implementation="xla"):
    q, v = jnp.ones((1, 6, 1, 2)), jnp.arange(6.0)[None, :, None, None]
    mask = tj.Predicate(lambda q, k: k < number.read() + 1)
    found = changed(
        number,
        lambda: tj.dot_product_attention(q, q, v, mask=mask, implementation=implementation),
    )
    np.testing.assert_allclose(found, [0.5, 2.5], rtol=1e-6)  # the means of 0..1 and of 0..5


@pytest.mark.slow_except("native")
@pytest.mark.parametrize("implementation", ["blockwise", "native"])
def test_each_implementation_retraces_changed_predicate(implementation):
    if implementation == "native" and isinstance(cpu.library(), str):
        pytest.skip(cpu.library())
    read, put = Settable.closure()
    test_changed_predicate_is_retraced(SimpleNamespace(read=read, put=put), implementation)


@pytest.mark.slow
def test_changed_custom_masks_biases_and_gradients_are_retraced():
    read, put = Settable.closure()
    number = SimpleNamespace(read=read, put=put)

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Below(tj.Mask):
        def sees(self, q, k):
            return k <= number.read()

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Hide:
        def materialize(self, q, k):
            far = jnp.atleast_2d(k)[:, None, None, :] > number.read()
            return jnp.where(far, -1e9, 0.0)

    q, v = jnp.ones((1, 6, 1, 2)), jnp.arange(6.0)[None, :, None, None]
    attend = lambda v, **options: tj.dot_product_attention(q, q, v, **options)  # noqa: E731
    gradient = jax.grad(lambda v: attend(v, mask=Below()).sum())
    calls = [
        lambda: attend(v, mask=Below()),
        lambda: attend(v, bias=Hide()),
        lambda: gradient(v),
    ]
    before = [np.asarray(call()).ravel()[0] for call in calls]
    number.put(5)
    after = [np.asarray(call()).ravel()[0] for call in calls]
    np.testing.assert_allclose(before, [0.5, 0.5, 3.0], rtol=1e-6)
    np.testing.assert_allclose(after, [2.5, 2.5, 1.0], rtol=1e-6)  # six queries share six keys


WAYS = {
    "generate": lambda step, **options: tj.generate(
        step, (), PROMPT, state(), num_tokens=2, **options
    ),
    "stream": lambda step, **options: list(
        tj.stream(step, (), PROMPT, state(), num_tokens=2, **options)
    )[-1],
    "beams": lambda step, **options: tj.beam_search(
        step, (), PROMPT, state(), num_tokens=2, num_beams=2, **options
    ),
    "speculation": lambda step, **options: tj.speculate(
        step, (), PROMPT, state(), proposer=tj.PromptLookup(), num_tokens=2, num_draft=1, **options
    ),
    "slots": lambda step, **options: next(
        tj.serve_requests(
            step, (), [tj.Request([3, 2], 2, key=jax.random.key(0))], state(),
            slots=1, capacity=8, **options,
        )
    ),
}  # fmt: skip


@pytest.mark.slow
def test_changed_decoding_step_is_retraced(number, way="generate"):
    step = StepOf(number.read)
    found = changed(number, lambda: getattr(out := WAYS[way](step), "tokens", out))
    assert found == [1, 5]


@pytest.mark.slow
@pytest.mark.long_except("stream")
@pytest.mark.parametrize("way", ["stream", "beams", "slots", "speculation"])
def test_each_decoding_method_retraces_changed_step(way):
    read, put = Settable.closure()
    test_changed_decoding_step_is_retraced(SimpleNamespace(read=read, put=put), way)


@dataclass(frozen=True)
class Favour:
    """A processor, with or without a history, that keeps only the token that a function returns."""

    read: object

    def __call__(self, *inputs):
        *_, logits = inputs
        return jnp.where(jnp.arange(WORDS) == self.read(), logits, -jnp.inf)


@pytest.mark.slow
@pytest.mark.long_except("slots-sampler", "stream-history")
@pytest.mark.parametrize(
    ("way", "kind"), [("generate", "processor"), ("stream", "history"), ("slots", "sampler")]
)
def test_changed_processors_and_samplers_are_retraced(way, kind):
    read, put = Settable.closure()
    options = {
        "processor": dict(sampler=tj.Sample(Favour(read))),
        "history": dict(processors=(Favour(read),)),
        "sampler": dict(sampler=lambda key, x: jnp.full(x.shape[:-1], read())),
    }[kind]
    if way != "slots":
        options["key"] = jax.random.key(0)
    found = changed(
        SimpleNamespace(put=put), lambda: getattr(out := WAYS[way](plain, **options), "tokens", out)
    )
    assert found == [1, 5]


def test_changed_step_shape_is_retraced():
    read, put = Settable.closure()

    def step(params, tokens, state, *, valid=None):
        return jnp.zeros((*tokens.shape, read())), state

    first = count_vocab(step, (), 1, state())
    put(5)
    assert (first, count_vocab(step, (), 1, state())) == (1, 5)


CONFIG = tj.ModelConfig(vocab_size=13, d_model=8, num_heads=2, num_layers=1, max_len=16)


def shift(next_fun, args, kwargs, context):
    """Add a vector to the output of the first block."""
    out = next_fun(*args, **kwargs)
    if context.method_name == "__call__" and context.module.path[-1:] == ("block_0",):
        return out[0] + 3 * jnp.arange(8.0)[None, None], *out[1:]
    return out


@pytest.mark.slow
@pytest.mark.long_except("True")
@pytest.mark.parametrize("steered_first", [False, True])
def test_interceptor_applies_exactly_within_its_context(steered_first):
    params = tj.init_params(CONFIG, jax.random.key(1))
    step = tj.make_step(tj.build(CONFIG))
    cache = lambda: tj.init_cache(CONFIG, 1, 16)  # noqa: E731

    def log_prob():
        return float(tj.generate(step, params, PROMPT, cache(), num_tokens=1).log_probs[0, 0])

    def right():  # a new function, without a cached trace
        logits = jax.jit(lambda: step(params, PROMPT, cache())[0])()[0, -1]
        return float(jax.nn.log_softmax(logits).max())

    found, wanted = {}, {}
    for steered in (steered_first, not steered_first, steered_first):
        with nn.intercept_methods(shift) if steered else jax.named_scope("plain"):
            found[steered], wanted[steered] = log_prob(), right()
    assert found == pytest.approx(wanted, abs=1e-5)
    assert abs(found[True] - found[False]) > 0.01


@pytest.mark.slow
def test_interceptor_may_add_initial_parameters():
    def with_more(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        if context.method_name == "setup" and context.module.path == ():
            context.module.param("more", nn.initializers.ones, (3,))
        return out

    plain_ = tj.init_params(CONFIG, jax.random.key(1))
    with nn.intercept_methods(with_more):
        more = tj.init_params(CONFIG, jax.random.key(1))
    again = tj.init_params(CONFIG, jax.random.key(1))
    count = lambda tree: len(jax.tree.leaves(tree))  # noqa: E731
    assert (count(more), count(again)) == (count(plain_) + 1, count(plain_))


@pytest.mark.slow
def test_replaced_model_method_is_used(monkeypatch):
    params = tj.init_params(CONFIG, jax.random.key(1))
    step = tj.make_step(tj.build(CONFIG))

    def gen():
        cache = tj.init_cache(CONFIG, 1, 16)
        return float(tj.generate(step, params, PROMPT, cache, num_tokens=1).log_probs[0, 0])

    before, call = gen(), block.Block.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            block.Block,
            "__call__",
            lambda self, *a, **k: (out := call(self, *a, **k)) and (out[0] * -3, *out[1:]),
        )
        assert abs(gen() - before) > 1e-3
    assert gen() == before
    with monkeypatch.context() as patch:  # an inherited method, which is removed again
        patch.setattr(tj.build(CONFIG).__class__, "apply", lambda self, *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gen()
    assert gen() == before


@pytest.mark.slow
def test_changed_custom_implementation_is_retraced(monkeypatch):
    read, put = Settable.closure()

    class Mine(Xla):
        def attend(self, call):
            out, lse = super().attend(call)
            return out * read(), lse

    monkeypatch.setitem(IMPLEMENTATIONS, "mine", Mine())
    q = jnp.ones((1, 2, 1, 2))
    attend = lambda: tj.dot_product_attention(q, q, q, implementation="mine")[0, 0, 0, 0]  # noqa: E731
    first = float(attend())
    put(5)
    assert (first, float(attend())) == (1.0, 5.0)


def test_values_with_foreign_code_are_recognized():
    step = tj.make_step(tj.build(CONFIG))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "a")
    ours = [
        *(step, tj.build(CONFIG).apply, tj.Sample(tj.Temperature(0.5), tj.TopK(3)), len, mesh),
        *(tj.Causal() & ~tj.Window(3), tj.init_cache(CONFIG, 1, 16), jax.nn.silu, jax.nn.gelu),
        *(jnp.dtype("float32"), jnp.float32, functools.partial(jnp.dot, precision=None)),
    ]
    table, array = {}, np.ones(3)
    foreign = [
        tj.Sample(lambda x: x),
        tj.Causal() & tj.Predicate(lambda q, k: k < q),
        functools.partial(step.__call__, lambda: 0),
        jax.jit(lambda x: x),
        *(jnp.frompyfunc(lambda q, k: k < q, 2, 1), np.vectorize(lambda q, k: k < q)),
        *(table.get, array.__add__, functools.partial(table.get, "n")),
    ]
    assert not retraces({str(i): one for i, one in enumerate(ours)})
    assert all(map(brings_code, foreign))


def test_custom_code_may_read_traced_values():
    """The arguments are known, and only the closure is mapped or differentiated."""

    @program(static=("function",))
    def call(function, x):
        return function(x)

    x = jnp.arange(3.0)
    scaled = lambda w: call(lambda x: x * w, x)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(scaled)(jnp.array([1.0, 2.0])), [x, 2 * x])
    assert jax.grad(lambda w: scaled(w).sum())(5.0) == 3


@pytest.mark.slow
def test_programs_using_different_arguments_are_distinct():
    def token_of_argument(number):
        def step(params, tokens, state, *, valid=None):
            return jax.nn.one_hot(jnp.full(tokens.shape, params[number]), WORDS), state

        params = jnp.int32(1), jnp.int32(5)
        return tj.generate(step, params, PROMPT, state(), num_tokens=1).tokens.item()

    assert [token_of_argument(0), token_of_argument(1)] == [1, 5]


@pytest.mark.slow
def test_changed_host_callbacks_are_used():
    number = {"of": lambda _: np.int32(1)}

    def step(params, tokens, state, *, valid=None):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        token = jax.lax.cond(
            tokens.sum() >= 0,
            lambda: jax.pure_callback(number["of"], shape, tokens),
            lambda: jnp.int32(0),
        )
        return jax.nn.one_hot(jnp.full(tokens.shape, token), WORDS), state

    def call():
        return tj.generate(step, (), PROMPT, state(), num_tokens=1).tokens

    put = lambda n: number.update(of=lambda _: np.int32(n))  # noqa: E731
    assert changed(SimpleNamespace(put=put), call) == [1, 5]


@pytest.mark.slow
def test_different_jax_settings_use_different_programs():
    of = TrainConfig(model=CONFIG, context=5), lambda batches: batches
    plain, again = (cached_programs(*of, trace_context()) for _ in range(2))
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        other = cached_programs(*of, trace_context())
    assert plain is again and other is not plain
