"""From rows to tensors on the device, ahead of need."""
