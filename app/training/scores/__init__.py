"""The scores of every task, added up over all ranks."""
