"""A call gives the result of what foreign code reads now, not of what it read before.

The right values are those of a definition: an average of the values that a mask shows, or the
token that a step, a processor or a sampler written here chooses. Where a model is intercepted, they
are those of a new function of its own `jax.jit`, which JAX has not traced before.
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
from transformer_jax.programs import brings_code, disturbed, program
from transformer_jax.training.compiled import known_programs

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = 7


class Settable:
    """Hold a number where a function may read one, and change it there."""

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
        held = {"n": 1}
        return functools.partial(dict.get, held, "n"), lambda n: held.update(n=n)


KINDS = [name for name in vars(Settable) if not name.startswith("__")]


@pytest.fixture(params=KINDS)
def number(request):
    read, put = getattr(Settable, request.param)()
    return SimpleNamespace(read=read, put=put)


@dataclass(frozen=True)
class StepOf:
    """Choose the token that a function gives."""

    read: object

    def __call__(self, params, tokens, state, *, valid=None):
        return jax.nn.one_hot(jnp.full(tokens.shape, self.read()), WORDS), state


def changed(number, call):
    """Return what a call gives before and after the number it reads goes from 1 to 5."""
    first = call()
    number.put(5)
    return [np.asarray(first).ravel()[0], np.asarray(call()).ravel()[0]]


def plain(params, tokens, state, *, valid=None):
    return jnp.zeros((*tokens.shape, WORDS)), state


PROMPT = jnp.array([[3, 2]])


def state():
    return jnp.zeros((1, 1))


@pytest.mark.slow
def test_a_predicate_is_read_anew(number, implementation="xla"):
    q, v = jnp.ones((1, 6, 1, 2)), jnp.arange(6.0)[None, :, None, None]
    mask = tj.Predicate(lambda q, k: k < number.read() + 1)
    found = changed(
        number,
        lambda: tj.dot_product_attention(q, q, v, mask=mask, implementation=implementation),
    )
    np.testing.assert_allclose(found, [0.5, 2.5], rtol=1e-6)  # the means of 0..1 and of 0..5


@pytest.mark.slow_except("native")
@pytest.mark.parametrize("implementation", ["blockwise", "native"])
def test_a_predicate_is_read_anew_by_each_implementation(implementation):
    if implementation == "native" and isinstance(cpu.library(), str):
        pytest.skip(cpu.library())
    read, put = Settable.closure()
    test_a_predicate_is_read_anew(SimpleNamespace(read=read, put=put), implementation)


@pytest.mark.slow
def test_own_masks_biases_and_gradients_are_read_anew():
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
    attend = lambda v, **given: tj.dot_product_attention(q, q, v, **given)  # noqa: E731
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
    "generate": lambda step, **own: tj.generate(step, (), PROMPT, state(), num_tokens=2, **own),
    "stream": lambda step, **own: list(
        tj.stream(step, (), PROMPT, state(), num_tokens=2, **own)
    )[-1],
    "beams": lambda step, **own: tj.beam_search(
        step, (), PROMPT, state(), num_tokens=2, num_beams=2, **own
    ),
    "speculation": lambda step, **own: tj.speculate(
        step, (), PROMPT, state(), proposer=tj.PromptLookup(), num_tokens=2, num_draft=1, **own
    ),
    "slots": lambda step, **own: next(
        tj.serve_requests(
            step, (), [tj.Request([3, 2], 2, key=jax.random.key(0))], state(),
            slots=1, capacity=8, **own,
        )
    ),
}  # fmt: skip


@pytest.mark.slow
def test_a_step_is_read_anew(number, way="generate"):
    step = StepOf(number.read)
    found = changed(number, lambda: getattr(out := WAYS[way](step), "tokens", out))
    assert found == [1, 5]


@pytest.mark.slow
@pytest.mark.long_except("stream")
@pytest.mark.parametrize("way", ["stream", "beams", "slots", "speculation"])
def test_a_step_is_read_anew_in_each_way(way):
    read, put = Settable.closure()
    test_a_step_is_read_anew(SimpleNamespace(read=read, put=put), way)


@dataclass(frozen=True)
class Favour:
    """Leave the token that a function gives; of logits with a history or without."""

    read: object

    def __call__(self, *given):
        *_, logits = given
        return jnp.where(jnp.arange(WORDS) == self.read(), logits, -jnp.inf)


@pytest.mark.slow
@pytest.mark.long_except("slots-sampler", "stream-history")
@pytest.mark.parametrize(
    ("way", "kind"), [("generate", "processor"), ("stream", "history"), ("slots", "sampler")]
)
def test_processors_and_samplers_are_read_anew(way, kind):
    read, put = Settable.closure()
    own = {
        "processor": dict(sampler=tj.Sample(Favour(read))),
        "history": dict(processors=(Favour(read),)),
        "sampler": dict(sampler=lambda key, x: jnp.full(x.shape[:-1], read())),
    }[kind]
    if way != "slots":
        own["key"] = jax.random.key(0)
    found = changed(
        SimpleNamespace(put=put), lambda: getattr(out := WAYS[way](plain, **own), "tokens", out)
    )
    assert found == [1, 5]


def test_the_shape_of_a_step_is_read_anew():
    read, put = Settable.closure()

    def step(params, tokens, state, *, valid=None):
        return jnp.zeros((*tokens.shape, read())), state

    first = count_vocab(step, (), 1, state())
    put(5)
    assert (first, count_vocab(step, (), 1, state())) == (1, 5)


CONFIG = tj.ModelConfig(vocab_size=13, d_model=8, num_heads=2, num_layers=1, max_len=16)


def shift(next_fun, args, kwargs, context):
    """Add a vector after the first block."""
    out = next_fun(*args, **kwargs)
    if context.method_name == "__call__" and context.module.path[-1:] == ("block_0",):
        return out[0] + 3 * jnp.arange(8.0)[None, None], *out[1:]
    return out


@pytest.mark.slow
@pytest.mark.long_except("True")
@pytest.mark.parametrize("steered_first", [False, True])
def test_an_interceptor_holds_where_it_stands(steered_first):
    params = tj.init_params(CONFIG, jax.random.key(1))
    step = tj.make_step(tj.build(CONFIG))
    cache = lambda: tj.init_cache(CONFIG, 1, 16)  # noqa: E731

    def log_prob():
        return float(tj.generate(step, params, PROMPT, cache(), num_tokens=1).log_probs[0, 0])

    def right():  # a new function: JAX has no trace of it
        logits = jax.jit(lambda: step(params, PROMPT, cache())[0])()[0, -1]
        return float(jax.nn.log_softmax(logits).max())

    found, wanted = {}, {}
    for steered in (steered_first, not steered_first, steered_first):
        with nn.intercept_methods(shift) if steered else jax.named_scope("plain"):
            found[steered], wanted[steered] = log_prob(), right()
    assert found == pytest.approx(wanted, abs=1e-5)
    assert abs(found[True] - found[False]) > 0.01


@pytest.mark.slow
def test_initial_parameters_of_an_interceptor():
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
def test_a_method_of_our_models_that_was_replaced(monkeypatch):
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
    with monkeypatch.context() as patch:  # an inherited method, which is deleted again
        patch.setattr(tj.build(CONFIG).__class__, "apply", lambda self, *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gen()
    assert gen() == before


@pytest.mark.slow
def test_an_implementation_of_ones_own_is_run_anew(monkeypatch):
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


def test_which_values_bring_foreign_code():
    own = tj.make_step(tj.build(CONFIG))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "a")
    ours = [
        *(own, tj.build(CONFIG).apply, tj.Sample(tj.Temperature(0.5), tj.TopK(3)), len, mesh),
        *(tj.Causal() & ~tj.Window(3), tj.init_cache(CONFIG, 1, 16), jax.nn.silu, jax.nn.gelu),
        *(jnp.dtype("float32"), jnp.float32, functools.partial(jnp.dot, precision=None)),
    ]
    held, array = {}, np.ones(3)
    foreign = [
        tj.Sample(lambda x: x),
        tj.Causal() & tj.Predicate(lambda q, k: k < q),
        functools.partial(own.__call__, lambda: 0),
        jax.jit(lambda x: x),
        *(jnp.frompyfunc(lambda q, k: k < q, 2, 1), np.vectorize(lambda q, k: k < q)),
        *(held.get, array.__add__, functools.partial(held.get, "n")),
    ]
    assert not disturbed() and not any(map(brings_code, ours))
    assert all(map(brings_code, foreign))


def test_foreign_code_may_read_what_a_transformation_traces():
    """Its arguments are known, and the closure alone is mapped or differentiated."""

    @program(static=("function",))
    def call(function, x):
        return function(x)

    x = jnp.arange(3.0)
    scaled = lambda w: call(lambda x: x * w, x)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(scaled)(jnp.array([1.0, 2.0])), [x, 2 * x])
    assert jax.grad(lambda w: scaled(w).sum())(5.0) == 3


@pytest.mark.slow
def test_programs_that_read_other_arguments_are_not_taken_for_each_other():
    def token_of_argument(number):
        def step(params, tokens, state, *, valid=None):
            return jax.nn.one_hot(jnp.full(tokens.shape, params[number]), WORDS), state

        params = jnp.int32(1), jnp.int32(5)
        return tj.generate(step, params, PROMPT, state(), num_tokens=1).tokens.item()

    assert [token_of_argument(0), token_of_argument(1)] == [1, 5]


@pytest.mark.slow
def test_functions_on_the_host_are_the_ones_of_now():
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
def test_runs_of_other_settings_of_jax_have_other_programs():
    of = TrainConfig(model=CONFIG, context=5), lambda batches: batches
    plain, again = (known_programs(*of, trace_context()) for _ in range(2))
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        other = known_programs(*of, trace_context())
    assert plain is again and other is not plain
