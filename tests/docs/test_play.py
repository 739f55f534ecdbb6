"""The page docs/play, compared with the library: masks, tiles, a ring cache, a small decoder.

The tests of its arithmetic need node, and the tests of the page need playwright and Chromium.
The other tests always run.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reproduce import play
from transformer_jax import build, cache, init_params
from transformer_jax.attention import masks

pytestmark = pytest.mark.usefixtures("quick_compilation")

FOLDER = Path(__file__).parents[2] / "docs" / "play"
FILES = ("play.html", "play.css", "play.js", "model.js", "index.md")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")
T = 13
NAMES = {name: getattr(masks, name) for name in masks.__all__} | {"jnp": jnp}


class Elements(HTMLParser):
    """Elements of a page as (tag, attributes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements():
    return Elements((FOLDER / "play.html").read_text()).found


@pytest.fixture(scope="module")
def trained():
    """Return the content of model.js, and its weights as params."""
    return play.read((FOLDER / "model.js").read_text())


# Without a browser


def test_playground_files_load_only_local_files(elements):
    for name in FILES:
        assert not re.search(
            r"https?://|//cdn|@import|url\(|fetch\(|XMLHttp", (FOLDER / name).read_text()
        )
    loaded = [a.get("src") or a["href"] for tag, a in elements if tag in ("script", "link")]
    assert sorted(loaded) == ["model.js", "play.css", "play.js"]
    assert all((FOLDER / name).is_file() for name in loaded)


def test_playground_elements_have_labels_and_no_inline_handlers(elements):
    ids = [a["id"] for _, a in elements if "id" in a]
    assert len(ids) == len(set(ids)) > 30
    assert [a for _, a in elements for name in a if name.startswith("on")] == []
    for tag, a in elements:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert a.get(name) is None or a[name] in ids, (tag, a)
        assert not (a.get("href") or "").startswith("#") or a["href"][1:] in ids
    script = (FOLDER / "play.js").read_text()
    named = set(re.findall(r'\$\("([\w-]+)"\)|\bon\("([\w-]+)"', script))
    assert {a or b for a, b in named} <= set(ids)


def test_model_file_matches_script_output_and_is_small(trained):
    model, params = trained
    assert tuple(model["words"]) == play.WORDS and tuple(model["examples"]) == play.EXAMPLES
    assert all(model["config"][name] == getattr(play.CONFIG, name) for name in model["config"])
    assert play.written(params) == (FOLDER / "model.js").read_text()
    assert (FOLDER / "model.js").stat().st_size < 300_000


@pytest.mark.slow
def test_playground_model_matches_config_and_predicts_verb_agreement(trained):
    shapes = jax.eval_shape(lambda: init_params(play.CONFIG, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, trained[1]) == jax.tree.map(jnp.shape, shapes)
    ids, follow = play.stories(np.random.default_rng(71), 100)
    logits, _ = build(play.CONFIG).apply({"params": trained[1]}, ids[:, :-1])
    right = np.asarray(logits.argmax(axis=-1)) == ids[:, 1:]
    assert follow.sum() > 200 and right[follow[:, 1:]].mean() > 0.95


@pytest.mark.slow
def test_playground_model_file_round_trips(tmp_path):
    out = tmp_path / "model.js"
    share = play.main(["--steps", "2", "--batch", "3", "--out", str(out)])
    _, params = play.read(out.read_text())
    assert 0 <= share < 0.9 and play.written(params) == out.read_text()


# Expected content of the page


def random_mask(rng: random.Random, depth: int = 2) -> str:
    """Return a mask expression for about T positions, as a user may type it."""
    if depth and rng.random() < 0.75:
        inner = random_mask(rng, depth - 1)
        if rng.random() < 0.25:
            return f"~({inner})"
        return f"({inner}) {rng.choice('&|')} ({random_mask(rng, depth - 1)})"
    n, m = rng.randrange(2, 6), rng.randrange(1, 4)
    ids = sorted(rng.randrange(4) for _ in range(T))
    bools = [rng.random() < 0.7 for _ in range(T)]
    return rng.choice([
        "Everything()", "Causal()", "Causal()", f"Window({n})", f"Window(None, {m})",
        f"Window({n}, {m})", f"Window(left={rng.randrange(2)}, right={rng.randrange(2)})",
        f"Prefix(jnp.array([{rng.randrange(T + 2)}]))", f"Segments([{ids}])",
        f"Segments([{ids}], k_ids=[{ids[::-1]}])", f"Segments([{ids[:-2]}])",
        f"Padding([{bools}])", f"Padding(jnp.array([{bools[:-3]}]))",
        f"Dense({[bools[i:] + bools[:i] for i in range(T)]})",
        f"Predicate(lambda q, k: (q - k) % {n} == 0)",
        f"Predicate(lambda q, k: q // {n} == k // {n})",
        f"Predicate(lambda a, b: (abs(a - b) <= {n}) & ~(a * {m} < b + {n}))",
        f"Predicate(lambda q, k: (k - q) // {n} == -{m})",
    ])  # fmt: skip


def cases(count: int) -> list[dict]:
    rng = random.Random(20_261_127)
    sizes = [(2, 3), (5, 2), (4, 4), (7, 1)]
    return [{"text": random_mask(rng), "block": sizes[i % len(sizes)]} for i in range(count)]


def check_mask(case: dict, found: dict) -> None:
    """Compare a matrix and its tile classes with those of the displayed expression."""
    mask, places = eval(found["text"], dict(NAMES)), np.arange(T, dtype=np.int32)
    block_q, block_k = case["block"]

    @jax.jit  # one program, not one per operation
    def both():
        plan = mask.block_plan(places, places, block_q=block_q, block_k=block_k)
        return mask.materialize(places, places)[0, 0], plan.classes[0, 0]

    visible, classes = jax.device_get(both())
    assert np.array_equal(np.broadcast_to(visible, (T, T)), found["matrix"]), case["text"]
    assert np.array_equal(classes, found["classes"]), case["text"]


def sentences(count: int) -> list[list[int]]:
    """Return the ids of stories of only three lengths, to compile few programs."""
    ids, _ = play.stories(np.random.default_rng(73), count)
    return [row[: (5, 11, 17)[i % 3]].tolist() for i, row in enumerate(ids)]


@jax.jit
def attended(params, ids):
    model = build(play.CONFIG)
    return model.apply({"params": params}, ids, capture=("block_*/attention/weights",))


def largest_difference(params, ids: list[int], found: dict) -> float:
    """Return the largest difference of weights, probabilities and (relative) logits."""
    logits, _, captured = attended(params, jnp.array([ids]))
    weights = [captured[f"block_{i}/attention/weights"][0] for i in range(play.CONFIG.num_layers)]
    assert np.array(found["weights"]).shape == np.array(weights).shape
    return max(
        float(np.abs(np.array(found["weights"]) - np.array(weights)).max()),
        float(np.abs(np.array(found["probabilities"]) - jax.nn.softmax(logits[0])).max()),
        float(np.abs(np.array(found["logits"]) - logits[0]).max() / np.abs(logits).max()),
    )


def check_ring(found: list[dict]) -> None:
    """Compare slot positions and visible slots with the library's cache and mask."""
    for case in found:
        window, sinks, capacity, length = (
            case[x] for x in ("window", "sinks", "capacity", "length")
        )
        places = jnp.arange(length)[None]
        empty = jnp.zeros((1, length, 1, 1))
        state = cache.update(cache.init(1, capacity, 1, 1, sinks=sinks), empty, empty, places)
        mask = masks.Causal() & (masks.Window(window) | masks.Prefix(jnp.array([sinks])))
        seen = mask.materialize(jnp.array([length - 1]), state.positions)[0, 0, 0]
        assert state.positions[0].tolist() == case["positions"], case
        assert seen.tolist() == case["seen"], case


RINGS = [(3, 0, 3, 11), (5, 2, 7, 17), (2, 1, 5, 13), (7, 3, 10, 5)]
"""(window, sinks, slots, tokens read)"""


def in_node(script: str, given: object) -> object:
    """Run a script in node and return its result; `page` is the arithmetic of the page."""
    text = f"""const page = require({json.dumps(str(FOLDER / "play.js"))});
const given = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify((() => {{ {script} }})()));"""
    done = subprocess.run(
        [NODE, "-e", text], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_playground_masks_and_tiles_match_library(count):
    given = cases(count)
    found = in_node(
        f"""return given.map(({{text, block}}) => {{
            const mask = page.parseMask(text);
            return {{text: page.maskText(mask), matrix: page.maskMatrix(mask, {T}),
                     classes: page.tileClasses(mask, {T}, ...block)}};
        }});""",
        given,
    )
    assert {x for one in found for row in one["classes"] for x in row} == {0, 1, 2}
    for case, one in zip(given, found, strict=True):
        check_mask(case, one)


@pytest.mark.slow
@needs_node
@pytest.mark.parametrize("rings", [RINGS[:1], pytest.param(RINGS, marks=pytest.mark.slow)])
def test_playground_ring_slots_match_library(rings):
    found = in_node(
        """return given.map(([window, sinks, capacity, length]) => {
            const {positions} = page.cacheAfter(length, capacity, sinks);
            const seen = positions.map((p) => page.cacheSees(length - 1, p, window, sinks));
            return {window, sinks, capacity, length, positions, seen};
        });""",
        rings,
    )
    check_ring(found)


@pytest.mark.slow
@needs_node
@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_playground_attention_and_probabilities_match_library(trained, count):
    model, params = trained
    ids = sentences(count)
    found = in_node(
        """const model = page.loadModel(given.model);
           return given.ids.map((x) => page.forward(model, x));""",
        {"model": model, "ids": ids},
    )
    for one, result in zip(ids, found, strict=True):
        assert largest_difference(params, one, result) < 1e-5


@needs_node
@pytest.mark.parametrize(
    "text, line",
    [
        ("", "write a mask"),
        ("Causal(", "Causal takes ()"),
        ("Causal() and Window(2)", "combine masks with &, | and ~, not with and"),
        ("Windo(3)", "Windo is no mask: there are Everything, Causal"),
        ("Causal", "Causal is a class: write Causal()"),
        ("Window(-1)", "Window: left is -1: must be an integer of at least 0"),
        ("Window(None)", "Window(None, None) has no bound"),
        ("Window(2, 3, 4)", "Window takes (left, right)"),
        ("Segments([1, 2])", "Segments: q_ids must be an array i32[B, T]"),
        ("Segments([[1], [2]])", "Segments: q_ids has 2 rows; the page draws a batch of 1"),
        ("Padding([[1, 0]])", "Padding: valid must be an array bool[B, S]"),
        ("Predicate(lambda q, k: q - k)", "Predicate: fn returned int32: must be bool"),
        ("Predicate(lambda q, k: q - k & k)", "& joins comparisons"),
        ("Predicate(lambda q, k: q < k < 3)", "compare two at a time"),
        ("Predicate(lambda q, k: q % k == 0)", "% takes a number of 1 or more on its right"),
        ("Causal() & Window(4) $", "“$” at character 22 is not part of a mask"),
        ("Window(99999999999)", "99999999999 does not fit int32"),
    ],
)  # fmt: skip
def test_invalid_mask_raises_one_line_error(text, line):
    message = in_node(
        "try { page.parseMask(given); return ''; } catch (e) { return e.message; }", text
    )
    assert line in message and "\n" not in message


@pytest.mark.slow
@needs_node
def test_arbitrary_text_is_valid_mask_or_rejected_in_one_line():
    rng = random.Random(79)
    texts = ["(" * 5000, "~" * 5000, "Predicate(lambda", "Predicate(lambda q,", "Window(", "tj."]
    for _ in range(2000):
        text = random_mask(rng)
        at, cut = rng.randrange(len(text)), rng.randrange(5)
        texts.append(text[:at] + rng.choice("()[],~&|q1 =.") * rng.randrange(3) + text[at + cut :])
    found = in_node(
        f"""return given.map((text) => {{
            try {{ page.maskMatrix(page.parseMask(text), {T}); return ""; }}
            catch (wrong) {{ return `${{wrong.constructor.name}}: ${{wrong.message}}`; }}
        }});""",
        texts,
    )
    refused = [line for line in found if line]
    assert len(refused) > 300 and "" in found
    assert [line for line in refused if not re.fullmatch(r"Wrong: \S.*", line)] == []


# In a browser


@pytest.fixture(scope="module")
def page():
    """Open the page as a file in Chromium; fail on page errors and on requests for other files."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with driver.sync_playwright() as started:
        own = shutil.which("chromium") or shutil.which("google-chrome")
        if not (own or Path(started.chromium.executable_path).exists()):
            pytest.skip("no Chromium is installed")
        browser = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 390, "height": 800})
        errors, requests = [], []
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto((FOLDER / "play.html").as_uri())
        yield opened
        assert errors == []
        assert {url.rpartition("/")[2] for url in requests} <= set(FILES)
        browser.close()


@pytest.mark.slow
def test_playground_page_draws_masks_like_library(page):
    page.locator("#mask-length").fill(str(T))
    read = """() => {
        const cells = [...document.querySelectorAll("#mask-matrix .cell")];
        return {text: document.querySelector("#mask-python").textContent,
                visible: cells.map((c) => c.classList.contains("visible")),
                kinds: cells.map((c) => ["skipped", "masked", "whole"]
                    .findIndex((x) => c.classList.contains(x)))};
    }"""
    for case in cases(50):
        case["block"] = (case["block"][0] // 2 * 2, 4)  # the page offers these sizes
        page.locator("#mask-block-q").select_option(str(case["block"][0]))
        page.locator("#mask-block-k").select_option(str(case["block"][1]))
        page.locator("#mask-text").fill(case["text"])
        assert page.locator("#mask-wrong").inner_text() == ""
        found = page.evaluate(read)
        tiles = np.array(found["kinds"]).reshape(T, T)[:: case["block"][0], :: case["block"][1]]
        matrix = np.array(found["visible"]).reshape(T, T)
        check_mask(case, {"text": found["text"], "matrix": matrix, "classes": tiles})


@pytest.mark.slow
def test_playground_page_draws_attention_like_library(page, trained):
    model, params = trained
    for i, ids in enumerate(sentences(20)):
        words = [model["words"][x] for x in ids]
        page.locator("#attention-text").fill(" ".join(words))
        found = page.evaluate(
            """ids => { const page = document.querySelector("#play").arithmetic;
                        return page.forward(page.model, ids); }""",
            ids,
        )
        assert largest_difference(params, ids, found) < 1e-5
        layer, head, query = i % 2, i // 2 % 4, 3
        page.locator("#attention-heads label").nth(4 * layer + head).click()
        page.locator("#attention-tokens button").nth(query).focus()
        shown = page.locator("#attention-tokens button").evaluate_all(
            "all => all.map((button) => Number(button.dataset.weight))"
        )
        assert shown == pytest.approx(found["weights"][layer][head][query], abs=1e-12)
        likeliest = page.locator("#attention-next li").first
        best = int(np.argmax(found["probabilities"][query]))
        assert likeliest.get_attribute("data-word") == model["words"][best]
        assert (
            float(likeliest.get_attribute("data-probability"))
            == found["probabilities"][query][best]
        )


@pytest.mark.slow
def test_playground_page_advances_ring_like_library(page):
    page.locator("#cache-text").fill(" ".join(f"w{i}" for i in range(19)))
    found = []
    for window, sinks, capacity, length in RINGS:
        page.locator("#cache-window").fill(str(window))
        page.locator("#cache-sinks").fill(str(sinks))
        page.locator("#cache-spare").fill(str(capacity - window - sinks))
        page.locator("#cache-step").fill(str(length - 1))
        page.locator("#cache-next").click()
        slots = page.locator("#cache-slots li").all()
        found.append({
            "window": window, "sinks": sinks, "capacity": capacity, "length": length,
            "positions": [int(slot.get_attribute("data-position")) for slot in slots],
            "seen": ["seen" in slot.get_attribute("class").split() for slot in slots],
        })  # fmt: skip
    check_ring(found)


@pytest.mark.slow
def test_playground_page_is_accessible_and_reports_errors(page):
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    paper = "getComputedStyle(document.querySelector('#play button')).backgroundColor"
    light = page.evaluate(paper)
    page.evaluate("document.body.dataset.mdColorScheme = 'slate'")  # the site's color switch
    assert page.evaluate(paper) != light
    page.evaluate("delete document.body.dataset.mdColorScheme")
    page.locator("#mask-text").fill("Causal() & Window(4)")
    page.locator("#mask-matrix [tabindex='0']").focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    description = page.locator("#mask-cell").inner_text()
    assert re.match(r"Query \d+, key 1: ", description)
    assert page.locator("#mask-matrix [tabindex='0']").count() == 1
    for field, text, line in (
        ("mask", "Windo(3)", "Windo is no mask"),
        ("attention", "the old elephants sleep", "“elephants” is not one of the"),
        ("cache", " ", "write a text of at least one word"),
    ):
        page.locator(f"#{field}-text").fill(text)
        assert line in page.locator(f"#{field}-wrong").inner_text()
        assert page.locator(f"#{field}-text").get_attribute("aria-invalid") == "true"
    page.locator("#cache-text").fill("a b c")
    page.locator("#cache-window").fill("0")
    assert (
        "Window is “0”: must be a whole number from 1" in page.locator("#cache-wrong").inner_text()
    )
    marked = page.locator("[aria-invalid]").evaluate_all("all => all.map((field) => field.id)")
    assert marked == ["mask-text", "cache-window", "attention-text"]
    page.locator("#mask-text").fill("Causal()")
    page.locator("#mask-kind").select_option("Prefix")
    page.locator("#mask-fields input").fill("x")
    page.locator("#mask-add").click()
    assert page.locator("#mask-field-0").get_attribute("aria-invalid") == "true"
    page.locator("#mask-fields input").fill("2")
    page.locator("#mask-join").select_option("|")
    page.locator("#mask-add").click()
    assert page.locator("#mask-python").inner_text() == "Causal() | Prefix(jnp.array([2]))"
    assert page.locator("#mask-wrong").inner_text() == ""
