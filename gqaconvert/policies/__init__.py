"""KV-cache policies: which entries of a cache stay. ``spec`` and ``scores`` need no torch to be imported."""
