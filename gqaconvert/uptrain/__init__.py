"""Uptraining: data, budget, trainers. Nothing here is imported at the command line's start-up."""
