"""Units of work with recorded outputs: what is left to do, doing it, and nothing twice. It knows no language model."""
