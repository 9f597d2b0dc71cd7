"""Code of ours that goes into outputs whose stock class has no setting for fewer KV heads.

Nothing here is imported by the rest of the package at start-up: it needs torch and transformers.
"""
