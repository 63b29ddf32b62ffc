"""Tokenize texts once, into shards of tokens."""
