"""docs/encode-once.md runs as it stands, and its gradients are those of differentiating through every use."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

DOCUMENT = Path(__file__).parents[2] / "docs" / "encode-once.md"


def test_the_documents_code_gives_the_naive_gradient() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    told: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), told)

    def naive(encode: Any) -> Any:
        def whole(params: Any, decoder: Any) -> jax.Array:
            """Every micro-batch encodes the pictures anew."""
            rows = (encode(params, told["pictures"]).reshape(-1, 8)[index] for index in told["micro_batches"])
            return sum((told["loss"](decoder, visual) for visual in rows), start=jax.numpy.zeros(()))

        return jax.grad(whole, argnums=(0, 1))

    def same(got: Any, expected: Any) -> None:
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.linalg.norm(other) > 0
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)

    encoder, decoder = naive(told["encoder"])(told["encoder_params"], told["decoder_params"])
    same(told["encoder_gradient"], encoder)
    same(told["decoder_gradient"], decoder)
    of_nnx = naive(told["nnx_encoder"])(told["nnx_params"], told["decoder_params"])[0]
    same(told["nnx_gradient"], of_nnx)
    same(told["kept_gradient"], of_nnx)
