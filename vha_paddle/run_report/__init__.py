"""Runs compared: their metrics.jsonl and recipes as one page with plots and a table."""
