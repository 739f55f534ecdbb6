"""HTTP server with the API of OpenAI: `python -m transformer_jax serve`.

`schemas` describes requests, and `protocol` converts JSON to checked requests and results to JSON.
`engine` runs the model in one thread with continuous batching, and `app` defines the routes. The
server needs starlette and uvicorn: `pip install 'transformer_jax[serve]'`.
"""
