"""What segmentation needs beside a model: losses, scores, whole images window by window, and pictures."""
