"""The place of each page of each layer in memory."""
