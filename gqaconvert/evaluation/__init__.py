"""What a model does under KV-cache policies, and which of its layers bear what: one module a task."""
