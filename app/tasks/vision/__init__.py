"""Images: networks, scores and pictures of them."""
