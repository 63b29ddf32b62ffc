"""Data: what a recipe trains on."""
