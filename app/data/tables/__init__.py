"""Tables: found, opened, checked and split."""
