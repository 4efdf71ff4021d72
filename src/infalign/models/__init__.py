"""Model folders and what is computed with them."""
