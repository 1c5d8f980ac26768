"""The proof of an export: the unfolded model and the exported one on the same tokens, a layer of each in memory."""
