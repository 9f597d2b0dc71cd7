"""Bytes on disk and on the Hub: headers, indices, shards. Knows nothing of attention."""
