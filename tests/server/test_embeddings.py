"""Embeddings over HTTP: vectors match the encoder's, and errors name the input."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np
import pytest

from tests.server.models import tiny
from transformer_jax import ModelConfig, init_params, load_sentence_encoder, save_pretrained
from transformer_jax.cli import serve
from transformer_jax.pretrained.sentences import SentenceEncoder
from transformer_jax.server.app import make_app
from transformer_jax.server.embedder import Embedder
from transformer_jax.server.engine import Engine
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder

pytest.importorskip("starlette")
pytestmark = pytest.mark.usefixtures("quick_compilation")

NAME = "small"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cab", "tab", "é", "the", "##s"]
CONFIG = ModelConfig(
    kind="encoder", vocab_size=len(WORDS), d_model=6, num_layers=1, num_heads=2, d_ff=5, max_len=13,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", type_vocab_size=2,
)  # fmt: skip
KINDS = "Transformer", "Pooling", "Normalize"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a sentence-transformers folder with a WordPiece tokenizer."""
    path = tmp_path_factory.mktemp("folder") / NAME
    save_pretrained(path, CONFIG, init_params(CONFIG, jax.random.key(3)), family="bert")
    parts = [
        {"idx": n, "name": str(n), "path": ("", "1_Pooling", "2_Norm")[n],
         "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(KINDS)
    ]  # fmt: skip
    files = {
        "modules.json": parts,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 6},
        "sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": False},
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
        "special_tokens_map.json": {
            role: f"[{role[:-6].upper()}]"
            for role in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        },
    }
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    (path / "vocab.txt").write_text("\n".join(WORDS))
    return path


@pytest.fixture(scope="module")
def encoder(folder) -> SentenceEncoder:
    return load_sentence_encoder(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer_folder(folder)


@contextlib.contextmanager
def client_of(engine, **options):
    from starlette.testclient import TestClient

    app = make_app(engine, NAME, **options)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(encoder, tokenizer, quick_compilation):
    with client_of(Embedder(encoder, tokenizer, slots=2)) as client:
        yield client


def embed(client, **fields):
    return client.post("/v1/embeddings", json={"model": NAME, "input": "a cab"} | fields)


TEXTS = ["a cab", "the tabs", "é", "cabs the cab a", ""]


def test_openai_client_receives_encoder_embeddings(client, encoder, tokenizer):
    openai = pytest.importorskip("openai")
    want = encoder.encode_texts(TEXTS, tokenizer)
    ids = [tokenizer.encode(text, special_tokens=True).tolist() for text in TEXTS]
    openai_client = openai.OpenAI(base_url="http://testserver/v1", api_key="-", http_client=client)
    for inputs in (TEXTS, ids):
        for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = openai_client.embeddings.create(model=NAME, input=inputs, dimensions=6, **form)
            assert [one.index for one in found.data] == [0, 1, 2, 3, 4]
            assert found.model == NAME and found.usage.prompt_tokens == sum(map(len, ids))
            if form.get("encoding_format") == "base64":  # requested, so the client does not decode
                import base64

                rows = [np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in found.data]
            else:
                rows = [one.embedding for one in found.data]
            np.testing.assert_allclose(np.array(rows), want, atol=1e-6)
    for inputs in (TEXTS[0], ids[0]):
        one = openai_client.embeddings.create(model=NAME, input=inputs)
        np.testing.assert_allclose(one.data[0].embedding, want[0], atol=1e-6)
    assert [model.id for model in openai_client.models.list()] == [NAME]


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        (dict(input=["a", "a " * 8]), "input", r"input[1] has 10 tokens: must have from 1 to 9"),
        (
            dict(input=[2, 11, 3]),
            "input",
            "input[0] contains ID 11, but the model has only 11 tokens",
        ),
        (dict(input=[2, 3, 0]), "input", "input[0] ends with the padding token 0"),
        (dict(input=[]), "input", "at least 1"),
        (dict(input=["a", 3]), "input[1]", "input[1] is 3: must be a string"),
        (dict(input=[[2, 3], []]), "input[1]", "input[1] has 0 items"),
        (dict(input=None), "input", "input is None: must be a string or a list"),
        (dict(dimensions=3), "dimensions", "must be 6, the length of this model's vectors"),
        (dict(encoding_format="int8"), "encoding_format", "must be 'float' or 'base64'"),
        (dict(model="other"), "model", "this server serves 'small'"),
        (dict(tools=[]), "tools", "is not a parameter"),
    ],
)
def test_error_names_invalid_embedding_input(client, fields, param, why):
    response = embed(client, **fields)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and why in error["message"]


