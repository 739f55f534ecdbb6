"""HTTP server with OpenAI's API: `python -m transformer_jax serve`.

`schemas` describes requests. `protocol` converts JSON to validated requests, and results to JSON.
`engine` runs the model in one thread with continuous batching, and `app` defines the routes.
Install the dependencies with `pip install 'transformer_jax[serve]'`.
"""
