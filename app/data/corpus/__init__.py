"""Texts to model: tokenized once and cut into blocks."""
