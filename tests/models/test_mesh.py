"""What a mesh may be, known without JAX, is what the sharding rules can lay out."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.models import abstract_model, preset
from knittrans_jax.models.mesh import MeshError, check_model_divides
from knittrans_jax.models.sharding import ShardingError, param_specs, shard_rules

TINY = preset("tiny")
SHAPES = {name: abstract_model(preset(name))[1] for name in ("tiny", "tiny-text")}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(SHAPES)), st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 24]), st.sampled_from([1, 2, 3, 4, 8])
)
def test_what_is_let_through_can_be_laid_out_and_what_cannot_be_is_refused(name: str, fsdp: int, tensor: int) -> None:
    config, sizes = preset(name), {"data": 5, "fsdp": fsdp, "tensor": tensor}
    try:
        param_specs(SHAPES[name], shard_rules(config), sizes)
        fits = True
    except ShardingError:
        fits = False
    whole_heads = config.text.heads % tensor == 0 and config.text.kv_heads % tensor == 0
    if fits and whole_heads:
        check_model_divides(config, sizes)
    else:
        with pytest.raises(MeshError):
            check_model_divides(config, sizes)


def test_an_error_names_axis_and_size() -> None:
    odd = msgspec.structs.replace(TINY, text=msgspec.structs.replace(TINY.text, vocab_size=47))
    with pytest.raises(MeshError, match=r"fsdp x tensor = 2 does not divide the model's vocabulary rows .* = 47"):
        check_model_divides(odd, {"tensor": 2})
    with pytest.raises(MeshError, match=r"tensor = 4 does not divide the model's kv_heads = 2"):
        check_model_divides(TINY, {"tensor": 4})
