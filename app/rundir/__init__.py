"""What a run writes into its folder, and who holds that folder."""
