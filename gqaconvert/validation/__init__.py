"""Prove a conversion: that its files are right, that it computes what it should, and how good it still is."""
