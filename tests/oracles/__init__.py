"""Independent references in float64 numpy, written from the equations; they import nothing of vha_paddle."""
