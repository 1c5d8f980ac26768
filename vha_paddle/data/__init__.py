"""Text to batches: corpora, tokenizer, indexed datasets, loader."""
