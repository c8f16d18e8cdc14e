"""What `knittrans bench encoding` measures is whole and adds up; the figures themselves are the benchmark's."""

import jax
import numpy as np
import pytest

from knittrans_jax.benchmarks import encoding_cases, encoding_gradient
from knittrans_jax.benchmarks.encoding import KEEP, NAIVE, RECOMPUTE, Settings, bench
from knittrans_jax.transfer.pack import copies_layout


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int
def test_a_quick_run_has_every_figure_of_a_setting() -> None:
    report = bench(Settings(quick=True), lambda text: None)
    (one,) = report.headline["settings"]
    assert one["name"] == "small pictures, long answers"
    assert (one["n"], one["spread"], one["patch_ratio"], one["micro_batches_of_an_image"]) == (4, True, 0.25, 4)
    assert set(one["seconds"]) == set(one["peak_bytes"]) == {NAIVE, RECOMPUTE, KEEP}  # unique is naive here
    assert one["auto_mode"] == KEEP
    assert one["speedup"] == one["seconds"][NAIVE] / one["seconds"][KEEP]
    assert one["auto_over_best"] == one["seconds"][one["best_mode"]] / one["seconds"][KEEP] <= 1
    # Multiplications of one pass by hand: weights of every patch, token or merged token, and attention's two products.
    decoder = 256 * (3 * 160**2 + 3 * 160 * 512 + 160 * 256) + 2 * 256**2 * 160
    encoder = 128 * (12 * 80**2 + 48 * 80) + 32 * (320**2 + 320 * 160) + 2 * 128**2 * 80
    assert one["flop_bound"] == pytest.approx((decoder + encoder) / (decoder + encoder / 4), abs=0.01)
    assert one["speedup_over_bound"] == pytest.approx(one["speedup"] / one["flop_bound"])
    assert one["peak_bytes"][RECOMPUTE] <= one["peak_bytes"][NAIVE] + one["table_and_cotangent_bytes"]
    assert (
        one["peak_bytes"][RECOMPUTE] < one["peak_bytes"][KEEP] <= one["peak_bytes"][RECOMPUTE] + one["residual_bytes"]
    )
    assert "gradient_error_over_naive" not in report.headline


@pytest.mark.parametrize("workload", encoding_cases.WORKLOADS)
def test_every_picture_fills_an_encoder_row_and_nearly_every_trajectory_its_row(
    workload: encoding_cases.Workload,
) -> None:
    assert encoding_cases.ROW_TOKENS - 1 <= workload.length_tokens <= encoding_cases.ROW_TOKENS
    for micro_batch_rows in (1, 16):
        plan = encoding_cases.make_mini_batch(workload, 16, 4, micro_batch_rows=micro_batch_rows).plan
        assert plan.chunk_micro_batches * micro_batch_rows == 16
        assert {image.offset for image in plan.images} == {0}
        assert len(plan.images) == 4 * workload.turns
        shown = copies_layout(plan, unique=False)
        assert shown.patches == 16 * workload.turns * workload.patches


def test_the_worst_error_is_held_against_naive_training_on_the_same_devices() -> None:
    naive, recompute, keep = (name for name, _, _ in encoding_gradient.MODES)
    errors = {"one": {naive: 2e-7, recompute: 1e-7, keep: 3e-7}, "four": {naive: 4e-7, recompute: 5e-7, keep: 1e-7}}
    np.testing.assert_allclose(encoding_gradient.worst_over_naive(errors), 1.5)
