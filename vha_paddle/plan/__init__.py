"""What a run will need and take, from its recipe alone: memory of every rank, communication, time, better layouts.

Letters: D hidden, P physical heads, K key/value heads, N query heads (virtual under VHA), H head dim, R postmix rank,
F feed-forward, V vocabulary, L layers, B microbatch, S sequence, T tokens; degrees t tensor, p pipeline with v chunks
per rank, c context, z sharding, d data; m microbatches.

Parameters, gradients and optimizer state are counted exactly as the model is built. Activations, times and what fits
are estimates: of a GPU with a flash attention kernel. `docs/planning.md` has the formulas.
"""
