"""Model families: from a request to frames, by way of encode, denoise and decode."""
