"""A virtual head model out of a trained grouped one: key/value heads pooled, maps fitted, everything else copied."""
