"""JAX for every test: CPU, no implicit dtype or rank promotion. Multi-device tests run in processes of their own."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
