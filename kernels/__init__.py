"""Fused attention kernels, one file per backend; imported as `transformer_jax.kernels`.

No backend is built yet: `dot_product_attention(implementation="pallas")` raises
`NotImplementedError` and says so.
"""
