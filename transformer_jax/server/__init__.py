"""Serve a model over HTTP, as clients of OpenAI's API ask: `python -m transformer_jax serve`.

`protocol` turns JSON into a checked request and results into JSON, by the schemas of `schemas`;
`engine` runs the model in one thread, by continuous batching; `app` has the addresses. It needs
starlette and uvicorn: `pip install 'transformer_jax[serve]'`.
"""
