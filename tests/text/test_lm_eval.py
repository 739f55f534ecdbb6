"""The lm-eval adapter gives the same results as lm-eval's own backend on the same weights.

`pytest -m slow -s tests/text/test_lm_eval.py` prints the measures of both side by side.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these packages warn about each other
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tests.support.compilation import quick_environment
from tests.support.published import randomised, saved
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.text.language_model import load
from transformer_jax.text.lm_eval import TransformerJaxLM, rolling_windows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of lm-eval, datasets and transformers
    pytest.mark.usefixtures("quick_compilation"),
]

WORDS = "the cat sat on a mat and saw that dog run far away from home to eat some fish".split()
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EXACT = 1e-4
"""Tolerance of a log-likelihood: float32 sums in another order."""


def sentences(count: int, length: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(length)) for _ in range(count)]


def tokenizer_of(kind: str) -> Any:
    """A byte-level BPE with the special tokens of Llama (<s> first) or GPT-2 (one token)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"] if kind == "gpt2" else ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library.train_from_iterator(sentences(40, 9, 1), trainer)
    if kind == "llama":
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token=special[0], eos_token=special[-1],
        chat_template=TEMPLATE,
    )  # fmt: skip


def model_of(kind: str, tokenizer: Any) -> Any:
    sizes = dict(
        vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    if kind == "gpt2":
        config = transformers.GPT2Config(
            **sizes, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        **sizes, hidden_size=32, intermediate_size=47, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory) -> Path:
    """Folder of a random model with its tokenizer, written by this library."""
    first = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizer_of(request.param)
    torch.manual_seed(5)
    saved(randomised(model_of(request.param, tokenizer), 7), first)
    tokenizer.save_pretrained(first)
    config, params = load_pretrained(first, dtype="float32")
    save_pretrained(first.parent / f"{first.name}-ours", config, params, like=first)
    return first.parent / f"{first.name}-ours"


UNTIL = ["a", "\n"]


def written(folder: Path, prompts: list[str]) -> list[str]:
    """Return torch's greedy continuation of each prompt, up to a stop string."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=11, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        found.append(text.split("a")[0].split("\n")[0])
    return found


def first_tokens(folder: Path, prompts: list[str]) -> list[str]:
    """Return torch's likeliest token after each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(tokenizer(one, return_tensors="pt").input_ids).logits for one in prompts]
    return [tokenizer.decode(one[0, -1].argmax()) or "x" for one in logits]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, folder) -> Any:
    """Tasks on local files, one for each type of output."""
    place = tmp_path_factory.mktemp("tasks")
    draw = random.Random(3)

    def write(name: str, rows: list[dict[str, Any]], **task: Any) -> None:
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        task |= dict(
            task=name, dataset_path="json", test_split="test",
            dataset_kwargs={"data_files": {"test": str(place / f"{name}.jsonl")}},
        )  # fmt: skip
        (place / f"{name}.yaml").write_text(json.dumps(task))  # which YAML reads

    write("local_choice", [
        {
            "question": sentence,
            "choices": [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for sentence in sentences(60, 8, 11)
    ], output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
        metric_list=[{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")])  # fmt: skip
    write("local_rolling", [{"text": text} for text in sentences(7, 61, 13)],
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in
                     ("word_perplexity", "byte_perplexity", "bits_per_byte")])  # fmt: skip
    prompts = sentences(40, 5, 19)
    likely = [text if n % 4 else " fish" for n, text in enumerate(first_tokens(folder, prompts))]
    write("local_likely", [{"q": q, "a": a} for q, a in zip(prompts, likely, strict=True)],
        output_type="loglikelihood", doc_to_text="{{q}}", doc_to_target="{{a}}",
        target_delimiter="", metric_list=[{"metric": "acc"}, {"metric": "perplexity"}])  # fmt: skip
    prompts = sentences(12, 5, 17)
    right = [text if n % 3 else "x" for n, text in enumerate(written(folder, prompts))]
    write("local_texts", [{"q": q, "a": a} for q, a in zip(prompts, right, strict=True)],
        output_type="generate_until", doc_to_text="{{q}}", doc_to_target="{{a}}",
        generation_kwargs={"until": UNTIL, "max_gen_toks": 11, "do_sample": False},
        metric_list=[{"metric": "exact_match"}])  # fmt: skip
    return TaskManager(include_path=str(place), include_defaults=False)


def theirs(folder: Path, **options: Any) -> Any:
    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, **options)


def ours(folder: Path, **options: Any) -> TransformerJaxLM:
    return TransformerJaxLM(str(folder), batch_size=5, **options)


def judged(model: Any, tasks: Any, **options: Any) -> Any:
    names = ["local_choice", "local_likely", "local_texts", "local_rolling"]
    return lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True, **options
    )


def answers(found: Any, task: str) -> list[Any]:
    return [sample["resps"] for sample in found["samples"][task]]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Cache data sets in a temporary folder."""
    import datasets

    kept = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = kept


def test_tasks_match_lm_eval_backend(folder, tasks):
    one, two = judged(theirs(folder), tasks), judged(ours(folder), tasks)

    def both(task: str, name: str) -> tuple[float, float]:
        found = [float(x["results"][task][f"{name},none"]) for x in (one, two)]
        print(f"{folder.name:12} {task:14} {name:16} {found[0]!r:22} {found[1]!r}")
        return found[0], found[1]

    for name in ("acc", "acc_norm", "acc_bytes"):
        left, right = both("local_choice", name)
        assert 0 < left < 1 and left == right
    left, right = both("local_likely", "acc")
    assert 0 < left < 1 and left == right
    left, right = both("local_likely", "perplexity")
    assert left == pytest.approx(right, rel=1e-5)
    left, right = both("local_texts", "exact_match")
    assert left == right == pytest.approx(8 / 12)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        left, right = both("local_rolling", name)
        assert left == pytest.approx(right, rel=1e-6)
    assert answers(one, "local_texts") == answers(two, "local_texts")
    flat = [np.array(answers(x, "local_choice"), float).reshape(-1, 2) for x in (one, two)]
    np.testing.assert_allclose(*(x[:, 0] for x in flat), rtol=0, atol=EXACT)
    assert (flat[0][:, 1] == flat[1][:, 1]).all()
    rolled = [np.array(answers(x, "local_rolling"), float).ravel() for x in (one, two)]
    np.testing.assert_allclose(*rolled, rtol=0, atol=EXACT)
    each = (np.abs(x - y).max() for x, y in (flat, rolled))
    print(folder.name, "largest differences:", *(f"{x:.1e}" for x in each))


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, one, n) for n, one in enumerate(arguments)]


@pytest.mark.parametrize("options", [{}, {"add_bos_token": False}, {"max_length": 23}], ids=str)
def test_individual_requests_match_lm_eval_backend(folder, options):
    left, right = theirs(folder, **options), ours(folder, **options)
    cat, long = "the cat sat", " ".join(sentences(1, 90, 23))
    assert left.max_length == right.max_length and left.prefix_token_id == right.prefix_token_id
    assert left.eot_token_id == right.eot_token_id
    bos = left.tokenizer.bos_token
    for text in (cat, f"{bos}{cat}", f"a {bos}b", "", " a  b\n", "\u00e9\u4e2d"):
        for adds in (None, False):
            assert left.tok_encode(text, adds) == right.tok_encode(text, adds)
    ids = left.tok_encode(cat)
    likely = left.model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    (*_, a, b, c, d) = likely[0].tolist()
    for after, best in (
        ([a], True),
        ([a, b, c, d], True),
        ([a, b, c, d + 1], False),
        ([(a + 1) % 250], False),
    ):
        request = [(None, ids, after)]
        (one,), (two,) = (x._loglikelihood_tokens(request) for x in (left, right))
        assert one[1] == two[1] == best and one[0] == pytest.approx(two[0], abs=EXACT)
    requests = instances(
        "loglikelihood", ("", cat), (f"{cat} ", "on a mat"), (cat, " on a mat"),
        (cat, " on"), (cat, " a"), (long, " saw that"), (long, " run"), (bos, cat),
        ("the", f" {cat}"),
    )  # fmt: skip
    one, two = left.loglikelihood(requests), right.loglikelihood(requests)
    np.testing.assert_allclose([p for p, _ in one], [p for p, _ in two], rtol=0, atol=EXACT)
    assert [best for _, best in one] == [best for _, best in two]
    requests = instances("loglikelihood_rolling", (long,), (cat,), ("",))
    one, two = (x.loglikelihood_rolling(requests) for x in (left, right))
    np.testing.assert_allclose(one, two, rtol=0, atol=EXACT)
    greedy = {"until": ["a", "o"], "max_gen_toks": 9}
    requests = instances(
        "generate_until", (cat, greedy), (long, greedy), (cat, {"max_gen_toks": 5})
    )
    assert left.generate_until(requests) == right.generate_until(requests)


def test_chat_templates_match_lm_eval_backend(folder):
    left, right = theirs(folder), ours(folder)
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat "}]
    stripping = TEMPLATE.replace("m['content']", "m['content'] | trim")
    tokenizer = right.model.tokenizer
    for template in (stripping, "{{ messages[-1]['content'] }}{{ eos_token }}"):
        left.tokenizer.chat_template = template
        changed = replace(tokenizer, chat_templates=(("default", template),))
        again = TransformerJaxLM(
            replace(right.model, model=replace(right.model.model, tokenizer=changed))
        )
        for more in (False, True):
            texts = (x.apply_chat_template(talk, add_generation_prompt=more) for x in (again, left))
            assert len({*texts}) == 1
    left.tokenizer.chat_template = TEMPLATE
    assert right.apply_chat_template(talk[:1]) == left.apply_chat_template(talk[:1])
    for more in (False, True):
        texts = (x.apply_chat_template(talk, add_generation_prompt=more) for x in (right, left))
        assert len({*texts}) == 1
    assert right.chat_template(True) == left.chat_template(True) == TEMPLATE
    assert right.chat_template(False) is None
    assert right.tokenizer_name == left.tokenizer_name


def test_chat_tasks_match_lm_eval_backend(folder, tasks):
    options = dict(apply_chat_template=True, limit=7)
    one, two = (judged(x, tasks, **options) for x in (theirs(folder), ours(folder)))
    for task in ("local_choice", "local_texts"):
        prompts = [[s["arguments"] for s in x["samples"][task]] for x in (one, two)]
        assert prompts[0] == prompts[1] and "<|assistant|>" in str(prompts[0])
    flat = [np.array(answers(x, "local_choice"), float).reshape(-1, 2) for x in (one, two)]
    np.testing.assert_allclose(*flat, rtol=0, atol=EXACT)
    assert answers(one, "local_texts") == answers(two, "local_texts")


def test_seed_determines_sampled_texts(folder):
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 0.9, "max_gen_toks": 9}
    requests = instances("generate_until", *[("the cat", drawn)] * 3)
    first = ours(folder).generate_until(requests)
    assert first == ours(folder).generate_until(requests) and len(set(first)) > 1
    assert first != ours(folder, seed=1).generate_until(requests)


def test_lm_eval_command_runs_model(folder, tasks, tmp_path):
    place = tasks.task_index["local_choice"].yaml_path.parent
    arguments = (
        f"--model transformer_jax --model_args pretrained={folder},max_length=40 --batch_size 3 "
        f"--tasks local_choice --include_path {place} --limit 5 --output_path {tmp_path / 'found'}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "transformer_jax.text.lm_eval", "run", *arguments.split()],
        capture_output=True, text=True, timeout=250,
        env=quick_environment() | {"HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "found").rglob("results*.json")
    found = json.loads(file.read_text())["results"]["local_choice"]["acc,none"]
    again = judged(ours(folder), tasks, limit=5)["results"]["local_choice"]["acc,none"]
    assert found == again


def test_lm_eval_builds_model_from_arguments(folder, tasks):
    arguments = f"pretrained={folder},batch_size=3,max_length=32,device=cuda:0"
    found = lm_eval.simple_evaluate(
        model="transformer_jax", model_args=arguments, tasks=["local_choice"], task_manager=tasks,
        limit=5, bootstrap_iters=0,
    )  # fmt: skip
    assert found["config"]["model"] == "transformer_jax"
    assert found["results"]["local_choice"]["acc,none"] in [n / 5 for n in range(6)]


@pytest.mark.parametrize("longest", [2, 3, 7, 64])
def test_rolling_windows_match_lm_eval(longest):
    for count in (0, 1, 2, 6, 7, 8, 14, 15, 23):
        ids = [*range(100, 100 + count)]
        expected = map(make_disjoint_window, get_rolling_token_windows(ids, 5, longest, 1))
        found = [(list(x.context), list(x.continuation)) for x in rolling_windows(ids, 5, longest)]
        assert found == [(list(a), list(b)) for a, b in expected]


def test_lm_eval_accepts_loaded_model_and_rejects_invalid_arguments(folder, tmp_path):
    model = load(folder)
    made = TransformerJaxLM(model)
    requests = instances("loglikelihood", (" ", "cat"), ("", " cat"))  # both follow the begin token
    assert made.loglikelihood(requests)[0] == pytest.approx(made.loglikelihood(requests)[1])
    wrong = [
        (lambda: TransformerJaxLM(model, dtype="float32"), "dtype is 'float32': the model is al"),
        (lambda: ours(folder, parallelize=True), "has no argument 'parallelize'"),
        (lambda: TransformerJaxLM(model, batch_size="auto"), "batch_size is 'auto': must be an"),
        (lambda: TransformerJaxLM(model, max_length=65), "max_length is 65: must be at most 64"),
        (lambda: made.loglikelihood(instances("loglikelihood", ("the", ""))), "continuation is ''"),
        (lambda: made.generate_until(instances("generate_until", ("the", {"max_gen_toks": 64}))),
         "max_gen_toks is 64: must be below max_length, 64"),
        (lambda: made.chat_template("other"), None),
    ]  # fmt: skip
    for call, message in wrong:
        if message is None:
            assert call() == TEMPLATE  # a single template has any name
            continue
        with pytest.raises((ValueError, TypeError), match=message) as refused:
            call()
        assert "\n" not in str(refused.value)
