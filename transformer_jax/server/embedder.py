"""Embedder that processes requests one at a time, with the texts of a request in batches.

The vectors are the same as from `SentenceEncoder.encode_texts`, but texts that are too long are
rejected.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from transformer_jax.checks import check_count
from transformer_jax.pretrained.sentences import SentenceEncoder, TextTokenizer
from transformer_jax.server.protocol import EmbeddingRequest, RequestError
from transformer_jax.tokenizers.special import check_unpadded
from transformer_jax.tokenizers.utf8 import DataError


class Embedder:
    """Encoder for texts from many clients.

    Args:
        encoder: the sentence encoder.
        tokenizer: the tokenizer of the encoder's folder.
        slots: maximum number of texts per batch.
        queue: maximum number of waiting requests.

    Raises:
        ValueError: if a count is not an integer of at least 1.
    """

    def __init__(
        self, encoder: SentenceEncoder, tokenizer: TextTokenizer, *, slots: int = 8, queue: int = 64
    ) -> None:
        for name, count in dict(slots=slots, queue=queue).items():
            check_count(name, count, 1)
        self.encoder, self.tokenizer, self.slots, self.queue = encoder, tokenizer, slots, queue
        self.context = encoder.max_len
        self.alive = True
        self._present = 0  # number of requests that are waiting or being encoded
        self._counting, self._encoding = threading.Lock(), threading.Lock()
        # The pool has one thread for each waiting request, one for the current request, and one for
        # a request to reject. In asyncio's smaller default pool, requests would wait without being
        # counted.
        self.threads = ThreadPoolExecutor(queue + 2, "embedder")

    @property
    def running(self) -> int:
        """Number of requests that are being encoded."""
        return int(self._encoding.locked())

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return max(0, self._present - 1)

    def start(self) -> None:
        """Compile the program for one short text, so that the first client need not wait."""
        self.encoder.encode_ids([np.zeros(1, np.int32)], batch_size=self.slots)

    def stop(self) -> None:
        """Finish the current request, and reject all further requests."""
        self.alive = False
        with self._encoding:
            pass

    def embed(self, request: EmbeddingRequest) -> tuple[np.ndarray, int]:  # f32[n, D]
        """Return a vector for each input, and the total number of tokens.

        This method can be called from any thread. It waits for earlier requests. Raises
        RequestError if an input is invalid.
        """
        width = self.encoder.config.d_model
        if request.dimensions not in (None, width):
            message = (
                f"dimensions is {request.dimensions}: must be {width}, the length of this model's "
                "vectors"
            )
            raise RequestError(message, param="dimensions")
        ids = [self._ids(one, n) for n, one in enumerate(request.inputs)]
        with self._counting:
            if self._present > self.queue:
                message = f"{self.queue} requests are already waiting: try again later"
                raise RequestError(message, 429, code="queue_full")
            self._present += 1
        try:
            with self._encoding:
                if not self.alive:
                    raise RequestError("the server is stopping", 503, code="stopping")
                vectors = self.encoder.encode_ids(ids, batch_size=self.slots)
        finally:
            with self._counting:
                self._present -= 1
        # JSON cannot represent NaN.
        if not np.isfinite(vectors).all():
            raise RequestError("the model's vectors are not finite", 500)
        return vectors, sum(map(len, ids))

    def _ids(self, value: str | tuple[int, ...], n: int) -> np.ndarray:  # i32[1..max_len]
        """Return the token IDs of the n-th input. An input that consists of IDs is unchanged."""
        encoder, name = self.encoder, f"input[{n}]"
        if isinstance(value, str):
            text = encoder.prompt + value
            text = text.lower() if encoder.lower_case else text
            ids = np.asarray(self.tokenizer.encode(text, special_tokens=True), np.int32)
        else:
            ids = np.array(value, np.int32)
            size = encoder.config.vocab_size
            if ids.max() >= size:
                message = f"{name} contains ID {ids.max()}, but the model has only {size} tokens"
                raise RequestError(message, param="input")
            try:
                check_unpadded(self.tokenizer, ids, name)
            except DataError as error:
                raise RequestError(str(error), param="input") from None
        if not 1 <= len(ids) <= encoder.max_len:
            message = f"{name} has {len(ids)} tokens: must have from 1 to {encoder.max_len}"
            raise RequestError(message, param="input", code="context_length_exceeded")
        return ids
