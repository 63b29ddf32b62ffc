"""Labelled texts, and tokenizers."""
