"""Which products are computed with fewer bits, and how."""
