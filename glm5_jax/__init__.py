"""GLM-5 in JAX: pre-training, post-training and serving of sparse MoE models.

Dimensions have one letter each, the same in signatures
(`Float[Array, 'B T D']`), in einsum strings and in the suffixes of local names
(`scores_BNTS`):

  B  batch                          E  routed experts
  T  query time                     X  experts per token
  S  key/value time                 F  feed-forward width
  D  model width                    C  rows of one shard (expert capacity)
  N  query heads                    L  layers
  K  key/value heads                V  vocabulary
  G  query heads per kv head        M  tokens, B * T flattened
  H  head width of queries, keys    I  indexer heads
  U  head width of values           J  indexer head width
  P  rotary part of a head          W  selected keys per query
  Q  query latent                   R  key/value latent
  O  plain (not rotary) part of a head

A size-1 axis is written `1`. The package imports nothing by itself; import the
module you need, e.g. `from glm5_jax.models import presets`.
"""

__version__ = '0.1.0'
