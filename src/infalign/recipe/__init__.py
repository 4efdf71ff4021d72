"""A recipe: its settings and keys, reading it, the built-in ones, the first one of `init`, and what it names."""
