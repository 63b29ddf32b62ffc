"""Graphs: read, checked, kept on disk as CSR, and neighbours drawn."""
