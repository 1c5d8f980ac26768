"""What `tools/make_recipes.py` writes: every recipe's values with their origin, the cells, the pages about them."""
