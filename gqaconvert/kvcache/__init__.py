"""What KV caches cost, and what fits: arithmetic on config.json and headers, no torch."""
