"""JAX for every test: CPU, no implicit dtype or rank promotion. Multi-device tests run in processes of their own."""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if importlib.util.find_spec("libtpu") is None:
    # Tests compile far more than they compute: without LLVM's optimisation compiling takes half as long.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