def test_each_server_type_describes_only_its_routes(client):
    assert set(client.get("/openapi.json").json()["paths"]) == {
        "/health", "/v1/models", "/v1/models/{model}", "/v1/embeddings"
    }  # fmt: skip
    assert client.get("/health").json() == dict(status="ok", slots=2, running=0, waiting=0)
    for path in ("completions", "chat/completions"):
        response = client.post(f"/v1/{path}", json={"model": NAME})
        assert response.status_code == 400
        assert "embeds texts; use /v1/embeddings" in response.json()["error"]["message"]
    from starlette.testclient import TestClient

    writer = TestClient(make_app(Engine(tiny(), slots=1), NAME))
    error = embed(writer).json()["error"]
    assert "'small' does not embed texts: serve the folder of a sentence" in error["message"]
    assert "/v1/embeddings" not in writer.get("/openapi.json").json()["paths"]


@pytest.mark.slow
def test_embedding_requests_past_queue_or_time_limit_are_rejected(encoder, tokenizer):
    embedder, go = Embedder(encoder, tokenizer, queue=1), threading.Event()

    class Waiting:
        config, max_len, prompt, lower_case = encoder.config, 9, "", False

        def encode_ids(self, ids, *, batch_size):
            go.wait(20)
            return encoder.encode_ids(ids, batch_size=batch_size)

    embedder.encoder = Waiting()
    with client_of(embedder, timeout=0.5) as client:
        late = [embed(client) for _ in range(2)]  # their clients no longer wait
        assert [one.status_code for one in late] == [503, 503]
        refused = embed(client)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        go.set()
        embedder.stop()
        assert embed(client).status_code == 503 and client.get("/health").status_code == 503


def test_queue_capacity_may_exceed_asyncio_thread_count(encoder, tokenizer):
    embedder, go = Embedder(encoder, tokenizer, queue=40), threading.Event()  # asyncio has 32

    class Waiting:
        config, max_len, prompt, lower_case = encoder.config, 9, "", False

        def encode_ids(self, ids, *, batch_size):
            go.wait(20)
            return np.zeros((len(ids), 6), np.float32)

    embedder.encoder = Waiting()
    with client_of(embedder) as client, ThreadPoolExecutor(42) as pool:
        sent = [pool.submit(embed, client) for _ in range(42)]
        try:
            refused = next(as_completed(sent, timeout=15)).result()
        finally:
            go.set()
        codes = [one.result().status_code for one in sent]
    assert refused.status_code == 429 and codes.count(200) == 41


def test_serve_command_accepts_sentence_transformers_folder(folder, monkeypatch, capsys):
    uvicorn = pytest.importorskip("uvicorn")
    served = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config.app))
    # Log handlers would keep this test's stderr.
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    command = ["--model", str(folder), "--port", "0", "--slots", "3"]
    assert serve.main(command) == 0
    assert capsys.readouterr().err == "serve: stopped\n"
    from starlette.testclient import TestClient

    assert len(embed(TestClient(served[0])).json()["data"][0]["embedding"]) == 6
    assert serve.main([*command, "--context", "5"]) == 2
    assert (
        capsys.readouterr().err == "serve: context is 5: a sentence encoder does not support it\n"
    )
