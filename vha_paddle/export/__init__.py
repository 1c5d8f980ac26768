"""From a checkpoint to a directory that stock Hugging Face clients load."""
