"""Processes and devices: who computes what, how they agree, and how they end."""
