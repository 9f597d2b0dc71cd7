"""Helpers of the test-suite: real and hand-made checkpoints, and a loopback model hub."""
