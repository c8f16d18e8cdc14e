"""Attention, apart from the models so that a kernel can take its place. Explicit einsums, softmax in float32.

Shapes: B rows, T queries, C keys, H query heads, G key/value heads (H a multiple of G), K features per head. Scores are
scaled by 1/sqrt(K). A query that may see nothing gets a finite average of the values, never a NaN.
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30
"""Score of a forbidden key: finite, so that a row without any allowed key stays finite; exp() of it is exactly 0."""


def packed_attention(
    q_BxTxHxK: jax.Array, k_BxTxGxK: jax.Array, v_BxTxGxK: jax.Array, segment_ids_BxT: jax.Array, *, causal: bool
) -> jax.Array:
    """Attention within equal segment ids of a packed row, causal in row order or full -> [B, T, H, K] in q's dtype.

    Padding (id 0) sees only padding: finite, and without influence on any real token.
    """
    mask_BxTxT = segment_ids_BxT[:, :, None] == segment_ids_BxT[:, None, :]
    if causal:
        length = segment_ids_BxT.shape[1]
        mask_BxTxT = mask_BxTxT & jnp.tri(length, dtype=bool)[None]
    return _attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, mask_BxTxT)


def cached_attention(
    q_SxLxHxK: jax.Array, k_SxCxGxK: jax.Array, v_SxCxGxK: jax.Array, query_offsets_SxL: jax.Array
) -> jax.Array:
    """Causal attention of new tokens over a cache that already holds their keys -> [S, L, H, K] in q's dtype.

    A query at cache offset p (int32) sees the cache entries 0..p; entries beyond are ignored, whatever finite values they hold.
    """
    capacity = k_SxCxGxK.shape[1]
    mask_SxLxC = jnp.arange(capacity, dtype=jnp.int32)[None, None, :] <= query_offsets_SxL[:, :, None]
    return _attend(q_SxLxHxK, k_SxCxGxK.astype(q_SxLxHxK.dtype), v_SxCxGxK.astype(q_SxLxHxK.dtype), mask_SxLxC)


def _attend(q_BxTxHxK: jax.Array, k_BxCxGxK: jax.Array, v_BxCxGxK: jax.Array, mask_BxTxC: jax.Array) -> jax.Array:
    """Heads of a group are queries of one matrix product: larger products than one per head."""
    batch, queries, heads, features = q_BxTxHxK.shape
    keys, kv_heads = k_BxCxGxK.shape[1:3]
    members = heads // kv_heads
    q = q_BxTxHxK.reshape(batch, queries, kv_heads, members, features).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, members * queries, features)
    k = k_BxCxGxK.transpose(0, 2, 3, 1).reshape(batch * kv_heads, features, keys)
    v = v_BxCxGxK.transpose(0, 2, 1, 3).reshape(batch * kv_heads, keys, features)
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32) * features**-0.5
    scores = scores.reshape(batch, kv_heads, members, queries, keys)
    weights = jax.nn.softmax(jnp.where(mask_BxTxC[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
    attended = jnp.matmul(weights.reshape(batch * kv_heads, members * queries, keys), v)
    attended = attended.reshape(batch, kv_heads, members, queries, features)
    return attended.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, features)
