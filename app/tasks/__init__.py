"""What recipes build models with."""
