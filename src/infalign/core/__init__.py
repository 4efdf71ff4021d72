"""What every room uses and no room owns: errors, settings, storage, HTTP, and what a terminal shows."""
