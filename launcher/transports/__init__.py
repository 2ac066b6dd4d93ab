"""Floor: see docs/architecture.md."""
